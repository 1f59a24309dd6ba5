from __future__ import annotations

from pathlib import Path

import pytest

from service.fetch.download import DownloadError, download
from tests.unit.service.fetch.web import Script, serving

_CONTENT = bytes(range(256)) * 40


def _download(url: str, part: Path, *, max_bytes: int = 1 << 20) -> list[tuple[int, int | None]]:
    seen: list[tuple[int, int | None]] = []
    download(
        url,
        part,
        max_bytes=max_bytes,
        progress=lambda done, total: seen.append((done, total)),
        pause=lambda seconds: None,
    )
    return seen


def test_a_file_arrives_with_progress(tmp_path: Path) -> None:
    part = tmp_path / "a.part"
    with serving(Script(_CONTENT)) as url:
        seen = _download(url, part)
    assert part.read_bytes() == _CONTENT
    assert seen[-1] == (len(_CONTENT), len(_CONTENT))


def test_an_interrupted_download_goes_on_where_it_ended(tmp_path: Path) -> None:
    part = tmp_path / "a.part"
    script = Script(_CONTENT, drops=[1000, 3000])
    with serving(script) as url:
        _download(url, part)
    assert part.read_bytes() == _CONTENT
    assert script.ranges == [None, "bytes=1000-", "bytes=4000-"]


def test_what_an_earlier_process_left_is_not_fetched_again(tmp_path: Path) -> None:
    part = tmp_path / "a.part"
    part.write_bytes(_CONTENT[:500])
    script = Script(_CONTENT)
    with serving(script) as url:
        _download(url, part)
    assert part.read_bytes() == _CONTENT
    assert script.ranges == ["bytes=500-"]


def test_a_complete_partial_file_is_recognised(tmp_path: Path) -> None:
    part = tmp_path / "a.part"
    part.write_bytes(_CONTENT)
    with serving(Script(_CONTENT)) as url:
        _download(url, part)
    assert part.read_bytes() == _CONTENT


def test_a_partial_file_that_is_too_long_is_begun_again(tmp_path: Path) -> None:
    part = tmp_path / "a.part"
    part.write_bytes(_CONTENT + b"x")
    with serving(Script(_CONTENT)) as url:
        _download(url, part)
    assert part.read_bytes() == _CONTENT


def test_a_server_without_ranges_is_served_from_the_start(tmp_path: Path) -> None:
    part = tmp_path / "a.part"
    part.write_bytes(b"other")
    with serving(Script(_CONTENT, honours_range=False)) as url:
        _download(url, part)
    assert part.read_bytes() == _CONTENT


def test_endless_interruptions_end_and_keep_what_arrived(tmp_path: Path) -> None:
    part = tmp_path / "a.part"
    with (
        serving(Script(_CONTENT, drops=[100] * 9)) as url,
        pytest.raises(DownloadError, match="interrupted 5 times"),
    ):
        _download(url, part)
    assert part.read_bytes() == _CONTENT[:500]


def test_a_refusal_is_not_repeated(tmp_path: Path) -> None:
    script = Script(_CONTENT, status=403)
    with serving(script) as url, pytest.raises(DownloadError, match="answered 403"):
        _download(url, tmp_path / "a.part")
    assert len(script.ranges) == 1


def test_a_file_longer_than_agreed_is_refused(tmp_path: Path) -> None:
    with serving(Script(_CONTENT)) as url, pytest.raises(DownloadError, match="at most 100"):
        _download(url, tmp_path / "a.part", max_bytes=100)


def test_nobody_there(tmp_path: Path) -> None:
    with serving(Script(b"")) as url:
        pass
    with pytest.raises(DownloadError, match="interrupted 5 times"):
        _download(url, tmp_path / "a.part")
