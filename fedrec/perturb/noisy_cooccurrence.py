# SPDX-License-Identifier: Apache-2.0
"""Synthetic profiles from noisy counts of item pairs, and measures of their disclosure."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field
from scipy import sparse
from scipy.sparse.linalg import svds

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.errors import ExperimentError
from fedrec.perturb.upc_sdg import check_rows
from fedrec.privacy import mechanisms
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.privacy.statement import report
from fedrec.rng import source_of, stream

# Empirical measures of the disclosure of a perturbed table; they are not a guarantee.
#
# *Kept* is the share of real (user, item) pairs that are in the perturbed table, *replaced* the
# share of its rows whose item is not a real item of the user.
#
# *Linkage*: an attacker has all real profiles and the perturbed ones without names, and assigns to
# each of these the real profile w with the largest overlap, each shared item weighted by idf =
# ln(users / users who have it), divided by sqrt(|w|) so that large profiles are not favoured.
# *Linked* is the share of users who are identified; ties count by the probability of picking the
# right one.
#
# *Recovery*: an attacker who knows user, substitute and original of the replaced rows of a random
# half of the users fits a linear map from factors of substitute and user in the perturbed table to
# the originals, and predicts the original of each row of the other half: top-1 and top-10 accuracy,
# compared with predicting the most frequent originals of the first half.

_USERS_AT_ONCE = 512  # users per block of dense rows in memory
_ROWS_AT_ONCE = 4096
_DEPTHS = (1, 10)
_FACTORS = 64  # of the perturbed table, which describe substitutes and users


def disclosure(real: Interactions, perturbed: Perturbed, seed: int) -> dict[str, Any]:
    """Measure the disclosure of a perturbed table.

    Args:
        real: the training rows before.
        perturbed: the training rows after.
        seed: seed of the choice of users that the attacker knows.

    Returns:
        Shares, each in [0, 1], NaN where there is nothing to measure: `kept`, of the real pairs
        that are in the perturbed table; `replaced`, of the perturbed rows whose item is not a real
        item of the user; `linked`, of the users identified by their perturbed profile, and `chance`
        by guessing; `recovered`, of the replaced rows whose original a trained attacker predicts,
        by the number of tries, and `frequent` by predicting the most frequent originals.
    """
    before = binary(real)
    after = binary(perturbed.rows)
    users = np.flatnonzero((np.diff(before.indptr) > 0) & (np.diff(after.indptr) > 0))
    foreign = np.asarray(before[perturbed.rows.users, perturbed.rows.items]).ravel() == 0
    recovered, frequent = _recovery(real, perturbed, seed)
    return {
        "kept": float(before.multiply(after).sum() / max(1, before.nnz)),
        "replaced": float(foreign.mean()) if len(foreign) else float("nan"),
        "linked": _linkage(before, after),
        "chance": 1 / len(users) if len(users) else float("nan"),
        "recovered": recovered,
        "frequent": frequent,
    }


def binary(rows: Interactions) -> sparse.csr_array:
    """Convert rows to a binary sparse matrix `float64 [users, items]`."""
    pairs = np.unique(rows.users * rows.num_items + rows.items)
    return sparse.csr_array(
        (np.ones(len(pairs)), np.divmod(pairs, rows.num_items)), (rows.num_users, rows.num_items)
    )


def _linkage(real: sparse.csr_array, perturbed: sparse.csr_array) -> float:
    """Share of users whose perturbed profile is nearest to their own real one.

    Args:
        real: binary `[users, items]`.
        perturbed: likewise, of the perturbed table; users without rows in it are left out.
    """
    counts = np.asarray(real.sum(axis=0)).ravel()
    sizes = np.maximum(np.diff(real.indptr), 1)
    idf = np.log(len(sizes) / np.maximum(counts, 1))
    weighted = (sparse.diags_array(sizes**-0.5) @ real @ sparse.diags_array(idf)).T.tocsr()
    users = np.flatnonzero((np.diff(perturbed.indptr) > 0) & (np.diff(real.indptr) > 0))
    hits = 0.0
    for start in range(0, len(users), _USERS_AT_ONCE):
        block = users[start : start + _USERS_AT_ONCE]
        overlap = (perturbed[block] @ weighted).toarray()
        best = overlap.max(axis=1) * (1 - 1e-12)  # equal up to the order of summation
        hit = overlap[np.arange(len(block)), block] >= best
        hits += float((hit / np.maximum((overlap >= best[:, None]).sum(axis=1), 1)).sum())
    return hits / len(users) if len(users) else float("nan")


def _recovery(
    real: Interactions, perturbed: Perturbed, seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of replaced rows whose original an attacker predicts.

    Args:
        real: the training rows before.
        perturbed: the training rows after; rows without an origin are left out.
        seed: seed of the choice of known users.

    Returns:
        Shares by the number of tries, of the attacker and of predicting the most frequent
        originals.
    """
    rows = perturbed.rows
    origin = np.asarray(perturbed.origin)
    replaced = np.flatnonzero(origin >= 0)
    replaced = replaced[real.items[origin[replaced]] != rows.items[replaced]]
    user_is_known = stream(seed, "disclosure").random(real.num_users) < 0.5
    known = user_is_known[rows.users[replaced]]
    if known.all() or not known.any():
        nothing = {f"top-{depth}": float("nan") for depth in _DEPTHS}
        return nothing, dict(nothing)
    originals = real.items[origin[replaced]]
    inputs = _described(rows, replaced)
    weights = _ridge(inputs[known], originals[known], real.num_items)
    asked = inputs[~known]
    truth = originals[~known]
    ranks = []
    for start in range(0, len(truth), _ROWS_AT_ONCE):
        some = truth[start : start + _ROWS_AT_ONCE]
        scores = asked[start : start + _ROWS_AT_ONCE] @ weights
        ranks.append((scores > scores[np.arange(len(some)), some][:, None]).sum(axis=1))
    frequency = np.bincount(originals[known], minlength=real.num_items)
    order = np.argsort(np.argsort(-frequency, kind="stable"))
    return _shares(np.concatenate(ranks)), _shares(order[truth])


def _described(rows: Interactions, some: np.ndarray) -> np.ndarray:
    """Attacker's inputs for some rows: factors of the item and of the user, and a constant."""
    least = min(rows.num_users, rows.num_items)
    start = np.ones(least)  # fixed start of the iteration, so that factors are deterministic
    decomposed = svds(binary(rows), k=min(_FACTORS, least - 1), v0=start)
    user, strength, item = map(np.asarray, decomposed)
    factors = [(item.T * strength)[rows.items[some]], (user * strength)[rows.users[some]]]
    factors = [factor / max(float(factor.std()), 1e-12) for factor in factors]
    return np.concatenate([*factors, np.ones((len(some), 1))], axis=1)


def _ridge(inputs: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Weights `[inputs, classes]` of a ridge regression, of penalty 1, to indicators of the
    labels."""
    indicators = sparse.csr_array(
        (np.ones(len(labels)), (np.arange(len(labels)), labels)), (len(labels), classes)
    )
    gram = inputs.T @ inputs + np.eye(inputs.shape[1])
    return np.linalg.solve(gram, (indicators.T @ inputs).T)


def _shares(ranks: np.ndarray) -> dict[str, float]:
    return {f"top-{depth}": float((ranks < depth).mean()) for depth in _DEPTHS}


# The noisy release and the sampling of profiles.

_PROFILES_AT_ONCE = 2048  # users per block of dense rows in memory
_COUNTS = 1
_PAIRS = 2  # addresses of the noise of the two releases


class NoisyCooccurrenceConfig(Config):
    """Settings of the perturbation by noisy co-occurrences."""

    epsilon: float = Field(gt=0)
    """Total epsilon of the table, for both releases, > 0."""
    delta: float = Field(default=1e-5, gt=0, le=0.1)
    """Additive term of the guarantee: any set of outcomes is at most e^epsilon times as probable as
    on neighbouring data, plus delta."""
    items: int = Field(default=500, ge=2)
    """Number of items in the matrix and in the synthetic table, the most popular ones by the noisy
    counts."""
    clip_items: int = Field(default=8, ge=1)
    """Number m of items up to which a user's items have full weight; for n > m items each has
    weight sqrt(m / n), and each pair sqrt(m (m + 1) / (n (n + 1)))."""
    threshold: float = Field(default=2.0, ge=0)
    """Counts below this number of standard deviations of their noise are set to zero."""
    smoothing: float = Field(default=0.7, ge=0, le=1)
    """Share of draws by popularity only, in [0, 1]."""


@dataclass(frozen=True, eq=False)
class _NoisyCounts:
    """Noisy release, from which all profiles are computed.

    Attributes:
        items: `int64 [m]`, ascending: the most popular items by their noisy counts.
        counts: `float64 [m]`, >= 0: their noisy counts.
        pairs: `float64 [m, m]`, >= 0, symmetric, zero on the diagonal: noisy counts of users who
            have both.
        length: mean number of rows of a profile, >= 1.
    """

    items: np.ndarray
    counts: np.ndarray
    pairs: np.ndarray
    length: float


def _noisy_release(
    matrix: sparse.csr_array, noise: float, config: NoisyCooccurrenceConfig, seed: int
) -> _NoisyCounts:
    """Release counts, and pairs of the items with the largest noisy counts, with Gaussian noise.

    A user's contribution to each is scaled down to the norm of a user with m = `clip-items` items:
    sqrt(m) for counts, sqrt(m (m + 1) / 2) for the upper triangle of pairs with its diagonal.

    Args:
        matrix: binary `[users, items]`.
        noise: standard deviation of the noise for contributions of norm at most 1.
        config: number of items, m and threshold.
        seed: of the noise.
    """
    clip_items = config.clip_items
    source = source_of("reproducible", seed)
    mechanism = mechanisms.mechanism_of("gaussian")

    def released(name: str, values: np.ndarray, scale: float, address: int) -> np.ndarray:
        noisy = mechanisms.add_noise(mechanism, {name: values}, scale, source, address)[name]
        return noisy.astype(np.float64)

    scale = noise * np.sqrt(clip_items)
    shares = _user_shares(np.sqrt(_sizes(matrix)), np.sqrt(clip_items))
    counts = released("counts", matrix.T @ shares, scale, _COUNTS)
    head = np.sort(np.argsort(-counts, kind="stable")[: config.items])
    some = matrix[:, head]
    size = _sizes(some)
    bound = np.sqrt(clip_items * (clip_items + 1) / 2)
    scaled = sparse.diags_array(_user_shares(np.sqrt(size * (size + 1) / 2), bound)) @ some
    upper = np.triu((some.T @ scaled).toarray())
    pairs = np.triu(released("pairs", upper, noise * bound, _PAIRS), 1)
    pairs[pairs < config.threshold * noise * bound] = 0
    likely = np.where(counts[head] < config.threshold * scale, 0.0, counts[head])
    length = max(1.0, float(counts.sum()) / max(1, len(shares)))
    likely = likely if likely.any() else np.ones(len(head))
    return _NoisyCounts(head, likely, pairs + pairs.T, min(length, len(head) / 2))


def _profiles(
    release: _NoisyCounts, users: int, smoothing: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw profiles of distinct items: the first by popularity, each further item by its pairs with
    the previous ones.

    Args:
        release: the noisy counts.
        users: number of profiles.
        smoothing: share of the draws by popularity alone.
        random: source of randomness.

    Returns:
        `int64 [rows]` twice: the user, ascending, and the index of the item in `release.items`.
    """
    lengths = np.minimum(1 + random.poisson(release.length - 1, users), len(release.items))
    popular = release.counts / release.counts.sum()
    likely = release.pairs / np.maximum(release.pairs.sum(axis=1, keepdims=True), 1e-12)
    blocks = []
    for start in range(0, users, _PROFILES_AT_ONCE):
        some = lengths[start : start + _PROFILES_AT_ONCE]
        block_users, items = _block(popular, likely, some, smoothing, random)
        blocks.append((block_users + start, items))
    user, item = (np.concatenate(column) for column in zip(*blocks, strict=True))
    order = np.argsort(user, kind="stable")
    return user[order], item[order]


def _block(
    popular: np.ndarray,
    likely: np.ndarray,
    lengths: np.ndarray,
    smoothing: float,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    weights = np.zeros((len(lengths), len(popular)))
    taken = np.zeros(weights.shape, dtype=bool)
    users = []
    items = []
    for step in range(int(lengths.max(initial=0))):
        active = np.flatnonzero(lengths > step)
        by_pairs = 1 - smoothing if step else 0.0  # the first item has no predecessors
        chance = (1 - by_pairs) * popular + by_pairs * weights[active] / max(step, 1)
        chance[taken[active]] = 0
        empty = chance.sum(axis=1) <= 0
        chance[empty] = ~taken[active[empty]]
        total = chance.cumsum(axis=1)
        quantiles = random.random(len(active)) * total[:, -1] * (1 - 1e-12)
        drawn = (total <= quantiles[:, None]).sum(axis=1)
        weights[active] += likely[drawn]
        taken[active, drawn] = True
        users.append(active)
        items.append(drawn)
    return np.concatenate(users), np.concatenate(items)


def _sizes(matrix: sparse.csr_array) -> np.ndarray:
    return np.diff(matrix.indptr).astype(np.float64)


def _user_shares(norms: np.ndarray, bound: float) -> np.ndarray:
    """Factors that scale each contribution to at most the norm bound."""
    return np.minimum(1.0, bound / np.maximum(norms, 1e-12))


# Synthetic profiles from a noisy co-occurrence matrix: user-level differential privacy of the whole
# table.
#
# Only two Gaussian releases are computed from the data: the number of users of each item, and of
# each pair of the most popular items. The rest is post-processing: each user gets a profile of
# items that occur together, drawn without that user's rows, so a profile reveals nothing about its
# user beyond the guarantee. A recommender trained on such profiles learns co-occurrences, and can
# be applied to rows that never leave the device.
#
# Neighbouring tables differ in all rows of one user (replace-one); the set of users is public.
# Counts are non-negative, so each of the two releases costs sqrt(2) S and not 2 S
# (`fedrec.privacy.accounting.sampling`).


class NoisyCooccurrence(Perturbation):
    """Replaces every profile by one drawn from noisy counts of items and pairs of items."""

    name = "noisy-cooccurrence"
    Config = NoisyCooccurrenceConfig
    config: NoisyCooccurrenceConfig

    def plan(self, users: int) -> Plan:
        """Plan the noise and cost of the two releases for a number of users, at clip norm 1."""
        config = self.config
        settings = PrivacyConfig(clip_norm=1.0, epsilon=config.epsilon, delta=config.delta)
        return Plan.of(settings, "full", {}, users, rounds=2, contributions="non-negative")

    def perturb(self, data: TrainingData) -> Perturbed:
        """Draw a profile for each user with training rows, independently of its own rows.

        Raises:
            DataError: a user has no training row.
            ExperimentError: the experiment uses ratings, which the synthetic rows do not have.
        """
        check_rows(data)
        rows = data.rows
        if data.rated:
            raise ExperimentError(
                "noisy co-occurrences give no ratings",
                expected="task = 'ranking' without positive-above",
                got="an experiment that learns from ratings",
                fix="choose another perturbation",
            )
        users_with_rows = np.flatnonzero(np.diff(rows.user_offsets))
        plan = self.plan(len(users_with_rows))
        matrix = binary(rows)[users_with_rows]
        release = _noisy_release(matrix, plan.noise_scale, self.config, self.seed)
        random = stream(self.seed, "perturb-profiles")
        users, items = _profiles(release, len(users_with_rows), self.config.smoothing, random)
        table = _table(rows, users_with_rows[users], release.items[items])
        spent = report(plan)
        figures: dict[str, Any] = {
            "noise multiplier": plan.noise_scale,
            "pairs above the noise": int((release.pairs > 0).sum() // 2),
            "rows of a profile": release.length,
            "epsilon": {
                "whole table, user level": {"epsilon": spent.epsilon, "delta": spent.delta}
            },
        }
        return Perturbed(table, np.full(len(table), -1), figures)

    def words(self) -> list[str]:
        """Describe the guarantee and its limits."""
        config = self.config
        return [
            (
                f"The synthetic table is ({config.epsilon:g}, {config.delta:g})-differentially"
                " private at user level (replace-one: all rows of one user may differ). The set of"
                " users is public, and a trusted curator who holds all rows adds the noise."
            ),
            (
                "Tuning of settings on these data is not covered. Random numbers come from the"
                " experiment's seed: a simulation, not a release."
            ),
        ]


def _table(rows: Interactions, users: np.ndarray, items: np.ndarray) -> Interactions:
    """Build the table of synthetic rows; unused ratings and times are zero."""
    ratings = None if rows.ratings is None else np.zeros(len(users), np.float32)
    times = None if rows.times is None else np.zeros(len(users), np.int64)
    return dataclasses.replace(
        rows, users=users, items=items, ratings=ratings, times=times, published_test=None
    )
