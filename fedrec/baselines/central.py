# SPDX-License-Identifier: Apache-2.0
"""Any model trained in one place, with the data of all training users.

What a model says of its loss and its predictions is the same as on devices; only the training is
not federated. Three kinds of models:

* with parameters of users that never leave a device (`private-parameters`): each user has a row of
  them, trained together with the shared ones, on likes and drawn items (`task = "ranking"`) or on
  ratings (`task = "rating"`);
* with users represented by their features (`Model.by_features`): the same without rows;
* of whole histories (`HistoryModel` with a `training_loss`): trained on batches of users, and
  applied to anyone's history. The weight `beta` of a divergence rises linearly over all steps.

Users' first rows are the model's initial parameters, equal for all, as on devices. Models that a
server generates for each client, and those that are solved for in closed form, have no such
training.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedrec.baselines.base import Histories, RatingBaseline, Ratings
from fedrec.baselines.examples import (
    FOLD_IN_STEPS,
    ExampleBatch,
    ExamplesBaseline,
    ExamplesConfig,
)
from fedrec.baselines.histories import HistoriesConfig, history_scores, train_histories
from fedrec.baselines.training import HELD_OUT
from fedrec.components.registry import MODEL, resolve
from fedrec.data.features import FeatureNames, FeatureTable
from fedrec.data.schema import Schema
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings
from fedrec.models.base import HistoryModel, Model, Parameters
from fedrec.models.sequential.base import SequenceModel
from fedrec.rng import stream, torch_stream
from fedrec.runtime.grouping import within_groups


class CentralConfig(ExamplesConfig, HistoriesConfig):
    """Settings of a model that is trained in one place."""

    model: Annotated[Section, MODEL] = Section(name="mf")
    """The model: its name and settings."""
    private_parameters: tuple[str, ...] = ("user.*",)
    """Patterns of the parameters of which each user has its own; not used by models that represent
    users by their features or histories."""


class Central(ExamplesBaseline, RatingBaseline):
    """Any model, trained in one place: `{ name = "central", label = "central-mf", model = ... }`.

    Attributes:
        model: the model after fitting.

    Raises:
        ExperimentError: the model is unknown, or a setting of it is unknown or wrong.
    """

    name = "central"
    Config = CentralConfig
    config: CentralConfig
    model: Model

    def __init__(self, config: CentralConfig) -> None:
        super().__init__(config)
        self._kind: type[Model] = resolve(MODEL, config.model.name)
        self._settings = component_settings(MODEL, config.model, at="model")
        alike = self._kind.by_features or issubclass(self._kind, HistoryModel)
        self._private = () if alike else config.private_parameters

    @property
    def ordered(self) -> bool:
        """Whether its model takes sequences."""
        return issubclass(self._kind, SequenceModel)

    @property
    def transductive(self) -> bool:
        """Whether it must also be fitted to the known items of the users to be scored."""
        return bool(self._private) and super().transductive

    @classmethod
    def features_used(cls, config: CentralConfig, known: FeatureNames) -> FeatureNames:
        """Those of its model."""
        kind: type[Model] = resolve(MODEL, config.model.name)
        return kind.features_used(component_settings(MODEL, config.model, at="model"), known)

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters.

        Raises:
            ExperimentError: the model cannot be trained by gradient descent in one place.
        """
        self.fitted = histories
        users = self._start(histories.schema())
        if isinstance(self.model, HistoryModel):
            generator = torch_stream(self.config.seed, "baseline-central")
            self.shared = train_histories(
                self.model, histories, self.config, generator, self.device
            )
        else:
            self.train_pairs(users, stream(self.config.seed, "baseline-central-triples"))

    def fit_ratings(self, ratings: Ratings) -> None:
        """Train from fresh parameters on ratings; side features are not used.

        Raises:
            ExperimentError: the model predicts no single ratings.
        """
        num_items = ratings.num_items
        self._trained = np.bincount(ratings.users, minlength=ratings.num_users) > 0
        self.fitted = Histories(num_items, np.zeros(ratings.num_users + 1, np.int64), np.empty(0))
        users = self._start(Schema(num_items, FeatureTable(num_items, ()), (), "rating"))
        if isinstance(self.model, HistoryModel):
            raise ExperimentError(
                f"{type(self.model).__name__} is not trained on single ratings in one place",
                expected="a model that predicts them, such as 'mf'",
                got=f"model.name = {self.config.model.name!r}",
                fix="choose such a model, or set task = 'ranking'",
            )
        random = stream(self.config.seed, "baseline-central-ratings")
        values = ratings.values.astype(np.float32)
        held_out = np.zeros(len(values), bool)
        if self.config.patience is not None:
            held_out = stream(self.config.seed, "baseline-held-out").random(len(values)) < HELD_OUT
        rows = np.flatnonzero(~held_out)
        size = self.config.batch_size

        def examples(some: np.ndarray) -> ExampleBatch:
            return ExampleBatch(ratings.users[some], ratings.items[some, None], values[some, None])

        def epoch() -> Iterator[ExampleBatch]:
            order = random.permutation(rows)
            return (examples(order[at : at + size]) for at in range(0, len(order), size))

        out = [examples(np.flatnonzero(held_out))] if held_out.any() else []
        self.train_examples(users, epoch, -(-len(rows) // size), out)

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Scores of the catalogue, `float32 [users, items]`."""
        if isinstance(self.model, HistoryModel):
            return history_scores(self.model, self.shared, histories, self.device)
        rows = torch.from_numpy(self.rows(histories)).to(self.device)
        return self.model.scores(self._parameters(rows), self._codes(histories.numbers))

    @torch.no_grad()
    def predict(self, known: Ratings, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Predicted ratings, `float64 [rows]`. Training users keep their fitted rows, new users are
        folded in by their known ratings."""
        table = self.own.copy()
        new = np.setdiff1d(known.users, np.flatnonzero(self._trained))
        table[~self._trained] = self.own[self._trained].mean(0)
        if len(new) and table.shape[1]:
            table[new] = self._folded_in_by_ratings(known, new)
        rows = torch.from_numpy(table[users]).to(self.device)
        wanted = torch.from_numpy(items[:, None]).to(self.device)
        return self.logits(rows, wanted, users)[:, 0].double().cpu().numpy()

    def logits(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Predictions `[n, B]` of items `int64 [n, B]`, from the users' rows `[n, width]`; `users`
        are their numbers in the dataset, `int64 [n]`, -1 for unknown ones."""

        def predicted(own: Tensor, codes: tuple[Tensor, ...], items: Tensor) -> Tensor:
            parameters = self.shared | self._own_parameters(own[None])
            return self.model.predict(parameters, tuple(code[None] for code in codes), items[None])[
                0
            ]

        # as one user's shared parameters, whose gradients are then not computed user by user
        return torch.func.vmap(predicted)(rows, self._codes(users), items)

    def batch_loss(self, rows: Tensor, items: Tensor, labels: Tensor, users: np.ndarray) -> Tensor:
        """Mean over the `n` of a batch of the sum of their losses, and the penalty on the users'
        rows and the rows of item tables."""
        loss = self.model.loss(self.logits(rows, items, users), labels).sum() * items.shape[1]
        if self.config.regularisation:
            tables = (
                self.shared[name][0] for name in self.model.item_tables if name in self.shared
            )
            squares = rows.square().sum() + sum(table[items].square().sum() for table in tables)
            loss = loss + self.config.regularisation * squares
        return loss / len(rows)

    def losses(self, predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the losses of examples, `[n, B]` each."""
        return self.model.loss(predictions, labels, weights).sum()

    def _start(self, schema: Schema) -> Tensor:
        """Makes the model and its shared parameters `[1, ...]`; the users' rows are returned.

        Raises:
            ExperimentError: a server generates the model's parameters for each client.
        """
        self.model = self._kind(self._settings, schema)
        if self.model.generated:
            raise ExperimentError(
                f"model {self.config.model.name!r} is not trained in one place",
                expected="a model whose parameters are trained themselves",
                got="one whose parameters a server generates for each client",
                fix="choose another model",
            )
        drawn = self.model.initial(torch_stream(self.config.seed, "baseline-central"))
        own = {n: v for n, v in drawn.items() if any(fnmatchcase(n, one) for one in self._private)}
        self._shapes = {name: value.shape for name, value in own.items()}
        self.shared = {n: v[None].to(self.device) for n, v in drawn.items() if n not in own}
        row = torch.cat([value.flatten() for value in own.values()] or [torch.empty(0)])
        return row.repeat(self.fitted.num_users, 1).to(self.device)

    def _parameters(self, rows: Tensor) -> Parameters:
        """The model's parameters `[n, ...]` for users with these rows `[n, width]`."""
        shared = {
            name: value.expand(len(rows), *value.shape[1:]) for name, value in self.shared.items()
        }
        return shared | self._own_parameters(rows)

    def _own_parameters(self, rows: Tensor) -> dict[str, Tensor]:
        """The users' own parameters `[n, ...]` in their rows `[n, width]`."""
        parts = rows.split([shape.numel() for shape in self._shapes.values()], dim=1)
        named = zip(self._shapes.items(), parts, strict=True)
        return {name: part.view(-1, *shape) for (name, shape), part in named}

    def _codes(self, users: np.ndarray) -> tuple[Tensor, ...]:
        """Codes of users' features, see `Histories.codes`."""
        found = self.fitted.codes(self.model.schema, users)
        return tuple(torch.from_numpy(code).to(self.device) for code in found)

    def _folded_in_by_ratings(self, known: Ratings, new: np.ndarray) -> np.ndarray:
        """Rows of users `int64 [n]` that were not in training, by gradient descent on their known
        ratings."""
        order = np.argsort(known.users, kind="stable")
        counts = np.bincount(known.users, minlength=known.num_users)
        mine = order[np.isin(known.users[order], new)]
        place = np.repeat(np.arange(len(new)), counts[new])
        within = within_groups(counts[new])
        shape = (len(new), int(counts[new].max()))
        columns = (
            np.zeros(shape, np.int64),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.float32),
        )
        given = known.items[mine], known.values[mine], 1 / counts[known.users[mine]]
        for column, values in zip(columns, given, strict=True):
            column[place, within] = values
        rows, labels, weights = (torch.from_numpy(column).to(self.device) for column in columns)
        step = (rows, labels, weights)
        return self.descended(np.ones(len(new), bool), new, lambda: iter([step] * FOLD_IN_STEPS))
