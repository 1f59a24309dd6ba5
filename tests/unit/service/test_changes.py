"""Changes that must not meet."""

from __future__ import annotations

import pytest

from service.changes import Changes
from service.swap_errors import ModelSwapBusy


def test_adapters_and_pools_go_side_by_side_and_a_model_alone() -> None:
    changes = Changes()
    both = changes.change("adapters"), changes.change("pools")
    refused = pytest.raises(ModelSwapBusy, match="adapters are being changed")
    with both[0], both[1], refused, changes.swap():
        pass
    with changes.swap():
        with pytest.raises(ModelSwapBusy, match="another model"), changes.change("pools"):
            pass
        with pytest.raises(ModelSwapBusy, match="another model"), changes.swap():
            pass
    with changes.change("pools"):
        pass
