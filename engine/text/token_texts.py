"""The text of every token, decoded when it is asked for. Knows no attribute and no encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from engine.gguf.strings import Strings


class TokenTexts:
    """Token id to text; bytes that are no UTF-8 are lone surrogates in it, as `surrogateescape` has it.

    A token without a text is called `[EMPTY_<id>]`, as in llama.cpp.
    """

    __slots__ = ("spelt",)

    def __init__(self, tokens: Sequence[bytes]) -> None:
        if isinstance(tokens, Strings) and not tokens.has_empty:
            self.spelt = tokens
        else:
            self.spelt = Strings(
                token or b"[EMPTY_%d]" % token_id for token_id, token in enumerate(tokens)
            )

    def __len__(self) -> int:
        return len(self.spelt)

    def __getitem__(self, token_id: int) -> str:
        return self.spelt[token_id].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return map(bytes.decode, self.spelt, repeat("utf-8"), repeat("surrogateescape"))
