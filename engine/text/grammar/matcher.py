"""Compiled grammars over one vocabulary, and where a generation stands in one.

The only module that knows llguidance. Text that a token hides is not matched: a control token can
follow only where a grammar names it, or where its text is shown.

Example:
    >>> compiler = GrammarCompiler(tokenizer)
    >>> state = compiler.compile('root ::= "yes" | "no"').begin()
    >>> state.allows(tokenizer.find("yes"))
    True
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.constraint import BoolArray
from engine.errors import BadGrammar, BadSchema, GrammarDeadEnd
from engine.text.grammar.gbnf import parse_gbnf
from engine.text.grammar.lark import to_lark

T = TypeVar("T")

# A vocabulary is megabytes of tries, a grammar kilobytes.
_MAX_VOCABS = 4
_MAX_GRAMMARS = 64
_MAX_SHOWN = 200

# Rules of single characters make more items than llguidance's own bounds foresee: a mask over 256k
# tokens looks at a million. These bound a mask to some tens of milliseconds all the same.
_LIMITS = LLParserLimits(
    step_max_items=2_000_000,
    max_items_in_row=5_000,
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=1_000_000,
    max_grammar_size=1_000_000,
    verbose_errors=False,
)


class GrammarTokenizer(Protocol):
    """What grammars need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def eog_tokens(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    def piece(self, token_id: int, *, render_special: bool = False) -> bytes:
        """Returns a token's bytes; a control token's are empty unless `render_special`."""
        ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns the ids of a text."""
        ...


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the latest. Any number of threads may share it."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabs: OrderedDict[frozenset[int], TokenTrie] = OrderedDict()
        self._grammars: OrderedDict[tuple[str, frozenset[int]], CompiledGrammar] = OrderedDict()

    def compile(self, text: str, *, shown: frozenset[int] = frozenset()) -> CompiledGrammar:
        """Compiles a grammar, or returns it from an earlier time.

        Args:
            text: GBNF.
            shown: Special tokens whose text is shown, which the grammar's text may match.

        Raises:
            BadGrammar: It cannot be parsed or is too complex.
        """
        return self._kept(
            self._grammars, (text, shown), _MAX_GRAMMARS, lambda: self._compile(text, shown)
        )

    def compile_schema(self, text: str, *, shown: frozenset[int] = frozenset()) -> CompiledGrammar:
        """Compiles a grammar that was written for a schema, whose faults are then the schema's.

        Raises:
            BadSchema: The whole of it is too complex.
        """
        try:
            return self.compile(text, shown=shown)
        except BadGrammar as error:
            raise BadSchema("#", error.detail) from error

    def _compile(self, text: str, shown: frozenset[int]) -> CompiledGrammar:
        grammar = parse_gbnf(
            text, vocab_size=self._tokenizer.vocab_size, find_token=self._find_token
        )
        lark = to_lark(grammar)
        hidden_text = frozenset(shown) - self._tokenizer.eog_tokens
        trie = self._kept(
            self._vocabs,
            hidden_text,
            _MAX_VOCABS,
            lambda: TokenTrie(self._tokenizer, hidden_text),
        )
        matcher = LLMatcher(trie.tokens, lark, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise BadGrammar(0, _shown(matcher.get_error()))
        return CompiledGrammar(text, matcher, trie)

    def _find_token(self, text: str) -> int | None:
        token_ids = self._tokenizer.encode(text, add_special=False, parse_special=True)
        return token_ids[0] if len(token_ids) == 1 else None

    def _kept(
        self, kept: OrderedDict[T_Key, T], key: T_Key, limit: int, make: Callable[[], T]
    ) -> T:
        with self._lock:
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
        # Made outside the lock: somebody else's slow grammar must not hold up a quick one.
        made = make()
        with self._lock:
            kept[key] = made
            while len(kept) > limit:
                kept.popitem(last=False)
        return made


T_Key = TypeVar("T_Key")


class TokenTrie:
    """A vocabulary as llguidance takes it.

    Behind the tokens come one that stands for every end of a generation, and the 256 single bytes,
    so that a part of a token can be consumed. Tokens without a text are known by their id alone.
    """

    def __init__(self, tokenizer: GrammarTokenizer, shown: frozenset[int]) -> None:
        self.size = tokenizer.vocab_size
        self.ends = np.array(sorted(tokenizer.eog_tokens), np.intp)
        self.eog_tokens = tokenizer.eog_tokens
        self.first_byte = self.size + 1
        self.piece = tokenizer.piece
        pieces: list[bytes] = []
        special: list[int] = []
        for token_id in range(self.size):
            piece = tokenizer.piece(token_id, render_special=token_id in shown)
            if token_id in tokenizer.eog_tokens or not piece or b"\0" in piece:
                special.append(token_id)
                piece = b"<%d>" % token_id
            pieces.append(piece)
        pieces.append(b"<end>")
        special.append(self.size)
        pieces += [bytes([value]) for value in range(256)]
        vocab = _Vocab(pieces, special, end=self.size)
        self.tokens = LLTokenizer(TokenizerWrapper(vocab), n_vocab=len(pieces))


class _Vocab:
    """What `TokenizerWrapper` reads; llguidance is never asked to tokenise."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end

    def __call__(self, text: bytes) -> list[int]:
        del text
        return []


class CompiledGrammar:
    """A grammar that generations can begin from. Implements `engine.constraint.Constraint`."""

    is_lazy = False

    def __init__(self, grammar: str, matcher: LLMatcher, trie: TokenTrie) -> None:
        self.grammar = grammar
        self.trie = trie
        self._matcher = matcher

    def begin(self) -> GrammarState:
        """Returns the state before the first token."""
        return GrammarState(self._matcher.deep_copy(), self.trie)


class GrammarState:
    """One generation's place in a grammar. Implements `engine.constraint.ConstraintState`."""

    is_active = True

    def __init__(self, matcher: LLMatcher, trie: TokenTrie) -> None:
        self._matcher = matcher
        self._trie = trie
        self._mask: BoolArray | None = None

    @property
    def is_complete(self) -> bool:
        """True where the generation may end here."""
        return self._matcher.is_accepting()

    def allows(self, token_id: int) -> bool:
        """Says whether a token may follow."""
        if token_id in self._trie.eog_tokens:
            return self.is_complete
        return self._matcher.validate_tokens([token_id]) == 1

    def mask(self) -> BoolArray:
        """Which tokens may follow; an end of generation only where the text is complete.

        Raises:
            BadGrammar: The state has become too large.
        """
        if self._mask is None:
            allowed = self._allowed()
            allowed[self._trie.ends] = self.is_complete
            allowed.flags.writeable = False
            self._mask = allowed
        return self._mask

    def _allowed(self) -> BoolArray:
        if self._matcher.is_stopped() and self.is_complete:
            return np.zeros(self._trie.size, np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        # The error of a text that cannot go on is no fault of the grammar.
        if not self.is_complete:
            self._refuse_error()
        return np.unpackbits(bits, count=self._trie.size, bitorder="little").view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Moves on by a token; an end of generation changes nothing.

        Raises:
            GrammarDeadEnd: It does not fit.
            BadGrammar: The state has become too large.
        """
        if token_id in self._trie.eog_tokens:
            return
        self.take([token_id], token_id, self._trie.piece(token_id, render_special=True))

    def replay(self, token_id: int, piece: bytes) -> None:
        """Moves on by the end of a token's text, or by all of it where it is shown or not.

        Raises:
            GrammarDeadEnd: It does not fit.
        """
        whole = self._trie.piece(token_id, render_special=True)
        if piece == whole and self._matcher.validate_tokens([token_id]) == 1:
            self.take([token_id], token_id, piece)
        else:
            self.take([self._trie.first_byte + value for value in piece], token_id, piece)

    def copy(self) -> GrammarState:
        """Returns a state that goes its own way."""
        return GrammarState(self._matcher.deep_copy(), self._trie)

    def take(self, entries: Sequence[int], token_id: int, piece: bytes) -> None:
        """Consumes entries of the trie that come from one token."""
        self._mask = None
        if self._matcher.validate_tokens(list(entries)) < len(entries):
            self._refuse_error()
            raise GrammarDeadEnd(piece.decode("utf-8", "replace"), token_id)
        self._matcher.consume_tokens(list(entries))
        self._refuse_error()

    def _refuse_error(self) -> None:
        if self._matcher.is_error():
            raise BadGrammar(0, _shown(self._matcher.get_error()))


def _shown(text: str) -> str:
    """The first line of llguidance's words."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _MAX_SHOWN else line[: _MAX_SHOWN - 1] + "…"
