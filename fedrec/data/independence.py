# SPDX-License-Identifier: Apache-2.0
"""Checks before training that no client's rows affect those of others, as privacy guarantees need.

A clip bounds how far one client's own update moves a sum. If that client's rows also decide which
rows of others are for training, as one shuffle of all rows does, or how others' rows are perturbed,
every client's update moves and no bound on one client's update holds.

The names of users and items and the numbers of users and rows are taken as public. So are the
categories of users' features (a model has a row for each) if the dataset publishes or declares
them; categories that are collected from the rows reveal that some user is in each.
"""

from __future__ import annotations

from fedrec.components import registry
from fedrec.data.features import FeatureNames
from fedrec.data.perturbation import perturbation_of
from fedrec.data.population import reader_of
from fedrec.data.splits.rules import split_of
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import DataSettings
from fedrec.privacy.accounting.sampling import Adjacency


def check_independent_clients(settings: DataSettings, adjacency: Adjacency, what: str) -> None:
    """Check that under the split and perturbation no client's rows affect those of others.

    Args:
        settings: data settings, such as an experiment.
        adjacency: how neighbouring data differ.
        what: the table with the guarantee, such as "[privacy]".

    Raises:
        ExperimentError: the guarantee would not hold.
    """
    reason = split_of(settings.split, settings.seed_of_split).depends_on(adjacency)
    if reason:
        raise ExperimentError(
            f"the guarantee of {what} does not hold with split {settings.split.name!r}: rows of one"
            " client affect which rows of others are for training",
            expected=f"a split that handles each client separately (under {adjacency})",
            got=f"parts that depend on {reason}",
            fix="set split.stream = 'client', or choose another split; a custom split declares its"
            " independence in depends_on()",
        )
    perturbation = perturbation_of(settings)
    rated = settings.task == "rating" or settings.positive_above is not None
    reason = "" if perturbation is None else perturbation.depends_on(rated)
    if settings.perturb is not None and reason:
        raise ExperimentError(
            f"the guarantee of {what} does not hold with perturbation {settings.perturb.name!r}:"
            " rows of one client affect how rows of others are perturbed",
            expected="a perturbation that handles each client separately",
            got=f"rows that depend on {reason}",
            fix=f"leave out [perturb] or {what}, or choose random-replacement, randomised-response"
            " or targeted with select = 'random', without ratings",
        )


def check_declared_categories(experiment: Experiment, what: str) -> None:
    """Check that no model uses users' features whose categories are collected from the rows.

    Args:
        experiment: with a federated system.
        what: the table with the guarantee, such as "[privacy]".

    Raises:
        ExperimentError: the categories would be published unprotected.
    """
    reader = reader_of(experiment)
    model = registry.resolve(registry.MODEL, experiment.model.name)
    known = reader.stated_features() or FeatureNames()
    used = model.features_used(experiment.settings(registry.MODEL), known).users
    collected = reader.undeclared_categories() if used else ()
    if collected:
        raise ExperimentError(
            f"{what} does not protect the categories of users' features: the model has a row for"
            " each, which reveals even a category of a single user",
            expected=f"dataset.user-categories for {', '.join(collected)}",
            got="categories that are collected from the users' rows",
            fix=f"set dataset.user-categories.{collected[0]} = [...], the public categories"
            " (others become 'other'), or model.features = false",
        )
