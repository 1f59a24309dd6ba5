"""One model, one compile cache and one running server for all whole-process tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.programs import Program, running
from tests.e2e.rpc import Client, client
from tests.ggufs import TinyLlama, tools_tokenizer, write_llama
from tests.waiting import until

KEY = "e2e-key"
NUM_SLOTS = 8
SLOT_TOKENS = 4096

Start = Callable[..., AbstractContextManager[Program]]


@dataclass(frozen=True)
class Server:
    """A ready server: where its doors are, and a generated client of it."""

    url: str
    grpc_address: str
    rpc: Client


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_llama(path, TinyLlama(context=SLOT_TOKENS))


@pytest.fixture(scope="session")
def cache_dir(pytestconfig: pytest.Config) -> Path:
    """A folder that outlives the run, so that the next run compiles and installs nothing."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("e2e")


@pytest.fixture(scope="session")
def layout(tiny_model: Path, cache_dir: Path) -> tuple[str, ...]:
    """The flags that decide what is compiled: the same for all, so that only one start compiles.

    Chunks are small, so that a long prompt takes many steps.
    """
    return (
        *("-m", str(tiny_model), "--compile-cache", str(cache_dir / "xla")),
        *("-c", str(NUM_SLOTS * SLOT_TOKENS), "-np", str(NUM_SLOTS), "-ub", "32"),
    )


@pytest.fixture(scope="session")
def start(layout: tuple[str, ...]) -> Start:
    """Starts a kvarts-server of its own for a test that ends or burdens it."""

    def start_server(*flags: str) -> AbstractContextManager[Program]:
        return running("kvarts-server", *layout, "--port", "0", *flags)

    return start_server


@pytest.fixture(scope="session")
def program(start: Start) -> Generator[Program]:
    with start("--grpc-port", "0", "--metrics", "--api-key", KEY) as program:
        yield program.ready()


@pytest.fixture(scope="session")
async def shared_server(program: Program) -> AsyncGenerator[Server]:
    url = program.http_url()
    await healthy(url)
    async with client(program.grpc_address(), KEY) as rpc:
        yield Server(url, program.grpc_address(), rpc)


TOOL_TEMPLATE = """\
{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


CALL_TOKEN = len(tools_tokenizer().tokens) - 1
"""What opens a call; a model without training needs to be pushed there."""


@pytest.fixture(scope="session")
def start_assistant(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Start:
    """Starts a server whose template writes calls of tools, one a turn, and that embeds too."""
    folder = tmp_path_factory.mktemp("assistant")
    path = write_llama(folder / "tools.gguf", TinyLlama(context=1024, tokenizer="tools"))
    (folder / "tools.jinja").write_text(TOOL_TEMPLATE)

    def start_server(*flags: str) -> AbstractContextManager[Program]:
        return running(
            "kvarts-server",
            *("-m", str(path), "--compile-cache", str(cache_dir / "xla"), "--port", "0"),
            *("-np", "2", "-ub", "32", "--grpc-port", "0", "--api-key", KEY),
            *("--chat-template-file", str(folder / "tools.jinja")),
            *("--embeddings", "--pooling", "mean", *flags),
        )

    return start_server


@pytest.fixture(scope="session")
async def assistant(start_assistant: Start) -> AsyncGenerator[Server]:
    with start_assistant() as program:
        program.ready()
        url = program.http_url()
        await healthy(url)
        async with client(program.grpc_address(), KEY) as rpc:
            yield Server(url, program.grpc_address(), rpc)


@pytest.fixture
async def server(shared_server: Server) -> AsyncGenerator[Server]:
    """The shared server. It must be idle and empty after each test, and have compiled nothing."""
    compiles = (await shared_server.rpc.info()).counters.compiles
    yield shared_server
    await shared_server.rpc.idle()
    assert (await shared_server.rpc.info()).counters.compiles == compiles


@pytest.fixture
async def http(server: Server) -> AsyncGenerator[httpx.AsyncClient]:
    """An HTTP client of the shared server that has its key."""
    async with http_client(server.url, KEY) as session:
        yield session


def http_client(url: str, key: str | None = None) -> httpx.AsyncClient:
    """An HTTP client without a limit on connections."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=120)


async def healthy(url: str, status: int = 200) -> None:
    """Waits until GET /health answers so."""
    async with http_client(url) as session:

        async def read() -> int:
            return (await session.get("/health")).status_code

        await until(read, lambda seen: seen == status)
