# SPDX-License-Identifier: Apache-2.0
"""Similarity of substitutes to the items that they replace, by gamma (UPC-SDG, figure 4), for any
perturbation.

Similarity is that of BPR-MF embeddings of the *real* training rows, so the figures are for the
holder of these rows and not part of a release. UPC-SDG has such embeddings and reports the figures
itself; for every other perturbation they are trained here, with UPC-SDG's settings but at most 30
million steps.
"""

import numpy as np
import torch

from fedrec.baselines.factorisation.bprmf import BprmfConfig
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbed
from fedrec.perturb.synthesis.embeddings import trained_embeddings
from fedrec.perturb.synthesis.similarity import Definition, Similarity

FIGURE = "mean similarity by sensitivity"
"""Name of the table among the figures of a perturbation."""
_DEFINITIONS: tuple[Definition, ...] = ("paper", "released", "cosine")
_SENSITIVITIES_SHOWN = 20
_MOST_STEPS = 30_000_000


def mean_similarity(
    originals: np.ndarray,
    substitutes: np.ndarray,
    similarity: Similarity,
    sensitivity: np.ndarray | None = None,
) -> dict[str, dict[str, float]]:
    """Mean similarity of items to their substitutes, in all three definitions.

    Args:
        originals: `int64 [n]`, items.
        substitutes: `int64 [n]`, the items that replace them.
        similarity: of the items, by any definition.
        sensitivity: `float64 [n]`, gamma of each row's user; rounded to one decimal place if there
            are more than twenty values.

    Returns:
        By gamma (`all` where there is none): the number of `rows`, and the mean by definition;
        empty for n = 0.
    """
    if not len(originals):
        return {}
    labels, place = _groups(sensitivity, len(originals))
    pair = torch.from_numpy(originals), torch.from_numpy(substitutes)
    values = {name: similarity.defined(name).between(*pair).numpy() for name in _DEFINITIONS}
    counts = np.bincount(place)
    sums = {name: np.bincount(place, value) for name, value in values.items()}
    return {
        label: {
            "rows": int(counts[n]),
            **{name: float(total[n] / counts[n]) for name, total in sums.items()},
        }
        for n, label in enumerate(labels)
    }


def measured_similarity(
    real: Interactions, perturbed: Perturbed, seed: int
) -> dict[str, dict[str, float]]:
    """The same of a perturbation that trains no embeddings, over the rows whose item is another
    one.

    Args:
        real: the training rows before.
        perturbed: the training rows after; rows without an origin are left out.
        seed: of the embeddings.
    """
    origin = np.asarray(perturbed.origin)
    rows = np.flatnonzero(origin >= 0)
    originals = real.items[origin[rows]]
    substitutes = perturbed.rows.items[rows]
    moved = originals != substitutes
    if not moved.any():
        return {}
    epochs = min(BprmfConfig().epochs, max(1, _MOST_STEPS // max(1, len(real))))
    _, items = trained_embeddings(BprmfConfig(epochs=epochs, seed=seed), real)
    similarity = Similarity(items, "paper")
    return mean_similarity(originals[moved], substitutes[moved], similarity)


def _groups(sensitivity: np.ndarray | None, count: int) -> tuple[list[str], np.ndarray]:
    """The different gammas as text, ascending, and `int64 [n]`, which of them each row has."""
    if sensitivity is None:
        return ["all"], np.zeros(count, dtype=np.int64)
    if len(np.unique(sensitivity)) > _SENSITIVITIES_SHOWN:
        sensitivity = sensitivity.round(1)
    values, place = np.unique(sensitivity, return_inverse=True)
    return [f"{value:g}" for value in values], place
