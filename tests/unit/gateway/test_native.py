from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from kvarts.v1 import generation_pb2

from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService, failing
from tests.unit.gateway.scripts import (
    EOS,
    Call,
    Response,
    chunk,
    encode,
    finished,
    started,
    text_script,
)

KEYS = [
    "index",
    "content",
    "tokens",
    "id_slot",
    "stop",
    "model",
    "tokens_predicted",
    "tokens_evaluated",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
]


async def post(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/completion", json={"prompt": "Hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[Any]:
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_one_answer(client: httpx.AsyncClient, service: FakeService):
    response = await client.post("/completion", json={"prompt": "Hi", "n_predict": 2})
    body = response.json()
    assert list(body) == KEYS
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    assert response.headers["server"] == "llama.cpp"
    assert (body["content"], body["tokens"], body["id_slot"]) == ("ab", [], 1)
    assert (body["prompt"], body["tokens_evaluated"]) == ("<s>Hi", 3)
    assert (body["stop_type"], body["tokens_cached"]) == ("limit", 4)
    assert (
        body["generation_settings"]["n_predict"] == body["generation_settings"]["max_tokens"] == 2
    )
    assert list(service.calls[0].request.tokens.ids) == [1, *encode("Hi")]


async def test_nothing_in_the_body_has_spaces(client: httpx.AsyncClient):
    response = await client.post("/completion", json={"prompt": "Hi"})
    assert b'"temperature":0.800000011920929,"dynatemp_range":0.0,' in response.content


async def test_the_call_is_complete_and_strict(client: httpx.AsyncClient, service: FakeService):
    await post(
        client,
        temperature=-1,
        top_p=7,
        seed=5,
        n_predict=4,
        stop=["x"],
        n_probs=2,
        id_slot=5,
        cache_prompt=False,
        samplers="kt",
        typical_p=-3,
        dynatemp_range=-1,
        logit_bias=[[10, 1.5], [10, 1], ["a", False], [99999, 1]],
        t_max_predict_ms=1500,
        dry_sequence_breakers=["", "é" * 40],
    )
    request = service.calls[0].request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 1.0, 5)
    assert (sampling.typical_p, sampling.dynatemp_range) == (0.0, 0.0)
    assert list(sampling.samplers.samplers) == [
        generation_pb2.SAMPLER_TOP_K,
        generation_pb2.SAMPLER_TEMPERATURE,
    ]
    assert dict(sampling.logit_bias) == {10: 2.5, encode("a")[0]: float("-inf")}
    assert list(sampling.dry_sequence_breakers.values) == ["é" * 20]
    assert (request.max_tokens, list(request.stop), request.top_logprobs) == (4, ["x"], 2)
    assert (request.slot_id, request.cache_prompt) == (1, False)
    assert request.time_limit.ToMilliseconds() == 1500
    assert json.loads(request.annotation)["seed"] == 5


async def test_unlimited_and_random_are_left_unsaid(
    client: httpx.AsyncClient, service: FakeService
):
    await post(client, n_predict=-1, seed=-1, id_slot="one")
    request = service.calls[0].request
    assert not request.HasField("max_tokens")
    assert not request.HasField("slot_id")
    assert not request.sampling.HasField("seed")


async def test_ignore_eos_bans_and_shows_every_end(client: httpx.AsyncClient, service: FakeService):
    body = await post(client, ignore_eos=True)
    assert body["generation_settings"]["logit_bias"] == [{"bias": None, "token": EOS}]
    assert dict(service.calls[0].request.sampling.logit_bias) == {EOS: float("-inf")}


async def test_withheld_text_belongs_to_the_answer(client: httpx.AsyncClient, service: FakeService):
    service.script = text_script("a", "", unsent_text="b\ufffd")
    assert (await post(client))["content"] == "ab\ufffd"


@pytest.mark.parametrize(
    ("reason", "fields", "stop_type", "word"),
    [
        (generation_pb2.FINISH_REASON_EOS, {"stop_token_id": EOS}, "eos", ""),
        (generation_pb2.FINISH_REASON_STOP, {"stop_string": "zz"}, "word", "zz"),
        (generation_pb2.FINISH_REASON_CONTEXT_FULL, {"truncated": True}, "limit", ""),
        (generation_pb2.FINISH_REASON_TIME, {}, "limit", ""),
        (generation_pb2.FINISH_REASON_EMPTY_PROMPT, {}, "none", ""),
    ],
)
async def test_stop_types(
    client: httpx.AsyncClient,
    service: FakeService,
    reason: generation_pb2.FinishReason.ValueType,
    fields: dict[str, Any],
    stop_type: str,
    word: str,
):
    service.script = text_script("a", finish_reason=reason, **fields)
    body = await post(client, return_tokens=True)
    assert (body["stop_type"], body["stopping_word"]) == (stop_type, word)
    assert body["truncated"] is fields.get("truncated", False)
    assert body["tokens"] == [3]


async def test_batch_is_a_list_by_index(client: httpx.AsyncClient, service: FakeService):
    body = await post(client, prompt=["A", [1, 70], ["B", 71], {"prompt_string": "C"}])
    assert [item["index"] for item in body] == [0, 1, 2, 3]
    assert [item["prompt"] for item in body] == ["<s>A", "<s>C", "<s>BD", "<s>C"]
    assert len(await post(client, prompt=["A"])) == len(KEYS)


async def test_as_many_calls_as_there_are_slots_begin_together(
    client: httpx.AsyncClient, service: FakeService
):
    num_slots = 2
    await post(client, prompt=[f"{index}" for index in range(num_slots + 2)])
    calls = sorted(service.calls, key=lambda call: bytes(call.request.tokens.ids))
    first, later = calls[:num_slots], calls[num_slots:]
    groups = [call.request.group for call in first]
    assert [(one.num_calls, one.index) for one in groups] == [
        (num_slots, i) for i in range(num_slots)
    ]
    assert len({one.id for one in groups}) == 1
    assert not any(call.request.HasField("group") for call in later)


async def test_a_single_prompt_is_of_no_group(client: httpx.AsyncClient, service: FakeService):
    await post(client, prompt="A")
    assert not service.calls[0].request.HasField("group")


async def test_samples_have_rising_seeds(client: httpx.AsyncClient, service: FakeService):
    body = await post(client, n=2, seed=7)
    assert [item["generation_settings"]["seed"] for item in body] == [7, 8]
    assert sorted(call.request.sampling.seed for call in service.calls) == [7, 8]


async def test_response_fields(client: httpx.AsyncClient):
    body = await post(
        client, response_fields=["content", "generation_settings/n_predict", "no/such", "timings/"]
    )
    assert body == {"content": "abc", "generation_settings/n_predict": -1}


async def test_probabilities(client: httpx.AsyncClient, service: FakeService):
    service.script = _probable
    body = await post(client, n_probs=1)
    assert list(body)[-1] == "completion_probabilities"
    first, last = body["completion_probabilities"]
    assert first == {
        "id": 5,
        "token": "é",
        "bytes": [195, 169],
        "logprob": -0.5,
        "top_logprobs": [{"id": 7, "token": " ", "bytes": [32, 230], "logprob": -0.25}],
    }
    assert last["id"] == 9


async def test_a_stop_text_takes_its_entries_along(client: httpx.AsyncClient, service: FakeService):
    """Also one of the format's own, that no client named."""
    service.script = _stopped_probable
    body = await post(client, n_probs=1)
    assert [entry["id"] for entry in body["completion_probabilities"]] == [5]


async def test_post_sampling_probabilities_are_no_logarithms(
    client: httpx.AsyncClient, service: FakeService
):
    service.script = _certain
    body = await post(client, n_probs=1, post_sampling_probs=True)
    assert body["completion_probabilities"] == [
        {
            "id": 5,
            "token": "a",
            "bytes": [97],
            "prob": 1.0,
            "top_probs": [{"id": 5, "token": "a", "bytes": [97], "prob": 1.0}],
        }
    ]


async def test_stream(client: httpx.AsyncClient):
    response = await client.post(
        "/completion", json={"prompt": "Hi", "n_predict": 2, "stream": True}
    )
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["x-accel-buffering"] == "no"
    first, second, last = events(response.text)
    assert first == {
        "index": 0,
        "content": "a",
        "tokens": encode("a"),
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": 1,
        "tokens_evaluated": 3,
    }
    assert second["tokens_predicted"] == 2
    assert list(last) == KEYS
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)


async def test_stream_shows_held_text_and_hides_half_characters(
    client: httpx.AsyncClient, service: FakeService
):
    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        yield chunk("", 5, 1, mid_character=True)
        yield chunk("é", 6, 2)
        yield chunk("", 7, 3)
        yield chunk(" ", 8, 4, completes_stop=True)
        yield finished(call, 4, stop_string="x", finish_reason=generation_pb2.FINISH_REASON_STOP)

    service.script = script
    response = await client.post("/completion", json={"prompt": "Hi", "stream": True})
    shown = events(response.text)
    assert [event["content"] for event in shown] == ["é", "", " ", ""]
    assert ["timings" in event for event in shown] == [False, False, True, True]


async def test_what_is_withheld_at_the_end_is_an_event_before_the_last(
    client: httpx.AsyncClient, service: FakeService
):
    service.script = text_script("a", "", unsent_text="b\ufffd")
    response = await client.post("/completion", json={"prompt": "Hi", "stream": True})
    first, second, rest, last = events(response.text)
    assert [event["content"] for event in (first, second, rest, last)] == ["a", "", "b\ufffd", ""]
    assert list(rest) == list(second)
    assert (rest["stop"], rest["tokens"], rest["tokens_predicted"]) == (False, [], 2)
    assert last["stop"]


@pytest.mark.parametrize(("cut", "shown"), [(1, "  b"), (3, ""), (9, "")])
async def test_of_a_line_that_is_cut_a_stream_shows_what_was_sent(
    client: httpx.AsyncClient, service: FakeService, cut: int, shown: str
):
    unsent = "  bc"[: 3 + (cut == 1)]
    service.script = text_script("a\n", unsent_text=unsent, indent_cut_chars=cut)
    response = await client.post("/completion", json={"prompt": "Hi", "stream": True})
    assert "".join(event["content"] for event in events(response.text)) == f"a\n{shown}"


async def test_stream_progress_and_timings(client: httpx.AsyncClient, service: FakeService):
    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call, cached=1)
        for processed in (1, 3):
            progress = generation_pb2.Progress(
                total_tokens=3, cached_tokens=1, processed_tokens=processed
            )
            progress.elapsed.FromMicroseconds(processed * 400)
            yield Response(progress=progress)
        yield chunk("a", 5, 1)
        yield finished(call, 1, cached_tokens=1)

    service.script = script
    response = await client.post(
        "/completion",
        json={"prompt": "Hi", "stream": True, "return_progress": True, "timings_per_token": True},
    )
    begin, end, token, last = events(response.text)
    assert service.calls[0].request.return_progress
    assert begin["prompt_progress"] == {"total": 3, "cache": 1, "processed": 1, "time_ms": 0}
    assert (begin["content"], begin["tokens"]) == ("", [0])
    assert (begin["timings"]["prompt_n"], end["timings"]["prompt_n"]) == (0, 2)
    assert (begin["timings"]["prompt_ms"], end["timings"]["prompt_ms"]) == (0.0, 1.2)
    assert list(begin)[-2:] == ["timings", "prompt_progress"]
    assert (token["timings"]["cache_n"], token["timings"]["predicted_n"]) == (1, 1)
    assert token["timings"]["predicted_per_second"] == 0.0
    assert last["timings"]["prompt_n"] == 2


async def test_stream_of_a_batch_marks_each_further_prompt_by_null(client: httpx.AsyncClient):
    body = {"prompt": ["A", "B", "C"], "n_predict": 1, "stream": True}
    shown = events((await client.post("/completion", json=body)).text)
    assert shown.count(None) == 2
    by_index = [[e["stop"] for e in shown if e and e["index"] == index] for index in range(3)]
    assert by_index == [[False, True]] * 3


async def test_stream_of_samples_has_no_marks(client: httpx.AsyncClient):
    body = {"prompt": "A", "n_predict": 1, "n": 2, "stream": True}
    assert None not in events((await client.post("/completion", json=body)).text)


async def test_an_error_before_the_first_event_is_a_plain_one(
    client: httpx.AsyncClient, service: FakeService
):
    service.script = _overflowing
    response = await client.post("/completion", json={"prompt": "Hi", "stream": True})
    assert response.status_code == 400
    assert response.headers["x-kvarts-reason"] == "CONTEXT_OVERFLOW"
    assert response.json() == {
        "error": {
            "code": 400,
            "message": "request (900 tokens) exceeds the available context size (256 tokens), "
            "try increasing it",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 900,
            "n_ctx": 256,
        }
    }


async def test_a_later_error_is_in_band_and_the_last_thing(
    client: httpx.AsyncClient, service: FakeService
):
    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        yield chunk("a", 5, 1)
        raise failing(grpc.StatusCode.INTERNAL, "ENGINE_FAULT", "the engine failed", errorId="1")

    service.script = script
    response = await client.post("/completion", json={"prompt": "Hi", "stream": True})
    assert response.status_code == 200
    assert events(response.text)[-1] == {
        "error": {"code": 500, "message": "the engine failed", "type": "server_error"}
    }


BAD_PROMPTS: list[tuple[Any, str]] = [
    ({}, '"prompt" elements must be'),
    (5, '"prompt" elements must be'),
    (None, '"prompt" elements must be'),
    ([], '"prompt" must not be empty'),
    ([1.5, 2], '"prompt" elements must be'),
    ([1, None], '"prompt" elements must be'),
    ([1, "a", None], "type must be number, but is null"),
    (["a", 5.5], '"prompt" elements must be'),
    ([1, 259], "Prompt contains invalid tokens"),
    ([-1], "Prompt contains invalid tokens"),
    ({"prompt_string": 5}, "type must be string, but is number"),
    ({"prompt_string": "a", "multimodal_data": ["AAAA"]}, "Multimodal data provided, but model"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
async def test_bad_prompts(
    client: httpx.AsyncClient, service: FakeService, prompt: Any, message: str
):
    response = await client.post("/completion", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert not service.calls


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 500), (b"{", 500), (b'{"a":"\xff"}', 500), (b"[1]", 400), (b"{}", 400)],
)
async def test_bad_bodies(client: httpx.AsyncClient, body: bytes, status: int):
    response = await client.post("/completion", content=body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status


async def test_a_penalty_must_be_positive(client: httpx.AsyncClient):
    response = await client.post("/completion", json={"prompt": "Hi", "repeat_penalty": 0})
    assert response.status_code == 400
    assert "Failed to initialize samplers" in response.json()["error"]["message"]


async def test_an_overlong_annotation_is_left_out(client: httpx.AsyncClient, service: FakeService):
    await post(client, lora=[{"id": i, "scale": 0.5} for i in range(250)])
    assert service.calls[0].request.annotation == ""


async def test_an_annotation_says_nothing_of_the_prompt(
    client: httpx.AsyncClient, service: FakeService
):
    """`/slots` shows it to every key."""
    await post(client, generation_prompt="my secret draft")
    annotation = json.loads(service.calls[0].request.annotation)
    assert annotation["generation_prompt"] == ""
    assert annotation["chat_format"] == "Content-only"


async def test_aliases_name_the_model(serve: Serve):
    async with serve(aliases=("stories", "little")) as client:
        assert (await post(client))["model"] == "little"


async def _probable(call: Call) -> AsyncIterator[Response]:
    yield started(call)
    sampled = generation_pb2.TokenLogprob(token_id=5, piece=b"\xa9", logprob=-0.5)
    top = generation_pb2.TokenLogprob(token_id=7, piece=b" \xe6", logprob=-0.25)
    logprobs = generation_pb2.TokenLogprobs(sampled=sampled, top=[top])
    yield chunk("", 4, 1, mid_character=True, logprobs=logprobs)
    yield chunk("é", 5, 2, logprobs=logprobs)
    last = generation_pb2.TokenLogprobs()
    last.CopyFrom(logprobs)
    last.sampled.token_id = 9
    yield chunk("", 9, 3, logprobs=last)
    yield finished(call, 3)


async def _stopped_probable(call: Call) -> AsyncIterator[Response]:
    async for response in _probable(call):
        if response.HasField("finished"):
            response.finished.finish_reason = generation_pb2.FINISH_REASON_STOP
            response.finished.stop_string = "x"
            response.finished.stop_string_tokens = 1
        yield response


async def _certain(call: Call) -> AsyncIterator[Response]:
    yield started(call)
    token = generation_pb2.TokenLogprob(token_id=5, piece=b"a", logprob=0.0)
    logprobs = generation_pb2.TokenLogprobs(sampled=token, top=[token])
    yield chunk("a", 5, 1, logprobs=logprobs)
    yield finished(call, 1)


async def _overflowing(call: Call) -> AsyncIterator[Response]:
    raise failing(
        grpc.StatusCode.OUT_OF_RANGE,
        "CONTEXT_OVERFLOW",
        "too long",
        promptTokens="900",
        contextTokens="256",
    )
    yield started(call)
