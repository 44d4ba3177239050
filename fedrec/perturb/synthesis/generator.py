# SPDX-License-Identifier: Apache-2.0
"""The generator of substitutes: a linear map and Gumbel-softmax (UPC-SDG, equations 8 to 15).

    R_ui = W2 [p_u ; q_i ; gamma_u] + b2          h_ui = R_ui E_I^T
    y_ui = softmax((h_ui + g) / tau)              q_v  = y_ui E_I
    L_s  = sum [f_sim(q_i, q_v) - gamma_u]_+      L_g  = sum -ln sigma(p_u . q_v)
    L_I  = lambda_s L_s + lambda_g L_g

Where this differs from the paper: a step sees a random part of the catalogue (`candidates`), the
same for its whole batch, because logits of a million rows over 40,000 items would take hours;
substitutes are drawn from the whole catalogue. Items that the user has are masked in the softmax,
in training too. The paper does not say whether substitutes are sampled or the best items: equation
11 samples, the public code takes the best.
"""

from collections.abc import Iterator

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.nn.optimisers import Adam
from fedrec.perturb.synthesis.similarity import Similarity
from fedrec.runtime.grouping import spans


class GeneratorConfig(Config):
    """Settings of the generator."""

    privacy_weight: float = Field(default=3.0, ge=0)
    """lambda_s (paper: 3 for Office and Gowalla, 5 for Clothing)."""
    utility_weight: float = Field(default=1.0, ge=0)
    """lambda_g (paper: 1 for Office and Gowalla, 7 for Clothing)."""
    temperature: float = Field(default=2.0, gt=0)
    """Temperature tau of the Gumbel-softmax in training; not given in the paper, chosen on
    validation rows of Amazon Office."""
    steps: int = Field(default=500, ge=1)
    """Number of steps of Adam."""
    batch_size: int = Field(default=256, ge=1)
    """Rows per step."""
    learning_rate: float = Field(default=1e-2, gt=0)
    """Learning rate of Adam (paper: searched in 1e-1 to 1e-5)."""
    candidates: int = Field(default=512, ge=2)
    """Number of candidate items per step; at most the catalogue."""


class Generator(nn.Module):
    """Logits of the catalogue for the substitute of a row.

    Args:
        width: of the embeddings.
        generator: of the initial parameters.
    """

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = (2 * width + 1) ** -0.5
        self.weight = nn.Parameter(
            (2 * torch.rand((2 * width + 1, width), generator=generator) - 1) * bound
        )
        self.bias = nn.Parameter(torch.zeros(width))

    def logits(
        self, users: Tensor, originals: Tensor, sensitivity: Tensor, items: Tensor
    ) -> Tensor:
        """h_ui of equations 8 and 9, `float32 [n, items]`.

        Args:
            users: `float32 [n, d]`, p_u.
            originals: `float32 [n, d]`, q_i.
            sensitivity: `float32 [n]`, gamma_u.
            items: `float32 [items, d]`, the items that may be drawn.
        """
        inputs = torch.cat([users, originals, sensitivity[:, None]], dim=1)
        return (inputs @ self.weight + self.bias) @ items.T


def gumbel(shape: tuple[int, ...] | torch.Size, generator: torch.Generator) -> Tensor:
    """Independent standard Gumbel variables, `float32 [...]` of the given shape."""
    return (
        -torch.empty(shape)
        .exponential_(generator=generator)
        .clamp(min=torch.finfo(torch.float32).tiny)
        .log()
    )


def gumbel_softmax(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Equation 12, `float [n, items]`; logits of minus infinity get no weight."""
    return torch.softmax((logits + gumbel(logits.shape, generator)) / temperature, dim=1)


def losses(
    similarity: Similarity,
    users: Tensor,
    originals: Tensor,
    sensitivity: Tensor,
    mixture: Tensor,
    items: Tensor,
) -> tuple[Tensor, Tensor]:
    """L_s and L_g of equations 13 and 14, summed over rows.

    Args:
        similarity: which definition.
        users: `float32 [n, d]`, p_u.
        originals: `int64 [n]`, i.
        sensitivity: `float32 [n]`, gamma_u.
        mixture: `float32 [n, candidates]`, weights of the candidates in q_v.
        items: `float32 [candidates, d]`.
    """
    substitute = mixture @ items
    extremes = None
    if similarity.definition == "released":
        found = (substitute @ items.T).aminmax(dim=1)
        extremes = (found.min, found.max)
    alike = similarity.of(originals, substitute, extremes)
    utility = nn.functional.softplus(-(users * substitute).sum(1)).sum()
    return torch.relu(alike - sensitivity).sum(), utility


def train_generator(
    config: GeneratorConfig,
    rows: Interactions,
    chosen: np.ndarray,
    sensitivity: np.ndarray,
    users: Tensor,
    similarity: Similarity,
    generator: torch.Generator,
) -> tuple[Generator, list[float]]:
    """Train on the chosen rows.

    Args:
        config: its settings.
        rows: the training rows.
        chosen: `int64 [n]`, row numbers.
        sensitivity: `float64 [users]`, gamma.
        users: `float32 [users, d]`, embeddings.
        similarity: the definition, and the items' embeddings.
        generator: of initial parameters, order, candidates and noise.

    Returns:
        The generator, and L_I per row of each tenth of the steps.
    """
    made = Generator(users.shape[1], generator)
    items = similarity.items
    adam = Adam(made.parameters(), lr=config.learning_rate)
    gamma = torch.from_numpy(sensitivity.astype(np.float32))
    found = np.empty(config.steps)
    for step, some in enumerate(_batches(chosen, config, generator)):
        user, item = (torch.from_numpy(column[some]) for column in (rows.users, rows.items))
        candidates = torch.randperm(len(items), generator=generator)[: config.candidates]
        logits = made.logits(users[user], items[item], gamma[user], items[candidates])
        logits = logits.masked_fill(_owned(rows, user.numpy(), candidates.numpy()), -torch.inf)
        mixture = gumbel_softmax(logits, config.temperature, generator)
        privacy, utility = losses(
            similarity, users[user], item, gamma[user], mixture, items[candidates]
        )
        loss = (config.privacy_weight * privacy + config.utility_weight * utility) / len(some)
        adam.zero_grad()
        loss.backward()
        adam.step()
        found[step] = float(loss.detach())
    return made, [float(part.mean()) for part in np.array_split(found, min(10, config.steps))]


def _batches(
    chosen: np.ndarray, config: GeneratorConfig, generator: torch.Generator
) -> Iterator[np.ndarray]:
    """Batches of the chosen rows for all steps, shuffled again after each pass."""
    done = 0
    while True:
        for batch in torch.randperm(len(chosen), generator=generator).split(config.batch_size):
            if done == config.steps:
                return
            done += 1
            yield chosen[batch.numpy()]


def _owned(rows: Interactions, users: np.ndarray, candidates: np.ndarray) -> Tensor:
    """`bool [n, candidates]`: whether a row's user has a candidate; false for a user who has
    all."""
    column = np.full(rows.num_items, -1, dtype=np.int64)
    column[candidates] = np.arange(len(candidates))
    counts = np.diff(rows.user_offsets)[users]
    own = rows.items[rows.user_order[spans(rows.user_offsets[users], counts)]]
    row = np.repeat(np.arange(len(users)), counts)
    seen = column[own] >= 0
    owned = torch.zeros(len(users), len(candidates), dtype=torch.bool)
    owned[torch.from_numpy(row[seen]), torch.from_numpy(column[own][seen])] = True
    owned[owned.all(dim=1)] = False
    return owned
