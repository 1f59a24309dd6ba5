"""What the gRPC server bounds: messages, streams of a connection, calls that nobody has taken yet."""

from __future__ import annotations

from collections.abc import Sequence

from engine.types import EngineConfig

MAX_REQUEST_BYTES = 16 << 20
# Streams of one connection beyond slots and queue: lists, health, metrics.
_SPARE_STREAMS = 256


def channel_options(config: EngineConfig) -> Sequence[tuple[str, int]]:
    """The options of a server with so many slots and places in the queue."""
    streams = config.num_slots + config.queue_requests + _SPARE_STREAMS
    return (
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        # Below slots + queue a gateway's calls, all on one connection, would wait unseen.
        ("grpc.max_concurrent_streams", streams),
        # Calls of one method that no handler has taken yet; those that were reset at once, by a
        # client that floods, lie there too, at 10 KiB each.
        ("grpc.server.max_pending_requests", streams),
        ("grpc.server.max_pending_requests_hard_limit", 2 * streams),
        # Without this a second server binds the same port and silently takes half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    )
