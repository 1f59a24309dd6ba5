from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.cycles import Cycle, find_cycles


def walked(cycles: tuple[Cycle, ...]) -> list[int]:
    """The layers in the order in which a program walks them."""
    order: list[int] = []
    for cycle in cycles:
        for turn in range(cycle.repeats):
            for run in cycle.runs:
                each = len(run) // cycle.repeats
                order += run[turn * each : (turn + 1) * each]
    return order


def num_runs(cycles: tuple[Cycle, ...]) -> int:
    return sum(len(cycle.runs) for cycle in cycles)


def fewest_runs(keys: str) -> int:
    """By trying every split into repeated patterns."""
    groups: list[tuple[str, int]] = []
    for key in keys:
        if groups and groups[-1][0] == key:
            groups[-1] = (key, groups[-1][1] + 1)
        else:
            groups.append((key, 1))

    @cache
    def best(first: int) -> int:
        if first == len(groups):
            return 0
        found = 1 + best(first + 1)
        for length in range(1, len(groups) - first + 1):
            end = first + length
            while groups[end : end + length] == groups[first : first + length]:
                end += length
                found = min(found, length + best(end))
        return found

    return best(0)


@pytest.mark.parametrize(
    ("keys", "runs"),
    [
        ("A", 1),
        ("A" * 512, 1),
        ("GGGA" * 16, 2),  # Qwen 3.5
        ("MMMMMA" + "MMMMMMMMMA" * 3 + "MMMM", 5),  # Granite 4
        ("CCACCACCACACACAC", 5),  # LFM 2
        ("ABCABC", 3),
        ("AB" * 256, 2),
    ],
)
def test_a_program_is_as_large_as_the_pattern(keys: str, runs: int) -> None:
    cycles = find_cycles(keys)
    assert num_runs(cycles) == runs
    assert walked(cycles) == list(range(len(keys)))


@given(st.text(alphabet="AB", max_size=14))
def test_all_layers_are_walked_in_order_in_the_fewest_runs(keys: str) -> None:
    cycles = find_cycles(keys)
    assert walked(cycles) == list(range(len(keys)))
    assert num_runs(cycles) == fewest_runs(keys)
    for cycle in cycles:
        for run in cycle.runs:
            assert len(run) % cycle.repeats == 0
            assert len({keys[layer] for layer in run}) == 1


def test_no_layers_have_no_cycles() -> None:
    assert find_cycles("") == ()
