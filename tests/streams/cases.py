"""Random requests: dialects, samplers, stops, text of several bytes, tools and grammars.

A case is a function of its seed alone. Stops are chosen in a second step, from what the same request
says without them, so that they are met: within a token, across tokens, and at the very end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Json = dict[str, Any]

COMPLETION = "/completion"
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

_WORDS = (
    "the",
    "day",
    "she said",
    "a little",
    "big",
    "\u00e9t\u00e9",
    "\u20ac",
    "\U0001f600",
    "\n",
    "",
)
# What the byte tokens of a vocabulary come together to, sometimes whole and sometimes not.
_MANY_BYTES = "\u00e9\u20ac\u4e2d\U0001f600"
_GRAMMARS = (
    "root ::= [\u00e0-\u00ff\u20ac\U0001f600 ]{3,16}",
    'root ::= ("\u4e2d\u6587" | "\u20ac" | "day ")+ "."',
    'root ::= "{" [a-z]{1,6} (", " [0-9]{1,3}){2,5} "}"',
    'root ::= " the" (" day" | " was"){1,4} "\\n"',
)
_SCHEMAS: tuple[Json, ...] = (
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}}, "required": ["a"]},
    {
        "type": "array",
        "items": {"enum": ["\u00e9", "\u20ac\u20ac", 7]},
        "minItems": 2,
        "maxItems": 5,
    },
    {"type": "integer", "minimum": -9999, "maximum": 9999},
)
_PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "u": {"enum": ["C", "\u00b0K"]},
    },
    "required": ["u"],
}


@dataclass(frozen=True)
class Case:
    """A request without `stream`; `stop_key` is what its dialect calls its stops."""

    seed: int
    route: str
    body: Json
    stop_key: str = "stop"

    def streamed(self) -> Json:
        """The body of the same request with its answer as a stream."""
        return {**self.body, "stream": True}

    def with_stops(self, said: str) -> Case:
        """The same with one to three stops, most of them pieces of `said`."""
        draw = random.Random(-self.seed)
        stops = [_piece(draw, said) for _ in range(draw.randint(1, 3))]
        return replace(self, body={**self.body, self.stop_key: stops})


def draw_case(seed: int, call_token: int) -> Case:
    """Draws one. `call_token` opens a call of a tool in the served template."""
    draw = random.Random(seed)
    kind = draw.choice(
        (_completion, _completion, _text, _chat, _chat, _chat, _responses, _messages)
    )
    return kind(draw, seed, call_token)


def wants_stops(case: Case) -> bool:
    """Whether this one is to have stops; forced text has an end of its own."""
    return random.Random(case.seed + 1_000_003).random() < 0.6


def _piece(draw: random.Random, said: str) -> str:
    if not said or draw.random() < 0.2:
        return draw.choice(("the", " day", "\u00e9", "\u20ac", "zz", "\n\n"))
    start = draw.randrange(len(said))
    return said[start : start + draw.randint(1, 6)]


def _prompt(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(1, 4)))


def _sampling(draw: random.Random, seed: int) -> Json:
    """What all dialects but Anthropic's take beside their own members."""
    body: Json = {
        "temperature": draw.choice((0, 0.8, 1.5)),
        "seed": seed,
        # A stream and an answer are compared, not a first and a second look at a cache.
        "cache_prompt": False,
    }
    if draw.random() < 0.5:
        body["logit_bias"] = {_MANY_BYTES: draw.choice((2, 5, 9))}
    if draw.random() < 0.3:
        body["ignore_eos"] = True
    if draw.random() < 0.2:
        body["repeat_penalty"] = 1.3
    return body


def _form(draw: random.Random) -> Json:
    """A grammar or a schema, or nothing."""
    match draw.choice(("free", "free", "grammar", "schema")):
        case "grammar":
            return {"grammar": draw.choice(_GRAMMARS)}
        case "schema":
            return {"json_schema": draw.choice(_SCHEMAS)}
        case _:
            return {}


def _completion(draw: random.Random, seed: int, call_token: int) -> Case:
    del call_token
    body = _sampling(draw, seed) | _form(draw)
    body |= {"prompt": _prompt(draw), "n_predict": draw.randint(1, 40)}
    if draw.random() < 0.2:
        body["n"] = 2
    if draw.random() < 0.2:
        body["prompt"] = [_prompt(draw), _prompt(draw)]
    if draw.random() < 0.3:
        body["n_probs"] = 3
    return Case(seed, COMPLETION, body)


def _text(draw: random.Random, seed: int, call_token: int) -> Case:
    case = _completion(draw, seed, call_token)
    limit = case.body.pop("n_predict")
    return replace(case, route=TEXT, body={**case.body, "max_tokens": limit})


def _messages_of(draw: random.Random) -> list[Json]:
    turns = [{"role": "user", "content": _prompt(draw)}]
    if draw.random() < 0.3:
        turns += [{"role": "assistant", "content": _prompt(draw)}, turns[0]]
    return turns


def _tools(draw: random.Random, shape: Callable[[str], Json]) -> Json:
    return {"tools": [shape(name) for name in draw.sample(("warmth", "count"), draw.randint(1, 2))]}


def _pushed(body: Json, call_token: int) -> None:
    """Makes a model without training begin a call."""
    body["logit_bias"] = {**body.get("logit_bias", {}), str(call_token): 100}


def _chat(draw: random.Random, seed: int, call_token: int) -> Case:
    body = _sampling(draw, seed) | {"messages": _messages_of(draw)}
    body["max_tokens"] = draw.randint(1, 48)
    match draw.choice(("free", "form", "tools", "tools", "shape")):
        case "form":
            body |= _form(draw)
        case "shape":
            named = {"name": "it", "schema": draw.choice(_SCHEMAS)}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        case "tools":
            body |= _tools(
                draw,
                lambda name: {
                    "type": "function",
                    "function": {"name": name, "parameters": _PARAMETERS},
                },
            )
            body["tool_choice"] = draw.choice(("auto", "required"))
            body["parallel_tool_calls"] = draw.random() < 0.5
            body["max_tokens"] = draw.choice((12, 40, 160))
            if draw.random() < 0.8:
                _pushed(body, call_token)
        case _:
            pass
    if draw.random() < 0.15:
        body["n"] = 2
    return Case(seed, CHAT, body)


def _responses(draw: random.Random, seed: int, call_token: int) -> Case:
    body = _sampling(draw, seed) | {"input": _prompt(draw) or "a"}
    body["max_output_tokens"] = draw.randint(1, 40)
    if draw.random() < 0.5:
        body |= _tools(
            draw, lambda name: {"type": "function", "name": name, "parameters": _PARAMETERS}
        )
        body["max_output_tokens"] = draw.choice((12, 160))
        _pushed(body, call_token)
    return Case(seed, RESPONSES, body)


def _messages(draw: random.Random, seed: int, call_token: int) -> Case:
    """Anthropic's: nothing but these members reaches the sampler, so its answers are greedy."""
    del call_token
    body: Json = {"messages": _messages_of(draw), "max_tokens": draw.randint(1, 40)}
    body |= {"temperature": 0, "system": json.dumps(seed)}
    if draw.random() < 0.6:
        body |= _tools(draw, lambda name: {"name": name, "input_schema": _PARAMETERS})
        body["tool_choice"] = {"type": draw.choice(("auto", "any"))}
        body["max_tokens"] = draw.choice((12, 40, 160))
    return Case(seed, MESSAGES, body, stop_key="stop_sequences")
