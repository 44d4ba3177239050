# SPDX-License-Identifier: Apache-2.0
"""Empirical measures of what a perturbed table reveals about the real one; they give no guarantee.

*Kept* is the share of real (user, item) pairs that are in the perturbed table, *replaced* the share
of its rows whose item their user does not really have.

*Linkage*: an attacker has all real profiles and the perturbed ones without names, and assigns to
each of these the real profile w with the largest overlap, each shared item weighted by idf =
ln(users / users who have it), divided by sqrt(|w|) so that large profiles are not favoured.
*Linked* is the share of users who are identified; ties count by the probability of picking the
right one.

*Recovery*: an attacker who knows user, substitute and original of the replaced rows of a random
half of the users fits a linear map from factors of substitute and user in the perturbed table to
the originals, and predicts the original of each row of the other half: top-1 and top-10 accuracy,
compared with predicting the most frequent originals of the first half.
"""

from dataclasses import asdict, dataclass

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import svds

from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbed
from fedrec.rng import stream

_USERS_AT_ONCE = 512  # users per block of dense rows in memory
_DEPTHS = (1, 10)


@dataclass(frozen=True)
class Disclosure:
    """Shares, each in [0, 1]; NaN where there is nothing to measure.

    Attributes:
        kept: share of the real pairs that are in the perturbed table.
        replaced: share of the perturbed rows whose item the user does not really have.
        linked: share of the users identified by their perturbed profile.
        chance: the same by guessing.
        recovered: share of the replaced rows whose original a trained attacker predicts, in one and
            in ten tries.
        frequent: the same when predicting the most frequent originals.
    """

    kept: float
    replaced: float
    linked: float
    chance: float
    recovered: dict[str, float]
    frequent: dict[str, float]

    def table(self) -> dict[str, object]:
        """As nested dictionaries."""
        return asdict(self)


def disclosure(real: Interactions, perturbed: Perturbed, seed: int) -> Disclosure:
    """Measure a perturbed table.

    Args:
        real: the training rows before.
        perturbed: the training rows after.
        seed: of the half of the users that the attacker knows.
    """
    before = binary(real)
    after = binary(perturbed.rows)
    own = before.multiply(after).sum()
    users = np.flatnonzero((np.diff(before.indptr) > 0) & (np.diff(after.indptr) > 0))
    foreign = np.asarray(before[perturbed.rows.users, perturbed.rows.items]).ravel() == 0
    recovered, frequent = recovery(real, perturbed, seed)
    return Disclosure(
        kept=float(own / max(1, before.nnz)),
        replaced=float(foreign.mean()) if len(foreign) else float("nan"),
        linked=linkage(before, after),
        chance=1 / len(users) if len(users) else float("nan"),
        recovered=recovered,
        frequent=frequent,
    )


def binary(rows: Interactions) -> sparse.csr_array:
    """Binary sparse `float64 [users, items]`: which user has which item."""
    pairs = np.unique(rows.users * rows.num_items + rows.items)
    return sparse.csr_array(
        (np.ones(len(pairs)), np.divmod(pairs, rows.num_items)), (rows.num_users, rows.num_items)
    )


def linkage(real: sparse.csr_array, perturbed: sparse.csr_array) -> float:
    """Share of users whose perturbed profile is nearest to their own real one.

    Args:
        real: binary `[users, items]`.
        perturbed: the same of the perturbed table; users without rows in it are left out.
    """
    counts = np.asarray(real.sum(axis=0)).ravel()
    sizes = np.maximum(np.diff(real.indptr), 1)
    idf = np.log(len(sizes) / np.maximum(counts, 1))
    weighted = (sparse.diags_array(sizes**-0.5) @ real @ sparse.diags_array(idf)).T.tocsr()
    users = np.flatnonzero((np.diff(perturbed.indptr) > 0) & (np.diff(real.indptr) > 0))
    found = 0.0
    for start in range(0, len(users), _USERS_AT_ONCE):
        block = users[start : start + _USERS_AT_ONCE]
        overlap = (perturbed[block] @ weighted).toarray()
        best = overlap.max(axis=1) * (1 - 1e-12)  # equal up to the order of summation
        hit = overlap[np.arange(len(block)), block] >= best
        found += float((hit / np.maximum((overlap >= best[:, None]).sum(axis=1), 1)).sum())
    return found / len(users) if len(users) else float("nan")


def recovery(
    real: Interactions, perturbed: Perturbed, seed: int, width: int = 64, penalty: float = 1.0
) -> tuple[dict[str, float], dict[str, float]]:
    """How often the original of a replaced row is predicted.

    Args:
        real: the training rows before.
        perturbed: the training rows after; rows without an origin are left out.
        seed: of the known half of the users.
        width: of the factors of the perturbed table that substitutes and users are described by.
        penalty: of the ridge regression.

    Returns:
        Shares by the number of tries, of the attacker and of predicting the most frequent
        originals.
    """
    rows = perturbed.rows
    origin = np.asarray(perturbed.origin)
    replaced = np.flatnonzero(origin >= 0)
    replaced = replaced[real.items[origin[replaced]] != rows.items[replaced]]
    known_user = stream(seed, "disclosure").random(real.num_users) < 0.5
    known = known_user[rows.users[replaced]]
    if known.all() or not known.any():
        nothing = {f"top-{depth}": float("nan") for depth in _DEPTHS}
        return nothing, dict(nothing)
    originals = real.items[origin[replaced]]
    inputs = _described(rows, replaced, width)
    map_ = _ridge(inputs[known], originals[known], real.num_items, penalty)
    asked = inputs[~known]
    truth = originals[~known]
    ranks = [
        _ranks(asked[at : at + 4096] @ map_, truth[at : at + 4096])
        for at in range(0, len(asked), 4096)
    ]
    frequency = np.bincount(originals[known], minlength=real.num_items).astype(np.float64)
    order = np.empty(real.num_items, dtype=np.int64)
    order[np.argsort(-frequency, kind="stable")] = np.arange(real.num_items)
    return _shares(np.concatenate(ranks)), _shares(order[truth])


def _described(rows: Interactions, some: np.ndarray, width: int) -> np.ndarray:
    """Inputs of the attacker for some rows: factors of the item and of the user, and a constant."""
    least = min(rows.num_users, rows.num_items)
    start = np.ones(least)  # of the iteration, so that the same table gives the same factors
    user, strength, item = (
        np.asarray(part) for part in svds(binary(rows), k=min(width, least - 1), v0=start)
    )
    parts = (item.T * strength)[rows.items[some]], (user * strength)[rows.users[some]]
    parts = tuple(part / max(float(part.std()), 1e-12) for part in parts)
    return np.concatenate([*parts, np.ones((len(some), 1))], axis=1)


def _ridge(inputs: np.ndarray, labels: np.ndarray, classes: int, penalty: float) -> np.ndarray:
    """Weights `[inputs, classes]` of a ridge regression to indicators of the labels."""
    indicators = sparse.csr_array(
        (np.ones(len(labels)), (np.arange(len(labels)), labels)), (len(labels), classes)
    )
    gram = inputs.T @ inputs + penalty * np.eye(inputs.shape[1])
    return np.linalg.solve(gram, (indicators.T @ inputs).T)


def _ranks(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return (scores > scores[np.arange(len(truth)), truth][:, None]).sum(axis=1)


def _shares(ranks: np.ndarray) -> dict[str, float]:
    return {f"top-{depth}": float((ranks < depth).mean()) for depth in _DEPTHS}
