from __future__ import annotations

import os
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFEndian, GGUFReader, GGUFWriter

from engine.errors import ModelFileError
from engine.gguf.reader import GgufFile
from engine.gguf.vocab import read_vocab
from tests.ggufs import TinyLlama, close, random_blocks, write_gguf, write_llama

U32, STRING, ARRAY = 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def head(
    keys: list[bytes],
    tensors: list[bytes],
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    start = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    return start + b"".join(keys) + b"".join(tensors)


def refusal(path: Path, data: bytes, detail: str) -> None:
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    assert str(caught.value) == f"{path.name}: {detail}"
    assert caught.value.metadata() == {"path": path.name, "detail": detail}


def test_tensors_are_those_that_the_gguf_package_sees(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", TinyLlama(ggml_type=Type.Q8_0))
    reference = {t.name: t for t in GGUFReader(path).tensors}
    with GgufFile.open(path) as file:
        assert list(file.tensors) == list(reference)
        for name, info in file.tensors.items():
            other = reference[name]
            assert info.name == name
            assert info.ggml_type == other.tensor_type
            assert info.shape == tuple(other.shape.tolist()[::-1])
            assert info.nbytes == other.n_bytes
            np.testing.assert_array_equal(file.raw(name), other.data.view(np.uint8).reshape(-1))


def test_raw_is_a_read_only_view(tmp_path: Path) -> None:
    with GgufFile.open(write_llama(tmp_path / "m.gguf")) as file:
        view = file.raw("output.weight")
    assert not view.flags.owndata
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_views_outlive_the_file_and_nothing_else_does(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    with GgufFile.open(path) as file:
        view = file.raw("output_norm.weight")
        expected = view.copy()
    np.testing.assert_array_equal(view, expected)
    with pytest.raises(ValueError, match=r"m\.gguf is closed"):
        file.raw("output_norm.weight")
    with pytest.raises(ValueError, match="is closed"):
        file.release("output_norm.weight")


def test_released_bytes_read_the_same_again(tmp_path: Path) -> None:
    tensors = {
        name: (random_blocks(np.random.default_rng(i), Type.Q8_0, (33, 4096)), Type.Q8_0)
        for i, name in enumerate("ab")
    }
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", tensors=tensors)) as file:
        view = file.raw("b")
        file.release("b")
        file.release("b", 5000, 5001)
        file.release("b", 5000)
        for name, (expected, _) in tensors.items():
            np.testing.assert_array_equal(file.raw(name), expected.reshape(-1))
        np.testing.assert_array_equal(view, tensors["b"][0].reshape(-1))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with GgufFile.open(write_llama(tmp_path / "m.gguf")) as file:
        for method in (file.raw, file.release):
            with pytest.raises(ModelFileError, match=r"^m\.gguf: tensor 'x' is missing$"):
                method("x")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int | None) -> None:
    tensors = {
        name: (np.arange(count, dtype=np.float32), Type.F32)
        for name, count in (("a", 3), ("b", 100), ("c", 1))
    }
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, alignment=alignment, version=version)
    with GgufFile.open(path) as file:
        for name, (values, _) in tensors.items():
            assert file.tensors[name].offset % (alignment or 32) == 0
            np.testing.assert_array_equal(file.raw(name).view(np.float32), values)


def test_a_tensor_without_dimensions_is_one_number(tmp_path: Path) -> None:
    data = head([], [tensor(b"x", ())])
    path = tmp_path / "m.gguf"
    path.write_bytes(data.ljust(64, b"\0") + struct.pack("<f", 2.5))
    with GgufFile.open(path) as file:
        assert file.tensors["x"].shape == (1,)
        assert file.raw("x").view(np.float32).tolist() == [2.5]


def test_opening_a_large_vocabulary_decodes_none_of_it(tmp_path: Path) -> None:
    """262144 tokens, as Gemma has: opening walks over them, reading the vocabulary makes them."""
    num_tokens = 1 << 18
    tokens = b"".join(text(b"token%d" % i) for i in range(num_tokens))
    keys = [
        key(b"tokenizer.ggml.model", STRING, text(b"llama")),
        key(b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, num_tokens) + tokens),
    ]
    path = tmp_path / "big.gguf"
    path.write_bytes(head(keys, []))
    tracemalloc.start()
    try:
        with GgufFile.open(path) as file:
            peak = tracemalloc.get_traced_memory()[1]
            vocab = read_vocab(file.metadata)
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert len(vocab.tokens) == num_tokens
    assert vocab.tokens[-1] == b"token262143"


# Shards


def test_any_shard_opens_the_model(tmp_path: Path) -> None:
    whole = write_llama(tmp_path / "whole.gguf")
    write_llama(tmp_path / "m.gguf", split_max_tensors=8)
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with GgufFile.open(whole) as expected:
        for path in paths:
            with GgufFile.open(path) as file:
                assert file.name == paths[0].name
                assert list(file.tensors) == list(expected.tensors)
                assert file.metadata.get_str("general.name") == "tiny llama"
                for name in expected.tensors:
                    np.testing.assert_array_equal(file.raw(name), expected.raw(name))
                    file.release(name)


def _write_shards(folder: Path) -> list[Path]:
    tensors = {
        name: (np.arange(8, dtype=np.float32), Type.F32) for name in ("first", "second", "third")
    }
    write_gguf(folder / "m.gguf", tensors=tensors, split_max_tensors=1)
    return sorted(folder.glob("*.gguf"))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = _write_shards(tmp_path)
    paths[1].unlink()
    with pytest.raises(
        ModelFileError, match=r"^m-00002-of-00003\.gguf: cannot be read: No such file or directory$"
    ):
        GgufFile.open(paths[2])


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    paths = _write_shards(tmp_path)
    with pytest.raises(ModelFileError, match=r"shard 1 of 3 must be named \*-00001-of-00003\.gguf"):
        GgufFile.open(paths[0].rename(tmp_path / "model.gguf"))


def test_a_shard_under_anothers_name_is_refused(tmp_path: Path) -> None:
    paths = _write_shards(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(
        ModelFileError, match=r"^m-00002-of-00003\.gguf: key 'split\.no' is 2, expected 1$"
    ):
        GgufFile.open(paths[0])


def test_a_shard_of_another_split_is_refused(tmp_path: Path) -> None:
    paths = _write_shards(tmp_path)
    data = paths[1].read_bytes()
    at = data.index(b"split.count") + len(b"split.count") + 4
    paths[1].write_bytes(data[:at] + struct.pack("<H", 7) + data[at + 2 :])
    with pytest.raises(ModelFileError, match=r"key 'split\.count' is 7, expected 3"):
        GgufFile.open(paths[0])


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    paths = _write_shards(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes().replace(b"third", b"first"))
    with pytest.raises(
        ModelFileError,
        match=r"^m-00003-of-00003\.gguf: tensor 'first' is also in an earlier shard$",
    ):
        GgufFile.open(paths[0])


def test_the_number_of_tensors_must_be_the_sum_of_the_shards(tmp_path: Path) -> None:
    paths = _write_shards(tmp_path)
    data = paths[0].read_bytes()
    at = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    paths[0].write_bytes(data[:at] + struct.pack("<i", 4) + data[at + 4 :])
    with pytest.raises(
        ModelFileError, match=r"key 'split\.tensors\.count' is 4, the shards hold 3"
    ):
        GgufFile.open(paths[0])


# What is no model file


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "nul"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("a\0b" if kind == "nul" else "m.gguf")
    if kind == "folder":
        path.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    detail = {
        "missing": "cannot be read: No such file or directory",
        "folder": "not a regular file",
        "fifo": "not a regular file",
        "nul": "cannot be read: embedded null byte",
    }[kind]
    with pytest.raises(ModelFileError, match=re.escape(detail)):
        GgufFile.open(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path / "m.gguf", b"", "the file is empty")


def test_big_endian_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    close(GGUFWriter(path, "llama", endianess=GGUFEndian.BIG))
    with pytest.raises(ModelFileError, match="big-endian GGUF is not supported"):
        GgufFile.open(path)


@pytest.mark.parametrize("version", [0, 1, 4, 0xFFFFFFFF])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    detail = f"GGUF version {version} is not supported, versions 2 and 3 are"
    refusal(tmp_path / "m.gguf", head([], [], version=version), detail)


def test_a_file_cut_anywhere_in_its_head_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        {"a": 1, "b": "text", "c": ["x", "yz"], "d": [1, 2, 3]},
        {"t": (np.zeros((2, 4), np.float32), Type.F32)},
    )
    data = path.read_bytes()
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError):
            GgufFile.open(path)


ONE = struct.pack("<I", 1)
BIG = 1 << 62
HOSTILE: list[tuple[str, bytes, str]] = [
    ("magic", b"GGML" + bytes(20), "not a GGUF file: it starts with b'GGML'"),
    (
        "keys",
        head([], [], counts=(0, BIG)),
        f"the number of keys is {BIG}, a file of 24 bytes holds up to 0",
    ),
    (
        "tensors",
        head([], [], counts=((1 << 64) - 1, 0)),
        f"the number of tensors is {(1 << 64) - 1}, a file of 24 bytes holds up to 0",
    ),
    (
        "key-length",
        head([struct.pack("<Q", BIG) + bytes(20)], []),
        f"key 0 has a name of {BIG} bytes, allowed are 1 to 65535",
    ),
    (
        "key-empty",
        head([key(b"", U32, ONE)] * 2, []),
        "key 0 has a name of 0 bytes, allowed are 1 to 65535",
    ),
    (
        "key-long",
        head([key(b"n" * 1000, 13, ONE)], []),
        f"key '{'n' * 77}...' has unknown value type 13",
    ),
    ("key-text", head([key(b"\xff\xfe", U32, ONE)], []), "key 0 has a name that is not UTF-8"),
    ("key-twice", head([key(b"k", U32, ONE)] * 2, []), "key 'k' appears twice"),
    ("key-type", head([key(b"k", 13, ONE)], []), "key 'k' has unknown value type 13"),
    (
        "string-length",
        head([key(b"k", STRING, struct.pack("<Q", (1 << 64) - 1))], []),
        f"key 'k' needs {(1 << 64) - 1} bytes at offset 45, 0 are left",
    ),
    (
        "nesting",
        head([key(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))], []),
        "key 'k' is an array of arrays",
    ),
    (
        "array-type",
        head([key(b"k", ARRAY, struct.pack("<IQ", 99, 1))], []),
        "key 'k' has unknown value type 99",
    ),
    (
        "array-count",
        head([key(b"k", ARRAY, struct.pack("<IQ", U32, 1 << 63))], []),
        f"key 'k' has {1 << 63} elements, the rest of the file holds up to 0",
    ),
    (
        "strings-count",
        head([key(b"k", ARRAY, struct.pack("<IQ", STRING, 1 << 40) + text(b"a"))], []),
        f"key 'k' has {1 << 40} elements, the rest of the file holds up to 1",
    ),
    (
        "strings-length",
        head([key(b"k", ARRAY, struct.pack("<IQQ", STRING, 2, (1 << 64) - 8) + bytes(8))], []),
        "key 'k': string 1 of 2 is past the file's end",
    ),
    (
        "strings-last",
        head([key(b"k", ARRAY, struct.pack("<IQQQ", STRING, 2, 0, 1))], []),
        "key 'k': string 1 of 2 is past the file's end",
    ),
    (
        "alignment-type",
        head([key(b"general.alignment", STRING, text(b"32"))], []),
        "key 'general.alignment' must be a uint32",
    ),
    *(
        (
            f"alignment-{value}",
            head([key(b"general.alignment", U32, struct.pack("<I", value))], []),
            f"key 'general.alignment' is {value}, allowed are powers of two up to 1048576",
        )
        for value in (0, 24, 1 << 21, (1 << 32) - 1)
    ),
    (
        "name-length",
        head([], [tensor(b"x" * 64, (1,))]),
        "tensor 0 has a name of 64 bytes, allowed are 1 to 63",
    ),
    ("name-text", head([], [tensor(b"\xc3", (1,))]), "tensor 0 has a name that is not UTF-8"),
    (
        "name-twice",
        head([], [tensor(b"t", (1,)), tensor(b"t", (1,), offset=32)]) + bytes(100),
        "tensor 't' appears twice",
    ),
    (
        "dims-count",
        head([], [tensor(b"t", (1,) * 5)]),
        "tensor 't' has 5 dimensions, the limit is 4",
    ),
    (
        "dims-zero",
        head([], [tensor(b"t", (4, 0))]),
        f"tensor 't' has shape (0, 4), allowed are 1 to {(1 << 63) - 1} elements",
    ),
    (
        "dims-product",
        head([], [tensor(b"t", (1 << 32, 1 << 32))]),
        f"tensor 't' has shape {(1 << 32, 1 << 32)}, allowed are 1 to {(1 << 63) - 1} elements",
    ),
    ("type", head([], [tensor(b"t", (4,), kind=4)]), "tensor 't' has unknown type 4"),
    (
        "columns",
        head([], [tensor(b"t", (33, 2), kind=8)]),
        "tensor 't' has 33 columns, Q8_0 needs a multiple of 32",
    ),
    (
        "offset",
        head([], [tensor(b"t", (4,), offset=32)]) + bytes(200),
        "tensor 't' is at data offset 32, expected 0",
    ),
    (
        "overlap",
        head([], [tensor(b"t", (16,)), tensor(b"u", (16,), offset=32)]) + bytes(200),
        "tensor 'u' is at data offset 32, expected 64",
    ),
    (
        "past-the-end",
        head([], [tensor(b"t", (16,))]).ljust(64, b"\0") + bytes(63),
        "tensor 't' ends at byte 128, the file has 127 bytes",
    ),
    (
        "far-past-the-end",
        head([], [tensor(b"t", (1 << 60,))]).ljust(64, b"\0"),
        f"tensor 't' ends at byte {64 + (4 << 60)}, the file has 64 bytes",
    ),
]


@pytest.mark.parametrize(
    ("data", "detail"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE]
)
def test_a_damaged_head_is_refused_by_name(tmp_path: Path, data: bytes, detail: str) -> None:
    refusal(tmp_path / "m.gguf", data, detail)


def test_more_keys_or_tensors_than_any_model_has_are_refused(tmp_path: Path) -> None:
    # Each takes 14 bytes and far more in memory, so the file's size is no bound.
    padding = bytes(14 * 70_000)
    refusal(
        tmp_path / "m.gguf",
        head([], [], counts=(0, 65537)) + padding,
        f"the number of keys is 65537, a file of {24 + len(padding)} bytes holds up to 65536",
    )
