"""Every flag and variable that Kvarts reads, one row each, by topic.

Source: llama.cpp, common/arg.cpp, for names, variables, defaults and ranges of the peer's flags.
"""

from __future__ import annotations

from service.flag_table.adapters import ADAPTERS
from service.flag_table.context import CONTEXT
from service.flag_table.embedding import EMBEDDING
from service.flag_table.ignored import IGNORED
from service.flag_table.model import MODEL
from service.flag_table.reasoning import REASONING
from service.flag_table.refused import REFUSED
from service.flag_table.request import REQUEST
from service.flag_table.sampling import SAMPLING
from service.flag_table.serving import ACCESS, CHECK, GRPC, HTTP, LOGS, TRACES, VARIABLES

FLAGS = (
    *MODEL,
    *CONTEXT,
    *ADAPTERS,
    *EMBEDDING,
    *REQUEST,
    *SAMPLING,
    *GRPC,
    *HTTP,
    *REASONING,
    *ACCESS,
    *CHECK,
    *LOGS,
    *TRACES,
    *IGNORED,
    *REFUSED,
    *VARIABLES,
)

__all__ = ["FLAGS"]
