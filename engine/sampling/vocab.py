"""What samplers must know of a vocabulary. No tokenizer is imported; any that fits will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class TokenizerLike(Protocol):
    """The part of a tokenizer that a `SamplerVocab` is made from."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def eog_tokens(self) -> frozenset[int]: ...  # noqa: D102

    @property
    def eos_token(self) -> int | None: ...  # noqa: D102

    def encode(  # noqa: D102
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> list[int]: ...

    def piece(self, token_id: int, *, render_special: bool = False) -> bytes: ...  # noqa: D102

    def decode(  # noqa: D102
        self, token_ids: Sequence[int], *, render_special: bool
    ) -> bytes: ...


@dataclass(frozen=True)
class SamplerVocab:
    """The tokens as samplers see them.

    `end_token` is the end of a turn, else of the text. `suppressed_tokens` are never sampled.
    `piece` renders a token inside a text (control tokens as nothing), `word` alone and with
    control tokens shown; `tokenize` adds and parses no special token.
    """

    vocab_size: int
    eog_tokens: frozenset[int]
    piece: Callable[[int], bytes]
    word: Callable[[int], bytes]
    tokenize: Callable[[str], Sequence[int]]
    end_token: int | None = None
    suppressed_tokens: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        tokenizer: TokenizerLike,
        *,
        end_of_turn: int | None = None,
        suppressed_tokens: frozenset[int] = frozenset(),
    ) -> SamplerVocab:
        """Adapts a tokenizer."""
        return cls(
            vocab_size=tokenizer.vocab_size,
            eog_tokens=tokenizer.eog_tokens,
            piece=tokenizer.piece,
            word=lambda token_id: tokenizer.decode([token_id], render_special=True),
            tokenize=lambda text: tokenizer.encode(text, add_special=False, parse_special=False),
            end_token=tokenizer.eos_token if end_of_turn is None else end_of_turn,
            suppressed_tokens=suppressed_tokens,
        )
