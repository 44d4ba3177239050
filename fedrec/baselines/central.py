# SPDX-License-Identifier: Apache-2.0
"""Centrally trained versions of federated models: NeuMF, MF, GMF, MLP, and autoencoders."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Baseline, Histories
from fedrec.baselines.training import (
    ExamplesBaseline,
    ExamplesConfig,
    SeededConfig,
    TrainingConfig,
    train,
)
from fedrec.components.registry import MODEL, resolve
from fedrec.components.sections import Section, component_settings
from fedrec.config import Width, fits
from fedrec.data.interactions import FeatureNames, Schema, last_items
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Model, is_generated
from fedrec.models.neumf import NeumfConfig
from fedrec.models.privrec import PrivRec
from fedrec.models.sequential import SequenceModel
from fedrec.models.vae import Ae, Vae, VaeConfig
from fedrec.nn.layers import glorot
from fedrec.rng import stream, torch_stream

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
# With `average` the parameters that rank are the exponential moving average of those of all steps.
#
# Where this differs from the paper: both parts are trained together from the start, by Adam; an L2
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


class CentralNeumf(ExamplesBaseline):
    """A product of factors and a tower of layers, trained on cross-entropy."""

    name = "neumf"
    Config = CentralNeumfConfig
    paper = "He et al. 2017"
    config: CentralNeumfConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters."""
        config = self.config
        self.fitted = histories
        generator = torch_stream(config.seed, "baseline-neumf")
        width = config.factors + (config.tower[0] // 2 if config.tower else 0)
        users = torch.randn(histories.num_users, width, generator=generator) * _INIT_STD
        fresh = self.fresh(generator)
        fresh["items"] = torch.randn(histories.num_items, width, generator=generator) * _INIT_STD
        self.shared = {name: value.to(self.device) for name, value in fresh.items()}
        self.train_pairs(users.to(self.device), stream(config.seed, "baseline-neumf-triples"))

    def fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise parameters other than the rows: Glorot-uniform layers, zero biases."""
        tower = self.config.tower
        last = self.config.factors + (tower[-1] if tower else 0)
        parameters = {"h": glorot(1, last, generator)[0], "b": torch.zeros(())}
        for layer, (before, after) in enumerate(itertools.pairwise(tower)):
            parameters[f"W{layer}"] = glorot(after, before, generator)
            parameters[f"b{layer}"] = torch.zeros(after)
        return parameters

    def logits(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Logits `[n, B]` of items `int64 [n, B]` for the users' rows `[n, width]`."""
        return self.joined_logits(rows[:, None], self.shared["items"][items])

    def joined_logits(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits of pairs of user and item embeddings, which broadcast.

        Args:
            users: `[..., width]`, rows of users.
            items: `[..., width]`, rows of items.
        """
        width = self.config.factors
        total = self.shared["b"]
        if width:
            weighted = users[..., :width] * self._product_weights()
            total = total + (weighted * items[..., :width]).sum(-1)
        return total + self._tower_logits(users, items) if self.config.tower else total

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Logits of the catalogue, `float32 [users, items]`."""
        users = torch.from_numpy(self.rows(histories)).to(self.device)
        items = self.shared["items"]
        width = self.config.factors
        product = (users[:, :width] * self._product_weights()) @ items[:, :width].T
        if not self.config.tower:
            return product + self.shared["b"]
        block = users.split(max(1, _CELLS_AT_ONCE // histories.num_items))
        towers = torch.cat([self._tower_logits(some[:, None], items) for some in block])
        return towers + product + self.shared["b"]

    def _product_weights(self) -> Tensor:
        """Weights h of the product, `[factors]`."""
        return self.shared["h"][: self.config.factors]

    def batch_loss(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Mean loss over a batch's liked pairs: user rows `[batch, width]`, and items `[batch, 1 +
        negatives]`, liked first."""
        item_rows = F.embedding(items, self.shared["items"])
        logits = self.joined_logits(rows[:, None], item_rows)
        loss = F.softplus(-logits[:, 0]).sum() + F.softplus(logits[:, 1:]).sum()
        if self.config.regularisation:
            squares = rows.square().sum() + item_rows.square().sum()
            loss = loss + self.config.regularisation * squares
        return loss / len(rows)

    def _tower_logits(self, users: Tensor, items: Tensor) -> Tensor:
        """Contribution of the tower to the logits. The first layer is computed separately for users
        and items, then added."""
        parameters = self.shared
        width = self.config.factors
        left, right = parameters["W0"].split(self.config.tower[0] // 2, dim=1)
        hidden = users[..., width:] @ left.T + items[..., width:] @ right.T + parameters["b0"]
        for layer in range(1, len(self.config.tower) - 1):
            hidden = hidden.relu() @ parameters[f"W{layer}"].T + parameters[f"b{layer}"]
        return hidden.relu() @ parameters["h"][width:]


# Central training of models of whole histories, on batches of users.
#
# The weight beta of a divergence from a prior rises linearly to its last value over all steps.

_BETA = 0.5  # as in DP-VAE's experiments
_MANY = 1e9  # multiplications of a step that takes tenths of a second


def train_histories(
    model: HistoryModel,
    histories: Histories,
    config: TrainingConfig,
    generator: torch.Generator,
    device: torch.device,
    *,
    fused: bool = True,
) -> dict[str, Tensor]:
    """Train a model on users' histories.

    Args:
        model: the model.
        histories: histories of the training users; users without a positive item are left out.
        config: settings of the training.
        generator: random generator of initial parameters, order of users and draws of the model.
        device: device of the parameters.
        fused: see `fedrec.baselines.training.train`.

    Returns:
        Parameters `[1, ...]`.
    """
    drawn = model.initial(generator)
    values = [value.unsqueeze(0).to(device).requires_grad_() for value in drawn.values()]
    parameters = dict(zip(drawn, values, strict=True))
    users = torch.from_numpy(histories.offsets).diff().nonzero()[:, 0]
    steps = -(-len(users) // config.batch_size)
    coordinates = sum(value.numel() for value in values)

    def epoch(number: int) -> Iterator[tuple[Tensor, float]]:
        order = users[torch.randperm(len(users), generator=generator)]
        for step, batch in enumerate(order.split(config.batch_size), number * steps + 1):
            yield batch, _BETA * step / (config.epochs * steps)

    def backward(batch: tuple[Tensor, float]) -> None:
        some, beta = batch
        rows = _inputs(model, histories.take(some.numpy()), more=1).unsqueeze(0).to(device)
        model.training_loss(parameters, rows, generator, beta).mean().backward()

    long_steps = coordinates * config.batch_size * (model.form.longest or 1) >= _MANY
    last = train(values, config, epoch, backward, steps=steps, fused=fused, long_steps=long_steps)
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
    return model.history_scores(parameters, _inputs(model, histories).unsqueeze(0).to(device))[0]


def _inputs(model: HistoryModel, histories: Histories, more: int = 0) -> Tensor:
    """Inputs of the model: each user's weights of the catalogue, or its last items, `more` in
    addition to the model's length."""
    if model.form.longest is None:
        return histories.matrix()
    ordered = histories.in_order()
    return torch.from_numpy(last_items(ordered.offsets, ordered.items, model.form.longest + more))


# Central training of any model, with the data of all training users.
#
# The model's loss and predictions are the same as on devices; only the training is not federated.
# Three kinds of models:
#
# * with parameters of users that never leave a device (`private-parameters`): each user has a row
#   of them, trained together with the shared ones, on likes and drawn items;
# * with users represented by their features (`PrivRec`): the same without rows;
# * of whole histories (`HistoryModel` with a `training_loss`): trained on batches of users, and
#   applied to anyone's history.
#
# Users' first rows are the model's initial parameters, equal for all, as on devices. Models that a
# server generates for each client, and those that are solved for in closed form, have no such
# training.


class CentralConfig(ExamplesConfig):
    """Settings of a centrally trained model."""

    model: Annotated[Section, MODEL] = Section(name="mf")
    """The model: its name and settings."""
    private_parameters: tuple[str, ...] = ("user.*",)
    """Patterns of the private parameters of each user; not used by models that represent users by
    features or histories."""


class Central(ExamplesBaseline):
    """Centrally trained model of any kind: `{ name = "central", label = "central-mf", model = ...
    }`.

    Attributes:
        model: the model after fitting.

    Raises:
        ExperimentError: the model is unknown, or its settings are unknown or wrong.
    """

    name = "central"
    Config = CentralConfig
    config: CentralConfig
    model: Model

    def __init__(self, config: CentralConfig) -> None:
        super().__init__(config)
        self._kind: type[Model] = resolve(MODEL, config.model.name)
        self._settings = component_settings(MODEL, config.model, at="model")
        alike = issubclass(self._kind, PrivRec | HistoryModel)
        self._private = () if alike else config.private_parameters
        self.ordered = issubclass(self._kind, SequenceModel)
        self.transductive = self.transductive and bool(self._private)

    @classmethod
    def features_used(cls, config: CentralConfig, known: FeatureNames) -> FeatureNames:
        """Side features that the model uses."""
        kind: type[Model] = resolve(MODEL, config.model.name)
        return kind.features_used(component_settings(MODEL, config.model, at="model"), known)

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters.

        Raises:
            ExperimentError: the model cannot be trained centrally by gradient descent.
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

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Scores of the catalogue, `float32 [users, items]`."""
        if isinstance(self.model, HistoryModel):
            return history_scores(self.model, self.shared, histories, self.device)
        rows = torch.from_numpy(self.rows(histories)).to(self.device)
        shared = {
            name: value.expand(len(rows), *value.shape[1:]) for name, value in self.shared.items()
        }
        parameters = shared | self._user_parameters(rows)
        return self.model.scores(parameters, self._codes(histories.numbers))

    def logits(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Predictions `[n, B]` for items `int64 [n, B]`, from the users' rows `[n, width]`; `users`
        are user numbers in the dataset, `int64 [n]`, -1 if unknown."""

        def predicted(row: Tensor, codes: tuple[Tensor, ...], items: Tensor) -> Tensor:
            parameters = self.shared | self._user_parameters(row[None])
            features = tuple(code[None] for code in codes)
            return self.model.predict(parameters, features, items[None])[0]

        # as one user's shared parameters, whose gradients are then not computed user by user
        return torch.func.vmap(predicted)(rows, self._codes(users), items)

    def batch_loss(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Mean loss over a batch's liked pairs, plus the penalty on the users' rows and the rows of
        item tables."""
        labels = torch.zeros(items.shape, device=items.device)
        labels[:, 0] = 1.0
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
        """Create the model and its shared parameters `[1, ...]`; return the users' rows.

        Raises:
            ExperimentError: a server generates the model's parameters for each client.
        """
        self.model = self._kind(self._settings, schema)
        drawn = self.model.initial(torch_stream(self.config.seed, "baseline-central"))
        if is_generated(self.model, drawn):
            raise ExperimentError(
                f"model {self.config.model.name!r} cannot be trained centrally: a server generates"
                " its parameters for each client",
                fix="choose another model",
            )
        private = {n: value for n, value in drawn.items() if fits(n, tuple(self._private))}
        self._shapes = {name: value.shape for name, value in private.items()}
        self.shared = {n: v[None].to(self.device) for n, v in drawn.items() if n not in private}
        row = torch.cat([value.flatten() for value in private.values()] or [torch.empty(0)])
        return row.repeat(self.fitted.num_users, 1).to(self.device)

    def _user_parameters(self, rows: Tensor) -> dict[str, Tensor]:
        """Split users' rows `[n, width]` into their private parameters `[n, ...]`."""
        parts = rows.split([shape.numel() for shape in self._shapes.values()], dim=1)
        named = zip(self._shapes.items(), parts, strict=True)
        return {name: part.view(-1, *shape) for (name, shape), part in named}

    def _codes(self, users: np.ndarray) -> tuple[Tensor, ...]:
        """Category codes of users' features, see `Histories.codes`."""
        codes = self.fitted.codes(self.model.schema, users)
        return tuple(torch.from_numpy(code).to(self.device) for code in codes)


# The central variational autoencoder (Liang et al. 2018), the reference for the federated one.
#
# Where this differs from the papers: Fang et al. name plain gradient descent and a learning rate of
# 0.005, with which the network hardly learns in 30 epochs of MovieLens-100K; Adam is used, as in
# Liang et al.


class CentralVaeConfig(SeededConfig, TrainingConfig, VaeConfig):
    """Settings of the central variational autoencoder, in addition to those of the network."""

    epochs: int = Field(default=60, ge=1)
    """Epochs over the users."""
    batch_size: int = Field(default=10, ge=1)
    """Users per gradient step (paper: 10 for MovieLens-100K)."""


class CentralVae(Baseline):
    """Autoencoder of histories, trained with Adam on batches of users.

    Attributes:
        network: class of the model, with settings among the baseline's.
    """

    name = "vae"
    Config = CentralVaeConfig
    paper = "Mult-VAE (Liang et al. 2018)"
    network: type[HistoryModel] = Vae
    config: CentralVaeConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters; users without a positive item are left out."""
        generator = torch_stream(self.config.seed, "baseline-vae")
        self.model = self.network(self.config, histories.schema())
        self.parameters = train_histories(
            self.model, histories, self.config, generator, self.device, fused=False
        )

    def scores(self, histories: Histories) -> Tensor:
        """Scores of each user's history, `float32 [users, items]`."""
        return history_scores(self.model, self.parameters, histories, self.device)


# The central denoising autoencoder (Mult-DAE, Liang et al. 2018): `vae` without a distribution of
# codes.


class CentralAe(CentralVae):
    """Denoising autoencoder of histories, trained with Adam on batches of users."""

    name = "ae"
    paper = "Mult-DAE (Liang et al. 2018)"
    network = Ae


# GMF, generalised matrix factorization (He et al. 2017, section 3.2): `neumf` without its tower.


class GmfConfig(CentralNeumfConfig):
    """Settings of GMF."""

    factors: Width = 32
    """Number of factors (width of the product)."""
    tower: tuple[()] = ()
    """Not used: the model has no tower."""


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


class CentralMf(CentralNeumf):
    """An unweighted product of factors."""

    name = "mf"
    Config = GmfConfig
    paper = "Koren et al. 2009"
    config: GmfConfig

    def fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise the bias, 0."""
        return {"b": torch.zeros(())}

    def _product_weights(self) -> Tensor:
        """Weights of the product, all 1, `[factors]`."""
        return torch.ones(self.config.factors, device=self.device)


# MLP, a tower of layers over the embeddings of a user and an item (He et al. 2017, section 3.3):
# `neumf` without its product.


class MlpConfig(CentralNeumfConfig):
    """Settings of MLP."""

    factors: Literal[0] = 0
    """Not used: the model has no product."""


class Mlp(CentralNeumf):
    """A tower of layers."""

    name = "mlp"
    Config = MlpConfig
    paper = "He et al. 2017, section 3.3"
    config: MlpConfig
