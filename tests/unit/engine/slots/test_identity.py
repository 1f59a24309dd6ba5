"""A model's fingerprint: what it depends on, how it is had, and what refuses it."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.gguf.reader import GgufFile
from engine.model.architectures import read_spec
from engine.slots.errors import IdentityPending, ModelFileChanged
from engine.slots.fingerprint import WeightsDigest, digest_weights, traits_of
from engine.slots.hash_cache import HashCache
from engine.slots.identity import Identity, ModelSource
from tests.families import FAMILIES, write_family
from tests.ggufs import TinyLlama, write_llama
from tests.unit.engine.slots.saved import LAYOUT, TRAITS


def _no_rest(seconds: float) -> None:
    pass


def _identity(path: Path, cache: HashCache | None = None, **changes: Any) -> Identity:
    with GgufFile.open(path) as file:
        source = ModelSource(file.stamps, tuple(file.tensors.values()))
        return Identity(
            TRAITS,
            digest_weights(file),
            source,
            cache,
            sleep=changes.pop("sleep", _no_rest),
            **changes,
        )


def _fingerprint(path: Path) -> str:
    identity = _identity(path)
    identity.run()
    return identity.fingerprint(0)


def _weights(path: Path) -> WeightsDigest:
    with GgufFile.open(path) as file:
        return digest_weights(file)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny.gguf")


def test_it_does_not_depend_on_path_or_shards(tmp_path: Path, model: Path):
    other = tmp_path / "deeper" / "name.gguf"
    other.parent.mkdir()
    shutil.copy(model, other)
    assert _fingerprint(other) == _fingerprint(model)


def _flip(path: Path, tensor: str, at: int) -> None:
    with GgufFile.open(path) as file:
        offset = file.tensors[tensor].offset + at
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_every_byte_of_every_tensor_counts(tmp_path: Path, model: Path):
    known = _fingerprint(model)
    with GgufFile.open(model) as file:
        tensors = dict(file.tensors)
    for index, (name, info) in enumerate(tensors.items()):
        changed = tmp_path / f"changed-{index}.gguf"
        shutil.copy(model, changed)
        _flip(changed, name, info.nbytes // 2)
        assert _fingerprint(changed) != known, name


def test_the_sample_sees_the_ends_and_not_the_middle(tmp_path: Path, model: Path):
    known = _weights(model)
    with GgufFile.open(model) as file:
        name, info = max(file.tensors.items(), key=lambda item: item[1].nbytes)
    assert info.nbytes > 3 * 4096
    for at, is_seen in ((0, True), (info.nbytes - 1, True), (info.nbytes // 2, False)):
        changed = tmp_path / "changed.gguf"
        shutil.copy(model, changed)
        _flip(changed, name, at)
        assert (_weights(changed).sampled != known.sampled) == is_seen


def _edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert len(old) == len(new)
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def test_a_piece_of_the_vocabulary_changes_the_tokenizer_alone(model: Path):
    before = _weights(model)
    with GgufFile.open(model) as file:
        piece = max(file.metadata.get_strings("tokenizer.ggml.tokens"), key=len)
    _edit(model, piece, piece[:-1] + b"\x7f")
    after = _weights(model)
    assert after.tokenizer != before.tokenizer
    assert after.structure == before.structure


@pytest.mark.parametrize("changes", [{"rope_base": 5000.0}, {"rope_scale": 2.0}, {"seed": 1}])
def test_numbers_of_the_metadata_count(tmp_path: Path, changes: dict[str, Any]):
    plain, other = replace(TinyLlama(), **changes), TinyLlama()
    one = write_llama(tmp_path / "one.gguf", plain)
    two = write_llama(tmp_path / "two.gguf", other)
    assert _fingerprint(one) != _fingerprint(two)
    assert _weights(one).tokenizer == _weights(two).tokenizer


def test_name_template_and_training_length_do_not_count(tmp_path: Path, model: Path):
    known = _fingerprint(model)
    for old, new in ((b"tiny llama", b"huge llama"), (b"add_generation", b"odd_generation")):
        _edit(model, old, new)
        assert _fingerprint(model) == known
    longer = write_llama(tmp_path / "longer.gguf", replace(TinyLlama(), context=1024))
    assert _fingerprint(longer) == known


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_has_its_own(tmp_path: Path, name: str):
    path = write_family(tmp_path / "a.gguf", FAMILIES[name])
    others = {
        _fingerprint(write_family(tmp_path / f"{other}.gguf", FAMILIES[other]))
        for other in FAMILIES
        if other != name
    }
    assert _fingerprint(path) not in others


def test_rope_is_that_of_the_context(tmp_path: Path):
    path = write_family(tmp_path / "a.gguf", FAMILIES["phi3"])
    with GgufFile.open(path) as file:
        spec, weights = read_spec(file), digest_weights(file)
    short, long = (traits_of(weights, spec, LAYOUT, size).rope for size in (256, 512))
    assert "rope_factors_short" in short
    assert "rope_factors_long" in long


# When it is there.


def test_it_is_pending_until_it_was_hashed(model: Path):
    identity = _identity(model)
    with pytest.raises(IdentityPending):
        identity.fingerprint(0)
    assert identity.refusal() is None
    identity.start()
    assert len(identity.fingerprint(60)) == 64


def test_it_takes_a_quarter_of_a_core_and_more_when_somebody_waits(model: Path):
    now_s = iter(range(1 << 30))
    rests = list[float]()
    asked = threading.Event()

    def sleep(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            threading.Thread(target=wait).start()
            assert _is_waited_for(identity)

    def wait() -> None:
        identity.fingerprint(60)
        asked.set()

    identity = _identity(model, sleep=sleep, clock=lambda: next(now_s))
    identity.run()
    assert asked.wait(30)
    # Each piece took one tick of the clock: three rest for one of work, then one for three.
    assert rests[:3] == [3.0] * 3
    assert rests[3:] == [pytest.approx(1 / 3)] * (len(_tensors(model)) - 3)


def _is_waited_for(identity: Identity) -> bool:
    deadline_s = time.monotonic() + 30
    while not identity.num_waiting and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return identity.num_waiting > 0


def _tensors(path: Path) -> list[str]:
    with GgufFile.open(path) as file:
        return list(file.tensors)


def test_a_stop_ends_it(model: Path):
    identity = _identity(model)
    identity.stop()
    identity.run()
    with pytest.raises(IdentityPending):
        identity.fingerprint(0)
    assert identity.refusal() is None


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def _touch(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"\0")


@pytest.mark.parametrize("change", [_replace, _touch, Path.unlink])
def test_a_file_that_is_not_the_loaded_one_refuses(model: Path, change: Callable[[Path], None]):
    identity = _identity(model)
    change(model)
    identity.run()
    with pytest.raises(ModelFileChanged, match=model.name):
        identity.fingerprint(0)
    assert isinstance(identity.refusal(), ModelFileChanged)
    assert str(model.parent) not in str(identity.refusal())


def test_a_write_while_it_is_read_refuses(model: Path):
    def sleep(seconds: float) -> None:
        _flip(model, _tensors(model)[0], 0)

    identity = _identity(model, sleep=sleep)
    identity.run()
    with pytest.raises(ModelFileChanged):
        identity.fingerprint(0)


# The cache of hashes.

_LATER_NS = 1 << 62


def _cache(tmp_path: Path, now_ns: int = _LATER_NS) -> HashCache:
    return HashCache(tmp_path / "cache" / "identity", now_ns=lambda: now_ns)


def test_a_second_start_does_not_read_the_weights(tmp_path: Path, model: Path):
    cache = _cache(tmp_path)
    first = _identity(model, cache)
    first.run()
    (entry,) = cache.folder.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    reads = list[float]()
    second = _identity(model, cache, sleep=reads.append)
    second.run()
    assert second.fingerprint(0) == first.fingerprint(0)
    assert reads == []


def test_a_known_hash_does_not_hide_a_change(tmp_path: Path, model: Path):
    cache = _cache(tmp_path)
    _identity(model, cache).run()
    identity = _identity(model, cache)
    _replace(model)
    identity.run()
    with pytest.raises(ModelFileChanged):
        identity.fingerprint(0)


def test_a_file_that_was_written_just_now_is_not_kept(tmp_path: Path, model: Path):
    cache = _cache(tmp_path, now_ns=model.stat().st_ctime_ns + 1_999_999_999)
    _identity(model, cache).run()
    assert not cache.folder.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 1024,
        b'{"format": 1}',
        b'{"format": 2, "content": "%s"}',
        b"\xff" * 2000,
    ],
)
def test_an_entry_that_is_damaged_is_hashed_anew(tmp_path: Path, model: Path, content: bytes):
    cache = _cache(tmp_path)
    first = _identity(model, cache)
    first.run()
    (entry,) = cache.folder.iterdir()
    entry.write_bytes(content.replace(b"%s", hashlib.sha256().hexdigest().encode()))
    second = _identity(model, cache)
    second.run()
    assert second.fingerprint(0) == first.fingerprint(0)


@pytest.mark.parametrize("make", [partial(os.mkdir, mode=0o700), partial(os.mkfifo, mode=0o600)])
def test_an_entry_that_is_no_file_costs_a_hash_and_nothing_else(
    tmp_path: Path, model: Path, make: Callable[[Path], None]
):
    cache = _cache(tmp_path)
    _identity(model, cache).run()
    (entry,) = cache.folder.iterdir()
    entry.unlink()
    make(entry)
    again = _identity(model, cache)
    again.run()
    assert again.fingerprint(0) == _fingerprint(model)


def test_an_entry_on_a_disk_that_fails_is_hashed_anew(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = _cache(tmp_path)
    _identity(model, cache).run()

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("engine.slots.hash_cache.os.read", fail)
    again = _identity(model, cache)
    again.run()
    assert again.fingerprint(0) == _fingerprint(model)


def test_whatever_ends_the_hash_reaches_who_waits_for_it(
    model: Path, caplog: pytest.LogCaptureFixture
):
    def fail(_: float) -> None:
        raise MemoryError("no room for a piece")

    identity = _identity(model, sleep=fail)
    identity.run()
    with pytest.raises(MemoryError, match="no room for a piece"):
        identity.fingerprint(0)
    assert identity.known() is None
    assert identity.refusal() is None
    assert "the model was not hashed" in caplog.text


def test_an_entry_that_others_could_have_written_is_not_believed(tmp_path: Path, model: Path):
    cache = _cache(tmp_path)
    _identity(model, cache).run()
    (entry,) = cache.folder.iterdir()
    entry.write_text(entry.read_text().replace(entry.read_text()[-12:-2], "0" * 10))
    wrong = _identity(model, cache)
    wrong.run()
    entry.chmod(0o644)
    right = _identity(model, cache)
    right.run()
    assert wrong.fingerprint(0) != right.fingerprint(0) == _fingerprint(model)


def test_a_cache_that_cannot_be_written_costs_a_hash_and_nothing_else(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "cache").write_text("in the way")
    identity = _identity(model, _cache(tmp_path))
    identity.run()
    assert identity.fingerprint(0) == _fingerprint(model)
    assert "is not kept" in caplog.text
