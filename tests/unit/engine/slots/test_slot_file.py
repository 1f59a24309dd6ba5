"""Slot files, whole and damaged: what was written comes back, and nothing else does."""

from __future__ import annotations

import hashlib
import json
import resource
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.slots.errors import (
    SlotContextTooSmall,
    SlotFileCorrupt,
    SlotFileMismatch,
    SlotFileNotFound,
)
from engine.slots.folder import SlotFolder
from engine.slots.manifest import AdapterMark
from engine.slots.reader import Acceptance, open_slot
from engine.slots.sequence_head import HEAD_BYTES
from engine.slots.state_layout import (
    LayerGroup,
    Mark,
    PagePiece,
    RecurrentLayout,
    Span,
    StateLayout,
    StatePiece,
    arrays_of,
)
from engine.types import PoolKind
from tests.unit.engine.slots.saved import (
    ACCEPTED,
    FINGERPRINT,
    LAYOUT,
    NAME,
    RECURRENT,
    TRAITS,
    VOCAB,
    State,
    make_state,
    read_state,
)


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(str(tmp_path))


def _bytes(folder: SlotFolder) -> bytes:
    return Path(folder.root, NAME).read_bytes()


def _put(folder: SlotFolder, data: bytes) -> None:
    Path(folder.root, NAME).write_bytes(data)


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.sampled_from([0, 1, 31, 255, 256, 257, 700]),
    kv_type=st.sampled_from(["f16", "f32"]),
    num_full=st.integers(0, 2),
    num_window=st.sampled_from([None, 1, 3]),
    recurrent=st.sampled_from(
        [None, RecurrentLayout(2, (3, 5), None), RecurrentLayout(1, (2, 3), (2, 4, 3))]
    ),
    seed=st.integers(0, 1 << 30),
)
def test_what_was_saved_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    num_tokens: int,
    kv_type: str,
    num_full: int,
    num_window: int | None,
    recurrent: RecurrentLayout | None,
    seed: int,
):
    window = None if num_window is None else LayerGroup(num_window, 1, 3, 1, 5)
    layout = StateLayout(LayerGroup(num_full, 2, 4, 3, 2), window, 24, kv_type, recurrent)
    state = make_state(num_tokens, layout, seed)
    folder = SlotFolder(str(tmp_path_factory.mktemp("slots")))
    size_bytes = state.write(folder)
    assert size_bytes == Path(folder.root, NAME).stat().st_size
    accepted = replace(ACCEPTED, traits=replace(TRAITS, layout=layout))
    tokens, contents = read_state(folder, accepted=accepted)
    assert list(tokens) == state.tokens
    assert contents.keys() == state.contents.keys()
    for piece, content in contents.items():
        pairs = zip(arrays_of(content), arrays_of(state.contents[piece]), strict=True)
        assert all(np.array_equal(read, written) for read, written in pairs)


def test_the_head_is_that_of_a_sequence_file(folder: SlotFolder):
    state = make_state(5)
    state.write(folder)
    words = struct.unpack_from("<IIIiII5iI", _bytes(folder))
    assert words == (0x67677371, 3, 9, -1, 1, 5, *state.tokens, 0)


def test_the_body_is_safetensors(folder: SlotFolder):
    """Read by the format's own rules, not by ours."""
    state = make_state(300)
    state.write(folder)
    data = _bytes(folder)
    start = HEAD_BYTES + 4 * (4 + 300)
    (length,) = struct.unpack_from("<Q", data, start)
    header = json.loads(data[start + 8 : start + 8 + length])
    body = data[start + 8 + length :]
    metadata = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in metadata.values())
    end = 0
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        assert first == end
        end = last
        assert hashlib.sha256(body[first:last]).hexdigest() == metadata[f"sha256:{name}"]
    assert end == len(body)
    assert (len(data) - len(body)) % 64 == 0
    entry = header["kv.00000256.values"]
    first, last = entry["data_offsets"]
    values = np.frombuffer(body[first:last], "<f2").reshape(entry["shape"])
    assert entry["shape"] == [2, 44, 2, 4]
    assert np.array_equal(values, arrays_of(state.contents[state.manifest.pieces[1]])[1])


def test_states_lie_behind_all_else_one_for_each_place_to_go_on(folder: SlotFolder):
    marks = (Mark(256, 256), Mark(299, 299), Mark(300, 300))
    state = make_state(300, RECURRENT, marks=marks)
    state.write(folder)
    header = json.loads(_header(_bytes(folder)))
    del header["__metadata__"]
    assert list(header)[-6:] == [
        f"mamba.00000{position}.{part}"
        for position in (256, 299, 300)
        for part in ("conv", "matrix")
    ]
    entry = header["mamba.00000299.matrix"]
    assert (entry["dtype"], entry["shape"]) == ("F32", [3, 2, 4, 3])
    first, last = entry["data_offsets"]
    body = _bytes(folder)[-header["mamba.00000300.matrix"]["data_offsets"][1] :]
    matrix = np.frombuffer(body[first:last], "<f4").reshape(entry["shape"])
    assert np.array_equal(matrix, arrays_of(state.contents[StatePiece(299)])[1])


def test_a_head_with_a_plain_list_restores_too(folder: SlotFolder):
    state = make_state(20)
    state.write(folder)
    data = _bytes(folder)
    tokens_at = HEAD_BYTES + 12
    head = data[:8] + struct.pack("<I", 20) + data[tokens_at : tokens_at + 80]
    _put(folder, head + data[tokens_at + 84 :])
    tokens, _ = read_state(folder)
    assert list(tokens) == state.tokens


def test_a_plain_list_of_other_tokens_is_refused(folder: SlotFolder):
    make_state(20).write(folder)
    data = _bytes(folder)
    tokens_at = HEAD_BYTES + 12
    head = data[:8] + struct.pack("<I", 20) + struct.pack("<20i", *range(20))
    _put(folder, head + data[tokens_at + 84 :])
    with pytest.raises(SlotFileCorrupt, match="the tokens of the head"):
        read_state(folder)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layout": replace(LAYOUT, full=replace(LAYOUT.full, num_layers=3))}, "layers"),
        ({"layout": replace(LAYOUT, window=None)}, "layers"),
        ({"layout": replace(LAYOUT, window_tokens=25)}, "layers"),
        ({"layout": replace(LAYOUT, full=LayerGroup(2, 1, 4, 1, 4))}, "kv_heads"),
        ({"layout": replace(LAYOUT, full=LayerGroup(2, 2, 8, 2, 4))}, "head_dim"),
        ({"layout": replace(LAYOUT, kv_type="f32")}, "kv_type"),
        ({"layout": replace(LAYOUT, recurrent=RecurrentLayout(2, (3, 5), None))}, "layers"),
        ({"rope": "norm 4 base 10000.5"}, "rope"),
        ({"tokenizer": "ab"}, "tokenizer"),
        ({"sampled": "bc"}, "weights"),
    ],
)
def test_state_of_another_model_is_refused_by_field(
    folder: SlotFolder, changes: dict[str, object], field: str
):
    make_state().write(folder)
    accepted = replace(ACCEPTED, traits=replace(TRAITS, **changes))
    with open_slot(folder, NAME) as slot, pytest.raises(SlotFileMismatch) as caught:
        slot.refuse_early(accepted)
    assert caught.value.field == field
    assert caught.value.expected != caught.value.found


def test_other_weights_with_the_same_sample_are_refused(folder: SlotFolder):
    make_state().write(folder)
    with open_slot(folder, NAME) as slot:
        slot.refuse_early(ACCEPTED)
        with pytest.raises(SlotFileMismatch) as caught:
            slot.verify(ACCEPTED, "dd")
    assert (caught.value.field, caught.value.expected, caught.value.found) == (
        "weights",
        "dd",
        "cc",
    )


def test_state_under_adapters_that_are_not_loaded_is_refused(folder: SlotFolder):
    make_state(adapters=(AdapterMark("ab" * 32, 0.5),)).write(folder)
    with pytest.raises(SlotFileMismatch) as caught:
        read_state(folder)
    assert (caught.value.field, caught.value.expected) == ("adapters", "none")
    assert caught.value.found == "abababababababab x 0.5"


def test_state_of_another_tenant_is_not_there(folder: SlotFolder):
    make_state(tenant="ab").write(folder)
    with pytest.raises(SlotFileNotFound):
        read_state(folder, accepted=replace(ACCEPTED, tenant=""))
    for accepted in (ACCEPTED, replace(ACCEPTED, tenant="ab")):
        assert len(read_state(folder, accepted=accepted)[0]) == 300


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_a_token_of_another_vocabulary_is_refused(folder: SlotFolder, token: int):
    state = make_state(20)
    state.tokens[7] = token
    state.write(folder)
    with pytest.raises(SlotFileMismatch) as caught:
        read_state(folder)
    assert (caught.value.field, caught.value.expected) == ("token", f"0 to {VOCAB - 1}")
    assert caught.value.found == str(token)


def test_more_tokens_than_a_slot_holds_are_refused(folder: SlotFolder):
    make_state(300).write(folder)
    with pytest.raises(SlotContextTooSmall) as caught:
        read_state(folder, accepted=replace(ACCEPTED, context_tokens=299))
    assert (caught.value.tokens, caught.value.context_tokens) == (300, 299)
    tokens, _ = read_state(folder, accepted=replace(ACCEPTED, context_tokens=300))
    assert len(tokens) == 300


@pytest.mark.parametrize("version", ["0", "3", "none", "10"])
def test_another_schema_is_refused_by_version(folder: SlotFolder, version: str):
    make_state(3).write(folder)
    data = _bytes(folder)
    _put(folder, _rewritten(data, '"version":"2"', f'"version":"{version}"'))
    with pytest.raises(SlotFileMismatch) as caught:
        read_state(folder)
    wrong = caught.value
    assert (wrong.field, wrong.expected, wrong.found) == ("version", "1 or 2", version)


def test_a_file_of_the_first_version_is_read(folder: SlotFolder):
    """It is one of the second without the word about recurrent layers, which it could not have."""
    state = make_state(300)
    state.write(folder)
    data = _rewritten(_bytes(folder), '"version":"2"', '"version":"1"')
    assert isinstance(_refused(folder, data, accepted=ACCEPTED), SlotFileCorrupt)
    _put(folder, _rewritten(data, ',"recurrent":""', ""))
    tokens, contents = read_state(folder)
    assert list(tokens) == state.tokens
    assert contents.keys() == state.contents.keys()


def _header(data: bytes) -> str:
    start = HEAD_BYTES + 4 * struct.unpack_from("<I", data, 8)[0]
    (length,) = struct.unpack_from("<Q", data, start)
    return data[start + 8 : start + 8 + length].decode()


# Damage. The state is small, so that every byte and bit of its head can be tried.

_SMALL = make_state(
    9, StateLayout(LayerGroup(1, 1, 2, 1, 2), LayerGroup(1, 1, 2, 1, 2), 4, "f16"), seed=3
)
_SMALL_ACCEPTED = replace(ACCEPTED, traits=_SMALL.manifest.traits)


_STATES = make_state(
    5,
    StateLayout(LayerGroup(0, 1, 2, 1, 2), None, 0, "f16", RecurrentLayout(1, (2, 3), (1, 2, 2))),
    seed=4,
    marks=(Mark(4, 4), Mark(5, 5)),
)


def _refused(
    folder: SlotFolder, data: bytes, accepted: Acceptance = _SMALL_ACCEPTED
) -> EngineError:
    _put(folder, data)
    with pytest.raises((SlotFileCorrupt, SlotFileMismatch)) as caught:
        read_state(folder, accepted=accepted)
    return caught.value


@pytest.mark.parametrize("state", [_SMALL, _STATES], ids=["pages", "states"])
def test_every_cut_is_refused(folder: SlotFolder, state: State):
    state.write(folder)
    data, accepted = _bytes(folder), replace(ACCEPTED, traits=state.manifest.traits)
    for end in range(len(data)):
        assert isinstance(_refused(folder, data[:end], accepted), SlotFileCorrupt)


@pytest.mark.parametrize("state", [_SMALL, _STATES], ids=["pages", "states"])
def test_every_flipped_bit_is_refused(folder: SlotFolder, state: State):
    state.write(folder)
    data, accepted = _bytes(folder), replace(ACCEPTED, traits=state.manifest.traits)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert isinstance(_refused(folder, bytes(damaged), accepted), SlotFileCorrupt), bit


@pytest.mark.slow
def test_a_body_cut_or_flipped_anywhere_is_refused_in_little_memory(folder: SlotFolder):
    """Check 5: 256 cuts and 2,000 bits of a body of several pieces."""
    state = make_state(600, seed=5)
    state.write(folder)
    data, rng = _bytes(folder), np.random.default_rng(6)
    body_at = len(data) - sum(
        array.nbytes for content in state.contents.values() for array in arrays_of(content)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for end in rng.choice(np.arange(body_at, len(data)), 256, replace=False):
        assert isinstance(_refused(folder, data[:end], ACCEPTED), SlotFileCorrupt), end
    for bit in rng.choice(np.arange(8 * body_at, 8 * len(data)), 2000, replace=False):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << int(bit % 8)
        assert isinstance(_refused(folder, bytes(damaged), ACCEPTED), SlotFileCorrupt), bit
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown <= len(data) + (8 << 20)


def test_bytes_behind_the_body_are_refused(folder: SlotFolder):
    _SMALL.write(folder)
    assert "tensors end" in str(_refused(folder, _bytes(folder) + b"\0"))


@pytest.mark.parametrize("words", [0, 1, 3, 5, 2**24 + 5, 2**31 - 1, 2**32 - 1])
def test_a_head_that_claims_other_lengths_is_refused(folder: SlotFolder, words: int):
    _SMALL.write(folder)
    data = bytearray(_bytes(folder))
    struct.pack_into("<I", data, 8, words)
    _refused(folder, bytes(data))


@pytest.mark.parametrize("length", [0, 1, 2**16 + 2**12, 2**31, 2**63, 2**64 - 1])
def test_a_header_that_claims_other_lengths_is_refused(folder: SlotFolder, length: int):
    _SMALL.write(folder)
    data = bytearray(_bytes(folder))
    struct.pack_into("<Q", data, HEAD_BYTES + 4 * 13, length)
    _refused(folder, bytes(data))


def _rewritten(data: bytes, old: str, new: str) -> bytes:
    """Changes the header and makes its checksum and length right again: a forger's work."""
    head_bytes = HEAD_BYTES + 4 * struct.unpack_from("<I", data, 8)[0]
    text = _header(data)
    body = data[head_bytes + 8 + len(text) :]
    assert old in text
    text = text.replace(old, new, 1).rstrip()
    given = json.loads(_header(data))["__metadata__"]["checksum"]
    blank = text.replace(given, "0" * 64)
    text = blank.replace("0" * 64, hashlib.sha256(blank.encode()).hexdigest(), 1)
    text += " " * (-(head_bytes + 8 + len(text)) % 64)
    return data[:head_bytes] + struct.pack("<Q", len(text)) + text.encode() + body


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"data_offsets":[0,36]', '"data_offsets":[0,37]'),
        ('"data_offsets":[36,72]', '"data_offsets":[0,36]'),
        ('"data_offsets":[36,72]', '"data_offsets":[36,9223372036854775808]'),
        ('"data_offsets":[36,72]', '"data_offsets":[36,72.0]'),
        ('"shape":[9]', '"shape":[-9]'),
        ('"shape":[9]', '"shape":[9],"shape":[9]'),
        ('"num_tokens":"9"', '"num_tokens":"8"'),
        ('"num_tokens":"9"', '"num_tokens":"16777216"'),
        ('"num_tokens":"9"', '"num_tokens":9'),
        ('"full":"[1,1,2,1,2]"', '"full":"[1,1,2,1]"'),
        ('"full":"[1,1,2,1,2]"', '"full":"[16777216,16777216,16777216,1,2]"'),
        ('"full":"[1,1,2,1,2]"', '"full":"[1,1,2,1,1e9]"'),
        ('"full":"[1,1,2,1,2]"', '"full":"[true,1,2,1,2]"'),
        ('"full":"[1,1,2,1,2]"', '"full":"' + "[" * 16000 + '"'),
        ('"marks":"[[1,9]]"', '"marks":"[[1,10]]"'),
        ('"marks":"[[1,9]]"', '"marks":"[[1,9],[1,9]]"'),
        ('"marks":"[[1,9]]"', '"marks":"[[0,9]]"'),
        ('"marks":"[[1,9]]"', '"marks":"[[9,1]]"'),
        ('"marks":"[[1,9]]"', '"marks":"[1,9]"'),
        ('"marks":"[[1,9]]"', '"marks":"[]"'),
        ('"marks":"[[1,9]]"', '"marks":"[[1,8]]"'),
        ('"recurrent":""', '"recurrent":"[1,[2,3],null]"'),
        ('"moved_from":""', '"moved_from":"10"'),
        ('"moved_from":""', '"moved_from":"-1"'),
        ('"window":"[1,1,2,1,2]"', '"window":""'),
        ('"adapters":"[]"', '"adapters":"[[1,2]]"'),
        ('"adapters":"[]"', r'"adapters":"[[\"a\",\"nan\"]]"'),
        ('"adapters":"[]"', r'"adapters":"[[\"a\",\"1e999999\"]]"'),
        ('"kv_type":"f16"', '"kv_type":"q8_0"'),
        ('"format":"kvarts.slot"', '"format":"kvarts.slop"'),
        ('{"__metadata__"', '[{"__metadata__"'),
        ('{"__metadata__"', '{"other":' + "[" * 60000 + ',"__metadata__"'),
        ('"tenant":""', '"tenant":"","more":""'),
        ('"tenant":""', '"tenant":"' + "x" * 20000 + '"'),
    ],
)
def test_a_forged_header_is_refused(folder: SlotFolder, old: str, new: str):
    _SMALL.write(folder)
    assert isinstance(_refused(folder, _rewritten(_bytes(folder), old, new)), SlotFileCorrupt)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"marks":"[[4,4],[5,5]]"', '"marks":"[[3,4],[5,5]]"'),
        ('"marks":"[[4,4],[5,5]]"', '"marks":"[[4,4]]"'),
        ('"marks":"[[4,4],[5,5]]"', '"marks":"[]"'),
        ('"marks":"[[4,4],[5,5]]"', '"marks":"[[5,5],[4,4]]"'),
        ('"recurrent":"[1,[2,3],[1,2,2]]"', '"recurrent":""'),
        ('"recurrent":"[1,[2,3],[1,2,2]]"', '"recurrent":"[1,[2,3],null]"'),
        ('"recurrent":"[1,[2,3],[1,2,2]]"', '"recurrent":"[1,null,[1,2,2]]"'),
        ('"recurrent":"[1,[2,3],[1,2,2]]"', '"recurrent":"[1,[2,3]]"'),
        ('"recurrent":"[1,[2,3],[1,2,2]]"', '"recurrent":"[1,[],[1,2,2]]"'),
        ('"recurrent":"[1,[2,3],[1,2,2]]"', '"recurrent":"[1,[2,3],[1,2,2,1,1]]"'),
        ('"recurrent":"[1,[2,3],[1,2,2]]"', '"recurrent":"[1,[2,16777217],[1,2,2]]"'),
        ('"recurrent":"[1,[2,3],[1,2,2]]"', '"recurrent":"[-1,[2,3],[1,2,2]]"'),
        ('"recurrent":"[1,[2,3],[1,2,2]]"', '"recurrent":"{}"'),
        ('"shape":[1,1,2,2]', '"shape":[1,2,1,2]'),
        ('"dtype":"F32"', '"dtype":"F16"'),
    ],
)
def test_a_forged_header_of_states_is_refused(folder: SlotFolder, old: str, new: str):
    _STATES.write(folder)
    accepted = replace(ACCEPTED, traits=_STATES.manifest.traits)
    damaged = _rewritten(_bytes(folder), old, new)
    assert isinstance(_refused(folder, damaged, accepted), SlotFileCorrupt)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_damage_is_refused_in_little_memory(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    folder = SlotFolder(str(tmp_path_factory.mktemp("fuzz")))
    state = data.draw(st.sampled_from([_SMALL, _STATES]))
    state.write(folder)
    whole = _bytes(folder)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["set", "insert", "delete", "word"])):
            case "set":
                damaged[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "insert":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=40))
            case "delete":
                del damaged[at : at + data.draw(st.integers(1, 40))]
            case _:
                value = data.draw(st.sampled_from([0, 2**31 - 1, 2**31, 2**32 - 1, 2**24]))
                damaged[at : at + 4] = struct.pack("<I", value)
    if bytes(damaged) == whole:
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _refused(folder, bytes(damaged), replace(ACCEPTED, traits=state.manifest.traits))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before <= 8 << 10


def test_windows_are_kept_where_they_can_be_continued(folder: SlotFolder):
    """A window of 24 before token 40 is 17 to 39; marks that touch share their tokens."""
    marks = (Mark(40, 40), Mark(60, 62), Mark(290, 300))
    make_state(300, marks=marks, moved_from=7).write(folder)
    _, contents = read_state(folder)
    pages = [piece for piece in contents if isinstance(piece, PagePiece)]
    assert [piece.span for piece in pages if piece.kind is PoolKind.SWA] == [
        Span(17, 62),
        Span(267, 300),
    ]
    with open_slot(folder, NAME) as slot:
        verified = slot.verify(ACCEPTED, FINGERPRINT)
    assert (verified.marks, verified.moved_from) == (marks, 7)


def test_the_identity_of_a_file_shows_without_its_body(folder: SlotFolder):
    make_state(12).write(folder)
    with open_slot(folder, NAME) as slot:
        assert (slot.num_tokens, slot.model_name, slot.fingerprint) == (12, "Tiny", FINGERPRINT)
