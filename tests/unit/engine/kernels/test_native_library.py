"""The library itself: whether what was built is what runs."""

from __future__ import annotations

import pytest

from engine.kernels import native
from tests.native import instruction_sets, instructions


@pytest.mark.skipif(not native.LIBRARY.is_file(), reason="the native kernels were not built")
def test_a_library_that_is_there_is_used() -> None:
    """Without this, one that does not load would skip every other test of it."""
    assert native.isa() == instruction_sets()[-1]
    assert instruction_sets()[0] == "portable"


@pytest.mark.skipif(native.isa() is None, reason="the native kernels were not built")
def test_a_set_that_no_processor_has_is_not_taken() -> None:
    with pytest.raises(ValueError, match="does not run abacus"), instructions("abacus"):
        pass
    assert native.isa() == instruction_sets()[-1]
