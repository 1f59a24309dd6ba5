from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from kvarts.v1 import lora_pb2, model_pb2

from gateway.metrics import Metric, render
from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService


async def test_health(client: httpx.AsyncClient):
    for path in ("/health", "/v1/health"):
        assert (await client.get(path)).content == b'{"status":"ok"}'


async def test_models(serve: Serve):
    async with serve(aliases=("stories", "little"), tags=("tiny", "test")) as client:
        card = (await client.get("/v1/models")).json()
        assert card["models"][0]["name"] == "little"
        assert card["models"][0]["capabilities"] == ["completion"]
        entry = card["data"][0]
        assert list(entry) == ["id", "aliases", "tags", "object", "created", "owned_by", "meta"]
        assert (entry["id"], entry["aliases"]) == ("little", ["little", "stories"])
        assert entry["tags"] == ["test", "tiny"]
        assert entry["meta"] == {
            "vocab_type": 1,
            "n_vocab": 259,
            "n_ctx": 256,
            "n_ctx_train": 2048,
            "n_embd": 64,
            "n_params": 292800,
            "size": 1171200,
            "ftype": "all F32",
        }


async def test_props(serve: Serve, service: FakeService):
    service.info.defaults.max_tokens = 64
    service.info.defaults.sampling.top_k = 7
    async with serve(has_props=True) as client:
        props = (await client.get("/props")).json()
        params = props["default_generation_settings"]["params"]
        # Only sampling follows the command line.
        assert (params["top_k"], params["n_predict"], params["reasoning_format"]) == (7, -1, "none")
        assert props["default_generation_settings"]["n_ctx"] == 256
        assert (props["total_slots"], props["model_alias"]) == (2, "tiny.gguf")
        assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
        assert (props["endpoint_props"], props["endpoint_metrics"]) == (True, False)
        assert list(props)[-5:] == [
            "bos_token",
            "eos_token",
            "build_info",
            "is_sleeping",
            "cors_proxy_enabled",
        ]
        assert (await client.post("/props", json={})).json() == {"success": True}
        assert props["is_sleeping"] is False
        service.info.sleeping = True
        assert (await client.get("/props")).json()["is_sleeping"] is True


async def test_adapters(client: httpx.AsyncClient, service: FakeService):
    assert (await client.get("/lora-adapters")).json() == []
    service.adapters = [
        lora_pb2.Adapter(id=0, path="a.gguf", scale=0.5),
        lora_pb2.Adapter(id=1, alora_invocation_string="x", alora_invocation_tokens=[5]),
    ]
    plain, activated = (await client.get("/lora-adapters")).json()
    assert plain == {
        "id": 0,
        "path": "a.gguf",
        "scale": 0.5,
        "task_name": "",
        "prompt_prefix": "",
    }
    assert list(activated)[-2:] == ["alora_invocation_string", "alora_invocation_tokens"]
    response = await client.post("/lora-adapters", json={"id": 0})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "Request body must be an array"


DISABLED = [
    ("GET", "/metrics", 501, "Start it with `--metrics`"),
    ("POST", "/props", 501, "Start it with `--props`"),
    ("POST", "/v1/embeddings", 501, "Start it with `--embeddings`"),
    ("POST", "/embedding", 501, "Start it with `--embeddings`"),
    ("POST", "/reranking", 501, "Start it with `--reranking`"),
    ("POST", "/v1/rerank", 501, "Start it with `--reranking`"),
    ("POST", "/infill", 501, "prefix token is missing. suffix token is missing. middle token is"),
    ("POST", "/v1/audio/transcriptions", 501, "does not support audio input"),
    ("GET", "/tools", 403, "this feature is disabled"),
    ("POST", "/cors-proxy", 403, "this feature is disabled"),
]


@pytest.mark.parametrize(("method", "path", "status", "message"), DISABLED)
async def test_disabled_routes(
    client: httpx.AsyncClient, method: str, path: str, status: int, message: str
):
    response = await client.request(method, path, content=b"{}" if method == "POST" else None)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert ("code" in response.json()["error"]) is (status == 501)


async def test_infill_names_only_what_is_missing(serve: Serve, service: FakeService):
    tokens = service.model.special_tokens
    for token in (tokens.fim_pre, tokens.fim_suf):
        token.id = 5
    async with serve() as client:
        response = await client.post("/infill", json={})
        assert response.json()["error"]["message"] == (
            "Infill is not supported by this model: middle token is missing. "
        )


async def test_metrics(serve: Serve, service: FakeService):
    async with serve(has_metrics=True) as client:
        fresh = await client.get("/metrics")
        assert fresh.headers["content-type"] == "text/plain; version=0.0.4"
        assert "llamacpp:prompt_tokens_seconds 0\n" in fresh.text
        assert fresh.text.startswith(
            "# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding "
            "cached tokens\n# TYPE llamacpp:prompt_tokens_total counter\n"
            "llamacpp:prompt_tokens_total 0\n"
        )
        counters = model_pb2.Counters(
            requests_finished=2,
            prompt_tokens_evaluated=100,
            generated_tokens=12,
            steps=8,
            busy_slot_steps=12,
        )
        counters.prefill_duration.FromMilliseconds(500)
        counters.decode_duration.FromMilliseconds(2000)
        service.info.counters.CopyFrom(counters)
        service.info.gauges.running_requests = 3
        service.metrics = '# TYPE kvarts_pool_units gauge\nkvarts_pool_units{pool="kv"} 9.0\n'
        lines = (await client.get("/metrics")).text.splitlines()
        for line in (
            "llamacpp:prompt_tokens_seconds 200",
            "llamacpp:predicted_tokens_seconds 5",
            "llamacpp:requests_processing 3",
            "llamacpp:n_busy_slots_per_decode 1.5",
            "llamacpp:tokens_predicted_seconds_total 2",
            'kvarts_pool_units{pool="kv"} 9.0',
        ):
            assert line in lines
        # A scrape covers the time since the one before.
        again = (await client.get("/metrics")).text
        assert "llamacpp:prompt_tokens_seconds 0\n" in again
        assert "llamacpp:prompt_tokens_total 100\n" in again


async def test_while_the_service_sleeps_its_figures_stand_still(serve: Serve, service: FakeService):
    """A scrape that changed what it shows would keep a sleeper's graphs busy with itself."""
    async with serve(has_metrics=True) as client:
        service.info.counters.generated_tokens = 5
        service.info.counters.decode_duration.FromMilliseconds(2000)
        service.info.counters.requests_finished = 1
        service.info.sleeping = True
        first = (await client.get("/metrics")).text
        # The first scrape still covers what ran before; then nothing has.
        assert "llamacpp:predicted_tokens_seconds 2\n" in first
        second = (await client.get("/metrics")).text
        assert "llamacpp:predicted_tokens_seconds 0\n" in second
        await client.get("/props")
        service.metrics = "# TYPE kvarts_calls counter\nkvarts_calls 9.0\n"
        assert (await client.get("/metrics")).text == second
        service.info.sleeping = False
        assert "kvarts_calls 9.0" in (await client.get("/metrics")).text


def test_only_the_peers_numbers_are_rounded():
    count = 123_456_789
    own = Metric("kvarts_http_requests_total", "counter", "Requests.", count)
    peer = Metric("llamacpp:prompt_tokens_total", "counter", "Tokens.", count)
    lines = render([own, peer]).splitlines()
    assert "kvarts_http_requests_total 123456789" in lines
    assert "llamacpp:prompt_tokens_total 1.23457e+08" in lines


async def test_answers_are_counted_by_route_and_status(serve: Serve):
    def replies(text: str) -> dict[tuple[str, str], float]:
        rows = re.findall(
            r'^kvarts_http_requests_total{route="(.*)",code="(.*)"} (.*)$', text, re.M
        )
        return {(route, code): float(count) for route, code, count in rows}

    async with serve(has_metrics=True, api_keys=("key",)) as client:
        client.headers["authorization"] = "Bearer key"
        before = replies((await client.get("/metrics")).text)
        for _ in range(5):
            await client.post("/completion", json={"prompt": "abc", "n_predict": 2})
        for body in (b"[]", b"{"):
            await client.post("/completions", content=body)
        await client.post("/slots/1?action=erase")
        await client.get("/slots/not-a-route")
        await client.get("/props", headers={"authorization": "Bearer wrong"})
        after = replies((await client.get("/metrics")).text)
    assert {key: count - before.get(key, 0) for key, count in after.items()} == {
        ("/completion", "200"): 5,
        ("/completions", "400"): 1,
        ("/completions", "500"): 1,
        ("/health", "200"): 0,
        # A scrape is counted when it has ended: this is the one before.
        ("/metrics", "200"): 1,
        ("/slots/{id_slot}", "200"): 1,
        ("other", "401"): 1,
        ("other", "404"): 1,
        ("other", "503"): 0,
    }


async def test_the_page(serve: Serve, tmp_path: Path):
    async with serve() as client:
        assert (await client.get("/")).text.startswith("<!doctype html>")
    async with serve(has_ui=False) as client:
        assert (await client.get("/")).status_code == 404
    (tmp_path / "index.html").write_text("mine")
    async with serve(static_path=str(tmp_path)) as client:
        assert (await client.get("/")).text == "mine"
        assert (await client.get("/missing.txt")).status_code == 404
        assert (await client.get("/props")).status_code == 200
