"""Hypothesis profiles: what `make test` runs, and the longer search of `make nightly`."""

from __future__ import annotations

from hypothesis import settings

# No deadline: how long an example takes says more about the machine than about the code.
settings.register_profile("default", deadline=None)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("default")
