"""The adapters of the command line: ids in order of appearance over both flags."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.types import EngineConfig, StartAdapter
from service.adapter_options import adapter_dir, with_adapters
from service.flag_table import FLAGS
from service.flags import FlagError, parse


def configured(*words: str) -> EngineConfig:
    return with_adapters(EngineConfig(context_tokens=64), parse(words, {}, FLAGS))


def test_order_is_that_of_appearance_over_both_flags() -> None:
    config = configured(
        "--lora", "a.gguf, ,b.gguf,", "--lora-scaled", "c.gguf:0.5,d:-2", "--lora", '"e,f.gguf"'
    )
    assert config.adapters == (
        StartAdapter("a.gguf"),
        StartAdapter("b.gguf"),
        StartAdapter("c.gguf", 0.5),
        StartAdapter("d", -2.0),
        StartAdapter("e,f.gguf"),
    )


def test_the_scale_is_behind_the_last_colon() -> None:
    assert configured("--lora-scaled", "C:/x.gguf:2").adapters == (StartAdapter("C:/x.gguf", 2.0),)


def test_without_apply_they_start_at_0_and_the_log_says_how_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "kvarts.service"):
        config = configured("--lora", "a,b", "--lora-init-without-apply")
    assert [adapter.scale for adapter in config.adapters] == [0.0, 0.0]
    assert "2 adapters start at scale 0" in caplog.text


def test_room_is_for_the_adapters_of_the_start_and_more_with_a_folder(tmp_path: Path) -> None:
    assert configured().max_adapters == 0
    assert configured("--lora", "a,b").max_adapters == 2
    folder = ("--lora-dir", str(tmp_path))
    assert configured("--lora", "a,b", *folder).max_adapters == 6
    assert configured("--lora", "a", "--lora-max", "9", *folder).max_adapters == 9
    assert configured("--lora", "a").max_adapter_rank is None
    assert configured("--lora-max-rank", "64").max_adapter_rank == 64


def test_the_folder_must_exist(tmp_path: Path) -> None:
    assert adapter_dir(parse((), {}, FLAGS)) is None
    assert adapter_dir(parse(("--lora-dir", str(tmp_path)), {}, FLAGS)) == str(tmp_path)
    with pytest.raises(FlagError, match="there is no such folder"):
        adapter_dir(parse(("--lora-dir", str(tmp_path / "gone")), {}, FLAGS))
