# SPDX-License-Identifier: Apache-2.0
"""The self-supervised task on a client's sessions: training data and loss (PrivRec equation 10)."""

from collections.abc import Mapping
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedrec.config import Config, Width, did_you_mean
from fedrec.data.client_data import ClientData
from fedrec.errors import ExperimentError
from fedrec.models.base import Model
from fedrec.nn.layers import gather_rows
from fedrec.pretext.contrast import Contrast, EncoderName, item_loss, segment_loss
from fedrec.pretext.encoder import initial_encoder
from fedrec.pretext.views import ViewLayout, draw_views


class SessionConfig(Config):
    """Settings of the self-supervised task; the paper gives none of the values."""

    session_length: int = Field(default=20, ge=2)
    """Largest number of items in a session; a user's sequence is cut into sessions of nearly equal
    length."""
    sessions_of: Literal["positives", "all"] = "positives"
    """Training rows in the sequence: those of positive items, or all."""
    masks: int = Field(default=4, ge=1)
    """Pairs of views (one item-masked, one segment-masked) per session and epoch."""
    masked_place: Literal["negative", "empty"] = "negative"
    """Replacement of the true item in an item-masked session: a negative item (paper), or none."""
    item_negatives: int = Field(default=16, ge=1)
    """Negative items per item-masked session."""
    segment_length: int = Field(default=4, ge=1)
    """Largest number of items in a segment; at most half of the session."""
    segment_negatives: int = Field(default=4, ge=1)
    """Negative segments per segment-masked session."""
    lambda_im: float = Field(default=1.0, ge=0)
    """Weight of the item-masked loss (lambda_IM, eq. 10)."""
    lambda_sm: float = Field(default=1.0, ge=0)
    """Weight of the segment-masked loss (lambda_SM, eq. 10)."""
    encoder: EncoderName = "gru"
    """`gru`: a recurrent network on sessions and a feed-forward one on items (paper); `mean`: a
    session is the direction of the mean of its items' unit embeddings, an item its own direction,
    and only the item embedding is trained."""
    hidden: Width = 64
    """Width of the encodings of sessions and items by `gru`."""
    temperature: float = Field(default=1.0, gt=0)
    """Divisor of scores before the softmax; with `mean`, scores are cosines, and 1 hardly separates
    them."""
    item_table: str = "item.id"
    """Name of the model's item embedding to train."""

    @model_validator(mode="after")
    def _segment_fits(self) -> Self:
        if self.segment_length > self.session_length // 2:
            raise ValueError("segment-length of at most half of session-length")
        return self


class SessionTask:
    """Draws views of a client's sessions and measures the loss on them.

    Args:
        config: its settings.
        model: the recommender whose item embedding is learned.

    Raises:
        ExperimentError: the model has no such item embedding.
    """

    def __init__(self, config: SessionConfig, model: Model) -> None:
        if config.item_table not in model.item_tables:
            raise ExperimentError(
                "wrong value for 'step.item-table'",
                expected=f"an item embedding of model {type(model).__name__!r}",
                got=repr(config.item_table),
                fix=did_you_mean(config.item_table, model.item_tables),
            )
        self.config = config
        self.table = config.item_table
        self._num_items = model.schema.num_items
        self.layout = ViewLayout(
            config.session_length,
            config.item_negatives,
            config.segment_length if config.lambda_sm else 0,
            config.segment_negatives,
            config.masked_place == "empty",
        )
        self._contrast = Contrast(config.encoder, config.temperature)

    @property
    def silent(self) -> bool:
        """Whether both losses have weight 0, so that nothing is trained."""
        return not (self.config.lambda_im or self.config.lambda_sm)

    def initial(self, model: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh parameters of the encoders, in addition to those of the `model`; `mean` has
        none."""
        if self.config.encoder == "mean":
            return {}
        return initial_encoder(model[self.table].shape[1], self.config.hidden, generator)

    def views(self, data: ClientData, random: np.random.Generator) -> np.ndarray:
        """The views of one epoch in a random order, `int64 [views, layout.width]`, -1 for
        padding."""
        if self.silent:
            return np.zeros((0, self.layout.width), dtype=np.int64)
        sequence = data.items[data.order()]
        if self.config.sessions_of == "positives":
            sequence = sequence[np.isin(sequence, data.positives)]
        views = draw_views(sequence, self.layout, self.config.masks, self._num_items, random)
        return views[random.permutation(len(views))]

    def loss(self, parameters: Mapping[str, Tensor], embeddings: Tensor, views: Tensor) -> Tensor:
        """Equation 10: `lambda_IM * L_IM + lambda_SM * L_SM`.

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
            (self.config.lambda_im, item_loss),
            (self.config.lambda_sm, segment_loss),
        ):
            if weight:
                loss = loss + weight * measure(
                    parameters, embeddings, present, self.layout, self._contrast
                )
        return loss

    def loss_from_table(self, parameters: Mapping[str, Tensor], views: Tensor) -> Tensor:
        """The same, with the embeddings taken from the item table among the `parameters`,
        `[C, items, d]`."""
        return self.loss(parameters, gather_rows(parameters[self.table], views.clamp(min=0)), views)
