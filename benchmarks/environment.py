# SPDX-License-Identifier: Apache-2.0
"""The environment of processes that benchmarks start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def child_environment(**values: str) -> dict[str, str]:
    """This process's environment with some values, and this checkout first on the search path."""
    search = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search), **values}
