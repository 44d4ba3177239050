# SPDX-License-Identifier: Apache-2.0
"""Steps without training: sums over a client's own history, such as products of items, counts and
transitions."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.step import Step, StepConfig
from fedrec.data.interactions import LowRatedConfig, RecencyConfig
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Model, Parameters
from fedrec.models.linear import PRODUCTS, WEIGHTS, products_of
from fedrec.neighbourhood import Scale, scaled
from fedrec.sums.products import BIAS, ItemScaleConfig, chosen_items, item_scale
from fedrec.training.block import Block
from fedrec.training.draws import ExampleDraw, PreferenceDraw, TransitionsDraw, WeightedDraw
from fedrec.training.results import BlockUpdate, ChangedRows, Factored

# Base of steps that do not train but send sufficient statistics of a client's history, once.


class OnceConfig(StepConfig):
    """Settings of what is sent once; with `epochs = 0` nothing is, with any other number once."""

    epochs: int = Field(default=1, ge=0)
    """0 sends nothing, any other number sends the statistics once."""


class SufficientStatisticsConfig(OnceConfig, LowRatedConfig):
    """Settings of what counts in a history."""


class SufficientStatistics(Step):
    """Base of steps whose update is a sparse vector of a client's items, or its outer product with
    itself.

    A subclass defines in `entries` what each item adds, and in `contributions` whether updates have
    signs. A subclass with other `entries` is `signed` unless it declares otherwise. With `epochs =
    0` nothing is sent, with any other number once.

    Attributes:
        outer: whether the parameter changes by the outer product of the vector with itself.
    """

    Config: ClassVar[type[OnceConfig]] = SufficientStatisticsConfig
    config: OnceConfig
    outer: ClassVar[bool] = False
    _training = Step._training | {"entries"}

    @abstractmethod
    def entries(
        self, parameters: Mapping[str, Tensor], items: np.ndarray, weights: np.ndarray
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """The vector's entries, each a function of its item and weight alone.

        Args:
            parameters: the global ones, without cohort dimension, unchanged.
            items: `int64 [n]`.
            weights: `float32 [n]`, in (0, 1], how much each is liked.

        Returns:
            The name of the parameter that changes; for each item the row that its entry changes,
            `int64 [n]`, -1 for none; and the entry, `float64 [n]`.
        """

    def draw(self) -> ExampleDraw:
        """The items that count and their weights; nothing is drawn."""
        others = getattr(self.config, "low_rated", 0.0)
        return WeightedDraw(min(self.config.epochs, 1), others=others)

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """The sums that every client of a block adds."""
        name, rows, values = self.entries(parameters, *_only_batch(block))
        sent = rows >= 0
        clients = np.arange(len(block) + 1)
        owners = np.repeat(clients[:-1], block.examples)[sent]
        offsets = np.searchsorted(owners, clients)
        vectors = ChangedRows.ragged(offsets, rows[sent], values[sent, None])
        change = Factored(vectors, None) if self.outer else vectors
        return BlockUpdate(parameters, block, {name: change}, [math.nan] * len(block))


def _only_batch(block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Items and labels of clients with at most one step, one client's after the other's."""
    items, labels = (
        part.numpy(force=True).reshape(len(block), -1) for part in (block.items, block.labels)
    )
    real = np.arange(items.shape[1]) < np.array(block.examples)[:, None]
    return items[real], labels[real]


# A client's part in a linear item-to-item model: the products of its own history, once.
#
# With x the indicator of the items that a client likes (with `low-rated` a smaller weight for its
# other rated items) and D the items' scale, it sends (D x)(D x)^T. The sum over clients is the Gram
# matrix of the interactions, which determines EASE, PureSVD and every other linear model;
# strategies `gram`, `fold-in` and `gram-start` compute one. Nothing is trained.
#
# Clipped in L2 and noised like any other update, the sum is a differentially private release: the
# Frobenius norm of a client's matrix is |D x|^2, which is the number of its items if all of them
# have weight and scale 1. The matrices are positive semi-definite, so replacing a client moves
# their clipped sum by sqrt(2) S at most (`fedrec.privacy.accounting.sampling`).


class GramStepConfig(SufficientStatisticsConfig, ItemScaleConfig):
    """Settings of a client's products."""


class GramStep(SufficientStatistics):
    """Sends the products of one history."""

    name = "gram"
    Config = GramStepConfig
    contributions = "non-negative"
    symmetric = (WEIGHTS, PRODUCTS)
    paper = "EASE (Steck 2019), equation 8: X^T X as a sum over users"
    outer: ClassVar[bool] = True
    config: GramStepConfig

    def prepare(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """Check that the model is computed from products of items."""
        if products_of(parameters) not in parameters:
            raise ExperimentError(
                f"model {type(self.model).__name__!r} has no products of items",
                expected="model.name = 'item-weights', or another model of products of items",
                fix="set model.name = 'item-weights', or another step",
            )
        return {}

    def entries(
        self, parameters: Mapping[str, Tensor], items: np.ndarray, weights: np.ndarray
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """The weight of each chosen item times its scale, in the item's row of the products."""
        catalogue = self.model.schema.num_items
        products = products_of(parameters)
        bias = parameters[BIAS][:, 0].cpu() if BIAS in parameters else torch.zeros(catalogue)
        row_of, scale = _chosen_rows(bias, len(parameters[products]), self.config.exponent)
        rows = row_of[items]
        return products, rows, weights * scale[rows]


def _chosen_rows(bias: Tensor, size: int, exponent: float) -> tuple[np.ndarray, np.ndarray]:
    """The row of each item among the `size` items that biases `[items]` choose, `int64 [items]`, -1
    for the others; and the scale of each row, `float64 [size]`."""
    chosen = chosen_items(bias, size)
    row_of = np.full(len(bias), -1)
    row_of[chosen.numpy()] = np.arange(size)
    return row_of, item_scale(bias[chosen], exponent).numpy()


# A client's own ratings, mapped to [-1, 1], and 1 for each rated item.
#
# Summed over clients these are sums and numbers of ratings. Clipped and noised like any other
# update they are differentially private, and `means-start` computes item means from them. Nothing
# is trained. All contributions are non-negative, so replacing a client changes their clipped sum by
# at most sqrt(2) S (`fedrec.neighbourhood`).


class RatingSumsConfig(StepConfig):
    """Settings of adding up ratings; with `epochs = 0` nothing is sent, with any other number
    once."""

    scale: Scale = (1.0, 5.0)
    """Lowest and highest rating; public. Ratings outside are clamped to it."""


class RatingSums(Step):
    """Sends ratings in [-1, 1] and indicators, as changes of `item.mean` and `item.count`.

    A user with n ratings has an update of L2 norm between sqrt(n) and sqrt(2 n).
    """

    name = "rating-sums"
    Config = RatingSumsConfig
    contributions = "non-negative"
    released_together = ("item.mean", "item.count")  # no update is negative if both are released
    config: RatingSumsConfig

    def draw(self) -> ExampleDraw:
        """All positive items of a client and its ratings; nothing is drawn."""
        return PreferenceDraw(min(self.config.epochs, 1))

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """The ratings of every client of a block."""
        items, ratings = _only_batch(block)
        offsets = np.append(0, np.cumsum(block.examples))
        values = scaled(ratings, self.config.scale)[:, None]
        amounts = {"item.mean": values, "item.count": np.ones_like(values)}
        changes = {n: ChangedRows.ragged(offsets, items, value) for n, value in amounts.items()}
        return BlockUpdate(parameters, block, changes, [math.nan] * len(block))

    def prepare(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """Check that the model has item means."""
        if "item.mean" not in parameters or "item.count" not in parameters:
            raise ExperimentError(
                "the model has no item means",
                expected="parameters 'item.mean' and 'item.count'",
                got=", ".join(parameters),
                fix="set model.name = 'pnbm'",
            )
        return {}


# A client's rated items, without training: 1 for each positive item, and with `low-rated` a smaller
# weight for each of its other rated items, as a change of the items' biases.
#
# The sum over clients counts how popular each item is. Clipped and noised like any other update it
# is a differentially private histogram, and `popularity-start` computes initial biases from it.
# Nothing is trained. Counts have no signs, so replacing a client moves their clipped sum by sqrt(2)
# S at most (`fedrec.privacy.accounting.sampling`).


class Counts(SufficientStatistics):
    """Sends the vector of a client's weights, the indicator of its positive items by default.

    A user who likes n items has an update of L2 norm sqrt(n) and L1 norm n then.
    """

    name = "counts"
    Config = SufficientStatisticsConfig
    contributions = "non-negative"
    config: SufficientStatisticsConfig

    def entries(
        self, parameters: Mapping[str, Tensor], items: np.ndarray, weights: np.ndarray
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """The weight of each item, in the item's own row."""
        return BIAS, items, weights.astype(np.float64)

    def prepare(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """Check that the model has a table of item biases."""
        shape: tuple[int, ...] = tuple(parameters[BIAS].shape) if BIAS in parameters else (0,)
        # an audit's model has rows after the items'
        if shape[1:] != (1,) or shape[0] < self.model.schema.num_items:
            raise ExperimentError(
                f"the model has no table {BIAS!r} with one number per item",
                expected="item biases to count on",
                got=", ".join(parameters),
                fix="set model.item-bias = true",
            )
        return {}


# A client's part in a model of transitions: which of its items follows which, once.
#
# It sends the transitions of its own sequence (`fedrec.sums.products`), i to j, with i and j
# multiplied by the items' scale, as the change of the model's weights. The sum over clients is that
# of everybody's transitions. Nothing is trained, and the window and decay are the model's.
#
# Clipped in L2 and noised like any other update, the sum is a differentially private release. A
# sequence of n items has at most n x window transitions, and its norm is at most that of its sums
# per pair; entries are not negative, so that replacing a client moves the clipped sum by sqrt(2) S
# at most (`fedrec.privacy.accounting.sampling`).


class TransitionsStepConfig(OnceConfig, ItemScaleConfig):
    """Settings of a client's transitions."""


class TransitionsStep(SufficientStatistics):
    """Sends the transitions of one sequence.

    Raises:
        ExperimentError: the model is not one of transitions.
    """

    name = "transitions"
    Config = TransitionsStepConfig
    contributions = "non-negative"
    paper = "a smoothed Markov chain as a sum over users"
    config: TransitionsStepConfig

    def __init__(self, config: TransitionsStepConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        recency = model.form.recency if isinstance(model, HistoryModel) else None
        if recency is None:
            raise ExperimentError(
                f"model {type(model).__name__!r} has no transitions of items",
                expected="model.name = 'transitions'",
                fix="set model.name = 'transitions', or another step",
            )
        self.recency: RecencyConfig = recency

    def entries(
        self, parameters: Mapping[str, Tensor], items: np.ndarray, weights: np.ndarray
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """The weight of each pair of chosen items times the scale of both, at the pair's place in
        the weights; `items` are numbers of pairs."""
        catalogue = self.model.schema.num_items
        size = len(parameters[WEIGHTS])
        bias = parameters[BIAS][:, 0].cpu()[:catalogue]
        row_of, scale = _chosen_rows(bias, size, self.config.exponent)
        first, second = (row_of[side] for side in np.divmod(items, catalogue))
        cells = np.where((first >= 0) & (second >= 0), first * size + second, -1)
        return WEIGHTS, cells, weights * scale[first] * scale[second]

    def draw(self) -> ExampleDraw:
        """The pairs of items and their weights; nothing is drawn."""
        return TransitionsDraw(min(self.config.epochs, 1), recency=self.recency)
