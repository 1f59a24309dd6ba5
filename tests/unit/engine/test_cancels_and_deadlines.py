"""A thousand cancels and hundreds of deadlines, at every stage of a request, among bystanders.

The whole machine is judged: who ends, when, with what, and that nothing stays behind.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from engine.errors import DeadlineExceeded
from engine.requests import Request
from engine.types import CancelCause, Cancelled, Failed, Finished, FinishReason
from tests.unit.engine.drive import Drive, solo

NUM_CANCELS = 1000
NUM_DEADLINES, NUM_PAST = 500, 100
# Requests in flight at a time, for four slots: some wait, some run.
CROWD = 10

pytestmark = pytest.mark.parametrize("window", [None, 8])


def crowded(window: int | None) -> Drive:
    return Drive(num_slots=4, kv_pages=60, chunk_tokens=8, window=window)


def draw_request(rng: random.Random, name: str, deadline_s: float | None = None) -> Request:
    return Request(
        name,
        tuple(rng.choices((67, 68), k=rng.randint(1, 40))),
        max_tokens=rng.randint(1, 20),
        ignore_eos=True,
        deadline_s=deadline_s,
    )


def judge_bystander(drive: Drive, request: Request, window: int | None) -> None:
    finished = drive.finished(request.request_id)
    assert finished.reason in (FinishReason.LENGTH, FinishReason.CONTEXT_FULL)
    tokens = drive.tokens(request.request_id)
    assert tokens == solo(request.prompt, len(tokens), window)


def judge_afterwards(drive: Drive, window: int | None) -> None:
    """Nothing runs, waits or is held by anybody, and the next call is a normal one."""
    now = drive.rest().engine.snapshot()
    assert (now.running, now.queued) == (0, 0)
    request = Request("after", (67, 68, 68), max_tokens=5, ignore_eos=True)
    drive.engine.submit(request)
    drive.rest()
    judge_bystander(drive, request, window)
    assert drive.finished("after").completion_tokens == 5


@dataclass
class Victim:
    """A request that is cancelled at a stage, some tokens into it."""

    request: Request
    stage: str
    num_tokens: int

    def is_there(self, drive: Drive) -> bool:
        name = self.request.request_id
        num_tokens = len(drive.tokens(name))
        match self.stage:
            case "queued":
                return not drive.has_started(name)
            case "prefill":
                return drive.has_started(name) and num_tokens == 0
            case "decode":
                return num_tokens >= self.num_tokens
            case _:
                # The step that comes would sample the last token.
                return num_tokens == (self.request.max_tokens or 0) - 1 > 0


def test_a_thousand_cancels_leave_nothing_behind(window: int | None) -> None:
    rng = random.Random(20)
    drive = crowded(window)
    victims: dict[str, Victim] = {}
    bystanders: dict[str, Request] = {}
    stages: Counter[str] = Counter()
    num_made = 0
    while stages.total() < NUM_CANCELS:
        while len(victims) < CROWD:
            request = draw_request(rng, f"r{num_made}")
            num_made += 1
            drive.engine.submit(request)
            if rng.random() < 0.1:
                bystanders[request.request_id] = request
                continue
            stage = rng.choice(["queued", "prefill", "decode", "last token"])
            victims[request.request_id] = Victim(request, stage, rng.randint(1, 10))
        cancelled = [name for name, victim in victims.items() if victim.is_there(drive)]
        for name in cancelled:
            drive.engine.cancel(name, CancelCause.CLIENT)
            stages[victims[name].stage] += 1
        before = {name: len(drive.of(name)) for name in cancelled}
        drive.steps()
        for name in cancelled:
            assert drive.of(name)[before[name] :] == [Cancelled(CancelCause.CLIENT)]
        # Who passed its stage unseen (a prompt of one chunk, a short answer) ends in its own way.
        for name in [name for name in victims if drive.end(name)]:
            del victims[name]
        now = drive.engine.snapshot()
        living = sum(drive.end(name) is None for name in [*victims, *bystanders])
        assert now.running + now.queued == living
    for name in victims:
        drive.engine.cancel(name, CancelCause.CLIENT)
    judge_afterwards(drive, window)
    assert min(stages.values()) >= 50, stages
    assert len(stages) == 4
    assert len(bystanders) >= 50
    for request in bystanders.values():
        judge_bystander(drive, request, window)


def test_hundreds_of_deadlines_end_in_time(window: int | None) -> None:
    rng = random.Random(21)
    drive = crowded(window)

    def pass_time(_: object) -> None:
        drive.clock.advance(rng.uniform(0.001, 0.003))

    drive.runner.on_run = pass_time
    bounded: dict[str, Request] = {}
    bystanders: dict[str, Request] = {}
    crowd: set[str] = set()
    late = [False] * NUM_DEADLINES + [True] * NUM_PAST
    rng.shuffle(late)
    while late or crowd:
        while late and len(crowd) < CROWD:
            name = f"r{len(bounded) + len(bystanders)}"
            crowd.add(name)
            if rng.random() < 0.1:
                bystanders[name] = draw_request(rng, name)
                drive.engine.submit(bystanders[name])
                continue
            ahead_s = -rng.uniform(0.0, 0.05) if late.pop() else rng.uniform(0.001, 0.05)
            bounded[name] = draw_request(rng, name, drive.clock() + ahead_s)
            drive.engine.submit(bounded[name])
        began_s = drive.clock()
        tokens_before = {name: len(drive.tokens(name)) for name in crowd}
        drive.steps()
        for name in crowd & set(bounded):
            deadline_s = bounded[name].deadline_s
            assert deadline_s is not None
            if deadline_s <= began_s:
                assert len(drive.tokens(name)) == tokens_before[name], "a token after the deadline"
                assert isinstance(drive.error(name), DeadlineExceeded)
        crowd = {name for name in crowd if drive.end(name) is None}
    ends = Counter(type(drive.end(name)) for name in bounded)
    assert ends[Failed] + ends[Finished] == NUM_DEADLINES + NUM_PAST
    assert min(ends[Failed] - NUM_PAST, ends[Finished]) >= 50, ends
    for request in bounded.values():
        tokens = drive.tokens(request.request_id)
        assert tokens == solo(request.prompt, len(tokens), window)
    assert len(bystanders) >= 30
    for request in bystanders.values():
        judge_bystander(drive, request, window)
    judge_afterwards(drive, window)
