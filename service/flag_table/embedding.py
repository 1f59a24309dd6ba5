"""Vectors instead of text."""

from __future__ import annotations

from service.flag_values import SWITCH, choice, integer
from service.flags import Flag, Scope

_GROUP = "Embeddings"

EMBEDDING = (
    Flag(
        ("--embedding", "--embeddings"),
        SWITCH,
        "embeds",
        "serves vectors of texts beside completions",
        default=False,
        variable="LLAMA_ARG_EMBEDDINGS",
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
    Flag(
        ("--pooling",),
        choice("none", "mean", "cls", "last", "rank"),
        "pooling",
        "how the states of a text's tokens become its vector (default: the model's own, else none)",
        variable="LLAMA_ARG_POOLING",
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
    Flag(
        ("--rerank", "--reranking"),
        SWITCH,
        "reranks",
        "serves how relevant documents are to a query: as --embedding --pooling rank",
        default=False,
        variable="LLAMA_ARG_RERANKING",
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
    Flag(
        ("--embd-normalize",),
        integer(-1),
        "embd_norm",
        "norm of pooled vectors: -1 none, 0 greatest magnitude 32760, 2 Euclidean, p the p-norm",
        default=2,
        scope=Scope.SERVICE,
        group=_GROUP,
    ),
)
