# SPDX-License-Identifier: Apache-2.0
"""Reports the nodes' training paths, and compiles the kernel if it is not in the cache."""

from __future__ import annotations

from collections.abc import Callable

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
    if any(path == "kernel" for _, path in said):
        _compile(tell)


def _compile(tell: Callable[[str], None]) -> None:
    """Compile in this process, before several nodes of this machine do it at once."""
    from fedrec.runtime.compilation import (
        is_compiled,  # Numba, which other paths need not wait for
    )

    if not is_compiled():
        from fedrec.cohort.kernel.warm_up import compile_kernel

        tell("compiling the kernel, once on this machine (about 15 s)")
        compile_kernel()
