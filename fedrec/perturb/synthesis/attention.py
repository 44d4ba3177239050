# SPDX-License-Identifier: Apache-2.0
"""How much each row contributes to its user's preferences (UPC-SDG, equations 3 to 6).

    v_ui = h . ReLU(W1 [p_u : q_i] + b1)          a_ui = exp(v_ui) / (sum_j exp(v_uj))^beta
    t_u  = 1/n_u sum_i a_ui q_i                   L_D  = sum_u |f(t_u) - p_u|^2

with f an MLP with dropout.

The embeddings are fixed, and the generator has parameters of its own: L_D and L_I (equation 16)
share none, so minimising their sum is equivalent to minimising each separately, as is done here.
For the same reason the relative scale of L_D and L_I has no effect.
"""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedrec.config import Config, Width
from fedrec.data.interactions import Interactions
from fedrec.nn.optimisers import Adam


class AttentionConfig(Config):
    """Settings of the attention; the paper gives none of them."""

    beta: float = Field(default=0.5, ge=0, le=1)
    """Smoothing exponent of the normalisation, in [0, 1]; 1 is a softmax over the user's rows."""
    hidden: Width = 64
    """Width of the hidden layers: of the attention, and of f."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Dropout rate of f's hidden units."""
    epochs: int = Field(default=20, ge=1)
    """Epochs over the users."""
    batch_rows: int = Field(default=2048, ge=1)
    """Training rows per step; all rows of a user are in the same step."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of Adam."""


class Attention(nn.Module):
    """Attention weights of rows, and the map from their weighted sum to the user's embedding.

    Args:
        config: its settings.
        width: of the embeddings.
        generator: of the initial parameters.
    """

    def __init__(self, config: AttentionConfig, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.user = _uniform((width, hidden), generator)
        self.item = _uniform((width, hidden), generator)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.out = _uniform((hidden, 1), generator)
        self.first = _uniform((width, hidden), generator)
        self.second = _uniform((hidden, width), generator)
        self.first_bias = nn.Parameter(torch.zeros(hidden))
        self.second_bias = nn.Parameter(torch.zeros(width))

    def logits(self, users: Tensor, place: Tensor, items: Tensor) -> Tensor:
        """v_ui of equation 4, `float32 [rows]`.

        Args:
            users: `float32 [users, d]`, p_u.
            place: `int64 [rows]`, each row's user.
            items: `float32 [rows, d]`, q_i.
        """
        hidden = (users @ self.user)[place] + items @ self.item + self.bias
        return (torch.relu(hidden) @ self.out)[:, 0]

    def profiles(self, users: Tensor, place: Tensor, items: Tensor) -> Tensor:
        """t_u of equation 3, `float32 [users, d]`."""
        weights = attention_weights(
            self.logits(users, place, items), place, len(users), self.config.beta
        )
        summed = torch.zeros_like(users).index_add(0, place, weights[:, None] * items)
        return summed / torch.bincount(place, minlength=len(users)).clamp(min=1)[:, None]

    def loss(
        self, users: Tensor, place: Tensor, items: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """L_D of equation 6 over some users, a scalar `[]`; with dropout if a generator is given.
        Arguments as in `logits`."""
        hidden = torch.relu(self.profiles(users, place, items) @ self.first + self.first_bias)
        if generator is not None and self.config.dropout:
            kept = torch.rand(hidden.shape, generator=generator) >= self.config.dropout
            hidden = hidden * kept / (1 - self.config.dropout)
        return (hidden @ self.second + self.second_bias - users).square().sum()


def attention_weights(logits: Tensor, place: Tensor, users: int, beta: float) -> Tensor:
    """a_ui of equation 5, `float [rows]`; with beta = 1 they sum to 1 over each user's rows.

    Args:
        logits: `float [rows]`, v_ui.
        place: `int64 [rows]`, each row's user.
        users: number of users.
        beta: smoothing exponent.
    """
    largest = logits.new_full((users,), -torch.inf).scatter_reduce(
        0, place, logits.detach(), "amax"
    )
    total = torch.zeros_like(largest).index_add(0, place, (logits - largest[place]).exp())
    return (logits - beta * (largest + total.log())[place]).exp()


def train_attention(
    config: AttentionConfig,
    rows: Interactions,
    users: Tensor,
    items: Tensor,
    generator: torch.Generator,
) -> tuple[np.ndarray, list[float]]:
    """Train the attention and return its logits for all rows, which have the same order as the
    weights within a user.

    Args:
        config: its settings.
        rows: the training rows.
        users: `float32 [users, d]`, embeddings.
        items: `float32 [items, d]`, embeddings.
        generator: of initial parameters, order and dropout.

    Returns:
        `float32 [rows]`, and L_D per user of each epoch.
    """
    attention = Attention(config, users.shape[1], generator)
    adam = Adam(attention.parameters(), lr=config.learning_rate)
    losses = []
    for _ in range(config.epochs):
        total = 0.0
        order = torch.randperm(rows.num_users, generator=generator).numpy()
        for batch in _batches(rows, order, config.batch_rows):
            own, place, those = _gathered(rows, batch)
            loss = attention.loss(users[own], place, items[those], generator)
            adam.zero_grad()
            (loss / len(own)).backward()
            adam.step()
            total += float(loss.detach())
        losses.append(total / max(1, int(np.count_nonzero(np.diff(rows.user_offsets)))))
    logits = np.empty(len(rows), dtype=np.float32)
    with torch.no_grad():
        for batch in _batches(rows, np.arange(rows.num_users), config.batch_rows):
            own, place, those = _gathered(rows, batch)
            logits[np.concatenate([rows.rows_of(user) for user in batch])] = attention.logits(
                users[own], place, items[those]
            ).numpy()
    return logits, losses


def _batches(rows: Interactions, order: np.ndarray, most: int) -> list[np.ndarray]:
    """Users with rows, in the given order, divided into batches by their number of rows."""
    counts = np.diff(rows.user_offsets)[order]
    order = order[counts > 0]
    counts = counts[counts > 0]
    batch = (np.cumsum(counts) - counts) // most
    return np.split(order, np.flatnonzero(np.diff(batch)) + 1) if len(order) else []


def _gathered(rows: Interactions, batch: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """The users of a batch, and for each of their rows the position of its user and its item."""
    own = [rows.rows_of(user) for user in batch]
    place = np.repeat(np.arange(len(batch)), [len(one) for one in own])
    return (
        torch.from_numpy(batch),
        torch.from_numpy(place),
        torch.from_numpy(rows.items[np.concatenate(own)]),
    )


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> nn.Parameter:
    """Weights as `nn.Linear` draws them, from a generator of our own."""
    bound = shape[0] ** -0.5
    return nn.Parameter((2 * torch.rand(shape, generator=generator) - 1) * bound)
