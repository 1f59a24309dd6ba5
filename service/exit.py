"""The end of a process that has already stopped what it served."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """Ends the process now, its output written, without the interpreter's own goodbye.

    A stop during a load leaves a thread inside XLA that nothing can interrupt: the interpreter
    would wait for the compilation, or tear down what it uses and abort.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
