from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType as Kind
from gguf import GGUFWriter

from engine.errors import ModelFileError
from engine.gguf.metadata import Metadata
from engine.gguf.reader import GgufFile
from tests.ggufs import close

INTEGERS = {
    Kind.UINT8: 200,
    Kind.INT8: -100,
    Kind.UINT16: 60_000,
    Kind.INT16: -30_000,
    Kind.UINT32: 4_000_000_000,
    Kind.INT32: -2_000_000_000,
    Kind.UINT64: 1 << 63,
    Kind.INT64: -(1 << 62),
}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Metadata:
    path = tmp_path_factory.mktemp("metadata") / "keys.gguf"
    writer = GGUFWriter(path, "llama")
    for kind, value in INTEGERS.items():
        writer.add_key_value(f"int.{kind.name}", value, kind)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_float32("nan", float("nan"))
    writer.add_float64("inf", float("inf"))
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "na\u00efve \U0001f642")
    writer.add_string("broken", "placeholder!")
    writer.add_array("uints", [1, 2, 3])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.25, -1.5])
    writer.add_array("bools", [True, False])
    writer.add_array("strings", ["a", "", "\u2581b"])
    close(writer)
    # The writer refuses what is not text, so the bytes are put in its place.
    path.write_bytes(path.read_bytes().replace(b"placeholder!", b"ab\xff\xfeefghijkl"))
    return GgufFile.open(path).metadata


def test_values_have_the_types_of_the_file(metadata: Metadata) -> None:
    for kind, value in INTEGERS.items():
        assert metadata[f"int.{kind.name}"] == value
    assert metadata["f32"] == 0.5
    assert metadata["f64"] == 1e300
    assert metadata["yes"] is True
    assert metadata["text"] == "na\u00efve \U0001f642"
    assert metadata["strings"] == (b"a", b"", "\u2581b".encode())
    floats = metadata["floats"]
    assert isinstance(floats, np.ndarray)
    assert floats.dtype == np.float32
    assert floats.tolist() == [0.25, -1.5]
    bools = metadata["bools"]
    assert isinstance(bools, np.ndarray)
    assert bools.tolist() == [True, False]
    assert bools.dtype == np.bool_


def test_it_is_a_mapping(metadata: Metadata) -> None:
    assert "text" in metadata
    assert "texts" not in metadata
    assert len(list(metadata)) == len(metadata)
    assert next(iter(metadata)) == "general.architecture"
    with pytest.raises(KeyError):
        metadata["texts"]


def test_looking_for_a_key_does_not_decode_it(metadata: Metadata) -> None:
    assert "broken" in metadata


def test_getters_return_values(metadata: Metadata) -> None:
    assert metadata.get_uint("int.UINT8") == 200
    assert metadata.get_uint("int.UINT32") == 4_000_000_000
    assert metadata.get_uint("int.UINT64", maximum=1 << 63) == 1 << 63
    assert metadata.get_float("f32") == 0.5
    assert metadata.get_float("int.UINT8") == 200.0
    assert metadata.get_bool("no") is False
    assert metadata.get_str("text") == "na\u00efve \U0001f642"
    assert metadata.get_array("uints").tolist() == [1, 2, 3]
    assert metadata.get_strings("strings") == (b"a", b"", "\u2581b".encode())
    assert metadata.get_uints("uints", 3) == (1, 2, 3)
    assert metadata.get_uints("int.UINT8", 2) == (200, 200)


def test_defaults_stand_in_for_missing_keys_only(metadata: Metadata) -> None:
    assert metadata.get_uint("none", 7) == 7
    assert metadata.get_uint("none", 0) == 0
    assert metadata.get_uints("none", 2, 5) == (5, 5)
    assert metadata.get_float("none", 0.0) == 0.0
    assert metadata.get_bool("none", False) is False
    assert metadata.get_str("none", "") == ""
    assert metadata.get_uint("int.UINT8", 7) == 200
    with pytest.raises(ModelFileError, match="expected an integer"):
        metadata.get_uint("text", 7)


GETTERS: list[Callable[[Metadata], Any]] = [
    lambda m: m.get_uint("none"),
    lambda m: m.get_uints("none", 2),
    lambda m: m.get_float("none"),
    lambda m: m.get_bool("none"),
    lambda m: m.get_str("none"),
    lambda m: m.get_array("none"),
    lambda m: m.get_strings("none"),
]


@pytest.mark.parametrize("getter", GETTERS)
def test_a_required_key_that_is_missing_is_named(
    metadata: Metadata, getter: Callable[[Metadata], Any]
) -> None:
    with pytest.raises(ModelFileError, match=r"^keys\.gguf: key 'none' is missing$"):
        getter(metadata)


WRONG: list[tuple[Callable[[Metadata], Any], str]] = [
    (lambda m: m.get_uint("text"), "key 'text' is of type string, expected an integer"),
    (lambda m: m.get_uint("yes"), "key 'yes' is of type bool, expected an integer"),
    (lambda m: m.get_uint("f32"), "key 'f32' is of type float32, expected an integer"),
    (lambda m: m.get_uint("uints"), "key 'uints' is an array of 3 int32, expected an integer"),
    (lambda m: m.get_uint("int.INT8"), "key 'int.INT8' is -100, allowed are 0 to 4294967295"),
    (lambda m: m.get_uint("int.UINT64"), f"is {1 << 63}, allowed are 0 to 4294967295"),
    (lambda m: m.get_uint("int.UINT8", maximum=9), "is 200, allowed are 0 to 9"),
    (lambda m: m.get_uints("uints", 2), "key 'uints' has 3 elements, expected 2"),
    (lambda m: m.get_uints("ints", 3), "key 'ints' is -2, allowed are 0"),
    (lambda m: m.get_uints("floats", 2), "is an array of 2 float32, expected integers"),
    (lambda m: m.get_float("text"), "key 'text' is of type string, expected a number"),
    (lambda m: m.get_float("yes"), "expected a number"),
    (lambda m: m.get_float("nan"), "key 'nan' is nan, expected a finite number"),
    (lambda m: m.get_float("inf"), "key 'inf' is inf, expected a finite number"),
    (lambda m: m.get_bool("int.UINT8"), "is of type uint8, expected a bool"),
    (lambda m: m.get_str("uints"), "is an array of 3 int32, expected a string"),
    (lambda m: m.get_str("broken"), "key 'broken' is not UTF-8 at byte 2"),
    (lambda m: m.get_array("text"), "is of type string, expected an array of numbers"),
    (lambda m: m.get_array("strings"), "is an array of 3 string, expected an array of numbers"),
    (lambda m: m.get_strings("uints"), "is an array of 3 int32, expected an array of strings"),
    (lambda m: m["broken"], "key 'broken' is not UTF-8 at byte 2"),
]


@pytest.mark.parametrize(("getter", "detail"), WRONG, ids=[detail for _, detail in WRONG])
def test_a_wrong_type_or_value_is_an_error_that_names_the_key(
    metadata: Metadata, getter: Callable[[Metadata], Any], detail: str
) -> None:
    with pytest.raises(ModelFileError, match=re.escape(detail)):
        getter(metadata)
