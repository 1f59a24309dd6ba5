"""The filters, tests and methods that templates may use, each paying before it works.

What Hugging Face's and llama.cpp's templates need is here; what only formats for people or makes
text of any asked-for length is not. Knows no environment.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from jinja2 import Environment, pass_environment
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from engine.errors import TemplateError
from engine.text.template_budget import Budget

_MAX_INDENT = 32
# Moving the items of a list by one place is far cheaper than a step.
_ITEMS_PER_STEP = 512
_MAX_PRECISION = 32
_BLANKS = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())

# Conversions of `%` formatting, and the width or precision in a format specification.
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_WIDE_FIELD = re.compile(r"\{[^{}]*(?:\d{4}|\{)")
_MAX_WIDTH_DIGITS = 3

CurrentBudget = Callable[[], Budget]
Function = Callable[..., Any]

# Filters that look at no more than the outside of their value.
_SHALLOW = ("abs", "count", "d", "default", "first", "float", "int", "items", "last", "length")
# Filters that look at all of their value, and those that also write text about as long.
_DEEP = ("dictsort", "groupby", "max", "min", "sort", "unique")
_LAZY = ("map", "reject", "rejectattr", "reverse", "select", "selectattr")
_WRITING = (
    *("capitalize", "lower", "string", "title", "trim", "truncate", "upper"),
    "wordcount",
)

_STRING_METHODS = frozenset(
    {
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
        *("isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper"),
        *("join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace"),
        *("rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
        *("startswith", "strip", "swapcase", "title", "upper"),
    }
)
_LIST_METHODS = frozenset({"count", "index", "copy"})
_MAPPING_METHODS = frozenset({"copy", "get", "items", "keys", "values"})


def bounded_filters(budget: CurrentBudget) -> dict[str, Function]:
    """Returns the filters by name; `budget` gives the running rendering's."""

    def shallow(*values: Any) -> tuple[Any, ...]:
        budget().step()
        return values

    def deep(*values: Any) -> tuple[Any, ...]:
        value, *others = values
        # What can be gone through only once cannot be weighed before.
        value = materialize(budget(), value) if isinstance(value, Iterator) else value
        budget().read(value, *others)
        return (value, *others)

    def outside(*values: Any) -> tuple[Any, ...]:
        pay_outside(budget(), values[0])
        return values

    def writing(*values: Any) -> tuple[Any, ...]:
        budget().write(2 * len(printed(budget(), values[0])))
        return values

    def listed(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return materialize(budget(), result) if isinstance(result, Iterator) else result

        return wrapper

    filters: dict[str, Function] = {}
    for names, prepare in (
        *((_SHALLOW, shallow), (_DEEP, deep), (_LAZY, outside), (_WRITING, writing)),
    ):
        for name in names:
            # Lists, as in llama.cpp: templates measure and print what Jinja only promises.
            filters[name] = listed(before(FILTERS[name], prepare))

    @pass_environment
    def join(
        environment: Environment,
        value: Iterable[Any],
        d: str = "",
        attribute: str | int | None = None,
    ) -> str:
        items = _attributes(environment, materialize(budget(), value), attribute)
        texts = [printed(budget(), item) for item in items]
        budget().write(sum(map(len, texts)) + len(d) * len(texts))
        return str(d).join(texts)

    def replace(value: object, old: str, new: str, count: int | None = None) -> str:
        text = printed(budget(), value)
        _pay_replace(budget(), text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    def round_number(value: float, precision: int = 0, method: str = "common") -> float:
        if abs(precision) > _MAX_PRECISION:
            raise TemplateError(f"round(precision={precision}): at most {_MAX_PRECISION}")
        return cast(Function, FILTERS["round"])(value, precision, method)

    @pass_environment
    def total(
        environment: Environment,
        value: Iterable[Any],
        attribute: str | int | None = None,
        start: Any = 0,
    ) -> float:
        numbers = _attributes(environment, materialize(budget(), value), attribute)
        # Adding up lists, one by one, would take quadratic time.
        if not all(isinstance(number, (int, float)) for number in (start, *numbers)):
            raise TemplateError("sum() adds numbers only")
        return sum(numbers, start)

    def indent(
        value: object, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text = printed(budget(), value)
        prefix = " " * _checked_indent(width) if isinstance(width, int) else width
        _checked_indent(len(prefix))
        budget().write((text.count("\n") + 1) * (len(prefix) + 1))
        return cast(Function, FILTERS["indent"])(text, prefix, first, blank)

    def format_text(value: str, *args: object, **kwargs: object) -> str:
        return percent(budget(), value, kwargs or args)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Not Jinja's own: that one escapes for HTML, which no model has seen.
        weight = budget().weigh(value)
        padding = _checked_indent(len(indent) if isinstance(indent, str) else indent or 0)
        budget().write(weight.chars + weight.values * (4 + padding))
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def to_list(value: Any) -> list[Any]:
        return materialize(budget(), value)

    # Nothing is escaped, so nothing has to be marked as safe from it.
    filters["safe"] = filters["string"]
    filters["list"] = to_list
    filters["join"] = join
    filters["replace"] = replace
    filters["round"] = round_number
    filters["sum"] = total
    filters["indent"] = indent
    filters["format"] = format_text
    filters["tojson"] = to_json
    return filters


def bounded_tests(budget: CurrentBudget) -> dict[str, Function]:
    """Returns Jinja's tests, each paying for its values."""

    def reading(*values: Any) -> tuple[Any, ...]:
        budget().read(*values)
        return values

    return {name: before(cast(Function, test), reading) for name, test in TESTS.items()}


def pay_method(budget: Budget, owner: object, name: str, args: tuple[Any, ...]) -> None:
    """Pays for a method of a built-in type.

    Raises:
        TemplateError: templates may not call it, or the allowance is spent.
    """
    budget.read(*args)
    if isinstance(owner, str) and name in _STRING_METHODS:
        _pay_string_method(budget, owner, name, args)
    elif isinstance(owner, list) and name in ("append", "pop"):
        budget.step(1 + len(cast("list[object]", owner)) // _ITEMS_PER_STEP)
    elif isinstance(owner, (list, tuple)) and name in _LIST_METHODS:
        budget.read(cast(object, owner))
    elif isinstance(owner, Mapping) and name in _MAPPING_METHODS:
        if name == "copy":
            budget.step(len(cast("dict[object, object]", owner)))
    else:
        kind = type(cast(object, owner)).__name__
        raise TemplateError(f"{kind}.{name}() is not available")


def _pay_string_method(budget: Budget, text: str, name: str, args: tuple[Any, ...]) -> None:
    if name == "join":
        (items,) = args
        if isinstance(items, (str, list, tuple)):
            budget.write(len(text) * len(cast("list[object]", items)))
            budget.write(budget.weigh(cast(object, items)).chars)
        else:
            raise TemplateError("str.join() takes a list")
    elif name == "replace":
        _pay_replace(budget, text, *args[:2])
    elif name in ("split", "rsplit", "splitlines"):
        separators = args[0] if args and isinstance(args[0], str) and args[0] else None
        blanks = (text.count(blank) for blank in _BLANKS)
        budget.step(text.count(separators) if separators is not None else sum(blanks))
        budget.write(len(text))
    else:
        budget.write(len(text))


def _pay_replace(budget: Budget, text: str, old: str, new: str) -> None:
    budget.write(len(text) + text.count(old) * len(new))


def percent(budget: Budget, text: str, values: Any) -> str:
    """Returns `text % values`.

    Raises:
        TemplateError: a width or precision is longer than three digits or comes from a value.
    """
    for match in _PERCENT.finditer(text):
        for width in match.groups():
            if width is not None and (width == "*" or len(width) > _MAX_WIDTH_DIGITS):
                raise TemplateError(f"the width of {match.group()!r} is too large")
    _pay_format(budget, text, values)
    return text % values


def check_format(budget: Budget, text: str, values: Iterable[object]) -> None:
    """Pays for `text.format(...)`.

    Raises:
        TemplateError: a field has a number of more than three digits, or takes one from a value.
    """
    if _WIDE_FIELD.search(text):
        raise TemplateError("a field of a format string is too wide or contains a field")
    _pay_format(budget, text, list(values))


def _pay_format(budget: Budget, text: str, values: object) -> None:
    weight = budget.weigh(values)
    fields = text.count("%") + text.count("{")
    # Every field may print every value, padded.
    longest = weight.chars + 64 * weight.values + 10**_MAX_WIDTH_DIGITS
    budget.write(len(text) + fields * longest)


def printed(budget: Budget, value: object) -> str:
    """Returns the text of a value as output shows it.

    Raises:
        TemplateError: the value is no data, for instance a function or a namespace.
    """
    if isinstance(value, str):
        return value
    # Written as Python writes it: a few characters around every value.
    weight = budget.weigh(value)
    budget.write(2 * weight.chars + 8 * weight.values)
    return str(value)


def materialize(budget: Budget, value: Any) -> list[Any]:
    """Returns the items of any iterable, paying for each."""
    if isinstance(value, (str, list, tuple, range, Mapping)):
        budget.step(len(cast("list[Any]", value)))
        return [*cast(Iterable[Any], value)]
    items: list[Any] = []
    for item in value:
        budget.step()
        items.append(item)
    return items


def _attributes(
    environment: Environment, items: list[Any], attribute: str | int | None
) -> list[Any]:
    if attribute is None:
        return items
    return [environment.getitem(item, cast(str, attribute)) for item in items]


def pay_outside(budget: Budget, value: object) -> None:
    """Pays for going through a value's items, but not through theirs."""
    if isinstance(value, (str, list, tuple, range, Mapping)):
        budget.step(len(cast("list[object]", value)))
    budget.step()


def _checked_indent(width: int) -> int:
    if not 0 <= width <= _MAX_INDENT:
        raise TemplateError(f"an indent of {width} is not between 0 and {_MAX_INDENT}")
    return width


def before(function: Function, prepare: Callable[..., Sequence[Any]]) -> Function:
    """Wraps a filter or test so that `prepare` sees, and may replace, its values first."""
    num_passed = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:num_passed], *prepare(*args[num_passed:]), **kwargs)

    return wrapper
