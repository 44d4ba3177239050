# SPDX-License-Identifier: Apache-2.0
"""The interface of models: parameters as a dictionary, and a forward pass with a leading cohort
dimension.

A model is stateless. It creates initial parameters and maps `(parameters, users, items)` to
predictions, where every parameter has a leading dimension C, one slice per client. Sequential
training of clients is the case C = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Config
from fedrec.data.features import FeatureNames
from fedrec.data.interactions import RecencyConfig, Schema
from fedrec.errors import ExperimentError
from fedrec.nn.layers import KernelModel, weighted_cross_entropy

Parameters = Mapping[str, Tensor]
Users = tuple[Tensor, ...]
"""A cohort's users: one tensor per user feature, `int64 [C, width]`, -1 for no category."""

INIT_STD = 0.1
"""Standard deviation of initial embeddings and factors."""
_SCORED_AT_ONCE = 4096  # clients times items per forward pass; their activations stay in cache


class Model(ABC):
    """A recommender as a pure function of its parameters.

    A built-in has a `name` and lives in `fedrec/models/`, its configuration class above it.

    Attributes:
        tasks: the tasks that it is for.
        item_tables: names of the parameters with one row per item, `[num_items, d]`. A client uses
            few of their rows, so local training may pass compact tables, with the row of each item
            in `rows`.
        generated: whether `predict` takes parameters that a server generates for each client, from
            those of `initial`.

    Raises:
        ExperimentError: the task is none of its own.
    """

    Config: ClassVar[type[Config]] = Config
    tasks: ClassVar[tuple[str, ...]] = ("ranking", "rating")
    item_tables: ClassVar[tuple[str, ...]] = ()
    generated: ClassVar[bool] = False

    def __init__(self, config: Config, schema: Schema) -> None:
        self.config = config
        self.schema = schema
        if schema.task not in self.tasks:
            raise ExperimentError(
                f"model {type(self).__name__} does not support task = {schema.task!r}",
                fix=f"set task = {self.tasks[0]!r}, or use another model, for example 'mf'",
            )

    @classmethod
    def features_used(cls, config: Any, known: FeatureNames) -> FeatureNames:
        """Side features that the model uses, for tables of results; none by default."""
        return FeatureNames()

    @abstractmethod
    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise global parameters `float32`, without the cohort dimension, from `generator` on
        the CPU."""

    @abstractmethod
    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation.

        Args:
            parameters: each `[C, ...]`.
            users: one tensor per user feature, `int64 [C, width]`, -1 for no category.
            items: `int64 [C, B]`.
            rows: `int64 [C, B]`, the rows of `item_tables` where these are compact; None: the items
                themselves.

        Returns:
            `[C, B]`: logits for ranking, ratings for rating.
        """

    def grown(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of a finished run for this model's catalogue, which is that of the run and new
        items behind it; nothing is trained.

        Args:
            parameters: of the run, without cohort dimension.

        Raises:
            ExperimentError: the model knows items by their interactions alone (the default).
        """
        raise ExperimentError(
            f"{type(self).__name__} cannot rank items that it was not trained with",
            expected="a model that knows items by their vectors or categories: content-map,"
            " fold-in, or privrec with item-ids = false",
            got=f"parameters {', '.join(parameters)}",
            fix="run one of these with dataset.item-vectors (docs/guides/new-items.md)",
        )

    def kernel(self) -> KernelModel | None:
        """Declaration of the model for native code and CUDA graphs; None if it has another form. It
        must describe the same function as `predict` and `loss`, so a subclass that overrides one of
        these overrides this, too (contract test)."""
        return None

    def loss(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean loss over the last dimension, `[C, B] -> [C]`: cross-entropy (PrivRec eq. 2) or
        squared error.

        With `weights`, `float32 [C, B]`, it is the weighted sum instead; padding has weight 0.
        """
        if weights is not None and self.schema.task == "ranking":
            return weighted_cross_entropy(predictions, labels, weights)
        labels = labels.to(torch.promote_types(labels.dtype, predictions.dtype))
        measure = (
            F.binary_cross_entropy_with_logits if self.schema.task == "ranking" else F.mse_loss
        )
        losses = measure(predictions, labels, reduction="none")
        return losses.mean(-1) if weights is None else (losses * weights).sum(-1)

    def scores(self, parameters: Parameters, users: Users) -> Tensor:
        """Scores of the whole catalogue for each slice of the cohort dimension,
        `[C, num_items]`."""
        some = next(iter(parameters.values()))
        clients = some.shape[0]
        items = torch.arange(self.schema.num_items, device=some.device)
        # concatenating parts at the end would need more memory
        scores = some.new_empty(clients, len(items))
        at_once = max(1, _SCORED_AT_ONCE // clients)
        for start in range(0, len(items), at_once):
            part = items[start : start + at_once]
            scores[:, start : start + at_once] = self.predict(
                parameters, users, part.expand(clients, -1)
            )
        return scores


@dataclass(frozen=True)
class HistoryForm:
    """Form of the histories that a model takes: weights of the catalogue, or sequences.

    Attributes:
        rated: whether items weigh their ratings, weighted by time if one repeats, instead of 1.
        low_rated: weight >= 0 of an item that a user rated and that is not positive; unknown items
            have 0.
        recency: weights of the last items of a user's sequence, which are then all that a history
            holds; None: the order of items has no effect.
        longest: number of a user's last items of which histories are, as sequences `int64 [C, B,
            longest]` from the earliest to the latest, with -1 after the last; None: histories are
            weights of the catalogue.
    """

    rated: bool = False
    low_rated: float = 0.0
    recency: RecencyConfig | None = None
    longest: int | None = None


class HistoryModel(Model):
    """A recommender that represents a user by its history instead of features.

    It has no prediction for single items; training steps and evaluation pass whole histories.
    """

    @property
    def form(self) -> HistoryForm:
        """Form of the histories that the model takes; by default 1 for each liked item."""
        return HistoryForm()

    @abstractmethod
    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Scores of the whole catalogue.

        Args:
            parameters: each `[C, ...]`.
            histories: `float32 [C, B, num_items]`, known liked items of B users of each slice: 1,
                or a weight > 0; 0 elsewhere. Or sequences (see `HistoryForm`).

        Returns:
            `[C, B, num_items]`.
        """

    def scorer(self, parameters: Parameters) -> Callable[[Tensor], Tensor]:
        """Return `history_scores` under given parameters as a function of histories; subclasses may
        precompute what depends on the parameters alone.

        Args:
            parameters: each `[C, ...]`.
        """
        return lambda histories: self.history_scores(parameters, histories)

    def training_loss(
        self, parameters: Parameters, histories: Tensor, generator: torch.Generator, beta: float
    ) -> Tensor:
        """Loss of users' histories in central training, `[C, B]`.

        Args:
            parameters: each `[C, ...]`.
            histories: see `history_scores`; sequences have one item more, the last to be predicted.
            generator: random generator, such as for dropout, on the CPU.
            beta: weight of a divergence from a prior; models without one ignore it.

        Raises:
            ExperimentError: the model has none, as one that is solved for in closed form.
        """
        raise ExperimentError(
            f"{type(self).__name__} has no loss for central training",
            fix="use the centralised system of the same kind, such as 'ease' or 'dp-fold-in'",
        )

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Raise an error: models of histories do not predict single items.

        Raises:
            ExperimentError: always.
        """
        raise ExperimentError(
            f"{type(self).__name__} scores whole histories and cannot predict single items",
            fix="set step.name to one for histories, such as 'vae' or 'sequence'",
        )


def grown_biases(biases: Tensor, items: int) -> Tensor:
    """Biases `[items, 1]` of a catalogue that has new items behind those of `biases`, which get the
    median."""
    return torch.cat([biases, biases.median().expand(items - len(biases), 1)])
