"""Asks one request twice, in one piece and as a stream, and compares what the answers say."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.streams.cases import Case, draw_case, wants_stops
from tests.streams.said import Samples, of_stream, of_whole


@dataclass
class Reached:
    """What the requests of a run have come to, so that a run can prove that it tried enough."""

    counts: Counter[str] = field(default_factory=Counter[str])

    def note(self, case: Case, said: Samples) -> None:
        """Counts one request's traits."""
        self.counts[case.route] += 1
        for one in said.values():
            text = one.content + one.reasoning
            self.counts["calls"] += bool(one.calls)
            self.counts["many bytes"] += any(ord(letter) > 127 for letter in text)
            self.counts["broken bytes"] += "\ufffd" in text
            self.counts["cut by a stop"] += case.stop_key in case.body and one.reason in (
                *("word", "stop"),
            )
            self.counts["ended by the limit"] += one.reason in ("limit", "length", "max_tokens")
        forms = ("grammar", "json_schema", "response_format")
        self.counts["formed"] += any(key in case.body for key in forms)


async def compare(http: httpx.AsyncClient, seed: int, call_token: int, reached: Reached) -> None:
    """Compares one request, and then, for most seeds, the same one with stops.

    Raises:
        AssertionError: The stream does not say what the answer in one piece says.
    """
    case = draw_case(seed, call_token)
    said = await _compare_one(http, case)
    reached.note(case, said)
    if wants_stops(case):
        case = case.with_stops(said[0].content)
        reached.note(case, await _compare_one(http, case))


async def _compare_one(http: httpx.AsyncClient, case: Case) -> Samples:
    answer = await http.post(case.route, json=case.body)
    assert answer.status_code == 200, f"seed {case.seed}: {case.body}: {answer.text}"
    streamed = await http.post(case.route, json=case.streamed())
    assert streamed.status_code == 200, f"seed {case.seed}: {case.body}: {streamed.text}"
    whole, parts = of_whole(case.route, answer.json()), of_stream(case.route, _events(streamed))
    assert parts == whole, f"seed {case.seed}: {case.route} {case.body}: {parts}, not {whole}"
    return whole


def _events(answer: httpx.Response) -> list[Any]:
    """The data of all events but the one that says that there are no more."""
    # A line ends at \n alone: other characters that end lines for Python are text here.
    lines = answer.content.decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]
