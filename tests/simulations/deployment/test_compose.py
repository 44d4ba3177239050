# SPDX-License-Identifier: Apache-2.0
"""The compose files: accepted by docker compose, their flags by our own and Flower's parsers, and
their networks."""

import importlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from clients.device.device_node import _identity
from fedrec.errors import EngineError, RefusalError
from simulations.cli.deployment.deploy import _next
from simulations.cli.deployment.deploy import app as deploy
from simulations.deployment.client import ClientPlan, supernode_flags
from simulations.deployment.flower.unfinished import UNFINISHED
from simulations.deployment.initialise import add_nodes, initialise
from simulations.deployment.layout import DeploymentConfig
from simulations.deployment.processes.commands import (
    SERVER,
    TASK_POLL,
    executor_flags,
    refuse_root_in_a_container,
    superlink_flags,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def table():
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_a_node_by_itself_is_a_node_beside_the_server(table):
    """But for names, and the way to its folder and the gateway."""
    text = (ROOT / "docker-compose.node.yml").read_text()
    own = yaml.safe_load(re.sub(r"\$\{(FEDREC_NODE|FEDREC_GATEWAY):[^}]*\}", r"\1", text))
    for part in ("supernode", "clientapp"):
        beside = re.sub(r"\$\{FEDREC_DEPLOYMENT:[^}]*\}", "TOP", json.dumps(table["services"]))
        beside = json.loads(beside)[f"{part}-1"]
        beside = json.dumps({**beside, "depends_on": None})
        for name, other in {
            "TOP/nodes/node-1": "FEDREC_NODE",
            "TOP/revoked": "FEDREC_NODE/revoked",
            "gateway:8443": "FEDREC_GATEWAY",
            "meeting-1": "meeting",
            '"node-1"': '"node"',
            "node-1-": "",
        }.items():
            beside = beside.replace(name, other)
        alone = {**own["services"][part], "depends_on": None}
        alone.pop("build", None)
        assert alone == json.loads(beside)


def test_flags_and_paths_are_those_of_processes_without_containers(table):
    services = table["services"]
    secrets = Path("/run/secrets")
    link = superlink_flags(
        host="0.0.0.0",
        port=8000,
        certificate=secrets / "superlink.crt",
        key=secrets / "superlink.key",
        authority=secrets / "ca.crt",
        database=Path("/var/lib/fedrec/state/superlink.db"),
        secret=secrets / "superexec.secret",
    )
    assert services["superlink"]["command"] == [*link]
    server = executor_flags("superlink:8000", secrets / "ca.crt", secrets / "superexec.secret")
    assert services["serverapp"]["command"] == [*server]
    assert services["serverapp"]["environment"].keys() == {TASK_POLL, UNFINISHED}
    for name in ("superlink", "serverapp"):
        assert services[name]["entrypoint"][:3] == ["python", "-m", SERVER]
    command, name, *arguments = services["gateway"]["command"]
    assert command == "deploy"
    commands: Any = get_command(deploy)
    found = commands.commands[name].make_context(name, arguments).params
    assert found.pop("nodes") is None and all(found.values())


def parsed(module, function, flags):
    parser = getattr(importlib.import_module(module), function)()
    return parser.parse_args([str(flag) for flag in flags])


def test_flowers_parsers_take_our_flags(table):
    services = table["services"]
    link = parsed(
        "flwr.superlink.cli.flower_superlink",
        "_parse_args_run_superlink",
        services["superlink"]["command"],
    )
    assert link.enable_supernode_auth
    assert link.isolation == "process"
    assert link.ssl_keyfile
    assert link.database
    assert not getattr(link, "insecure", False)
    executor = parsed(
        "flwr.supercore.cli.flower_superexec", "_parse_args", services["serverapp"]["command"]
    )
    assert executor.superexec_auth_secret_file and executor.root_certificates
    plan = ClientPlan(
        Path("/join"), "gateway:8443", Path("/data.csv"), Path("/state"), bind="0.0.0.0"
    )
    flags = supernode_flags(plan)
    node = parsed("flwr.supernode.cli.flower_supernode", "_parse_args_run_supernode", flags)
    assert node.auth_supernode_private_key == "/join/node.key"
    assert node.isolation == "process"
    assert not node.insecure


@pytest.mark.parametrize(
    ("bind", "published"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("::1", "[::1]")]
)
def test_the_gateway_is_published_on_the_address_of_the_deployment(
    table, tmp_path, bind, published
):
    settings = {"nodes": 1, "bind": bind, "port": 9443}
    made = initialise(tmp_path / "d", DeploymentConfig.parse(settings, at="deployment"))
    found = settings_in(made.path / ".env")
    assert (found["FEDREC_BIND"], found["FEDREC_PORT"]) == (published, "9443")
    (port,) = table["services"]["gateway"]["ports"]
    assert port == "${FEDREC_BIND:-127.0.0.1}:${FEDREC_PORT:-8443}:8443"


def networks(service):
    return set(service["networks"])


def test_only_the_gateway_is_reached_from_outside(table):
    services = table["services"]
    published = [name for name, service in services.items() if service.get("ports")]
    assert published == ["gateway"]
    inside = {name for name, service in services.items() if "inside" in networks(service)}
    assert inside == {"superlink", "serverapp", "gateway", "operator"}
    assert table["networks"]["inside"] == {"internal": True}
    for number in (1, 2):
        executor = services[f"clientapp-{number}"]
        assert networks(executor) == {f"node-{number}"}
        assert table["networks"][f"node-{number}"]["internal"]
        assert networks(services[f"supernode-{number}"]) == {"outside", f"node-{number}"}


def test_what_speaks_to_the_outside_does_not_see_the_data_and_what_sees_them_not_its_key(table):
    for number in (1, 2):
        supernode, executor = (
            table["services"][f"{part}-{number}"] for part in ("supernode", "clientapp")
        )
        assert not any("data.csv" in volume for volume in supernode["volumes"])
        assert any(
            f"node-{number}/data.csv:/data/data.csv:ro" in volume for volume in executor["volumes"]
        )
        sources = [
            [secret["source"] for secret in part["secrets"]] for part in (supernode, executor)
        ]
        assert sources == [[f"node-{number}-node.key"], [f"node-{number}-signing.key"]]
        kept = {volume.partition(":")[0] for volume in executor["volumes"]}
        assert f"node-{number}-state" in kept
        assert not any(f"-{number}-state" in v for v in supernode["volumes"])


def test_containers_are_not_root_hold_nothing_and_are_started_again(table):
    for name, service in table["services"].items():
        assert service["user"] == "${FEDREC_UID:-10001}:${FEDREC_GID:-10001}", name
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["restart"] == ("no" if name == "operator" else "unless-stopped")
        assert name == "operator" or service["healthcheck"]["test"][0] == "CMD"
        assert ":" in service["image"] and not service["image"].endswith(":latest")
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("FROM") and line != "FROM scratch":
            assert ":" in line and "latest" not in line
    assert "USER fedrec" in (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored and "**/*.key" in ignored


def test_everything_that_is_mounted_is_made_by_init(table, tmp_path):
    made = initialise(tmp_path / "d", DeploymentConfig.parse({"nodes": 2}, at="deployment"))
    for secret in table["secrets"].values():
        assert (made.path / secret["file"].split("}/")[1]).is_file(), secret
    name = "docker-compose.yml"
    assert (made.path / name).read_bytes() == (ROOT / name).read_bytes()
    assert (made.path / "revoked.txt").is_file()


def settings_in(file):
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


def test_containers_run_as_the_owner_and_never_as_root(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(
        os, "chown", lambda path, user, group, **_: given.update({Path(path).resolve(): user})
    )
    for user, wanted in ((1234, "1234"), (0, "10001")):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        monkeypatch.setattr(os, "getgid", lambda user=user: user)
        made = initialise(tmp_path / wanted, DeploymentConfig.parse({"nodes": 1}, at="deployment"))
        found = settings_in(made.path / ".env")
        assert found["FEDREC_UID"] == found["FEDREC_GID"] == wanted
        assert found["FEDREC_DEPLOYMENT"] == f"'{made.path}'"
        assert bool(given) is (user == 0)
    for file in (
        "ca.crt",
        "server/superlink.key",
        "server/gateway.key",
        "nodes/node-1/signing.key",
        "nodes/node-1",
    ):
        assert given[made.path / file] == 10001
    assert made.authority_key not in given and made.authority_key.parent not in given


def test_root_in_a_container_is_refused(monkeypatch):
    monkeypatch.setenv("FEDREC_CONTAINER", "1")
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    refuse_root_in_a_container()
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(EngineError, match="do not run as root"):
        refuse_root_in_a_container()


def test_every_container_has_a_limit_of_memory(table):
    """So that a node with more work than its machine has memory for does not end other programs."""
    for name, service in table["services"].items():
        small = name == "gateway" or name.startswith("supernode-")
        assert service["mem_limit"] == ("1g" if small else "${FEDREC_MEMORY:-4g}"), name


def test_the_next_commands_of_a_container_write_into_its_volume_only(table, monkeypatch):
    folder = Path("/var/lib/fedrec/runs/x")
    assert _next(folder) == "  fedrec report /var/lib/fedrec/runs/x -o report.html"
    monkeypatch.setenv("FEDREC_CONTAINER", "1")
    report, copy = _next(folder).splitlines()
    assert report.endswith(
        "operator report /var/lib/fedrec/runs/x -o /var/lib/fedrec/runs/x/report.html"
    )
    assert copy == "  docker compose cp serverapp:/var/lib/fedrec/runs/x ."
    for name in ("operator", "serverapp"):
        assert "runs:/var/lib/fedrec/runs" in table["services"][name]["volumes"]


def test_the_documented_commands_for_results_are_those_that_are_printed(monkeypatch):
    monkeypatch.setenv("FEDREC_CONTAINER", "1")
    page = " ".join((ROOT / "docs" / "deployment.md").read_text().replace("\\\n", " ").split())
    for line in _next(Path("/var/lib/fedrec/runs/NAME")).splitlines():
        assert line.strip() in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "given"),
    [
        ("docker-compose.yml", {"FEDREC_DEPLOYMENT": "/here"}),
        ("docker-compose.node.yml", {"FEDREC_NODE": "/here", "FEDREC_GATEWAY": "host:8443"}),
    ],
)
def test_docker_compose_accepts_it(file, given):
    """By the installed docker compose, which needs no engine for that."""
    commands = [["docker-compose"], ["docker", "compose"]]
    here = [
        c
        for c in commands
        if shutil.which(c[0])
        and not subprocess.run([*c, "version"], capture_output=True).returncode
    ]
    if not here:
        pytest.skip("no docker compose here")
    for command in here:
        done = subprocess.run(
            [*command, "-f", str(ROOT / file), "config", "-q"],
            capture_output=True,
            text=True,
            env={**os.environ, **given},
        )
        assert done.returncode == 0, done.stderr


def test_nodes_of_an_older_version_get_the_keys_that_they_lack(tmp_path):
    made = initialise(tmp_path / "d", DeploymentConfig.parse({"nodes": 2}, at="deployment"))
    (made.node(1) / "signing.key").unlink()
    kept = (made.node(2) / "signing.key").read_bytes()
    with pytest.raises(RefusalError, match="has no certificate for other nodes") as error:
        _identity(made.node(1))
    assert "fedrec deploy add-nodes DEPLOYMENT 0" in error.value.fix
    assert add_nodes(made, 0).settings.nodes == 2
    one, other = _identity(made.node(1)), _identity(made.node(2))
    assert other.author(one.proof(b"it is me"), b"it is me")
    assert (made.node(2) / "signing.key").read_bytes() == kept
