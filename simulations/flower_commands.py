# SPDX-License-Identifier: Apache-2.0
"""Flower's commands in this process or as processes of their own, without telemetry."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

from fedrec.errors import EngineError

# Switches off telemetry and automatic installations of Flower and Ray, unless the user has set
# them.

_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def disable_telemetry(environment: MutableMapping[str, str]) -> None:
    """Set the switches that an environment does not set already."""
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)


def load(name: str) -> Callable[[], None]:
    """The function of one of Flower's commands, such as `flower-superlink`: a console script that
    its package declares."""
    return distribution("flwr").entry_points.select(name=name)[name].load()


def run(name: str, arguments: Sequence[str]) -> None:
    """Run a command in this process with arguments, as a terminal would."""
    command = load(name)
    sys.argv = [name, *arguments]
    command()


def script(name: str) -> str:
    """The path of one of Flower's commands.

    Raises:
        EngineError: it is not installed.
    """
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise EngineError(
            f"missing command {name!r}", expected="Flower's commands", fix="pip install flwr"
        )
    return path


def environment_with(values: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that starts Flower's commands by their names, in a working
    directory of its own: this process's, without telemetry, and with some values."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, **values}
    disable_telemetry(environment)
    if "FEDREC_DATA" in environment:
        environment["FEDREC_DATA"] = str(Path(environment["FEDREC_DATA"]).resolve())
    return environment


def connection(address: str, authority: Path | None = None) -> str:
    """Flower's configuration of how its commands reach the SuperLink at HOST:PORT: over TLS, with
    the certificate of an authority, or unprotected on this machine."""
    trust = "insecure = true" if authority is None else f'root-certificates = "{authority}"'
    return (
        f'[superlink]\ndefault = "fedrec"\n\n[superlink.fedrec]\naddress = "{address}"\n{trust}\n'
    )


def last_lines(file: Path, lines: int = 12) -> str:
    """The end of a log."""
    text = file.read_text(errors="replace") if file.exists() else ""
    return "\n".join(text.splitlines()[-lines:]) or "no log"
