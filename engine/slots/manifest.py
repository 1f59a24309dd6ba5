"""What a slot file says of its state, and the safetensors header that says it.

The header is canonical: the same manifest gives the same bytes, and bytes that are not exactly
those of the manifest read from them are refused, so that no hole, overlap, duplicate or second
meaning can hide in it. It carries its own checksum. Knows no file and no pool.

Source: the safetensors format; SHA-256 of each tensor and of the header itself are in the metadata.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from engine.slots.errors import SlotFileMismatch
from engine.slots.fingerprint import Traits
from engine.slots.sequence_head import MAX_TOKENS, packed_bytes
from engine.slots.state_layout import (
    PIECE_TOKENS,
    LayerGroup,
    Mark,
    Piece,
    RecurrentLayout,
    StateLayout,
    Tensor,
    are_marks,
    pieces_of,
)

SCHEMA_VERSION = "2"
# Version 1 could not hold the state of recurrent layers, and is read for models without.
_FIRST_VERSION = "1"
_VERSIONS = (_FIRST_VERSION, SCHEMA_VERSION)
LENGTH_BYTES = 8
TOKENS = "tokens"
_FORMAT = "kvarts.slot"
_ALIGNMENT = 64
_NO_DIGEST = "0" * 64
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LENGTH = struct.Struct("<Q")
_KV_TYPES = ("f16", "f32")
_DTYPE_NAMES = {np.dtype("<i4"): "I32", np.dtype("<f2"): "F16", np.dtype("<f4"): "F32"}
# What a header may take: its fixed part with all states, and the lines of each piece's two tensors.
_FIXED_BYTES = 64 << 10
_PIECE_BYTES = 1024
_MAX_SIDE = 1 << 24
_MAX_RANK = 4
_MAX_TEXT = 16 << 10
_TEXTS = ("fingerprint", "rope", "tokenizer", "sampled", "model_name", "tenant")


class ManifestError(ValueError):
    """Bytes that are no header of a slot file."""


@dataclass(frozen=True)
class AdapterMark:
    """An adapter of the set that state was made under: digest of its content, and its scale."""

    content: str
    scale: float


@dataclass(frozen=True)
class Manifest:
    """Everything about a saved state but its tokens, keys and values.

    `marks` say where layers with a window or a state can be continued, by rising position; a model
    without them has none. Tokens from `moved_from` on were moved by a context shift (None: none was).
    `tenant` owns the state, `model_name` is for people. `digests` are SHA-256 by tensor, hex; empty
    until they are known.
    """

    fingerprint: str
    traits: Traits
    adapters: tuple[AdapterMark, ...]
    model_name: str
    tenant: str
    num_tokens: int
    marks: tuple[Mark, ...]
    moved_from: int | None
    digests: Mapping[str, str]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of the body, in file order, after the tokens."""
        return pieces_of(self.traits.layout, self.num_tokens, self.marks)


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of the body: its place counts from the end of the header."""

    tensor: Tensor
    start: int
    end: int


def places_of(manifest: Manifest) -> tuple[TensorPlace, ...]:
    """Returns the tensors in file order: without holes, the tokens first."""
    found: list[TensorPlace] = []
    start = 0
    for tensor in _tensors(manifest):
        found.append(TensorPlace(tensor, start, start + tensor.nbytes))
        start += tensor.nbytes
    return tuple(found)


def encode_header(manifest: Manifest, version: str = SCHEMA_VERSION) -> bytes:
    """Returns the length and the header, padded so that the body of a new file is aligned.

    Digests that are not known yet take the same room as known ones.
    """
    text = _render(manifest, version, _NO_DIGEST)
    text = _render(manifest, version, hashlib.sha256(text).hexdigest())
    before = packed_bytes(manifest.num_tokens) + LENGTH_BYTES
    padding = -(before + len(text)) % _ALIGNMENT
    return _LENGTH.pack(len(text) + padding) + text + b" " * padding


def file_bytes(manifest: Manifest) -> int:
    """Returns how long the file of a state is."""
    body = places_of(manifest)[-1].end
    return packed_bytes(manifest.num_tokens) + len(encode_header(manifest)) + body


def header_limit(num_tokens: int) -> int:
    """Returns the most bytes that the header of a state of so many tokens may take."""
    return _FIXED_BYTES + _PIECE_BYTES * 2 * (num_tokens // PIECE_TOKENS + 1)


def read_header_length(data: bytes) -> int:
    """Returns the header's length, given the bytes before it."""
    length: int = _LENGTH.unpack(data)[0]
    return length


def decode_header(data: bytes, num_tokens: int) -> Manifest:
    """Reads a header, without the length before it.

    Args:
        data: The header.
        num_tokens: How many the file's head has: a header that claims others is not followed.

    Raises:
        ManifestError: It is damaged, or not written by `encode_header`.
        SlotFileMismatch: It is whole and of another schema version.
    """
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the header is not JSON: {type(error).__name__}") from error
    metadata = _metadata(document)
    _check_sum(data, metadata)
    if metadata.get("format") != _FORMAT:
        raise ManifestError(f"the format is not {_FORMAT}")
    version = metadata.get("version", "none")
    if version not in _VERSIONS:
        raise SlotFileMismatch("version", " or ".join(_VERSIONS), version[:32])
    manifest = _manifest(metadata, num_tokens, version)
    if encode_header(manifest, version)[LENGTH_BYTES:] != data:
        raise ManifestError("the header is not what its values give")
    return manifest


def _tensors(manifest: Manifest) -> Iterator[Tensor]:
    yield Tensor(TOKENS, np.dtype("<i4"), (manifest.num_tokens,))
    for piece in manifest.pieces:
        yield from piece.tensors(manifest.traits.layout)


def _render(manifest: Manifest, version: str, checksum: str) -> bytes:
    layout = manifest.traits.layout
    metadata: dict[str, str] = {
        "format": _FORMAT,
        "version": version,
        "checksum": checksum,
        "fingerprint": manifest.fingerprint,
        "rope": manifest.traits.rope,
        "tokenizer": manifest.traits.tokenizer,
        "sampled": manifest.traits.sampled,
        "kv_type": layout.kv_type,
        "full": _json(_sides(layout.full)),
        "window": "" if layout.window is None else _json(_sides(layout.window)),
        "window_tokens": str(layout.window_tokens),
        "adapters": _json([[mark.content, mark.scale.hex()] for mark in manifest.adapters]),
        "model_name": manifest.model_name,
        "tenant": manifest.tenant,
        "num_tokens": str(manifest.num_tokens),
        "marks": _json([[mark.lowest, mark.position] for mark in manifest.marks]),
        "moved_from": "" if manifest.moved_from is None else str(manifest.moved_from),
    }
    if version != _FIRST_VERSION:
        metadata["recurrent"] = _recurrent_text(layout.recurrent)
    tensors: dict[str, object] = {}
    for place in places_of(manifest):
        tensor = place.tensor
        metadata[f"sha256:{tensor.name}"] = manifest.digests.get(tensor.name, _NO_DIGEST)
        tensors[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [place.start, place.end],
        }
    return _json({"__metadata__": metadata, **tensors}).encode("ascii")


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def _sides(group: LayerGroup) -> list[int]:
    return list(asdict(group).values())


def _recurrent_text(layout: RecurrentLayout | None) -> str:
    return "" if layout is None else _json([layout.num_layers, layout.conv, layout.matrix])


def _metadata(document: Any) -> dict[str, str]:
    if not isinstance(document, dict):
        raise ManifestError("the header is no object")
    metadata: Any = cast("dict[str, Any]", document).get("__metadata__")
    if not isinstance(metadata, dict):
        raise ManifestError("the header has no metadata")
    members = cast("dict[str, Any]", metadata)
    if not all(isinstance(value, str) for value in members.values()):
        raise ManifestError("the metadata holds something that is no text")
    return members


def _check_sum(data: bytes, metadata: Mapping[str, str]) -> None:
    """Checked first and in the same way for every version, so that damage is told from age."""
    given = metadata.get("checksum", "")
    if not _DIGEST.fullmatch(given):
        raise ManifestError("the header has no checksum")
    blank = data.rstrip(b" ").replace(given.encode(), _NO_DIGEST.encode(), 1)
    if hashlib.sha256(blank).hexdigest() != given:
        raise ManifestError("the header's checksum is wrong")


def _manifest(metadata: Mapping[str, str], num_tokens: int, version: str) -> Manifest:
    if _integer(metadata, "num_tokens", MAX_TOKENS) != num_tokens:
        raise ManifestError(f"the head has {num_tokens} tokens, the header another number")
    texts = {name: _text(metadata, name) for name in _TEXTS}
    layout = _layout(metadata, version)
    marks = _marks(metadata, layout, num_tokens)
    is_moved = bool(_text(metadata, "moved_from"))
    manifest = Manifest(
        fingerprint=texts["fingerprint"],
        traits=Traits(layout, texts["rope"], texts["tokenizer"], texts["sampled"]),
        adapters=_adapters(metadata),
        model_name=texts["model_name"],
        tenant=texts["tenant"],
        num_tokens=num_tokens,
        marks=marks,
        moved_from=_integer(metadata, "moved_from", num_tokens) if is_moved else None,
        digests={},
    )
    names = [tensor.name for tensor in _tensors(manifest)]
    return replace(manifest, digests={name: _digest(metadata, name) for name in names})


def _text(metadata: Mapping[str, str], name: str) -> str:
    text = metadata.get(name)
    if text is None or len(text) > _MAX_TEXT:
        raise ManifestError(f"the metadata's {name} is missing or too long")
    return text


def _digest(metadata: Mapping[str, str], name: str) -> str:
    digest = _text(metadata, f"sha256:{name}")
    if not _DIGEST.fullmatch(digest):
        raise ManifestError(f"tensor {name} has no SHA-256")
    return digest


def _integer(metadata: Mapping[str, str], name: str, limit: int) -> int:
    text = _text(metadata, name)
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", text) or int(text) > limit:
        raise ManifestError(f"the metadata's {name} is not 0 to {limit}")
    return int(text)


def _integers(value: Any, name: str, limit: int = _MAX_SIDE) -> list[int]:
    """A list of plain integers in 0 .. `limit`."""
    listed = cast("list[Any]", value) if isinstance(value, list) else None
    if listed is None or not all(type(item) is int and 0 <= item <= limit for item in listed):
        raise ManifestError(f"the metadata's {name} is no list of numbers up to {limit}")
    return listed


def _listed(metadata: Mapping[str, str], name: str) -> list[Any]:
    text = _text(metadata, name)
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the metadata's {name} is not JSON") from error
    if not isinstance(value, list):
        raise ManifestError(f"the metadata's {name} is no list")
    return cast("list[Any]", value)


def _layout(metadata: Mapping[str, str], version: str) -> StateLayout:
    kv_type = _text(metadata, "kv_type")
    if kv_type not in _KV_TYPES:
        raise ManifestError(f"the type of keys and values is {kv_type[:32]!r}")
    full = _group(metadata, "full")
    window = _group(metadata, "window") if _text(metadata, "window") else None
    window_tokens = _integer(metadata, "window_tokens", MAX_TOKENS)
    recurrent = None if version == _FIRST_VERSION else _recurrent(metadata)
    return StateLayout(full, window, window_tokens, kv_type, recurrent)


def _recurrent(metadata: Mapping[str, str]) -> RecurrentLayout | None:
    if not _text(metadata, "recurrent"):
        return None
    parts = _listed(metadata, "recurrent")
    if len(parts) != 3:
        raise ManifestError(f"the metadata's recurrent has {len(parts)} parts, expected 3")
    (num_layers,) = _integers(parts[:1], "recurrent")
    conv, matrix = (None if part is None else _shape(part) for part in parts[1:])
    if conv is None:
        raise ManifestError("the metadata's recurrent has no convolution")
    return RecurrentLayout(num_layers, conv, matrix)


def _shape(value: Any) -> tuple[int, ...]:
    sides = _integers(value, "recurrent")
    if not 1 <= len(sides) <= _MAX_RANK:
        raise ManifestError(f"the metadata's recurrent has {len(sides)} sides, expected 1 to 4")
    return tuple(sides)


def _group(metadata: Mapping[str, str], name: str) -> LayerGroup:
    sides = _integers(_listed(metadata, name), name)
    if len(sides) != 5:
        raise ManifestError(f"the metadata's {name} has {len(sides)} numbers, expected 5")
    return LayerGroup(*sides)


def _marks(metadata: Mapping[str, str], layout: StateLayout, num_tokens: int) -> tuple[Mark, ...]:
    pairs = [_integers(pair, "marks", MAX_TOKENS) for pair in _listed(metadata, "marks")]
    if any(len(pair) != 2 for pair in pairs):
        raise ManifestError("the metadata's marks are no pairs")
    marks = tuple(Mark(lowest, position) for lowest, position in pairs)
    if not are_marks(layout, marks, num_tokens):
        raise ManifestError("the metadata's marks do not rise to the last token, or are not needed")
    return marks


def _adapters(metadata: Mapping[str, str]) -> tuple[AdapterMark, ...]:
    marks: list[AdapterMark] = []
    for entry in _listed(metadata, "adapters"):
        pair = cast("list[Any]", entry) if isinstance(entry, list) else []
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ManifestError("the metadata's adapters are no pairs of digest and scale")
        content, scale = cast("tuple[str, str]", tuple(pair))
        marks.append(AdapterMark(content, _scale(scale)))
    return tuple(marks)


def _scale(text: str) -> float:
    try:
        scale = float.fromhex(text)
    except (ValueError, OverflowError):
        scale = math.nan
    if not math.isfinite(scale):
        raise ManifestError("an adapter's scale is no finite number")
    return scale
