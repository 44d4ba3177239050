# SPDX-License-Identifier: Apache-2.0
"""With only the authority's certificate, or with an unregistered key: refused and logged."""

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time

import httpx
import pytest

from simulations.deployment.pki.certificates import Authority
from simulations.deployment.pki.keys import NodeKey, new_secret, write_private
from simulations.engines.flower import app_folder
from simulations.flower_commands import script
from tests.simulations.deployment.federation import free_ports, until

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]


@pytest.fixture
def attacker(federation, tmp_path):
    """A folder with the authority's certificate and a Flower home that points at an address."""

    def at(address):
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        shutil.copy(federation.deployment.authority, tmp_path / "ca.crt")
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "x"\n\n[superlink.x]\naddress = "{address}"\n'
            f'root-certificates = "{tmp_path / "ca.crt"}"\n'
        )
        return {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    return at


def flwr(arguments, environment):
    """A command of Flower's, in the environment of the attacker."""
    command = [script("flwr"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_no_node_can_be_registered_through_the_gateway(federation, attacker, tmp_path):
    with federation.control() as control:
        before = len(control.nodes())
    (tmp_path / "mine.pub").write_bytes(NodeKey.create().public)
    command = ["supernode", "register", str(tmp_path / "mine.pub"), "x"]
    done = flwr(command, attacker(federation.deployment.gateway))
    assert done.returncode != 0 and "registered successfully" not in done.stdout
    with federation.control() as control:
        assert len(control.nodes()) == before
    told = (federation.deployment.logs / "gateway.txt").read_text()
    assert "refused POST b'/v1/control/register-node'" in told
    # The same command works at the inner port: the gateway refuses it, and not an error in this
    # test.
    done = flwr(command, attacker(federation.deployment.superlink))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_run_can_be_started_through_the_gateway(federation, attacker, tmp_path):
    with federation.control() as control:
        before = len(control.runs())
    app = app_folder(tmp_path / "fedrec")
    done = flwr(["run", str(app), "x"], attacker(federation.deployment.gateway))
    assert done.returncode != 0
    with federation.control() as control:
        assert len(control.runs()) == before
    told = (federation.deployment.logs / "gateway.txt").read_text()
    assert "refused POST b'/v1/control/start-run'" in told


def test_no_other_executor_gets_the_serverapps_task(federation, tmp_path, attacker):
    """Refused at the gateway, and at the inner port without the secret; all four try at the same
    time."""
    until(lambda: federation.online() >= 2, what="the nodes")
    # the real executor sleeps: the task is waiting
    os.kill(federation.pid("serverapp"), signal.SIGSTOP)
    impostors = []
    try:
        run = federation.start_run("impostors", "rounds=1")
        for where in ("gateway", "superlink"):
            for secret in (False, True):
                folder = tmp_path / f"{where}-{secret}"
                folder.mkdir()
                impostors.append(
                    impostor(getattr(federation.deployment, where), secret, folder, attacker)
                )
        tried = [folder / "log.txt" for folder in tmp_path.glob("*-*")]
        until(
            lambda: all("Starting Flower SuperExec" in file.read_text() for file in tried),
            what="all impostors",
        )
        time.sleep(10)  # they poll a hundred times a second
        assert not list(tmp_path.glob("*/got-it")), [file.read_text() for file in tried]
        assert _pending(federation)
    finally:
        for process in impostors:
            process.kill()
            process.wait()
        os.kill(federation.pid("serverapp"), signal.SIGCONT)
    finished, why = federation.wait_for(run)  # so the task was available
    assert finished, why


def impostor(address, secret, folder, attacker):
    """Flower's own executor at an address; if it got the task, it would start another program than
    Flower's."""
    environment = {**attacker(address), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.01"}
    command = [script("flower-superexec"), "--root-certificates", str(folder.parent / "ca.crt")]
    command += ["--runtime-api-address", address]
    if secret:
        command += [
            "--superexec-auth-secret-file",
            str(write_private(folder / "secret", new_secret())),
        ]
    (folder / "flwr-serverapp").write_text(f"#!/bin/sh\ntouch {folder}/got-it\n")
    (folder / "flwr-serverapp").chmod(0o755)
    environment["PATH"] = f"{folder}:{environment['PATH']}"
    with open(folder / "log.txt", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _pending(federation):
    with federation.control() as control:
        return any(run.status.startswith("pending") for run in control.runs())


def test_a_node_with_an_unknown_key_is_refused_and_logged(federation, tmp_path):
    node = tmp_path / "unknown"
    shutil.copytree(federation.deployment.node(1), node, ignore=shutil.ignore_patterns("state"))
    write_private(node / "node.key", NodeKey.create().private)
    before = federation.online()
    command = [sys.executable, "-m", "simulations.cli", "client", "--join", str(node)]
    client = federation.start(
        [*command, "--superlink", federation.deployment.gateway, "--port", str(free_ports(1)[0])]
    )
    gateway = federation.deployment.logs / "gateway.txt"
    until(lambda: "with an unknown key" in gateway.read_text(), what="the refusal")
    client.terminate()
    assert federation.online() == before
    assert "SuperNode ID" not in (node / "state" / "logs" / "supernode.txt").read_text()


def test_calls_without_a_signature_or_with_anothers_are_refused(federation):
    context = ssl.create_default_context(cafile=str(federation.deployment.authority))
    with httpx.Client(
        base_url=f"https://{federation.deployment.gateway}", verify=context
    ) as client:
        for headers in ({}, {"x-flwr-public-key": "AAAA", "x-flwr-signature": "AAAA"}):
            headers = {**headers, "content-type": "application/protobuf"}
            for path in (
                "pull-messages",
                "push-messages",
                "activate-node",
                "register-node",
                "get-fab",
            ):
                answer = client.post(f"/v1/fleet/{path}", content=b"", headers=headers)
                assert 400 <= answer.status_code < 500, (path, answer.status_code, answer.text)


def test_no_tls_is_refused(federation):
    for target in (
        federation.deployment.settings.port,
        federation.deployment.settings.superlink_port,
    ):
        with socket.create_connection(("127.0.0.1", target), timeout=10) as bare:
            bare.sendall(
                b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
            )
            bare.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert not bare.recv(100).startswith(b"HTTP/1.1 2")


def test_a_server_with_a_wrong_certificate_is_refused_by_the_client(federation, tmp_path):
    node = tmp_path / "careful"
    shutil.copytree(federation.deployment.node(1), node, ignore=shutil.ignore_patterns("state"))
    (node / "ca.crt").write_bytes(Authority.create("another").issued.certificate)
    command = [sys.executable, "-m", "simulations.cli", "client", "--join", str(node)]
    client = federation.start(
        [*command, "--superlink", federation.deployment.gateway, "--port", str(free_ports(1)[0])]
    )
    log = node / "state" / "logs" / "supernode.txt"
    until(lambda: "CERTIFICATE_VERIFY_FAILED" in log.read_text(), what="the refusal")
    client.terminate()
    assert "SuperNode ID" not in log.read_text()
