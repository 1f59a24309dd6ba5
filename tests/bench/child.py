"""A child process that measures: one JSON question a line in, one JSON answer a line out.

Every engine and every set of clients lives in a process of its own, so that none shares an
interpreter or a thread pool with what it is compared to; between questions a child waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

Answer = Callable[[Mapping[str, Any]], Any]


class ChildError(RuntimeError):
    """A child ended or answered something else than JSON; the message names it."""


class Child:
    """`python -m MODULE ARGUMENTS...`, ended by leaving the context."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._name = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: Any) -> Any:
        """Waits for the answer to one question.

        Raises:
            ChildError: There is none.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildError(f"{self._name} is gone") from error
        line = process.stdout.readline()
        try:
            return json.loads(line)
        except json.JSONDecodeError as error:
            raise ChildError(f"{self._name} did not answer {question}: {line!r}") from error

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answer_all(answer: Answer) -> None:
    """The child's side: answers each line of stdin until it ends.

    Whatever a library prints goes to stderr, since stdout carries the answers alone.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()
