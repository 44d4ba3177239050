# SPDX-License-Identifier: Apache-2.0
"""Batches and blocks that hold session views beside the usual examples, for self-supervised
training in blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block, Rectangle, UserCodes
from fedrec.cohort.descent import Recommending
from fedrec.pretext.task import SessionTask
from fedrec.pretext.views import ViewLayout


@dataclass(frozen=True, eq=False)
class SessionBatches(Batches):
    """Batches of examples (possibly none, then `sizes` is 0) and of session views (possibly none).

    Attributes:
        views: `int64 [S, V, width]`, the views of each step; -1 for padding.
    """

    views: np.ndarray

    @classmethod
    def deal(
        cls, plain: Batches, views: Sequence[np.ndarray], views_per_step: int, layout: ViewLayout
    ) -> Self:
        """Distribute the views of each epoch evenly over the steps of the epoch, in order.

        Args:
            plain: batches of examples, equally many in each epoch; they determine the number of
                steps.
            views: `int64 [views, layout.width]` of each epoch.
            views_per_step: largest number of views of a step, if there are no examples.
            layout: columns of a view.
        """
        width = plain.items.shape[1]
        if len(plain.sizes):
            steps = [plain.last_epoch] * len(views)
            examples = plain.examples
        else:
            steps = [-(-len(own) // views_per_step) for own in views]
            examples = len(views[-1]) if len(views) else 0
            none = np.zeros((sum(steps), width))
            plain = Batches(
                none.astype(np.int64), none.astype(np.float32), np.zeros(len(none), np.int64), 0, 0
            )
        return cls(
            plain.items,
            plain.labels,
            plain.sizes,
            examples,
            steps[-1] if steps else 0,
            _dealt(views, steps, layout.width),
        )

    def references(self) -> tuple[np.ndarray, np.ndarray]:
        """The items whose rows each step needs, `int64 [S, N]`, and which of them are not padding,
        `bool [S, N]`. The items of the views follow those of the examples."""
        items, real = super().references()
        steps, views, width = self.views.shape
        own = self.views.reshape(steps, views * width)
        return np.concatenate([items, own.clip(min=0)], axis=1), np.concatenate(
            [real, own >= 0], axis=1
        )


@dataclass(frozen=True, eq=False)
class SessionBlock(Block):
    """A block of clients with session views.

    Attributes:
        views: `int64 [S, C, V, width]`, -1 for padding. In a step's item rows they follow the
            examples.
    """

    stepwise = (*Block.stepwise, "views")

    views: Tensor

    @classmethod
    def of(cls, users: UserCodes, batches: Sequence[Batches], device: torch.device) -> Self:
        """Build a block from the data of some clients, whose batches are `SessionBatches`."""
        own = [batch for batch in batches if isinstance(batch, SessionBatches)]
        rectangle = Rectangle.of(own, device)
        most = max(batch.views.shape[1] for batch in own)
        views = np.full((len(rectangle.places), most, own[0].views.shape[2]), -1, dtype=np.int64)
        start = 0
        for batch in own:
            stop = start + len(batch.views)
            views[start:stop, : batch.views.shape[1]] = batch.views
            start = stop
        none = torch.full((len(own),), -1, device=device)
        plain = Block.of(users, batches, device)
        shared = {field.name: getattr(plain, field.name) for field in fields(Block)}
        return cls(**shared, views=rectangle.filled(views, none))


class SessionObjective:
    """The loss of a step on session views, and on its examples if there is a `recommending`
    objective.

    Args:
        task: the self-supervised task (equation 10 of PrivRec).
        recommending: the loss on the examples; None: there are no examples.
        weight: weight of that loss (lambda_DSSM, equation 11).
    """

    def __init__(
        self, task: SessionTask, recommending: Recommending | None = None, weight: float = 1.0
    ) -> None:
        self.task = task
        self.recommending = recommending
        self.weight = weight

    @property
    def capturable(self) -> bool:
        """Whether the loss on the examples is; that on views is."""
        return self.recommending is None or self.recommending.capturable

    def __call__(
        self, parameters: Mapping[str, Tensor], block: Block, step: int, active: int
    ) -> Tensor:
        if not isinstance(block, SessionBlock):
            raise TypeError(f"Expected a SessionBlock, got {type(block).__name__}.")
        views = block.views[step, :active]
        embeddings = parameters[self.task.table][:, block.items.shape[2] :]
        loss = self.task.loss(parameters, embeddings.unflatten(1, views.shape[1:]), views)
        if self.recommending is None:
            return loss
        tables = {name: parameters[name] for name in self.recommending.model.item_tables}
        examples = {name: rows[:, : block.items.shape[2]] for name, rows in tables.items()}
        return loss + self.weight * self.recommending(
            {**parameters, **examples}, block, step, active
        )


def _dealt(views: Sequence[np.ndarray], steps: Sequence[int], width: int) -> np.ndarray:
    """The views of each epoch over its steps, `int64 [sum of steps, V, width]`, -1 for padding; the
    first get more."""
    most = max(
        (-(-len(own) // count) for own, count in zip(views, steps, strict=True) if count), default=0
    )
    dealt = [np.full((count, most, width), -1, dtype=np.int64) for count in steps]
    for own, count, places in zip(views, steps, dealt, strict=True):
        sizes = len(own) // max(count, 1) + (np.arange(count) < len(own) % max(count, 1))
        places[np.arange(most) < sizes[:, None]] = own
    return np.concatenate([np.zeros((0, most, width), dtype=np.int64), *dealt])
