"""A `Grammar` in the notation that llguidance compiles, with exactly the same language.

llguidance splits text into lexemes, each as long as it can get, before it looks at rules. That
would change a language in which one lexeme may begin another, so rules get lexemes of a single
character: none begins another. A grammar without recursion and tokens needs no rules: the whole of
it becomes one lexeme, whose masks cost a hundredth.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import BadGrammar
from engine.text.grammar.nodes import (
    Chars,
    Choice,
    Grammar,
    Interval,
    Item,
    Literal,
    Ref,
    Repeat,
    TokenIs,
)


def to_lark(grammar: Grammar) -> str:
    """Translates a grammar.

    Raises:
        BadGrammar: No text matches it.
    """
    live = _live_rules(grammar)
    if "root" not in live:
        raise BadGrammar(grammar.lines["root"], "no text matches the rule 'root'")
    order = _reachable(grammar)
    is_regular = _is_regular(grammar, order)
    return _Writer(grammar, live, is_regular=is_regular).write(order)


# Without it only the usual spelling in tokens of a forced text is allowed; llama.cpp takes any.
_HEAD = '%llguidance {"no_forcing": true}'


class _Writer:
    """Writes rules (lower case), or terminals (upper case) for a regular language."""

    def __init__(self, grammar: Grammar, live: set[str], *, is_regular: bool) -> None:
        self._grammar = grammar
        self._live = live
        self._prefix = "R" if is_regular else "r"
        self._names: dict[str, str] = {}
        self._chars: dict[tuple[Interval, ...], str] = {}

    def write(self, order: list[str]) -> str:
        live = [name for name in order if name in self._live]
        self._names = {name: f"{self._prefix}{i}" for i, name in enumerate(live)}
        rules = [f"{self._names[name]}: {self._choice(self._grammar.rules[name])}" for name in live]
        chars = [f"{name}: /{_class(intervals)}/" for intervals, name in self._chars.items()]
        return "\n".join([_HEAD, f"start: {self._names['root']}", *rules, *chars, ""])

    def _choice(self, choice: Choice) -> str:
        live = [items for items in choice.alternatives if _is_live_sequence(items, self._live)]
        return " | ".join(self._sequence(items) for items in live)

    def _sequence(self, items: tuple[Item, ...]) -> str:
        return " ".join(self._item(item) for item in items) or '""'

    def _item(self, item: Item) -> str:
        match item:
            case Chars(intervals):
                return self._char(intervals)
            case Literal(text):
                chars = " ".join(self._char(((ord(char), ord(char)),)) for char in text)
                return f"({chars})"
            case TokenIs(token_id, is_negated):
                return f"<[^{token_id}]>" if is_negated else f"<[{token_id}]>"
            case Ref(name):
                return self._names[name]
            case Choice():
                return f"({self._choice(item)})"
            case Repeat(repeated, low, high):
                if not _is_live(repeated, self._live):
                    return '""'
                return self._item(repeated) + _times(low, high)

    def _char(self, intervals: tuple[Interval, ...]) -> str:
        return self._chars.setdefault(intervals, f"C{len(self._chars)}")


def _times(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return f"{{{low},{high}}}"


def _class(intervals: tuple[Interval, ...]) -> str:
    ranges = (f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in intervals)
    return f"[{''.join(ranges)}]"


def _live_rules(grammar: Grammar) -> set[str]:
    """Returns the rules that some text may match; those that never end count."""
    live = set(grammar.rules)
    while True:
        kept = {
            name
            for name in live
            if any(_is_live_sequence(items, live) for items in grammar.rules[name].alternatives)
        }
        if kept == live:
            return live
        live = kept


def _is_live_sequence(items: tuple[Item, ...], live: set[str]) -> bool:
    return all(_is_live(item, live) for item in items)


def _is_live(item: Item, live: set[str]) -> bool:
    match item:
        case Chars(intervals):
            return bool(intervals)
        case Ref(name):
            return name in live
        case Repeat(repeated, low, _):
            return low == 0 or _is_live(repeated, live)
        case Choice(alternatives):
            return any(_is_live_sequence(items, live) for items in alternatives)
        case _:
            return True


def _reachable(grammar: Grammar) -> list[str]:
    order = ["root"]
    seen = {"root"}
    for name in order:
        for item in _parts(grammar.rules[name]):
            if isinstance(item, Ref) and item.name not in seen:
                seen.add(item.name)
                order.append(item.name)
    return order


def _is_regular(grammar: Grammar, names: list[str]) -> bool:
    """Says whether no rule can come back to itself and no token is named."""
    uses: dict[str, set[str]] = {}
    for name in names:
        parts = list(_parts(grammar.rules[name]))
        if any(isinstance(part, TokenIs) for part in parts):
            return False
        uses[name] = {part.name for part in parts if isinstance(part, Ref)}
    # Rules whose uses are all resolved fall away; what is left is on a cycle or leads to one.
    left = set(uses)
    while left:
        resolved = {name for name in left if not uses[name] & left}
        if not resolved:
            return False
        left -= resolved
    return True


def _parts(item: Item) -> Iterator[Item]:
    yield item
    match item:
        case Repeat(repeated, _, _):
            yield from _parts(repeated)
        case Choice(alternatives):
            for items in alternatives:
                for part in items:
                    yield from _parts(part)
        case _:
            return
