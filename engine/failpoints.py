"""Named places where a test can make the engine fail.

In production the registry is empty and a check is one dictionary look-up. A run of a seeded test
arms each site by chance and an armed site then fires by chance, so that one run explores few faults
deeply instead of all of them at once.

Source: FoundationDB's BUGGIFY (two-step arming).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class Site(Enum):
    """Where a fault can be made."""

    ADMIT = "admission.begin"
    EVICT = "slots.evict"
    GROW = "pool.grow"
    RUN = "runner.run"
    LOGITS = "runner.logits"
    SAMPLE = "sampler.sample"
    REBUILD_COMPILE = "rebuild.compile"
    REBUILD_COPY_OUT = "rebuild.copy_out"
    REBUILD_FREE = "rebuild.free"
    REBUILD_ALLOCATE = "rebuild.allocate"
    REBUILD_COPY_BACK = "rebuild.copy_back"
    REBUILD_WARM = "rebuild.warm"


class InjectedFault(RuntimeError):
    """A fault that a failpoint made."""

    def __init__(self, site: Site) -> None:
        super().__init__(f"failpoint {site.value} fired")
        self.site = site


@dataclass
class Failpoints:
    """Which sites are armed, with what probability; `fired` counts what happened.

    Used by the engine thread alone.
    """

    armed: dict[Site, float] = field(default_factory=dict[Site, float])
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    fired: Counter[Site] = field(default_factory=Counter[Site])

    @classmethod
    def seeded(cls, rng: random.Random, *, arm: float = 0.25, fire: float = 0.25) -> Failpoints:
        """Arms each site with probability `arm`; an armed one fires with probability `fire`."""
        return cls({site: fire for site in Site if rng.random() < arm}, rng)

    def fires(self, site: Site) -> bool:
        """Returns whether the fault at this site happens now."""
        probability = self.armed.get(site)
        if probability is None or self.rng.random() >= probability:
            return False
        self.fired[site] += 1
        return True

    def check(self, site: Site) -> None:
        """Fails if the site fires.

        Raises:
            InjectedFault: it did.
        """
        if self.fires(site):
            raise InjectedFault(site)

    def disarm(self) -> None:
        """Turns every site off; the counts stay."""
        self.armed.clear()
