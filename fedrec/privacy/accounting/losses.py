# SPDX-License-Identifier: Apache-2.0
"""Events and privacy loss distributions of dp-accounting, and our own for cohorts of fixed size.

The one module that imports dp-accounting, which takes half a second: it is imported where an
epsilon is computed, never by other modules' top level.

Losses are those of the pair of distributions that dominates a release. With Q the noise around 0, P
the noise around 1 (everything in units of the sensitivity) and mix = (1 - q) Q + q P:

* Poisson sampling, add-remove: (mix, Q) for a client that leaves, (Q, mix) for one that joins;
  each composes, and the result is the larger epsilon. The bound is tight: it is also what the best
  attack achieves.
* Fixed size without replacement, replace-one: the profile h(e^t) = H(mix || Q) for t >= 0 and
  H(Q || mix) for t < 0. Split neighbours by whether client i is drawn, M(D) = (1 - q) C + q A and
  M(D') = (1 - q) C + q A'; one replacement also turns A into C, so that advanced joint convexity
  bounds the hockey-stick divergence by that of (mix, Q). The profile is convex in e^t, hence it
  belongs to one pair, which composes; (mix, Q) alone is not a bound here, but is reached by a real
  attack (all others upload -S, the target S or -S). dp-accounting has no loss distribution for such
  cohorts; it is built here from the profile.

Every step errs towards a larger epsilon: between two grid points the profile is made linear in e^t,
above the true convex one ("connect the dots", Doroshenko et al. 2022); mass beyond the grid counts
as infinite loss; the tails that a convolution cuts off and the rounding of its FFT are taken off
delta.

Laplace distributions one L1 sensitivity apart in one coordinate are the worst case in any number of
dimensions: trade-off functions of shifts form a group, so that shifts in several coordinates are
not easier to distinguish than their sum in one. Gaussian noise in many dimensions is, by symmetry,
one coordinate shifted by the L2 sensitivity.

Sources: Balle, Barthe and Gaboardi 2018; Zhu, Dong and Wang 2022; Lebeda et al. 2024.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_gaussian_mechanism,
    from_laplace_mechanism,
    identity,
)
from dp_accounting.pld.privacy_loss_mechanism import (
    AdditiveNoisePrivacyLoss,
    AdjacencyType,
    GaussianPrivacyLoss,
    LaplacePrivacyLoss,
)

from fedrec.errors import ComponentError
from fedrec.privacy.accounting.events import (
    GAUSSIAN,
    LAPLACE,
    LEAST_MULTIPLIER,
    MOST_MULTIPLIER,
    Release,
)
from fedrec.privacy.accounting.rdp import amplified, gdp_epsilon, pure_epsilon
from fedrec.privacy.accounting.sampling import (
    Adjacency,
    FixedSize,
    Full,
    Poisson,
    Sampling,
    Scheduled,
    unknown_cost,
)

_FEW = 100  # releases, whose losses no convolution has smoothed
_LEAST_STEP = 1e-9
_LARGEST_STEP = 5e-3
_USELESS_STEP = 0.5  # with losses on so wide a grid, sampling is worth nothing
_POINTS = 2**19
_BLOCK = 100_000
_CUT = 1e-5  # share of delta that all truncations together may take
_ROUNDING = 4e-16  # of the FFT, for each release

Counted = tuple[tuple[Release, int], ...]


def of_rounds(event: dp_event.DpEvent, rounds: int, sampling: Sampling) -> dp_event.DpEvent:
    """Event of independent rounds, from the event of one round without sampling.

    Raises:
        ExperimentError: the cost is not known for such cohorts.
    """
    if isinstance(sampling, Scheduled):
        raise unknown_cost(
            "the sampler 'fixed-size', 'poisson' or 'full'; with 'min-separation' the mechanism"
            " { name = 'banded', bands = 1 }, which is Gaussian noise accounted by a client's"
            " rounds",
            sampling,
        )
    if isinstance(sampling, FixedSize):
        event = dp_event.SampledWithoutReplacementDpEvent(sampling.clients, sampling.cohort, event)
    elif sampling.rate < 1:
        event = dp_event.PoissonSampledDpEvent(sampling.rate, event)
    return dp_event.SelfComposedDpEvent(event, rounds)


def releases_of_event(
    event: dp_event.DpEvent, adjacency: Adjacency, sampling: Sampling | None = None
) -> Counter[Release]:
    """Number of times of each release in an event of dp-accounting.

    Args:
        event: Gaussian and Laplace events, sampled or not, and compositions of them; their noise
            multipliers are relative to the sensitivity under the adjacency.
        adjacency: which data sets are neighbours.
        sampling: of the event; None: it is not sampled.

    Raises:
        ComponentError: it contains an unsupported event.
        ExperimentError: see `Release`.
    """
    if isinstance(event, dp_event.ComposedDpEvent):
        each = [releases_of_event(part, adjacency, sampling) for part in event.events]
        return sum(each, Counter())
    if isinstance(event, dp_event.SelfComposedDpEvent):
        inner = releases_of_event(event.event, adjacency, sampling)
        return Counter({release: count * event.count for release, count in inner.items()})
    if isinstance(event, dp_event.GaussianDpEvent | dp_event.LaplaceDpEvent):
        noise = GAUSSIAN if isinstance(event, dp_event.GaussianDpEvent) else LAPLACE
        return Counter([Release(noise, sampling or Full(), adjacency, event.noise_multiplier)])
    # a sample is of one release: two releases about one cohort are not two samples
    single = isinstance(
        getattr(event, "event", None), dp_event.GaussianDpEvent | dp_event.LaplaceDpEvent
    )
    if isinstance(event, dp_event.PoissonSampledDpEvent) and single and sampling is None:
        return releases_of_event(event.event, adjacency, Poisson(event.sampling_probability))
    if isinstance(event, dp_event.SampledWithoutReplacementDpEvent) and single and sampling is None:
        drawn = FixedSize(event.sample_size, event.source_dataset_size)
        return releases_of_event(event.event, adjacency, drawn)
    raise ComponentError(
        "a mechanism's event cannot be accounted",
        expected="Gaussian and Laplace events of dp-accounting, sampled or not, and compositions",
        got=repr(event),
        fix="correct the mechanism's `dp_event`",
    )


@lru_cache(maxsize=64)  # a run queries each round twice, and the attack
def composed_epsilon(counted: Counted, delta: float, *, attack: bool = False) -> float | None:
    """Epsilon of all releases together.

    Args:
        counted: releases and how often each took place.
        delta: in [0, 1).
        attack: return the epsilon of the best known attack, to about three digits, not a bound.
            Where the range of losses is too wide for a grid of three digits, every loss is rounded
            down to a grid point: that is an attack which sees less.

    Returns:
        Epsilon >= 0; None if no attack on so little noise can be computed.
    """
    merged = _merged(counted, attack)
    pure = sum(count * pure_epsilon(release) for release, count in merged)
    if not merged or delta == 0:
        return pure
    step, fine = _step(merged)
    sampled = any(release.sampling != Full() for release, _ in merged)
    if attack and sampled and step > _USELESS_STEP:
        return None
    if step > _USELESS_STEP or (
        len(merged) == 1 and not sampled and merged[0][0].mechanism == GAUSSIAN
    ):
        return min(_without_sampling(merged, delta), pure)
    upper = fine or not attack
    composed = identity(step, pessimistic_estimate=upper)
    for release, count in merged:
        tail = _CUT * delta / len(merged)
        composed = composed.compose(_repeated(_losses(release, step, upper), count, tail))
    rounding = _ROUNDING * sum(count for _, count in merged)
    left = delta - rounding if upper else delta + rounding
    return min(composed.get_epsilon_for_delta(left), pure) if left > 0 else pure


def _repeated(losses: PrivacyLossDistribution, count: int, tail: float) -> PrivacyLossDistribution:
    """Distribution of the sum of `count` losses with tails of mass `tail` cut off; large counts in
    blocks, as dp-accounting raises its number of points to that power."""
    blocks, rest = divmod(count, _BLOCK)
    if not blocks:
        return losses.self_compose(count, tail)
    each = tail / (blocks + 2)
    repeated = losses.self_compose(_BLOCK, each).self_compose(blocks, each)
    return repeated.compose(losses.self_compose(rest, each)) if rest else repeated


def _merged(counted: Counted, attack: bool) -> Counted:
    """Merge releases at equal cost: Gaussian ones without sampling are one, whose squared
    sensitivities in units of the noise add up. For an attack on cohorts of fixed size, as if they
    were drawn by independent coins."""
    alike: Counter[Release] = Counter()
    precision = 0.0
    for release, count in counted:
        if release.mechanism == GAUSSIAN and release.sampling == Full():
            precision += count / release.noise_multiplier**2
        elif attack and isinstance(release.sampling, FixedSize):
            coins = Poisson(release.sampling.rate)
            alike[replace(release, sampling=coins, adjacency="add-remove")] += count
        else:
            alike[release] += count
    if precision:
        multiplier = min(max(precision**-0.5, LEAST_MULTIPLIER), MOST_MULTIPLIER)
        alike[Release(GAUSSIAN, Full(), counted[0][0].adjacency, multiplier)] = 1
    return tuple((release, count) for release, count in alike.items() if count)


def _without_sampling(counted: Counted, delta: float) -> float:
    """Epsilon as if every client took part in every release: exact for Gaussian noise, to which the
    pure epsilon of Laplace releases is added."""
    gaussian = sum(
        n / release.noise_multiplier**2 for release, n in counted if release.mechanism == GAUSSIAN
    )
    laplace = sum(
        n / release.noise_multiplier for release, n in counted if release.mechanism == LAPLACE
    )
    mu = math.sqrt(gaussian)
    if mu > 1e3:  # rounding hides delta; the loss is above this with a smaller probability
        return mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta)) + laplace
    return gdp_epsilon(mu, delta) + laplace


def _step(counted: Counted) -> tuple[float, bool]:
    """Grid step far below the spread of each release's loss, limited by the number of points; True
    if results on it have three digits."""
    mean = variance = 0.0
    spread = math.inf
    for release, count in counted:
        moments = _moments(release)
        mean += count * moments[0]
        variance += count * moments[1]
        spread = min(spread, math.sqrt(moments[1]))
    few = sum(count for _, count in counted) <= _FEW
    atoms = few and any(release.mechanism == LAPLACE for release, _ in counted)
    finest = min(max(_LEAST_STEP, spread / (256 if atoms else 64)), _LARGEST_STEP)
    span = max(_largest_loss(release) for release, _ in counted)
    needed = max(2 * span, 16 * math.sqrt(variance) + 2 * mean) / _POINTS
    # a step shared by many numbers of rounds
    step = max(finest, 2.0 ** (math.ceil(4 * math.log2(needed)) / 4))
    return step, step <= max(spread / 8, finest)


def _moments(release: Release) -> tuple[float, float]:
    """Approximate mean and variance of one release's loss: those without sampling, or those of a
    small rate if less."""
    z = release.noise_multiplier
    mean = 0.5 / z**2 if release.mechanism == GAUSSIAN else 1 / z
    sampled = release.sampling.rate**2 * math.expm1(min(z**-2, 50.0))  # q^2 (E_Q[(P/Q)^2] - 1)
    return min(mean, sampled / 2), min(z**-2, sampled)


def _pair(release: Release) -> AdditiveNoisePrivacyLoss:
    """Pair (mix, Q) of a release."""
    make = GaussianPrivacyLoss if release.mechanism == GAUSSIAN else LaplacePrivacyLoss
    return make(
        release.noise_multiplier,
        sampling_prob=release.sampling.rate,
        adjacency_type=AdjacencyType.REMOVE,
    )


def _largest_loss(release: Release) -> float:
    """The largest loss of (mix, Q), except for a probability of 1e-23."""
    z = release.noise_multiplier
    largest = 0.5 / z**2 + 10 / z if release.mechanism == GAUSSIAN else 1 / z
    return amplified(largest, release.sampling.rate)


@lru_cache(maxsize=8)  # the releases of a run are of few kinds
def _losses(release: Release, step: float, upper: bool) -> PrivacyLossDistribution:
    """Loss distribution of one release on a grid, rounded up or down."""
    if isinstance(release.sampling, FixedSize):
        return _fixed_size(release, step)
    make = from_gaussian_mechanism if release.mechanism == GAUSSIAN else from_laplace_mechanism
    return make(
        release.noise_multiplier,
        pessimistic_estimate=upper,
        value_discretization_interval=step,
        use_connect_dots=upper,
        sampling_prob=release.sampling.rate,
    )


def _fixed_size(release: Release, step: float) -> PrivacyLossDistribution:
    """The loss distribution of the profile of a cohort of fixed size, from above."""
    last = math.ceil(_largest_loss(release) / step)
    grid = np.arange(last + 1) * step
    above = np.asarray(_pair(release).get_delta_for_epsilon(grid.tolist()))
    # H(Q || mix) at e^-t is 1 - e^-t + e^-t H(mix || Q) at e^t
    below = -np.expm1(-grid) + np.exp(-grid) * above
    profile = np.append(below[:0:-1], above)
    pmf = create_pmf_pessimistic_connect_dots_fixed_gap(step, -last, last, profile)
    return PrivacyLossDistribution(pmf)
