# SPDX-License-Identifier: Apache-2.0
"""Flower's commands in this process or in separate ones, without telemetry; process groups and
their health, also as a program for the health checks of containers:

    python -m simulations.flower_commands answers URL AUTHORITY
    python -m simulations.flower_commands alive FOLDER

A container is checked every few seconds, so little is imported here: the command line of fedrec
takes a second of a core to start.
"""

import os
import shutil
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

from fedrec.errors import EngineError
from fedrec.runtime.files import read_json

# Variables that switch off telemetry and automatic installations of Flower and Ray by default.

_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def disable_telemetry(environment: MutableMapping[str, str]) -> None:
    """Set the variables that an environment does not set."""
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)


def load(name: str) -> Callable[[], None]:
    """Load the function of one of Flower's commands (console scripts), such as
    `flower-superlink`."""
    return distribution("flwr").entry_points.select(name=name)[name].load()


def run(name: str, arguments: Sequence[str]) -> None:
    """Run a command with arguments in this process."""
    command = load(name)
    sys.argv = [name, *arguments]
    command()


def script(name: str) -> str:
    """Path of one of Flower's commands.

    Raises:
        EngineError: the command is not installed.
    """
    installed = Path(sys.executable).parent / name
    path = str(installed) if installed.exists() else shutil.which(name)
    if path is None:
        raise EngineError(
            f"missing command {name!r}", expected="Flower's commands", fix="pip install flwr"
        )
    return path


def environment_with(values: Mapping[str, str]) -> dict[str, str]:
    """Environment of a process that starts Flower's commands by name in another working directory:
    this process's without telemetry, updated with values."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, **values}
    disable_telemetry(environment)
    if "FEDREC_DATA" in environment:
        environment["FEDREC_DATA"] = str(Path(environment["FEDREC_DATA"]).resolve())
    return environment


def connection(address: str, authority: Path | None = None) -> str:
    """Flower's configuration for the connection of its commands to the SuperLink at HOST:PORT: over
    TLS, with the certificate of an authority, or insecure on this machine."""
    trust = "insecure = true" if authority is None else f'root-certificates = "{authority}"'
    return (
        f'[superlink]\ndefault = "fedrec"\n\n[superlink.fedrec]\naddress = "{address}"\n{trust}\n'
    )


def last_lines(file: Path, lines: int = 12) -> str:
    """Last lines of a log."""
    text = file.read_text(errors="replace") if file.exists() else ""
    return "\n".join(text.splitlines()[-lines:]) or "no log"


# Process groups of a process and its descendants, by Linux's `/proc`.

_PAUSE = 0.05  # seconds between two checks


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    group: int


def groups_below(pid: int) -> set[int]:
    """Process groups of a process and its descendants."""
    processes = list(_processes())
    family: set[int] = set()
    more = {pid}
    while more:
        family |= more
        more = {process.pid for process in processes if process.parent in more} - family
    return {process.group for process in processes if process.pid in family} - {os.getpgrp()}


def signal_groups(groups: Iterable[int], sign: int) -> None:
    """Send a signal to process groups, except to those that have ended."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, sign)


def groups_end(groups: set[int], seconds: float) -> bool:
    """Return True if all processes of some groups end before a timeout; zombies count as ended."""
    until = time.monotonic() + seconds
    while any(process.group in groups and process.state not in "ZX" for process in _processes()):
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE)
    return True


def _processes() -> Iterator[_Process]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # it has ended
            state, parent, group, *_ = file.read_text().rsplit(")", 1)[1].split()
            yield _Process(int(file.parent.name), state, int(parent), int(group))


# Health of processes.


def is_healthy(url: str, authority: Path | None = None) -> bool:
    """Return True if a server, over TLS one with a certificate of an authority, answers."""
    context = None if authority is None else ssl.create_default_context(cafile=str(authority))
    try:
        with urllib.request.urlopen(url, timeout=3, context=context) as answer:
            return answer.status == 200
    except OSError:
        return False


def are_alive(logs: Path) -> bool:
    """Return True if all processes in the list of a supervisor's folder run."""
    try:
        running = read_json(logs / "processes.json")["processes"].values()
    except OSError:  # no supervisor runs
        return False
    return all(Path(f"/proc/{entry['pid']}").exists() for entry in running)


def main(arguments: list[str]) -> int:
    """Check health and return the exit status: 0 if healthy, else 1."""
    what, *given = arguments
    well = is_healthy(given[0], Path(given[1])) if what == "answers" else are_alive(Path(given[0]))
    return int(not well)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
