import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadGrammar, BadSchema
from engine.text.grammar.matcher import GrammarCompiler
from engine.text.grammar.schema_gbnf import schema_to_gbnf
from tests.unit.engine.text.grammar.spelling import SpellingTokenizer, compiled, matches

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
        }
    },
}

CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "null"}, ["null"], ["nul", "", "0"]),
    ({"type": "boolean"}, ["true", "false"], ["True"]),
    ({"type": "number"}, ["0", "-1.5", "1e5", "2E-3"], ["01", "+1", ".5", "1."]),
    ({"type": "integer"}, ["0", "-7", "1234567890123456"], ["1.0", "00", "12345678901234567"]),
    ({"type": "string"}, ['""', '"a\\n\\u00e9é"'], ['"', "a", '"\n"', '"\\x"']),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', '"\\n日"'], ['""', '"abc"']),
    ({"const": {"a": [1, 2.5, "x"]}}, ['{"a":[1,2.5,"x"]}'], ['{"a": [1,2.5,"x"]}']),
    ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ["a", "2"]),
    ({"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
    ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, ["null", "3"], ["true"]),
    ({"type": "array"}, ["[]", "[1, [2]]", "[ null,{} ]"], ["[1 2]", "[,]"]),
    (
        {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
        ["[null,null]", "[null, null,null]"],
        ["[null]", "[null,null,null,null]"],
    ),
    (
        {"items": [{"type": "null"}, {"type": "boolean"}]},
        ["[null,true]"],
        ["[null]", "[true,null]"],
    ),
    ({"type": "object"}, ["{}", '{"a":{"b":[]}}', '{\n  "a": 1}'], ["{a:1}", '{"a":1,}']),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "required": ["a"],
        },
        ['{"a":null}', '{"a": null, "b": null}'],
        ['{"b":null}', '{"b":null,"a":null}', "{}"],
    ),
    (
        {"properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}},
        ["{}", '{"b":null}', '{"a":null,"c":null}', '{"a":null,"b":null,"c":null}'],
        ['{"c":null,"a":null}', '{"a":null,"d":null}'],
    ),
    (
        OPEN,
        ['{"a":1}', '{"a":1,"ab":null}', '{"b":2,"c":3}', '{"b\\u0061":0}'],
        ['{"b":2,"a":1}', '{"a":null}', '{"\\":0}', '{"\\u0061":0}'],
    ),
    (
        {"properties": {'q"\\': {"type": "null"}}, "additionalProperties": {"type": "null"}},
        ['{"q\\"\\\\":null}', '{"q\\n":null}', '{"x":null}'],
        ['{"x":1}'],
    ),
    (TREE, ['{"v":true}', '{"v":true,"next":{"v":false}}'], ['{"next":{"v":true}}']),
    (
        {
            "allOf": [
                {"properties": {"a": {"type": "null"}}},
                {"properties": {"b": {"type": "null"}}},
            ]
        },
        ['{"a":null,"b":null}'],
        ['{"a":null}'],
    ),
    ({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ['"b"'], ['"a"', '"c"']),
    ({"type": "string", "format": "date"}, ['"2026-02-30"'], ['"2026-13-01"']),
    (
        {"type": "string", "format": "time"},
        ['"23:59:59Z"', '"00:00:00.123+01:00"'],
        ['"24:00:00Z"'],
    ),
    ({"type": "string", "format": "uuid"}, ['"01234567-89ab-cdef-0123-456789abcdef"'], ['"0"']),
    ({"type": "string", "pattern": "^a(b|c)*[0-9]{2}$"}, ['"abcb42"'], ['"a4"', '"ab123"']),
    # What JSON escapes is matched escaped.
    ({"type": "string", "pattern": '^."\\\\?$'}, ['"x\\""', '"\\"\\"\\\\"'], ['"""', '"x""']),
    ({"type": "string", "pattern": "^[^a]$"}, ['"b"', '"\\""', '"\\n"'], ['"a"', '"""', '"\\"']),
    ({"type": "string", "pattern": "no anchors"}, ['"anything"'], ["1"]),
    ({}, ["1", "[{}]", '"x"'], [""]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: json.dumps(value)[:40])
def test_what_a_schema_allows(schema: Any, good: list[str], bad: list[str]):
    grammar = compiled(schema_to_gbnf(schema).grammar)
    assert {text: matches(grammar, text) for text in good} == dict.fromkeys(good, True)
    assert {text: matches(grammar, text) for text in bad} == dict.fromkeys(bad, False)
    for text in good:
        json.loads(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(-320, 320), st.integers(0, 400), st.sampled_from(["both", "low", "high"]))
def test_integer_ranges_hold_exactly_their_numbers(low: int, size: int, ends: str):
    high = low + size
    schema: dict[str, Any] = {"type": "integer"}
    if ends != "high":
        schema["minimum"] = low
    if ends != "low":
        schema["exclusiveMaximum"] = high + 1
    grammar = compiled(schema_to_gbnf(schema).grammar)
    near = {
        -1000,
        -1,
        0,
        1,
        1000,
        low - 1,
        low,
        low + 1,
        high - 1,
        high,
        high + 1,
        (low + high) // 2,
    }
    for value in near:
        fits = (ends == "high" or value >= low) and (ends == "low" or value <= high)
        assert matches(grammar, str(value)) == fits, value


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "\\.", '"', "\\\\", "é"]),
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}"])).map(
                lambda pair: f"({pair[0]}){pair[1]}"
            ),
            st.lists(inner, min_size=2, max_size=2).map(lambda parts: f"({'|'.join(parts)})"),
        ),
        max_leaves=4,
    ),
    st.lists(st.text('ab."\\é\n', max_size=4), min_size=1, max_size=8),
)
def test_patterns_match_what_python_matches(pattern: str, values: list[str]):
    grammar = compiled(schema_to_gbnf({"type": "string", "pattern": f"^{pattern}$"}).grammar)
    for value in values:
        # ECMAScript's dot takes neither kind of line end.
        expected = re.fullmatch(pattern, value) is not None
        assert matches(grammar, json.dumps(value, ensure_ascii=False)) == expected, value


REFUSED: list[tuple[Any, str, str]] = [
    ([], "#", "schema must be an object"),
    ({"type": "strange"}, "#", "unrecognized type strange"),
    ({"type": 7}, "#", "type must be a string"),
    ({"type": []}, "#", "type must not be empty"),
    ({"enum": []}, "#", "enum must be a non-empty array"),
    ({"anyOf": {}}, "#/anyOf", "must be an array"),
    ({"oneOf": []}, "#/oneOf", "must not be empty"),
    ({"properties": {"a": {"type": "x"}}}, "#/properties/a", "unrecognized type x"),
    ({"properties": 3}, "#", "properties must be an object"),
    ({"type": "object", "additionalProperties": "no"}, "#", "additionalProperties"),
    ({"$ref": "#/nowhere"}, "#", "cannot resolve $ref #/nowhere, nowhere not found"),
    ({"$ref": "#/a/9", "a": []}, "#", "9 is out of range"),
    ({"$ref": "http://x"}, "#", "only references into the same document"),
    ({"type": "array", "minItems": -1}, "#", "minItems must be a non-negative integer"),
    # What GBNF could not repeat: its line would say nothing to who wrote a schema.
    ({"items": {"type": "string", "minLength": 2001}}, "#/items", "2001 is more than 2000"),
    ({"minLength": 5, "maxLength": 3}, "#", "minLength 5 is more than maxLength 3"),
    ({"type": "array", "minItems": 2002}, "#", "minItems 2002 is more than 2001"),
    ({"type": "array", "minItems": 5, "maxItems": 3}, "#", "more than maxItems 3"),
    ({"type": "string", "pattern": "^a{2001}$"}, "#", "2001 repetitions, more than 2000"),
    ({"type": "string", "pattern": "^(a$"}, "#", "unbalanced parentheses"),
    ({"type": "string", "pattern": "^*$"}, "#", "nothing to repeat"),
    ({"type": "string", "format": 1}, "#", "format must be a string"),
    ({"type": "integer", "minimum": "x"}, "#", "minimum must be a number"),
    ({"type": "integer", "minimum": 3, "maximum": 1}, "#", "no integer is between 3 and 1"),
]


@pytest.mark.parametrize(("schema", "path", "problem"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_name_the_path(schema: Any, path: str, problem: str):
    with pytest.raises(BadSchema) as raised:
        schema_to_gbnf(schema)
    assert raised.value.path == path
    assert problem in str(raised.value)


def test_what_is_too_complex_as_a_whole_is_the_schemas_fault():
    pattern = f"^({'(' * 99}a{')' * 99}{{2000}})$"
    grammar = schema_to_gbnf({"items": {"pattern": pattern}}).grammar
    with pytest.raises(BadSchema, match="too deeply nested") as raised:
        GrammarCompiler(SpellingTokenizer()).compile_schema(grammar)
    assert raised.value.path == "#"


@pytest.mark.parametrize(
    "schema", [{"type": "array", "minItems": 9, "maxItems": 0}, {"minLength": 9, "maxLength": 0}]
)
def test_a_least_number_above_nothing_is_passed_over_as_in_the_peer(schema: Any):
    text = "[]" if "minItems" in schema else '""'
    assert matches(compiled(schema_to_gbnf(schema).grammar), text)


IGNORED: list[tuple[Any, str, str]] = [
    ({"type": "integer", "multipleOf": 2}, "#", "multipleOf"),
    ({"type": "number", "minimum": 2}, "#", "minimum"),
    ({"type": "array", "uniqueItems": True}, "#", "uniqueItems"),
    ({"properties": {"a": {"not": {}}}}, "#/properties/a", "not"),
    ({"type": "string", "format": "email"}, "#", "format"),
    ({"type": "string", "pattern": "a"}, "#", "pattern"),
    ({"properties": {}, "required": ["x"]}, "#", "required"),
    ({"type": "object", "patternProperties": {}}, "#", "patternProperties"),
]


@pytest.mark.parametrize(("schema", "path", "keyword"), IGNORED)
def test_what_is_not_honoured_is_listed_or_refused(schema: Any, path: str, keyword: str):
    (ignored,) = schema_to_gbnf(schema).ignored
    assert (ignored.path, ignored.keyword) == (path, keyword)
    with pytest.raises(BadSchema, match=f"{keyword} cannot be honoured"):
        schema_to_gbnf(schema, is_strict=True)


def test_annotations_are_no_constraints():
    schema: dict[str, Any] = {
        "title": "t",
        "description": "d",
        "type": "null",
        "default": None,
        "$defs": {},
    }
    assert schema_to_gbnf(schema, is_strict=True).ignored == ()


def test_depth_and_size_are_bounded():
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    with pytest.raises(BadSchema, match="nested more than 64"):
        schema_to_gbnf(deep)
    wide: dict[str, Any] = {"type": "null"}
    for _ in range(12):
        wide = {"type": ["object"] * 4, "properties": {"a": wide}}
    with pytest.raises(BadSchema, match="more than 20000 parts"):
        schema_to_gbnf(wide)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(
        ["object", "string", "array", "integer", "^a$", "^(", "#/a", "date", "", "a"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "items",
                    "required",
                    "enum",
                    "const",
                    "$ref",
                    "anyOf",
                    "oneOf",
                    "allOf",
                    "pattern",
                    "format",
                    "minLength",
                    "maxLength",
                    "minItems",
                    "maxItems",
                    "minimum",
                    "maximum",
                    "exclusiveMinimum",
                    "additionalProperties",
                    "prefixItems",
                    "a",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(JSON)
def test_any_json_is_converted_or_refused_by_path(schema: Any):
    try:
        compiled(schema_to_gbnf(schema).grammar)
    except (BadGrammar, BadSchema):
        return
