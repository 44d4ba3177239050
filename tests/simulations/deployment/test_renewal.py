# SPDX-License-Identifier: Apache-2.0
"""Renewed certificates, and keys that are not accepted any more; without processes."""

import datetime
import shutil
from base64 import b64encode
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from typer.testing import CliRunner

from clients.device.device_node import _identity
from fedrec.errors import EngineError, RunError
from simulations.cli import app
from simulations.deployment import operator
from simulations.deployment.client import plan_of, prepare
from simulations.deployment.flower import control
from simulations.deployment.initialise import add_nodes, initialise
from simulations.deployment.layout import Deployment, DeploymentConfig
from simulations.deployment.pki import certificates, node_signatures
from simulations.deployment.pki.certificates import days_left
from simulations.deployment.renewal import days_to_end, renew, revoke

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
        patch.setattr(certificates, "_ISSUED_DAYS", 10)
        yield patch


def run(*arguments):
    return CliRunner().invoke(app, ["deploy", *map(str, arguments)])


def test_renewed_certificates_are_for_the_same_keys_names_and_use(ending, tmp_path):
    made = initialise(tmp_path / "d", DeploymentConfig.parse({"nodes": 1}, at="deployment"))
    ending.undo()
    assert 9 < days_to_end(made) < 10
    before = {
        name: x509.load_pem_x509_certificate((made.path / name).read_bytes()) for name in NAMES
    }
    done = run("renew", made.path)
    assert done.exit_code == 0 and str(made.node(1) / "signing.crt") in done.output
    assert days_to_end(made) > 800
    for name, old in before.items():
        new = x509.load_pem_x509_certificate((made.path / name).read_bytes())
        assert new.public_key() == old.public_key() and new.serial_number != old.serial_number
        assert new.subject == old.subject and list(new.extensions) == list(old.extensions)
    identity = _identity(made.node(1))
    assert identity.author(identity.proof(b"it is me"), b"it is me")


def test_certificates_are_renewed_by_their_own_authority_only(made, tmp_path):
    other = initialise(tmp_path / "other", DeploymentConfig.parse({"nodes": 1}, at="deployment"))
    shutil.copyfile(other.server / "gateway.crt", made.server / "gateway.crt")
    with pytest.raises(RunError, match=r"gateway\.crt cannot be renewed"):
        renew(made)
    made.authority_key.unlink()
    with pytest.raises(RunError, match="authority's key is missing"):
        renew(made)


def test_the_certificate_between_a_nodes_processes_is_renewed_at_a_start(ending, made):
    (made.node(1) / "data.csv").write_text("user,item\na,b\n")
    plan = plan_of(made.node(1), made.gateway)
    prepare(plan)
    ending.undo()
    file = plan.state / "meeting" / "node.crt"
    assert days_left(file.read_bytes()) < 10
    prepare(plan)
    assert days_left(file.read_bytes()) > 800
    kept = file.read_bytes()
    prepare(plan)
    assert file.read_bytes() == kept


@pytest.fixture
def ended(monkeypatch):
    """Makes a deployment whose certificates of some kind ended half an hour ago."""

    def make(path, days):
        with monkeypatch.context() as patch:
            patch.setattr(certificates, days, -0.02)
            return initialise(path, DeploymentConfig.parse({"nodes": 2}, at="deployment"))

    return make


def test_a_deployment_whose_certificates_have_ended_does_not_start_before_they_are_renewed(
    ended, tmp_path, monkeypatch
):
    made = ended(tmp_path / "d", "_ISSUED_DAYS")
    done = run("up", made.path)
    assert done.exit_code != 0 and "has ended" in str(done.exception)
    assert "fedrec deploy renew" in done.exception.fix
    renew(made)
    monkeypatch.setattr(operator, "local_plans", lambda deployment: 1 / 0)  # what comes next
    with pytest.raises(ZeroDivisionError):
        operator.up(made)


def test_an_authority_that_has_ended_is_named_to_operator_and_client(ended, tmp_path):
    made = ended(tmp_path / "d", "_AUTHORITY_DAYS")
    with pytest.raises(RunError, match="has ended") as refused:
        operator.up(made)
    assert refused.value.fix == "create a new deployment"
    (made.node(1) / "data.csv").write_text("user,item\na,b\n")
    with pytest.raises(EngineError, match="has ended") as refused:
        plan_of(made.node(1), made.gateway).check()
    assert "set the clock" in refused.value.text()


def test_a_node_whose_certificate_has_ended_is_no_author_for_others(ended, tmp_path):
    made = ended(tmp_path / "d", "_ISSUED_DAYS")
    proof = _identity(made.node(2)).proof(b"it is me")
    with pytest.raises(ValueError):
        _identity(made.node(1)).author(proof, b"it is me")


@pytest.mark.parametrize(
    ("seconds", "fault"), [(4, None), (-300, None), (6, "old"), (-306, "old"), (10**9, "old")]
)
def test_a_call_from_a_clock_that_is_wrong_is_refused(made, seconds, fault):
    """By more than five seconds ahead or five minutes behind, as Flower does."""
    key = load_ssh_private_key((made.node(1) / "node.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    timestamp = now.isoformat()
    public = node_signatures.as_sent((made.node(1) / "node.pub").read_bytes())
    headers = {
        node_signatures.PUBLIC_KEY: b64encode(public).decode(),
        node_signatures.SIGNATURE: b64encode(
            key.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256()))
        ).decode(),
        node_signatures.TIMESTAMP: timestamp,
    }
    found = node_signatures.NodeSignatures(made.path / "nodes").refusal(headers)
    assert found is None if fault is None else fault in found


def test_a_revoked_node_is_left_out_everywhere(made):
    proof = _identity(made.node(2)).proof(b"it is me")
    assert _identity(made.node(1)).author(proof, b"it is me")
    done = run("revoke", made.path, "node-2")
    assert done.exit_code == 0 and "refused from the next" in done.output
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
    with pytest.raises(RunError, match="no node 'node-9'"):
        revoke(made, "node-9")


def test_registering_removes_revoked_nodes_from_the_superlink(made, monkeypatch):
    keys = {number: (made.node(number) / "node.pub").read_bytes() for number in (1, 2, 3)}
    calls = []
    fake = SimpleNamespace(
        register=lambda key, name: calls.append(("register", key)) or 7,
        unregister=lambda key: calls.append(("unregister", key)),
        close=lambda: None,
    )
    monkeypatch.setattr(control, "Control", lambda *_: fake)
    operator.register_nodes(revoke(made, "node-2"))
    assert calls == [("register", keys[1]), ("register", keys[3]), ("unregister", keys[2])]


def test_the_superlink_is_asked_to_remove_the_node_of_the_key(made):
    key = (made.node(1) / "node.pub").read_bytes()
    seen = {"status": "online", "heartbeat_interval": 15.0, "online_until": 9.0}
    nodes = [
        SimpleNamespace(node_id=3, name="a", public_key=node_signatures.as_sent(key), **seen),
        SimpleNamespace(node_id=4, name="b", public_key=b"another", **seen),
    ]

    def removed(node_id):
        (found,) = (node for node in nodes if node.node_id == node_id)
        assert found.status != "unregistered"  # which Flower answers with an error
        found.status = "unregistered"

    superlink = object.__new__(control.Control)
    listed = SimpleNamespace(nodes_info=nodes)
    calls = {"ListNodes": lambda: listed, "UnregisterNode": removed}
    superlink._call = lambda name, **fields: calls[name](**fields)
    assert superlink.unregister(key)
    assert [node.status for node in nodes] == ["unregistered", "online"]
    assert [node.node for node in superlink.nodes()] == [4]
    assert not superlink.unregister(key)


def test_the_gateway_forgets_a_revoked_key(made, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(node_signatures, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    known = node_signatures.NodeSignatures(made.path / "nodes")
    key = node_signatures.as_sent((made.node(2) / "node.pub").read_bytes())
    assert known._knows(key)
    revoke(made, "node-2")
    clock[0] += node_signatures._FORGET + 1
    assert not known._knows(key)
    assert known._knows(node_signatures.as_sent((made.node(1) / "node.pub").read_bytes()))


def test_status_says_when_certificates_end(ending, tmp_path):
    made = initialise(tmp_path / "d", DeploymentConfig.parse({"nodes": 1}, at="deployment"))
    ending.undo()
    assert "10 days left; fedrec deploy renew" in " ".join(run("status", made.path).output.split())
    renew(made)
    assert "certificates: 825 days left" in run("status", made.path).output
