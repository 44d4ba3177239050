# SPDX-License-Identifier: Apache-2.0
"""The commands of a deployment that need no processes: the files of `init`, and refusals."""

import json
import stat
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedrec.errors import DataError, EngineError, ExperimentError, RunError
from fedrec.experiment.loading import load
from simulations.cli import app
from simulations.deployment import client, launch, operator
from simulations.deployment.client import client_processes, plan_of, prepare
from simulations.deployment.initialise import add_nodes
from simulations.deployment.layout import Deployment, DeploymentConfig
from simulations.deployment.pki.keys import private_folder
from simulations.deployment.processes.commands import node_process, server_processes


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


def test_another_folder_is_no_deployment(tmp_path):
    with pytest.raises(RunError, match="fedrec deploy init"):
        Deployment(tmp_path)


def test_more_nodes_than_the_gateway_serves_are_refused_before_a_key_is_made(made):
    files = sorted(made.path.rglob("*"))
    done = CliRunner().invoke(app, ["deploy", "add-nodes", str(made.path), "1000000000"])
    assert isinstance(done.exception, ExperimentError) and "4096" in str(done.exception)
    assert sorted(made.path.rglob("*")) == files and Deployment(made.path).settings.nodes == 3


def test_nodes_may_be_added(made):
    CliRunner().invoke(app, ["deploy", "add-nodes", str(made.path), "2"])
    grown = Deployment(made.path)
    assert grown.settings.nodes == 5
    assert all((folder / "node.key").is_file() for folder in grown.node_folders())


CATALOGUE = {"items": ["x", "y"], "item-features": [], "user-features": [], "rated": False}


@pytest.fixture
def shards(made):
    """The deployment with data on nodes 1 and 2, and a catalogue on node 1."""
    for number in (1, 2):
        (made.node(number) / "data.csv").write_text("user,item\na,x\na,y\n")
    catalogue = {**CATALOGUE, "timed": False, "name": "letters"}
    (made.node(1) / "catalogue.json").write_text(json.dumps(catalogue))
    return made


def test_added_nodes_and_older_ones_get_the_catalogue(shards):
    CliRunner().invoke(app, ["deploy", "add-nodes", str(shards.path), "1"])
    grown = Deployment(shards.path)
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
    operator.run_nodes_here(shards)
    assert [process.name for process in started] == [
        f"node-{number}/{part}" for number in (1, 4) for part in ("supernode", "executor")
    ]
    assert "--port 19103" in " ".join(started[2].command)  # its own, whoever is left out
    said = capsys.readouterr().err
    assert "node-2 is not started" in said and "no item of the catalogue" in said
    assert "node-3" not in said


def test_up_waits_for_the_nodes_with_data_and_refuses_wrong_ones(shards, monkeypatch):
    add_nodes(shards, 0)
    waited = []
    monkeypatch.setattr(operator, "supervisor_of", lambda _: 1)
    monkeypatch.setattr(operator, "_wait_for", lambda *_: None)
    monkeypatch.setattr(operator, "register_nodes", lambda _: {})
    monkeypatch.setattr(operator, "_wait_for_nodes", lambda _, count, __: waited.append(count))
    operator.up(shards)
    assert waited == [2]  # of three
    (shards.node(1) / "data.csv").write_text("user,thing\na,x\n")
    with pytest.raises(DataError, match="item"):
        operator.up(shards)


@pytest.mark.parametrize(
    ("rows", "words"),
    [("user,item\na,z\n", "no item of the catalogue"), ("user,thing\na,x\n", "'item'")],
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
    for flag in (
        "--host 127.0.0.1",
        "--enable-supernode-auth",
        "--isolation process",
        "--superexec-auth-secret-file",
    ):
        assert flag in text
    assert "--insecure" not in text and "--superexec-auth-secret-file" in executor.command
    assert "--upstream 127.0.0.1:18000" in " ".join(gateway.command)
    (nodes,) = node_process(made)
    assert nodes.after == made.registered and not made.registered.exists()


def test_nothing_runs_before_up(made):
    assert operator.supervisor_of(made) is None and operator.down(made) is False
    assert all(state.pid is None and not state.healthy for state in operator.states(made))


def test_a_clients_two_processes_meet_over_tls_and_only_one_has_the_key(made, tmp_path):
    (tmp_path / "mine.csv").write_text("user,item\na,b\n")
    plan = plan_of(
        made.node(2), made.gateway, data=tmp_path / "mine.csv", settings=["most-rounds=7"]
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


def test_a_client_reports_errors_before_it_starts(made, tmp_path):
    with pytest.raises(DataError, match="no data file"):
        prepare(plan_of(made.node(1), made.gateway, data=tmp_path / "none.csv"))
    with pytest.raises(DataError, match="no data file"):  # otherwise the server would choose one
        prepare(plan_of(made.node(1), made.gateway))
    with pytest.raises(ExperimentError, match=r"node\.most-rounds"):
        prepare(
            plan_of(made.node(1), made.gateway, data=Path(__file__), settings=["most-rounds=-1"])
        )
    with pytest.raises(EngineError, match="the folder of a node"):
        prepare(plan_of(tmp_path, made.gateway))
    (made.node(1) / "node.key").chmod(0o644)
    with pytest.raises(EngineError, match="chmod 600"):
        prepare(plan_of(made.node(1), made.gateway))


def test_an_experiment_on_a_deployment_has_no_baselines_and_outlives_nodes(tiny_experiment):
    settled = launch.settled(tiny_experiment())
    assert settled.evaluation.baselines == ()
    assert settled.engine.name == "flower"
    assert settled.evaluation.every == 0
    assert launch.settled(tiny_experiment(), ["evaluation.every=5"]).evaluation.every == 5
    assert settled.engine.timeout == launch.DEADLINE
    assert settled.engine.max_failures == launch.MOST_FAILURES
    own = launch.settled(tiny_experiment(), ["engine.timeout=7.0", "engine.max-failures=0.1"])
    assert own.engine.timeout == 7.0 and own.engine.max_failures == 0.1
    assert own.strategy == load(tiny_experiment()).strategy


def test_nodes_know_a_run_by_a_key_that_a_resumed_run_has_and_a_new_one_has_not(
    tiny_experiment, tmp_path
):
    from fedrec.runs.folder import RunFolder

    one, other = (
        RunFolder.create(launch.settled(tiny_experiment()), tmp_path / name) for name in "ab"
    )
    assert launch.run_key(one) == launch.run_key(RunFolder(tmp_path / "a")) != launch.run_key(other)


def test_the_flower_bundle_has_a_place_for_what_a_deployment_sends():
    from pathlib import Path

    with open(Path(__file__).resolve().parents[3] / "pyproject.toml", "rb") as file:
        keys = tomllib.load(file)["tool"]["flwr"]["app"]["config"]
    assert {"resolved", "output", "deployment", "run"} <= keys.keys()


@pytest.mark.parametrize(
    "host", ["", "exämple.org", "-x.org", "a b", "a" * 64, "x;y", "fl.example.org."]
)
def test_an_invalid_host_is_refused_and_leaves_nothing(tmp_path, host):
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "d"), "--host", host])
    assert isinstance(done.exception, ExperimentError) and "deployment.hosts" in str(done.exception)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bind", "999.1.1.1"], "deployment.bind"),
        (["--host", "10.0.0.256"], "deployment.hosts"),
        (["--port", "9000", "--superlink-port", "9000"], "different ports"),
        (["--port", "19101"], "different ports"),
        (["--superlink-port", "19100"], "different ports"),
        (["--node-port", "65535"], "up to 65535"),
    ],
)
def test_addresses_and_ports_that_cannot_be_are_refused(tmp_path, arguments, words):
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "d"), *arguments])
    assert isinstance(done.exception, ExperimentError) and words in str(done.exception)
    assert not (tmp_path / "d").exists()


def test_nodes_on_other_machines_have_ports_of_their_own():
    assert DeploymentConfig.parse({"port": 19101, "local-nodes": False}).port == 19101


def test_init_refuses_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "file")])
    assert isinstance(done.exception, RunError) and done.exception.got == "a file"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "host", ["fl.example.org", "10.0.0.1", "::1", "xn--exmple-cua.org", "localhost"]
)
def test_hosts_that_can_be(host):
    assert DeploymentConfig.parse({"hosts": [host]}).hosts == (host,)


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
