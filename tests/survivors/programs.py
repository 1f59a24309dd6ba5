"""Compiled programs that one model leaves to the next of the same shapes.

Weights are arguments of every program, so a model that differs in them alone needs no new one.
Without this each damaged file would be compiled for seconds; everything else of a load stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import jax

from engine.model.adapter_banks import AdapterBanks
from engine.model.expert_pool import ExpertPool
from engine.model.spec import ModelSpec
from engine.model.weights import Weights
from engine.packed_step import Bucket
from engine.pool_programs import PoolPrograms, Program, RunnerConfig

_MOST_KEPT = 96


class _SharedPrograms(PoolPrograms):
    """Programs that are compiled once, whoever asks; they may be given any weights of the shapes."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, config: RunnerConfig, banks: AdapterBanks | None
    ) -> None:
        super().__init__(spec, weights, config, banks)
        self._pool = weights.experts.pool if weights.experts else None
        self._is_compiled = False

    def compile(self, progress: Callable[[int, int], None] | None = None, workers: int = 2) -> None:
        if not self._is_compiled:
            super().compile(progress, workers)
        self._is_compiled = True

    def step(self, bucket: Bucket) -> Program:
        program = super().step(bucket)
        if self._pool is None:
            return program
        pool = self._pool

        def run(weights: Weights, *given: Any) -> Any:
            return program(_with_pool(weights, pool), *given)

        return run


@dataclass
class KeptPrograms:
    """The last programs by what they depend on. `num_made` counts what had to be compiled."""

    num_made: int = 0
    _kept: OrderedDict[Any, _SharedPrograms] = field(
        default_factory=OrderedDict[Any, _SharedPrograms]
    )

    @contextmanager
    def used(self) -> Generator[None]:
        """Has every runner that is made inside take its programs from here."""
        with patch("engine.runner.PoolPrograms", self._find):
            yield

    def _find(
        self, spec: ModelSpec, weights: Weights, config: RunnerConfig, banks: AdapterBanks | None
    ) -> PoolPrograms:
        experts = weights.experts
        if experts is not None and experts.arena is None:
            self.num_made += 1
            return PoolPrograms(spec, weights, config, banks)  # it reads from this file
        key = _key(spec, weights, config)
        programs = self._kept.get(key)
        if programs is None:
            self.num_made += 1
            programs = self._kept[key] = _SharedPrograms(spec, weights, config, banks)
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return programs


def _key(spec: ModelSpec, weights: Weights, config: RunnerConfig) -> Any:
    """All that programs know: what the model computes, shapes, and factors, which they hold."""
    pool = weights.experts.pool.shape if weights.experts else None
    if weights.experts is not None:
        weights = replace(weights, experts=None)
    leaves: Any = jax.tree.leaves(weights)
    factors = tuple(
        bytes(memoryview(weights.globals[rope.factors]))  # pyright: ignore[reportArgumentType] -- a vector
        for rope in spec.ropes
        if rope.factors
    )
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    return spec, config, jax.tree.structure(weights), shapes, factors, pool


def _with_pool(weights: Weights, pool: ExpertPool) -> Weights:
    """The same arrays under the pool that programs were traced with, which they compare."""
    assert weights.experts is not None
    return replace(weights, experts=replace(weights.experts, pool=pool))
