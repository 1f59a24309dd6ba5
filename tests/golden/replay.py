"""Replays a file of recorded HTTP exchanges against a server and lists what differs.

Usage: python -m tests.golden.replay BASE_URL RECORDING.json [NAME ...]

The exchanges go out in order to a fresh server that was started as the recording's `server` says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.golden.compare import Rules, Tolerances, differences, is_object, num_ids

_GUARDED_HEADERS = ("access-control-", "x-accel-buffering")
_OWN_METRICS = ("kvarts_", "process_")
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """What came back, with the body read in the form that the recording has it in."""

    status: int
    headers: Mapping[str, str]
    kind: str
    body: Any


@dataclass(frozen=True)
class Result:
    """One exchange; no differences is a pass."""

    name: str
    differences: Sequence[str]


def replay(recording: Mapping[str, Any], base_url: str) -> Iterator[Result]:
    """Sends every exchange and compares its answer."""
    model = str(recording["server"]["model"])
    before: Mapping[str, Any] | None = None
    with httpx.Client(base_url=base_url, timeout=_TIMEOUT_S) as client:
        for exchange in recording["exchanges"]:
            answer = ask(client, exchange)
            rules = rules_of(exchange, before, tolerances_of(model))
            yield Result(exchange["name"], list(compare(exchange, answer, rules)))
            before = exchange


def ask(client: httpx.Client, exchange: Mapping[str, Any]) -> Answer:
    """Sends one exchange."""
    content: bytes | None = None
    headers: dict[str, str] = dict(exchange.get("headers") or {})
    if "raw_body" in exchange:
        content = exchange["raw_body"].encode()
    elif "body" in exchange:
        content = json.dumps(exchange["body"]).encode()
    if content is not None:
        headers.setdefault("Content-Type", "application/json")
    kind = next(key for key in ("response", "sse", "metrics", "text") if key in exchange)
    response = client.request(
        exchange["method"], exchange["path"], content=content, headers=headers
    )
    return Answer(response.status_code, response.headers, kind, read_body(kind, response.text))


def read_body(kind: str, text: str) -> Any:
    """Reads a body; one that is not of the recorded kind stays text."""
    if kind == "sse":
        return read_events(text)
    if kind == "metrics":
        return read_metrics(text)
    if kind == "response":
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    return text


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, comments left out."""
    events: list[dict[str, Any]] = []
    for block in text.split("\n\n"):
        event: dict[str, Any] = {}
        for line in block.splitlines():
            field, _, value = line.partition(": ")
            if field == "event":
                event["event"] = value
            elif field == "data":
                event["data"] = value if value == "[DONE]" else json.loads(value)
        if event:
            events.append(event)
    return events


def read_metrics(text: str) -> dict[str, dict[str, Any]]:
    """Prometheus text as `{name: {help, type, value}}`; our own metrics are left out."""
    metrics: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            metrics.setdefault(name, {})[what.lower()] = rest
        elif line:
            name, value = line.rsplit(" ", 1)
            metrics.setdefault(name, {})["value"] = float(value)
    return {name: metric for name, metric in metrics.items() if not name.startswith(_OWN_METRICS)}


def rules_of(
    exchange: Mapping[str, Any], before: Mapping[str, Any] | None, tolerances: Tolerances
) -> Rules:
    """More may be reused than recorded, but not right after an erase, nor when reuse is off."""
    body = exchange.get("body")
    is_uncached = is_object(body) and body.get("cache_prompt") is False
    is_after_erase = before is not None and "action=erase" in before["path"]
    return Rules(
        volatile=exchange.get("volatile") or (),
        sensitive=exchange.get("sensitive") or (),
        tolerances=tolerances,
        allows_more_cached=not (is_uncached or is_after_erase),
    )


def tolerances_of(model: str) -> Tolerances:
    """SmolLM2's weights have 4 bits, which moves its log-probabilities."""
    return Tolerances(probability=0.2) if "SmolLM2" in model else Tolerances()


def compare(exchange: Mapping[str, Any], answer: Answer, rules: Rules) -> Iterator[str]:
    """Lists what differs in status, headers and body."""
    if answer.status != exchange["status"]:
        yield f"status: {answer.status} instead of {exchange['status']}: {answer.body!r}"[:300]
        return
    yield from _header_differences(exchange["response_headers"], answer.headers)
    expected = exchange[answer.kind]
    if answer.kind == "sse":
        yield from _stream_differences(expected, answer.body, rules)
    else:
        yield from differences(expected, answer.body, rules, answer.kind)
    # Places without positions: the order across indexes is free.
    for place, number in num_ids(expected).items():
        found = num_ids(answer.body).get(place, 0)
        if number == 1 and found != 1:
            yield f"{place}: {found} different ids instead of one"


def _header_differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> Iterator[str]:
    for name, value in expected.items():
        if actual.get(name) != value:
            yield f"header {name}: {actual.get(name)!r} instead of {value!r}"
    for name in actual:
        if name.lower().startswith(_GUARDED_HEADERS) and name.lower() not in expected:
            yield f"header {name}: must be absent"


def _stream_differences(
    expected: Sequence[Any], actual: Sequence[Any], rules: Rules
) -> Iterator[str]:
    """The order across indexes is the scheduler's, so each index is compared on its own."""
    wanted, found = _by_index(expected), _by_index(actual)
    if wanted.keys() != found.keys():
        yield f"sse: indexes {list(found)} instead of {list(wanted)}"
        return
    for index, events in wanted.items():
        yield from differences(events, found[index], rules, "sse")


def _by_index(events: Sequence[Mapping[str, Any]]) -> dict[int | None, list[Any]]:
    groups: dict[int | None, list[Any]] = {}
    for event in events:
        groups.setdefault(_index_of(event.get("data")), []).append(event)
    # With one index the whole order counts, that of events without an index too.
    if len([index for index in groups if index is not None]) <= 1:
        return {None: list(events)}
    return groups


def _index_of(data: Any) -> int | None:
    if not is_object(data):
        return None
    if "index" in data:
        return data["index"]
    choices = data.get("choices")
    return choices[0]["index"] if choices else None


def main(arguments: Sequence[str]) -> int:
    """Prints one line per exchange that differs; 0 if none does."""
    base_url, path, *names = arguments
    recording = json.loads(Path(path).read_text())
    failed = 0
    total = 0
    for result in replay(recording, base_url):
        if names and result.name not in names:
            continue
        total += 1
        failed += bool(result.differences)
        for difference in result.differences[:4]:
            sys.stdout.write(f"{result.name}: {difference}\n")
    sys.stdout.write(f"{Path(path).stem}: {total - failed} passed, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
