"""JSON that a request carries as text."""

from __future__ import annotations

import json
from typing import Any, NoReturn, cast

from engine.errors import InvalidField


def parse_json(text: str, field: str) -> Any:
    """Parses JSON text.

    Raises:
        InvalidField: It is not JSON, nested too deeply, or holds a number that JSON does not have.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise InvalidField(field, "nested too deeply") from error
    except ValueError as error:
        raise InvalidField(field, f"not JSON: {error}") from error


def json_object(text: str, field: str) -> dict[str, Any]:
    """Parses the text of a JSON object.

    Raises:
        InvalidField: As `parse_json`, or it is no object.
    """
    value: object = parse_json(text, field)
    if not isinstance(value, dict):
        raise InvalidField(field, f"a JSON object is needed, not {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
