"""How far the engine on a quantised file is from the exact model, as llama-perplexity measures it.

A text's tokens are cut into chunks, each opened by BOS, and the second half of each is scored: KL
divergence of what the quantised file predicts from what the same weights in F32 predict. They are
dequantised by the `gguf` package, so that an error of our own would show. Where the whole text is
scored, the exact model's perplexity must be the recorded one too.

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
_NUM_PAGES = _CHUNK_TOKENS // _PAGE_TOKENS
_STEP_ROWS = 64
# On XLA activations stay f32, so what is left is the order of sums. The native kernels round them
# to 8 bits, as llama.cpp's do, and may lose what those lose.
_MEAN_LIMIT = 1e-4
# What llama.cpp's F16 tables and its 16-bit log-probabilities move its perplexity by is less.
_PERPLEXITY_LIMIT = 1e-3
# llama-perplexity keeps the exact model's log-probabilities down to this far below the best.
_KEPT_NATS = 16.0

Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Divergence:
    """Of every scored token: KL divergence in nats, and the exact model's log-probability."""

    kl: npt.NDArray[np.float64]
    exact_logprob: npt.NDArray[np.float64]

    @property
    def exact_perplexity(self) -> float:
        """Of the exact model, as llama-perplexity keeps it."""
        return float(np.exp(-self.exact_logprob.mean()))


def check_divergence(
    golden: Mapping[str, Any], folder: Path, models: Models, max_chunks: int
) -> str:
    """Measures every model of a file of figures.

    Args:
        golden: the figures: by any name, an entry for each model.
        folder: where the text lies.
        models: where the models are.
        max_chunks: how many chunks of the text are scored.

    Returns:
        Our figures beside the recorded ones.

    Raises:
        Unsupported: a model is not to be had.
        Failure: the divergence is too large, or the exact model is not the recorded one.
    """
    text = (folder / golden["text"]).read_text(encoding="utf-8")
    entries = [entry for entry in golden.values() if is_object(entry)]
    return "; ".join(_check_entry(entry, text, models, max_chunks) for entry in entries)


def _check_entry(entry: Mapping[str, Any], text: str, models: Models, max_chunks: int) -> str:
    path = models.find(entry["model"]).path
    if models.config.compile_cache:
        enable_compile_cache(models.config.compile_cache)
    chunks = read_chunks(path, text)
    if len(chunks) != entry["chunks"]:
        raise Failure(f"{path.name}: {len(chunks)} chunks of text, recorded {entry['chunks']}")
    found = measure(path, chunks[:max_chunks], is_native=models.is_native)
    limit = entry["native"]["mean_kl"] if models.is_native else _MEAN_LIMIT
    return judge(path.name, found, entry["native"], limit, is_whole=max_chunks >= len(chunks))


def judge(
    name: str, found: Divergence, native: Mapping[str, Any], limit: float, *, is_whole: bool
) -> str:
    """Holds what was measured against llama.cpp's own figures; returns both.

    The mean divergence must be at most `limit`, and at most llama.cpp's.

    Raises:
        Failure: the divergence is too large, or the whole text has another perplexity.
    """
    mean, perplexity = float(found.kl.mean()), found.exact_perplexity
    said = (
        f"{name}: {len(found.kl)} tokens, mean KL {mean:.1e} (llama.cpp {native['mean_kl']:.1e}), "
        f"largest {found.kl.max():.1e} ({native['max_kl']:.1e})"
    )
    # Both are written so that a NaN fails.
    if not mean <= min(limit, native["mean_kl"]):
        raise Failure(f"{said}: the mean must be at most {min(limit, native['mean_kl']):g}")
    if not is_whole:
        return said
    said += f", exact perplexity {perplexity:.4f} ({native['ppl_exact']:.4f})"
    if not abs(perplexity / native["ppl_exact"] - 1) <= _PERPLEXITY_LIMIT:
        raise Failure(f"{said}: they must agree within {_PERPLEXITY_LIMIT:g}")
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


def measure(path: Path, chunks: Sequence[Sequence[int]], *, is_native: bool = False) -> Divergence:
    """Scores chunks of 512 tokens by the file and by its exact model, which runs on XLA."""
    with GgufFile.open(path) as file:
        quantised = _open_runner(file, is_native=is_native)
        exact = _open_runner(Dequantised(file), is_native=False)
    kl: list[float] = []
    exact_logprob: list[float] = []
    for chunk in chunks:
        targets = chunk[_FIRST_SCORED + 1 :]
        steps = zip(targets, _score(quantised, chunk), _score(exact, chunk), strict=True)
        for target, found, expected in steps:
            kl.append(float(np.sum(np.exp(expected) * (expected - found))))
            exact_logprob.append(max(float(expected[target]), float(expected.max()) - _KEPT_NATS))
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


def _open_runner(file: GgufFile, *, is_native: bool) -> JaxRunner:
    spec = read_spec(file)
    config = RunnerConfig(
        max_rows=_STEP_ROWS,
        max_chunk=1,
        context_tokens=_CHUNK_TOKENS,
        num_pages=_NUM_PAGES,
        page_tokens=_PAGE_TOKENS,
        kv_dtype="f32",
        num_window_pages=_NUM_PAGES if spec.num_window_layers else 0,
    )
    runner = JaxRunner(spec, load_weights(spec, file, is_native=is_native), config)
    runner.warm_up()
    return runner


def _score(runner: JaxRunner, chunk: Sequence[int]) -> Iterator[Logprobs]:
    """Yields the log-probabilities after each scored token.

    A prefill chunk gives logits for its last token alone. A decode row gives its own, and rows
    of one step may be neighbours in one sequence: keys are stored before any row attends.
    """
    # Nothing behind a window is given back, so layers of both kinds use the same numbers.
    pages = range(1, 1 + _NUM_PAGES)
    for start in range(0, _CHUNK_TOKENS, _STEP_ROWS):
        works = tuple(
            SequenceWork([chunk[at]], at, pages, at >= _FIRST_SCORED, window_pages=pages)
            for at in range(start, min(start + _STEP_ROWS, _CHUNK_TOKENS - 1))
        )
        for row in runner.run(StepBatch(works, None)):
            if row is not None:
                yield _log_softmax(row.full())


def _log_softmax(logits: npt.NDArray[np.float32]) -> Logprobs:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
