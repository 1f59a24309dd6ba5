"""What an attacker asks grammars for is compiled in little time, or refused at a path or line.

Time is what the process has used of a processor, so that a busy machine changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import BadGrammar, BadSchema
from engine.text.chat_families import FAMILIES
from engine.text.chat_format import THINK
from engine.text.chat_grammar import answer_grammar, call_grammar
from engine.text.grammar.matcher import GrammarCompiler
from engine.text.grammar.schema_gbnf import schema_to_gbnf
from engine.text.tagged_grammar import CallableTool
from tests.unit.engine.text.grammar.hostile_schemas import regex, schema
from tests.unit.engine.text.grammar.spelling import SpellingTokenizer

_LIMIT_S = 2.0
_CALLS = [family.tools for family in FAMILIES if family.tools is not None]


def _as_grammar(asked: Any, seed: int) -> str:
    return schema_to_gbnf(asked, is_strict=seed % 4 == 0).grammar


def _as_answer(asked: Any, seed: int) -> str:
    return answer_grammar(asked, THINK, is_open=bool(seed % 2), is_strict=False)


def _as_tool(asked: Any, seed: int) -> str:
    tools = [CallableTool("f", asked), CallableTool("g", {"type": "object"})]
    return call_grammar(_CALLS[seed % len(_CALLS)], tools, parallel=bool(seed % 2))


DOORS: dict[str, Callable[[Any, int], str]] = {
    "grammar": _as_grammar,
    "response_format": _as_answer,
    "tools": _as_tool,
}


def _outcome(compiler: GrammarCompiler, door: str, asked: Any, seed: int) -> str:
    """Compiles what was asked for, and the first step of its mask; returns "" or where it is bad."""
    begun = time.process_time()
    where = detail = ""
    try:
        compiler.compile_schema(DOORS[door](asked, seed)).begin().mask()
    except BadSchema as error:
        where, detail = error.path, error.detail
    used_s = time.process_time() - begun
    assert used_s <= _LIMIT_S, f"{used_s:.2f} s for {seed} as {door}"
    assert "there is no rule" not in detail, (seed, door)
    # A tool's schema is told by the tool's name.
    assert not where or where.removeprefix("f").startswith("#"), (seed, door, where)
    return "refused" if where else "compiled"


def _asked(kind: str, seed: int) -> Any:
    if kind == "schemas":
        return schema(seed)
    pattern = {"type": "string", "pattern": regex(seed)}
    return pattern if seed % 2 else {"type": "object", "properties": {"a": pattern}}


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("schemas", 60),
        ("bombs", 30),
        pytest.param("schemas", 2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param("bombs", 500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_each_is_compiled_in_time_or_refused_at_a_path(kind: str, count: int) -> None:
    compiler = GrammarCompiler(SpellingTokenizer())
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(count):
        for door in DOORS:
            outcomes[door, _outcome(compiler, door, _asked(kind, seed), seed)] += 1
    print(dict(outcomes))
    # What is drawn meets both ends at each door.
    assert len(outcomes) == 2 * len(DOORS), outcomes


_TIMES = ("{999}", "{0,999}", "*", "+", "?")


@pytest.mark.parametrize("count", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_a_bomb_in_gbnf_is_compiled_in_time_or_refused_at_a_line(count: int) -> None:
    compiler = GrammarCompiler(SpellingTokenizer())
    outcomes: Counter[str] = Counter()
    for seed in range(count):
        body = '"a"'
        for level in range(1 + seed % 7):
            body = f"({body} | [b-z]){_TIMES[(seed + level * seed) % len(_TIMES)]}"
        text = f"root ::= {' '.join([body] * (1 + seed % 40))}"
        begun = time.process_time()
        try:
            compiler.compile(text).begin().mask()
        except BadGrammar as error:
            outcomes["a line" if error.line else "the whole"] += 1
        assert time.process_time() - begun <= _LIMIT_S, text[:200]
    print(dict(outcomes))
    assert 0 < outcomes.total() < count
