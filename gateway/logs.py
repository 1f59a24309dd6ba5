"""Where the gateway's log lines go: stderr, as text or as one JSON object a line.

No line holds a prompt, an answer or a key.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_TEXT = "%(asctime)s %(levelname).1s %(message)s"
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
# Their own access lines and per-frame traces would drown everything else.
_QUIET = ("uvicorn", "uvicorn.error", "asyncio", "grpc")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(log_format: str, level: str) -> None:
    """Sets up the root logger of the process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT, "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(_LEVELS[level])
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, _LEVELS[level]))
