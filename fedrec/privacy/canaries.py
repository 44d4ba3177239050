# SPDX-License-Identifier: Apache-2.0
"""Canaries of an audit: ids, uploads, secret signs, scores, observations, and the claim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field
from scipy.linalg import toeplitz

from fedrec.config import Config, fits
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.rdp import gdp_epsilon, gdp_parameter
from fedrec.privacy.mechanisms import inverse
from fedrec.rng import stream

# The privacy claim of a run as an audit tests it, and the distribution of its canaries' scores.
#
# Adjacency is replace-one: canary j uploads +S u_j or -S u_j, and both are clipped to the norm S.


@dataclass(frozen=True)
class PrivacyClaim:
    """Claimed release of a round: a clipped sum over the cohort, divided by a fixed number, plus
    normal noise.

    Attributes:
        clip: S, largest L2 norm of one client's update, > 0; S / sqrt(2) for updates that never
            point in opposite directions: half the largest distance of two clients.
        denominator: M, divisor of the sum, > 0.
        noise_std: standard deviation of the noise in each coordinate of the mean, >= 0; PrivRec:
            `z * 2 S / M`.
        sampling_rate: q, probability that a client takes part in a round, in (0, 1].
        rounds: T, number of releases.
        delta: delta of the claim, in (0, 1).
        mixing: `[T]`, coefficients of a round's noise in the independent noise of that round and of
            earlier ones; then `noise_std` is that of the independent noise. None: independent
            noise.
        epsilon: claimed upper bound at `delta` for all rounds together, computed for the population
            that was trained, canaries included; infinite if nothing is claimed.
    """

    clip: float
    denominator: float
    noise_std: float
    sampling_rate: float
    rounds: int
    delta: float
    epsilon: float
    mixing: tuple[float, ...] | None = None

    @property
    def signal(self) -> float:
        """Change of the mean by one client, `S / M`."""
        return self.clip / self.denominator

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier z: noise over replace-one sensitivity, `noise_std M / (2 S)`."""
        return self.noise_std / (2 * self.signal)

    def known_epsilon(self, releases: float) -> float:
        """Epsilon at `delta` against an observer who knows the number of releases with a client;
        for correlated noise, `releases` is the squared norm of its contributions."""
        return gdp_epsilon(
            math.sqrt(releases) / self.noise_multiplier if self.noise_std else math.inf, self.delta
        )


# The observations of an audit: released means along the canaries' directions, participation, and
# the secret signs.

_ROUNDING = 1e-12  # coefficients below this are 0


@dataclass(frozen=True, eq=False)
class Observations:
    """Observations of one audited run with T rounds and k canaries.

    Attributes:
        released: `float64 [T, k]`, the released noisy mean update of a round along each canary's
            direction.
        taking_part: `bool [T, k]`, whether the canary was in the cohort; or `float64`, its effect
            on the observed values in units of S/M.
        signs: `int64 [k]`, +1 or -1.
        quiet: `float64 [T, n]`, the released mean along further orthonormal directions without
            client contributions; None: only absent canaries show the noise.
        shared: whether other clients move the mean along the canaries' directions, too.
        groups: `[k]`, the parameter of each canary; None: all in the same.

    Raises:
        ValueError: a number is not finite.
    """

    released: np.ndarray
    taking_part: np.ndarray
    signs: np.ndarray
    quiet: np.ndarray | None = None
    shared: bool = False
    groups: np.ndarray | None = None

    def __post_init__(self) -> None:
        quiet = self.released[:, :0] if self.quiet is None else self.quiet
        if not (np.isfinite(self.released).all() and np.isfinite(quiet).all()):
            raise ValueError("Expected finite releases.")

    @property
    def rounds(self) -> int:
        """Number of rounds T."""
        return self.released.shape[0]

    @property
    def parameters(self) -> list[str]:
        """Parameters with canaries, if there are several."""
        names = [] if self.groups is None else np.unique(self.groups).tolist()
        return names if len(names) > 1 else []

    @property
    def canaries(self) -> int:
        """Number of canaries k."""
        return self.released.shape[1]

    def whitened(self, mixing: Sequence[float]) -> Observations:
        """Return the releases with independent noise, by inverting the correlation `mixing [T]`;
        the canaries' contributions are transformed alike."""
        column = inverse(np.array(mixing), self.rounds)
        undo = toeplitz(np.where(np.abs(column) < _ROUNDING, 0.0, column), np.zeros(self.rounds))
        return replace(
            self,
            released=undo @ self.released,
            taking_part=undo @ self.taking_part,
            quiet=None if self.quiet is None else undo @ self.quiet,
        )


# Scores of canaries: positive where an observer would guess the sign +1. One per kind of observer.
#
# - `final`: sees the last model only (with the first, which is public): the sum of all releases.
# - `trace`: sees every model: log-likelihood ratio of the two signs, participation unknown (sampled
#   Gaussian).
# - `known`: sees every model and the cohorts: the sum over the rounds the canary took part in.
#   Amplification by sampling does not bound this one; `PrivacyClaim.known_epsilon` does.


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of the canaries for one kind of observer.

    Attributes:
        name: `"final"`, `"trace"` or `"known"`.
        values: `float64 [k]`.
        scale: standard deviation of a score under the claimed mechanism.
        upper: the epsilon that the claim allows this observer.
    """

    name: str
    values: np.ndarray
    scale: float
    upper: float


def all_scores(seen: Observations, claim: PrivacyClaim) -> list[Scores]:
    """Compute the scores of all observers that the claim covers; without noise only the first."""
    if claim.mixing is not None:
        return [_known_scores(seen, claim)]
    if not claim.noise_std:
        return [_final_scores(seen, claim)]
    return [_final_scores(seen, claim), _trace_scores(seen, claim), _known_scores(seen, claim)]


def _final_scores(seen: Observations, claim: PrivacyClaim) -> Scores:
    """Scores of the last model, `f_j = sum_t x_tj`."""
    q = claim.sampling_rate
    rounds = claim.rounds
    variance = rounds * (claim.noise_std**2 + q * (1 - q) * claim.signal**2)
    scale = math.sqrt(variance) or claim.signal
    return Scores("final", seen.released.sum(axis=0), scale, claim.epsilon)


def _trace_scores(seen: Observations, claim: PrivacyClaim) -> Scores:
    """Log-likelihood ratios `l_j = sum_t log[(1 - q + q e^((x m - m^2/2) / s^2)) / (1 - q + q
    e^((-x m - m^2/2) / s^2))]`, m = S/M."""
    q = claim.sampling_rate
    m = claim.signal
    variance = claim.noise_std**2
    absent = math.log1p(-q) if q < 1 else -math.inf

    def log_density(sign: int) -> np.ndarray:
        return np.logaddexp(absent, math.log(q) + (sign * seen.released * m - m * m / 2) / variance)

    values = (log_density(1) - log_density(-1)).sum(axis=0)
    scale = 2 * q * m * math.sqrt(claim.rounds / variance)  # to first order in m / s
    return Scores("trace", values, scale, claim.epsilon)


def _known_scores(seen: Observations, claim: PrivacyClaim) -> Scores:
    """Scores for known cohorts, `c_j = sum_(t: j takes part) x_tj`; with correlated noise, weighted
    by the effect of j. Where cohorts may be known, the claimed epsilon bounds it."""
    weights = seen.taking_part.astype(np.float64)
    values = (weights * seen.released).sum(axis=0)
    if claim.mixing is not None and claim.sampling_rate == 1:
        # noise of the claimed epsilon: its scale does not depend on the observations
        moved = gdp_parameter(claim.epsilon, claim.delta) * claim.noise_multiplier
        return Scores("known", values, claim.noise_std * moved, claim.epsilon)
    expected = claim.sampling_rate * claim.rounds
    most = float(np.square(weights).sum(axis=0).max(initial=0))
    return Scores("known", values, claim.noise_std * math.sqrt(expected), claim.known_epsilon(most))


# Canaries: their ids, secret signs, and the kind of updates of other clients.

Kind = Literal["signed", "rows", "products"]
"""Kind of updates in a phase: of any sign; non-negative vectors with one entry per item; or the
outer product of such a vector with itself."""


class CanaryPlan(Config):
    """Ids and uploads of the canaries of an audit."""

    first: int = Field(ge=0)
    """Client id of the first canary; the others follow."""
    count: int = Field(ge=4)
    """Number of canaries, k."""
    magnitude: float = Field(gt=0)
    """L2 norm of a canary's upload; above the clip norm S, to test clipping."""
    seed: int = Field(default=0, ge=0)
    """Seed of the secret signs, stream `"canary-signs"`."""
    parameters: tuple[str, ...] = ("*",)
    """Patterns of the trained parameters."""
    kind: Kind = "signed"
    """Kind of updates of the other clients."""

    def signs(self) -> np.ndarray:
        """Secret signs b_j, `int64 [k]`, independent and fair; redrawn in the rare case that a sign
        is missing."""
        drawn = (
            2 * stream(self.seed, "canary-signs", attempt).integers(0, 2, self.count) - 1
            for attempt in itertools.count()
        )
        return next(signs for signs in drawn if min((signs > 0).sum(), (signs < 0).sum()) >= 2)


# The two possible uploads of each canary, in a model's parameters.
#
# A canary of sign +1 uploads `magnitude` times its vector `up`, one of sign -1 `magnitude` times
# `down`; both have norm 1. It is observed along `(up - down) / |up - down|`, where after clipping
# the two are as far apart as two clients can be: 2S, or sqrt(2) S where contributions never point
# in opposite directions (`fedrec.privacy.accounting.sampling`).
#
# `signed`: a row of a trained parameter each, of the last rows, which nothing depends on
# (`simulations.attacks.systems`): `up = (1, ..., 1) / sqrt(d)` there, `down = -up`. Directions
# are orthonormal, and no other client's update has a component along them. Every trained parameter
# with such rows has canaries, so that one that is not clipped is found.
#
# `rows`: two rows each, of which one gets the upload, among the last 2k rows of tables with one
# number per item; these rows are of items that no client has. So the other row is noise alone.
#
# `products`: v v^T with v = (1, 1) / sqrt(2) or (1, -1) / sqrt(2) at a pair of items of its own.
# Other clients have items of the pair, too; but all of them upload symmetric matrices, so that the
# antisymmetric part of the sum is noise alone.

Upload = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Changed indices `int64 [n]` and values `float64 [n]` in the flat array of each parameter."""


class _UploadPair(NamedTuple):
    """Possible uploads of a canary, of norm 1: `up` of sign +1, `down` of sign -1."""

    up: Upload
    down: Upload


class Directions:
    """Uploads of all canaries, and their directions.

    Args:
        plan: the canaries.
        room: number of each parameter's last rows that nothing depends on.
        shapes: shapes of all parameters.

    Attributes:
        pairs: the two uploads of each canary.
        groups: the parameter of each canary; "" for all if they are in the same.

    Raises:
        ExperimentError: no trained parameter has room for the canaries.
    """

    def __init__(
        self, plan: CanaryPlan, room: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.plan = plan
        self.signs = plan.signs()
        trained = {n: shape for n, shape in shapes.items() if fits(n, plan.parameters)}
        self.groups = [""] * plan.count
        if plan.kind == "signed":
            self.pairs = self._signed(trained, room)
        elif plan.kind == "rows":
            self.pairs = _rows(plan, trained)
        else:
            square = [n for n, s in trained.items() if len(s) == 2 and s[0] == s[1] > 1]
            self._table = next(iter(square), "")
            self.pairs = _products(plan, self._table, trained)
        if not self.pairs:
            raise _no_room(plan, trained)
        self._apart = 2.0 if plan.kind == "signed" else math.sqrt(2.0)

    def upload(self, client: int) -> Upload:
        """Upload of a canary, before clipping."""
        number = client - self.plan.first
        pair = self.pairs[number]
        upload = pair.up if self.signs[number] > 0 else pair.down
        return {
            name: (indices, self.plan.magnitude * values)
            for name, (indices, values) in upload.items()
        }

    def project(self, mean: Mapping[str, np.ndarray]) -> np.ndarray:
        """Project a mean update on each canary's direction, `float64 [k]`."""
        flat = {name: value.reshape(-1) for name, value in mean.items()}
        apart = [_along(flat, pair.up) - _along(flat, pair.down) for pair in self.pairs]
        return np.array(apart) / self._apart

    def quiet(self, mean: Mapping[str, np.ndarray]) -> np.ndarray:
        """Project a mean update on orthonormal directions without client contributions, `float64
        [n]`; empty for updates of any sign, which use absent canaries instead."""
        if self.plan.kind == "signed":
            return np.empty(0)
        if self.plan.kind == "products":
            table = mean[self._table].astype(np.float64)
            rows, columns = np.triu_indices(len(table), 1)
            return (table[rows, columns] - table[columns, rows]) / math.sqrt(2.0)
        flat = {name: value.reshape(-1) for name, value in mean.items()}
        unused = [
            pair.down if sign > 0 else pair.up
            for pair, sign in zip(self.pairs, self.signs, strict=True)
        ]
        return np.array([_along(flat, upload) for upload in unused])

    def _signed(
        self, trained: Mapping[str, tuple[int, ...]], room: Mapping[str, int]
    ) -> list[_UploadPair]:
        """Assign one row to each canary: equally many per trained parameter, the rest in the
        first."""
        count = self.plan.count
        names = [name for name in room if name in trained]
        if not names:
            return []
        rows_of = {name: min(count // len(names), room[name]) for name in names}
        rows_of[names[0]] += count - sum(rows_of.values())
        if rows_of[names[0]] > room[names[0]]:
            return []
        self.groups = [name for name in names for _ in range(rows_of[name])]
        pairs = []
        for name in names:
            rows, *rest = trained[name]
            width = math.prod(rest)
            for row in range(rows - room[name], rows - room[name] + rows_of[name]):
                indices = row * width + np.arange(width)
                values = np.full(width, width**-0.5)
                pairs.append(_UploadPair({name: (indices, values)}, {name: (indices, -values)}))
        return pairs


def _rows(plan: CanaryPlan, trained: Mapping[str, tuple[int, ...]]) -> list[_UploadPair]:
    """Assign two of the last rows to each canary, in all tables with one number per item."""
    tables = [
        name for name, shape in trained.items() if shape[1:] == (1,) and shape[0] >= 2 * plan.count
    ]
    value = np.full(1, 1 / math.sqrt(max(len(tables), 1)))

    def at(back: int) -> Upload:
        return {name: (np.array([trained[name][0] - back]), value) for name in tables}

    return [_UploadPair(at(2 * j + 2), at(2 * j + 1)) for j in range(plan.count)] if tables else []


def _products(
    plan: CanaryPlan, table: str, trained: Mapping[str, tuple[int, ...]]
) -> list[_UploadPair]:
    """Assign a pair of items to each canary, if there are enough pairs."""
    size = trained[table][0] if table else 0
    firsts, seconds = np.triu_indices(size, 1)
    if len(firsts) < plan.count:
        return []
    drawn = stream(plan.seed, "canary-pairs").permutation(len(firsts))[: plan.count]
    pairs = []
    for i, j in zip(firsts[drawn].tolist(), seconds[drawn].tolist(), strict=True):
        indices = np.array([(size + 1) * i, (size + 1) * j, size * i + j, size * j + i])
        same = np.full(4, 0.5)
        opposite = np.array([0.5, 0.5, -0.5, -0.5])
        pairs.append(_UploadPair({table: (indices, same)}, {table: (indices, opposite)}))
    return pairs


def _along(flat: Mapping[str, np.ndarray], upload: Upload) -> float:
    return float(
        sum(
            flat[name][indices].astype(np.float64) @ values
            for name, (indices, values) in upload.items()
        )
    )


def _no_room(plan: CanaryPlan, trained: Mapping[str, tuple[int, ...]]) -> ExperimentError:
    needed = {
        "signed": "item tables (`item_tables`), at least one of them trained",
        "rows": "a trained table with one number per item",
        "products": f"a trained matrix of products with {plan.count} pairs of items",
    }
    return ExperimentError(
        "the model has no room for canaries",
        expected=f"a model with {needed[plan.kind]}",
        got=", ".join(f"{name} {list(shape)}" for name, shape in trained.items()) or "none",
        fix="audit an experiment with such a model, for example privrec, or with fewer --canaries",
    )
