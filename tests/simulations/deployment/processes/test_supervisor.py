# SPDX-License-Identifier: Apache-2.0
"""The supervisor: restarts processes that end, waits for required files, leaves nothing behind."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulations.deployment.federation import until
from tests.simulations.listening import parent_of

SLEEPER = "import subprocess, sys, time; print('up', flush=True); "
SLEEPER += (
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
)
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
SUPERVISE = f"""
import sys
from pathlib import Path
from simulations.deployment.processes.commands import Process
from simulations.deployment.processes.supervisor import Supervisor
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
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
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
