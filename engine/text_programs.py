"""The programs of an encoder: several whole texts at a time, by the number of their tokens.

Nothing that a text leaves behind is kept, so they know no pool and are the same whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.model.encoder import TextInputs, encode
from engine.model.spec import ModelSpec
from engine.model.text_attention import TEXT_BLOCK, TextBlocks
from engine.model.weights import Weights
from engine.step import FloatArray, IntArray, SequenceWork

_BUCKETS = (32, 128, 512, 2048)


@dataclass(frozen=True)
class PackedTexts:
    """How at most `max_texts` texts of `tokens` tokens in all lie in one array of integers."""

    tokens: int
    max_texts: int

    @property
    def blocks(self) -> int:
        """Blocks of the attention: each text may fill its last one in part."""
        return -(-self.tokens // TEXT_BLOCK) + self.max_texts

    @property
    def length(self) -> int:
        """Integers in all."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Of tokens, positions, places, sources, first blocks, counts of blocks."""
        return (self.tokens,) * 3 + (self.blocks * TEXT_BLOCK, self.blocks, self.blocks)

    def pack(self, texts: Sequence[Sequence[int]]) -> IntArray:
        """Returns the array of some texts; `unpack` is its inverse."""
        tokens, positions, places = (np.zeros(self.tokens, np.int32) for _ in range(3))
        sources = np.full(self.blocks * TEXT_BLOCK, self.tokens, np.int32)
        first = np.arange(self.blocks, dtype=np.int32)
        count = np.zeros(self.blocks, np.int32)
        start = block = 0
        for text in texts:
            within, num_blocks = np.arange(len(text)), -(-len(text) // TEXT_BLOCK)
            span, own = slice(start, start + len(text)), slice(block, block + num_blocks)
            tokens[span], positions[span] = text, within
            places[span] = block * TEXT_BLOCK + within
            sources[places[span]] = start + within
            first[own], count[own] = block, num_blocks
            start, block = start + len(text), block + num_blocks
        return np.concatenate([tokens, positions, places, sources, first, count])

    def unpack(self, packed: jax.Array) -> TextInputs:
        """Takes the array apart, inside a program."""
        parts = jnp.split(packed, np.cumsum(self._sizes)[:-1])
        tokens, positions, places, sources, first, count = parts
        blocks = TextBlocks(sources.reshape(-1, TEXT_BLOCK), places, first, count)
        return TextInputs(tokens, positions, blocks)


class TextPrograms:
    """What an encoder's texts run on, compiled before the first of them."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, *, max_texts: int, max_tokens: int
    ) -> None:
        """Compiles nothing yet. `max_tokens` bounds the tokens of all texts of a step."""
        self.max_texts = max_texts
        self._spec = spec
        self._weights = weights
        sizes = [size for size in _BUCKETS if size < max_tokens] + [max_tokens]
        self._layouts = [PackedTexts(size, max_texts) for size in sizes]
        self._programs: dict[int, jax.stages.Compiled] = {}

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program and runs the smallest once; see `PoolPrograms.compile`."""
        for done, layout in enumerate(self._layouts, 1):
            packed = jax.ShapeDtypeStruct((layout.length,), jnp.int32)
            jitted = jax.jit(partial(_read, self._spec, layout))
            self._programs[layout.tokens] = jitted.lower(self._weights, packed).compile()
            if progress:
                progress(done, len(self._layouts))
        smallest = self._layouts[0]
        self._programs[smallest.tokens](self._weights, smallest.pack([[0]])).block_until_ready()

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the largest program needs beside its arguments."""
        programs: list[Any] = list(self._programs.values())
        return max(program.memory_analysis().temp_size_in_bytes for program in programs)

    def read(self, texts: Sequence[SequenceWork]) -> list[FloatArray]:
        """Returns the final states of each text's tokens, f32 [tokens, width].

        Raises:
            ValueError: There are too many texts or tokens, a token is none of the vocabulary, or a
                text does not begin at its beginning; nothing was run.
        """
        ends = list(accumulate(len(text.tokens) for text in texts))
        if len(texts) > self.max_texts or ends[-1] > self._layouts[-1].tokens:
            raise ValueError(
                f"{len(texts)} texts of {ends[-1]} tokens, the limits are {self.max_texts} texts "
                f"and {self._layouts[-1].tokens} tokens"
            )
        for text in texts:
            self._check(text)
        layout = next(layout for layout in self._layouts if ends[-1] <= layout.tokens)
        packed = layout.pack([text.tokens for text in texts])
        states = np.asarray(self._programs[layout.tokens](self._weights, packed))
        return np.split(states[: ends[-1]], ends[:-1])

    def _check(self, text: SequenceWork) -> None:
        """A bad index would read weights that are not the embedding's, or of no position."""
        spec = self._spec
        least, most = min(text.tokens), max(text.tokens)
        if least < 0 or most >= spec.vocab_size:
            raise ValueError(f"token ids {least}..{most} of {spec.vocab_size} tokens")
        if text.start or len(text.tokens) > spec.context_train:
            end = text.start + len(text.tokens)
            raise ValueError(f"positions {text.start}..{end} of {spec.context_train}, from 0 on")


def _read(spec: ModelSpec, layout: PackedTexts, weights: Weights, packed: jax.Array) -> jax.Array:
    return encode(spec, weights, layout.unpack(packed))
