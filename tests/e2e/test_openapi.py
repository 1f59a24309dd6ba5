"""Schemathesis over the whole document: every answer is one that is documented, none is a bug.

All of its checks run but those that `schemathesis.toml` turns off or widens, each with its reason. A
bug is told apart by the log, where every one leaves a traceback.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import KEY, Start, healthy

# No --max-time beside it: what is left of that is spent on the same routes again.
_EXAMPLES = os.environ.get("OPENAPI_EXAMPLES", "100")
_SETTINGS = Path(__file__).with_name("schemathesis.toml")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


async def test_every_answer_is_documented(start: Start) -> None:
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("needs schemathesis on the PATH; its pins are no others', so in its own venv")
    flags = ("--metrics", "--embeddings", "--pooling", "mean", "--api-key", KEY, "-n", "16")
    with start(*flags) as server:
        url = server.ready().http_url()
        await healthy(url)
        run = await asyncio.create_subprocess_exec(
            *(program, "--config-file", str(_SETTINGS), "run", f"{url}/openapi.json"),
            *("-H", f"Authorization: Bearer {KEY}", "--seed", "7", "--no-shrink"),
            # A hang guard: some ask for as many tokens as the context holds.
            *("--request-timeout", "150"),
            *("--max-examples", _EXAMPLES, "--continue-on-failure"),
            # It fetches whatever it is told to, which is another's answer.
            *("--exclude-path-regex", "cors-proxy"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await run.communicate()
        await healthy(url)
        assert run.returncode == 0, said.decode()
        assert "Traceback" not in server.output.text()
