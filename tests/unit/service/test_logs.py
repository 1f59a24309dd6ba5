from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.logs import JsonFormatter, TextFormatter, configure


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("kvarts.test", logging.INFO, __file__, 1, message, (), None)
    if fields:
        made.__dict__["fields"] = fields
    return made


def test_a_json_line_holds_the_fields() -> None:
    line = json.loads(JsonFormatter().format(record('a "quoted"\nmessage', slot_id=3)))
    assert line["message"] == 'a "quoted"\nmessage'
    assert (line["level"], line["logger"], line["slot_id"]) == ("info", "kvarts.test", 3)
    assert line["ts"].endswith("+00:00")


def test_a_json_line_is_one_line_with_an_exception_too() -> None:
    made = record("m")
    try:
        raise ValueError("bad")
    except ValueError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    text = JsonFormatter().format(made)
    assert "\n" not in text
    assert "ValueError: bad" in json.loads(text)["exception"]
    assert "ValueError: bad" in TextFormatter().format(made)


def test_a_text_line_ends_in_pairs() -> None:
    assert (
        TextFormatter()
        .format(record("call", rpc="a", slot_id=3))
        .endswith("I call rpc=a slot_id=3")
    )


@pytest.fixture
def restored_logging() -> Iterator[None]:
    names = ("kvarts", "engine", "service")
    root = logging.getLogger()
    before = root.handlers[:], root.level, [logging.getLogger(name).level for name in names]
    yield
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], level, levels = before
    root.setLevel(level)
    for name, own in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(own)


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(
    ("level", "expected"),
    [("debug", ["d", "i", "w"]), ("info", ["i", "w"]), ("error", []), ("off", [])],
)
def test_levels(level: str, expected: list[str], tmp_path: Path) -> None:
    file = tmp_path / "log"
    configure("json", level, str(file))
    ours, theirs = logging.getLogger("kvarts.service"), logging.getLogger("jax.x")
    ours.debug("d")
    ours.info("i")
    ours.warning("w")
    theirs.info("noise")
    lines = [json.loads(line)["message"] for line in file.read_text().splitlines()]
    assert lines == expected
