"""What a route's handler is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from gateway.backend import Backend
from gateway.connection import Connection
from gateway.options import GatewayOptions
from gateway.reload import Reloads
from gateway.replies import Replies
from gateway.sse import EventStream


@dataclass(frozen=True)
class Exchange:
    """One request to a service that is ready; `replies` and `reloads` are of the gateway.

    `renew` reads anew what is known of the service, for the requests that follow.
    """

    request: Request
    connection: Connection
    backend: Backend
    options: GatewayOptions
    replies: Replies
    reloads: Reloads
    renew: Callable[[], Awaitable[None]]


Handler = Callable[[Exchange], Awaitable[Response | EventStream]]
