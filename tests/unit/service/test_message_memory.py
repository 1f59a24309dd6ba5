"""Answers with a million entries, in processes of their own: the peak is theirs alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A message of its own takes 600 bytes, one made inside its parent 55.
_ENTRIES = 300_000
_MAX_GROWTH_BYTES = 100 << 20

_TOKENIZE = "_answer(None, range(n), TokenizeRequest(omit_pieces=True))"
_LOGPROBS = "_logprobs(TokenLogprobs(one, (one,) * n))"
_PROGRAM = """
import resource
from engine.types import TokenLogprobs, TokenProb
from service.convert import _logprobs
from service.tokenization import TokenizeRequest, _answer
n, one = {entries}, TokenProb(1, b"x", -0.5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = {made}
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


@pytest.mark.parametrize("made", [_TOKENIZE, _LOGPROBS])
def test_a_long_answer_takes_little_more_than_its_bytes(made: str) -> None:
    program = _PROGRAM.format(entries=_ENTRIES, made=made)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(run.stdout) < _MAX_GROWTH_BYTES
