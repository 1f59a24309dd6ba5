"""How far the engine on a quantised file is from the exact model, as llama-perplexity measures it.

A text's tokens are cut into chunks, each opened by BOS, and the second half of each is scored: KL
divergence of what the quantised file predicts from what the same weights in F32 predict. They are
dequantised by the `gguf` package, so that an error of our own would show. The exact model's
perplexity must be the recorded one, or this would not be a measurement of the same thing.

Source: llama.cpp, tools/perplexity (`--kl-divergence`): which tokens are scored, and by what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from engine.compile_cache import enable_compile_cache
from engine.gguf.facts import read_facts
from engine.gguf.header import TensorInfo
from engine.gguf.reader import GgufFile
from engine.gguf.vocab import read_vocab
from engine.model.architectures import read_spec
from engine.model.weights import load_weights
from engine.runner import JaxRunner, RunnerConfig
from engine.step import SequenceWork, StepBatch
from engine.text.load import load_tokenizer
from tests.accept.models import Models
from tests.accept.outcome import Failure
from tests.golden.compare import is_object

_CHUNK_TOKENS = 512
_FIRST_SCORED = _CHUNK_TOKENS // 2
_PAGE_TOKENS = 32
_CHUNK_PAGES = _CHUNK_TOKENS // _PAGE_TOKENS
# On this path activations stay f32, so what is left is the order of sums.
_MEAN_LIMIT = 1e-4
# llama.cpp's own F16 tables and half-precision log-probabilities move its perplexity by less.
_PERPLEXITY_LIMIT = 1e-3

Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Divergence:
    """Of every scored token: KL divergence in nats, and the exact model's log-probability."""

    kl: npt.NDArray[np.float64]
    exact_logprob: npt.NDArray[np.float64]

    @property
    def exact_perplexity(self) -> float:
        """Of the exact model."""
        return float(np.exp(-self.exact_logprob.mean()))


def check_divergence(golden: Mapping[str, Any], folder: Path, models: Models) -> str:
    """Measures every model of a file of figures; returns ours beside the recorded ones.

    Raises:
        Unsupported: a model is not to be had.
        Failure: the divergence is not near zero, or the exact model is not the recorded one.
    """
    text = (folder / golden["text"]).read_text(encoding="utf-8")
    return "; ".join(
        _check_entry(entry, text, models) for entry in golden.values() if is_object(entry)
    )


def _check_entry(entry: Mapping[str, Any], text: str, models: Models) -> str:
    path = models.find(entry["model"]).path
    if models.config.compile_cache:
        enable_compile_cache(models.config.compile_cache)
    chunks = read_chunks(path, text)
    if len(chunks) != entry["chunks"]:
        raise Failure(f"{path.name}: {len(chunks)} chunks of text, recorded {entry['chunks']}")
    found = measure(path, chunks)
    native = entry["native"]
    mean, perplexity = float(found.kl.mean()), found.exact_perplexity
    said = (
        f"{path.name}: mean KL {mean:.1e} (llama.cpp {native['mean_kl']:.1e}), "
        f"largest {found.kl.max():.1e} ({native['max_kl']:.1e}), exact perplexity "
        f"{perplexity:.4f} ({native['ppl_exact']:.4f}), {len(found.kl)} tokens of "
        f"{len(chunks)} chunks"
    )
    # Written so that a NaN fails.
    if not mean <= min(_MEAN_LIMIT, native["mean_kl"]):
        raise Failure(f"{said}: the mean must be at most {_MEAN_LIMIT:g}")
    if not abs(perplexity / native["ppl_exact"] - 1) <= _PERPLEXITY_LIMIT:
        raise Failure(f"{said}: the perplexity must be within {_PERPLEXITY_LIMIT:g} of it")
    return said


def read_chunks(path: Path, text: str) -> list[list[int]]:
    """Cuts a text into whole chunks of tokens; the first token of each becomes BOS."""
    with GgufFile.open(path) as file:
        facts = read_facts(file)
        tokenizer = load_tokenizer(
            read_vocab(file.metadata), model_name=facts.name, architecture=facts.architecture
        )
    tokens = tokenizer.encode(text, add_special=True, parse_special=False)
    last = len(tokens) - _CHUNK_TOKENS
    chunks = [tokens[at : at + _CHUNK_TOKENS] for at in range(0, last + 1, _CHUNK_TOKENS)]
    if not tokenizer.add_bos or tokenizer.bos_token is None:
        return chunks
    return [[tokenizer.bos_token, *chunk[1:]] for chunk in chunks]


def measure(path: Path, chunks: Sequence[Sequence[int]]) -> Divergence:
    """Scores chunks of 512 tokens, all at once as rows of one batch, by both models in step."""
    with GgufFile.open(path) as file:
        runners = [_open_runner(file, len(chunks)), _open_runner(Dequantised(file), len(chunks))]
    kl: list[float] = []
    exact_logprob: list[float] = []
    steps = zip(*(_score(runner, chunks) for runner in runners), strict=True)
    for position, (rows, exact_rows) in enumerate(steps, _FIRST_SCORED):
        for chunk, row, exact_row in zip(chunks, rows, exact_rows, strict=True):
            quantised, exact = _log_softmax(row), _log_softmax(exact_row)
            kl.append(float(np.sum(np.exp(exact) * (exact - quantised))))
            exact_logprob.append(float(exact[chunk[position + 1]]))
    return Divergence(np.array(kl), np.array(exact_logprob))


class Dequantised(GgufFile):
    """A file whose tensors read as F32, dequantised by the `gguf` package one at a time."""

    def __init__(self, file: GgufFile) -> None:
        """Reads from `file`, which stays open."""
        self.name = file.name
        self.metadata = file.metadata
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: _as_f32(info) for name, info in file.tensors.items()}
        )
        self._file = file

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """See `GgufFile`; a new array each time."""
        info = self._file.tensors[name]
        rows = self._file.raw(name).reshape(*info.shape[:-1], -1)
        values = quants.dequantize(rows, info.ggml_type)
        return np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)

    def release(self, name: str, start: int = 0, end: int | None = None) -> None:
        """Nothing of the mapping is held."""
        self._file.release(name)


def _as_f32(info: TensorInfo) -> TensorInfo:
    num_bytes = int(np.prod(info.shape)) * np.dtype(np.float32).itemsize
    return replace(info, ggml_type=GGMLQuantizationType.F32, nbytes=num_bytes)


def _open_runner(file: GgufFile, num_rows: int) -> JaxRunner:
    spec = read_spec(file)
    num_pages = num_rows * _CHUNK_PAGES
    config = RunnerConfig(
        max_rows=num_rows,
        max_chunk=_PAGE_TOKENS,
        context_tokens=_CHUNK_TOKENS,
        num_pages=num_pages,
        page_tokens=_PAGE_TOKENS,
        kv_dtype="f32",
        num_window_pages=num_pages if spec.num_window_layers else 0,
    )
    runner = JaxRunner(spec, load_weights(spec, file), config)
    runner.warm_up()
    return runner


def _score(
    runner: JaxRunner, chunks: Sequence[Sequence[int]]
) -> Iterator[list[npt.NDArray[np.float32]]]:
    """Yields the logits after each scored position, one row per chunk."""
    pages = [
        range(1 + row * _CHUNK_PAGES, 1 + (row + 1) * _CHUNK_PAGES) for row in range(len(chunks))
    ]
    for chunk, own in zip(chunks, pages, strict=True):
        for start in range(0, _FIRST_SCORED, _PAGE_TOKENS):
            work = _work(chunk[start : start + _PAGE_TOKENS], start, own, wants_logits=False)
            runner.run(StepBatch((), work))
    for position in range(_FIRST_SCORED, _CHUNK_TOKENS - 1):
        works = tuple(
            _work([chunk[position]], position, own, wants_logits=True)
            for chunk, own in zip(chunks, pages, strict=True)
        )
        yield [row.full() for row in runner.run(StepBatch(works, None)) if row is not None]


def _work(
    tokens: Sequence[int], start: int, pages: Sequence[int], *, wants_logits: bool
) -> SequenceWork:
    # Nothing behind a window is given back, so both kinds of layers use the same numbers.
    return SequenceWork(tokens, start, pages, wants_logits, window_pages=pages)


def _log_softmax(logits: npt.NDArray[np.float32]) -> Logprobs:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
