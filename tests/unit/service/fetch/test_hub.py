from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from service.fetch.errors import FetchError
from service.fetch.hub import (
    HubModel,
    HubUnreachable,
    choose_file,
    parse_repo,
    resolve_hub_model,
    with_siblings,
)
from service.fetch.hub_client import HuggingFace

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _cache(hub: Path, *files: str, ref: str = "main", commit: str = _COMMIT) -> Path:
    folder = hub / "models--ggml-org--tiny"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    for name in files:
        path = folder / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
    return folder / "snapshots" / commit


@dataclass
class Hub:
    """A hub with these files, or one that does not answer."""

    root: Path
    files: list[str] | None
    fetched: list[str] = field(default_factory=list[str])

    def list_files(self, repo: str) -> list[str]:
        if self.files is None:
            raise HubUnreachable("no network")
        return self.files

    def fetch(self, repo: str, file: str) -> Path:
        self.fetched.append(file)
        return self.root / file


def _resolve(
    text: str, hub_dir: Path, hub: Hub | None, *, file: str | None = None
) -> tuple[Path, list[str]]:
    said: list[str] = []

    def connect() -> Hub:
        assert hub is not None, "offline must not ask the hub"
        return hub

    path = resolve_hub_model(
        parse_repo(text, file), hub_dir, is_offline=hub is None, connect=connect, say=said.append
    )
    return path, said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", HubModel("a/b", None, None)),
        ("a/b.c-d:Q8_0", HubModel("a/b.c-d", "Q8_0", None)),
    ],
)
def test_parse_repo(text: str, expected: HubModel) -> None:
    assert parse_repo(text, None) == expected


@pytest.mark.parametrize("text", ["a", "a/b/c", "a/..", "../b", "a/b:", "", "a b/c", "a/b:x/y"])
def test_parse_repo_refuses(text: str) -> None:
    with pytest.raises(FetchError, match="must be USER/REPO"):
        parse_repo(text, None)


@pytest.mark.parametrize(
    ("files", "tag", "expected"),
    [
        (["x-Q8_0.gguf", "x-Q4_K_M.gguf", "a.gguf"], None, "x-Q4_K_M.gguf"),
        (["x-q8_0.gguf", "a.gguf"], None, "x-q8_0.gguf"),
        (["z.gguf", "b.gguf", "README.md"], None, "b.gguf"),
        (["mmproj-b.gguf", "imatrix.gguf", "c.gguf"], None, "c.gguf"),
        (["x-Q4_K_M.gguf", "x-IQ4_XS.gguf"], "iq4_xs", "x-IQ4_XS.gguf"),
        (
            ["Q4_0/x-00001-of-00002.gguf", "Q4_0/x-00002-of-00002.gguf"],
            None,
            "Q4_0/x-00001-of-00002.gguf",
        ),
        (
            ["x-Q4_0-00002-of-00002.gguf", "x-Q4_0-00001-of-00002.gguf"],
            "Q4_0",
            "x-Q4_0-00001-of-00002.gguf",
        ),
    ],
)
def test_choice_of_file(files: list[str], tag: str | None, expected: str) -> None:
    assert choose_file(files, HubModel("a/b", tag, None)) == expected


def test_a_named_file_wins_over_the_tag() -> None:
    assert choose_file(["d/x.gguf"], HubModel("a/b", "Q8_0", "d/x.gguf")) == "d/x.gguf"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (HubModel("a/b", "Q2_K", None), r"no file of quantisation 'Q2_K'; it has x-Q8_0\.gguf"),
        (HubModel("a/b", None, "y.gguf"), r"no file 'y\.gguf'; it has x-Q8_0\.gguf"),
    ],
)
def test_no_such_file_lists_what_there_is(model: HubModel, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        choose_file(["x-Q8_0.gguf", "README.md"], model)


def test_a_repository_without_models() -> None:
    with pytest.raises(FetchError, match="no GGUF model; it has no GGUF file at all"):
        choose_file(["README.md"], HubModel("a/b", None, None))


def test_all_parts_of_a_split_file() -> None:
    parts = [f"x-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
    assert with_siblings(parts[0], parts[::-1]) == parts
    with pytest.raises(FetchError, match=r"'x-00002-of-00003\.gguf' of this split"):
        with_siblings(parts[0], [parts[0], parts[2]])


def test_offline_reads_the_peers_cache(tmp_path: Path) -> None:
    snapshot = _cache(tmp_path, "x.gguf", "mmproj.gguf")
    assert _resolve("ggml-org/tiny", tmp_path, None)[0] == snapshot / "x.gguf"


def test_a_file_in_a_folder_of_the_snapshot(tmp_path: Path) -> None:
    snapshot = _cache(tmp_path, "d/x.gguf")
    path, _ = _resolve("ggml-org/tiny", tmp_path, None, file="d/x.gguf")
    assert path == snapshot / "d" / "x.gguf"


def test_main_comes_before_other_refs(tmp_path: Path) -> None:
    _cache(tmp_path, "old.gguf", ref="a", commit="f" * 40)
    snapshot = _cache(tmp_path, "new.gguf")
    assert _resolve("ggml-org/tiny", tmp_path, None)[0] == snapshot / "new.gguf"


def test_another_ref_serves_where_main_is_damaged(tmp_path: Path) -> None:
    _cache(tmp_path, ref="main", commit="../../etc")
    snapshot = _cache(tmp_path, "x.gguf", ref="v1")
    assert _resolve("ggml-org/tiny", tmp_path, None)[0] == snapshot / "x.gguf"


def test_offline_without_the_repository(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="offline, and ggml-org/tiny is not in the cache"):
        _resolve("ggml-org/tiny", tmp_path, None)


def test_offline_without_the_quantisation(tmp_path: Path) -> None:
    _cache(tmp_path, "x-Q8_0.gguf")
    with pytest.raises(FetchError, match="offline, and in the cache ggml-org/tiny has no file"):
        _resolve("ggml-org/tiny:Q4_0", tmp_path, None)


def test_the_hub_is_asked_for_every_part(tmp_path: Path) -> None:
    hub = Hub(tmp_path, ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"])
    path, _ = _resolve("ggml-org/tiny", tmp_path, hub)
    assert path == tmp_path / "x-00001-of-00002.gguf"
    assert hub.fetched == hub.files


def test_a_dead_hub_leaves_the_cache(tmp_path: Path) -> None:
    snapshot = _cache(tmp_path, "x.gguf")
    path, said = _resolve("ggml-org/tiny", tmp_path, Hub(tmp_path, None))
    assert path == snapshot / "x.gguf"
    assert "no network" in said[0]


def test_a_dead_hub_and_an_empty_cache(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="no network, and ggml-org/tiny is not in the cache"):
        _resolve("ggml-org/tiny", tmp_path, Hub(tmp_path, None))


def test_the_real_client_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachable, match="cannot be asked for a/b"):
        HuggingFace(tmp_path, None).list_files("a/b")


def test_the_real_client_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(HubUnreachable, match=r"pip install 'kvarts\[hub\]'"):
        HuggingFace(tmp_path, None)
