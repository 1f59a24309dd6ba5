"""Reads slot files: from bytes that anybody may have written to state that a pool may take.

`open_slot` proves that a file is whole in all but its keys, values and states, and yields an
`UnverifiedSlot`, which tells no more than a refusal needs. Only `verify` makes a `VerifiedSlot` of
it, and only that hands these out, each piece after its hash was right. Nothing that a
file claims is allocated before the file is known to be long enough to hold it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.requests import AdapterScale
from engine.slots.errors import (
    SlotContextTooSmall,
    SlotFileCorrupt,
    SlotFileMismatch,
    SlotFileNotFound,
)
from engine.slots.fingerprint import Traits
from engine.slots.folder import SlotFolder
from engine.slots.manifest import (
    LENGTH_BYTES,
    AdapterMark,
    Manifest,
    ManifestError,
    TensorPlace,
    decode_header,
    header_limit,
    places_of,
    read_header_length,
)
from engine.slots.sequence_head import HEAD_BYTES, HeadError, read_length, unpack_tokens
from engine.slots.state_layout import Content, Piece, Tensor, content_of

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Acceptance:
    """What a server takes: whose state, under which adapters, of which tokens and how many.

    `tenant` None takes every tenant's. `scales_of` finds the loaded adapters of a set, None if one
    is not loaded; `adapters` names those that are, for a refusal.
    """

    traits: Traits
    vocab_size: int
    context_tokens: int
    tenant: str | None
    scales_of: Callable[[tuple[AdapterMark, ...]], tuple[AdapterScale, ...] | None]
    adapters: str


class UnverifiedSlot:
    """A file that is whole as far as its header and tokens go. Made by `open_slot`."""

    def __init__(self, filename: str, descriptor: int, manifest: Manifest, body: _Body) -> None:
        self.filename = filename
        self._descriptor = descriptor
        self._manifest = manifest
        self._body = body

    @property
    def num_tokens(self) -> int:
        """Tokens in it."""
        return self._manifest.num_tokens

    @property
    def model_name(self) -> str:
        """Name of the model that made it, for people."""
        return self._manifest.model_name

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that made it."""
        return self._manifest.fingerprint

    def refuse_early(self, accepted: Acceptance) -> None:
        """Refuses what needs no fingerprint to be refused.

        Raises:
            SlotFileNotFound: It is another tenant's.
            SlotFileMismatch: It was made by another model; names the field.
        """
        if accepted.tenant is not None and accepted.tenant != self._manifest.tenant:
            raise SlotFileNotFound(self.filename)
        accepted.traits.check(self._manifest.traits)

    def verify(self, accepted: Acceptance, fingerprint: str) -> VerifiedSlot:
        """Proves that this server's model can continue the state, short of its body's hashes.

        Raises:
            SlotFileNotFound, SlotFileMismatch: As `refuse_early`, and for weights, adapters and
                tokens that are none of this vocabulary's.
            SlotContextTooSmall: A slot holds fewer tokens.
        """
        self.refuse_early(accepted)
        manifest = self._manifest
        if manifest.fingerprint != fingerprint:
            raise SlotFileMismatch("weights", fingerprint, manifest.fingerprint)
        scales = accepted.scales_of(manifest.adapters)
        if scales is None:
            raise SlotFileMismatch("adapters", accepted.adapters, _shown(manifest.adapters))
        tokens = self._body.tokens
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < accepted.vocab_size:
            worst = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise SlotFileMismatch("token", f"0 to {accepted.vocab_size - 1}", str(worst))
        if manifest.num_tokens > accepted.context_tokens:
            raise SlotContextTooSmall(manifest.num_tokens, accepted.context_tokens)
        return VerifiedSlot(self.filename, self._descriptor, manifest, self._body, scales)


class VerifiedSlot:
    """State of this very model; made by `UnverifiedSlot.verify` alone, and as long open as that.

    `scales` are the loaded adapters that it was made under.
    """

    def __init__(
        self,
        filename: str,
        descriptor: int,
        manifest: Manifest,
        body: _Body,
        scales: tuple[AdapterScale, ...],
    ) -> None:
        self.filename = filename
        self.size_bytes = body.size_bytes
        self.tokens: tuple[int, ...] = tuple(body.tokens.tolist())
        self.pieces = manifest.pieces
        self.marks = manifest.marks
        self.moved_from = manifest.moved_from
        self.adapters = manifest.adapters
        self.scales = scales
        self.tenant = manifest.tenant
        self._descriptor = descriptor
        self._manifest = manifest
        self._body = body

    def read(self, piece: Piece) -> Content:
        """Reads what is in a piece and checks its hashes.

        Raises:
            SlotFileCorrupt: It is not what was saved, or cut.
            OSError: The disk refuses.
        """
        tensors = piece.tensors(self._manifest.traits.layout)
        return content_of(piece, [self._array(tensor) for tensor in tensors])

    def _array(self, tensor: Tensor) -> npt.NDArray[Any]:
        name = tensor.name
        data = _read(self.filename, self._descriptor, *self._body.range_of(name))
        if hashlib.sha256(data.data).hexdigest() != self._manifest.digests[name]:
            raise SlotFileCorrupt(self.filename, f"the SHA-256 of tensor {name} is wrong")
        return data.view(tensor.dtype).reshape(tensor.shape)


@dataclass(frozen=True, eq=False)
class _Body:
    """Where the tensors lie in the file, and the tokens, int32."""

    start: int
    size_bytes: int
    places: dict[str, TensorPlace]
    tokens: npt.NDArray[np.int32]

    def range_of(self, name: str) -> tuple[int, int]:
        """Offset and length of a tensor."""
        place = self.places[name]
        return self.start + place.start, place.end - place.start


@contextlib.contextmanager
def open_slot(folder: SlotFolder, filename: str) -> Generator[UnverifiedSlot]:
    """Opens a file and checks its head, header, length and tokens; closes it afterwards.

    Raises:
        InvalidField, SlotFileNotFound, SlotIo: As `SlotFolder.open`.
        SlotFileCorrupt: It is damaged, cut, or no slot file.
        SlotFileMismatch: It is of another schema version.
    """
    with folder.open(filename) as descriptor:
        try:
            manifest, body = _parse(filename, descriptor)
        except (HeadError, ManifestError) as error:
            raise SlotFileCorrupt(filename, str(error)) from error
        yield UnverifiedSlot(filename, descriptor, manifest, body)


def _parse(filename: str, descriptor: int) -> tuple[Manifest, _Body]:
    size_bytes = os.fstat(descriptor).st_size
    head = _read(filename, descriptor, 0, min(HEAD_BYTES, size_bytes)).tobytes()
    payload_bytes = 4 * read_length(head)
    header_at = HEAD_BYTES + payload_bytes + LENGTH_BYTES
    if header_at > size_bytes:
        raise HeadError(f"the head claims {payload_bytes} bytes of tokens, the file is shorter")
    payload = _read(filename, descriptor, HEAD_BYTES, payload_bytes + LENGTH_BYTES).tobytes()
    tokens = unpack_tokens(payload[:payload_bytes])
    length, limit = read_header_length(payload[payload_bytes:]), header_limit(len(tokens))
    if length > min(limit, size_bytes - header_at):
        raise ManifestError(
            f"the header claims {length} bytes; {limit} are allowed, the file has "
            f"{size_bytes - header_at} left"
        )
    header = _read(filename, descriptor, header_at, length).tobytes()
    manifest = decode_header(header, len(tokens))
    places = places_of(manifest)
    body = _Body(
        start=header_at + length,
        size_bytes=size_bytes,
        places={place.tensor.name: place for place in places},
        tokens=tokens,
    )
    end = body.start + places[-1].end
    if end != size_bytes:
        raise ManifestError(f"the tensors end at byte {end}, the file has {size_bytes}")
    _check_tokens(filename, descriptor, manifest, body)
    return manifest, body


def _check_tokens(filename: str, descriptor: int, manifest: Manifest, body: _Body) -> None:
    """The head is outside the checksum: it must say exactly what the checksummed list says."""
    data = _read(filename, descriptor, *body.range_of("tokens"))
    if hashlib.sha256(data.data).hexdigest() != manifest.digests["tokens"]:
        raise SlotFileCorrupt(filename, "the SHA-256 of tensor tokens is wrong")
    if not np.array_equal(data.view("<i4"), body.tokens):
        raise SlotFileCorrupt(filename, "the tokens of the head are not those of the body")


def _read(filename: str, descriptor: int, offset: int, num_bytes: int) -> Bytes:
    """Reads exactly so many bytes: the system may give less at a time, a cut file less in all."""
    data = np.empty(num_bytes, np.uint8)
    done = 0
    while done < num_bytes:
        got = os.preadv(descriptor, [data[done:].data], offset + done)
        if not got:
            raise SlotFileCorrupt(filename, f"ends at byte {offset + done}")
        done += got
    return data


def _shown(adapters: tuple[AdapterMark, ...]) -> str:
    return ", ".join(f"{mark.content[:16]} x {mark.scale:g}" for mark in adapters) or "none"
