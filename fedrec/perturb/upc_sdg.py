# SPDX-License-Identifier: Apache-2.0
"""UPC-SDG: selection of rows and their replacement by synthetic ones."""

import dataclasses
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines.pairwise import BprmfConfig
from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.device import one_thread
from fedrec.errors import DataError
from fedrec.perturb.generator import (
    AttentionConfig,
    GeneratorConfig,
    train_attention,
    train_generator,
)
from fedrec.perturb.substitutes import (
    FIGURE,
    Definition,
    Draw,
    Similarity,
    mean_similarity,
    random_substitutes,
    scored_substitutes,
    trained_embeddings,
)
from fedrec.rng import stream, torch_stream


class ReplacementConfig(Config):
    """Settings of a perturbation that replaces rows."""

    replacement_ratio: float = Field(default=0.2, ge=0, le=1)
    """Share k of each user's training rows to replace, in [0, 1]; k n is rounded half up."""


def check_rows(data: TrainingData) -> None:
    """Check that training clients and tested users have training rows to derive synthetic rows.

    Raises:
        DataError: users, or the whole dataset, have no training rows.
    """
    users = np.union1d(data.clients, data.tested)
    none = users[np.bincount(data.rows.users, minlength=data.rows.num_users)[users] == 0]
    if len(none) or not len(data.rows):
        shown = ", ".join(str(data.rows.user_ids[user]) for user in none[:5])
        raise DataError(
            f"{data.rows.name} has users without training rows",
            expected="at least one training row of each training or test user",
            got=f"{len(none)} users without one ({shown})",
            fix="remove them from the dataset, or choose a split with training rows of each user",
        )


# Selection of the rows to replace (UPC-SDG, equation 7), for all users at once.


def replaced_counts(rows: Interactions, ratio: float) -> np.ndarray:
    """Number of replaced rows of each user, `int64 [users]`: k n rounded half up, for the ratio k,
    in [0, 1]."""
    counts = np.diff(rows.user_offsets)
    return np.floor(ratio * counts + 0.5 + 1e-9).astype(np.int64)  # .35 x 10 is 3.4999999999999996


def lowest(rows: Interactions, score: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Select the rows of each user with the smallest scores.

    Args:
        rows: the training rows.
        score: `float [rows]`; equal scores keep the order of the rows.
        counts: `int64 [users]`, number of rows of each user.

    Returns:
        `int64 [rows]`: row numbers, users ascending, each user's by rising score.
    """
    order = np.lexsort((score, rows.users))
    rank = np.arange(len(order)) - rows.user_offsets[rows.users[order]]
    return order[rank < counts[rows.users[order]]]


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
            chosen, attention = self._chosen(rows, users, similarity.items)
            items = rows.items.copy()
            items[chosen], generator = self._substitutes(rows, chosen, users, similarity)
            gamma = f"{self.config.sensitivity:g}"
            alike = mean_similarity(rows.items[chosen], items[chosen], similarity, gamma)
        figures = {"replaced rows": len(chosen), **attention, **generator, FIGURE: alike}
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

    def _chosen(
        self, rows: Interactions, users: torch.Tensor, items: torch.Tensor
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Choose the rows to replace, and return their row numbers grouped by user."""
        counts = replaced_counts(rows, self.config.replacement_ratio)
        if self.config.select == "random" or not counts.any():
            return lowest(rows, stream(self.seed, "perturb-rows").random(len(rows)), counts), {}
        source = torch_stream(self.seed, "perturb-attention")
        logits, losses = train_attention(self.config.attention, rows, users, items, source)
        return lowest(rows, logits, counts), {"attention loss per user": _first_and_last(losses)}

    def _substitutes(
        self, rows: Interactions, chosen: np.ndarray, users: torch.Tensor, similarity: Similarity
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Choose the substitutes of the chosen rows, `int64 [n]`."""
        config = self.config
        gamma = config.sensitivity
        if config.generate == "random" or not len(chosen):
            return random_substitutes(rows, chosen, self.seed), {}
        if config.generate == "fixed-similarity":

            def nearness(some: np.ndarray) -> torch.Tensor:
                _, item = _columns(rows, some)
                return -(similarity.rows(item) - gamma).abs()

            return scored_substitutes(rows, chosen, nearness, "best", self.seed), {}
        source = torch_stream(self.seed, "perturb-generator")
        made, losses = train_generator(
            config.generator, rows, chosen, gamma, users, similarity, source
        )

        @torch.no_grad()
        def logits(some: np.ndarray) -> torch.Tensor:
            user, item = _columns(rows, some)
            return made.logits(users[user], similarity.items[item], gamma, similarity.items)

        drawn = scored_substitutes(rows, chosen, logits, config.draw, self.seed)
        return drawn, {"generator loss per row": _first_and_last(losses)}


def _columns(rows: Interactions, some: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(rows.users[some]), torch.from_numpy(rows.items[some])


def _first_and_last(losses: list[float]) -> dict[str, float]:
    return {"first": losses[0], "last": losses[-1]}
