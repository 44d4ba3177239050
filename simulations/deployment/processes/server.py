# SPDX-License-Identifier: Apache-2.0
"""Main program of the server's processes: `superlink` or `executor`, with the flags of Flower's
programs."""

from __future__ import annotations

import gc
import importlib
import os
import sys

from fedrec.errors import EngineError
from simulations.deployment.flower import executors, superlink
from simulations.deployment.processes.commands import refuse_root_in_a_container
from simulations.telemetry import disable_telemetry

_LARGE = ("torch", "pandas")
"""Modules that every ServerApp imports, besides the packages of its app bundle."""


def main() -> None:
    """Run the part that the first argument names."""
    disable_telemetry(os.environ)
    try:
        refuse_root_in_a_container()
    except EngineError as error:
        sys.exit(f"error: {error.text()}")
    part, *arguments = sys.argv[1:]
    if part == "superlink":
        superlink.superlink(arguments)
        return
    for name in _LARGE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a garbage collection would write to all pages that the forks share
    executors.server_executor(arguments)


if __name__ == "__main__":
    main()
