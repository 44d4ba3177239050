# SPDX-License-Identifier: Apache-2.0
"""Reports the nodes' training paths, and compiles what is not in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedrec.protocol.orders import COMPILED_LOSS
from server.cohorts.roster import Roster


def announce_paths(roster: Roster, tell: Callable[[str], None]) -> None:
    """Report the path of each step; nothing where nodes do not report it.

    Args:
        roster: the nodes, with the reply of each.
        tell: prints a line for the user.
    """
    said = dict.fromkeys(pair for presence in roster.presences for pair in presence.paths.items())
    if not said:
        return
    tell("training paths: " + ", ".join(f"step {step}: {path}" for step, path in said))
    # Compiled in this process, before several nodes of this machine do it at once. Other paths need
    # not wait for the import of Numba.
    if any(path == "kernel" for _, path in said):
        _compile_kernel(tell)
    if any(path.endswith(COMPILED_LOSS) for _, path in said):
        _compile_losses(tell)


def _compile_kernel(tell: Callable[[str], None]) -> None:
    from fedrec.runtime.compiled_code import is_compiled

    if not is_compiled():
        from fedrec.cohort.kernel.warm_up import compile_kernel

        tell("compiling the kernel, once on this machine (half a minute to a minute)")
        compile_kernel()


def _compile_losses(tell: Callable[[str], None]) -> None:
    from fedrec.models import sequential
    from fedrec.runtime.compiled_code import is_compiled

    if not is_compiled(Path(*sequential.__path__)):
        from fedrec.models.sequential._native import compile_losses

        tell("compiling the loss, once on this machine (about 25 s)")
        compile_losses()
