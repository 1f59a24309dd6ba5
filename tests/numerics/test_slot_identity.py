"""Saved state before another server: it goes on as the cold run does, or is refused by name.

Check 7: {the same, other model, other KV type, other page size, half the context} x adapter set x
scale x KV type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine.gguf.reader import GgufFile
from engine.model.adapter_banks import adapted_shapes
from engine.model.architectures import read_spec
from engine.requests import AdapterScale
from engine.slots.errors import SlotContextTooSmall, SlotFileMismatch
from engine.types import EngineConfig
from tests.adapters import TinyAdapter, write_adapter
from tests.ggufs import TinyLlama, write_llama
from tests.numerics.saved_server import Server

_CONTEXT = 512
_CONFIG = EngineConfig(
    context_tokens=_CONTEXT,
    num_slots=2,
    page_tokens=32,
    chunk_tokens=32,
    max_adapters=2,
    max_adapter_rank=4,
)
# One fits half the context, of the other the whole one only.
_PROMPTS = {length: tuple((7 * i + i * i) % 250 + 5 for i in range(length)) for length in (40, 280)}
_SETS: dict[str, dict[str, float]] = {
    "none": {},
    "a": {"a": 1.0},
    "a-half": {"a": 0.5},
    "b": {"b": 1.0},
    "a-b": {"a": 1.0, "b": -2.0},
}
_FIELDS = {"model": "weights", "kv_type": "kv_type", "context": "context"}
_OTHER_KV = {"f16": "f32", "f32": "f16"}


def _server(folder: Path, model: str, config: EngineConfig) -> tuple[Server, dict[str, int]]:
    server = Server(folder / f"{model}.gguf", config, folder / "slots")
    return server, {name: server.load_adapter(folder / f"{name}.gguf") for name in "ab"}


def _scales(ids: Mapping[str, int], chosen: Mapping[str, float]) -> tuple[AdapterScale, ...]:
    return tuple(AdapterScale(ids[name], scale) for name, scale in chosen.items())


@dataclass(frozen=True)
class Saved:
    """A folder with two models, two adapters, and each prompt saved under each set and KV type.

    `held` are the tokens of each file.
    """

    folder: Path
    held: dict[str, tuple[int, ...]]


@pytest.fixture(scope="module", name="saved")
def make_saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("identity")
    (folder / "slots").mkdir()
    path = write_llama(folder / "same.gguf")
    write_llama(folder / "other.gguf", TinyLlama(seed=1))
    with GgufFile.open(path) as file:
        shapes = adapted_shapes(read_spec(file))
    for seed, name in enumerate("ab"):
        adapter = TinyAdapter(seed=seed, strength=3.0)
        write_adapter(folder / f"{name}.gguf", adapter, shapes, tuple(shapes))
    held: dict[str, tuple[int, ...]] = {}
    for kv_dtype in _OTHER_KV:
        server, ids = _server(folder, "same", replace(_CONFIG, kv_dtype=kv_dtype))
        for length, prompt in _PROMPTS.items():
            for name, chosen in _SETS.items():
                answer = server.answer(prompt, 0, adapters=_scales(ids, chosen))
                filename = f"{kv_dtype}-{length}-{name}"
                assert server.save(0, filename).tokens == length + 7
                held[filename] = (*prompt, *answer[:-1])
    return Saved(folder, held)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("other", ["same", "model", "kv_type", "page", "context"])
def test_state_goes_on_like_the_cold_run_or_is_refused_by_name(
    saved: Saved, other: str, kv_dtype: str
) -> None:
    changes: dict[str, Any] = {
        "kv_type": {"kv_dtype": _OTHER_KV[kv_dtype]},
        "page": {"page_tokens": 16},
        "context": {"context_tokens": _CONTEXT // 2},
    }.get(other, {})
    config = replace(_CONFIG, **({"kv_dtype": kv_dtype} | changes))
    server, ids = _server(saved.folder, "other" if other == "model" else "same", config)
    answers: set[tuple[int, ...]] = set()
    for length in _PROMPTS:
        for name, chosen in _SETS.items():
            case = f"{kv_dtype}-{length}-{name}"
            before = server.loaded.engine.snapshot().slots
            if _is_refused(other, length):
                with pytest.raises((SlotFileMismatch, SlotContextTooSmall)) as caught:
                    server.restore(1, case)
                assert _field(caught.value) == _FIELDS[other], case
                assert server.loaded.engine.snapshot().slots == before
                continue
            restored = server.restore(1, case)
            scales = _scales(ids, chosen)
            assert set(restored.adapters) == set(scales), case
            longer = (*saved.held[case], 9)
            warm = server.answer(longer, 1, adapters=scales)
            assert server.cached == restored.tokens == length + 7
            assert warm == server.answer(longer, 0, is_cold=True, adapters=scales), case
            answers.add(tuple(warm))
    # The sets make different answers, so that a wrong one would have shown.
    assert len(answers) >= {"same": 6, "page": 6, "context": 3}.get(other, 0)
    server.loaded.engine.check_integrity()


def _is_refused(other: str, length: int) -> bool:
    return other in ("model", "kv_type") or (other == "context" and length + 7 > _CONTEXT // 2)


def _field(error: SlotFileMismatch | SlotContextTooSmall) -> str:
    return error.field if isinstance(error, SlotFileMismatch) else "context"
