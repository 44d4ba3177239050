# SPDX-License-Identifier: Apache-2.0
"""Checks of a step and a model during training, whose errors name the file of the component.

Without differential privacy, an update that is not finite is an error; with it, the update counts
as zero (`clients.sums`), so that the release does not reveal it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from clients.step import Step, private_names
from fedrec.components import registry
from fedrec.components.sections import (
    component_errors,
    finite,
    named,
    refuse_other_arrays,
    refuse_wrong,
)
from fedrec.config import did_you_mean, fits
from fedrec.errors import ClientError, ExperimentError
from fedrec.models.base import HistoryModel, Model
from fedrec.protocol.orders import TrainSum
from fedrec.protocol.updates import SparseUpdate
from fedrec.training.results import BlockChange, BlockUpdate, ChangedRows, Dense

STEP = "step"


def check_block(step: Step, trained: object, parameters: Mapping[str, Tensor], doing: str) -> None:
    """Check that a trained block has updates of known parameters, in their shapes.

    Raises:
        ComponentError: it is none, or has other parameters.
    """
    if not isinstance(trained, BlockUpdate):
        expected = "a fedrec.training.results.BlockUpdate"
        refuse_wrong(STEP, step, doing, expected=expected, got=type(trained).__name__)
        return
    if step.generated:
        return
    cohort, rows = trained.block.touched.shape
    values: dict[str, object] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, change in trained.changes.items():
        shape = tuple(parameters[name].shape) if name in parameters else None
        if not isinstance(change, BlockChange) or shape is None:
            values[name] = change  # which has none of the expected names or shapes
        elif isinstance(change, Dense):
            values[name] = change.values
            shapes[name] = (cohort, *shape)
        elif isinstance(change, ChangedRows) and change.values.dim() == 3:
            values[name] = change.values
            shapes[name] = (cohort, rows, *shape[1:])
    refuse_other_arrays(STEP, step, doing, values, shapes)


def check_finite_sum(step: Step, reply: TrainSum, clients: Sequence[int], round_: int) -> None:
    """Check that no sum has NaN or infinity.

    Raises:
        ClientError: one has; names the step, its file and the clients.
    """
    for name, change in reply.total.items():
        values = change.values if isinstance(change, SparseUpdate) else change
        if not finite(values):
            whose = (
                f"client {clients[0]}" if len(clients) == 1 else f"some of {len(clients)} clients"
            )
            raise ClientError(
                f"training diverged in round {round_}",
                expected="finite updates",
                got=f"NaN or infinity in {name!r} from {named(STEP, step)}, {whose}",
                fix="lower step.learning-rate or strategy.server-lr, or fix that file; "
                "the previous checkpoint is intact",
            )


def check_private_patterns(step: Step, names: Sequence[str]) -> None:
    """Check that each pattern of private parameters matches one, because the intended parameters
    would be sent otherwise, and that they do not match all, because nothing would be learned
    together.

    Raises:
        ExperimentError: a pattern matches none, or they match all.
    """
    for pattern in step.private:
        if not any(fits(name, (pattern,)) for name in names):
            raise ExperimentError(
                f"no parameter fits the pattern {pattern!r} of 'step.private-parameters'",
                expected="patterns of the model's parameters",
                fix=did_you_mean(pattern, names),
            )
    if step.private and not set(names) - set(private_names(step, names)):
        raise ExperimentError(
            "all parameters are private: 'step.private-parameters' leaves none to share",
            expected="patterns that leave out at least one of the model's parameters",
            got=", ".join(map(repr, step.private)),
            fix=f"the model's parameters are {', '.join(map(repr, names))}",
        )


@contextmanager
def settings_at(key: str) -> Iterator[None]:
    """Errors about the settings of a step name them by the key of the step's table, such as
    `evaluation.fine-tune.rates` for `step.rates`."""
    try:
        yield
    except ExperimentError as error:
        texts = (error.problem, error.expected, error.got, error.fix)
        problem, *rest = (re.sub(r"\bstep\.", f"{key}.", text or "") or None for text in texts)
        expected, got, fix = rest
        raise ExperimentError(problem or "", expected=expected, got=got, fix=fix) from None


def check_plugin_model(model: Model) -> Model:
    """A plug-in model, tested once: initial parameters and a few predictions.

    Raises:
        ComponentError: shapes or numbers are wrong.
    """
    if registry.ours(registry.MODEL, type(model)):
        return model
    doing = "in its trial"
    wrong = partial(refuse_wrong, "model", model, doing)
    with component_errors("model", model, doing):
        initial = model.initial(torch.Generator().manual_seed(0))
        tables = initial.values() if isinstance(initial, dict) and initial else [None]
        if not all(isinstance(v, Tensor) and v.dtype == torch.float32 for v in tables):
            wrong(expected="float32 tensors by name from `initial`", got=repr(initial)[:200])
        for name, value in initial.items():
            if not finite(value):
                wrong(expected="finite initial parameters", got=f"others in {name!r}")
        if isinstance(model, HistoryModel):
            return model
        both = {name: value.expand(2, *value.shape).clone() for name, value in initial.items()}
        users = tuple(torch.zeros(2, 1, dtype=torch.int64) for _ in model.schema.user_features)
        with torch.no_grad():
            predicted = model.predict(both, users, torch.zeros(2, 3, dtype=torch.int64))
        shape = (
            tuple(predicted.shape) if isinstance(predicted, Tensor) else type(predicted).__name__
        )
        if shape != (2, 3):
            wrong(expected="predictions [2, 3] for 3 items of 2 clients", got=str(shape))
        if not finite(predicted):
            wrong(expected="finite predictions", got="NaN or infinity")
    return model
