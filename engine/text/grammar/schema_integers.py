"""The GBNF of whole numbers in a range, digit by digit.

Source: llama.cpp `build_min_max_int`, whose words these are, since clients see the grammar; where
it loses zeros (a minimum of 301 allowed 300) or numbers (of 215, 2015), the words are others.
"""

from __future__ import annotations

_DIGITS = 16


def integer_range(low: int | None, high: int | None) -> str:
    """Returns what matches the integers from `low` to `high`, ends included; one end may be None.

    A number without an end has at most 16 digits.
    """
    return _range(low, high, _DIGITS, is_first=True)


def _range(low: int | None, high: int | None, digits: int, *, is_first: bool) -> str:
    if low is not None and high is not None:
        return _between(low, high, digits)
    if low is not None:
        return _from(low, digits, is_first=is_first)
    assert high is not None
    return _up_to(high, digits, is_first=is_first)


def _between(low: int, high: int, digits: int) -> str:
    if high < 0:
        return f'"-" ({_between(-high, -low, digits)})'
    negative = ""
    if low < 0:
        negative = f'"-" ({_between(0, -low, digits)}) | '
        low = 0
    first, last = str(low), str(high)
    parts: list[str] = []
    for length in range(len(first), len(last)):
        parts.append(_same_length(first, "9" * length))
        first = "1" + "0" * length
    parts.append(_same_length(first, last))
    return negative + " | ".join(parts)


def _from(low: int, digits: int, *, is_first: bool) -> str:
    fewer = max(digits - 1, 1)
    if low < 0:
        below = _between(0, -low, digits)
        return f'"-" ({below}) | [0] | [1-9] {_more(0, digits - 1)}'
    if low == 0:
        return f"[0] | [1-9] {_more(0, fewer)}" if is_first else _more(1, digits)
    smallest = "1" if is_first else "0"
    if low <= 9:
        digit = str(low)
        begin = ""
        if digit > smallest:
            begin = f"{_digit(smallest, _before(digit))} {_more(1, fewer)} | "
        return f"{begin}{_digit(digit, '9')} {_more(0, fewer)}"
    return _from_long(str(low), fewer, is_first=is_first)


def _from_long(low: str, fewer: int, *, is_first: bool) -> str:
    """As `_from` for a number of several digits, or for what is left of one behind a digit."""
    length, digit = len(low), low[0]
    if not low.strip("0"):
        return _more(length, fewer + 1)
    if length == 1:
        return _from(int(low), fewer + 1, is_first=False)
    begin = end = ""
    smallest = "1" if is_first else "0"
    if digit > smallest:
        begin = f"{_digit(smallest, _before(digit))} {_more(length, fewer)} | "
    if digit < "9":
        end = f" | {_digit(_after(digit), '9')} {_more(length - 1, fewer)}"
    rest = _from_long(low[1:], max(fewer - 1, 1), is_first=False)
    return f"{begin}{_digit(digit, digit)} ({rest}){end}"


def _up_to(high: int, digits: int, *, is_first: bool) -> str:
    if high < 0:
        return f'"-" ({_from(-high, digits, is_first=False)})'
    begin = ""
    if is_first:
        begin = f'"-" [1-9] {_more(0, max(digits - 1, 1))} | '
    return begin + _between(0, high, digits)


def _same_length(first: str, last: str) -> str:
    """Returns what matches the numbers from `first` to `last`, which have as many digits."""
    shared = 0
    while shared < len(first) and first[shared] == last[shared]:
        shared += 1
    head = f'"{first[:shared]}"' if shared else ""
    if shared == len(first):
        return head
    rest = len(first) - shared - 1
    low, high = first[shared], last[shared]
    body = f"[{low}-{high}]"
    if rest:
        body = _split(low, first[shared + 1 :], high, last[shared + 1 :])
    return f"{head} {body}" if shared else body


def _split(low: str, low_rest: str, high: str, high_rest: str) -> str:
    """The first digit is low, between, or high; only the ends bound what follows."""
    rest = len(low_rest)
    zeros, nines = "0" * rest, "9" * rest
    parts: list[str] = []
    is_high_done = False
    if low_rest == zeros:
        parts.append(f"{_digit(low, _before(high))} {_more(rest, rest)}")
    else:
        parts.append(f"[{low}] ({_same_length(low_rest, nines)})")
        if low < _before(high):
            is_high_done = high_rest == nines
            until = high if is_high_done else _before(high)
            parts.append(f"{_digit(_after(low), until)} {_more(rest, rest)}")
    if not is_high_done:
        parts.append(f"{_digit(high, high)} {_same_length(zeros, high_rest)}")
    return f"({' | '.join(parts)})"


def _digit(low: str, high: str) -> str:
    return f"[{low}]" if low == high else f"[{low}-{high}]"


def _more(low: int, high: int) -> str:
    if low == high == 1:
        return "[0-9]"
    return f"[0-9]{{{low}}}" if low == high else f"[0-9]{{{low},{high}}}"


def _before(digit: str) -> str:
    return chr(ord(digit) - 1)


def _after(digit: str) -> str:
    return chr(ord(digit) + 1)
