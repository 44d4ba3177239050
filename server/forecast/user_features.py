# SPDX-License-Identifier: Apache-2.0
"""Warns before training if a model represents users by features that the data do not have."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fedrec.components import registry
from fedrec.experiment.schema import Experiment

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
