"""What the mathematics of a model depends on, as digests: never its path, name, size or template.

Two files that compute the same numbers have the same fingerprint, wherever they lie. Knows the
GGUF reader and no slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from engine.gguf.header import TensorInfo
from engine.gguf.reader import GgufFile
from engine.model.spec import ModelSpec, RopeSpec
from engine.slots.errors import SlotFileMismatch
from engine.slots.state_layout import LayerGroup, StateLayout

_VERSION = b"kvarts fingerprint 1\n"
# Of each end of each tensor: enough to tell checkpoints apart, little enough for every start.
_SAMPLE_BYTES = 4096
_TEMPLATE_PREFIX = "tokenizer.chat_template"


@dataclass(frozen=True)
class Traits:
    """What must agree before state of one model can be continued by another.

    `rope` is readable, `tokenizer` a digest. `sampled` is a digest of parts of the weights:
    different ones prove different models, equal ones prove nothing.
    """

    layout: StateLayout
    rope: str
    tokenizer: str
    sampled: str

    def check(self, found: Traits) -> None:
        """Compares with what a slot file was made by, the plainest difference first.

        Raises:
            SlotFileMismatch: names the first field that differs.
        """
        ours, theirs = self._fields(), found._fields()
        for field, expected in ours.items():
            if theirs[field] != expected:
                raise SlotFileMismatch(field, expected, theirs[field])

    def _fields(self) -> dict[str, str]:
        layout = self.layout
        return {
            "layers": _layers(layout),
            "kv_heads": _each(layout, lambda g: _pair(g.key_heads, g.value_heads)),
            "head_dim": _each(layout, lambda g: _pair(g.key_dim, g.value_dim)),
            "kv_type": layout.kv_type,
            "rope": self.rope,
            "tokenizer": self.tokenizer,
            "weights": self.sampled,
        }


@dataclass(frozen=True)
class WeightsDigest:
    """Digests of all of a file but its tensors' contents, which `fingerprint` adds."""

    structure: str
    tokenizer: str
    sampled: str

    def fingerprint(self, content: str) -> str:
        """Returns the fingerprint, given the digest of all contents; hex."""
        return _digest([self.structure.encode(), self.tokenizer.encode(), content.encode()])


def digest_weights(file: GgufFile) -> WeightsDigest:
    """Reads the header and a sample of each tensor.

    Raises:
        ModelFileError: The file has no architecture.
    """
    structure = _digest(_structure(file))
    samples = (sample for name in sorted(file.tensors) for sample in _samples(file, name))
    return WeightsDigest(
        structure=structure,
        tokenizer=_digest(_tokenizer(file)),
        sampled=_digest([structure.encode(), *samples]),
    )


def digest_contents(contents: Mapping[str, bytes]) -> str:
    """Returns the digest of all contents, given the digest of each tensor's bytes by name; hex."""
    return _digest(part for name in sorted(contents) for part in (name.encode(), contents[name]))


def traits_of(
    weights: WeightsDigest, spec: ModelSpec, layout: StateLayout, context_tokens: int
) -> Traits:
    """Describes a model as it runs with slots of so many tokens: rope may depend on that."""
    return Traits(
        layout=layout,
        rope="; ".join(_rope(rope) for rope in spec.at_context(context_tokens).ropes),
        tokenizer=weights.tokenizer,
        sampled=weights.sampled,
    )


def _structure(file: GgufFile) -> Iterable[bytes]:
    """What is computed and on what: the architecture's own keys, and every tensor's kind."""
    architecture = file.metadata.get_str("general.architecture")
    yield architecture.encode()
    for key in sorted(file.metadata):
        # The length that it was trained for bounds contexts and changes no number.
        if key.startswith(f"{architecture}.") and key != f"{architecture}.context_length":
            yield key.encode()
            yield file.metadata.encoded(key)
    for name in sorted(file.tensors):
        yield _tensor_line(file.tensors[name])


def _tensor_line(info: TensorInfo) -> bytes:
    return f"{info.name} {info.ggml_type.name} {info.shape}".encode()


def _tokenizer(file: GgufFile) -> Iterable[bytes]:
    for key in sorted(file.metadata):
        if key.startswith("tokenizer.") and not key.startswith(_TEMPLATE_PREFIX):
            yield key.encode()
            yield file.metadata.encoded(key)


def _samples(file: GgufFile, name: str) -> tuple[bytes, bytes]:
    data = file.raw(name)
    return data[:_SAMPLE_BYTES].tobytes(), data[-_SAMPLE_BYTES:].tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    """SHA-256 over parts with their lengths, so that no two lists of parts look alike."""
    digest = hashlib.sha256(_VERSION)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _layers(layout: StateLayout) -> str:
    kinds = [f"{layout.full.num_layers}"]
    if layout.window is not None:
        kinds.append(f"{layout.window.num_layers} of window {layout.window_tokens}")
    state = layout.recurrent
    if state is not None:
        shapes = " and ".join(str(shape) for shape in (state.conv, state.matrix) if shape)
        kinds.append(f"{state.num_layers} of state {shapes}")
    return " and ".join(kinds)


def _each(layout: StateLayout, show: Callable[[LayerGroup], str]) -> str:
    """The groups' texts, one text where they agree."""
    groups = [layout.full] if layout.window is None else [layout.full, layout.window]
    return "; ".join(dict.fromkeys(show(group) for group in groups))


def _pair(keys: int, values: int) -> str:
    return str(keys) if keys == values else f"{keys} and {values}"


def _rope(rope: RopeSpec) -> str:
    """Every number of a rope as run; a short form with repr keeps all bits of the floats."""
    parts = [f"{rope.pairing.value} {rope.dims} base {rope.base!r}"]
    if rope.position_scale != 1.0:
        parts.append(f"scale {rope.position_scale!r}")
    if rope.magnitude != 1.0:
        parts.append(f"magnitude {rope.magnitude!r}")
    if rope.factors:
        parts.append(f"factors {rope.factors}")
    return " ".join(parts)
