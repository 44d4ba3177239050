# SPDX-License-Identifier: Apache-2.0
"""UPC-SDG: rows that matter little to a user are replaced by items that the user would like (Liu et
al., SIGIR 2022).

BPR-MF embeddings of the training rows are computed, and attention weights of each row's
contribution; the k n rows of each user with the smallest weights are replaced, by items from a
Gumbel-softmax trained for similarity of at most gamma to the row's item and for the user's
preference. The parts are in `fedrec.perturb.synthesis`. Every row counts as an interaction,
whatever its rating; a substitute takes over the rating and time of the row that it replaces.

The paper's definition 1 calls the share that is *kept* the replacement ratio, but uses it
everywhere as the share that is replaced, as here. It claims privacy without a proof: see `words`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines.factorisation.bprmf import BprmfConfig
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.device import one_thread
from fedrec.perturb.mean_similarity import FIGURE, mean_similarity
from fedrec.perturb.synthesis.attention import AttentionConfig, train_attention
from fedrec.perturb.synthesis.embeddings import trained_embeddings
from fedrec.perturb.synthesis.generator import Generator, GeneratorConfig, train_generator
from fedrec.perturb.synthesis.preferences import (
    Preferences,
    ReplacementConfig,
    preferences_of,
    refuse_missing_rows,
)
from fedrec.perturb.synthesis.selection import lowest, replaced_counts
from fedrec.perturb.synthesis.similarity import Definition, Similarity
from fedrec.perturb.synthesis.substitutes import Draw, random_substitutes, scored_substitutes
from fedrec.rng import stream, torch_stream


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
    """Whether the generator's substitutes are a `sample` of its softmax (equation 11) or its `best`
    (authors' code)."""
    embeddings: BprmfConfig = BprmfConfig()
    """Settings of the embeddings; their seed is the experiment's."""
    attention: AttentionConfig = AttentionConfig()
    """Settings of the attention."""
    generator: GeneratorConfig = GeneratorConfig()
    """Settings of the generator."""


class UpcSdg(Perturbation):
    """Synthetic rows by attention and Gumbel-softmax, with a privacy level per user but without a
    guarantee."""

    name = "upc-sdg"
    Config = UpcSdgConfig
    paper = "UPC-SDG (Liu et al. 2022)"
    config: UpcSdgConfig

    def perturb(self, data: TrainingData) -> Perturbed:
        """Train on all training rows, and replace k n rows of each user.

        Raises:
            DataError: a user has no training row, or too few other items, or the table of users is
                wrong.
        """
        refuse_missing_rows(data)
        rows = data.rows
        preferences = preferences_of(self.config, rows, self.config.sensitivity)
        with one_thread():  # last digits change single draws
            settings = self.config.embeddings.model_copy(update={"seed": self.seed})
            users, embedded = trained_embeddings(settings, rows)
            similarity = Similarity(embedded, self.config.similarity)
            chosen, attention = self._chosen(rows, preferences, users, similarity.items)
            items = rows.items.copy()
            items[chosen], generator = self._substitutes(
                rows, chosen, preferences, users, similarity
            )
            gamma = preferences.sensitivity[rows.users[chosen]]
            alike = mean_similarity(rows.items[chosen], items[chosen], similarity, gamma)
        figures = {"replaced rows": len(chosen), **attention, **generator, FIGURE: alike}
        return Perturbed(dataclasses.replace(rows, items=items), np.arange(len(rows)), figures)

    def words(self) -> list[str]:
        """No guarantee, and why."""
        return [
            (
                "UPC-SDG gives no differential privacy: embeddings, attention and generator are"
                " trained on everybody's raw rows, those that are not replaced are published as"
                " they are, and which are depends on the profile."
            ),
            (
                "Its sensitivity bounds a mean similarity that training may exceed, and no attack."
                " What a table tells can be measured only: see `fedrec synthesise`."
            ),
        ]

    def _chosen(
        self, rows: Interactions, preferences: Preferences, users: torch.Tensor, items: torch.Tensor
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Row numbers, grouped by user, of the rows that are replaced."""
        counts = replaced_counts(rows, preferences.ratio)
        if self.config.select == "random" or not counts.any():
            return lowest(rows, stream(self.seed, "perturb-rows").random(len(rows)), counts), {}
        source = torch_stream(self.seed, "perturb-attention")
        logits, losses = train_attention(self.config.attention, rows, users, items, source)
        return lowest(rows, logits, counts), {"attention loss per user": _first_and_last(losses)}

    def _substitutes(
        self,
        rows: Interactions,
        chosen: np.ndarray,
        preferences: Preferences,
        users: torch.Tensor,
        similarity: Similarity,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """`int64 [n]`: the items that replace those of the chosen rows."""
        config = self.config
        gamma = torch.from_numpy(preferences.sensitivity.astype(np.float32))
        if config.generate == "random" or not len(chosen):
            return random_substitutes(rows, chosen, self.seed), {}
        if config.generate == "fixed-similarity":
            return (
                scored_substitutes(
                    rows, chosen, _nearness(rows, similarity, gamma), "best", self.seed
                ),
                {},
            )
        source = torch_stream(self.seed, "perturb-generator")
        made, losses = train_generator(
            config.generator, rows, chosen, preferences.sensitivity, users, similarity, source
        )
        scores = _logits(made, rows, users, similarity.items, gamma)
        drawn = scored_substitutes(rows, chosen, scores, config.draw, self.seed)
        return drawn, {"generator loss per row": _first_and_last(losses)}


def _nearness(
    rows: Interactions, similarity: Similarity, gamma: torch.Tensor
) -> Callable[[np.ndarray], torch.Tensor]:
    """Scores of substitutes for some rows, highest where the similarity is nearest to gamma."""

    def scores(some: np.ndarray) -> torch.Tensor:
        user, item = _columns(rows, some)
        return -(similarity.rows(item) - gamma[user, None]).abs()

    return scores


def _logits(
    made: Generator,
    rows: Interactions,
    users: torch.Tensor,
    items: torch.Tensor,
    gamma: torch.Tensor,
) -> Callable[[np.ndarray], torch.Tensor]:
    """Scores of substitutes for some rows by the generator."""

    @torch.no_grad()
    def scores(some: np.ndarray) -> torch.Tensor:
        user, item = _columns(rows, some)
        return made.logits(users[user], items[item], gamma[user], items)

    return scores


def _columns(rows: Interactions, some: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(rows.users[some]), torch.from_numpy(rows.items[some])


def _first_and_last(losses: list[float]) -> dict[str, float]:
    return {"first": losses[0], "last": losses[-1]}
