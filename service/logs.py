"""Log lines as JSON objects, one a line; no line holds a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO, cast


class JsonFormatter(logging.Formatter):
    """Prints `ts`, `level`, `logger` and `message`, then the record's `fields` if it has any."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(cast("dict[str, object]", getattr(record, "fields", {})))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: int = logging.INFO, stream: TextIO = sys.stderr) -> None:
    """Sends every log line of the process to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
