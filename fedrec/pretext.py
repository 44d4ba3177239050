# SPDX-License-Identifier: Apache-2.0
"""Self-supervised training of item embeddings on sessions (PrivRec, Wang et al. 2021, section 2.4).

A user's items in temporal order are cut into sessions. For each session, views are drawn in which
an item or a segment is replaced by a negative one; an encoder is trained to distinguish the true
item or segment from negatives. The encoder's parameters, whose names begin with `session.`, are
added to the recommender's; the item embedding is shared with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Config, Width
from fedrec.data.client_data import ClientData, draw_negatives
from fedrec.errors import ExperimentError
from fedrec.models.base import Model
from fedrec.nn.layers import affine, recurrent_states
from fedrec.training.block import Batches, Block, UserCodes, side_by_side
from fedrec.training.sgd import Recommending

# Masked views of sessions, and their encoders.
#
# Sessions of a user and their masked views (PrivRec section 2.4.2).
#
# Each session of T items gives two views: one in which a random item is replaced by a negative
# item, and one in which a random segment of consecutive items is replaced by a negative segment.
#
# Where this differs from the paper:
#
# - A session is "within a certain time interval" there, which is not given. Here a user's sequence
#   is cut into sessions of nearly equal length, at most `_ViewLayout.session` items; a session of
#   one item gives no view.
# - The length of a segment is not given. Here it is `_ViewLayout.segment`, and at most half of the
#   session.
# - Negative items are drawn outside the user's own sequence, the paper's from "the item sets".
# - The replacement in a view is the first of its negatives, or the position is empty
#   (`_ViewLayout.empty`).


@dataclass(frozen=True)
class _ViewLayout:
    """Column layout of a session's two views and their candidates: item numbers, -1 for padding.

    Attributes:
        session: largest number of items of a session, >= 2.
        item_negatives: negative items per view, >= 1.
        segment: largest number of items of a segment, >= 1; 0: there are no segment-masked views.
        segment_negatives: negative segments per view, >= 1.
        empty: whether a masked item is replaced by padding, -1, instead of a negative item.
    """

    session: int
    item_negatives: int
    segment: int
    segment_negatives: int
    empty: bool = False

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Widths of the four parts: item-masked session, true and negative items, segment-masked
        session, segments."""
        segments = (1 + self.segment_negatives) * self.segment
        masked = self.session if self.segment else 0
        return self.session, 1 + self.item_negatives, masked, segments

    @property
    def width(self) -> int:
        """Number of item numbers in a row."""
        return sum(self.widths)


def _draw_views(
    sequence: np.ndarray,
    layout: _ViewLayout,
    masks: int,
    num_items: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Draw the views of a user's sessions.

    Args:
        sequence: `int64 [n]`, the user's items in temporal order; an item may repeat.
        layout: sizes.
        masks: number of pairs of views per session, >= 0.
        num_items: size of the catalogue.
        random: source of randomness.

    Returns:
        `int64 [views, layout.width]` in the order of the sessions. For a user without another
        segment of the same length, the last two parts of a view are -1. A user whose sequence
        contains the whole catalogue has no negative item, and no views.
    """
    starts, lengths = _cut_sessions(len(sequence), layout.session)
    session = np.repeat(np.arange(len(starts)), masks)
    known = np.unique(sequence)
    if not len(session) or len(known) >= num_items:
        return np.zeros((0, layout.width), dtype=np.int64)
    whole = _window(sequence, starts[session], lengths[session], layout.session)
    items = _item_views(whole, lengths[session], known, layout, num_items, random)
    if not layout.segment:
        return np.concatenate(items, axis=1)
    segments = _segment_views(sequence, whole, (starts, lengths), session, layout, random)
    return np.concatenate([*items, *segments], axis=1)


def _cut_sessions(items: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a sequence into as few sessions as possible, of nearly equal length, and drop those of
    one item.

    Returns:
        `int64 [sessions]` twice: where each session starts, and its number of items in
        `[2, longest]`.
    """
    count = -(-items // longest)
    bounds = np.arange(count + 1) * items // max(count, 1)
    starts = bounds[:-1]
    lengths = np.diff(bounds)
    return starts[lengths > 1], lengths[lengths > 1]


def _item_views(
    whole: np.ndarray,
    lengths: np.ndarray,
    known: np.ndarray,
    layout: _ViewLayout,
    num_items: int,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw item-masked sessions `[V, L]`, and the true item before the negatives `[V, 1 + N]`."""
    masked_items = np.arange(len(whole)), random.integers(0, lengths)
    drawn = draw_negatives(known, num_items, len(whole) * layout.item_negatives, random).reshape(
        len(whole), -1
    )
    candidates = np.concatenate([whole[masked_items][:, None], drawn], axis=1)
    masked = whole.copy()
    masked[masked_items] = -1 if layout.empty else drawn[:, 0]
    return masked, candidates


def _segment_views(
    sequence: np.ndarray,
    whole: np.ndarray,
    sessions: tuple[np.ndarray, np.ndarray],
    session: np.ndarray,
    layout: _ViewLayout,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw segment-masked sessions `[V, L]`, and the true segment before the negatives `[V, (1 + M)
    * G]`."""
    starts, lengths = sessions
    sizes = np.minimum(layout.segment, lengths[session] // 2)
    begins = random.integers(0, lengths[session] - sizes + 1)
    negatives = _other_segments(
        starts, lengths, session, begins, sizes, layout.segment_negatives, random
    )
    has_negatives = negatives[:, 0] >= 0
    positions = np.concatenate([(starts[session] + begins)[:, None], negatives], axis=1)
    count = np.where(has_negatives, sizes, 0)[:, None]
    segments = _window(
        sequence, positions.clip(min=0), np.broadcast_to(count, positions.shape), layout.segment
    )
    at = np.arange(layout.session) - begins[:, None]
    replaced = np.take_along_axis(segments[:, 1], at.clip(0, layout.segment - 1), axis=1)
    masked = np.where((at >= 0) & (at < sizes[:, None]), replaced, whole)
    masked[~has_negatives] = -1
    return masked, segments.reshape(len(whole), -1)


def _other_segments(
    starts: np.ndarray,
    lengths: np.ndarray,
    session: np.ndarray,
    begins: np.ndarray,
    sizes: np.ndarray,
    count: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Start positions of negative segments in the sequence, `int64 [V, count]`; -1 for a view
    without any.

    They are drawn uniformly from all segments of the same length within any session that do not
    overlap the true one, without rejection: a rank among these is drawn and shifted past the
    overlapping ones, whose ranks are consecutive.
    """
    drawn = np.full((len(session), count), -1, dtype=np.int64)
    for size in np.unique(sizes).tolist():
        views = np.flatnonzero(sizes == size)
        own_session = session[views]
        begin = begins[views]
        windows = np.maximum(lengths - size + 1, 0)
        before = np.cumsum(windows) - windows
        low = before[own_session] + np.maximum(begin - size + 1, 0)
        high = before[own_session] + np.minimum(begin + size, windows[own_session])
        free = windows.sum() - (high - low)
        rank = random.integers(0, np.maximum(free, 1)[:, None], size=(len(views), count))
        rank += (rank >= low[:, None]) * (high - low)[:, None]
        # A session that is too short offers no window and shares its rank with the next: `right`
        # passes over it.
        of = np.searchsorted(before, rank, side="right") - 1
        drawn[views] = np.where(free[:, None] > 0, (starts - before)[of] + rank, -1)
    return drawn


def _window(
    sequence: np.ndarray, starts: np.ndarray, lengths: np.ndarray, width: int
) -> np.ndarray:
    """Take `lengths` consecutive items from `starts`, both `[...]`, padded with -1 to `[...,
    width]`."""
    offsets = np.arange(width)
    items = sequence[np.minimum(starts[..., None] + offsets, len(sequence) - 1)]
    return np.where(offsets < lengths[..., None], items, -1)


# The encoders of sessions and items, as pure functions of parameters with a leading cohort
# dimension.
#
# f_Sigma of PrivRec's equations 8 and 9 is a GRU (Cho et al. 2014; sessions: Hidasi et al. 2016)
# whose last hidden state represents the session; f_Psi is a feed-forward network on an item's
# embedding.
#
# Where this differs from the paper: it gives no sizes. f_Psi has one hidden layer (ReLU), as wide
# as the GRU's state.

PREFIX = "session."


def recommender_part(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of the recommender, without the encoders."""
    return {name: value for name, value in parameters.items() if not name.startswith(PREFIX)}


def _initial_encoder(width: int, hidden: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Initialise encoder parameters, without the cohort dimension: GRU uniform in +-1/sqrt(hidden),
    He-uniform weights of f_Psi.

    Args:
        width: width of the item embedding, d.
        hidden: width of the encodings, h.
        generator: source of randomness.

    Returns:
        `session.gru.input.weight` `[d, 3h]` and `.bias` `[3h]`, `session.gru.state.weight`
        `[h, 3h]` and `.bias`, in the order reset, update, new; `session.item0.weight` `[d, h]` and
        `.bias`, `session.item1.weight` `[h, h]`.
    """

    def uniform(bound: float, *shape: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator) - 1) * bound

    gru = 1 / math.sqrt(hidden)
    first = math.sqrt(6 / width)
    second = math.sqrt(6 / (2 * hidden))
    return {
        f"{PREFIX}gru.input.weight": uniform(gru, width, 3 * hidden),
        f"{PREFIX}gru.input.bias": uniform(gru, 3 * hidden),
        f"{PREFIX}gru.state.weight": uniform(gru, hidden, 3 * hidden),
        f"{PREFIX}gru.state.bias": uniform(gru, 3 * hidden),
        f"{PREFIX}item0.weight": uniform(first, width, hidden),
        f"{PREFIX}item0.bias": torch.zeros(hidden),
        f"{PREFIX}item1.weight": uniform(second, hidden, hidden),
    }


def _encode_sessions(
    parameters: Mapping[str, Tensor], embeddings: Tensor, present: Tensor
) -> Tensor:
    """Last hidden state of the GRU, which starts from zero.

    Args:
        parameters: `[C, ...]` each, see `_initial_encoder`.
        embeddings: `[C, n, T, d]`, n sessions of at most T items.
        present: `bool [C, n, T]`; absent items do not change the state.

    Returns:
        `[C, n, h]`; zeros for a session without items.
    """
    given = affine(parameters, f"{PREFIX}gru.input", embeddings.transpose(1, 2))
    weight = parameters[f"{PREFIX}gru.state.weight"]
    bias = parameters[f"{PREFIX}gru.state.bias"]
    return recurrent_states(given, weight, bias, present.transpose(1, 2))[:, -1]


def _encode_items(parameters: Mapping[str, Tensor], embeddings: Tensor) -> Tensor:
    """Encode items by f_Psi: embeddings `[C, ..., d]` give `[C, ..., h]`."""
    hidden = torch.relu(affine(parameters, f"{PREFIX}item0", embeddings)).flatten(1, -2)
    # A bias here would add the same number to the scores of all candidates, which does not change
    # their softmax.
    return torch.bmm(hidden, parameters[f"{PREFIX}item1.weight"]).unflatten(
        1, embeddings.shape[1:-1]
    )


# Encoders without parameters: directions of the item embeddings themselves.
#
# A session is the mean of its items' unit embeddings, scaled to length 1, so that its inner product
# with an item's unit embedding is a cosine. The learned cosines are those that an item-kNN ranks
# by. A recurrent network and a network for items (PrivRec's f_Sigma and f_Psi) can instead learn in
# their own parameters what is common to items, so that the cosines of the embeddings are
# uninformative.


def mean_directions(embeddings: Tensor, present: Tensor) -> Tensor:
    """Direction of the mean of sessions' unit embeddings.

    Args:
        embeddings: `[..., T, d]`, sessions of at most T items.
        present: `bool [..., T]`; absent items are ignored.

    Returns:
        `[..., d]`, of length 1; zeros for a session without items.
    """
    directions = F.normalize(embeddings, dim=-1) * present.unsqueeze(-1)
    return F.normalize(directions.sum(-2), dim=-1)


# The contrastive loss on masked views (PrivRec equations 8 to 10), with a leading cohort dimension,
# for both kinds of encoders.
#
# Where this differs from the paper:
#
# - Equations 8 and 9 are maximised; this is their negative, which is minimised.
# - Their normalising sum is over the negatives only, so the loss is unbounded. Here the true item
#   or segment is in it too, as in InfoNCE (van den Oord et al. 2018), which the paper cites; the
#   loss is then a cross-entropy and at least 0.
# - A temperature divides the inner products, as is usual for cosines (Chen et al. 2020, SimCLR); 1
#   is the paper's.


def _info_nce(query: Tensor, candidates: Tensor, temperature: float) -> Tensor:
    """Negative log-probability of the first candidate, by inner products with the query.

    Args:
        query: `[..., h]`.
        candidates: `[..., K, h]`, the true one first.
        temperature: divisor of the inner products.

    Returns:
        `[...]`.
    """
    scores = (candidates @ query.unsqueeze(-1)).squeeze(-1) / temperature
    return torch.logsumexp(scores, -1) - scores[..., 0]


def _mean(losses: Tensor, counted: Tensor) -> Tensor:
    """Mean of `[C, V]` over the views that count, `[C]`; 0 without any."""
    return (losses * counted).sum(-1) / counted.sum(-1).clamp(min=1)


# The self-supervised task on a client's sessions: training data and loss (PrivRec equation 10).

_SEGMENT = 4  # most items of a segment
_SEGMENT_NEGATIVES = 4  # negative segments of a view


class SessionConfig(Config):
    """Settings of the self-supervised task; the paper gives none of the values."""

    session_length: int = Field(default=20, ge=2)
    """Largest number of items in a session; a user's sequence is cut into sessions of nearly equal
    length."""
    masks: int = Field(default=4, ge=1)
    """Pairs of views (one item-masked, one segment-masked) per session and epoch."""
    masked_place: Literal["negative", "empty"] = "negative"
    """Replacement of the true item in an item-masked session: a negative item (paper), or none."""
    item_negatives: int = Field(default=16, ge=1)
    """Negative items per item-masked session."""
    lambda_im: float = Field(default=1.0, ge=0)
    """Weight of the item-masked loss (lambda_IM, eq. 10)."""
    lambda_sm: float = Field(default=1.0, ge=0)
    """Weight of the segment-masked loss (lambda_SM, eq. 10)."""
    encoder: Literal["gru", "mean"] = "gru"
    """`gru`: a recurrent network on sessions and a feed-forward one on items (paper); `mean`: a
    session is the direction of the mean of its items' unit embeddings, an item its own direction,
    and only the item embedding is trained."""
    hidden: Width = 64
    """Width of the encodings of sessions and items by `gru`."""
    temperature: float = Field(default=1.0, gt=0)
    """Divisor of scores before the softmax; with `mean`, scores are cosines, and 1 hardly separates
    them."""


class SessionTask:
    """The self-supervised task: draws views of a client's sessions and computes their loss.

    Args:
        config: settings of the task.
        model: the recommender whose item embedding is learned.

    Attributes:
        table: name of this embedding.

    Raises:
        ExperimentError: the model has no such item embedding.
    """

    table = "item.id"

    def __init__(self, config: SessionConfig, model: Model) -> None:
        if self.table not in model.item_tables:
            raise ExperimentError(
                f"model {type(model).__name__!r} has no item embedding {self.table!r} to train",
                fix="set model.name to one that has, such as 'privrec'",
            )
        self.config = config
        self._num_items = model.schema.num_items
        self.layout = _ViewLayout(
            config.session_length,
            config.item_negatives,
            min(_SEGMENT, config.session_length // 2) if config.lambda_sm else 0,
            _SEGMENT_NEGATIVES,
            config.masked_place == "empty",
        )

    def initial(self, model: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise the encoders' parameters, in addition to the model's; none for `mean`."""
        if self.config.encoder == "mean":
            return {}
        return _initial_encoder(model[self.table].shape[1], self.config.hidden, generator)

    def views(self, data: ClientData, random: np.random.Generator) -> np.ndarray:
        """Draw the views of one epoch in random order, `int64 [views, layout.width]`, -1 for
        padding."""
        if not (self.config.lambda_im or self.config.lambda_sm):
            return np.zeros((0, self.layout.width), dtype=np.int64)
        sequence = data.items[data.order()]
        sequence = sequence[np.isin(sequence, data.positives)]
        views = _draw_views(sequence, self.layout, self.config.masks, self._num_items, random)
        return views[random.permutation(len(views))]

    def loss(self, parameters: Mapping[str, Tensor], embeddings: Tensor, views: Tensor) -> Tensor:
        """Loss (equation 10): `lambda_IM * L_IM + lambda_SM * L_SM`.

        Args:
            parameters: `[C, ...]` each, of the encoders.
            embeddings: `[C, V, width, d]`, of the items in `views`; arbitrary values at padding.
            views: `int64 [C, V, width]`, -1 for padding.

        Returns:
            `[C]`; 0 for a client without views.
        """
        present = views >= 0
        loss = embeddings.new_zeros(len(views))
        for weight, measure in (
            (self.config.lambda_im, self.item_loss),
            (self.config.lambda_sm, self.segment_loss),
        ):
            if weight:
                loss = loss + weight * measure(parameters, embeddings, present)
        return loss

    def item_loss(
        self, parameters: Mapping[str, Tensor], embeddings: Tensor, present: Tensor
    ) -> Tensor:
        """Item-masked loss (equation 8): mean over the views of each client.

        Args:
            parameters: `[C, ...]` each, of the encoders.
            embeddings: `[C, V, layout.width, d]`, of the items of the views; arbitrary values at
                padding.
            present: `bool [C, V, layout.width]`, false for padding; a view without any item does
                not count.

        Returns:
            `[C]`; 0 for a client without views.
        """
        masked, candidates, *_ = embeddings.split(self.layout.widths, 2)
        real = present.split(self.layout.widths, 2)[0]
        queries = self._sessions(parameters, masked, real)
        if self.config.encoder == "mean":
            encoded = F.normalize(candidates, dim=-1)
        else:
            encoded = _encode_items(parameters, candidates)
        losses = _info_nce(queries, encoded, self.config.temperature)
        return _mean(losses, real.any(-1))

    def segment_loss(
        self, parameters: Mapping[str, Tensor], embeddings: Tensor, present: Tensor
    ) -> Tensor:
        """Segment-masked loss (equation 9): mean over each client's views with negative segments,
        `[C]`; see `item_loss`."""
        *_, masked, segments = embeddings.split(self.layout.widths, 2)
        *_, real, in_segments = present.split(self.layout.widths, 2)
        cohort, views, _, width = masked.shape
        count = 1 + self.layout.segment_negatives
        shape = cohort, views * count, self.layout.segment
        candidates = self._sessions(
            parameters, segments.reshape(*shape, width), in_segments.reshape(shape)
        )
        queries = self._sessions(parameters, masked, real)
        losses = _info_nce(
            queries, candidates.unflatten(1, (views, count)), self.config.temperature
        )
        return _mean(losses, real[..., 0])

    def _sessions(
        self, parameters: Mapping[str, Tensor], embeddings: Tensor, present: Tensor
    ) -> Tensor:
        """Encoded sessions `[C, n, h]` of embeddings `[C, n, T, d]`, see `_encode_sessions`."""
        if self.config.encoder == "mean":
            return mean_directions(embeddings, present)
        return _encode_sessions(parameters, embeddings, present)


# Batches and blocks with session views and the usual examples, for self-supervised training in
# blocks.


@dataclass(frozen=True, eq=False)
class SessionBatches(Batches):
    """Batches of examples (possibly none, then `sizes` is 0) and of session views (possibly none).

    Attributes:
        views: `int64 [S, V, width]`, the views of each step; -1 for padding.
    """

    views: np.ndarray

    @classmethod
    def deal(
        cls, plain: Batches, views: Sequence[np.ndarray], views_per_step: int, layout: _ViewLayout
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
            steps = [-(-len(epoch_views) // views_per_step) for epoch_views in views]
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
        """Items with rows needed in each step, `int64 [S, N]`, and the mask of real items, `bool
        [S, N]`. The items of the views follow those of the examples."""
        items, real = super().references()
        steps, views, width = self.views.shape
        views_of_steps = self.views.reshape(steps, views * width)
        return np.concatenate([items, views_of_steps.clip(min=0)], axis=1), np.concatenate(
            [real, views_of_steps >= 0], axis=1
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
        """Build a block from clients' data with `SessionBatches`."""
        sessions = [batch for batch in batches if isinstance(batch, SessionBatches)]
        plain = Block.of(users, batches, device)
        shared = {field.name: getattr(plain, field.name) for field in fields(Block)}
        views = side_by_side([batch.views for batch in sessions], device, -1)
        return cls(**shared, views=views)


class SessionObjective:
    """Loss of a step on session views, and on its examples if there is a `recommending` objective.

    Args:
        task: the self-supervised task (equation 10 of PrivRec).
        recommending: the loss on the examples (equation 11, with weight 1); None: there are none.
    """

    def __init__(self, task: SessionTask, recommending: Recommending | None = None) -> None:
        self.task = task
        self.recommending = recommending

    @property
    def capturable(self) -> bool:
        """True if the loss on the examples is capturable; that on views always is."""
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
        return loss + self.recommending({**parameters, **examples}, block, step, active)


def _dealt(views: Sequence[np.ndarray], steps: Sequence[int], width: int) -> np.ndarray:
    """Split each epoch's views over its steps, `int64 [sum of steps, V, width]`, -1 for padding;
    the first steps get more."""
    parts = [
        part
        for epoch, count in zip(views, steps, strict=True)
        for part in (np.array_split(epoch, count) if count else [])
    ]
    dealt = np.full((len(parts), max(map(len, parts), default=0), width), -1, dtype=np.int64)
    for row, part in zip(dealt, parts, strict=True):
        row[: len(part)] = part
    return dealt
