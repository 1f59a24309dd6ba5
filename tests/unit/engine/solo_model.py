"""What the fake model gives to a request that runs alone, whatever it is asked under."""

from __future__ import annotations

from dataclasses import dataclass

from engine.requests import Request
from engine.types import FinishReason
from tests.fake_logits import model_logits, moved, under
from tests.fake_text import FakeTokenizer

TOKENIZER = FakeTokenizer()
STOP = "q"


@dataclass(frozen=True)
class SoloRun:
    """What a request must give, whatever runs beside it."""

    tokens: list[int]
    reason: FinishReason


class SoloModel:
    """Cold runs of the fake model, one request alone; continuations are remembered."""

    def __init__(self, context_tokens: int, window: int | None, *, shifts: bool = False) -> None:
        self._context_tokens = context_tokens
        self._window = window
        self._shifts = shifts
        self._next: dict[tuple[int, ...], int] = {}

    def run(self, request: Request, number: int = 0, start: int = 0) -> SoloRun:
        """Runs a request under a numbered set of adapters that works from a position on."""
        history = under(request.prompt, number, start)
        tokens: list[int] = []
        while True:
            if self._shifts and len(history) == self._context_tokens:
                history = self._shifted(history, request)
            token = self._sample(history, request)
            tokens.append(token)
            reason = self._reason(request, tokens, len(history))
            if reason is not None:
                return SoloRun(tokens, reason)
            history += under([token], number)

    def _shifted(self, history: list[int], request: Request) -> list[int]:
        """The last token is not held yet when the others make room for it (contract 5.3)."""
        held, pending = history[:-1], history[-1]
        keep = len(request.prompt) if request.n_keep < 0 else request.n_keep
        keep = min(keep + TOKENIZER.add_bos, self._context_tokens - 4)
        left = len(held) - keep
        drop = min(request.n_discard or left // 2, left - 1)
        return [*held[:keep], *map(moved, held[keep + drop :]), pending]

    def _sample(self, history: list[int], request: Request) -> int:
        key = (*history, -1 if request.ignore_eos else -2)
        if key not in self._next:
            logits = model_logits(history, TOKENIZER.vocab_size, self._window)
            if request.ignore_eos:
                logits[TOKENIZER.eos_token] = float("-inf")
            self._next[key] = int(logits.argmax())
        return self._next[key]

    def _reason(self, request: Request, tokens: list[int], held: int) -> FinishReason | None:
        if tokens[-1] in TOKENIZER.eog_tokens:
            return FinishReason.EOS
        if held + 1 >= self._context_tokens and not self._shifts:
            return FinishReason.CONTEXT_FULL
        if request.stop and TOKENIZER.piece(tokens[-1]) == STOP.encode():
            return FinishReason.STOP
        if request.max_tokens is not None and len(tokens) >= request.max_tokens:
            return FinishReason.LENGTH
        return None
