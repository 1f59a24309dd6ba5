from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.mt19937 import Mt19937


def test_published_10000th_output_of_the_default_seed() -> None:
    # ISO C++ [rand.predef]: the 10000th of a default-constructed std::mt19937.
    generator = Mt19937(5489)
    outputs = [generator.next_u32() for _ in range(10_000)]
    assert outputs[0] == 3499211612
    assert outputs[-1] == 4123659995


@given(seed=st.integers(0, 2**32 - 1))
def test_outputs_equal_those_of_numpy(seed: int) -> None:
    generator = Mt19937(seed)
    ours = [generator.next_u32() for _ in range(1300)]
    theirs = np.random.RandomState(seed).randint(0, 2**32, 1300, dtype=np.uint32)
    assert ours == theirs.tolist()


def test_doubles_equal_those_of_libstdcxx() -> None:
    # Printed by a C++ program: std::uniform_real_distribution<double>(0, 1), seed 42.
    generator = Mt19937(42)
    assert [generator.next_double() for _ in range(4)] == [
        0.79654298428784598,
        0.18343478789336848,
        0.77969099761266125,
        0.59685016158005655,
    ]


def test_floats_equal_those_of_libstdcxx() -> None:
    # Printed by a C++ program: std::uniform_real_distribution<float>(0, 1), seed 42.
    generator = Mt19937(42)
    drawn = [np.float32(generator.next_float()) for _ in range(4)]
    assert drawn == [np.float32(x) for x in (0.37454012, 0.796543002, 0.95071429, 0.183434784)]


class _Fixed(Mt19937):
    def next_u32(self) -> int:
        return 2**32 - 1


def test_draws_stay_below_1_when_every_bit_is_set() -> None:
    assert _Fixed(0).next_double() == np.nextafter(1.0, 0.0)
    assert _Fixed(0).next_float() == np.nextafter(np.float32(1), np.float32(0))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=str(seed)):
        Mt19937(seed)
