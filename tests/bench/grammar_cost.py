"""What grammars cost: eight streams that each follow one, against eight that follow none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.bench.child import Child
from tests.bench.engine_speed import DECODE_STEPS
from tests.bench.figures import Figure
from tests.bench.served_speed import common_rate
from tests.bench.servers import OwnServer
from tests.bench.setting import OWN, Setting

_STREAMS = 8
_CONTEXT_TOKENS = 4096
_SHARE = 0.9
# JSON objects that nothing short ends, so that every stream runs to its last token.
GRAMMAR = r"""
root ::= "[" object ("," object)* "]@@@@@@@@"
object ::= "{\"name\": \"" text "\", \"size\": " number ", \"tags\": [" tag ("," tag)* "]}"
tag ::= "\"" text "\""
text ::= [a-zA-Z0-9 .,!?-]{1,40}
number ::= "-"? [0-9]{1,9} ("." [0-9]{1,4})?
"""


def measure(setting: Setting) -> Iterator[Figure]:
    """Rates of the first model."""
    model = setting.models[0]
    setting.say(f"grammar: {model.name}")
    with (
        Child("tests.bench.clients", []) as clients,
        setting.own_server(model, context_tokens=_CONTEXT_TOKENS) as server,
    ):
        _turn(clients, server)  # compiles the grammar, which is kept
        values = setting.alternate({OWN: lambda: _turn(clients, server)})[OWN]
    name = f"{model.name}: gRPC, {_STREAMS} streams"
    yield Figure("grammar", f"{name}, free", "tokens/s", values["free"])
    yield Figure("grammar", f"{name}, by a grammar", "tokens/s", values["bound"])
    share = values["bound"] / values["free"]
    title = f"{model.name}: by a grammar over free, {_STREAMS} streams"
    yield Figure("grammar", title, "ratio", share, None, _SHARE, False)


def _turn(clients: Child, server: OwnServer) -> dict[str, float]:
    asked: dict[str, Any] = {
        "do": "grpc",
        "address": server.grpc_address,
        "prompts": [[1, 102 + i] for i in range(_STREAMS)],
        "tokens": [DECODE_STEPS] * _STREAMS,
    }
    free, bound = clients.ask(**asked), clients.ask(**asked, grammar=GRAMMAR)
    return {"free": common_rate(free), "bound": common_rate(bound)}
