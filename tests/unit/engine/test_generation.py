from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from engine.generation import Ending, Generation
from engine.requests import Request, SamplingParams
from engine.types import Chunk, FinishReason
from tests.fake_logits import FakeRow
from tests.fake_text import FakeTokenizer, PlainText, begin_greedy

TOKENIZER = FakeTokenizer()
EOS = TOKENIZER.eos_token


def row(token_id: int) -> FakeRow:
    logits = np.zeros(TOKENIZER.vocab_size, dtype=np.float32)
    logits[token_id] = 5
    return FakeRow(logits)


class Run:
    """Feeds a generation chosen tokens, one second apart, and keeps what it says."""

    def __init__(self, request: Request, *, context_tokens: int = 256) -> None:
        self.generation = Generation(
            request,
            chain=begin_greedy(request, 0),
            text=PlainText(request.stop),
            tokenizer=TOKENIZER,
            context_tokens=context_tokens,
        )
        self.chunks: list[Chunk] = []
        self.ending: Ending | None = None
        self._now_s = 100.0

    def feed(self, tokens: Sequence[int]) -> Run:
        for token_id in tokens:
            assert self.ending is None, "the generation went on after its end"
            held = len(self.generation.request.prompt) + len(self.generation.tokens)
            chunk, self.ending = self.generation.accept(row(token_id), held=held, now_s=self._now_s)
            self.chunks.append(chunk)
            self._now_s += 1.0
        return self

    def write(self, text: str) -> Run:
        return self.feed(TOKENIZER.encode(text, add_special=False, parse_special=False))

    @property
    def reason(self) -> FinishReason | None:
        return self.ending.reason if self.ending else None

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


def make_request(
    max_tokens: int | None = None,
    *,
    prompt_tokens: int = 1,
    stop: tuple[str, ...] = (),
    n_indent: int = 0,
    time_limit_s: float | None = None,
    top_logprobs: int | None = None,
) -> Request:
    return Request(
        "r",
        (5,) * prompt_tokens,
        max_tokens=max_tokens,
        stop=stop,
        n_indent=n_indent,
        time_limit_s=time_limit_s,
        top_logprobs=top_logprobs,
    )


def test_tokens_become_text_and_counts() -> None:
    run = Run(make_request()).write("Hi")
    assert [(c.text, c.completion_tokens, c.decode_s) for c in run.chunks] == [
        ("H", 1, 0.0),
        ("i", 2, 1.0),
    ]
    assert run.ending is None
    assert run.generation.decode_s == 1.0


def test_the_budget_ends_with_length() -> None:
    run = Run(make_request(3)).write("abc")
    assert run.reason is FinishReason.LENGTH
    assert run.generation.remaining_tokens == 0


def test_a_budget_of_zero_still_gives_one_token() -> None:
    assert Run(make_request(0)).write("a").reason is FinishReason.LENGTH


def test_without_a_budget_nothing_remains_to_count() -> None:
    assert Run(make_request()).write("ab").generation.remaining_tokens == -1


# Recorded from llama-server with a context of 256: a prompt of 5 gives 251 tokens, of 8 gives 248,
# of 255 gives one.
@pytest.mark.parametrize(("prompt_tokens", "sampled"), [(5, 251), (8, 248), (255, 1)])
def test_the_context_ends_as_the_peers(prompt_tokens: int, sampled: int) -> None:
    run = Run(make_request(prompt_tokens=prompt_tokens)).write("a" * sampled)
    assert run.reason is FinishReason.CONTEXT_FULL
    assert run.ending is not None
    assert run.ending.truncated


def test_a_stop_string_cuts_the_text() -> None:
    run = Run(make_request(9, stop=("<end>",))).write("so<end>")
    assert run.ending == Ending(FinishReason.STOP, stop_string="<end>")
    assert run.text == "so"


def test_a_stop_string_beats_the_budget() -> None:
    assert Run(make_request(3, stop=("c",))).write("abc").reason is FinishReason.STOP


def test_a_full_context_beats_a_stop_string() -> None:
    run = Run(make_request(stop=("c",)), context_tokens=4).write("abc")
    assert run.ending == Ending(FinishReason.CONTEXT_FULL, truncated=True, stop_string="c")


def test_the_end_token_beats_everything_and_is_named() -> None:
    run = Run(make_request(3), context_tokens=4).write("ab").feed([EOS])
    assert run.ending == Ending(FinishReason.EOS, truncated=True, stop_token_id=EOS)
    assert run.text == "ab"


def test_withheld_text_is_unsent_when_the_budget_ends() -> None:
    run = Run(make_request(3, stop=("c-d",))).write("abc")
    assert (run.text, run.generation.unsent()) == ("ab", "c")


def test_a_character_in_pieces_is_sent_whole() -> None:
    euro = TOKENIZER.encode("x", add_special=False, parse_special=False)
    euro += [TOKENIZER.vocab_size - 3, TOKENIZER.vocab_size - 2, TOKENIZER.vocab_size - 1]
    run = Run(make_request()).feed(euro)
    assert [(c.text, c.mid_character) for c in run.chunks] == [
        ("x", False),
        ("", True),
        ("", True),
        ("€", False),
    ]


def test_a_newline_is_noticed() -> None:
    run = Run(make_request()).write("a")
    assert not run.generation.has_new_line
    assert run.write("\n").generation.has_new_line


def test_the_time_limit_ends_at_the_next_newline_only() -> None:
    run = Run(make_request(time_limit_s=2.5)).write("a\nbc")
    assert run.ending is None
    assert run.write("\n").reason is FinishReason.TIME


def test_the_time_limit_counts_from_the_first_token() -> None:
    assert Run(make_request(time_limit_s=4.0)).write("abcd\n").ending is None


# The peer's rule (server_context::process_token): the line after a newline must be indented by
# n_indent blanks or tabs; the check runs one token after the newline was noted.
def test_too_little_indentation_ends_and_says_what_to_cut() -> None:
    run = Run(make_request(n_indent=2)).write("if:\n  a\n b")
    assert run.reason is FinishReason.INDENT
    assert run.generation.indent_cut_chars == 1
    assert run.text[: -run.generation.indent_cut_chars] == "if:\n  a\n "


def test_enough_indentation_goes_on() -> None:
    run = Run(make_request(n_indent=2)).write("if:\n  a\n   b")
    assert run.ending is None


def test_the_first_line_needs_no_indentation() -> None:
    assert Run(make_request(n_indent=4)).write("def f").ending is None


def test_an_empty_line_counts_as_not_indented() -> None:
    run = Run(make_request(n_indent=1)).write("a\n\n")
    assert run.ending is None
    assert run.write("b").reason is FinishReason.INDENT


def test_indentation_sees_withheld_text() -> None:
    run = Run(make_request(n_indent=2, stop=("bcd",))).write("a\nb")
    assert run.ending is None
    # "bc" is withheld, and still breaks the rule.
    assert run.write("c").reason is FinishReason.INDENT
    assert run.generation.indent_cut_chars == len("bc")
    assert run.generation.unsent() == "bc"


def test_special_tokens_are_shown_when_asked_or_preserved() -> None:
    bos = TOKENIZER.bos_token
    plain = Request("r", (5,))
    preserved = Request("r", (5,), preserved_tokens=frozenset({bos}))
    special = Request("r", (5,), render_special=True)
    assert Run(plain).feed([bos]).text == ""
    assert Run(preserved).feed([bos, EOS]).text == "<s>"
    assert Run(special).feed([bos, EOS]).text == "<s></s>"


def test_log_probabilities_come_with_their_pieces() -> None:
    run = Run(make_request(top_logprobs=2)).write("b")
    found = run.chunks[0].logprobs
    assert found is not None
    # One logit is 5 and all others are 0: softmax by hand.
    expected = 5 - math.log(math.exp(5) + TOKENIZER.vocab_size - 1)
    assert found.sampled.piece == b"b"
    assert found.sampled.logprob == pytest.approx(expected, abs=1e-6)
    assert [one.piece for one in found.top] == [b"b", b""]
    assert found.top[1].logprob == pytest.approx(expected - 5, abs=1e-6)


def test_zero_log_probabilities_still_give_the_sampled_one() -> None:
    found = Run(make_request(top_logprobs=0)).write("b").chunks[0].logprobs
    assert found is not None
    assert found.top == ()
    assert Run(make_request()).write("b").chunks[0].logprobs is None


def test_post_chain_probabilities_are_asked_of_the_chain() -> None:
    request = Request("r", (5,), top_logprobs=3, post_sampling_probs=True)
    found = Run(request).write("b").chunks[0].logprobs
    assert found is not None
    assert [(one.piece, one.logprob) for one in found.top] == [(b"b", 0.0)]


def test_biases_reach_the_chain() -> None:
    (letter,) = TOKENIZER.encode("z", add_special=False, parse_special=False)
    request = Request("r", (5,), sampling=SamplingParams(logit_bias=((letter, 100.0),)))
    assert Run(request).write("a").generation.tokens == [letter]
