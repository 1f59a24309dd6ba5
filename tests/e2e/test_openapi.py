"""Schemathesis over the whole document: every answer is one that is documented, none is a bug.

Left out are the checks that llama-server's contract contradicts: what is no JSON is its 500 and what
is off its 501, another method is its 404, and lenient fields take what a schema does not name. A bug
is told apart by the log, where every one leaves a traceback.
"""

from __future__ import annotations

import asyncio
import shutil

import pytest

from tests.e2e.conftest import Start, healthy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_CONTRADICTED = (
    "not_a_server_error",
    "unsupported_method",
    "negative_data_rejection",
    "positive_data_acceptance",
    "missing_required_header",
    # There is no key.
    "ignored_auth",
)
_EXAMPLES = "100"
_LIMIT_S = "150"


async def test_every_answer_is_documented(start: Start) -> None:
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("needs schemathesis on the PATH; its pins are no others', so in its own venv")
    with start("--metrics", "--embeddings", "--pooling", "mean") as server:
        url = server.ready().http_url()
        await healthy(url)
        run = await asyncio.create_subprocess_exec(
            *(program, "run", f"{url}/openapi.json", "--checks", "all"),
            *("--exclude-checks", ",".join(_CONTRADICTED), "--seed", "7", "--no-shrink"),
            *("--max-examples", _EXAMPLES, "--max-time", _LIMIT_S, "--continue-on-failure"),
            # It fetches whatever it is told to, which is another's answer.
            *("--exclude-path-regex", "cors-proxy"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await run.communicate()
        await healthy(url)
        assert run.returncode == 0, said.decode()
        assert "Traceback" not in server.output.text()
