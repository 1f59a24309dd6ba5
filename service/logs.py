"""Where log lines go and what they look like; no line holds a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import cast

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `ts`, `level`, `logger`, `message`, then the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(_fields(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The same for people: time, level, message, then `key=value` pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line, more with an exception."""
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        pairs = "".join(f" {key}={value}" for key, value in _fields(record).items())
        text = f"{time} {record.levelname[0]} {record.getMessage()}{pairs}"
        if record.exc_info:
            return f"{text}\n{self.formatException(record.exc_info)}"
        return text


def configure(log_format: str, level: str, file: str | None = None) -> None:
    """Sends every log line of the process to stderr, and to `file` if there is one.

    Args:
        log_format: `text` or `json`.
        level: `debug`, `info`, `warning`, `error` or `off`.
        file: appended to.

    Raises:
        OSError: The file cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = handlers
    # Only our own code speaks below a warning: jax and grpc would drown it.
    root.setLevel(max(logging.WARNING, _LEVELS[level]))
    for name in ("kvarts", "engine", "service"):
        logging.getLogger(name).setLevel(_LEVELS[level])


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return cast("dict[str, object]", getattr(record, "fields", {}))
