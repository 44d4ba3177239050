# SPDX-License-Identifier: Apache-2.0
"""Checks for steps that train only one kind of model."""

from __future__ import annotations

from typing import TypeVar

from fedrec.errors import ExperimentError
from fedrec.models.base import Model

Kind = TypeVar("Kind", bound=Model)


def require_model(model: Model, kind: type[Kind], name: str, *, lacks: str) -> Kind:
    """The experiment's model, checked to be of the class that a step trains.

    Args:
        model: of the experiment.
        kind: class of the models that the step trains.
        name: its name in the registry.
        lacks: what other models lack, in words.

    Raises:
        ExperimentError: it is another one.
    """
    if not isinstance(model, kind):
        raise ExperimentError(
            f"model {type(model).__name__!r} has no {lacks}",
            expected=f"model.name = {name!r}",
            got=type(model).__name__,
            fix=f"set model.name = {name!r}, or another step",
        )
    return model


def require_ranking_model(
    model: Model, kind: type[Kind], name: str, *, trains: str, otherwise: str
) -> Kind:
    """The experiment's model, checked to be of the class that a step trains, with the task of
    ranking.

    Args:
        model: of the experiment.
        kind: class of the models that the step trains.
        name: its name in the registry.
        trains: which step trains which model, in words.
        otherwise: the alternative for the user, in words.

    Raises:
        ExperimentError: it is another one, or its task is rating.
    """
    if not isinstance(model, kind) or model.schema.task != "ranking":
        raise ExperimentError(
            f"{trains} for ranking",
            expected=f"model.name = {name!r} and task = 'ranking'",
            got=f"{type(model).__name__} and task = {model.schema.task!r}",
            fix=f"set model.name = {name!r}, or {otherwise}",
        )
    return model
