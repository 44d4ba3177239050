# SPDX-License-Identifier: Apache-2.0
"""The gateway, and polls of idle nodes."""

import asyncio
import datetime
import http.client
import http.server
import inspect
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)
from fastapi import FastAPI, Request, Response
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.middleware import Middleware
from starlette.testclient import TestClient

from simulations import flower_commands
from simulations.deployment import gateway as proxy
from simulations.deployment import superlink, supernode
from simulations.deployment.layout import Authority, NodeKey, write_private
from simulations.deployment.processes import flags
from simulations.deployment.superlink import BELIEVED, POLL_PATH, _AnswerIdleNodes, _EmptyQueues
from tests.simulations.deployment.federation import free_ports, until

# The gateway forwards nodes' calls and nothing else, over real TLS.

PASS = [
    "/v1/fleet/pull-messages",
    "/v1/fleet/activate-node",
    "/v1/fleet/push-object",
    "/v1/fleet/get-run",
]
REFUSE = [
    "/",
    "/v1/fleet",
    "/v1/fleet/",
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/..%2fcontrol/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet//../control/start-run",
    "//v1/control/start-run",
    "/v1/fleet/pull-messages/../../control/start-run",
    "/v1/fleet/pull-messages;/../../control/start-run",
    "/v1/fleet/pull-messages%00",
    "/v1/fleet/pull-messages?x=/v1/control",
    "/v1/fleet\\..\\control\\start-run",
    "/V1/FLEET/pull-messages",
    "/docs",
    "/openapi.json",
]


class Upstream(http.server.BaseHTTPRequestHandler):
    """A fake SuperLink: answers every request, and records them."""

    protocol_version = "HTTP/1.1"
    seen: list = []  # noqa: RUF012

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0) or 0))
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size + 2)[:-2]
            self.rfile.readline()
        self.seen.append((self.path, self.headers.get("x-flwr-node", ""), body))
        answer = b"\x00\xffanswer"
        self.send_response(412 if self.path.endswith("activate-node") else 200)
        self.send_header("content-length", str(len(answer)))
        self.send_header("x-back", "1")
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Certificates of a SuperLink and of a gateway, by one authority."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority.create("own")
    write_private(folder / "ca.crt", authority.issued.certificate)
    for name in ("superlink", "gateway"):
        issued = authority.issue(name, ["localhost", "127.0.0.1"])
        write_private(folder / f"{name}.crt", issued.certificate)
        write_private(folder / f"{name}.key", issued.key)
    (folder / "nodes" / "node-1").mkdir(parents=True)
    key = NodeKey.create()
    write_private(folder / "nodes" / "node-1" / "node.pub", key.public)
    write_private(folder / "node.key", key.private)
    return folder


def signed(key, timestamp=None):
    """Headers of a node's call, as Flower's SuperNode makes them."""
    private = load_ssh_private_key(key, None)
    timestamp = timestamp or datetime.datetime.now(datetime.UTC).isoformat()
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = private.sign(timestamp.encode(), ECDSA(SHA256()))
    both = {"flwr-public-key": public, "flwr-signature": signature}
    return {
        "flwr-timestamp": timestamp,
        **{name: b64encode(text).decode() for name, text in both.items()},
    }


@pytest.fixture(scope="module")
def upstream(certificates):
    """HOST:PORT of a server with TLS that answers anything."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "superlink.crt", certificates / "superlink.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


class Gateway:
    """A gateway in a process of its own, with the time in seconds that it waits for the rest of a
    request."""

    def __init__(self, folder, upstream, patience=60.0):
        (self.port,) = free_ports(1)
        self.key = (folder / "node.key").read_bytes()
        self.context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        # required of every certificate by newer versions of Python
        self.context.verify_flags |= ssl.VERIFY_X509_STRICT
        certificate = {"certificate": folder / "gateway.crt", "key": folder / "gateway.key"}
        where = {"host": "127.0.0.1", "port": self.port, "upstream": upstream, **certificate}
        arguments = flags(**where, authority=folder / "ca.crt", nodes=folder / "nodes")
        code = (
            f"from simulations.deployment import gateway; gateway.PATIENCE = {patience};"
            "import runpy; runpy.run_module('simulations.cli', run_name='__main__')"
        )
        command = [sys.executable, "-c", code, "deploy", "gateway", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)

    def __enter__(self):
        until(self.is_open, what="the gateway")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=10)

    def is_open(self):
        with suppress(OSError):
            return self("GET", "/health")[0] == 200

    def __call__(self, method, path, body=b"", headers=None):
        """Send a request with an unmodified path; returns the status and the body."""
        connection = http.client.HTTPSConnection(
            "localhost", self.port, context=self.context, timeout=10
        )
        connection._validate_path = lambda _: None  # attackers send such paths
        headers = signed(self.key) if headers is None else headers
        connection.request(method, path, body, {"x-flwr-node": "me", **headers})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def connect(self, context=None, name="localhost"):
        plain = socket.create_connection(("localhost", self.port), timeout=10)
        return (context or self.context).wrap_socket(plain, server_hostname=name)


@pytest.fixture(scope="module")
def gateway(certificates, upstream):
    with Gateway(certificates, upstream) as opened:
        yield opened


def test_a_client_accepts_the_authority_and_the_names_of_the_certificate(gateway):
    gateway.connect(name="127.0.0.1").close()
    for context, name in ((None, "elsewhere"), (ssl.create_default_context(), "localhost")):
        with pytest.raises(ssl.SSLCertVerificationError):
            gateway.connect(context, name)


@pytest.mark.parametrize("path", PASS)
def test_a_nodes_call_passes_with_headers_and_body(gateway, path):
    body = b"\x00body\xff" * 30_000
    status, answer = gateway("POST", path, body)
    assert status == (412 if path.endswith("activate-node") else 200)
    assert answer == b"\x00\xffanswer"
    assert Upstream.seen[-1] == (path, "me", body)


@pytest.mark.parametrize("path", REFUSE)
def test_everything_else_is_refused_and_never_reaches_the_superlink(gateway, path):
    before = len(Upstream.seen)
    assert gateway("POST", path)[0] in (400, 404)
    assert len(Upstream.seen) == before


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(gateway, method):
    before = len(Upstream.seen)
    assert gateway(method, PASS[0])[0] in (404, 405) and len(Upstream.seen) == before


def test_calls_that_no_node_has_signed_never_reach_the_superlink(gateway, certificates):
    key, before = (certificates / "node.key").read_bytes(), len(Upstream.seen)
    old = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)).isoformat()
    other = {**signed(key), "flwr-timestamp": datetime.datetime.now(datetime.UTC).isoformat()}
    for headers in (
        {},
        signed(NodeKey.create().private),
        signed(key, old),
        other,
        {"flwr-public-key": "?"},
    ):
        assert gateway("POST", PASS[0], b"x", headers)[0] == 401
    assert len(Upstream.seen) == before
    added = NodeKey.create()  # while the gateway is open
    (certificates / "nodes" / "node-2").mkdir()
    write_private(certificates / "nodes" / "node-2" / "node.pub", added.public)
    deadline = time.monotonic() + 10
    while gateway("POST", PASS[0], b"x", signed(added.private))[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_strangers_fill_no_memory(gateway, certificates):
    """Three posts of 150 MiB each would need 450 MiB in the gateway."""
    before = peak(gateway.process.pid)
    threads = [threading.Thread(target=post, args=(gateway, 150 * 2**20, {})) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peak(gateway.process.pid) - before < 30 * 2**10
    status, _ = post(gateway, 33 * 2**20, signed((certificates / "node.key").read_bytes()))
    assert status in (413, None) and gateway("POST", PASS[0], b"x")[0] == 200


def peak(pid):
    """Peak memory of a process, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def post(gateway, size, headers):
    """Send a large body; returns status and body of the reply, None if the gateway closes the
    connection."""
    connection = http.client.HTTPSConnection(
        "localhost", gateway.port, context=gateway.context, timeout=20
    )
    try:
        connection.request(
            "POST",
            PASS[0],
            (bytes(2**20) for _ in range(size // 2**20)),
            headers,
            encode_chunked=True,
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return None, b""
    finally:
        connection.close()


@pytest.fixture(scope="module")
def impatient(certificates, upstream):
    with Gateway(certificates, upstream, patience=1.0) as opened:
        yield opened.connect


def head(certificates, length):
    """The head of a signed call, for a body of so many bytes."""
    own = {"host": "x", "content-length": length}
    headers = {**own, **signed((certificates / "node.key").read_bytes())}
    lines = [f"POST {PASS[0]} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.slow
@pytest.mark.parametrize("further", [0, 10])
@pytest.mark.parametrize(
    ("again", "part"), [(False, ""), (False, "head"), (True, "head"), (False, "body")]
)
def test_a_half_sent_request_is_closed(impatient, certificates, again, part, further):
    """The first request of a connection, or one after another; a head also if more of it comes, a
    body when no more comes."""
    connection = impatient()
    start = time.monotonic()
    if again:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(4096)[:12] == b"HTTP/1.1 200"
    whole = head(certificates, 1000)
    connection.sendall({"": b"", "head": whole[:60], "body": whole}[part])
    for _ in range(further):
        time.sleep(0.2)
        with suppress(OSError):  # it is closed already
            connection.sendall(b"x" if part else b"")
    answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert time.monotonic() - start < 6
    assert answer[:12] == (b"HTTP/1.1 408" if part == "body" else b"")


@pytest.mark.slow
def test_a_slow_body_passes(impatient, certificates):
    """It takes longer than a pause may."""
    connection = impatient()
    connection.sendall(head(certificates, 8))
    for _ in range(8):
        time.sleep(0.25)
        connection.sendall(b"x")
    assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.slow
def test_an_offline_superlink_gives_503_so_that_nodes_retry(certificates):
    (nobody,) = free_ports(1)
    with Gateway(certificates, f"127.0.0.1:{nobody}") as opened:
        assert opened("POST", PASS[0])[0] == 503


NODE = 7
PRIVATE, PUBLIC = generate_key_pairs()
KEY = public_key_to_bytes(PUBLIC)


def test_a_queue_is_empty_until_a_message_is_stored_and_not_for_ever():
    moment = [0.0]
    queues = _EmptyQueues(lambda: moment[0])
    assert NODE not in queues
    queues.none_found(NODE, queues.messages(NODE))
    assert NODE in queues and NODE + 1 not in queues
    queues.stored(NODE)
    assert NODE not in queues
    queues.none_found(NODE, queues.messages(NODE))
    moment[0] = BELIEVED
    assert NODE not in queues
    before = queues.messages(NODE)
    queues.stored(NODE)  # while the database was asked
    queues.none_found(NODE, before)
    assert NODE not in queues


async def held(queues, seconds=30.0):
    """A held call of the node; it ends when it is answered."""
    call = asyncio.ensure_future(queues.wait(NODE, seconds))
    await asyncio.sleep(0)
    return call


def waiting_queues():
    queues = _EmptyQueues()
    queues.none_found(NODE, 0)
    return queues


def test_a_held_call_ends_when_a_message_is_stored_by_another_thread():
    async def ends():
        queues = waiting_queues()
        call = await held(queues)
        queues.stored(NODE + 1)
        await asyncio.sleep(0.01)
        assert not call.done()
        await asyncio.to_thread(queues.stored, NODE)
        await asyncio.wait_for(call, 10)
        await asyncio.wait_for(queues.wait(NODE, 30.0), 10)  # there is a message: none is held
        assert not queues._held
        queues.none_found(NODE, queues.messages(NODE))
        await asyncio.wait_for(queues.wait(NODE, 0.01), 10)  # its time is over
        assert not queues._held

    asyncio.run(ends())


def test_a_node_has_one_call_held():
    async def ends():
        queues = waiting_queues()
        first, second = await held(queues), await held(queues)
        await asyncio.wait_for(first, 10)
        assert not second.done() and len(queues._held) == 1
        queues.stored(NODE)
        await asyncio.wait_for(second, 10)

    asyncio.run(ends())


def test_a_superlink_that_ends_answers_held_calls_and_holds_no_more():
    async def ends():
        queues = waiting_queues()
        state = SimpleNamespace(empty_queues=queues)
        factory = SimpleNamespace(state=lambda: state)
        app = SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory))
        call = await held(queues)
        ended = SimpleNamespace(
            config=SimpleNamespace(app=app), on_tick=AsyncMock(return_value=True)
        )
        await superlink._until_it_ends(ended)
        await asyncio.wait_for(call, 10)
        await asyncio.wait_for(queues.wait(NODE, 30.0), 10)

    asyncio.run(ends())


def test_a_node_asks_again_at_once_after_an_answer_that_was_held():
    moment = [0.0]
    pace = supernode._NodePace(lambda: moment[0])
    sleeps = [pace(3.0) for _ in range(30)]  # answered at once
    assert sleeps[0] == supernode.FIRST_POLL and sleeps[-1] == 3.0
    moment[0] += sleeps[-1] + supernode.HELD_LONG + 1.0
    assert pace(3.0) == supernode.FIRST_POLL


class Calls:
    """A SuperLink with one node, and the number of calls of its own code."""

    def __init__(self):
        self.queues, self.passed = _EmptyQueues(), []
        state = SimpleNamespace(empty_queues=self.queues, get_node_id_by_public_key={KEY: NODE}.get)
        app = FastAPI(middleware=[Middleware(_AnswerIdleNodes, state=state, held=0.01)])

        async def usual(request: Request) -> Response:
            self.passed.append(await request.body())
            return Response(b"usual")

        app.post(POLL_PATH)(usual)
        app.post("/v1/fleet/push-messages")(usual)
        self._client = TestClient(app)

    def ask(
        self, node=NODE, path=POLL_PATH, body=None, key=KEY, age=0.0, media="application/protobuf"
    ):
        stamp = (now() - timedelta(seconds=age)).isoformat()
        headers = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(key).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(
                sign_message(PRIVATE, stamp.encode("ascii"))
            ).decode(),
            TIMESTAMP_HEADER: stamp,
            "content-type": media,
        }
        asked = PullMessagesRequest(node=Node(node_id=node)).SerializeToString()
        return self._client.post(path, content=asked if body is None else body, headers=headers)


@pytest.fixture
def calls():
    return Calls()


def test_only_a_genuine_node_without_messages_is_answered_from_memory(calls):
    assert calls.ask().content == b"usual" and len(calls.passed) == 1
    calls.queues.none_found(NODE, 0)
    answer = calls.ask()
    assert len(calls.passed) == 1 and answer.status_code == 200
    assert answer.headers["content-type"] == "application/protobuf"
    assert PullMessagesResponse.FromString(answer.content) == PullMessagesResponse()
    calls.queues.stored(NODE)
    assert calls.ask().content == b"usual"


OTHER = public_key_to_bytes(generate_key_pairs()[1])


@pytest.mark.parametrize(
    "call",
    [
        {"key": OTHER},
        {"age": 3600.0},
        {"media": "text/plain"},
        {"path": "/v1/fleet/push-messages"},
        {"key": b"no key"},
    ],
    ids=["another key", "an old signature", "no protobuf", "another call", "no key"],
)
def test_everything_else_is_left_to_flower_with_its_body(calls, call):
    calls.queues.none_found(NODE, 0)
    assert calls.ask(**call).content == b"usual"
    asked = PullMessagesRequest(node=Node(node_id=NODE)).SerializeToString()
    assert calls.passed == [call.get("body", asked)]


def test_a_web_server_of_a_superlink_asks_it_first(monkeypatch, calls):
    monkeypatch.setattr(uvicorn.Config, "load", uvicorn.Config.load)
    monkeypatch.setattr(uvicorn.Server, "main_loop", uvicorn.Server.main_loop)
    superlink._answer_idle_nodes()
    state = SimpleNamespace(empty_queues=_EmptyQueues())
    app = FastAPI()
    app.state.linkstate_factory = SimpleNamespace(state=lambda: state)
    config = uvicorn.Config(app)
    config.load()
    assert isinstance(config.loaded_app, _AnswerIdleNodes)
    assert uvicorn.Server.main_loop is superlink._until_it_ends
    source = inspect.getsource(inspect.getmodule(flower_commands.load("flower-superlink")))
    assert "uvicorn.run(" in source and "main_loop" in vars(uvicorn.Server)


def test_headers_and_ages_of_signatures_are_flowers():
    assert proxy.TIMESTAMP == TIMESTAMP_HEADER
    assert proxy.PUBLIC_KEY == FLEET_HTTP_PUBLIC_KEY_HEADER
    assert proxy.SIGNATURE == FLEET_HTTP_SIGNATURE_HEADER
    assert proxy.EARLIEST == SYSTEM_TIME_TOLERANCE
    assert proxy.OLDEST == TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def test_flower_answers_an_idle_node_at_once():
    """If this fails, a new version of Flower may hold polls itself."""
    asked = []
    state = SimpleNamespace(get_message_ins=lambda **given: asked.append(given) or [])
    request = PullMessagesRequest(node=Node(node_id=NODE))
    answer = fleet_handlers.pull_messages(request, state, SimpleNamespace())
    assert answer == PullMessagesResponse() and len(asked) == 1
