# SPDX-License-Identifier: Apache-2.0
"""The compose file: what docker-compose accepts, flags that Flower's own parsers take, and who reaches whom."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from simulations.deploy.compose import compose, node_flags
from simulations.deploy.initialise import initialise
from simulations.deploy.layout import DeploymentConfig

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def table():
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_the_file_at_the_top_is_the_one_that_is_made_for_two_nodes():
    assert (ROOT / "docker-compose.yml").read_text() == compose(2)


def parsed(module, function, flags):
    parser = getattr(importlib.import_module(module), function)()
    return parser.parse_args([str(flag) for flag in flags])


def test_flowers_parsers_take_our_flags(table):
    services = table["services"]
    link = parsed("flwr.superlink.cli.flower_superlink", "_parse_args_run_superlink", services["superlink"]["command"])
    assert link.enable_supernode_auth and link.isolation == "process" and link.ssl_keyfile and link.database
    assert not getattr(link, "insecure", False)
    executor = parsed("flwr.supercore.cli.flower_superexec", "_parse_args", services["serverapp"]["command"])
    assert executor.superexec_auth_secret_file and executor.root_certificates
    node = parsed("flwr.supernode.cli.flower_supernode", "_parse_args_run_supernode", node_flags())
    assert node.auth_supernode_private_key == "/join/node.key" and node.isolation == "process" and not node.insecure


def networks(service):
    return set(service["networks"])


def test_only_the_door_is_reached_from_outside(table):
    services = table["services"]
    published = [name for name, service in services.items() if service.get("ports")]
    assert published == ["door"]
    inside = {name for name, service in services.items() if "inside" in networks(service)}
    assert inside == {"superlink", "serverapp", "door", "operator"}
    assert table["networks"]["inside"] == {"internal": True}
    for number in (1, 2):
        executor = services[f"clientapp-{number}"]
        assert networks(executor) == {f"node-{number}"} and table["networks"][f"node-{number}"]["internal"]
        assert networks(services[f"supernode-{number}"]) == {"outside", f"node-{number}"}


def test_what_speaks_to_the_outside_does_not_see_the_data_and_what_sees_them_not_its_key(table):
    for number in (1, 2):
        supernode, executor = (table["services"][f"{part}-{number}"] for part in ("supernode", "clientapp"))
        assert not any("data.csv" in volume for volume in supernode["volumes"])
        assert any(f"node-{number}/data.csv:/data/data.csv:ro" in volume for volume in executor["volumes"])
        sources = [[secret["source"] for secret in part["secrets"]] for part in (supernode, executor)]
        assert sources == [[f"node-{number}-node.key"], [f"node-{number}-signing.key"]]
        kept = {volume.partition(":")[0] for volume in executor["volumes"]}
        assert f"node-{number}-state" in kept and not any(f"-{number}-state" in v for v in supernode["volumes"])


def test_containers_are_not_root_hold_nothing_and_are_started_again(table):
    for name, service in table["services"].items():
        assert service["user"] == "${FEDREC_UID:-10001}:${FEDREC_GID:-10001}", name
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["restart"] == ("no" if name == "operator" else "unless-stopped")
        assert name == "operator" or service["healthcheck"]["test"][0] == "CMD"
        assert ":" in service["image"] and not service["image"].endswith(":latest")
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("FROM"):
            assert ":" in line and "latest" not in line
    assert "USER fedrec" in (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored and "**/*.key" in ignored


def test_everything_that_is_mounted_is_made_by_init(table, tmp_path):
    made = initialise(tmp_path / "d", DeploymentConfig.parse({"nodes": 2}, at="deployment"))
    for secret in table["secrets"].values():
        assert (made.path / secret["file"].split("/", 1)[1].split("}/")[-1]).is_file(), secret
    own = yaml.safe_load((made.path / "docker-compose.yml").read_text())
    for secret in own["secrets"].values():
        assert (made.path / secret["file"]).is_file()
    assert own["services"].keys() == table["services"].keys()
    assert (made.path / "server" / "nginx-compose.conf").is_file()
    text = (made.path / "docker-compose.yml").read_text()
    for file in made.path.rglob("*.key"):
        assert file.read_text() not in text


def test_docker_compose_accepts_it(tmp_path):
    """By whichever docker compose is here; it needs no engine for that."""
    commands = [["docker-compose"], ["docker", "compose"]]
    here = [
        c
        for c in commands
        if shutil.which(c[0]) and not subprocess.run([*c, "version"], capture_output=True).returncode
    ]
    if not here:
        pytest.skip("no docker compose here")
    for command in here:
        done = subprocess.run(
            [*command, "-f", str(ROOT / "docker-compose.yml"), "config", "-q"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
