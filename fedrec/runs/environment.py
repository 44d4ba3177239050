# SPDX-License-Identifier: Apache-2.0
"""Environment of a run: versions of packages, Python and the machine."""

from __future__ import annotations

import functools
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def environment() -> dict[str, Any]:
    """The machine and the installed packages, for a run folder."""
    packages = ("fedrec", "flwr", "ray", "torch", "numpy", "numba", "pandas", "autodp", "pydantic")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "packages": {name: installed_version(name) for name in packages},
    }


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of an installed package; None where it is missing.

    Asked once in a process: what an installed package says of itself takes milliseconds to parse.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
