# SPDX-License-Identifier: Apache-2.0
"""The door lets nodes' calls through and nothing else: our own proxy and nginx, by one table, over real TLS."""

from __future__ import annotations

import http.client
import http.server
import shutil
import ssl
import subprocess
import sys
import threading
import time

import pytest

from simulations.deploy.certificates import Authority
from simulations.deploy.keys import write_private
from simulations.deploy.nginx import rules
from tests.simulations.deploy.federation import free_ports

PASS = ["/v1/fleet/pull-messages", "/v1/fleet/activate-node", "/v1/fleet/push-object", "/v1/fleet/get-run"]
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
    """Stands for the SuperLink: answers anything, and writes down what reached it."""

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
    """Certificates of a SuperLink and of a door, by one authority."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority.create("own")
    write_private(folder / "ca.crt", authority.issued.certificate)
    for name in ("superlink", "door"):
        issued = authority.issue(["localhost", "127.0.0.1"])
        write_private(folder / f"{name}.crt", issued.certificate)
        write_private(folder / f"{name}.key", issued.key)
    return folder


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


def python_door(folder, port, upstream):
    files = ["--certificate", folder / "door.crt", "--key", folder / "door.key", "--authority", folder / "ca.crt"]
    where = ["--host", "127.0.0.1", "--port", port, "--upstream", upstream]
    return [sys.executable, "-m", "simulations.cli", "deploy", "door", *map(str, [*where, *files])]


def nginx_door(folder, port, upstream):
    text = rules(
        listen=f"127.0.0.1:{port}",
        upstream=upstream,
        name="localhost",
        certificate=folder / "door.crt",
        key=folder / "door.key",
        authority=folder / "ca.crt",
        scratch=folder,
    )
    (folder / "nginx.conf").write_text(text)
    return ["nginx", "-e", "stderr", "-c", str(folder / "nginx.conf")]


@pytest.fixture(scope="module", params=["python", "nginx"])
def door(request, certificates, upstream):
    """Asks through a door, with the path as it is; gives the status and the body."""
    if request.param == "nginx" and shutil.which("nginx") is None:
        pytest.skip("no nginx here")
    (port,) = free_ports(1)
    command = (python_door if request.param == "python" else nginx_door)(certificates, port, upstream)
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))

    def ask(method, path, body=b""):
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=10)
        connection._validate_path = lambda _: None  # such paths are what enemies send
        connection.request(method, path, body, {"x-flwr-node": "me"})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    try:
        for _ in range(150):
            try:
                assert ask("GET", "/health")[0] == 200
                break
            except OSError:
                time.sleep(0.2)
        yield ask
    finally:
        process.terminate()
        process.wait(timeout=10)


@pytest.mark.parametrize("path", PASS)
def test_a_nodes_call_passes_with_headers_and_body(door, path):
    body = b"\x00body\xff" * 30_000
    status, answer = door("POST", path, body)
    assert status == (412 if path.endswith("activate-node") else 200) and answer == b"\x00\xffanswer"
    assert Upstream.seen[-1] == (path, "me", body)


@pytest.mark.parametrize("path", REFUSE)
def test_everything_else_is_refused_and_never_reaches_the_superlink(door, path):
    before = len(Upstream.seen)
    assert door("POST", path)[0] in (400, 404)
    assert len(Upstream.seen) == before


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(door, method):
    before = len(Upstream.seen)
    assert door(method, PASS[0])[0] in (404, 405) and len(Upstream.seen) == before


def test_a_superlink_that_is_away_is_a_503_which_nodes_try_again(certificates):
    port, nobody = free_ports(2)
    process = subprocess.Popen(python_door(certificates, port, f"127.0.0.1:{nobody}"), stderr=subprocess.PIPE)
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    try:
        for _ in range(150):
            try:
                connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=10)
                connection.request("POST", PASS[0])
                assert connection.getresponse().status == 503
                break
            except OSError:
                time.sleep(0.2)
        else:
            raise AssertionError("the door did not open")
    finally:
        process.terminate()
        process.wait(timeout=10)
