# SPDX-License-Identifier: Apache-2.0
"""Systems with a row of parameters per user, trained on examples: items and their labels.

Of likes, each liked pair comes with a number of items that the user does not like, drawn again in
each epoch. A new user is folded in by gradient descent on its own row, which starts from the mean
of all users, on its liked items and as many drawn items as in training; all other parameters are
fixed.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Histories
from fedrec.baselines.training import HELD_OUT, PatienceConfig, train
from fedrec.baselines.triples import Triples
from fedrec.baselines.user_rows import UserRowsBaseline, UserRowsConfig, own_seed
from fedrec.device import one_thread
from fedrec.nn.optimisers import Adam
from fedrec.rng import stream

FOLD_IN_STEPS = 60
"""Steps of Adam on the row of a user who is folded in."""
_FOLD_IN_RATE = 0.02  # of these steps


class ExamplesConfig(UserRowsConfig, PatienceConfig):
    """Settings of systems that are trained on examples."""

    negatives: int = Field(default=4, ge=1)
    """Negatives sampled per liked pair."""
    regularisation: float = Field(default=0.0, ge=0)
    """L2 penalty on the embeddings of a batch, averaged over its examples."""


class ExampleBatch(NamedTuple):
    """Examples of some users.

    Attributes:
        users: `int64 [n]`, places of the users among the fitted ones.
        items: `int64 [n, B]`.
        labels: `float32 [n, B]`.
    """

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray


class ExamplesBaseline(UserRowsBaseline):
    """Parameters of users and shared ones, trained together on batches of examples.

    Attributes:
        shared: the other parameters, by name.
    """

    config: ExamplesConfig
    shared: dict[str, Tensor]

    @abstractmethod
    def logits(self, rows: Tensor, items: Tensor, users: np.ndarray) -> Tensor:
        """Predictions `[n, B]` of items `int64 [n, B]`, from the users' rows `[n, width]`; `users`
        are their numbers in the dataset, `int64 [n]`, -1 for unknown ones."""

    @abstractmethod
    def batch_loss(self, rows: Tensor, items: Tensor, labels: Tensor, users: np.ndarray) -> Tensor:
        """Mean over the `n` of a batch of the sum of their losses, with the penalty; arguments as
        in `logits`, labels `[n, B]`."""

    def losses(self, predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the losses of examples, `[n, B]` each: the cross-entropy of logits."""
        return F.binary_cross_entropy_with_logits(predictions, labels, weights, reduction="sum")

    def train_pairs(self, users: Tensor, random: np.random.Generator) -> None:
        """Train on the liked pairs of `fitted`, from the shared parameters and the users' rows
        `[users, width]`."""
        config = self.config
        triples = Triples(self.fitted.csr(), "pairs", random)

        def examples(own: np.ndarray, *columns: np.ndarray) -> ExampleBatch:
            more = config.negatives + 1 - len(columns)
            items = np.stack([*columns, *(triples.others(own) for _ in range(more))], axis=1)
            labels = np.zeros(items.shape, np.float32)
            labels[:, 0] = 1.0
            return ExampleBatch(own, items, labels)

        held_out = []
        if config.patience is not None:
            pairs = triples.hold_out(HELD_OUT, stream(config.seed, "baseline-held-out"))
            held_out.append(examples(*pairs))
        steps = -(-triples.per_epoch // config.batch_size)
        self.train_examples(
            users, lambda: starmap(examples, triples.epoch(config.batch_size)), steps, held_out
        )

    def train_examples(
        self,
        users: Tensor,
        epoch: Callable[[], Iterable[ExampleBatch]],
        steps: int,
        held_out: Sequence[ExampleBatch] = (),
    ) -> None:
        """Train all parameters.

        Args:
            users: `[users, width]`, the users' first rows.
            epoch: the batches of an epoch.
            steps: their number.
            held_out: for early stopping.
        """
        names = list(self.shared)
        trained = [one.requires_grad_() for one in (users, *self.shared.values())]

        def loss(values: Sequence[Tensor], batch: ExampleBatch) -> Tensor:
            self.shared = dict(zip(names, values[1:], strict=True))
            own, items, labels = (torch.from_numpy(part).to(self.device) for part in batch)
            rows = F.embedding(own, values[0])
            return self.batch_loss(rows, items, labels, self.fitted.numbers[batch.users])

        @torch.no_grad()
        def measured(values: Sequence[Tensor]) -> float:
            return sum(float(loss(values, batch)) for batch in held_out)

        last = train(
            trained,
            self.config,
            lambda _: epoch(),
            lambda batch: loss(trained, batch).backward(),
            steps=steps,
            patience=self.config.patience,
            held_out=measured if held_out else None,
        )
        self.shared = dict(zip(names, last[1:], strict=True))
        self.own = last[0].cpu().numpy()

    def folded_in(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of users that were not in training, each computed from its
        own items only. Users without items get the mean row."""
        counts = np.diff(histories.csr().indptr)
        return self.descended(counts > 0, histories.numbers, lambda: self._own_examples(histories))

    @torch.enable_grad()
    @one_thread()
    def descended(
        self,
        able: np.ndarray,
        numbers: np.ndarray,
        steps: Callable[[], Iterator[tuple[Tensor, Tensor, Tensor]]],
    ) -> np.ndarray:
        """Rows `float32 [users, width]` after steps of Adam, each user's on its own examples.

        Args:
            able: `bool [users]`, who has examples; the others have the mean row.
            numbers: `int64 [users]`, the users' numbers in the dataset, -1 for unknown ones.
            steps: items, labels and weights of each step, `[users, examples]` each.
        """
        start = torch.from_numpy(self.own.mean(0)).expand(len(able), -1).contiguous()
        if not able.any():
            return start.numpy()
        rows = start.to(self.device).requires_grad_()
        config = self.config
        kept = torch.from_numpy(able).to(self.device)
        adam = Adam([rows], lr=_FOLD_IN_RATE)
        for items, labels, weights in steps():
            losses = self.losses(self.logits(rows, items, numbers), labels, weights)
            (losses + config.regularisation * rows[kept].square().sum()).backward()
            adam.step()
            adam.zero_grad()
        return rows.detach().cpu().numpy()

    def _own_examples(self, histories: Histories) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each step: items, labels and weights, `[users, examples]`; those of a user depend on
        its own items only."""
        liked = histories.csr()
        config = self.config
        counts = np.diff(liked.indptr)
        longest = counts.max()
        shape = (FOLD_IN_STEPS, histories.num_users, counts.max() * (1 + config.negatives))
        items = np.zeros(shape, np.int64)
        labels = np.zeros(shape[1:], np.float32)
        weights = np.zeros(shape[1:], np.float32)
        labels[:, :longest] = 1.0
        for user in np.flatnonzero((counts > 0) & (counts < histories.num_items)):
            own = liked[[user]]
            random = stream(own_seed(own.indices), "fold-in")
            number = counts[user]
            drawn = number * config.negatives
            others = Triples(own, "pairs", random).others(np.zeros(FOLD_IN_STEPS * drawn, np.int64))
            items[:, user, :number] = own.indices
            items[:, user, longest : longest + drawn] = others.reshape(-1, drawn)
            weights[user, :number] = weights[user, longest : longest + drawn] = 1 / number
        on_device = [torch.from_numpy(part).to(self.device) for part in (items, labels, weights)]
        return ((step, on_device[1], on_device[2]) for step in on_device[0])
