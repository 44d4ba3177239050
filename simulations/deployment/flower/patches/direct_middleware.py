# SPDX-License-Identifier: Apache-2.0
"""Starlette's middlewares without a task and a stream for each, for calls with a single response.

Missing in Flower: middlewares of one layer, or none for calls that they do not concern. A call to a
SuperLink passes nine middlewares on Starlette's base class. Each runs the next one in a
task and passes the response through a stream, and each piece of the request through another task,
so that endless responses can be cancelled: two thirds of the time of a small call. Calls of nodes
and executors have one request and one response, and are passed on directly here.
"""

from __future__ import annotations

from starlette.middleware.base import BaseHTTPMiddleware, _CachedRequest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

UNARY = ("/v1/fleet/", "/v1/runtime/")
"""Paths of calls with one answer."""
_usual = BaseHTTPMiddleware.__call__


def use() -> None:
    """Replace the call of all such middlewares in this process."""
    BaseHTTPMiddleware.__call__ = directly


async def directly(self: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
    """Replaces `BaseHTTPMiddleware.__call__`."""
    if scope["type"] != "http" or not scope["path"].startswith(UNARY):
        await _usual(self, scope, receive, send)
        return
    request = _CachedRequest(scope, receive)

    async def call_next(_: Request) -> Response:
        said: list[Message] = []

        async def keep(message: Message) -> None:
            said.append(message)

        await self.app(scope, request.wrapped_receive, keep)
        if not said or said[0]["type"] != "http.response.start":
            raise RuntimeError("No response returned.")
        answer = Response(status_code=said[0]["status"])
        answer.body = b"".join(message.get("body", b"") for message in said[1:])
        answer.raw_headers = list(said[0]["headers"])
        return answer

    answer = await self.dispatch_func(request, call_next)
    await answer(scope, receive, send)
