from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.golden.compare import Rules, Tolerances, differences, num_ids
from tests.golden.replay import Answer, compare, read_events, read_metrics, rules_of

ANSWER: dict[str, Any] = {
    "content": "a",
    "stop": True,
    "tokens": [1, 2],
    "temperature": 0.800000011920929,
    "probs": [{"id": 5, "logprob": -0.5}],
    "timings": {"cache_n": 4, "prompt_n": 1, "prompt_ms": 1.5},
}
VOLATILE = ["response.timings.prompt_ms"]


def changed(path: list[str | int], value: Any) -> dict[str, Any]:
    answer = copy.deepcopy(ANSWER)
    place: Any = answer
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return answer


def found(actual: Any, rules: Rules | None = None) -> list[str]:
    return differences(ANSWER, actual, rules or Rules(volatile=VOLATILE), "response")


def test_equal():
    assert found(copy.deepcopy(ANSWER)) == []


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (["content"], "b", "response.content"),
        (["stop"], 1, "response.stop"),
        (["tokens"], [1], "response.tokens: 1 items instead of 2"),
        (["tokens", 1], 3, "response.tokens[1]"),
        (["tokens", 1], 2.0, "response.tokens[1]"),
        (["temperature"], 0.8, "response.temperature"),
        (["probs", 0, "logprob"], -0.502, "response.probs[0].logprob"),
        (["timings", "prompt_ms"], 1, "response.timings.prompt_ms"),
        (["timings", "cache_n"], 3, "response.timings"),
        (["extra"], 1, "response: keys"),
    ],
)
def test_different(path: list[str | int], value: Any, where: str):
    assert any(difference.startswith(where) for difference in found(changed(path, value)))


@pytest.mark.parametrize(
    ("path", "value"),
    [(["timings", "prompt_ms"], 9.25), (["probs", 0, "logprob"], -0.5009)],
)
def test_allowed(path: list[str | int], value: Any):
    assert found(changed(path, value)) == []


def test_key_order_counts():
    assert found(dict(reversed(ANSWER.items())))[0].startswith("response: keys")


def test_more_may_be_cached_where_the_sum_agrees():
    better = changed(["timings"], {"cache_n": 5, "prompt_n": 0, "prompt_ms": 1.0})
    assert found(better) == []
    strict = Rules(volatile=VOLATILE, allows_more_cached=False)
    assert len(found(better, strict)) == 2
    worse = changed(["timings"], {"cache_n": 3, "prompt_n": 2, "prompt_ms": 1.0})
    assert len(found(worse)) == 2
    wrong = changed(["timings"], {"cache_n": 5, "prompt_n": 1, "prompt_ms": 1.0})
    assert found(wrong)[0].startswith("response.timings: 6 prompt tokens")


def test_sensitive_values_are_compared_by_shape():
    rules = Rules(volatile=VOLATILE, sensitive=["response.content", "response.probs"])
    assert found(changed(["content"], "z"), rules) == []
    assert found(changed(["probs", 0, "logprob"], -9.0), rules) == []
    assert found(changed(["content"], 5), rules)[0].startswith("response.content: shape")


def test_tolerances_are_the_models():
    loose = Rules(volatile=VOLATILE, tolerances=Tolerances(probability=0.2))
    assert found(changed(["probs", 0, "logprob"], -0.65), loose) == []


def test_embeddings_are_relative_to_the_largest():
    expected = {"embedding": [10.0, 0.0, -5.0]}
    close, far = {"embedding": [10.009, 0.0, -5.0]}, {"embedding": [10.02, 0.0, -5.0]}
    assert differences(expected, close, Rules(), "response") == []
    assert differences(expected, far, Rules(), "response") != []
    # 1.0 and 2.0, and 2.001 for 2.0, as little-endian floats.
    rows = {"embedding": [[10.0, 0.0]]}
    assert differences(rows, {"embedding": [[10.009, 0.0]]}, Rules(), "response") == []
    assert differences(rows, {"embedding": [[10.02, 0.0]]}, Rules(), "response") != []
    encoded = {"embedding": "AACAPwAAAEA="}
    assert differences(encoded, {"embedding": "AACAP2IQAEA="}, Rules(), "response") == []
    assert differences(encoded, {"embedding": "AACAPwAAgEA="}, Rules(), "response") != []


def test_no_reuse_is_forgiven_after_an_erase_or_when_it_is_off():
    plain: dict[str, Any] = {"path": "/completion", "body": {}}
    erase = {"path": "/slots/0?action=erase"}
    uncached = {"path": "/completion", "body": {"cache_prompt": False}}
    assert rules_of(plain, plain, Tolerances()).allows_more_cached
    assert not rules_of(plain, erase, Tolerances()).allows_more_cached
    assert not rules_of(uncached, None, Tolerances()).allows_more_cached


def exchange(events: list[Any]) -> dict[str, Any]:
    return {"status": 200, "response_headers": {"x-accel-buffering": "no"}, "sse": events}


def stream(*contents: tuple[int, str]) -> list[Any]:
    return [{"data": {"index": index, "content": text}} for index, text in contents]


def outcome(expected: list[Any], actual: list[Any]) -> list[str]:
    answer = Answer(200, {"x-accel-buffering": "no"}, "sse", actual)
    return list(compare(exchange(expected), answer, Rules()))


def test_the_order_across_indexes_is_free():
    expected = [{"data": None}, *stream((0, "a"), (1, "b"), (0, "c"))]
    assert outcome(expected, [*stream((1, "b"), (0, "a"), (0, "c")), {"data": None}]) == []
    assert outcome(expected, [{"data": None}, *stream((1, "b"), (0, "c"), (0, "a"))]) != []
    assert outcome(expected, stream((1, "b"), (0, "a"), (0, "c"))) != []


def test_the_order_of_one_index_is_not():
    done = {"data": "[DONE]"}
    assert outcome([*stream((0, "a")), done], [done, *stream((0, "a"))]) != []


def test_one_id_must_stay_one():
    ids = [{"data": {"id": "x"}}, {"data": {"id": "x"}}]
    rules = Rules(volatile=["sse[*].data.id"])
    for actual, is_same in ((["y", "y"], True), (["y", "z"], False)):
        events = [{"data": {"id": name}} for name in actual]
        answer = Answer(200, {"x-accel-buffering": "no"}, "sse", events)
        assert (list(compare(exchange(ids), answer, rules)) == []) is is_same
    assert num_ids({"a": [{"id": "x"}, {"id": "y"}], "id": 5}) == {"$.a.[*].id": 2}


def test_status_and_headers():
    expected = {"status": 200, "response_headers": {"content-type": "a"}, "text": ""}
    (only,) = compare(expected, Answer(404, {}, "text", ""), Rules())
    assert only.startswith("status: 404")
    wrong = Answer(200, {"content-type": "b", "access-control-allow-origin": "*"}, "text", "")
    assert list(compare(expected, wrong, Rules())) == [
        "header content-type: 'b' instead of 'a'",
        "header access-control-allow-origin: must be absent",
    ]


def test_events_are_read_with_names_and_without_comments():
    text = ':\n\ndata: null\n\nevent: ping\ndata: {"a": 1}\n\ndata: [DONE]\n\n'
    assert read_events(text) == [
        {"data": None},
        {"event": "ping", "data": {"a": 1}},
        {"data": "[DONE]"},
    ]


def test_metrics_are_read_without_ours():
    text = "# HELP a b c\n# TYPE a counter\na 1.5\n# HELP kvarts_x y\n# TYPE kvarts_x gauge\n"
    assert read_metrics(text + 'kvarts_x{pool="kv"} 2\n') == {
        "a": {"help": "b c", "type": "counter", "value": 1.5}
    }
