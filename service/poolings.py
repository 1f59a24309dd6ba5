"""How vectors are pooled, on the wire and in the engine."""

from __future__ import annotations

from kvarts.v1 import embedding_pb2

from engine.requests import Pooling

POOLINGS = {
    embedding_pb2.POOLING_NONE: Pooling.NONE,
    embedding_pb2.POOLING_MEAN: Pooling.MEAN,
    embedding_pb2.POOLING_CLS: Pooling.CLS,
    embedding_pb2.POOLING_LAST: Pooling.LAST,
    embedding_pb2.POOLING_RANK: Pooling.RANK,
}
WIRE_POOLINGS = {pooling: wire for wire, pooling in POOLINGS.items()}
