# SPDX-License-Identifier: Apache-2.0
"""Masked views of sessions, and their encoders.

Sessions of a user and their masked views (PrivRec section 2.4.2).

Each session of T items gives two views: one in which a random item is replaced by a negative item,
and one in which a random segment of consecutive items is replaced by a negative segment.

Where this differs from the paper:

- A session is "within a certain time interval" there, which is not given. Here a user's sequence is
  cut into sessions of nearly equal length, at most `ViewLayout.session` items; a session of one
  item gives no view.
- The length of a segment is not given. Here it is `ViewLayout.segment`, and at most half of the
  session.
- Negative items are drawn outside the user's own sequence, the paper's from "the item sets".
- The replacement in a view is the first of its negatives, or the position is empty
  (`ViewLayout.empty`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedrec.data.client_data import draw_negatives
from fedrec.nn.functions import recurrent_states


@dataclass(frozen=True)
class ViewLayout:
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


def draw_views(
    sequence: np.ndarray,
    layout: ViewLayout,
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
    starts, lengths = cut_sessions(len(sequence), layout.session)
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


def cut_sessions(items: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
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
    layout: ViewLayout,
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
    layout: ViewLayout,
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


def initial_encoder(width: int, hidden: int, generator: torch.Generator) -> dict[str, Tensor]:
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


def encode_sessions(
    parameters: Mapping[str, Tensor], embeddings: Tensor, present: Tensor
) -> Tensor:
    """Last hidden state of the GRU, which starts from zero.

    Args:
        parameters: `[C, ...]` each, see `initial_encoder`.
        embeddings: `[C, n, T, d]`, n sessions of at most T items.
        present: `bool [C, n, T]`; absent items do not change the state.

    Returns:
        `[C, n, h]`; zeros for a session without items.
    """
    _, sessions, steps, _ = embeddings.shape
    inputs = _linear(parameters, "gru.input", embeddings.transpose(1, 2).flatten(1, 2))
    weight = parameters[f"{PREFIX}gru.state.weight"]
    bias = parameters[f"{PREFIX}gru.state.bias"]
    given = inputs.unflatten(1, (steps, sessions))
    return recurrent_states(given, weight, bias, present.transpose(1, 2))[:, -1]


def encode_items(parameters: Mapping[str, Tensor], embeddings: Tensor) -> Tensor:
    """Encode items by f_Psi: embeddings `[C, ..., d]` give `[C, ..., h]`."""
    hidden = torch.relu(_linear(parameters, "item0", embeddings.flatten(1, -2)))
    # A bias here would add the same number to the scores of all candidates, which does not change
    # their softmax.
    return torch.bmm(hidden, parameters[f"{PREFIX}item1.weight"]).unflatten(
        1, embeddings.shape[1:-1]
    )


def _linear(parameters: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    weight = parameters[f"{PREFIX}{name}.weight"]
    bias = parameters[f"{PREFIX}{name}.bias"]
    return torch.baddbmm(bias.unsqueeze(1), inputs, weight)


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
