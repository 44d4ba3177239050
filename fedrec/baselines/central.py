# SPDX-License-Identifier: Apache-2.0
"""Models of the federation trained in one place: NeuMF, MF, GMF, MLP, and autoencoders."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Baseline, Histories, RatingBaseline, Ratings
from fedrec.baselines.training import (
    FOLD_IN_STEPS,
    HELD_OUT,
    ExampleBatch,
    ExamplesBaseline,
    ExamplesConfig,
    PatienceConfig,
    train,
)
from fedrec.components.registry import MODEL, resolve
from fedrec.config import Width
from fedrec.data.features import FeatureNames, FeatureTable
from fedrec.data.interactions import Schema, last_items
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings
from fedrec.models.base import HistoryModel, Model, Parameters
from fedrec.models.neumf import NeumfConfig
from fedrec.models.sequential import SequenceModel
from fedrec.models.vae import Ae, Vae, VaeConfig
from fedrec.nn.layers import glorot
from fedrec.rng import stream, torch_stream
from fedrec.runtime.ragged import within_groups

# NeuMF (He et al., Neural Collaborative Filtering, WWW 2017): a product of factors and a tower of
# layers, joined.
#
#     logit(u, i) = h . [p_u * q_i ; tower([p'_u ; q'_i])] + b
#
# with rows p, q for the product (GMF) and rows p', q' of their own for the tower (MLP), ReLU
# between its layers. Trained by Adam on cross-entropy: each liked pair, and a number of items that
# the user does not like, drawn again in each epoch. Without a tower it is GMF, without factors MLP,
# and GMF with h = 1 is matrix factorization; they are the baselines `gmf`, `mlp` and `mf`.
#
# With `pretrain-epochs` both parts are first trained separately and then joined: rows and layers
# are kept, and output weights and bias are multiplied by alpha and 1 - alpha (section 3.4.1), so
# that training continues from the weighted mean of both logits.
#
# With `average` the parameters that rank are the exponential moving average of those of all steps.
#
# Where this differs from the paper: by default both parts are trained together from the start, and
# the joined model by Adam also after pre-training (`optimiser = "sgd"` is the paper's); an L2
# penalty applies to the users' and items' rows in a batch.

_INIT_STD = 0.01  # of the initial embeddings
_CELLS_AT_ONCE = (
    300_000  # users times items pushed through the tower at once; its activations stay in cache
)


class CentralNeumfConfig(ExamplesConfig, NeumfConfig):
    """Settings of NeuMF."""

    factors: int = Field(default=32, ge=0, le=2**16)
    """Number of factors (width of the product); 0: no product."""
    tower: tuple[Width, ...] = (64, 32, 16)
    """Widths of the tower: of the two embeddings together (even), and of each layer; empty: no
    tower."""
    epochs: int = Field(default=10, ge=0)
    """Epochs over the liked pairs."""
    pretrain_epochs: int = Field(default=0, ge=0)
    """Epochs before these in which the product and the tower are trained separately; 0: none."""
    product_share: float = Field(default=0.5, ge=0, le=1)
    """alpha, the product's share in the logit when both are joined after pre-training."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """Of the whole model: Adam, or plain gradient descent. Parts are pre-trained by Adam."""

    @model_validator(mode="after")
    def _is_trained(self) -> Self:
        if not self.epochs and not self.pretrain_epochs:
            raise ValueError("epochs, or pretrain-epochs, of 1 or more")
        if self.pretrain_epochs and not (self.factors and self.tower):
            raise ValueError("both factors and a tower, for pretrain-epochs")
        return self


class CentralNeumf(ExamplesBaseline):
    """A product of factors and a tower of layers, trained on cross-entropy."""

    name = "neumf"
    Config = CentralNeumfConfig
    paper = "He et al. 2017"
    config: CentralNeumfConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters, or from those of the parts."""
        config = self.config
        self.fitted = histories
        users = self._joined(histories) if config.pretrain_epochs else self._start(histories)
        part = "joined" if config.pretrain_epochs else "neumf"
        self.train_pairs(users, stream(config.seed, f"baseline-{part}-triples"))

    def _start(self, histories: Histories) -> Tensor:
        """Draws all parameters; the users' rows are returned."""
        generator = torch_stream(self.config.seed, "baseline-neumf")
        users = self._fresh_rows(histories.num_users, generator)
        fresh = self.fresh(generator)
        fresh["items"] = self._fresh_rows(histories.num_items, generator)
        self.shared = {name: value.to(self.device) for name, value in fresh.items()}
        return users.to(self.device)

    def _joined(self, histories: Histories) -> Tensor:
        """Trains both parts alone and takes their parameters; the users' rows are returned."""
        alone = {"epochs": self.config.pretrain_epochs, "pretrain_epochs": 0, "optimiser": "adam"}
        product = CentralNeumf(self.config.model_copy(update={**alone, "tower": ()}))
        tower = CentralNeumf(self.config.model_copy(update={**alone, "factors": 0}))
        for part in (product, tower):
            part.device = self.device
            part.fit(histories)
        share = self.config.product_share
        ours = product.shared
        theirs = tower.shared
        self.shared = theirs | {
            "h": torch.cat([share * ours["h"], (1 - share) * theirs["h"]]),
            "b": share * ours["b"] + (1 - share) * theirs["b"],
            "items": torch.cat([ours["items"], theirs["items"]], dim=1),
        }
        rows = torch.cat([torch.from_numpy(part.own) for part in (product, tower)], dim=1)
        return rows.to(self.device)

    def fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters other than the rows: Glorot-uniform layers, zero biases."""
        tower = self.config.tower
        last = self.config.factors + (tower[-1] if tower else 0)
        found = {"h": glorot(1, last, generator)[0], "b": torch.zeros(())}
        for place, (before, after) in enumerate(itertools.pairwise(tower)):
            found |= {
                f"W{place}": glorot(after, before, generator),
                f"b{place}": torch.zeros(after),
            }
        return found

    def logits(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Logits `[n, B]` of items `int64 [n, B]` for the users' rows `[n, width]`."""
        return self.joined_logits(rows[:, None], self.shared["items"][items])

    def joined_logits(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits of pairs of embeddings, which broadcast.

        Args:
            users: `[..., width]`, rows of users.
            items: `[..., width]`, rows of items.
        """
        parameters = self.shared
        width = self.config.factors
        total = parameters["b"]
        if width:
            total = total + (
                (users[..., :width] * parameters["h"][:width]) * items[..., :width]
            ).sum(-1)
        if self.config.tower:
            half = self.config.tower[0] // 2
            # The first layer of a pair is a sum of one of the user and one of the item, each
            # computed once.
            own, their = parameters["W0"].split(half, dim=1)
            hidden = users[..., width:] @ own.T + items[..., width:] @ their.T + parameters["b0"]
            for place in range(1, len(self.config.tower) - 1):
                hidden = hidden.relu() @ parameters[f"W{place}"].T + parameters[f"b{place}"]
            total = total + hidden.relu() @ parameters["h"][width:]
        return total

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Logits of the catalogue, `float32 [users, items]`."""
        users = torch.from_numpy(self.rows(histories)).to(self.device)
        items = self.shared["items"]
        width = self.config.factors
        if not self.config.tower:
            return (users * self.shared["h"]) @ items.T + self.shared["b"]
        block = max(1, _CELLS_AT_ONCE // histories.num_items)
        towers = [self._tower_logits(part, items) for part in users.split(block)]
        return (
            torch.cat(towers) + (users[:, :width] * self.shared["h"][:width]) @ items[:, :width].T
        )

    def batch_loss(self, rows: Tensor, items: Tensor, labels: Tensor, users: np.ndarray) -> Tensor:
        """Mean over a batch's liked pairs: rows `[batch, width]`, and items
        `[batch, 1 + negatives]`, liked first."""
        their = F.embedding(items, self.shared["items"])
        logits = self.joined_logits(rows[:, None], their)
        loss = F.softplus(-logits[:, 0]).sum() + F.softplus(logits[:, 1:]).sum()
        if self.config.regularisation:
            loss = loss + self.config.regularisation * (rows.square().sum() + their.square().sum())
        return loss / len(rows)

    def _tower_logits(self, users: Tensor, items: Tensor) -> Tensor:
        """`[users, items]`: the contribution of the tower and b for every pair."""
        parameters = self.shared
        width = self.config.factors
        own, their = parameters["W0"].split(self.config.tower[0] // 2, dim=1)
        hidden = (users[:, width:] @ own.T)[:, None] + (
            items[:, width:] @ their.T + parameters["b0"]
        )
        for place in range(1, len(self.config.tower) - 1):
            hidden = F.linear(hidden.relu_(), parameters[f"W{place}"], parameters[f"b{place}"])
        return hidden.relu_() @ parameters["h"][width:] + parameters["b"]

    def _fresh_rows(self, number: int, generator: torch.Generator) -> Tensor:
        width = self.config.factors + (self.config.tower[0] // 2 if self.config.tower else 0)
        return torch.randn(number, width, generator=generator) * _INIT_STD


# Training of models of whole histories in one place, on batches of users.
#
# The weight beta of a divergence from a prior rises linearly to its last value over all steps.

_MANY = 1e9  # multiplications of a step that takes tenths of a second


class HistoriesConfig(PatienceConfig):
    """Settings of the training of models of histories."""

    beta: float = Field(default=0.5, ge=0)
    """Final weight beta of a divergence from a prior, for models that have one."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial parameters, the order of users, dropout and codes."""


def train_histories(
    model: HistoryModel,
    histories: Histories,
    config: HistoriesConfig,
    generator: torch.Generator,
    device: torch.device,
    *,
    fused: bool = True,
) -> dict[str, Tensor]:
    """Train a model on users' histories.

    Args:
        model: the model.
        histories: of the training users; those without a positive item are left out.
        config: how.
        generator: of the initial parameters, the order of users, and what the model draws.
        device: where the parameters are.
        fused: see `fedrec.baselines.training.train`.

    Returns:
        Parameters `[1, ...]`.
    """
    drawn = model.initial(generator)
    values = [value.unsqueeze(0).to(device).requires_grad_() for value in drawn.values()]
    users = torch.from_numpy(histories.offsets).diff().nonzero()[:, 0]
    held_out = users[:0]
    if config.patience is not None:
        out = stream(config.seed, "baseline-held-out").random(len(users)) < HELD_OUT
        held_out = users[torch.from_numpy(out)]
        users = users[torch.from_numpy(~out)]
    steps = -(-len(users) // config.batch_size)
    numbers = sum(value.numel() for value in values)

    def loss(
        values: Sequence[Tensor], some: Tensor, source: torch.Generator, beta: float
    ) -> Tensor:
        rows = _given(model, histories.take(some.numpy()), more=1).unsqueeze(0).to(device)
        parameters = dict(zip(drawn, values, strict=True))
        return model.training_loss(parameters, rows, source, beta).mean()

    def epoch(number: int) -> Iterator[tuple[Tensor, float]]:
        order = users[torch.randperm(len(users), generator=generator)]
        for place, batch in enumerate(order.split(config.batch_size)):
            done = number * steps + place + 1
            yield batch, config.beta * done / (config.epochs * steps)

    @torch.no_grad()
    def measured(values: Sequence[Tensor]) -> float:
        return float(
            loss(values, held_out, torch_stream(config.seed, "baseline-held-out"), config.beta)
        )

    last = train(
        values,
        config,
        epoch,
        lambda batch: loss(values, batch[0], generator, batch[1]).backward(),
        steps=steps,
        fused=fused,
        patience=config.patience,
        held_out=measured if len(held_out) else None,
        long_steps=numbers * config.batch_size * (model.form.longest or 1) >= _MANY,
    )
    return dict(zip(drawn, last, strict=True))


@torch.no_grad()
def history_scores(
    model: HistoryModel,
    parameters: Mapping[str, Tensor],
    histories: Histories,
    device: torch.device,
) -> Tensor:
    """Scores of the catalogue for users' histories, `float32 [users, items]`; parameters are
    `[1, ...]`."""
    return model.history_scores(parameters, _given(model, histories).unsqueeze(0).to(device))[0]


def _given(model: HistoryModel, histories: Histories, more: int = 0) -> Tensor:
    """What the model takes of users: weights of the catalogue, or their last items, so many
    `more`."""
    if model.form.longest is None:
        return histories.matrix()
    own = histories.in_order()
    return torch.from_numpy(last_items(own.offsets, own.items, model.form.longest + more))


class HistoryBaseline(Baseline):
    """A model of histories whose settings are the baseline's.

    Attributes:
        network: the model.
        stream: name of its random stream.
    """

    network: type[HistoryModel]
    stream: str
    config: HistoriesConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters; users without a positive item are left out."""
        generator = torch_stream(self.config.seed, self.stream)
        self.model = self.network(self.config, histories.schema())
        self.parameters = train_histories(
            self.model, histories, self.config, generator, self.device, fused=False
        )

    def scores(self, histories: Histories) -> Tensor:
        """Scores of each user's history, `float32 [users, items]`."""
        return history_scores(self.model, self.parameters, histories, self.device)


# Any model trained in one place, with the data of all training users.
#
# What a model says of its loss and its predictions is the same as on devices; only the training is
# not federated. Three kinds of models:
#
# * with parameters of users that never leave a device (`private-parameters`): each user has a row
# of   them, trained together with the shared ones, on likes and drawn items (`task = "ranking"`) or
# on   ratings (`task = "rating"`); * with users represented by their features
# (`Model.by_features`): the same without rows; * of whole histories (`HistoryModel` with a
# `training_loss`): trained on batches of users, and   applied to anyone's history. The weight
# `beta` of a divergence rises linearly over all steps.
#
# Users' first rows are the model's initial parameters, equal for all, as on devices. Models that a
# server generates for each client, and those that are solved for in closed form, have no such
# training.


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


# The central variational autoencoder (Liang et al. 2018), the reference for the federated one.
#
# Where this differs from the papers: Fang et al. name plain gradient descent and a learning rate of
# 0.005, with which the network hardly learns in 30 epochs of MovieLens-100K; Adam is used, as in
# Liang et al. Beta rises linearly to its last value over all steps.


class CentralVaeConfig(HistoriesConfig, VaeConfig):
    """Settings of the central variational autoencoder, in addition to those of the network."""

    epochs: int = Field(default=60, ge=1)
    """Epochs over the users."""
    batch_size: int = Field(default=10, ge=1)
    """Users per gradient step (paper: 10 for MovieLens-100K)."""
    beta: float = Field(default=0.5, ge=0)
    """Final weight beta of the divergence from the prior (paper: 0.5 for MovieLens-100K)."""


class CentralVae(HistoryBaseline):
    """Trained with Adam on batches of users."""

    name = "vae"
    Config = CentralVaeConfig
    paper = "Mult-VAE (Liang et al. 2018)"
    network = Vae
    stream = "baseline-vae"
    config: CentralVaeConfig


# The central denoising autoencoder (Mult-DAE, Liang et al. 2018): `vae` without a distribution of
# codes.


class CentralAeConfig(CentralVaeConfig):
    """Settings of the central autoencoder, in addition to those of the network."""

    beta: Literal[0] = 0
    """Not used: there is no prior."""


class CentralAe(CentralVae):
    """Trained with Adam on batches of users."""

    name = "ae"
    Config = CentralAeConfig
    paper = "Mult-DAE (Liang et al. 2018)"
    network = Ae
    config: CentralAeConfig


# GMF, generalised matrix factorization (He et al. 2017, section 3.2): `neumf` without its tower.


class GmfConfig(CentralNeumfConfig):
    """Settings of GMF."""

    factors: Width = 32
    """Number of factors (width of the product)."""
    tower: tuple[()] = ()
    """There is none."""


class Gmf(CentralNeumf):
    """A weighted product of factors."""

    name = "gmf"
    Config = GmfConfig
    paper = "He et al. 2017, section 3.2"
    config: GmfConfig


# MF, matrix factorization for likes: p_u . q_i + b is a logit, trained on cross-entropy with drawn
# items (`neumf`).
#
# It is GMF (He et al. 2017) with all weights of the product equal to 1. The federated `mf` has the
# same product, and biases of users and items.


class CentralMfConfig(GmfConfig):
    """Settings of MF."""


class CentralMf(CentralNeumf):
    """An unweighted product of factors."""

    name = "mf"
    Config = CentralMfConfig
    paper = "Koren et al. 2009"
    config: CentralMfConfig

    def fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters other than the rows: Glorot-uniform layers, zero biases."""
        return {"b": torch.zeros(())}

    def joined_logits(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits of pairs of embeddings `[..., width]`, which broadcast."""
        return (users * items).sum(-1) + self.shared["b"]

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Logits of the catalogue, `float32 [users, items]`."""
        return (
            torch.from_numpy(self.rows(histories)).to(self.device) @ self.shared["items"].T
            + self.shared["b"]
        )


# MLP, a tower of layers over the embeddings of a user and an item (He et al. 2017, section 3.3):
# `neumf` without its product.


class MlpConfig(CentralNeumfConfig):
    """Settings of MLP."""

    factors: Literal[0] = 0
    """There is no product."""


class Mlp(CentralNeumf):
    """A tower of layers."""

    name = "mlp"
    Config = MlpConfig
    paper = "He et al. 2017, section 3.3"
    config: MlpConfig
