"""Adapters under the real scheduler: what is cached of which set, who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from engine.adapters.changes import STEP_BYTES
from engine.adapters.loaded import NewAdapter
from engine.engine import Engine
from engine.errors import EngineFault, InvalidField, NoSuchAdapter
from engine.requests import AdapterScale, Request, SamplingParams
from engine.types import CacheSource, Chunk, EngineConfig, Event, Failed, Finished, Started
from tests.fake_runner import FakeRunner
from tests.fakes import fake_engine
from tests.unit.engine.adapter_life import content

PROMPT = tuple(range(10, 50))
A, B = (AdapterScale(0, 1.0),), (AdapterScale(1, 0.5),)


@dataclass
class Life:
    """An engine that is stepped by hand, and what it said."""

    engine: Engine
    events: dict[str, list[Event]] = field(default_factory=dict[str, list[Event]])
    count: int = 0

    def ask(
        self,
        adapters: tuple[AdapterScale, ...] | None,
        prompt: Sequence[int] = PROMPT,
        *,
        cache_prompt: bool = True,
    ) -> list[Event]:
        """Runs a request to its end."""
        self.count += 1
        name = f"r{self.count}"
        self.engine.submit(
            Request(
                name,
                tuple(prompt),
                sampling=SamplingParams(temperature=0.0),
                max_tokens=5,
                ignore_eos=True,
                cache_prompt=cache_prompt,
                adapters=adapters,
            )
        )
        while not any(isinstance(e, Finished | Failed) for e in self.events.get(name, ())):
            self.engine.step()
        return self.events[name]


@pytest.fixture(name="life")
def make_life() -> Life:
    return new_life()


def new_life() -> Life:
    events: dict[str, list[Event]] = {}

    def sink(new: Sequence[tuple[str, Event]]) -> None:
        for name, event in new:
            events.setdefault(name, []).append(event)

    config = EngineConfig(context_tokens=256, num_slots=2, page_tokens=16)
    life = Life(fake_engine(sink, config=config, num_adapters=3), events)
    for number, name in enumerate("ab"):
        load(life, name, number)
    return life


def load(life: Life, name: str, seed: int, *invocation: int) -> None:
    done = life.engine.adapters.load(NewAdapter(name, name, 0.0, content(seed, *invocation)))
    life.engine.step()
    done.result(0)


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Chunk)]


def started(events: list[Event]) -> Started:
    (one,) = [event for event in events if isinstance(event, Started)]
    return one


def test_no_set_sees_anothers_cache_and_each_finds_its_own_again(life: Life) -> None:
    """A, then B, then none, then A: each as its cold run."""
    sets = (A, B, (), A)
    cold = [tokens_of(new_life().ask(one)) for one in sets]
    assert len({tuple(tokens) for tokens in cold}) == 3
    answers = [life.ask(one) for one in sets]
    assert [tokens_of(events) for events in answers] == cold
    assert [started(events).cached_tokens for events in answers] == [0, 0, 0, 39]
    assert started(answers[3]).cache_source in (CacheSource.SLOT, CacheSource.INDEX)


def test_another_scale_is_another_set(life: Life) -> None:
    life.ask(A)
    other = life.ask((AdapterScale(0, 0.5),))
    assert started(other).cached_tokens == 0
    zero = life.ask((AdapterScale(0, 0.0),))
    assert started(zero).cached_tokens == 0
    assert started(life.ask(())).cached_tokens == 39, "a scale of 0 is no adapter"


def test_content_counts_and_not_ids(life: Life) -> None:
    first = life.ask(A)
    done = life.engine.adapters.unload(0)
    life.engine.step()
    done.result(0)
    load(life, "again", 0)
    same = life.ask((AdapterScale(2, 1.0),))
    assert tokens_of(same) == tokens_of(first)
    assert started(same).cached_tokens == 39


def submit(
    life: Life, name: str, adapters: tuple[AdapterScale, ...] | None = None, max_tokens: int = 50
) -> None:
    sampling = SamplingParams(temperature=0.0)
    life.engine.submit(
        Request(
            name,
            PROMPT,
            sampling=sampling,
            max_tokens=max_tokens,
            ignore_eos=True,
            adapters=adapters,
        )
    )


def test_scales_take_effect_in_the_next_step_and_running_requests_keep_theirs(life: Life) -> None:
    submit(life, "before")
    life.engine.step()
    done = life.engine.adapters.set_scales([AdapterScale(0, 0.5)])
    submit(life, "after")
    life.engine.step()
    done.result(0)
    assert started(life.events["after"]).adapters == (AdapterScale(0, 0.5),)
    assert life.engine.snapshot().adapters[0].scale == 0.5
    assert life.engine.snapshot().adapters[0].active_requests == 1
    for _ in range(60):
        life.engine.step()
    assert started(life.events["before"]).adapters == ()
    assert tokens_of(life.events["before"])[:5] == tokens_of(life.ask(()))


def test_every_step_of_a_load_gives_the_streams_their_tokens(life: Life) -> None:
    """Three pieces of all that is written between two steps."""
    runner = life.engine.adapters.setup.store
    assert isinstance(runner, FakeRunner)
    runner.piece_bytes = STEP_BYTES
    for name in ("one", "two"):
        submit(life, name)
    for _ in range(3):
        life.engine.step()
    done = life.engine.adapters.load(NewAdapter("c", "c", 0.0, content(9)))
    before = {name: len(tokens_of(life.events[name])) for name in ("one", "two")}
    num_steps = 0
    while not done.done():
        life.engine.step()
        num_steps += 1
        for name, count in before.items():
            assert len(tokens_of(life.events[name])) == count + num_steps
    assert num_steps == 4, "three pieces, and the end"


def test_an_adapter_that_is_gone_at_admission_fails_its_request_alone(life: Life) -> None:
    done = life.engine.adapters.unload(0)
    events = life.ask(A)
    assert done.result(0)
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, NoSuchAdapter)
    assert isinstance(life.ask(B)[-1], Finished)
    with pytest.raises(NoSuchAdapter):
        life.ask(A)


@pytest.mark.parametrize(
    ("adapters", "field"),
    [
        ((AdapterScale(0, 1.0), AdapterScale(0, 2.0)), r"adapters\.scales\[1\]\.adapter_id"),
        ((AdapterScale(0, float("inf")),), r"adapters\.scales\[0\]\.scale"),
    ],
)
def test_a_bad_set_is_refused_by_field(
    life: Life, adapters: tuple[AdapterScale, ...], field: str
) -> None:
    with pytest.raises(InvalidField, match=field):
        life.ask(adapters)


class TestActivated:
    """An activated adapter shares the cache of the base model up to its invocation."""

    INVOKED = (*PROMPT[:30], 70, 71, *PROMPT[30:])
    SET = (AdapterScale(2, 1.0),)

    @pytest.fixture(autouse=True)
    def _load(self, life: Life) -> None:
        load(life, "activated", 7, 70, 71)

    def test_its_base_is_shared_both_ways(self, life: Life) -> None:
        cold = tokens_of(life.ask(self.SET, self.INVOKED, cache_prompt=False))
        base = tokens_of(life.ask((), self.INVOKED, cache_prompt=False))
        assert cold != base
        assert started(life.ask((), self.INVOKED)).cached_tokens > 0
        warm = life.ask(self.SET, self.INVOKED)
        assert tokens_of(warm) == cold
        assert started(warm).cached_tokens == 29, "one token before its invocation"
        after = life.ask((), self.INVOKED)
        assert tokens_of(after) == base

    def test_without_an_invocation_it_is_off(self, life: Life) -> None:
        events = life.ask(self.SET)
        assert started(events).adapters == ()
        assert tokens_of(events) == tokens_of(life.ask(()))


def test_a_device_that_fails_in_a_write_ends_the_engine(life: Life) -> None:
    """The banks may hold anything then: nobody may be answered from them."""

    def fail(place: int, new: object) -> None:
        raise RuntimeError("the device is gone")

    runner = life.engine.adapters.setup.store
    runner.write_adapter = fail  # pyright: ignore[reportAttributeAccessIssue]
    life.engine.start()
    done = life.engine.adapters.load(NewAdapter("c", "c", 1.0, content(9)))
    with pytest.raises(EngineFault):
        done.result(10)
    assert life.engine.fault is not None


def test_a_scale_that_the_model_cannot_hold_ends_its_request_by_name_and_no_other() -> None:
    life, poison = new_life(), (7, 7)
    runner = life.engine.adapters.setup.store
    assert isinstance(runner, FakeRunner)
    runner.poison = poison
    (failed,) = [e for e in life.ask((AdapterScale(1, 1e38),), poison) if isinstance(e, Failed)]
    assert isinstance(failed.error, InvalidField)
    assert failed.error.field == "adapters"
    assert "1 at 1e+38" in str(failed.error)
    assert any(isinstance(e, Finished) for e in life.ask(A))
    (fault,) = [e for e in life.ask((), poison) if isinstance(e, Failed)]
    assert isinstance(fault.error, EngineFault)
