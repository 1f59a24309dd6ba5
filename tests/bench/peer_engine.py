"""`python -m tests.bench.peer_engine MODEL THREADS`: llama.cpp's steps, by llama-cpp-python.

The same steps as `own_engine`, with the settings that llama-bench has by default.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]

from tests.bench.child import answer_all
from tests.bench.own_engine import CONTEXT_TOKENS, MAX_CHUNK, MAX_ROWS

# The bindings have no types of their own.
api: Any = llama_cpp
_ERROR_LEVEL = 4


@api.llama_log_callback
def _log(level: int, text: bytes, _: Any) -> None:
    """Shows errors alone: what it says of every tensor would hide the table."""
    if level == _ERROR_LEVEL:
        sys.stderr.write(text.decode("utf-8", "replace"))


class PeerEngine:
    """A model and a context of MAX_ROWS sequences."""

    def __init__(self, model: str, threads: int) -> None:
        api.llama_log_set(_log, None)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(
            model.encode(), api.llama_model_default_params()
        )
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = CONTEXT_TOKENS, MAX_ROWS
        params.n_batch = params.n_ubatch = MAX_CHUNK
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {model}")
        self._batch = api.llama_batch_init(MAX_CHUNK, 0, 1)
        self.prefill(MAX_CHUNK)

    def answer(self, question: Mapping[str, Any]) -> Any:
        """Runs what is asked for; rates are tokens per second."""
        match question:
            case {"do": "prefill", "tokens": tokens}:
                return self.prefill(tokens)
            case {"do": "decode", "rows": rows, "steps": steps}:
                return self.decode(rows, steps)
            case _:
                raise ValueError(f"no such question: {question}")

    def prefill(self, tokens: int) -> float:
        """The rate of one prompt in one batch; only its last logits are wanted."""
        self._forget()
        entries = [((7 * i) % 1000 + 100, i, 0, i == tokens - 1) for i in range(tokens)]
        begun_s = time.perf_counter()
        self._decode(entries)
        return tokens / (time.perf_counter() - begun_s)

    def decode(self, rows: int, steps: int) -> float:
        """The rate of `rows` sequences together, from one token on."""
        self._forget()
        self._decode(self._tokens(rows, 0))
        begun_s = time.perf_counter()
        for at in range(1, steps + 1):
            self._decode(self._tokens(rows, at))
        return rows * steps / (time.perf_counter() - begun_s)

    def _tokens(self, rows: int, at: int) -> list[tuple[int, int, int, bool]]:
        return [((31 * at + row) % 1000 + 100, at, row, True) for row in range(rows)]

    def _forget(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._context), True)

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, is_wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = is_wanted
        status = api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status}")
        api.llama_synchronize(self._context)


def main(model: str, threads: str) -> None:
    """Answers until stdin ends."""
    answer_all(PeerEngine(model, int(threads)).answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
