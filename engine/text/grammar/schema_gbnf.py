"""A JSON schema as GBNF: what generates exactly the documents that llama.cpp's grammar does.

Rule names and texts are the peer's, since a client sees the grammar in its answer. Two of its
faults are not: keys beside known ones, and patterns, never leave JSON.

Example:
    >>> schema_to_gbnf({"type": "boolean"}).grammar.splitlines()[0]
    'root ::= ("true" | "false")'
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import BadSchema
from engine.text.grammar.schema_integers import integer_range
from engine.text.grammar.schema_keys import other_key
from engine.text.grammar.schema_nodes import (
    AllOf,
    AnyOf,
    AnyValue,
    Document,
    Ignored,
    IntegerRange,
    List,
    Object,
    OneValueOf,
    Primitive,
    Property,
    Reference,
    Schema,
    Text,
    Tuple,
)
from engine.text.grammar.schema_pattern import InvalidPattern, UnsupportedPattern, pattern_rule
from engine.text.grammar.schema_reader import read_schema
from engine.text.grammar.schema_rules import (
    RESERVED,
    Rules,
    constant,
    literal,
    reference_name,
    repetition,
)

# A grammar longer than this would be refused in any case.
_MAX_CHARS = 1 << 20
_OTHERS = "*"


@dataclass(frozen=True)
class SchemaGrammar:
    """GBNF with start rule "root", and the keywords that it does not honour."""

    grammar: str
    ignored: tuple[Ignored, ...]


def schema_to_gbnf(schema: Any, *, is_strict: bool = False) -> SchemaGrammar:
    """Converts a schema.

    Args:
        schema: What its JSON text holds.
        is_strict: Refuses keywords that are not honoured, instead of listing them.

    Raises:
        BadSchema: It is malformed, too large, or not honoured; names path and keyword.
    """
    document = read_schema(schema)
    converter = SchemaWriter(document)
    converter.add(document.root, "")
    ignored = converter.ignored
    if is_strict and ignored:
        first = ignored[0]
        raise BadSchema(first.path, f"{first.keyword} cannot be honoured")
    return SchemaGrammar(converter.rules.write(), ignored)


class SchemaWriter:
    """Writes the rules of one document's schemas."""

    def __init__(self, document: Document, rules: Rules | None = None, *, prefix: str = "") -> None:
        """Begins a document; `prefix` keeps its references apart from others in the same rules."""
        self.rules = Rules() if rules is None else rules
        self._prefix = prefix
        self._document = document
        self._ignored = list(document.ignored)
        self._being_written: set[str] = set()
        self._num_chars = 0

    @property
    def root(self) -> Schema:
        """The document's own schema."""
        return self._document.root

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        """What was not honoured so far."""
        return tuple(self._ignored)

    def add(self, schema: Schema, name: str) -> str:
        """Adds what matches a schema, and returns the rule's name; "" is the root.

        Raises:
            BadSchema: A pattern is malformed, or the grammar becomes too large.
        """
        rule_name = f"{name}-" if name in RESERVED else name or "root"
        match schema:
            case Reference(ref):
                return self._rule(rule_name, self._resolved(ref))
            case AnyOf(alternatives):
                prefix = f"{name}-" if name else "alternative-"
                parts = [self.add(part, f"{prefix}{i}") for i, part in enumerate(alternatives)]
                return self._rule(rule_name, " | ".join(parts))
            case AllOf(parts):
                return self._rule(rule_name, self._all_of(parts, name))
            case OneValueOf(values, True):
                return self._rule(rule_name, constant(values[0]))
            case OneValueOf(values):
                return self._rule(rule_name, f"({' | '.join(map(constant, values))})")
            case Object(properties, additional):
                if not properties and isinstance(additional, AnyValue):
                    return self._rule(rule_name, self.rules.add_builtin("object"))
                return self._rule(rule_name, self._object(properties, additional, name))
            case List() | Tuple():
                return self._array(schema, name, rule_name)
            case Text():
                return self._text(schema, rule_name)
            case IntegerRange(None, None):
                return self._builtin("integer", rule_name)
            case IntegerRange(low, high):
                return self._rule(rule_name, f"({integer_range(low, high)})")
            case Primitive(kind):
                return self._builtin(kind, rule_name)
            case AnyValue():
                return self._rule(rule_name, self.rules.add_builtin("value"))

    def _rule(self, name: str, text: str) -> str:
        self._num_chars += len(text)
        if self._num_chars > _MAX_CHARS:
            raise BadSchema("#", f"the grammar comes to more than {_MAX_CHARS} characters")
        return self.rules.add(name, text)

    def _builtin(self, kind: str, rule_name: str) -> str:
        return self.rules.add_builtin(kind, "root" if rule_name == "root" else None)

    def _resolved(self, ref: str) -> str:
        name = self._prefix + reference_name(ref)
        if name in self.rules or ref in self._being_written:
            return name
        self._being_written.add(ref)
        name = self.add(self._document.targets[ref], name)
        self._being_written.discard(ref)
        return name

    def _array(self, schema: List | Tuple, name: str, rule_name: str) -> str:
        prefix = f"{name}-" if name else ""
        if isinstance(schema, Tuple):
            items = [self.add(item, f"{prefix}tuple-{i}") for i, item in enumerate(schema.items)]
            text = ' "," space '.join(items)
            return self._rule(rule_name, f'"[" space {text} space "]"')
        if isinstance(schema.items, AnyValue) and not schema.low and schema.high is None:
            return self._builtin("array", rule_name)
        item = self.add(schema.items, f"{prefix}item")
        text = repetition(item, schema.low, schema.high, '"," space')
        return self._rule(rule_name, f'"[" space {text} space "]"')

    def _text(self, schema: Text, rule_name: str) -> str:
        if schema.pattern:
            return self._pattern(schema, rule_name)
        if schema.format == "uuid":
            return self._builtin("uuid", rule_name)
        if schema.format:
            return self._rule(rule_name, self.rules.add_builtin(f"{schema.format}-string"))
        if schema.low or schema.high is not None:
            char = self.rules.add_builtin("char")
            text = repetition(char, schema.low, schema.high)
            return self._rule(rule_name, f'"\\"" {text} "\\""')
        return self._builtin("string", rule_name)

    def _pattern(self, schema: Text, rule_name: str) -> str:
        mark = self.rules.mark()
        try:
            return self._rule(rule_name, pattern_rule(schema.pattern, rule_name, self.rules))
        except UnsupportedPattern:
            self.rules.undo(mark)
            self._ignored.append(Ignored(schema.path, "pattern"))
            return self._rule(rule_name, self.rules.add_builtin("string"))
        except InvalidPattern as error:
            raise BadSchema(schema.path, f"invalid pattern {schema.pattern}: {error}") from error

    def _all_of(self, parts: Sequence[Schema], name: str) -> str:
        """Merges the members of objects, or finds the values that all parts list."""
        properties: list[Property] = []
        counts: dict[str, int] = {}

        def take(part: Schema, is_required: bool) -> None:
            match part:
                case Reference(ref) if ref in self._document.targets:
                    take(self._document.targets[ref], is_required)
                case Object(members, _):
                    properties.extend(
                        Property(member.name, member.schema, is_required) for member in members
                    )
                case OneValueOf(values, False):
                    for value in map(constant, values):
                        counts[value] = counts.get(value, 0) + 1
                case _:
                    return

        for part in parts:
            if isinstance(part, AnyOf):
                for alternative in part.alternatives:
                    take(alternative, False)
            else:
                take(part, True)
        shared = sorted(value for value, count in counts.items() if count == len(parts))
        if shared:
            return f"({' | '.join(shared)})"
        return self._object(properties, None, name)

    def _object(self, properties: Sequence[Property], additional: Schema | None, name: str) -> str:
        prefix = f"{name}-" if name else ""
        pairs: dict[str, str] = {}
        for member in properties:
            value = self.add(member.schema, f"{prefix}{member.name}")
            key = literal(json.dumps(member.name, ensure_ascii=False))
            pairs[member.name] = self._rule(
                f"{prefix}{member.name}-kv", f'{key} space ":" space {value}'
            )
        required = [pairs[member.name] for member in properties if member.is_required]
        optional = [
            (member.name, pairs[member.name], False)
            for member in properties
            if not member.is_required
        ]
        if additional is not None:
            pair = self._additional(additional, f"{prefix}additional", list(pairs))
            optional.append((_OTHERS, pair, True))
        if not required and not optional:
            return '"{" space "}"'
        body = ' "," space '.join(required)
        if optional:
            choices = " | ".join(self._optional(optional, prefix))
            body += f' ( "," space ( {choices} ) )?' if required else f" ({choices} )?"
        return f'"{{" space {body} space "}}"'

    def _additional(self, schema: Schema, name: str, keys: list[str]) -> str:
        if isinstance(schema, AnyValue):
            value = self.rules.add_builtin("value")
        else:
            value = self.add(schema, f"{name}-value")
        if keys:
            key = self._rule(f"{name}-k", other_key(keys, self.rules.add_builtin("char")))
        else:
            key = self.rules.add_builtin("string")
        return self._rule(f"{name}-kv", f'{key} ":" space {value}')

    def _optional(self, members: Sequence[tuple[str, str, bool]], prefix: str) -> list[str]:
        """Returns, for each member, what matches it as the first and any later ones behind it.

        `members` are (name, rule of key and value, whether it may come again).
        """
        firsts: list[str] = []
        rest = ""
        for _, pair, repeats in reversed(members):
            again = f'( "," space {pair} )'
            first = f"{pair} {again}*" if repeats else pair
            following = again + ("*" if repeats else "?")
            tail = f" {rest}" if rest else ""
            firsts.append(first + tail)
            if len(firsts) < len(members):
                # The rule of what may follow a member bears that member's name.
                before = members[-len(firsts) - 1][0]
                rest = self._rule(f"{prefix}{before}-rest", following + tail)
        return firsts[::-1]
