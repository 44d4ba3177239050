# SPDX-License-Identifier: Apache-2.0
"""Central training: examples, triples, epochs of batches, and rows of parameters per user."""

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Baseline, Histories, Sparse
from fedrec.config import Config
from fedrec.device import one_thread
from fedrec.errors import DataError
from fedrec.kernel.compiled import compiled
from fedrec.nn.layers import Adam
from fedrec.rng import stream


class SeededConfig(Config):
    """Setting of all systems with random draws."""

    seed: int = Field(default=0, ge=0)
    """Seed of all random draws."""


class TrainingConfig(Config):
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


# Shared code of systems with a row of parameters per user: the treatment of users who were not
# training users.
#
# `transductive`: evaluated users are in training, with their known items. `fold-in`: they are not;
# when they are scored, their row is computed from their known items with all other parameters
# fixed. A transductive system also folds in users that it does not know.


class UserRowsConfig(SeededConfig):
    """Settings of all systems with a row per user."""

    unseen_users: Literal["transductive", "fold-in"] = "transductive"
    """Treatment of evaluated users who are not training users: also trained on (`transductive`), or
    folded in afterwards (`fold-in`)."""


class UserRowsBaseline(Baseline):
    """Baseline with a row of parameters per user; `fit` stores the histories and the rows.

    Attributes:
        fitted: the histories of the training users.
        user_rows: `float32 [users, width]`, a row for each user of `fitted`.
    """

    config: UserRowsConfig
    fitted: Histories
    user_rows: np.ndarray

    def __init__(self, config: UserRowsConfig) -> None:
        super().__init__(config)
        self.transductive = config.unseen_users == "transductive"

    def rows(self, histories: Histories) -> np.ndarray:
        """Rows of users, fitted or folded in, `float32 [users, width]`."""
        positions = self.fitted.positions(histories)
        rows = self.user_rows[positions]
        unseen = np.flatnonzero(positions < 0)
        if len(unseen):
            rows[unseen] = self.folded_in(histories.take(unseen))
        return rows

    @abstractmethod
    def folded_in(self, histories: Histories) -> np.ndarray:
        """Rows of users who were not in training, `float32 [users, width]`, each computed from its
        own items only."""


def own_seed(items: np.ndarray) -> int:
    """Seed from a user's items `int64 [n]` only, so that it does not depend on the other users of a
    block."""
    return zlib.crc32(np.sort(items).astype(np.int64).tobytes())


# Systems with a row of parameters per user, trained on examples: items and their labels.
#
# Of likes, each liked pair comes with a number of items that the user does not like, drawn again in
# each epoch. A new user is folded in by gradient descent on its own row, which starts from the mean
# of all users, on its liked items and as many drawn items as in training; all other parameters are
# fixed.

NEGATIVES = 4
"""Items that a user does not like, drawn for each liked one in an epoch."""
FOLD_IN_STEPS = 60
"""Steps of Adam on the row of a user who is folded in."""
_FOLD_IN_RATE = 0.02  # of these steps


class ExamplesConfig(UserRowsConfig, TrainingConfig):
    """Settings of systems trained on examples."""

    regularisation: float = Field(default=0.0, ge=0)
    """L2 penalty on the embeddings of a batch, averaged over its examples."""


class ExamplesBaseline(UserRowsBaseline):
    """Parameters of users and shared ones, trained together on batches of examples.

    Attributes:
        shared: the other parameters, by name.
    """

    config: ExamplesConfig
    shared: dict[str, Tensor]

    @abstractmethod
    def logits(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Predictions `[n, B]` for items `int64 [n, B]`, from the users' rows `[n, width]`; `users`
        are user numbers in the dataset, `int64 [n]`, -1 if unknown."""

    @abstractmethod
    def batch_loss(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Mean loss over a batch's liked pairs, plus the penalty; rows `[n, width]`, items `int64
        [n, B]`, the liked one of a row first, users `int64 [n]`."""

    def losses(self, predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the losses of examples, `[n, B]` each: the cross-entropy of logits."""
        return F.binary_cross_entropy_with_logits(predictions, labels, weights, reduction="sum")

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

    @torch.enable_grad()
    @one_thread()
    def folded_in(self, histories: Histories) -> np.ndarray:
        """Rows of users who were not in training, `float32 [users, width]`, fitted by Adam on each
        user's own items only. Users without items get the mean row."""
        users = histories.num_users
        start = torch.from_numpy(self.user_rows.mean(0)).expand(users, -1).contiguous()
        items, labels, weights = self._user_examples(histories)
        if not weights.any():
            return start.numpy()
        rows = start.to(self.device).requires_grad_()
        arrays = items, labels, weights, weights.any(1)
        steps, targets, shares, trained = (
            torch.from_numpy(array).to(self.device) for array in arrays
        )
        adam = Adam([rows], lr=_FOLD_IN_RATE)
        for step in steps:
            losses = self.losses(self.logits(rows, step, histories.numbers), targets, shares)
            (losses + self.config.regularisation * rows[trained].square().sum()).backward()
            adam.step()
            adam.zero_grad()
        return rows.detach().cpu().numpy()

    def _user_examples(self, histories: Histories) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the items of each fold-in step, `int64 [steps, users, examples]`, their labels and
        weights `float32 [users, examples]`, 0 for padding."""
        liked = histories.csr()
        counts = np.diff(liked.indptr)
        longest = counts.max(initial=0)
        shape = (histories.num_users, longest * (1 + NEGATIVES))
        items = np.zeros((FOLD_IN_STEPS, *shape), np.int64)
        labels = np.zeros(shape, np.float32)
        weights = np.zeros(shape, np.float32)
        labels[:, :longest] = 1.0
        for user in np.flatnonzero((counts > 0) & (counts < histories.num_items)):
            row = liked[[user]]
            number = counts[user]
            drawn = number * NEGATIVES
            triples = Triples(row, "pairs", stream(own_seed(row.indices), "fold-in"))
            others = triples.others(np.zeros(FOLD_IN_STEPS * drawn, np.int64))
            items[:, user, :number] = row.indices
            items[:, user, longest : longest + drawn] = others.reshape(-1, drawn)
            weights[user, :number] = weights[user, longest : longest + drawn] = 1 / number
        return items, labels, weights
