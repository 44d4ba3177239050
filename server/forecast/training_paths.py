# SPDX-License-Identifier: Apache-2.0
"""Reports the nodes' training paths, and compiles what is not in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedrec.components.registry import STEP, resolve
from fedrec.protocol.orders import COMPILED, COMPILED_LOSS, COMPILED_RECURRENCE
from server.cohorts.roster import Roster

_KERNELS = {
    "train_clients": "the kernel, once on this machine (half a minute to a minute)",
    "move_by_meta_gradients": "the kernel of meta-learning, once on this machine (about 20 s)",
    "train_additive": "the kernel of FedRAP, once on this machine (about 4 s)",
}


def announce_paths(roster: Roster, steps: Iterable[str], tell: Callable[[str], None]) -> None:
    """Report the path of each step; nothing where nodes do not report it.

    Args:
        roster: the nodes, with the reply of each.
        steps: names of the experiment's steps; what nodes report of others compiles nothing.
        tell: prints a line for the user.
    """
    said = dict.fromkeys(pair for presence in roster.presences for pair in presence.paths.items())
    if not said:
        return
    tell("training paths: " + ", ".join(f"step {step}: {path}" for step, path in said))
    # Compiled in this process, before several nodes of this machine do it at once. Other paths need
    # not wait for the import of Numba.
    in_kernel = [step for step in steps if (step, "kernel") in said]
    needed = {name for step in in_kernel for name in resolve(STEP, step).kernels}
    for name, text in _KERNELS.items():
        if name in needed:
            _compile_kernel(name, text, tell)
    for name, compile_once in _IN_BLOCKS.items():
        if any(path.endswith(COMPILED[name]) for _, path in said):
            compile_once(name, tell)


def _compile_kernel(name: str, text: str, tell: Callable[[str], None]) -> None:
    from fedrec.runtime.compiled_code import is_compiled

    if not is_compiled(function=name):
        from fedrec.cohort.kernel.warm_up import compile_kernel

        tell(f"compiling {text}")
        compile_kernel(name)


def _compile_losses(name: str, tell: Callable[[str], None]) -> None:
    from fedrec.models import sequential
    from fedrec.runtime.compiled_code import is_compiled

    if not is_compiled(Path(*sequential.__path__), name):
        from fedrec.models.sequential._native import compile_losses

        tell("compiling the loss, once on this machine (about 25 s)")
        compile_losses()


def _compile_recurrence(name: str, tell: Callable[[str], None]) -> None:
    from fedrec.nn import native
    from fedrec.runtime.compiled_code import is_compiled

    if not is_compiled(Path(*native.__path__), name):
        from fedrec.nn.native.recurrence import compile_recurrence

        tell("compiling the recurrence, once on this machine (about 10 s)")
        compile_recurrence()


_IN_BLOCKS: Mapping[str, Callable[[str, Callable[[str], None]], None]] = {
    COMPILED_LOSS: _compile_losses,
    COMPILED_RECURRENCE: _compile_recurrence,
}
