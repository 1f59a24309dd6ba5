"""The soak itself: its judge finds leaks, and a short run is answered and leaves nothing behind.

`python -m tests.soak` is the soak of 45 minutes; how memory grows cannot be seen in seconds.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest

from engine.gguf.reader import GgufFile
from engine.model.adapter_banks import adapted_shapes
from engine.model.architectures import read_spec
from tests.adapters import TinyAdapter, write_adapter
from tests.soak.counters import fallen, read_counters
from tests.soak.judge import MIB, Sample, Usage, faults, hourly, quarters, table
from tests.soak.processes import descendants, usage

pytestmark = pytest.mark.slow

_SECONDS = 45 * 60


def _flat() -> list[Sample]:
    """45 minutes that warm up for ten, then saw to and fro by 30 MiB."""
    samples: list[Sample] = []
    for i, at in enumerate(range(0, _SECONDS, 10)):
        rss = 400 * MIB + min(at, 600) * MIB // 10 + i % 7 * 5 * MIB
        service = Usage(rss, files=20 + i % 5, threads=36 + i % 3)
        gateway = Usage(60 * MIB + i % 4 * MIB, files=21 + i % 6, threads=9)
        sample = Sample(at, service, gateway, compiles=30, host_cache=MIB, done=i, latency_ms=100.0)
        samples.append(sample)
    return samples


def _leak(side: str, **an_hour: float) -> list[Sample]:
    """The flat series, of which a side gets so much more of some figures in an hour."""
    changed: list[Sample] = []
    for sample in _flat():
        held: Usage = getattr(sample, side)
        more = {
            name: getattr(held, name) + int(rate * sample.at / 3600)
            for name, rate in an_hour.items()
        }
        changed.append(dataclasses.replace(sample, **{side: dataclasses.replace(held, **more)}))
    return changed


def test_what_only_warms_up_and_saws_is_flat() -> None:
    assert faults(_flat()) == []


@pytest.mark.parametrize("side", ["service", "gateway"])
@pytest.mark.parametrize(
    ("name", "rate", "sentence"),
    [
        # The medians of the second and the last quarter lie 22.5 minutes apart.
        ("rss", 30 * MIB, "RSS of the"),
        ("files", 40, "open files of the"),
        ("threads", 10, "threads of the"),
    ],
)
def test_a_leak_is_named(side: str, name: str, rate: float, sentence: str) -> None:
    (fault,) = faults(_leak(side, **{name: rate}))
    assert fault.startswith(f"{sentence} {side}: ")


def test_eight_mebibytes_are_allowed_and_no_more() -> None:
    samples = _flat()

    def raised(size: int) -> list[str]:
        last = [
            dataclasses.replace(s, service=dataclasses.replace(s.service, rss=s.service.rss + size))
            for s in samples
            if s.at >= 0.7 * _SECONDS
        ]
        return faults([*samples[: len(samples) - len(last)], *last])

    assert raised(7 * MIB) == []
    (fault,) = raised(14 * MIB)
    assert "more than 8 MiB above" in fault


def test_a_program_compiled_late_and_a_server_that_hangs_are_faults() -> None:
    samples = _flat()
    compiled = [dataclasses.replace(s, compiles=30 + (s.at > 1900)) for s in samples]
    assert [fault.split(":")[0] for fault in faults(compiled)] == ["compiled programs"]
    hung = [dataclasses.replace(s, done=min(s.done, 100)) for s in samples]
    assert faults(hung) == ["no request ended after the second quarter: 100 in all"]


def test_too_little_to_judge_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="7 samples are too few"):
        faults(_flat()[:7])
    ends = [s for s in _flat() if s.at < 0.2 * _SECONDS or s.at > 0.9 * _SECONDS]
    with pytest.raises(ValueError, match="no sample in the second"):
        faults(ends)


def test_growth_is_told_by_the_hour_and_in_the_table() -> None:
    samples = _leak("gateway", threads=3600)
    assert hourly(samples, lambda s: s.gateway.threads) == pytest.approx(3600)
    assert [len(part) for part in quarters(samples)] == [68, 67, 67, 68]
    samples[3] = dataclasses.replace(samples[3], latency_ms=math.nan)
    lines = table(samples).splitlines()
    assert len(lines) == 1 + len(samples) + 4 + 1
    assert lines[4].endswith(" -")


def test_a_counter_that_falls_is_found_and_a_gauge_may() -> None:
    scrape = """# HELP kvarts_steps_total Engine steps.
# TYPE kvarts_steps_total counter
kvarts_steps_total {steps}
# TYPE kvarts_step_seconds histogram
kvarts_step_seconds_bucket{{le="1.0"}} {bucket}
# TYPE kvarts_requests_running gauge
kvarts_requests_running {running}
# TYPE llamacpp:tokens_second counter
llamacpp:tokens_second {running}
"""
    before = read_counters(scrape.format(steps=7, bucket=5, running=3))
    assert before == {"kvarts_steps_total": 7, 'kvarts_step_seconds_bucket{le="1.0"}': 5}
    assert fallen(before, read_counters(scrape.format(steps=7, bucket=6, running=1))) == []
    lower = read_counters(scrape.format(steps=6.5, bucket=5, running=3))
    assert fallen(before, lower) == ["kvarts_steps_total fell from 7 to 6.5"]
    assert fallen(before, {"kvarts_steps_total": 7}) == [
        'kvarts_step_seconds_bucket{le="1.0"} fell from 5 to nan'
    ]


def test_what_this_process_holds_is_read(tmp_path: Path) -> None:
    before = usage([os.getpid()])
    with (tmp_path / "one").open("w"):
        assert usage([os.getpid()]).files == before.files + 1
    assert before.rss > 10 * MIB
    assert os.getpid() in descendants(os.getppid())
    assert usage([2**22 + 1]) == Usage(0, 0, 0)


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with GgufFile.open(tiny_model) as file:
        shapes = adapted_shapes(read_spec(file))
    path = tmp_path_factory.mktemp("soak") / "adapter.gguf"
    return write_adapter(path, TinyAdapter(), shapes, tuple(shapes))
