# SPDX-License-Identifier: Apache-2.0
"""What is told before training: the nodes' training paths, and user features that the data lack."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from fedrec.components import registry
from fedrec.components.registry import STEP, resolve
from fedrec.experiment.schema import Experiment
from fedrec.kernel.compiled import is_compiled
from server.cohort import Roster

# Reports the nodes' training paths, and compiles what is not in the cache.


_COMPILED = {
    "train_clients": "the kernel, once on this machine (half a minute to a minute)",
    "train_additive": "the kernel of FedRAP, once on this machine (about 4 s)",
}
"""Texts for the user, by the name of a compiled function."""


def announce_paths(roster: Roster, steps: Iterable[str], tell: Callable[[str], None]) -> None:
    """Report the path of each step; nothing if nodes do not report it.

    Args:
        roster: the nodes, with the reply of each.
        steps: names of the experiment's steps; what nodes report of others compiles nothing.
        tell: prints a line for the user.
    """
    reported = dict.fromkeys(
        pair for presence in roster.presences for pair in presence.paths.items()
    )
    if not reported:
        return
    tell("training paths: " + ", ".join(f"step {step}: {path}" for step, path in reported))
    # in this process, before several nodes of this machine do it at once; other paths need not
    # wait for the import of Numba
    in_kernel = [step for step in steps if (step, "kernel") in reported]
    needed = {name for step in in_kernel for name in resolve(STEP, step).kernels}
    for name, text in _COMPILED.items():
        if name in needed and not is_compiled(name):
            from fedrec.training.kernel import compile_kernel

            tell(f"compiling {text}")
            compile_kernel(name)


# Warns before training if a model represents users by features that the data do not have.

log = logging.getLogger("fedrec")


def warn_without_user_features(experiment: Experiment, parameters: Iterable[str]) -> None:
    """Log a warning where the shared model would rank alike for all users.

    Args:
        experiment: the experiment; `model.features = false` is a choice, and no warning is due.
        parameters: names of the model's parameters.
    """
    model = registry.resolve(registry.MODEL, experiment.model.name)
    chosen = not getattr(experiment.settings(registry.MODEL), "features", True)
    if not model.by_features or chosen:
        return
    if not any(name.startswith("user.") for name in parameters):
        log.warning(
            "model %r represents users by features, and these data have none: the shared model"
            " ranks alike for all users. Add dataset.user-features, or take a model without"
            " features, such as item-weights (fedrec try TABLE.csv) or mf",
            experiment.model.name,
        )
