"""1,000 random commands about adapters on the fake model: no leak, and no text of another set."""

from __future__ import annotations

import pytest

from engine.types import EngineConfig
from tests.adapter_runs.replies import Replies
from tests.adapter_runs.walk import Walk
from tests.fakes import fake_engine
from tests.unit.engine.adapter_life import content

NUM_COMMANDS = 1000
PROMPTS = [tuple(range(10, 10 + length)) for length in (1, 15, 40)] + [(30,) * 33]


@pytest.mark.parametrize("seed", range(3))
def test_every_reply_is_its_solo_run(seed: int) -> None:
    replies = Replies()
    config = EngineConfig(context_tokens=256, num_slots=3, page_tokens=16)
    engine = fake_engine(replies.take, config=config, num_adapters=3)
    contents = [content(number) for number in range(5)]
    walk = Walk(engine, replies, contents, PROMPTS, seed)
    walk.run(NUM_COMMANDS)
    walk.judge()
    assert walk.seen["adapted"] > 100
    assert walk.seen["cancelled"] > 30
    for outcome in (
        *("load:done", "load:given up", "load:ADAPTER_ROOM", "load:ADAPTER_EXISTS"),
        *("scale:done", "unload:done", "unload:given up", "unload:ADAPTER_IN_USE"),
    ):
        assert walk.seen[outcome], outcome
