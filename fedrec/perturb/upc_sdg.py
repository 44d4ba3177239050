# SPDX-License-Identifier: Apache-2.0
"""UPC-SDG (Liu et al., SIGIR 2022): selection of rows by attention, a generator of substitutes, and
the replacement of rows by synthetic ones."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedrec.baselines.pairwise import BprmfConfig
from fedrec.config import Config, Width
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.device import one_thread
from fedrec.nn.layers import Adam, uniform
from fedrec.perturb.substitutes import (
    FIGURE,
    Definition,
    Draw,
    ReplacementConfig,
    Similarity,
    check_rows,
    lowest,
    mean_similarity,
    random_substitutes,
    replaced_counts,
    scored_substitutes,
    trained_embeddings,
)
from fedrec.rng import stream, torch_stream
from fedrec.runtime.ragged import spans

# The generator of substitutes: a linear map and Gumbel-softmax (UPC-SDG, equations 8 to 15).
#
#     R_ui = W2 [p_u ; q_i ; gamma_u] + b2          h_ui = R_ui E_I^T
#     y_ui = softmax((h_ui + g) / tau)              q_v  = y_ui E_I
#     L_s  = sum [f_sim(q_i, q_v) - gamma_u]_+      L_g  = sum -ln sigma(p_u . q_v)
#     L_I  = lambda_s L_s + lambda_g L_g
#
# Where this differs from the paper: a step sees a random part of the catalogue (`candidates`), the
# same for its whole batch, because logits of a million rows over 40,000 items would take hours;
# substitutes are drawn from the whole catalogue. Items that the user has are masked in the softmax,
# in training too. The paper does not say whether substitutes are sampled or the best items:
# equation 11 samples, the public code takes the best.

_PRIVACY_WEIGHT = 3.0  # lambda_s, with lambda_g 1 (paper, for Office and Gowalla; 5 and 7 Clothing)


class GeneratorConfig(Config):
    """Settings of the generator."""

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


class _Generator(nn.Module):
    """Model of logits over the catalogue for the substitute of a row.

    Args:
        width: of the embeddings.
        generator: of the initial parameters.
    """

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = _uniform(2 * width + 1, width, generator)
        self.bias = nn.Parameter(torch.zeros(width))

    def logits(self, users: Tensor, originals: Tensor, sensitivity: float, items: Tensor) -> Tensor:
        """Compute h_ui of equations 8 and 9, `float32 [n, items]`.

        Args:
            users: `float32 [n, d]`, p_u.
            originals: `float32 [n, d]`, q_i.
            sensitivity: gamma, of all users.
            items: `float32 [items, d]`, the items that may be drawn.
        """
        gamma = users.new_full((len(users), 1), sensitivity)
        inputs = torch.cat([users, originals, gamma], dim=1)
        return (inputs @ self.weight + self.bias) @ items.T


def _gumbel_softmax(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Compute equation 12, `float [n, items]`; logits of minus infinity get weight 0."""
    drawn = torch.empty(logits.shape).exponential_(generator=generator)
    gumbel = -drawn.clamp(min=torch.finfo(torch.float32).tiny).log()
    return torch.softmax((logits + gumbel) / temperature, dim=1)


def _losses(
    similarity: Similarity,
    users: Tensor,
    originals: Tensor,
    sensitivity: float,
    mixture: Tensor,
    items: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute L_s and L_g of equations 13 and 14, summed over rows.

    Args:
        similarity: which definition.
        users: `float32 [n, d]`, p_u.
        originals: `int64 [n]`, i.
        sensitivity: gamma.
        mixture: `float32 [n, candidates]`, weights of the candidates in q_v.
        items: `float32 [candidates, d]`.
    """
    substitute = mixture @ items
    extremes = None
    if similarity.definition == "released":
        least, most = (substitute @ items.T).aminmax(dim=1)
        extremes = least, most
    alike = similarity.of(originals, substitute, extremes)
    utility = nn.functional.softplus(-(users * substitute).sum(1)).sum()
    return torch.relu(alike - sensitivity).sum(), utility


def _train_generator(
    config: GeneratorConfig,
    rows: Interactions,
    chosen: np.ndarray,
    sensitivity: float,
    users: Tensor,
    similarity: Similarity,
    generator: torch.Generator,
) -> _Generator:
    """Train a generator on the chosen rows.

    Args:
        config: its settings.
        rows: the training rows.
        chosen: `int64 [n]`, row numbers.
        sensitivity: gamma.
        users: `float32 [users, d]`, embeddings.
        similarity: the definition, and the items' embeddings.
        generator: of initial parameters, order, candidates and noise.
    """
    made = _Generator(users.shape[1], generator)
    items = similarity.items
    adam = Adam(made.parameters(), lr=config.learning_rate)
    for some in _batches(chosen, config, generator):
        user, item = (torch.from_numpy(column[some]) for column in (rows.users, rows.items))
        candidates = torch.randperm(len(items), generator=generator)[: config.candidates]
        logits = made.logits(users[user], items[item], sensitivity, items[candidates])
        logits = logits.masked_fill(_owned(rows, user.numpy(), candidates.numpy()), -torch.inf)
        mixture = _gumbel_softmax(logits, config.temperature, generator)
        privacy, utility = _losses(
            similarity, users[user], item, sensitivity, mixture, items[candidates]
        )
        loss = (_PRIVACY_WEIGHT * privacy + utility) / len(some)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return made


def _batches(
    chosen: np.ndarray, config: GeneratorConfig, generator: torch.Generator
) -> Iterator[np.ndarray]:
    """Yield batches of the chosen rows for all steps, reshuffled after each pass."""
    done = 0
    while True:
        for batch in torch.randperm(len(chosen), generator=generator).split(config.batch_size):
            if done == config.steps:
                return
            done += 1
            yield chosen[batch.numpy()]


def _owned(rows: Interactions, users: np.ndarray, candidates: np.ndarray) -> Tensor:
    """Mask `bool [n, candidates]` of candidates that a row's user has; false for a user who has
    all."""
    column = np.full(rows.num_items, -1, dtype=np.int64)
    column[candidates] = np.arange(len(candidates))
    counts = np.diff(rows.user_offsets)[users]
    columns = column[rows.items[rows.user_order[spans(rows.user_offsets[users], counts)]]]
    row = np.repeat(np.arange(len(users)), counts)
    seen = columns >= 0
    owned = torch.zeros(len(users), len(candidates), dtype=torch.bool)
    owned[torch.from_numpy(row[seen]), torch.from_numpy(columns[seen])] = True
    owned[owned.all(dim=1)] = False
    return owned


# How much each row contributes to its user's preferences (UPC-SDG, equations 3 to 6).
#
#     v_ui = h . ReLU(W1 [p_u : q_i] + b1)          a_ui = exp(v_ui) / (sum_j exp(v_uj))^beta
#     t_u  = 1/n_u sum_i a_ui q_i                   L_D  = sum_u |f(t_u) - p_u|^2
#
# with f an MLP with dropout.
#
# The embeddings are fixed, and the generator has parameters of its own: L_D and L_I (equation 16)
# share none, so minimising their sum is equivalent to minimising each separately, as is done here.
# For the same reason the relative scale of L_D and L_I has no effect.

_BATCH_ROWS = 2048  # training rows per step; all rows of a user are in the same step


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
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of Adam."""


class _Attention(nn.Module):
    """Model of attention weights of rows, and of the user's embedding from their weighted sum.

    Args:
        config: its settings.
        width: of the embeddings.
        generator: of the initial parameters.
    """

    def __init__(self, config: AttentionConfig, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.user = _uniform(width, hidden, generator)
        self.item = _uniform(width, hidden, generator)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.out = _uniform(hidden, 1, generator)
        self.first = _uniform(width, hidden, generator)
        self.second = _uniform(hidden, width, generator)
        self.first_bias = nn.Parameter(torch.zeros(hidden))
        self.second_bias = nn.Parameter(torch.zeros(width))

    def logits(self, users: Tensor, of_row: Tensor, items: Tensor) -> Tensor:
        """Compute v_ui of equation 4, `float32 [rows]`.

        Args:
            users: `float32 [users, d]`, p_u.
            of_row: `int64 [rows]`, each row's user.
            items: `float32 [rows, d]`, q_i.
        """
        hidden = (users @ self.user)[of_row] + items @ self.item + self.bias
        return (torch.relu(hidden) @ self.out)[:, 0]

    def profiles(self, users: Tensor, of_row: Tensor, items: Tensor) -> Tensor:
        """Compute t_u of equation 3, `float32 [users, d]`."""
        weights = _attention_weights(
            self.logits(users, of_row, items), of_row, len(users), self.config.beta
        )
        summed = torch.zeros_like(users).index_add(0, of_row, weights[:, None] * items)
        return summed / torch.bincount(of_row, minlength=len(users)).clamp(min=1)[:, None]

    def loss(
        self, users: Tensor, of_row: Tensor, items: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """L_D of equation 6 over users, a scalar `[]`; with dropout if a generator is given.
        Arguments as in `logits`."""
        hidden = torch.relu(self.profiles(users, of_row, items) @ self.first + self.first_bias)
        if generator is not None and self.config.dropout:
            mask = torch.rand(hidden.shape, generator=generator) >= self.config.dropout
            hidden = hidden * mask / (1 - self.config.dropout)
        return (hidden @ self.second + self.second_bias - users).square().sum()


def _attention_weights(logits: Tensor, of_row: Tensor, users: int, beta: float) -> Tensor:
    """Compute a_ui of equation 5, `float [rows]`; with beta = 1 they sum to 1 for each user.

    Args:
        logits: `float [rows]`, v_ui.
        of_row: `int64 [rows]`, each row's user.
        users: number of users.
        beta: smoothing exponent.
    """
    largest = logits.new_full((users,), -torch.inf).scatter_reduce(
        0, of_row, logits.detach(), "amax"
    )
    total = torch.zeros_like(largest).index_add(0, of_row, (logits - largest[of_row]).exp())
    return (logits - beta * (largest + total.log())[of_row]).exp()


def _train_attention(
    config: AttentionConfig,
    rows: Interactions,
    users: Tensor,
    items: Tensor,
    generator: torch.Generator,
) -> np.ndarray:
    """Train the attention and return its logits for all rows, `float32 [rows]`, which rank a user's
    rows like the weights.

    Args:
        config: its settings.
        rows: the training rows.
        users: `float32 [users, d]`, embeddings.
        items: `float32 [items, d]`, embeddings.
        generator: of initial parameters, order and dropout.
    """
    attention = _Attention(config, users.shape[1], generator)
    adam = Adam(attention.parameters(), lr=config.learning_rate)
    for _ in range(config.epochs):
        order = torch.randperm(rows.num_users, generator=generator).numpy()
        for batch in _attention_batches(rows, order):
            user, of_row, item = _gathered(rows, batch)
            loss = attention.loss(users[user], of_row, items[item], generator)
            adam.zero_grad()
            (loss / len(user)).backward()
            adam.step()
    logits = np.empty(len(rows), dtype=np.float32)
    with torch.no_grad():
        for batch in _attention_batches(rows, np.arange(rows.num_users)):
            user, of_row, item = _gathered(rows, batch)
            logits[np.concatenate([rows.rows_of(each) for each in batch])] = attention.logits(
                users[user], of_row, items[item]
            ).numpy()
    return logits


def _attention_batches(rows: Interactions, order: np.ndarray) -> list[np.ndarray]:
    """Divide users with rows, in the given order, into batches by their number of rows."""
    counts = np.diff(rows.user_offsets)[order]
    order = order[counts > 0]
    counts = counts[counts > 0]
    batch = (np.cumsum(counts) - counts) // _BATCH_ROWS
    return np.split(order, np.flatnonzero(np.diff(batch)) + 1) if len(order) else []


def _gathered(rows: Interactions, batch: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Users of a batch, and for each of their rows the user's position and the item."""
    profiles = [rows.rows_of(user) for user in batch]
    of_row = np.repeat(np.arange(len(batch)), [len(profile) for profile in profiles])
    items = rows.items[np.concatenate(profiles)]
    return torch.from_numpy(batch), torch.from_numpy(of_row), torch.from_numpy(items)


def _uniform(rows: int, columns: int, generator: torch.Generator) -> nn.Parameter:
    """Initialise weights like `nn.Linear`, from the given generator."""
    return nn.Parameter(uniform(rows, columns, rows**-0.5, generator))


# UPC-SDG replaces rows of little importance to a user by items that the user would like (Liu et
# al., SIGIR 2022).
#
# BPR-MF embeddings of the training rows are computed, and attention weights of each row's
# contribution; the k n rows of each user with the smallest weights are replaced, by items from a
# Gumbel-softmax trained for similarity of at most gamma to the row's item and for the user's
# preference. Every row counts as an interaction, whatever its rating; a substitute takes over the
# rating and time of the row that it replaces.
#
# The paper's definition 1 calls the share that is *kept* the replacement ratio, but uses it
# everywhere as the share that is replaced, as here. It claims privacy without a proof: see `words`.


class UpcSdgConfig(ReplacementConfig):
    """Settings of UPC-SDG, and of its ablations."""

    sensitivity: float = Field(default=0.9, ge=0)
    """Sensitivity gamma: largest similarity of a substitute to the item that it replaces, >= 0
    (paper: 0.1 to 0.9)."""
    similarity: Definition = "paper"
    """Similarity of two items: equation 2 (`paper`), that of the authors' code (`released`), or
    `cosine`."""
    select: Literal["attention", "random"] = "attention"
    """Rows to replace: those of least attention, or random ones (ablation s)."""
    generate: Literal["gumbel", "random", "fixed-similarity"] = "gumbel"
    """Substitutes: drawn by the trained generator, random items (ablation r), or the items whose
    similarity is nearest to gamma (ablation f)."""
    draw: Draw = "sample"
    """Choice of the generator's substitutes: a `sample` of its softmax (equation 11) or its `best`
    (authors' code)."""
    embeddings: BprmfConfig = BprmfConfig()
    """Settings of the embeddings; their seed is the experiment's."""
    attention: AttentionConfig = AttentionConfig()
    """Settings of the attention."""
    generator: GeneratorConfig = GeneratorConfig()
    """Settings of the generator."""


class UpcSdg(Perturbation):
    """Replaces rows by attention and Gumbel-softmax, without a guarantee."""

    name = "upc-sdg"
    Config = UpcSdgConfig
    paper = "UPC-SDG (Liu et al. 2022)"
    config: UpcSdgConfig

    def perturb(self, data: TrainingData) -> Perturbed:
        """Train on all training rows, and replace k n rows of each user.

        Raises:
            DataError: a user has no training row, or too few other items.
        """
        check_rows(data)
        rows = data.rows
        with one_thread():  # last digits change single draws
            settings = self.config.embeddings.model_copy(update={"seed": self.seed})
            users, embedded = trained_embeddings(settings, rows)
            similarity = Similarity(embedded, self.config.similarity)
            chosen = self._chosen(rows, users, similarity.items)
            items = rows.items.copy()
            items[chosen] = self._substitutes(rows, chosen, users, similarity)
            gamma = f"{self.config.sensitivity:g}"
            alike = mean_similarity(rows.items[chosen], items[chosen], similarity, gamma)
        figures = {"replaced rows": len(chosen), FIGURE: alike}
        return Perturbed(dataclasses.replace(rows, items=items), np.arange(len(rows)), figures)

    def words(self) -> list[str]:
        """State that there is no guarantee, and the reasons."""
        return [
            (
                "UPC-SDG gives no differential privacy: embeddings, attention and generator are"
                " trained on raw rows of all users, rows that are not replaced are published"
                " unchanged, and their selection depends on the profile."
            ),
            (
                "Its sensitivity bounds only a mean similarity, which training may exceed, and does"
                " not bound attacks. Disclosure can only be measured: see `fedrec synthesise`."
            ),
        ]

    def _chosen(self, rows: Interactions, users: torch.Tensor, items: torch.Tensor) -> np.ndarray:
        """Choose the rows to replace, and return their row numbers grouped by user."""
        counts = replaced_counts(rows, self.config.replacement_ratio)
        if self.config.select == "random" or not counts.any():
            return lowest(rows, stream(self.seed, "perturb-rows").random(len(rows)), counts)
        source = torch_stream(self.seed, "perturb-attention")
        logits = _train_attention(self.config.attention, rows, users, items, source)
        return lowest(rows, logits, counts)

    def _substitutes(
        self, rows: Interactions, chosen: np.ndarray, users: torch.Tensor, similarity: Similarity
    ) -> np.ndarray:
        """Choose the substitutes of the chosen rows, `int64 [n]`."""
        config = self.config
        gamma = config.sensitivity
        if config.generate == "random" or not len(chosen):
            return random_substitutes(rows, chosen, self.seed)
        if config.generate == "fixed-similarity":

            def nearness(some: np.ndarray) -> torch.Tensor:
                _, item = _columns(rows, some)
                return -(similarity.rows(item) - gamma).abs()

            return scored_substitutes(rows, chosen, nearness, "best", self.seed)
        source = torch_stream(self.seed, "perturb-generator")
        made = _train_generator(config.generator, rows, chosen, gamma, users, similarity, source)

        @torch.no_grad()
        def logits(some: np.ndarray) -> torch.Tensor:
            user, item = _columns(rows, some)
            return made.logits(users[user], similarity.items[item], gamma, similarity.items)

        return scored_substitutes(rows, chosen, logits, config.draw, self.seed)


def _columns(rows: Interactions, some: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(rows.users[some]), torch.from_numpy(rows.items[some])
