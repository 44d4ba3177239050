# SPDX-License-Identifier: Apache-2.0
"""Systems that are trained by gradient descent: examples, triples, epochs of batches, rows of
parameters per user, and centrally trained versions of federated models."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Baseline, Histories, Sparse
from fedrec.components.registry import MODEL, resolve
from fedrec.components.sections import Section, component_settings
from fedrec.config import Config, Width, fits
from fedrec.data.interactions import FeatureNames, Schema, last_items
from fedrec.device import one_thread
from fedrec.errors import DataError, ExperimentError
from fedrec.kernel.compiled import compiled
from fedrec.models.base import HistoryModel, Model, is_generated
from fedrec.models.mf import NeumfConfig
from fedrec.models.privrec import PrivRec
from fedrec.models.sequential import SequenceModel
from fedrec.models.vae import Ae, Vae, VaeConfig
from fedrec.nn.layers import Adam, glorot
from fedrec.rng import stream, torch_stream


class SeededConfig(Config):
    """Setting of all systems with random draws."""

    seed: int = Field(default=0, ge=0)
    """Seed of all random draws."""


class TrainingConfig(SeededConfig):
    """Settings of all systems that are trained by gradient descent on batches."""

    epochs: int = Field(default=10, ge=1)
    """Epochs over the training data."""
    batch_size: int = Field(default=1024, ge=1)
    """Examples per gradient step."""
    learning_rate: float = Field(default=0.001, gt=0)
    """Learning rate of Adam."""
    final_rate: float = Field(default=1.0, gt=0, le=1)
    """Final learning rate as a share of `learning_rate`, with linear decay; 1: constant."""
    average: float = Field(default=0.0, ge=0, lt=1)
    """Decay of the exponential moving average of all parameters, used after training: it averages
    about 1 / (1 - average) steps (Polyak and Juditsky 1992 for the plain mean) and ranks better
    than the last parameters, which change with every batch; 0: no averaging."""


def train(
    tensors: Sequence[Tensor],
    config: TrainingConfig,
    epoch: Callable[[int], Iterable[Any]],
    backward: Callable[[Any], object],
    *,
    steps: int,
    fused: bool = True,
    long_steps: bool = False,
) -> list[Tensor]:
    """Train leaf tensors by Adam, on a processor with one thread unless steps are long.

    Args:
        tensors: `float32 [...]` of any shapes, trained in place; with an average they are not the
            result.
        config: epochs, learning rate, average.
        epoch: the batches of an epoch, by its number from 0.
        backward: computes the gradients of a batch.
        steps: number of steps of an epoch, over which the learning rate falls.
        fused: whether Adam updates all parameters of a tensor in one pass, which is faster and
            rounds differently.
        long_steps: whether a step takes tenths of a second, for which several threads are worth
            their waiting for each other.

    Returns:
        The trained values `float32 [...]`, detached, in the order of the tensors.
    """
    optimiser = Adam(tensors, lr=config.learning_rate, fused=fused)
    falling = torch.optim.lr_scheduler.LinearLR(
        optimiser, 1.0, config.final_rate, max(1, steps * config.epochs - 1)
    )
    averages = [value.detach().clone() for value in tensors] if config.average else []
    done = 0
    with nullcontext() if long_steps else one_thread():
        for number in range(config.epochs):
            for batch in epoch(number):
                optimiser.zero_grad()
                backward(batch)
                optimiser.step()
                falling.step()
                done += 1
                # the decay rises over the first steps: initial values have no weight
                weight = 1 - min(config.average, (1 + done) / (10 + done))
                for mean, value in zip(averages, tensors, strict=False):  # none without an average
                    mean.lerp_(value.detach(), weight)
    return [value.detach() for value in averages or tensors]


class Triples:
    """Sampler of triples of a user, a liked and another item.

    Args:
        liked: binary `[users, items]`, columns ascending within a row. Users without a liked item,
            or without any other, are never drawn.
        draw: unit of uniform draws: users, followed by one of the user's items, or liked pairs.
        random: source of randomness.

    Raises:
        DataError: no user has both a liked item and another.
    """

    def __init__(
        self, liked: Sparse, draw: Literal["users", "pairs"], random: np.random.Generator
    ) -> None:
        counts = np.diff(liked.indptr)
        self._liked = liked
        self._counts = counts
        self._draw = draw
        self._random = random
        self._owner = np.repeat(np.arange(len(counts)), counts)
        self._free = liked.shape[1] - counts
        self._users = np.flatnonzero((counts > 0) & (self._free > 0))
        self._pairs = np.flatnonzero(self._free[self._owner] > 0)
        if not len(self._users):
            raise DataError(
                "no user has both liked and other items",
                expected="a user with liked and other items",
                got="none",
                fix="lower positive-above, or choose another split or dataset",
            )

    @property
    def per_epoch(self) -> int:
        """Number of triples in an epoch."""
        return len(self._pairs)

    def epoch(self, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield an epoch's triples in batches, one per liked pair: users, liked items and others,
        `int64 [batch]` each."""
        random = self._random
        total = len(self._pairs)
        if self._draw == "users":
            users = random.choice(self._users, total)
            entries = self._liked.indptr[users] + random.integers(0, self._counts[users])
        else:
            entries = random.permutation(self._pairs)
            users = self._owner[entries]
        liked = self._liked.indices[entries].astype(np.int64)
        others = self.others(users)
        for start in range(0, total, batch_size):
            batch = slice(start, start + batch_size)
            yield users[batch], liked[batch], others[batch]

    def others(self, users: np.ndarray) -> np.ndarray:
        """Draw an item that each user does not like, uniformly, `int64 [users]`."""
        rank = self._random.integers(0, self._free[users])
        return _ranked_others(self._liked.indptr, self._liked.indices, users, rank)


@compiled
def _ranked_others(offsets, liked, users, ranks):
    """Item at a given rank among those that a user does not like.

    Args:
        offsets: `int [all users + 1]`, where each user's liked items begin.
        liked: `int [pairs]`, ascending within a user.
        users: `int64 [n]`.
        ranks: `int64 [n]`, from 0 up to less than the number of other items.

    Returns:
        `int64 [n]`.
    """
    items = np.empty(len(users), dtype=np.int64)
    for n in range(len(users)):
        start = offsets[users[n]]
        low = offsets[users[n]]
        high = offsets[users[n] + 1]
        # The number of liked items before the rank-th other item is the number of liked items with
        # at most `rank` others before them.
        while low < high:
            middle = (low + high) // 2
            if liked[middle] - (middle - start) <= ranks[n]:
                low = middle + 1
            else:
                high = middle
        items[n] = ranks[n] + low - start
    return items


# Shared code of systems with a row of parameters per user. They are transductive: evaluated users
# are in training, too, with their known items.


class UserRowsBaseline(Baseline):
    """Baseline with a row of parameters per user; `fit` stores the histories and the rows.

    Attributes:
        fitted: the histories of the training users.
        user_rows: `float32 [users, width]`, a row for each user of `fitted`.
    """

    transductive = True
    fitted: Histories
    user_rows: np.ndarray

    def rows(self, histories: Histories) -> np.ndarray:
        """Rows of users, `float32 [users, width]`."""
        positions = self.fitted.positions(histories)
        rows = self.user_rows[positions]
        unseen = np.flatnonzero(positions < 0)
        if len(unseen):
            rows[unseen] = self.rows_of_new(histories.take(unseen))
        return rows

    def rows_of_new(self, histories: Histories) -> np.ndarray:
        """Rows of users who were not in training, `float32 [users, width]` or broadcastable to it,
        each computed from its own items only; the mean of all rows by default."""
        return self.user_rows.mean(0)


# Systems with a row of parameters per user, trained on examples: items and their labels.
#
# Of likes, each liked pair comes with a number of items that the user does not like, drawn again in
# each epoch.

NEGATIVES = 4
"""Items that a user does not like, drawn for each liked one in an epoch."""


class _ExamplesConfig(TrainingConfig):
    """Settings of systems trained on examples."""

    regularisation: float = Field(default=0.0, ge=0)
    """L2 penalty on the embeddings of a batch, averaged over its examples."""


class _ExamplesBaseline(UserRowsBaseline):
    """Parameters of users and shared ones, trained together on batches of examples.

    Attributes:
        shared: the other parameters, by name.
    """

    config: _ExamplesConfig
    shared: dict[str, Tensor]

    @abstractmethod
    def batch_loss(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Mean loss over a batch's liked pairs, plus the penalty; rows `[n, width]`, items `int64
        [n, B]`, the liked one of a row first; `users` are user numbers in the dataset, `int64 [n]`,
        -1 if unknown."""

    def train_pairs(self, users: Tensor, random: np.random.Generator) -> None:
        """Train on the liked pairs of `fitted`, from the shared parameters and the users' rows
        `[users, width]`."""
        config = self.config
        triples = Triples(self.fitted.csr(), "pairs", random)
        leaves = [value.requires_grad_() for value in (users, *self.shared.values())]

        def backward(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
            drawn, liked, other = batch
            more = (triples.others(drawn) for _ in range(NEGATIVES - 1))
            items = torch.from_numpy(np.stack([liked, other, *more], axis=1)).to(self.device)
            rows = F.embedding(torch.from_numpy(drawn).to(self.device), leaves[0])
            self.batch_loss(rows, items, self.fitted.numbers[drawn]).backward()

        steps = -(-triples.per_epoch // config.batch_size)
        rows, *shared = train(
            leaves, config, lambda _: triples.epoch(config.batch_size), backward, steps=steps
        )
        self.shared = dict(zip(self.shared, shared, strict=True))
        self.user_rows = rows.cpu().numpy()


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


class CentralNeumfConfig(_ExamplesConfig, NeumfConfig):
    """Settings of NeuMF."""

    factors: int = Field(default=32, ge=0, le=2**16)
    """Number of factors (width of the product); 0: no product."""
    tower: tuple[Width, ...] = (64, 32, 16)
    """Widths of the tower: of the two embeddings together (even), and of each layer; empty: no
    tower."""


class CentralNeumf(_ExamplesBaseline):
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
        fresh = self._fresh(generator)
        fresh["items"] = torch.randn(histories.num_items, width, generator=generator) * _INIT_STD
        self.shared = {name: value.to(self.device) for name, value in fresh.items()}
        self.train_pairs(users.to(self.device), stream(config.seed, "baseline-neumf-triples"))

    def _fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise parameters other than the rows: Glorot-uniform layers, zero biases."""
        tower = self.config.tower
        last = self.config.factors + (tower[-1] if tower else 0)
        parameters = {"h": glorot(1, last, generator)[0], "b": torch.zeros(())}
        for layer, (before, after) in enumerate(itertools.pairwise(tower)):
            parameters[f"W{layer}"] = glorot(after, before, generator)
            parameters[f"b{layer}"] = torch.zeros(after)
        return parameters

    def _joined_logits(self, users: Tensor, items: Tensor) -> Tensor:
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
        logits = self._joined_logits(rows[:, None], item_rows)
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


def _train_histories(
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
        fused: see `train`.

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


class CentralConfig(_ExamplesConfig):
    """Settings of a centrally trained model."""

    model: Annotated[Section, MODEL] = Section(name="mf")
    """The model: its name and settings."""
    private_parameters: tuple[str, ...] = ("user.*",)
    """Patterns of the private parameters of each user; not used by models that represent users by
    features or histories."""


class Central(_ExamplesBaseline):
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
            self.shared = _train_histories(
                self.model, histories, self.config, generator, self.device
            )
        else:
            self.train_pairs(users, stream(self.config.seed, "baseline-central-triples"))

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Scores of the catalogue, `float32 [users, items]`."""
        if isinstance(self.model, HistoryModel):
            inputs = _inputs(self.model, histories).unsqueeze(0).to(self.device)
            return self.model.history_scores(self.shared, inputs)[0]
        rows = torch.from_numpy(self.rows(histories)).to(self.device)
        shared = {
            name: value.expand(len(rows), *value.shape[1:]) for name, value in self.shared.items()
        }
        parameters = shared | self._user_parameters(rows)
        return self.model.scores(parameters, self._codes(histories.numbers))

    def batch_loss(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Mean loss over a batch's liked pairs, plus the penalty on the users' rows and the rows of
        item tables."""

        def predicted(row: Tensor, codes: tuple[Tensor, ...], items: Tensor) -> Tensor:
            parameters = self.shared | self._user_parameters(row[None])
            features = tuple(code[None] for code in codes)
            return self.model.predict(parameters, features, items[None])[0]

        # as one user's shared parameters, whose gradients are then not computed user by user
        predictions = torch.func.vmap(predicted)(rows, self._codes(users), items)
        labels = torch.zeros(items.shape, device=items.device)
        labels[:, 0] = 1.0
        loss = self.model.loss(predictions, labels).sum() * items.shape[1]
        if self.config.regularisation:
            tables = (
                self.shared[name][0] for name in self.model.item_tables if name in self.shared
            )
            squares = rows.square().sum() + sum(table[items].square().sum() for table in tables)
            loss = loss + self.config.regularisation * squares
        return loss / len(rows)

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


class CentralVaeConfig(TrainingConfig, VaeConfig):
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
        self.parameters = _train_histories(
            self.model, histories, self.config, generator, self.device, fused=False
        )

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Scores of each user's history, `float32 [users, items]`."""
        inputs = _inputs(self.model, histories).unsqueeze(0).to(self.device)
        return self.model.history_scores(self.parameters, inputs)[0]


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

    def _fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
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
