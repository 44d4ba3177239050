# SPDX-License-Identifier: Apache-2.0
"""The gateway of a deployment: a reverse proxy with TLS.

Flower's SuperLink answers nodes (`/v1/fleet/...`), operators (`/v1/control/...`) and executors
(`/v1/runtime/...`) on one port, and does not authenticate operators: anyone who reaches that port
can start runs. So that port is internal, and clients reach only this one. It passes only the nodes'
calls, by exact path; all others get 404 and a line in the log. If a call is not signed by a node of
the deployment, only its headers are read. Flower's own node authentication, which is the
SuperLink's, passes through in headers.

A connection is closed if the head of a request takes longer than a minute, or if its body pauses
for a minute.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
import ssl
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import uvicorn
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as AutoHTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

log = logging.getLogger("fedrec")
FLEET = re.compile(rb"/v1/fleet/[a-z]+(?:-[a-z]+)*")
"""Paths that nodes may request, without dots, escapes or suffixes."""
HEALTH = b"/health"
MOST_BYTES = 32 * 2**20
"""Largest body of a request; Flower sends arrays in pieces of 5 MiB."""
MOST_HELD = 256 * 2**20
"""Largest total size of all buffered bodies."""
PATIENCE = 60.0
"""Seconds in which the head of a request must arrive, and longest pause of its body."""
_CLOSE = {"connection": "close"}
_DROPPED = frozenset(
    [
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailers", "upgrade", "host", "content-length", "transfer-encoding"),
        *("content-encoding", "accept-encoding"),
    ]
)
"""Hop-by-hop headers, and those that httpx rewrites."""


# Signatures of calls, in the headers of Flower's SuperNodes.

PUBLIC_KEY = "flwr-public-key"
SIGNATURE = "flwr-signature"
TIMESTAMP = "flwr-timestamp"
"""Headers of a SuperNode's calls: base64, base64, and ISO 8601."""
OLDEST = 305.0
"""Seconds after which Flower refuses a timestamp."""
EARLIEST = 5.0
"""Seconds that a timestamp may be ahead of this machine's clock."""


class NodeSignature(NamedTuple):
    """Signature of a call.

    Attributes:
        key: public key, as Flower sends it.
        value: ECDSA signature of the timestamp.
        timestamp: time of the call.
        age: seconds since then.
    """

    key: bytes
    value: bytes
    timestamp: str
    age: float

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> NodeSignature | None:
        """Read the signature from a call's headers; None if missing."""
        try:
            key = b64decode(headers[PUBLIC_KEY], validate=True)
            value = b64decode(headers[SIGNATURE], validate=True)
            timestamp = headers[TIMESTAMP]
            made = datetime.datetime.fromisoformat(timestamp)
            age = (datetime.datetime.now(tz=datetime.UTC) - made).total_seconds()
        except (KeyError, ValueError, TypeError):
            return None
        return cls(key, value, timestamp, age)

    def fault(self) -> str | None:
        """Reason why the signature is invalid; None if it is valid."""
        if not -EARLIEST < self.age < OLDEST:
            return "an expired signature"
        key = load_pem_public_key(self.key)
        try:
            key.verify(self.value, self.timestamp.encode(), ec.ECDSA(hashes.SHA256()))  # type: ignore[union-attr, call-arg, arg-type]
        except InvalidSignature:
            return "an invalid signature"
        return None


def as_sent(public_key: bytes) -> bytes:
    """Convert a public key from OpenSSH's format to the one that Flower sends (PEM)."""
    key = load_ssh_public_key(public_key)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


_LOOK_AGAIN = 2.0  # seconds between two checks for new keys
_FORGET = 30.0  # seconds after which keys of revoked nodes are refused


class _NodeSignatures:
    """Verifies that calls are signed by nodes of a deployment, from the headers of Flower's
    SuperNodes. The SuperLink verifies it again, with the identity of the node, but it reads the
    whole body first.

    Args:
        folder: has a folder with `node.pub` for each node; nodes may be added and revoked at
            runtime.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys: frozenset[bytes] = frozenset()
        self._looked = float("-inf")

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """Reason for refusing a call with these headers; None if it is signed by a node."""
        signature = NodeSignature.of(headers)
        if signature is None:
            return "a missing signature"
        return signature.fault() if self._knows(signature.key) else "an unknown key"

    def _knows(self, public: bytes) -> bool:
        limit = _FORGET if public in self._keys else _LOOK_AGAIN
        if time.monotonic() - self._looked > limit:
            self._looked = time.monotonic()
            self._keys = frozenset(
                key for file in self._folder.glob("*/node.pub") if (key := _read(file)) is not None
            )
        return public in self._keys


def _read(file: Path) -> bytes | None:
    """Read a public key in the format that Flower sends; None for an incomplete file."""
    try:
        return as_sent(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        return None


def create_app(upstream: str, authority: Path, nodes: Path | None = None) -> Starlette:
    """Create the proxy as an ASGI application.

    Args:
        upstream: HOST:PORT of the SuperLink.
        authority: certificate of the authority that signed the SuperLink's.
        nodes: folder of the nodes whose calls may pass, see `_NodeSignatures`; None: only the
            SuperLink verifies signatures.
    """
    context = ssl.create_default_context(cafile=str(authority))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # The SuperLink holds the call of a waiting node, and so its connection.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(
            base_url=f"https://{upstream}",
            verify=context,
            timeout=60,
            limits=limits,
            trust_env=False,
        ) as client:
            app.state.client = client
            app.state.held = 0
            app.state.signatures = None if nodes is None else _NodeSignatures(nodes)
            yield

    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", _pass, methods=methods)], lifespan=lifespan)


async def _pass(request: Request) -> Response:
    path = request.scope["raw_path"].partition(b"?")[0]
    method = request.method
    if path == HEALTH and method in ("GET", "HEAD"):
        return PlainTextResponse("")
    if method != "POST" or not FLEET.fullmatch(path) or request.url.query:
        return _refused(request, "", 404)
    signatures = request.app.state.signatures
    why = None if signatures is None else signatures.refusal(request.headers)
    if why is not None:
        return _refused(request, f", with {why}", 401)
    headers = [(name, value) for name, value in request.headers.items() if name not in _DROPPED]
    body = bytearray()
    try:
        async with asyncio.timeout(PATIENCE) as pause:
            async for piece in request.stream():
                pause.reschedule(asyncio.get_running_loop().time() + PATIENCE)
                request.app.state.held += len(piece)
                body += piece
                if len(body) > MOST_BYTES:
                    return PlainTextResponse("request too large\n", 413, _CLOSE)
                if request.app.state.held > MOST_HELD:
                    # which Flower's nodes try again
                    return PlainTextResponse("too many concurrent requests\n", 503, _CLOSE)
        answer = await request.app.state.client.request(
            method, path.decode(), headers=headers, content=bytes(body)
        )
    except TimeoutError:
        return PlainTextResponse("request timeout\n", 408, _CLOSE)
    except httpx.HTTPError as error:
        log.warning("the SuperLink did not answer: %s", error)
        return PlainTextResponse("the SuperLink did not answer\n", 503)
    finally:
        request.app.state.held -= len(body)
    passed = {name: value for name, value in answer.headers.items() if name not in _DROPPED}
    return Response(answer.content, answer.status_code, passed)


def _refused(request: Request, why: str, status: int) -> Response:
    """Refuse a request without reading its body."""
    client = request.client.host if request.client else "?"
    path = request.scope["raw_path"].partition(b"?")[0][:200]
    log.warning("refused %s %r from %s%s", request.method, path, client, why)
    return PlainTextResponse("not found\n" if status == 404 else "refused\n", status, _CLOSE)


class _PunctualHeads(AutoHTTPProtocol):
    """HTTP protocol that closes a connection if the head of a request is late; uvicorn has no such
    timeout."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = self.loop.call_later(PATIENCE, transport.close)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(PATIENCE, self.transport.close)
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # the head is complete
            self._deadline.cancel()
            self._deadline = None


def serve_over_tls(app: Starlette, host: str, port: int, certificate: Path, key: Path) -> None:
    """Serve an application until it is stopped."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    config = uvicorn.Config(
        app,
        http=_PunctualHeads,
        ws="none",
        host=host,
        port=port,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        ssl_version=ssl.PROTOCOL_TLS_SERVER,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=3,
        server_header=False,
    )
    uvicorn.Server(config).run()
