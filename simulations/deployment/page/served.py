# SPDX-License-Identifier: Apache-2.0
"""The operator's page over TLS, with the certificate of the deployment's gateway, for those who
have its key.

It listens on this machine alone unless another address is named, answers `GET /` and nothing else,
and changes nothing. The key is in a file that is readable by its owner only, and is sent as the
password of HTTP's basic authentication.
"""

from __future__ import annotations

import base64
import hmac
import logging
import ssl
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from fedrec.errors import EngineError
from simulations.deployment.layout import Deployment
from simulations.deployment.page.content import page
from simulations.deployment.pki import new_secret, write_private

log = logging.getLogger("fedrec")
USER = "operator"
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def key_file(deployment: Deployment) -> Path:
    """The file with the page's key, which is drawn when it is first needed."""
    file = deployment.server / "page.secret"
    if not file.exists():
        write_private(file, new_secret())
    return file


def create_app(deployment: Deployment) -> Starlette:
    """The page as an ASGI application."""
    wanted = f"{USER}:{key_file(deployment).read_text().strip()}".encode()

    async def show(request: Request) -> Response:
        if not hmac.compare_digest(_given(request), wanted):
            client = request.client.host if request.client else "?"
            log.warning("refused the page to %s", client)
            asks = {"www-authenticate": 'Basic realm="fedrec", charset="UTF-8"'}
            return PlainTextResponse("refused\n", 401, {**_HEADERS, **asks})
        return HTMLResponse(await run_in_threadpool(page, deployment), headers=_HEADERS)

    return Starlette(routes=[Route("/", show, methods=["GET"])])


def serve(deployment: Deployment, host: str, port: int) -> None:
    """Serve the page until it is stopped.

    Raises:
        EngineError: the address is not free.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    config = uvicorn.Config(
        create_app(deployment),
        host=host,
        port=port,
        ssl_certfile=str(deployment.server / "gateway.crt"),
        ssl_keyfile=str(deployment.server / "gateway.key"),
        ssl_version=ssl.PROTOCOL_TLS_SERVER,
        access_log=False,
        log_level="warning",
        ws="none",
        server_header=False,
    )
    try:
        uvicorn.Server(config).run()
    except SystemExit:
        raise EngineError(
            "the page cannot be served",
            expected=f"a free address {host}:{port}",
            got="see the line above",
            fix="--port with another number",
        ) from None


def _given(request: Request) -> bytes:
    """User and key of a request; empty without."""
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    try:
        return base64.b64decode(text, validate=True) if kind.lower() == "basic" else b""
    except ValueError:
        return b""
