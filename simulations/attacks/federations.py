# SPDX-License-Identifier: Apache-2.0
"""Federations of an attack: experiments derived from the attacked one, each run once in its own
folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.loading import load
from fedrec.experiment.schema import Experiment
from fedrec.rng import seed_sequence
from fedrec.runs.folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from clients.hosting.node import Node

_BLOCK = 256  # users whose scores of the whole catalogue are in memory at a time

QUICK = {"every": 0, "users": 1, "final-users": 1, "fine-tune": {"epochs": 0}}
"""Minimal evaluation settings, for federations whose metrics are not needed."""


def derived(
    experiment: Experiment, name: str, seed: int, changes: Mapping[str, Any], **evaluation: Any
) -> Experiment:
    """Another experiment like this one.

    Args:
        experiment: the attacked experiment, resolved.
        name: added to its name.
        seed: of the new one.
        changes: whole sections, by name.
        evaluation: keys of its evaluation (kebab-case); baselines are always left out.
    """
    table = experiment.table()
    judged = {**table["evaluation"], "baselines": [], **evaluation}
    return load(
        {
            **table,
            "name": f"{experiment.name}-{name}",
            "seed": seed,
            "evaluation": judged,
            **changes,
        }
    )


def seed_of(experiment: Experiment, name: str, number: int) -> int:
    """A seed for one of several derived experiments."""
    return int(
        seed_sequence(experiment.seed, name, number).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )


def section(experiment: Experiment, kind: str) -> dict[str, Any]:
    """A section as a table: name and settings."""
    found = getattr(experiment, kind)
    return {"name": found.name, **found.options}


def parameters_of(run: RunFolder) -> dict[str, np.ndarray]:
    """Global parameters that a run ended with.

    Raises:
        RunError: there is no checkpoint.
    """
    from server.checkpoint import Checkpoints
    from server.early_stopping import ending

    state = Checkpoints.of(run).latest()
    if state is None:
        raise RunError(
            f"{run.path} has no checkpoint",
            expected="the parameters after the last round",
            got="none",
        )
    return ending(state)[1]


def scores_of(
    experiment: Experiment,
    parameters: Mapping[str, np.ndarray],
    users: np.ndarray,
    *,
    fine_tune: bool,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Scores of the catalogue for some users by a system.

    Args:
        experiment: the attacked experiment (its data and model; `engine.device` and `threads` are
            used).
        parameters: global parameters of the system.
        users: `int64 [users]`.
        fine_tune: whether each user first fine-tunes on its own data, as in the experiment's
            evaluation.

    Yields:
        A block of the users, and `float32 [block, items]`.
    """
    from clients.evaluation import client_scores
    from clients.hosting.node import Node
    from clients.training.one_client import to_device
    from fedrec.experiment.sections import Section

    node = Node(experiment, 0, 1, None)
    tuned = experiment.fine_tune_step()
    step = node.step(
        tuned
        if fine_tune
        else Section.model_validate({**tuned.options, "name": tuned.name, "epochs": 0})
    )
    if step.private_names(list(parameters)):
        raise ExperimentError(
            "private parameters cannot be attacked",
            expected="a system whose parameters are all shared",
            got=", ".join(step.private_names(list(parameters))),
            fix="--set step.private-parameters=[]",
        )
    own = to_device(parameters, node.device)
    for start in range(0, len(users), _BLOCK):
        part = users[start : start + _BLOCK]
        if node.model.generated:
            scores = _generated_scores(node, own, part)
        else:
            scores = client_scores(node, step, own, part, experiment.rounds)
        yield part, scores.cpu().numpy()


def _generated_scores(node: Node, parameters: Mapping[str, Tensor], users: np.ndarray) -> Tensor:
    """Scores of the catalogue, `float32 [users, items]`, with the parameters that the server
    generates for each."""
    import torch

    from fedrec.models.metamf import generate

    with torch.no_grad():
        values, low = generate(parameters, torch.from_numpy(users.copy()).to(node.device), None)
        return node.model.scores({**values, "item.low": low}, ())
