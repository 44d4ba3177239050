# SPDX-License-Identifier: Apache-2.0
"""Direct middlewares give the same responses as Starlette's."""

import pytest
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.testclient import TestClient

from simulations.deployment.flower.patches import direct_middleware


class Reads(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        request.state.read = await request.body()
        answer = await call_next(request)
        answer.headers["x-more"] = "1"
        return answer


class Passes(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        return await call_next(request)


class Translates(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        try:
            return await call_next(request)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=418)


class Refuses(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        return Response(status_code=401) if "x-bad" in request.headers else await call_next(request)


def made():
    order = (Passes, Translates, Reads, Refuses, Passes)
    app = FastAPI(middleware=[Middleware(one) for one in order])

    async def echo(request: Request) -> Response:
        body = await request.body()
        assert body == request.state.read
        if body == b"raise":
            raise ValueError("no")
        if body == b"http":
            raise HTTPException(403, "not you")
        if body == b"stream":
            return StreamingResponse(iter([b"a", b"b"]))
        return Response(body, headers={"x-own": "2"}, status_code=201)

    for path in ("/v1/fleet/echo", "/v1/runtime/echo", "/v1/control/echo"):
        app.post(path)(echo)
    return app


def answers(path):
    client = TestClient(made(), raise_server_exceptions=False)
    bodies = (b"", b"hello", b"x" * 300_000, b"raise", b"http", b"stream")
    found = [client.post(path, content=body) for body in bodies]
    found.append(client.post(path, content=b"x", headers={"x-bad": "1"}))
    found.append(client.get(path))
    found.append(client.post(path + "nowhere"))
    return [
        (one.status_code, one.content, one.headers.get("x-more"), one.headers.get("x-own"))
        for one in found
    ]


@pytest.mark.parametrize("path", ["/v1/fleet/echo", "/v1/runtime/echo", "/v1/control/echo"])
def test_the_same_answers(path, monkeypatch):
    usual = answers(path)
    assert [status for status, *_ in usual] == [201, 201, 201, 418, 403, 200, 401, 405, 404]
    monkeypatch.setattr(BaseHTTPMiddleware, "__call__", direct_middleware.directly)
    assert answers(path) == usual


def test_the_superlink_uses_middlewares_on_this_base():
    from flwr.superlink.main import _get_middleware

    classes = [middleware.cls for middleware in _get_middleware()]
    assert len(classes) >= 8 and all(issubclass(one, BaseHTTPMiddleware) for one in classes)
