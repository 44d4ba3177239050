# SPDX-License-Identifier: Apache-2.0
"""Commands of deployments, and their containers."""

import importlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from fedrec.errors import DataError, EngineError, ExperimentError, RunError
from fedrec.experiment.schema import load
from simulations.cli import app
from simulations.cli.deploy import app as deploy
from simulations.deployment import client, launch, operator
from simulations.deployment.client import ClientPlan, _supernode_flags, client_processes, prepare
from simulations.deployment.layout import (
    Deployment,
    DeploymentConfig,
    add_nodes,
    initialise,
    private_folder,
)
from simulations.deployment.processes import (
    SERVER,
    check_container_user,
    node_process,
    server_processes,
)
from tests.runs import assert_close, parameters_in
from tests.simulations.deployment.composed import OFTEN, RUNS, Composed, skip_without_an_engine

ROOT = Path(__file__).resolve().parents[3]

# The commands of a deployment that need no processes: the files of `init`, and refusals.


@pytest.fixture
def made(tmp_path):
    """A deployment folder with three nodes."""
    settings = "--nodes 3 --host fl.example.org --host 10.0.0.7"
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "d"), *settings.split()])
    assert done.exit_code == 0, done.output
    return Deployment(tmp_path / "d")


def test_init_makes_keys_that_only_the_owner_reads(made):
    private = [made.authority_key, *made.server.glob("*.key"), *made.server.glob("*.secret")]
    private += [folder / "node.key" for folder in made.node_folders()]
    assert len(private) == 7
    for file in private:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    keys = [(folder / "node.key").read_bytes() for folder in made.node_folders()]
    assert len(set(keys)) == 3
    for folder in made.node_folders():
        assert (folder / "ca.crt").read_bytes() == made.authority.read_bytes()
    assert not list(made.node(1).glob("ca.key")) and made.gateway == "fl.example.org:8443"


def test_init_refuses_a_folder_with_something_in_it(made):
    done = CliRunner().invoke(app, ["deploy", "init", str(made.path)])
    assert isinstance(done.exception, RunError) and "not empty" in str(done.exception)


def test_the_gateway_and_the_commands_start_without_pytorch():
    """It would take seconds of each command, and a quarter of a gibibyte of the gateway."""
    code = "import sys, simulations.cli.deploy; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_another_folder_is_no_deployment(tmp_path):
    with pytest.raises(RunError, match="fedrec deploy init"):
        Deployment(tmp_path)


def test_more_nodes_than_the_gateway_serves_are_refused_before_a_key_is_made(made):
    files = sorted(made.path.rglob("*"))
    done = CliRunner().invoke(app, ["deploy", "add-nodes", str(made.path), "1000000000"])
    assert isinstance(done.exception, ExperimentError) and "4096" in str(done.exception)
    assert sorted(made.path.rglob("*")) == files and Deployment(made.path).settings.nodes == 3


CATALOGUE = {"items": ["x", "y"], "item-features": [], "user-features": [], "rated": False}


@pytest.fixture
def shards(made):
    """The deployment with data on nodes 1 and 2, and a catalogue on node 1."""
    for number in (1, 2):
        (made.node(number) / "data.csv").write_text("user,item\na,x\na,y\n")
    catalogue = {**CATALOGUE, "timed": False, "name": "letters"}
    (made.node(1) / "catalogue.json").write_text(json.dumps(catalogue))
    return made


def test_added_nodes_have_keys_and_the_catalogue(shards):
    CliRunner().invoke(app, ["deploy", "add-nodes", str(shards.path), "1"])
    grown = Deployment(shards.path)
    assert grown.settings.nodes == 4 and (grown.node(4) / "node.key").is_file()
    first, *others = [(folder / "catalogue.json").read_bytes() for folder in grown.node_folders()]
    assert len(others) == 3 and set(others) == {first}


def test_only_nodes_that_can_run_are_started_here(shards, monkeypatch, capsys):
    """A node without data, or with wrong ones, would otherwise end all nodes each time that they
    are started."""
    shards = add_nodes(shards, 1)
    (shards.node(2) / "data.csv").write_text("user,item\na,z\n")
    (shards.node(4) / "data.csv").write_text("user,item\nb,x\n")
    started = []
    monkeypatch.setattr(client, "run_nodes", lambda processes, _: started.extend(processes))
    operator._run_nodes_here(shards)
    assert [process.name for process in started] == [
        f"node-{number}/{part}" for number in (1, 4) for part in ("supernode", "executor")
    ]
    assert "--port 19103" in " ".join(started[2].command)  # its own, whoever is left out
    said = capsys.readouterr().err
    assert "node-2 is not started" in said and "is in the catalogue" in said
    assert "node-3" not in said


def test_up_waits_for_the_nodes_with_data_and_refuses_wrong_ones(shards, monkeypatch):
    add_nodes(shards, 0)
    waited = []
    monkeypatch.setattr(operator, "supervisor_of", lambda _: 1)
    monkeypatch.setattr(operator, "_answers", lambda *_: True)
    monkeypatch.setattr(operator, "register_nodes", lambda _: {})
    monkeypatch.setattr(operator, "_wait_for_nodes", lambda _, count, __: waited.append(count))
    operator.up(shards)
    assert waited == [2]  # of three
    (shards.node(1) / "data.csv").write_text("user,thing\na,x\n")
    with pytest.raises(DataError, match="item"):
        operator.up(shards)


@pytest.mark.parametrize(
    ("rows", "words"),
    [("user,item\na,z\n", "is in the catalogue"), ("user,thing\na,x\n", "'item'")],
)
def test_a_clients_data_are_checked_before_it_connects(shards, tmp_path, monkeypatch, rows, words):
    started = []
    monkeypatch.setattr(client, "run_nodes", lambda *given: started.append(given))
    (tmp_path / "bad.csv").write_text(rows)
    command = ["client", "--join", str(shards.node(1)), "--superlink", shards.gateway]
    done = CliRunner().invoke(app, [*command, "--data", str(tmp_path / "bad.csv")])
    assert isinstance(done.exception, DataError) and words in str(done.exception)
    assert not started and not (shards.node(1) / "state").exists()
    done = CliRunner().invoke(app, [*command[:2], str(shards.node(2)), *command[3:]])
    assert isinstance(done.exception, DataError) and "catalogue.json" in str(done.exception)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and len(started) == 1


def test_the_superlink_listens_on_this_machine_only_and_asks_for_keys_and_secrets(made):
    link, executor, gateway = server_processes(made)
    text = " ".join(link.command)
    wanted = ("--host 127.0.0.1", "--enable-supernode-auth", "--isolation process")
    assert [flag for flag in (*wanted, "--superexec-auth-secret-file") if flag not in text] == []
    assert "--insecure" not in text and "--superexec-auth-secret-file" in executor.command
    assert "--upstream 127.0.0.1:18000" in " ".join(gateway.command)
    (nodes,) = node_process(made)
    assert nodes.after == made.registered and not made.registered.exists()


def test_a_clients_two_processes_meet_over_tls_and_only_one_has_the_key(shards, tmp_path):
    (tmp_path / "mine.csv").write_text("user,item\na,x\n")
    plan = ClientPlan(
        shards.node(1), shards.gateway, data=tmp_path / "mine.csv", settings=["most-rounds=7"]
    )
    prepare(plan)
    supernode, executor = client_processes(plan)
    said = " ".join(supernode.command)
    assert "--auth-supernode-private-key" in said
    assert "--insecure" not in said
    assert "--isolation process" in said
    assert f'data="{tmp_path}/mine.csv"' in said and "most-rounds=7" in said
    assert "node.key" not in " ".join(executor.command)
    for file in (plan.state / "meeting").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not (plan.state / "meeting" / "ca.key").exists()
    secret = (plan.state / "meeting" / "node.secret").read_bytes()
    prepare(plan)
    assert (plan.state / "meeting" / "node.secret").read_bytes() == secret


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"data": Path("none.csv")}, DataError, "the data file"),
        ({}, DataError, "the data file"),  # otherwise the server would choose one
        ({"settings": ["most-rounds=-1"]}, ExperimentError, r"node\.most-rounds"),
        ({"settings": ["most-round=1"]}, ExperimentError, r"node\.most-round"),
        ({"settings": ['plugins=a" data="b']}, ExperimentError, r"node\.plugins"),
        ({"join": Path(__file__).parent}, EngineError, "not a node's folder"),
        ({"mode": 0o644}, EngineError, "chmod 600"),
    ],
)
def test_a_client_reports_errors_before_it_starts(made, given, error, words):
    given = dict(given)
    (made.node(1) / "node.key").chmod(given.pop("mode", 0o600))
    with pytest.raises(error, match=words):
        prepare(ClientPlan(given.pop("join", made.node(1)), made.gateway, **given))


def test_an_experiment_on_a_deployment_has_no_baselines_and_outlives_nodes(tiny_experiment):
    own = ["evaluation.every=5", "engine.timeout=7.0", "engine.max-failures=0.1"]
    defaults = [0, launch.DEADLINE, launch.MOST_FAILURES]
    for overrides, expected in (([], defaults), (own, [5, 7.0, 0.1])):
        settled = launch.settled(tiny_experiment(), overrides)
        engine = settled.engine
        assert [settled.evaluation.every, engine.timeout, engine.max_failures] == expected
        assert settled.evaluation.baselines == () and engine.name == "flower"
    assert settled.strategy == load(tiny_experiment()).strategy


def test_nodes_know_a_run_by_a_key_that_a_resumed_run_has_and_a_new_one_has_not(
    tiny_experiment, tmp_path
):
    from fedrec.runs.folder import RunFolder

    one, other = (
        RunFolder.create(launch.settled(tiny_experiment()), tmp_path / name) for name in "ab"
    )
    assert launch.run_key(one) == launch.run_key(RunFolder(tmp_path / "a")) != launch.run_key(other)


WRONG_HOSTS = ("", "exämple.org", "-x.org", "a b", "a" * 64, "x;y", "fl.example.org.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((["--host", host], "deployment.hosts") for host in WRONG_HOSTS),
        (["--bind", "999.1.1.1"], "deployment.bind"),
        (["--host", "10.0.0.256"], "deployment.hosts"),
        (["--port", "9000", "--superlink-port", "9000"], "different ports"),
        (["--port", "19101"], "different ports"),
        (["--superlink-port", "19100"], "different ports"),
        (["--node-port", "65535"], "exceed 65535"),
    ],
)
def test_addresses_and_ports_that_cannot_be_are_refused(tmp_path, arguments, words):
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "d"), *arguments])
    assert isinstance(done.exception, ExperimentError) and words in str(done.exception)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("host", ["fl.example.org", "10.0.0.1", "::1", "xn--exmple-cua.org"])
def test_hosts_and_ports_that_can_be(host):
    settings = {"hosts": [host], "port": 19101, "local-nodes": False}  # whose ports are elsewhere
    assert DeploymentConfig.parse(settings).hosts == (host,)


@pytest.mark.parametrize("name", ["it's", 'a"b', "a;b", "a$b", "a{b", "a\nb"])
def test_a_folder_name_that_other_programs_cannot_read_is_refused_and_leaves_nothing(
    tmp_path, name
):
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / name)])
    assert isinstance(done.exception, RunError) and not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_widened(tmp_path):
    (tmp_path / "d").mkdir(mode=0o500)
    private_folder(tmp_path / "d")
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o500
    (tmp_path / "d").chmod(0o755)
    private_folder(tmp_path / "d")
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700


# The compose files: accepted by docker compose, their flags by our own and Flower's parsers, and
# their networks.


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


def test_flags_are_those_of_processes_without_containers(table, made):
    services = table["services"]
    for process in server_processes(made)[:2]:
        named = [part for part in process.command if part.startswith("--")]
        command = services[process.name]["command"]
        assert [part for part in command if part.startswith("--")] == named
    for name in ("superlink", "serverapp"):
        assert services[name]["entrypoint"][:3] == ["python", "-m", SERVER]
    command, name, *arguments = services["gateway"]["command"]
    assert command == "deploy"
    commands: Any = get_command(deploy)
    found = commands.commands[name].make_context(name, arguments).params
    assert found.pop("nodes") is None and all(found.values())


def parsed(module, function, flags):
    parser = getattr(importlib.import_module(f"flwr.{module}"), function)()
    return parser.parse_args([str(flag) for flag in flags])


def test_flowers_parsers_take_our_flags(table):
    link, executor = (table["services"][name]["command"] for name in ("superlink", "serverapp"))
    link = parsed("superlink.cli.flower_superlink", "_parse_args_run_superlink", link)
    assert link.enable_supernode_auth and link.isolation == "process"
    assert link.ssl_keyfile and link.database and not getattr(link, "insecure", False)
    executor = parsed("supercore.cli.flower_superexec", "_parse_args", executor)
    assert executor.superexec_auth_secret_file and executor.root_certificates
    flags = _supernode_flags(ClientPlan(Path("/join"), "gateway:8443", bind="0.0.0.0"))
    node = parsed("supernode.cli.flower_supernode", "_parse_args_run_supernode", flags)
    assert node.auth_supernode_private_key == "/join/node.key"
    assert node.isolation == "process" and not node.insecure


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
        parts = [table["services"][f"{part}-{number}"] for part in ("supernode", "clientapp")]
        supernode, executor = (part["volumes"] for part in parts)
        assert not any("data.csv" in v or f"-{number}-state" in v for v in supernode)
        assert any(f"node-{number}/data.csv:/data/data.csv:ro" in volume for volume in executor)
        assert any(volume.startswith(f"node-{number}-state:") for volume in executor)
        sources = [[secret["source"] for secret in part["secrets"]] for part in parts]
        assert sources == [[f"node-{number}-node.key"], [f"node-{number}-signing.key"]]


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
    keys = ("server/superlink.key", "server/gateway.key", "nodes/node-1/signing.key")
    assert {given[made.path / file] for file in ("ca.crt", "nodes/node-1", *keys)} == {10001}
    assert made.authority_key not in given and made.authority_key.parent not in given


def test_root_in_a_container_is_refused(monkeypatch):
    monkeypatch.setenv("FEDREC_CONTAINER", "1")
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    check_container_user()
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(EngineError, match="must not run as root"):
        check_container_user()


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


# A deployment in real containers: up, register, run, killed containers, reported failures, no root,
# down.

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def composed(small, tmp_path_factory):
    command = skip_without_an_engine()
    made = Composed(tmp_path_factory.mktemp("containers") / "d", small(), command)
    try:
        made.done("up", "--detach", "--no-build", timeout=400)
        made.wait_until(lambda: made.well() >= {"superlink", "serverapp", "gateway"}, "the server")
        status, output = made.operator("register", "/deployment")
        assert status == 0 and output.count("node-") == 2, output
        made.wait_until(lambda: len(made.well()) == 7, "that all containers are healthy")
        yield made
    finally:
        status, output = made.down()
        assert status == 0, output
        left = subprocess.check_output(["docker", "ps", "-aq", "--filter", f"name={made._project}"])
        assert not left.strip()


@pytest.mark.containers
def test_a_run_gives_the_parameters_of_a_simulation(composed, tmp_path):
    status, output = composed.run("first")
    assert status == 0 and "hits@5" in output.lower(), output
    page = f"{RUNS}/first/report.html"  # as the operator is told to call it
    status, output = composed.compose(
        "run", "--rm", "-T", "operator", "report", f"{RUNS}/first", "-o", page
    )
    assert status == 0, output
    found = parameters_in(composed.copy("first", tmp_path / "first"))
    assert (tmp_path / "first" / "report.html").stat().st_size > 10_000
    assert_close(found, composed.simulated(tmp_path / "simulated"), **CLOSE)


@pytest.mark.containers
def test_no_container_is_root_or_may_write_to_the_image(composed):
    for service in ("superlink", "serverapp", "gateway", "supernode-1", "clientapp-1"):
        _, output = composed.compose(
            "exec", "-T", service, "sh", "-c", "id -u; touch /x 2>&1; cat /proc/self/status"
        )
        assert output.splitlines()[0] not in ("", "0") and "Read-only file system" in output, (
            service,
            output,
        )
        assert "CapEff:\t0000000000000000" in output, service
    status, _ = composed.compose("exec", "-T", "supernode-1", "ls", "/data")
    assert status != 0  # the container with a network connection does not see the data


@pytest.mark.containers
def test_an_executor_of_a_node_is_killed_in_mid_round(composed):
    before = composed.container("clientapp-1")["RestartCount"]
    running = composed.start_run("killed-node", "rounds=12", "engine.timeout=40")
    composed.wait_until(lambda: composed.rounds("killed-node") >= 2, "round 2")
    composed.kill("clientapp-1")
    output, _ = running.communicate(timeout=400)
    assert running.returncode == 0, output
    assert composed.rounds("killed-node") == 12
    assert composed.is_back("clientapp-1", before)


@pytest.mark.containers
def test_the_server_app_is_killed_in_mid_round_and_its_run_resumed(composed, tmp_path):
    running = composed.start_run("killed-server", "rounds=25")
    composed.wait_until(lambda: composed.rounds("killed-server") >= 2, "round 2")
    composed.kill("serverapp")
    output, _ = running.communicate(timeout=400)
    assert (
        running.returncode != 0 and "the run did not finish" in output and "deploy resume" in output
    ), output
    composed.wait_until(lambda: "serverapp" in composed.well(), "the executor's return")
    assert composed.rounds("killed-server") < 25
    status, output = composed.operator(
        "resume", "/deployment", f"{RUNS}/killed-server", timeout=400
    )
    assert status == 0, output
    whole = composed.simulated(tmp_path / "simulated", "rounds=25")
    found = parameters_in(composed.copy("killed-server", tmp_path / "run"))
    assert_close(found, whole, **CLOSE)


@pytest.mark.containers
def test_why_a_server_app_failed_reaches_the_operator(composed):
    status, output = composed.run("too-many-nodes", "engine.nodes=5", "engine.timeout=5")
    assert status != 0 and "too few nodes" in output and "at least 5" in output, output
    (composed.path / "broken.yml").write_text(
        "services: {serverapp: {environment: {FLWR_HOME: /nowhere}}}\n"
    )
    files = ("-f", "docker-compose.yml", "-f", OFTEN, "-f", "broken.yml")
    try:
        composed.done(*files, "up", "--detach", "--no-build", "serverapp")
        status, output = composed.run("no-home")
        assert status != 0 and "Read-only file system" in output, output
    finally:
        composed.done("up", "--detach", "--no-build")


@pytest.mark.containers
def test_root_is_refused(composed):
    for part in ("superlink", "supernode-1"):
        status, output = composed.compose("run", "--rm", "-T", "--no-deps", "--user", "0", part)
        assert status != 0 and "must not run as root" in output, output
        assert "Traceback" not in output, output
