"""Token texts to ids in twelve bytes a token, where a dict takes about a hundred. Knows no encoder."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping

import numpy as np

from engine.text.token_texts import TokenTexts


class TokenIds(Mapping[str, int]):
    """The id of each text, the lowest where several tokens have the same; found in microseconds.

    Who looks up much makes a dict of the texts. Iterates by rising id.
    """

    __slots__ = ("_hashes", "_ids", "_num_distinct", "_texts")

    def __init__(self, texts: TokenTexts) -> None:
        hashes = np.fromiter(map(hash, texts.spelt), np.int64, len(texts))
        order = hashes.argsort(kind="stable")
        ordered = hashes[order]
        self._texts = texts
        self._hashes = array("q", ordered.tobytes())
        self._ids = array("I", order.astype(np.uint32).tobytes())
        self._num_distinct = len(texts) - self._num_repeats(ordered)

    def __len__(self) -> int:
        return self._num_distinct

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self._texts))

    def __getitem__(self, text: str) -> int:
        try:
            key = hash(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:  # a surrogate that no byte is decoded to
            raise KeyError(text) from None
        place = bisect_left(self._hashes, key)
        while place < len(self._hashes) and self._hashes[place] == key:
            # Compared as texts: two of them may be encoded alike, "é" and its bytes as surrogates.
            if self._texts[self._ids[place]] == text:
                return self._ids[place]
            place += 1
        raise KeyError(text)

    def _num_repeats(self, ordered: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
        """How many tokens have the text of one before them; only equal hashes are looked at."""
        alike = np.flatnonzero(ordered[1:] == ordered[:-1])
        places = sorted({*alike.tolist(), *(alike + 1).tolist()})
        return len(places) - len({self._texts.spelt[self._ids[place]] for place in places})
