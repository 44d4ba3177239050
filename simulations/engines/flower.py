# SPDX-License-Identifier: Apache-2.0
"""The flower engine: the same experiment through `flwr run`, on Flower's own simulation.

`flwr run` hands the app bundle to a SuperLink, which by default is a daemon that outlives the
command, keeps the environment of its first start, is shared by all users of the machine, and
reinstalls the project's dependencies for each run. Here every run has its own SuperLink on a free
port, with its own home folder, that ends with the run. `flwr run` may exit with 0 although the run
failed, so the run folder determines how it ended.

The SuperLink listens on loopback, but without authentication, which Flower does not have for
operators. During the run, other users of the same machine can start runs on it, whose code is
executed as this user.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from fedrec.errors import EngineError, RunError
from fedrec.runs.folder import Result, RunFolder
from server.callbacks import Callback, RunEvent
from simulations.engines.ray import settings_of_a_local_ray
from simulations.flower_commands import (
    connection,
    environment_with,
    groups_below,
    groups_end,
    is_healthy,
    last_lines,
    script,
    signal_groups,
)

_SUPERLINK_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_PACKAGES = ("fedrec", "clients", "server", "strategies", "simulations")


def launch(run: RunFolder, callbacks: Sequence[Callback] = ()) -> Result:
    """Run the remaining part of a run folder through `flwr run`, and wait for its end.

    Callbacks are called after each round but cannot end the run.

    Raises:
        EngineError: the SuperLink did not start, or the run failed; carries the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="fedrec-flower-") as scratch:
        port = _free_port()
        environment = _environment(Path(scratch) / "home", port)
        config = {"experiment": str(run.path / "experiment.toml"), "output": str(run.path)}
        command = flwr_run(Path(scratch), config)
        command += ["--stream", "--federation-config", _federation(run)]
        with _superlink(run, environment, port):
            with open(run.path / "flower.txt", "ab") as log:
                process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, cwd=run.path
                )
            _wait(process, run, RunWatch(run, callbacks))
    if run.status()["state"] != "finished":
        raise EngineError(
            "the Flower run failed",
            got=f"state {run.status()['state']!r} after round {run.status()['round']}\n"
            + (_last_error(run) or last_lines(run.path / "flower.txt")),
            fix=f"see {run.path / 'flower.txt'} and {run.log_file}; the run can be resumed",
        )
    result = run.read_result()
    for callback in callbacks:
        callback.on_end(result)
    return result


def flower_home(folder: Path, address: str, authority: Path | None = None) -> dict[str, str]:
    """Create the home of Flower's commands for the SuperLink at HOST:PORT, and return the variable
    that names it; for `authority` see `connection`."""
    folder.mkdir(mode=0o700)
    (folder / "config.toml").write_text(connection(address, authority), encoding="utf-8")
    return {"FLWR_HOME": str(folder)}


def flwr_run(scratch: Path, config: Mapping[str, Any]) -> list[str]:
    """Command that submits the app bundle with a run configuration to a SuperLink; both are copied
    into a scratch folder."""
    file = scratch / "run.toml"  # as a path in the configuration may contain any characters
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    app = _app_folder(scratch / "fedrec")
    return [script("flwr"), "run", str(app), "fedrec", "-c", str(file)]


def _federation(run: RunFolder) -> str:
    engine = run.experiment.engine
    nodes = engine.nodes or 1
    gpus = 1 / nodes if engine.device.startswith("cuda") else 0
    return (
        f"num-supernodes={nodes} client-resources-num-cpus=1 client-resources-num-gpus={gpus}"
        f" init-args-num-cpus={nodes}"
    )


@contextmanager
def _superlink(run: RunFolder, environment: dict[str, str], port: int) -> Iterator[None]:
    """Start a SuperLink for this run only."""
    command = [script("flower-superlink"), "--simulation", "--insecure", "--port", str(port)]
    command.append("--disable-runtime-dependency-installation")
    with open(run.path / "flower.txt", "ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=run.path, start_new_session=True
        )
    try:
        _wait_until_healthy(process, port, run)
        yield
    finally:
        _stop_group(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, run: RunFolder) -> None:
    deadline = time.monotonic() + _SUPERLINK_START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if is_healthy(f"http://127.0.0.1:{port}/health"):
            return
        time.sleep(0.2)
    raise EngineError(
        "Flower's SuperLink did not start",
        expected=f"an answer on port {port} within {_SUPERLINK_START_SECONDS:.0f} s",
        got=last_lines(run.path / "flower.txt"),
        fix="use --engine ray or --engine serial, which need no SuperLink",
    )


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a SuperLink and its child processes (executor, ServerApp, Flower's Ray), which are in a
    separate session and would continue the run."""
    groups = groups_below(process.pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        signal_groups(groups, sign)
        try:
            process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        if groups_end(groups, _STOP_SECONDS):
            break
    process.wait()


def _wait(process: subprocess.Popen[bytes], run: RunFolder, watch: RunWatch) -> None:
    """Wait for the end of `flwr run`."""
    try:
        while process.poll() is None and run.status()["state"] not in ("finished", "failed"):
            watch.look()
            time.sleep(0.5)
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        pass  # the run folder already says how the run ended
    finally:
        watch.look()
        if process.poll() is None:
            process.kill()
            process.wait()


class RunWatch:
    """Watches a run folder, and calls callbacks for the rounds that a ServerApp writes.

    Args:
        folder: the run folder.
        callbacks: called at the start, after each round, and before the final evaluation.
    """

    def __init__(self, folder: RunFolder, callbacks: Sequence[Callback]) -> None:
        self._folder = folder
        self._callbacks = callbacks
        self._reported = folder.status()["round"]
        self._started = False

    def look(self) -> None:
        """Report new rounds; rows that are still being written are reported later."""
        with suppress(RunError):
            status = self._folder.status()
            rounds = self._folder.experiment.rounds
            if not self._started and status["state"] != "created":
                self._started = True
                for callback in self._callbacks:
                    callback.on_start(self._folder, self._reported + 1, rounds)
            table = self._folder.read_rounds()
            for row in table.iloc[self._reported :].to_dict("records"):
                self._reported += 1
                for callback in self._callbacks:
                    callback.after_round({str(key): row[key] for key in row}, 0.0)
                    if self._reported == rounds:
                        callback.on_event(RunEvent("evaluating on the nodes"))


def _app_folder(folder: Path) -> Path:
    """Copy the files that the app bundle needs; Flower requires a folder named like the project."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "pyproject.toml").is_file():
        raise EngineError(
            "the flower engine needs fedrec's source tree",
            expected=f"pyproject.toml in {root}",
            fix="clone the project and `pip install -e .`, or use --engine ray",
        )
    for package in _PACKAGES:
        shutil.copytree(
            root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, folder / name)
    return folder


def _environment(home: Path, port: int) -> dict[str, str]:
    """Environment of Flower's processes, with a home and a connection for this run only. The user's
    settings for Ray are for a cluster; Flower starts a Ray for this run."""
    variables = flower_home(home, f"127.0.0.1:{port}")
    return environment_with({**settings_of_a_local_ray(), **variables})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _last_error(run: RunFolder) -> str:
    """Error that ended the run, from its log; empty if there was none."""
    file = run.log_file
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    starts = [number for number, line in enumerate(lines) if line[24:30] == "ERROR "]
    return "\n".join([lines[starts[-1]][30:], *lines[starts[-1] + 1 :]]) if starts else ""
