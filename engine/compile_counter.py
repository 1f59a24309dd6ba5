"""How many programs were compiled for one runner.

XLA tells a whole process of each compile, so where two models are loaded both would count it. It
knows no runner, or jax's list of listeners would keep models alive.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """A listener of `jax.monitoring`; `total` counts what was compiled for its owner.

    A compile on a thread, or in a context, that nobody claimed counts everywhere: better twice
    than not at all, since a compile that nobody expected is what the count is watched for.
    """

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Hears of every event of the process, on the thread where it happened."""
        if event == _EVENT and _claimed.get() in (None, self):
            self.total += 1

    @contextmanager
    def claiming(self) -> Generator[None]:
        """What is compiled in the block's context, which threads must be given, counts here alone."""
        token = _claimed.set(self)
        try:
            yield
        finally:
            _claimed.reset(token)


_claimed: ContextVar[CompileCounter | None] = ContextVar("claimed", default=None)
