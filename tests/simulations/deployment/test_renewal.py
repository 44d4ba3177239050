# SPDX-License-Identifier: Apache-2.0
"""Renewed certificates, and supervised processes."""

import datetime
import json
import os
import signal
import stat
import subprocess
import sys
from base64 import b64encode
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from clients.device.node import _identity
from fedrec.errors import EngineError, RunError
from fedrec.runtime.process import Fork
from simulations.cli import app
from simulations.deployment import gateway, layout, operator, superlink, supernode
from simulations.deployment.client import ClientPlan, prepare
from simulations.deployment.layout import (
    Deployment,
    DeploymentConfig,
    NodeKey,
    add_nodes,
    days_left,
    days_of_certificates,
    initialise,
    new_secret,
    private_folder,
    renew,
    revoke,
    write_private,
)
from simulations.deployment.processes import Process, Supervisor
from tests.simulations.deployment.federation import until
from tests.simulations.helpers import parent_of

NAMES = ("server/superlink.crt", "server/gateway.crt", "nodes/node-1/signing.crt")


@pytest.fixture
def made(tmp_path):
    """A deployment with three nodes."""
    settings = {"nodes": 3, "hosts": ["fl.example.org", "10.0.0.7"]}
    return initialise(tmp_path / "d", DeploymentConfig.parse(settings, at="deployment"))


@pytest.fixture
def ending(monkeypatch):
    """Certificates that are issued within the block end after ten days."""
    with monkeypatch.context() as patch:
        patch.setattr(layout, "_ISSUED_DAYS", 10)
        yield patch


def run(*arguments):
    return CliRunner().invoke(app, ["deploy", *map(str, arguments)])


def test_renewed_certificates_are_for_the_same_keys_names_and_use(ending, tmp_path):
    made = initialise(tmp_path / "d", DeploymentConfig.parse({"nodes": 1}, at="deployment"))
    ending.undo()
    assert 9 < min(days_of_certificates(made).values()) < 10
    before = {
        name: x509.load_pem_x509_certificate((made.path / name).read_bytes()) for name in NAMES
    }
    done = run("renew", made.path)
    assert done.exit_code == 0 and str(made.node(1) / "signing.crt") in done.output
    assert min(days_of_certificates(made).values()) > 800
    for name, old in before.items():
        new = x509.load_pem_x509_certificate((made.path / name).read_bytes())
        assert new.public_key() == old.public_key() and new.serial_number != old.serial_number
        assert new.subject == old.subject and list(new.extensions) == list(old.extensions)
    identity = _identity(made.node(1))
    assert identity.author(identity.proof(b"it is me"), b"it is me")


def test_certificates_are_renewed_by_their_authority_only(made):
    made.authority_key.unlink()
    with pytest.raises(RunError, match=r"authority's key .* is missing"):
        renew(made)


def test_the_certificate_between_a_nodes_processes_is_renewed_at_a_start(ending, made):
    plan = ClientPlan(made.node(1), made.gateway)
    prepare(plan, "supernode")
    ending.undo()
    file = plan.state / "meeting" / "node.crt"
    assert days_left(file.read_bytes()) < 10
    prepare(plan, "supernode")
    assert days_left(file.read_bytes()) > 800
    kept = file.read_bytes()
    prepare(plan, "supernode")
    assert file.read_bytes() == kept


@pytest.fixture
def ended(monkeypatch):
    """Makes a deployment whose certificates of some kind ended half an hour ago."""

    def make(path, days):
        with monkeypatch.context() as patch:
            patch.setattr(layout, days, -0.02)
            return initialise(path, DeploymentConfig.parse({"nodes": 2}, at="deployment"))

    return make


def test_a_deployment_whose_certificates_have_ended_does_not_start_before_they_are_renewed(
    ended, tmp_path, monkeypatch
):
    made = ended(tmp_path / "d", "_ISSUED_DAYS")
    done = run("up", made.path)
    assert done.exit_code != 0 and "has expired" in str(done.exception)
    assert "fedrec deploy renew" in done.exception.fix
    renew(made)
    monkeypatch.setattr(operator, "local_plans", lambda deployment: 1 / 0)  # what comes next
    with pytest.raises(ZeroDivisionError):
        operator.up(made)


def test_an_authority_that_has_ended_is_named_to_operator_and_client(ended, tmp_path):
    made = ended(tmp_path / "d", "_AUTHORITY_DAYS")
    with pytest.raises(RunError, match="has expired") as refused:
        operator.up(made)
    assert refused.value.fix == "create a new deployment"
    (made.node(1) / "data.csv").write_text("user,item\na,b\n")
    with pytest.raises(EngineError, match="has expired") as refused:
        ClientPlan(made.node(1), made.gateway).check()
    assert "set the clock" in refused.value.text()


def test_a_node_whose_certificate_has_ended_is_no_author_for_others(ended, tmp_path):
    made = ended(tmp_path / "d", "_ISSUED_DAYS")
    proof = _identity(made.node(2)).proof(b"it is me")
    with pytest.raises(ValueError):
        _identity(made.node(1)).author(proof, b"it is me")


@pytest.mark.parametrize(
    ("seconds", "fault"),
    [(4, None), (-300, None), (6, "expired"), (-306, "expired"), (10**9, "expired")],
)
def test_a_call_from_a_clock_that_is_wrong_is_refused(made, seconds, fault):
    """By more than five seconds ahead or five minutes behind, as Flower does."""
    key = load_ssh_private_key((made.node(1) / "node.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    timestamp = now.isoformat()
    public = gateway.as_sent((made.node(1) / "node.pub").read_bytes())
    signature = key.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256()))
    headers = {
        gateway.PUBLIC_KEY: b64encode(public).decode(),
        gateway.SIGNATURE: b64encode(signature).decode(),
        gateway.TIMESTAMP: timestamp,
    }
    found = gateway._NodeSignatures(made.path / "nodes").refusal(headers)
    assert found is None if fault is None else fault in found


def test_a_revoked_node_is_left_out_everywhere(made):
    proof = _identity(made.node(2)).proof(b"it is me")
    assert _identity(made.node(1)).author(proof, b"it is me")
    done = run("revoke", made.path, "node-2")
    assert done.exit_code == 0 and "revoked from the next" in done.output
    left = Deployment(made.path)
    assert [folder.name for folder in left.node_folders()] == ["node-1", "node-3"]
    assert not list(left.node(2).glob("node.pub")) and left.revoked.read_text() == "node-2\n"
    with pytest.raises(ValueError, match="was revoked"):
        _identity(left.node(1)).author(proof, b"it is me")
    assert _identity(left.node(1)).author(_identity(left.node(3)).proof(b"x"), b"x")
    assert revoke(left, "node-2").settings == left.settings
    grown = add_nodes(left, 1)
    assert grown.numbers == [1, 3, 4] and (grown.node(4) / "revoked.txt").read_text() == "node-2\n"


def test_an_unknown_node_is_not_revoked(made):
    with pytest.raises(RunError, match="unknown node 'node-9'"):
        revoke(made, "node-9")


def test_registering_removes_revoked_nodes_from_the_superlink(made, monkeypatch):
    keys = {number: (made.node(number) / "node.pub").read_bytes() for number in (1, 2, 3)}
    calls = []
    fake = SimpleNamespace(
        register=lambda key, name: calls.append(("register", key)) or 7,
        unregister=lambda key: calls.append(("unregister", key)),
    )
    monkeypatch.setattr(superlink, "Control", lambda _: nullcontext(fake))
    operator.register_nodes(revoke(made, "node-2"))
    assert calls == [("register", keys[1]), ("register", keys[3]), ("unregister", keys[2])]


def test_the_gateway_forgets_a_revoked_key(made, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(gateway, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    known = gateway._NodeSignatures(made.path / "nodes")
    key = gateway.as_sent((made.node(2) / "node.pub").read_bytes())
    assert known._knows(key)
    revoke(made, "node-2")
    clock[0] += gateway._FORGET + 1
    assert not known._knows(key)
    assert known._knows(gateway.as_sent((made.node(1) / "node.pub").read_bytes()))


def test_status_says_when_certificates_end(ending, tmp_path):
    made = initialise(tmp_path / "d", DeploymentConfig.parse({"nodes": 1}, at="deployment"))
    ending.undo()
    assert "10 days left; fedrec deploy renew" in " ".join(run("status", made.path).output.split())
    renew(made)
    assert "certificates: 825 days left" in run("status", made.path).output


# Keys in OpenSSH's format.


def test_node_keys_are_pairs_that_openssh_reads():
    one, other = NodeKey.create(), NodeKey.create()
    private, public = load_ssh_private_key(one.private, None), load_ssh_public_key(one.public)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert private.public_key().public_numbers() == public.public_numbers()
    assert public.curve.name == "secp384r1"
    assert one.private != other.private and new_secret() != new_secret() and len(new_secret()) == 64


def test_private_files_are_private_from_their_first_moment(tmp_path):
    folder = private_folder(tmp_path / "a" / "b")
    file = folder / "secret"
    write_private(file, "x")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    write_private(file, b"y")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_bytes() == b"y"
    assert [p.name for p in folder.iterdir()] == ["secret"]


# Nodes as forks: what their owner is told about a key that the server does not accept.


def ended_of_node_pool(pool, count):
    """Whether the process has ended so many times; it is started again at once."""
    pool._due["supernode"] = 0.0
    pool._step()
    return pool._restarts["supernode"] >= count


@pytest.mark.parametrize(("status", "lines"), [(supernode.REFUSED, 1), (1, 0)])
def test_a_refused_key_is_reported_once_on_the_terminal(tmp_path, capsys, status, lines):
    process = Process("supernode", ("refused",))
    pool = Supervisor([process], tmp_path, mains={"refused": lambda _: sys.exit(status)})
    for count in (1, 2):
        until(lambda count=count: ended_of_node_pool(pool, count), what="an end")
    shown = capsys.readouterr().err
    assert shown.count("supernode: the server does not accept this node's key") == lines
    assert shown.count("fedrec deploy register DEPLOYMENT") == lines


@pytest.mark.parametrize("status", [401, 403, 412, 503])
def test_a_supernode_whose_key_is_refused_ends_with_its_own_status(monkeypatch, capfd, status):
    """In a fork, because Flower ends the process."""
    loop = supernode._load()
    server = httpx.MockTransport(lambda asked: httpx.Response(status, request=asked))
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=server))

    def connect():
        loop.register_signal_handlers(loop.EventType.RUN_SUPERNODE_LEAVE)
        with loop._init_connection("gateway:1", True, max_retries=0):
            raise AssertionError("there is no connection")

    child = Fork(lambda: supernode._ending_as_refused(connect)).pid
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    refused = "the server does not accept this node's key" in capfd.readouterr().err
    assert (ended, refused) == ((1, False) if status == 503 else (supernode.REFUSED, True))


# The supervisor: restarts processes that end, waits for required files, leaves nothing behind.

SLEEPER = "import subprocess, sys, time; print('up', flush=True); "
SLEEPER += (
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
)
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
SUPERVISE = f"""
import sys
from pathlib import Path
from simulations.deployment.processes import Process
from simulations.deployment.processes import Supervisor
folder = Path(sys.argv[1])
Supervisor([
    Process("steady", (sys.executable, "-c", {SLEEPER!r})),
    Process("quitter", (sys.executable, "-c", "print('again')")),
    Process("later", (sys.executable, "-c", {SLEEPER!r}), after=folder / "go"),
    Process("deaf", (sys.executable, "-c", {DEAF!r})),
], folder / "logs", patience=1.0).run()
"""


@pytest.fixture
def supervised(tmp_path):
    """A running supervisor and the folder of its logs."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen([sys.executable, "-c", SUPERVISE, str(tmp_path)], env=environment)
    yield process, tmp_path
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=20)


def table(folder):
    return json.loads((folder / "logs" / "processes.json").read_text())["processes"]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def children(pid):
    return [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/stat") if parent_of(p) == pid]


@pytest.mark.slow
def test_it_starts_again_what_ends_and_stops_everything(supervised):
    process, folder = supervised
    until(lambda: table(folder)["quitter"]["restarts"] >= 2, what="two restarts")
    assert table(folder)["later"]["pid"] is None
    (folder / "go").touch()
    until(lambda: table(folder)["later"]["pid"] is not None, what="the process that waits")
    steady = table(folder)["steady"]["pid"]
    until(lambda: children(steady), what="its child")
    orphans = children(steady)
    os.kill(steady, signal.SIGKILL)
    until(lambda: table(folder)["steady"]["pid"] not in (steady, None), what="a new one")
    until(
        lambda: not any(alive(pid) for pid in orphans),
        what="the end of what the old one had started",
    )
    until(lambda: children(table(folder)["steady"]["pid"]), what="its child")
    assert stat.S_IMODE((folder / "logs" / "processes.json").stat().st_mode) == 0o600
    assert (folder / "logs" / "quitter.txt").read_text().splitlines()[:2] == ["again", "again"]
    pids = [entry["pid"] for entry in table(folder).values() if entry["pid"] is not None]
    everybody = pids + [child for pid in pids for child in children(pid)]
    process.terminate()
    process.wait(timeout=20)
    assert not [pid for pid in everybody if alive(pid)]
    assert not (folder / "logs" / "processes.json").exists()


def test_when_it_is_killed_its_processes_end_too(supervised):
    process, folder = supervised
    until(lambda: "steady" in table(folder), what="a process")
    pid = table(folder)["steady"]["pid"]
    deaf = table(folder)["deaf"]["pid"]
    until(lambda: children(pid), what="its child")
    left = [deaf, *children(pid)]
    process.kill()
    process.wait()
    until(lambda: not alive(pid), timeout=20, what="its end")
    for one in left:  # a process that ignores signals, and one that the test's own process started
        os.kill(one, signal.SIGKILL)
