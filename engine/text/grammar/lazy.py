"""A grammar that holds only once something was generated: a token, a word, a pattern.

Source: llama.cpp `llama_grammar_accept_impl`, `common_sampler_init`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.constraint import BoolArray
from engine.text.grammar.matcher import CompiledGrammar
from engine.text.grammar.trigger_pattern import (
    Pattern,
    PatternError,
    PatternSearch,
    escape,
    parse_pattern,
)


@dataclass(frozen=True)
class Triggers:
    """Any of these switches a grammar on; compiled."""

    tokens: frozenset[int]
    patterns: tuple[Pattern, ...]

    @classmethod
    def of(
        cls,
        *,
        tokens: Sequence[int] = (),
        words: Sequence[str] = (),
        patterns: Sequence[str] = (),
        full_patterns: Sequence[str] = (),
    ) -> Triggers:
        """Compiles triggers.

        Raises:
            PatternError: A pattern is malformed or cannot be matched in linear time.
        """
        sources = [*map(escape, words), *patterns, *map(_anchored, full_patterns)]
        return cls(frozenset(tokens), tuple(map(parse_pattern, sources)))


def _anchored(pattern: str) -> str:
    head = "" if pattern.startswith("^") else "^"
    tail = "" if pattern.endswith("$") else "$"
    return f"{head}{pattern}{tail}" if pattern else "^$"


class LazyGrammar:
    """A compiled grammar behind triggers. Implements `engine.constraint.Constraint`."""

    is_lazy = True

    def __init__(self, compiled: CompiledGrammar, triggers: Triggers) -> None:
        self.grammar = compiled.grammar
        self._compiled = compiled
        self._triggers = triggers

    def begin(self) -> LazyState:
        """Returns the state before the first token."""
        return LazyState(self._compiled, self._triggers)


class LazyState:
    """One generation's place: before the trigger, then in the grammar."""

    def __init__(self, compiled: CompiledGrammar, triggers: Triggers) -> None:
        self._state = compiled.begin()
        self._trie = compiled.trie
        self._triggers = triggers
        self._searches = [PatternSearch(pattern) for pattern in triggers.patterns]
        self._waiting: list[tuple[int, bytes]] = []
        self.is_active = False

    @property
    def is_complete(self) -> bool:
        """True where the generation may end here."""
        return not self.is_active or self._state.is_complete

    def allows(self, token_id: int) -> bool:
        """Says whether a token may follow."""
        return not self.is_active or self._state.allows(token_id)

    def mask(self) -> BoolArray:
        """Which tokens may follow; asked for only while it is active."""
        return self._state.mask()

    def accept(self, token_id: int) -> None:
        """Moves on by a token, which may switch the grammar on.

        Raises:
            GrammarDeadEnd: What came with the trigger does not fit the grammar.
            BadGrammar: The state has become too large.
        """
        if self.is_active:
            self._state.accept(token_id)
            return
        piece = self._trie.piece(token_id, render_special=True)
        if token_id in self._triggers.tokens:
            self._switch_on()
            self._state.replay(token_id, piece)
            return
        self._waiting.append((token_id, piece))
        begins = [search.push(piece) for search in self._searches]
        begin = next((at for at in begins if at is not None), None)
        if begin is not None:
            waiting = self._waiting
            self._switch_on()
            self._replay(waiting, begin)

    def _switch_on(self) -> None:
        self.is_active = True
        self._waiting, self._searches = [], []

    def _replay(self, waiting: Sequence[tuple[int, bytes]], begin: int) -> None:
        """Moves the grammar on by all text from `begin` on."""
        position = 0
        for token_id, piece in waiting:
            kept = piece[max(0, begin - position) :]
            position += len(piece)
            if kept:
                self._state.replay(token_id, kept)


__all__ = ["LazyGrammar", "LazyState", "PatternError", "Triggers"]
