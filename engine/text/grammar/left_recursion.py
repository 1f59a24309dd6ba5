"""Refuses rules that begin with themselves, which llama.cpp's pushdown could not leave.

Source: llama.cpp `llama_grammar_detect_left_recursion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.errors import BadGrammar
from engine.text.grammar.nodes import Choice, Grammar, Item, Ref, Repeat


def refuse_left_recursion(grammar: Grammar) -> None:
    """Checks a grammar.

    Raises:
        BadGrammar: A rule can begin with itself; names it and its line.
    """
    nullable = _nullable_rules(grammar.rules)
    first = {name: frozenset(_first_refs(rule, nullable)) for name, rule in grammar.rules.items()}
    done: set[str] = set()
    for name in grammar.rules:
        found = _cycle_from(name, first, done)
        if found is not None:
            raise BadGrammar(grammar.lines[found], f"rule {found!r} begins with itself")


def _cycle_from(start: str, first: Mapping[str, frozenset[str]], done: set[str]) -> str | None:
    """Returns a rule on a cycle; depth first without recursion, since chains may be long."""
    on_path: set[str] = set()
    path: list[tuple[str, Iterator[str]]] = []

    def enter(name: str) -> None:
        on_path.add(name)
        path.append((name, iter(sorted(first[name]))))

    if start not in done:
        enter(start)
    while path:
        name, rest = path[-1]
        following = next(rest, None)
        if following is None:
            path.pop()
            on_path.discard(name)
            done.add(name)
        elif following in on_path:
            return following
        elif following not in done:
            enter(following)
    return None


def _nullable_rules(rules: Mapping[str, Choice]) -> set[str]:
    """Returns the rules that match the empty text."""
    nullable: set[str] = set()
    grows = True
    while grows:
        found = {
            name
            for name, rule in rules.items()
            if name not in nullable and _is_nullable(rule, nullable)
        }
        nullable |= found
        grows = bool(found)
    return nullable


def _is_nullable(item: Item, nullable: set[str]) -> bool:
    match item:
        case Ref(name):
            return name in nullable
        case Repeat(repeated, low, _):
            return low == 0 or _is_nullable(repeated, nullable)
        case Choice(alternatives):
            return any(all(_is_nullable(i, nullable) for i in items) for items in alternatives)
        case _:
            return False


def _first_refs(item: Item, nullable: set[str]) -> Iterator[str]:
    """Yields the rules that can stand at the beginning of an item."""
    match item:
        case Ref(name):
            yield name
        case Repeat(repeated, _, _):
            yield from _first_refs(repeated, nullable)
        case Choice(alternatives):
            for items in alternatives:
                for part in items:
                    yield from _first_refs(part, nullable)
                    if not _is_nullable(part, nullable):
                        break
        case _:
            return
