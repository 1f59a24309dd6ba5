"""docs/operations.md has an entry for whatever an operator can meet."""

from __future__ import annotations

import re
from pathlib import Path

from kvarts.v1 import error_reason_pb2

from service.flag_table import FLAGS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text()


def entries() -> dict[str, str]:
    """Heading and text of each entry of the runbook."""
    parts = re.split(r"^#{2,4} (.*)$", PAGE, flags=re.M)
    return dict(zip(parts[1::2], (text.strip() for text in parts[2::2]), strict=True))


def test_every_reason_has_an_entry_and_no_entry_has_lost_its_reason() -> None:
    names = {
        name.removeprefix("ERROR_REASON_")
        for name in error_reason_pb2.ErrorReason.DESCRIPTOR.values_by_name
    } - {"UNSPECIFIED"}
    found = {heading for heading in entries() if re.fullmatch(r"[A-Z_]{4,}", heading)}
    assert found == names
    assert all(len(entries()[name]) > 20 for name in names)


def test_an_entry_that_points_to_another_points_to_one() -> None:
    for text in entries().values():
        for name in re.findall(r"\b[Ss]ee (\w+)", text):
            if name.startswith("Kvarts") or name.isupper():
                assert name in entries(), name


def test_every_flag_that_is_named_is_one() -> None:
    known = {name for flag in FLAGS for name in (*flag.names, *flag.off_names)}
    others = {"--require-hashes", "--only-binary", "--no-deps", "--help", "--service-cert-file"}
    others |= {"--plan", "--lock"}  # of kvarts-pools and tests.bill
    others |= {"--protocol", "--http2-prior-knowledge", "--reflect-header"}  # of buf curl
    others |= {"--all-containers", "--previous", "--since"}  # of kubectl and journalctl
    for page in ("operations.md", "SECURITY.md"):
        text = (ROOT / "docs" / page).read_text()
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9]", text))
        assert named <= known | others, (page, named - known - others)


def test_the_files_that_are_named_are_there() -> None:
    for page in ("operations.md", "SECURITY.md"):
        text = (ROOT / "docs" / page).read_text()
        for name in re.findall(r"`(deploy/[\w./]+)`", text):
            assert (ROOT / name).exists(), name
