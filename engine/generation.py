"""One request's life after admission: sampled tokens become text, events and in the end a reason.

Holds everything that must survive a pre-emption: sampler state, text state, tokens and counts.
Knows no slot, page or runner; the scheduler tells it how many tokens are held and what time it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.requests import Request
from engine.step import RowLogits
from engine.types import Chunk, FinishReason, TokenLogprobs, TokenProb


class TokenText(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def add_bos(self) -> bool:
        """Whether prompts begin with a token that the tokenizer puts there."""
        ...

    @property
    def eog_tokens(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    def piece(self, token_id: int, *, render_special: bool = False) -> bytes:
        """Returns a token's bytes; a control token's are empty unless `render_special`."""
        ...


class SamplerChain(Protocol):
    """Draws tokens and remembers them (penalties, random state)."""

    def sample(self, row: RowLogits) -> int:
        """Draws a token from the row's logits and updates the state with it."""
        ...

    def probabilities(
        self, n: int, *, post_chain: bool
    ) -> tuple[float, Sequence[tuple[int, float]]]:
        """Returns the last sampled token's log-probability and the n best (id, log-probability)."""
        ...


class TextRelease(Protocol):
    """What one token released."""

    @property
    def text(self) -> str:
        """Text to send now."""
        ...

    @property
    def mid_character(self) -> bool:
        """True when the text so far ends inside a UTF-8 sequence."""
        ...

    @property
    def stop_string(self) -> str | None:
        """The stop string that matched."""
        ...


class TextReleaser(Protocol):
    """Turns pieces into text, withholding what may be part of a stop string."""

    def push(self, piece: bytes, *, is_eog: bool = False) -> TextRelease:
        """Takes the bytes of one token."""
        ...

    def unsent(self) -> str:
        """Returns the text that is withheld now."""
        ...


# The effective seed is the second argument: the request's, or the one drawn for it.
ChainFactory = Callable[[Request, int], SamplerChain]
TextFactory = Callable[[Sequence[str]], TextReleaser]


@dataclass(frozen=True)
class Ending:
    """Why a generation ended. `truncated`: the context was full, whatever the final reason."""

    reason: FinishReason
    truncated: bool = False
    stop_string: str | None = None
    stop_token_id: int | None = None


class IndentRule:
    """Ends a generation when a line after the first is indented less than `floor` columns.

    Looks at no more than one new line per token, as the peer does.

    Source: server_context::process_token, n_indent.
    """

    def __init__(self, floor: int) -> None:
        self._floor = floor
        # Sent text from some newline on, and where the current line starts in sent + withheld text
        # (withheld text comes again when it is sent, so the offset stays true).
        self._sent = ""
        self._line_start = 0
        self._has_line = False
        self.cut_chars = 0

    def send(self, text: str) -> None:
        """Takes text that was sent."""
        self._sent += text

    def is_broken(self, unsent: str) -> bool:
        """Returns whether the current line is indented too little, and moves to the next line.

        `unsent` is withheld text that follows what was sent. When True, `cut_chars` is how many
        characters at the end of all text the peer would drop.
        """
        text = self._sent + unsent
        if self._has_line:
            line = text[self._line_start :]
            body = line.lstrip(" \t")
            if body and len(line) - len(body) < self._floor:
                self.cut_chars = len(body)
                return True
        newline = text.find("\n", self._line_start)
        if newline >= 0:
            self._line_start = newline + 1
            self._has_line = True
        done = min(self._line_start, len(self._sent))
        self._sent = self._sent[done:]
        self._line_start -= done
        return False


class Generation:
    """The tokens, text and sampler of one request.

    `tokens` are the sampled ones. `first_token_s` and `last_token_s` are times on the engine's
    clock, None before the first token.
    """

    def __init__(
        self,
        request: Request,
        *,
        chain: SamplerChain,
        text: TextReleaser,
        tokenizer: TokenText,
        context_tokens: int | None,
    ) -> None:
        """Begins a generation, which ends when its slot holds `context_tokens` (None: never)."""
        self.request = request
        self.tokens: list[int] = []
        self.has_new_line = False
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._chain = chain
        self._text = text
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._indent = IndentRule(request.n_indent) if request.n_indent else None

    @property
    def decode_s(self) -> float:
        """Seconds between the first and the last sampled token."""
        if self.first_token_s is None or self.last_token_s is None:
            return 0.0
        return self.last_token_s - self.first_token_s

    @property
    def remaining_tokens(self) -> int:
        """Tokens that the budget still allows, -1 when unlimited."""
        if self.request.max_tokens is None:
            return -1
        return max(0, self.request.max_tokens - len(self.tokens))

    @property
    def indent_cut_chars(self) -> int:
        """Characters at the end of all text that the indent rule takes back."""
        return self._indent.cut_chars if self._indent else 0

    def unsent(self) -> str:
        """Returns the text that was never sent."""
        return self._text.unsent()

    def accept(self, row: RowLogits, *, held: int, now_s: float) -> tuple[Chunk, Ending | None]:
        """Samples one token and says whether it is the last; `held` tokens are in the slot.

        Raises:
            Exception: whatever the chain or the text stream raises; the generation is over then.
        """
        token_id = self._chain.sample(row)
        self.tokens.append(token_id)
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        piece = self._piece(token_id)
        is_eog = token_id in self._tokenizer.eog_tokens
        release = self._text.push(piece, is_eog=is_eog)
        chunk = Chunk(
            text=release.text,
            token_id=token_id,
            completion_tokens=len(self.tokens),
            mid_character=release.mid_character,
            completes_stop=release.stop_string is not None,
            logprobs=self._logprobs(token_id),
            decode_s=self.decode_s,
        )
        return chunk, self._ending(token_id, piece, release, held)

    def _ending(
        self, token_id: int, piece: bytes, release: TextRelease, held: int
    ) -> Ending | None:
        """The peer's order of checks, where a later one overrides the reason of an earlier one.

        Source: server_context::process_token (contract 5.4 and 5.3).
        """
        reason: FinishReason | None = None
        if release.stop_string is not None:
            reason = FinishReason.STOP
        limit = self._context_tokens
        truncated = limit is not None and held + 1 >= limit
        if truncated:
            reason = FinishReason.CONTEXT_FULL
        if reason is None and self.remaining_tokens == 0:
            reason = FinishReason.LENGTH
        if self._breaks_indent(release.text):
            reason = FinishReason.INDENT
        # Inside a character the peer looks at the raw piece, which may already hold a newline.
        if "\n" in release.text or (release.mid_character and b"\n" in piece):
            self.has_new_line = True
            limit_s = self.request.time_limit_s
            if limit_s is not None and self.decode_s > limit_s:
                reason = FinishReason.TIME
        is_eog = token_id in self._tokenizer.eog_tokens
        if is_eog:
            reason = FinishReason.EOS
        if reason is None:
            return None
        return Ending(reason, truncated, release.stop_string, token_id if is_eog else None)

    def _breaks_indent(self, sent: str) -> bool:
        if self._indent is None:
            return False
        self._indent.send(sent)
        return self.has_new_line and self._indent.is_broken(self._text.unsent())

    def _piece(self, token_id: int) -> bytes:
        request = self.request
        shown = request.render_special or token_id in request.preserved_tokens
        return self._tokenizer.piece(token_id, render_special=shown)

    def _logprobs(self, token_id: int) -> TokenLogprobs | None:
        request = self.request
        if request.top_logprobs is None:
            return None
        sampled, top = self._chain.probabilities(
            request.top_logprobs, post_chain=request.post_sampling_probs
        )
        return TokenLogprobs(
            self._token_prob(token_id, sampled), tuple(self._token_prob(i, p) for i, p in top)
        )

    def _token_prob(self, token_id: int, logprob: float) -> TokenProb:
        shown = self.request.render_special
        return TokenProb(token_id, self._tokenizer.piece(token_id, render_special=shown), logprob)
