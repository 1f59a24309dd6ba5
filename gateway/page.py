"""The page at `/`: one small document, or the files of a directory."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from gateway.options import GatewayOptions

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Kvarts</title>
<h1>Kvarts</h1>
<p>This server speaks llama.cpp's HTTP API and gRPC. There is no chat page here.
</html>
"""


def page_routes(options: GatewayOptions) -> list[BaseRoute]:
    """The routes of the page, to stand behind all others; none when it is off."""
    if not options.has_ui:
        return []
    if options.static_path is not None:
        files = StaticFiles(directory=options.static_path, html=True)
        return [Mount(options.api_prefix or "/", files)]
    return [
        Route(f"{options.api_prefix}{path}", _page, methods=["GET"])
        for path in ("/", "/index.html")
    ]


async def _page(request: Request) -> Response:
    del request
    return HTMLResponse(_PAGE)
