"""A grammar that holds only once something was generated: a token, a word, a pattern.

Source: llama.cpp `llama_grammar_accept_impl`, `common_sampler_init`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from engine.constraint import BoolArray
from engine.errors import GrammarDeadEnd
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

    def copy(self) -> LazyState:
        """Returns a state that goes its own way; asked for only while it waits."""
        twin = copy(self)
        twin._state = self._state.copy()
        twin._searches = [copy(search) for search in self._searches]
        twin._waiting = list(self._waiting)
        return twin

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


class CallGrammar:
    """The grammar of tool calls behind a mark. Implements `engine.constraint.Constraint`.

    Unlike a client's own lazy grammar it looks ahead: a token that holds the mark and something that
    no call begins with is not allowed. `is_required`: the text may not end before a call.
    """

    is_lazy = True

    def __init__(self, compiled: CompiledGrammar, triggers: Triggers, *, is_required: bool) -> None:
        self.grammar = compiled.grammar
        self._compiled = compiled
        self._triggers = triggers
        self._is_required = is_required

    def begin(self) -> CallState:
        """Returns the state before the first token."""
        return CallState(self._compiled, self._triggers, is_required=self._is_required)


class CallState:
    """One generation's place: in the text before the calls, or in the calls."""

    is_active = True

    def __init__(self, compiled: CompiledGrammar, triggers: Triggers, *, is_required: bool) -> None:
        self._trie = compiled.trie
        self._lazy = LazyState(compiled, triggers)
        self._is_required = is_required
        self._refused: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """True where the generation may end here."""
        if self._lazy.is_active:
            return self._lazy.is_complete
        return not self._is_required

    def allows(self, token_id: int) -> bool:
        """Says whether a token may follow."""
        if self._lazy.is_active:
            return self._lazy.allows(token_id)
        if token_id in self._trie.eog_tokens:
            return not self._is_required
        ahead = self._lazy.copy()
        try:
            ahead.accept(token_id)
        except GrammarDeadEnd:
            self._refused.add(token_id)
            return False
        return True

    def mask(self) -> BoolArray:
        """Which tokens may follow; before the calls all but those that were refused."""
        if self._lazy.is_active:
            return self._lazy.mask()
        mask = np.ones(self._trie.size, np.bool_)
        mask[self._trie.ends] = not self._is_required
        mask[sorted(self._refused)] = False
        return mask

    def accept(self, token_id: int) -> None:
        """Moves on by a token.

        Raises:
            GrammarDeadEnd: It does not fit.
            BadGrammar: The state has become too large.
        """
        self._refused.clear()
        self._lazy.accept(token_id)


__all__ = ["CallGrammar", "LazyGrammar", "LazyState", "PatternError", "Triggers"]
