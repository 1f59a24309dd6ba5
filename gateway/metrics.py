"""GET /metrics: the peer's metrics under its names, the gateway's own, then all of the service's.

The peer's rates cover the time since the scrape before, so the last counters are kept per gateway.
The service's text is handed on as it stands: a figure means the same at both doors. While the
service sleeps nothing but scrapes and probes happens, and scrapes that show nothing else than
themselves are of no use, so all but the peer's figures stay as they were told last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvarts.v1 import model_pb2
from starlette.responses import Response

from gateway.errors import not_supported
from gateway.exchange import Exchange, Handler
from gateway.reload import Reloads
from gateway.replies import Replies
from gateway.service import answer
from gateway.timings import microseconds

_PEER = "llamacpp:"
_CONTENT_TYPE = "text/plain; version=0.0.4"


@dataclass(frozen=True)
class Metric:
    """One metric of one value."""

    name: str
    kind: str
    help: str
    value: float
    labels: str = ""


def make_handler() -> Handler:
    """The route's handler, with its own memory of the scrape before."""
    before = model_pb2.Counters()
    told = ""

    async def metrics(exchange: Exchange) -> Response:
        nonlocal before, told
        if not exchange.options.has_metrics:
            raise not_supported(
                "This server does not support metrics endpoint. Start it with `--metrics`"
            )
        backend = exchange.backend
        stub, key = backend.service.model, backend.metadata
        asked = stub.GetServerInfo(model_pb2.GetServerInfoRequest(), metadata=key)
        info = (await answer(asked)).info
        if not (info.sleeping and told):
            own = await answer(stub.GetMetrics(model_pb2.GetMetricsRequest(), metadata=key))
            told = render(http_metrics(exchange.replies, exchange.reloads)) + own.text
        text = render(peer_metrics(info, before)) + told
        before = info.counters
        start_us = info.start_time.seconds * 1_000_000 + info.start_time.nanos // 1000
        headers = {"content-type": _CONTENT_TYPE, "process-start-time-unix": str(start_us)}
        return Response(text, headers=headers)

    return metrics


def peer_metrics(info: model_pb2.ServerInfo, before: model_pb2.Counters) -> list[Metric]:
    """llama-server's metrics, in its order."""
    now = info.counters
    zero = 0.0
    counters = (
        (
            "prompt_tokens_total",
            "Number of prompt tokens processed, excluding cached tokens",
            now.prompt_tokens_evaluated,
        ),
        (
            "prompt_tokens_cached_total",
            "Number of prompt tokens reused from the cache",
            now.prompt_tokens_cached,
        ),
        (
            "prompt_seconds_total",
            "Total time spent processing prompts",
            microseconds(now.prefill_duration) / 1e6,
        ),
        (
            "tokens_predicted_total",
            "Number of generation tokens processed",
            now.generated_tokens,
        ),
        (
            "tokens_predicted_seconds_total",
            "Total time spent generating tokens",
            microseconds(now.decode_duration) / 1e6,
        ),
        (
            "n_decode_total",
            "Total number of llama_decode() calls, excluding speculative decoding and multimodal "
            "decoding",
            now.steps,
        ),
        (
            "n_tokens_max",
            "Largest observed sequence length (prompt + generation)",
            now.max_held_tokens,
        ),
        (
            "spec_decode_num_draft_tokens_total",
            "Speculative: Total draft tokens generated",
            zero,
        ),
        (
            "spec_decode_num_accepted_tokens_total",
            "Speculative: Total draft tokens accepted by the target model",
            zero,
        ),
        (
            "spec_decode_num_drafts_total",
            "Speculative: Total speculative decoding verification steps",
            zero,
        ),
    )
    gauges = (
        (
            "prompt_tokens_seconds",
            "Average prompt throughput in tokens/s",
            _prompt_rate(now, before),
        ),
        (
            "predicted_tokens_seconds",
            "Average generation throughput in tokens/s",
            _decode_rate(now, before),
        ),
        (
            "requests_processing",
            "Number of requests processing",
            info.gauges.running_requests,
        ),
        ("requests_deferred", "Number of requests deferred", info.gauges.queued_requests),
        (
            "n_busy_slots_per_decode",
            "Average number of busy slots per llama_decode() call",
            now.busy_slot_steps / max(now.steps, 1),
        ),
    )
    return [
        Metric(f"llamacpp:{name}", "counter", text, value) for name, text, value in counters
    ] + [Metric(f"llamacpp:{name}", "gauge", text, value) for name, text, value in gauges]


def http_metrics(replies: Replies, reloads: Reloads) -> list[Metric]:
    """How often each route answered with each status, and what became of changed files."""
    answered = [
        Metric(
            "kvarts_http_requests_total",
            "counter",
            "HTTP requests ended; 499 is a client that went away.",
            count,
            labels=f'{{route="{route}",code="{code}"}}',
        )
        for (route, code), count in replies.counts()
    ]
    return answered + [
        Metric(
            "kvarts_http_config_reloads_total",
            "counter",
            "Files of the gateway read again.",
            count,
            labels=f'{{what="{what}",result="{result}"}}',
        )
        for (what, result), count in reloads.counts()
    ]


def render(metrics: Iterable[Metric]) -> str:
    """Writes metrics as Prometheus text, the peer's with 6 significant digits as it does."""
    lines: list[str] = []
    described = ""
    for metric in metrics:
        if metric.name != described:
            described = metric.name
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
        digits = ".6g" if metric.name.startswith(_PEER) else ".17g"
        lines.append(f"{metric.name}{metric.labels} {metric.value:{digits}}")
    return "\n".join(lines) + "\n"


def _prompt_rate(now: model_pb2.Counters, before: model_pb2.Counters) -> float:
    elapsed_us = microseconds(now.prefill_duration) - microseconds(before.prefill_duration)
    tokens = now.prompt_tokens_evaluated - before.prompt_tokens_evaluated
    return tokens / elapsed_us * 1e6 if elapsed_us > 0 else 0.0


def _decode_rate(now: model_pb2.Counters, before: model_pb2.Counters) -> float:
    """The first token of a request comes with its prompt and is not counted."""
    elapsed_us = microseconds(now.decode_duration) - microseconds(before.decode_duration)
    tokens = now.generated_tokens - before.generated_tokens
    requests = now.requests_finished - before.requests_finished
    return max(0, tokens - requests) / elapsed_us * 1e6 if elapsed_us > 0 else 0.0
