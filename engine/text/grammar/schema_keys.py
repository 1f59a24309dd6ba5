r"""The key of a member that is none of those with a schema of their own.

A tree of the known keys' characters: at every place a key may leave them all, or go on past the
end of one. Where it leaves, no `\u` escape is taken, which could spell a known key another way.

Source: llama.cpp `_not_strings`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.text.grammar.schema_rules import class_char

# What a key may leave the known ones by, beside plain characters; they have no other form.
_LETTER_ESCAPES = '[\\\\] ["\\\\bfnrt]'


@dataclass
class _Node:
    children: dict[str, _Node] = field(default_factory=dict["str", "_Node"])
    is_key: bool = False


def other_key(keys: Sequence[str], char_rule: str) -> str:
    """Returns what matches a JSON string that is none of the keys.

    Args:
        keys: The known keys, at least one.
        char_rule: Name of the rule of one character of a string.
    """
    root = _Node()
    for key in keys:
        node = root
        for char in json.dumps(key, ensure_ascii=False)[1:-1]:
            node = node.children.setdefault(char, _Node())
        node.is_key = True
    optional = "" if root.is_key else "?"
    return f'["] ( {_beyond(root, char_rule)} ){optional} ["]'


def _beyond(node: _Node, char_rule: str) -> str:
    """What a key that came to this node goes on with; nothing at all is the caller's."""
    parts: list[str] = []
    for char, child in sorted(node.children.items()):
        # As in the peer, a key does not end on the way to a known one.
        rest = f"({_beyond(child, char_rule)})" if child.children else f"{char_rule}+"
        parts.append(f"[{class_char(ord(char))}] {rest}")
    known = "".join(class_char(ord(char)) for char in sorted(node.children) if char not in '"\\')
    plain = f'[^"\\\\\\x7F\\x00-\\x1F{known}] {char_rule}*'
    parts.append(plain)
    if "\\" not in node.children:
        parts.append(f"{_LETTER_ESCAPES} {char_rule}*")
    return " | ".join(parts)
