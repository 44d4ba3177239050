# SPDX-License-Identifier: Apache-2.0
"""Environment of a run: versions of packages, Python and the machine."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """The machine and the installed packages, for a run folder."""
    packages = ("fedrec", "flwr", "ray", "torch", "numpy", "numba", "pandas", "autodp", "pydantic")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "commit": commit(),
        "packages": {name: installed_version(name) for name in packages},
    }


@functools.cache
def commit() -> str | None:
    """Short name of the commit that is checked out, with a plus if files differ from it; None where
    fedrec is not run from a checkout of its own."""
    git = ["git", "-C", str(_ROOT)]
    command = [*git, "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        if not (_ROOT / ".git").exists():
            return None
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of an installed package; None where it is missing.

    Asked once in a process: what an installed package says of itself takes milliseconds to parse.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
