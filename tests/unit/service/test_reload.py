"""Files that are read again: when, and what becomes of those that cannot be used."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from service.key_file import BadKeyFile, KeyFile
from service.keys import Access, KeyRing
from service.reload import ReloadRefused, Reloads, Watched


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def _uncounted(what: str, result: str) -> None:
    pass


class Text:
    """What is in force of a file's text; the word `bad` cannot be used."""

    def __init__(self, *files: Path) -> None:
        self.in_force = ""
        self.on_read: Callable[[], None] = lambda: None
        self._files = files
        self.counts: list[tuple[str, str]] = []
        watched = Watched("text", tuple(str(file) for file in files), self._renew)
        self.reloads = Reloads([watched], lambda what, result: self.counts.append((what, result)))

    def _renew(self) -> Callable[[], None]:
        text = "".join(file.read_text() for file in self._files)
        self.on_read()
        if "bad" in text:
            raise ReloadRefused("is bad")

        def put_in_force() -> None:
            self.in_force = text

        return put_in_force


def test_only_a_change_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    text = Text(file)
    text.reloads.look()
    assert (text.in_force, text.counts) == ("", [])
    file.write_text("three")
    text.reloads.look()
    text.reloads.look()
    assert (text.in_force, text.counts) == ("three", [("text", "ok")])


def test_a_link_that_moves_is_a_change(tmp_path: Path) -> None:
    """As mounted secrets are renewed: files of one size, made at one time."""
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "link"
    link.symlink_to("old")
    text = Text(link)
    (tmp_path / "other").symlink_to("new")
    (tmp_path / "other").rename(link)
    text.reloads.look()
    assert text.in_force == "new"


def test_what_cannot_be_used_leaves_the_old_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    text = Text(file)
    file.write_text("first")
    text.reloads.look()
    file.write_text("bad")
    with caplog.at_level(logging.INFO, "kvarts.service"):
        for _ in range(3):
            text.reloads.look()
    assert text.in_force == "first"
    assert text.counts == [("text", "ok"), ("text", "refused")]
    assert [record.getMessage() for record in caplog.records] == [
        "text: not read again, the old stays in force: is bad"
    ]
    file.write_text("good again")
    text.reloads.look()
    assert text.in_force == "good again"


@pytest.mark.parametrize("half", ["half good", "half bad"])
def test_files_that_are_being_written_are_left_for_later(tmp_path: Path, half: str) -> None:
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_text("1")
    key.write_text("1")
    text = Text(cert, key)
    cert.write_text(half)
    text.on_read = lambda: _write(key, "the other half")
    text.reloads.look()
    assert (text.in_force, text.counts) == ("", [])
    text.on_read = lambda: None
    cert.write_text("whole, ")
    text.reloads.look()
    assert text.in_force == "whole, the other half"


def test_a_removed_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key\n")
    ring = KeyRing(KeyFile(str(file)).read())
    counts: list[tuple[str, str]] = []
    reloads = Reloads(
        [KeyFile(str(file)).watched(ring)], lambda what, result: counts.append((what, result))
    )
    file.unlink()
    reloads.look()
    assert counts == [("api_keys", "refused")]
    assert ring.judge("key").access is Access.ADMIN


async def test_it_looks_again_and_again_and_not_for_nothing(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    file = tmp_path / "file"
    file.write_text("1")
    text, sleeps = Text(file), 0

    async def sleep(_: float) -> None:
        nonlocal sleeps
        sleeps += 1
        file.write_text("2" * sleeps)
        if sleeps == 4:
            raise Enough

    with pytest.raises(Enough):
        await text.reloads.watch(sleep)
    assert text.in_force == "222"
    await Reloads([], _uncounted).watch(sleep)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"# none\n\n  \n", "holds no key"),
        (b"\xff\n", "is not UTF-8"),
        (b"k" * ((1 << 20) + 1), "is larger than 1048576 bytes"),
    ],
)
def test_a_file_without_a_key(tmp_path: Path, content: bytes, fault: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(BadKeyFile, match=fault):
        KeyFile(str(file), ("beside",)).read()


def test_keys_change_and_whoever_was_a_tenant_stays_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    keys = KeyFile(str(file), ("named",))
    ring = KeyRing(keys.read(), own_key="own")
    reloads = Reloads([keys.watched(ring)], _uncounted)
    before = ring.judge("named")
    assert before.tenant
    file.write_text("c\n")
    reloads.look()
    assert [ring.judge(key).access for key in ("a", "b")] == [Access.NONE] * 2
    assert ring.judge("c").access is Access.ADMIN
    assert ring.judge("named") == before
    ring.replace(("named",))
    # Alone, it would own what the others left, were it no tenant now.
    assert ring.judge("named") == before
    assert ring.judge("own").access is Access.USER
