"""The page at `/`: one document that needs nothing else, or the files of a directory.

The document may load nothing and run no script but its own: what a model writes is shown as text,
and would be harmless even if it were not.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from gateway.options import GatewayOptions

_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def page_routes(options: GatewayOptions) -> list[BaseRoute]:
    """The routes of the page, to stand behind all others; none when it is off."""
    if not options.has_ui:
        return []
    if options.static_path is not None:
        files = StaticFiles(directory=options.static_path, html=True)
        return [Mount(options.api_prefix or "/", files)]
    document = resources.files("gateway").joinpath("ui", "index.html").read_bytes()
    headers = {"content-security-policy": _policy(document), "x-content-type-options": "nosniff"}

    async def page(request: Request) -> Response:
        del request
        return HTMLResponse(document, headers=headers)

    return [
        Route(f"{options.api_prefix}{path}", page, methods=["GET"]) for path in ("/", "/index.html")
    ]


def _policy(document: bytes) -> str:
    """Allows the document's own script, by its hash, its styles, and calls of this server."""
    hashes = [
        "'sha256-" + base64.b64encode(hashlib.sha256(script).digest()).decode() + "'"
        for script in _SCRIPT.findall(document)
    ]
    return (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
