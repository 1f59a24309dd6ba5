from __future__ import annotations

import random

import pytest

from engine.failpoints import Failpoints, InjectedFault, Site


def test_nothing_fires_unless_armed() -> None:
    failpoints = Failpoints()
    for site in Site:
        failpoints.check(site)
    assert failpoints.fired.total() == 0


def test_an_armed_site_fails_by_name_and_is_counted() -> None:
    failpoints = Failpoints({Site.RUN: 1.0})
    with pytest.raises(InjectedFault, match=r"runner\.run"):
        failpoints.check(Site.RUN)
    assert failpoints.fires(Site.RUN)
    assert failpoints.fired == {Site.RUN: 2}
    failpoints.disarm()
    failpoints.check(Site.RUN)


def test_arming_and_firing_are_two_draws() -> None:
    num_runs, num_passes = 2000, 40
    armed = fired = 0
    for seed in range(num_runs):
        failpoints = Failpoints.seeded(random.Random(seed))
        if Site.RUN not in failpoints.armed:
            assert not failpoints.fires(Site.RUN)
            continue
        armed += 1
        fired += sum(failpoints.fires(Site.RUN) for _ in range(num_passes))
    assert armed / num_runs == pytest.approx(0.25, abs=0.03)
    assert fired / (armed * num_passes) == pytest.approx(0.25, abs=0.03)
