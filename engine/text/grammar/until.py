"""Text up to a mark, as the rules of a grammar."""

from __future__ import annotations

from engine.text.grammar.schema_rules import Rules, class_char


def until(mark: str, rules: Rules, name: str) -> str:
    """Adds rules, named after `name`, that match any text up to the first `mark`, and the mark.

    A rule per number of characters of the mark that the text ends in (Knuth, Morris and Pratt).
    """
    for matched in range(len(mark)):
        ways: dict[int, list[str]] = {}
        chars = sorted(set(mark))
        for char in chars:
            ways.setdefault(_matched(mark, mark[:matched] + char), []).append(char)
        others = "".join(class_char(ord(char)) for char in chars)
        steps = [f"[^{others}] {name}-0"]
        for then, with_chars in ways.items():
            one_of = "".join(class_char(ord(char)) for char in with_chars)
            steps.append(f"[{one_of}]" + ("" if then == len(mark) else f" {name}-{then}"))
        rules.add(f"{name}-{matched}", " | ".join(steps))
    return f"{name}-0"


def _matched(mark: str, text: str) -> int:
    return next(n for n in range(min(len(mark), len(text)), -1, -1) if text.endswith(mark[:n]))
