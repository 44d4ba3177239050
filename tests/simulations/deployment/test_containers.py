# SPDX-License-Identifier: Apache-2.0
"""A deployment in real containers: up, register, run, killed containers, reported failures, no
root, down."""

import subprocess

import pytest

from tests.runs import assert_close, parameters_in
from tests.simulations.deployment.composed import (
    IMAGE,
    OFTEN,
    RUNS,
    Composed,
    skip_without_an_engine,
)

pytestmark = pytest.mark.containers
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


def test_an_executor_of_a_node_is_killed_in_mid_round(composed):
    before = composed.container("clientapp-1")["RestartCount"]
    running = composed.start_run("killed-node", "rounds=12", "engine.timeout=40")
    composed.wait_until(lambda: composed.rounds("killed-node") >= 2, "round 2")
    composed.kill("clientapp-1")
    output, _ = running.communicate(timeout=400)
    assert running.returncode == 0, output
    assert composed.rounds("killed-node") == 12
    assert composed.is_back("clientapp-1", before)


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


def test_root_is_refused(composed):
    for part in ("superlink", "supernode-1"):
        status, output = composed.compose("run", "--rm", "-T", "--no-deps", "--user", "0", part)
        assert status != 0 and "do not run as root" in output and "Traceback" not in output, output


def test_the_image_is_less_than_half_of_what_it_was():
    skip_without_an_engine()
    size = subprocess.check_output(["docker", "image", "inspect", "-f", "{{.Size}}", IMAGE])
    assert int(size) < 1.1e9
    look = (
        "import importlib.util as i; print([n for n in ('ray', 'pip', 'pytest', 'pyright') if"
        " i.find_spec(n)])"
    )
    inside = ["docker", "run", "--rm", "--entrypoint", "python", IMAGE, "-c", look]
    assert subprocess.check_output(inside, text=True).strip() == "[]"
    shell = ["docker", "run", "--rm", "--entrypoint", "sh", IMAGE, "-c"]
    which = [*shell, "command -v gcc cc ld strip || echo none"]
    assert subprocess.check_output(which, text=True).strip() == "none"
