# SPDX-License-Identifier: Apache-2.0
"""Backends of the accountant: loss distributions, two of Rényi differential privacy, and PrivRec's
printed values.

Privacy loss distributions of the pairs that dominate a round
(`fedrec/privacy/accounting/noise_pair.py`): the tightest bound here.

Sampling without replacement and replace-one have one pair, whose composition is an upper bound.
Poisson sampling and add-remove have two, one for a client that leaves and one for a client that
joins; the result is the larger epsilon, and the bound is tight: it is also what the best attack
achieves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, lru_cache

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import Backend, Bound, Release
from fedrec.privacy.accounting.loss_distribution import (
    Losses,
    compose,
    connect_the_dots,
    epsilon_of,
)
from fedrec.privacy.accounting.noise_pair import Pair, pair_of
from fedrec.privacy.accounting.rdp import INTEGER_ORDERS, RdpBackend, pure_epsilon, unsampled
from fedrec.privacy.accounting.sampling import FixedSize, Full

# RDP curves from autodp (Wang et al. 2019, Zhu and Wang 2019), turned into epsilon by our own tight
# conversion.
#
# Not used from autodp 0.2.3: `get_eps` (older conversion, epsilon too large by 0.3 to 0.7), the
# default bound for sampling without replacement (theorem 9, up to twice as large), orders above 100
# (there it falls back to that bound), its accountant's memory (a Poisson and a without-replacement
# release of one function are merged), and everything that goes through characteristic functions
# (silently negative). A new accountant is created for each curve.


class Autodp(RdpBackend):
    """The analytical moments accountant of autodp, the improved bound, integer orders 2 to 64."""

    name = "autodp"
    method = (
        "RDP curves of autodp (improved bound, orders 2..64), conversion of Canonne, Kamath and"
        " Steinke"
    )

    def curve(self, release: Release) -> np.ndarray:
        """R of one release at the integer orders, `float64 [INTEGER_ORDERS]`."""
        if isinstance(release.sampling, Full):
            return unsampled(INTEGER_ORDERS.astype(np.float64), release)
        from autodp.rdp_acct import anaRDPacct

        @cache  # autodp asks for each order a hundred times
        def rdp(order: float) -> float:
            return (
                float(unsampled(np.array([order], dtype=np.float64), release)[0])
                if order > 1
                else 0.0
            )

        accountant = anaRDPacct(m=INTEGER_ORDERS[-1])
        with np.errstate(all="ignore"):  # autodp takes logarithms of 0 on purpose
            if isinstance(release.sampling, FixedSize):
                accountant.compose_subsampled_mechanism(
                    rdp, release.sampling.rate, improved_bound_flag=True
                )
                curve = accountant.RDPs_int[INTEGER_ORDERS - 1]  # `get_rdp` computes it again
            else:
                accountant.compose_poisson_subsampled_mechanisms(rdp, release.sampling.rate)
                curve = accountant.get_rdp(INTEGER_ORDERS)
        # Sampling never increases the cost; if autodp's bound does or overflows, the curve without
        # sampling is used.
        return np.fmin(curve, unsampled(INTEGER_ORDERS.astype(np.float64), release))


_STEP = 1e-4
_LARGEST_GRID = 2**19
_MOST_RELEASES = 10**9
_CUT = 1e-5  # share of delta that all truncations together may take
_Counted = tuple[tuple[Release, int], ...]


class Pld(Backend):
    """Composed privacy loss distributions."""

    name = "pld"
    method = "privacy loss distribution of the dominating pair (connect the dots, FFT)"

    def epsilon(self, releases: Mapping[Release, int], delta: float) -> Bound:
        """Smallest epsilon that the method proves for all releases together.

        Raises:
            ExperimentError: there are more than 1e9, whose rounding errors add up to too much.
        """
        if sum(releases.values()) > _MOST_RELEASES:
            raise ExperimentError(
                "too many releases for the accountant 'pld'",
                expected=f"at most {_MOST_RELEASES:,} in all",
                got=f"{sum(releases.values()):,}",
                fix="use the accountant 'autodp'",
            )
        counted = _counted(releases)
        return Bound(max(_composed(counted, delta, side) for side in _sides_of(counted)))


def attack_epsilon(releases: Mapping[Release, int], delta: float) -> float | None:
    """Epsilon that the best known attack reaches, to about three digits: no valid bound can be
    below it. None for more than 1e9 releases, whose rounding errors add up to too much, and for
    those of which only a bound is known.

    Where the range of losses is so wide that the grid is too coarse for three digits, every loss is
    rounded down to a grid point instead: that is an attack which sees less, so the result is below
    what the best known attack reaches, by at most a grid step per release.

    Without replacement and replace-one: all other clients upload -S, the target S or -S. Poisson
    and add-remove: the target uploads S, all others nothing.
    """
    counted = _counted(releases)
    total = sum(count for _, count in counted)
    known = all(pair_of(release).tight for release, _ in counted)
    if total > _MOST_RELEASES or not known:
        return None
    sides = ("leaves", "joins")
    cut = _CUT * delta / max(1, total)
    step, fine = _step(counted, cut) if counted and delta > 0 else (_STEP, True)
    if fine:
        return max(_composed(counted, delta, side) for side in sides)
    return max(_rounded_down(counted, delta, side, step / 2, cut) for side in sides)


def _counted(releases: Mapping[Release, int]) -> _Counted:
    return tuple((release, count) for release, count in releases.items() if count)


def _rounded_down(counted: _Counted, delta: float, side: str, step: float, cut: float) -> float:
    """A lower bound on epsilon seen from one side: losses rounded down, and no mass beyond either
    end of the grid."""
    parts = []
    for release, count in counted:
        first, ours, _ = _intervals(Pair(release), side, step, cut)
        parts.append((Losses(step, first, ours, 0.0), count))
    composed, more = compose(parts, _CUT * delta)
    return epsilon_of(composed, delta + more)


def _sides_of(counted: _Counted) -> tuple[str, ...]:
    replace_one = any(release.adjacency == "replace-one" for release, _ in counted)
    return ("replaced",) if replace_one else ("leaves", "joins")


# A run asks for each round twice, before and after it, and for what the best attack reaches; seeds
# of a study and resumed runs ask for the same releases again.
@lru_cache(maxsize=64)
def _composed(counted: _Counted, delta: float, side: str) -> float:
    """Epsilon seen from one side."""
    pure = sum(count * pure_epsilon(release) for release, count in counted)
    if not counted or delta == 0:
        return pure
    # Rounded up, so that the distributions of one release stay the same over many rounds.
    cut = _CUT * delta / 2.0 ** (sum(count for _, count in counted) - 1).bit_length()
    step, _ = _step(counted, cut)
    parts = [(_losses(release, side, step, cut), count) for release, count in counted]
    composed, more = compose(parts, _CUT * delta)
    return min(epsilon_of(composed, delta - more), pure)


def _step(counted: _Counted, cut: float) -> tuple[float, bool]:
    """A grid step far below the spread of the losses, limited by the number of points, and whether
    the limit was kept."""
    span = whole = mean = variance = 0.0
    for release, count in counted:
        low, high = Pair(release).range(cut)
        moments = _moments(release)
        span = max(span, high - low)
        whole = whole + count * (high - low)
        mean = mean + count * moments[0]
        variance = variance + count * moments[1]
    needed = max(span, min(whole, 16 * math.sqrt(variance) + 2 * mean)) / _LARGEST_GRID
    finest = min(_STEP, min(math.sqrt(_moments(release)[1]) for release, _ in counted) / 8)
    # a step shared by many numbers of rounds
    coarser = 2.0 ** (math.ceil(4 * math.log2(needed)) / 4)
    return (finest, True) if finest >= needed else (coarser, False)


def _moments(release: Release) -> tuple[float, float]:
    """Rough mean and variance of one release's loss: those without sampling, or those of a small
    rate if less."""
    mean, variance = pair_of(release).moments()
    sampled = release.sampling.rate**2 * math.expm1(min(variance, 50.0))  # q^2 (E_Q[(P/Q)^2] - 1)
    return min(mean, sampled / 2), min(variance, sampled)


@lru_cache(maxsize=8)  # the releases of a run are of few kinds
def _losses(release: Release, side: str, step: float, cut: float) -> Losses:
    """Loss distribution of one release, seen from one side."""
    pair = Pair(release)
    if side == "replaced":
        return _replaced(pair, step, math.ceil(pair.range(cut)[1] / step) + 1)
    return _finished(step, *_intervals(pair, side, step, cut))


def _intervals(
    pair: Pair, side: str, step: float, cut: float
) -> tuple[int, np.ndarray, np.ndarray]:
    """The first interval of the loss, seen from the side of a client that leaves or joins, and the
    masses `[intervals]` of the first and of the second distribution."""
    low, high = pair.range(cut)
    if side == "leaves":
        # one more: a loss may lie on the edge
        first = math.floor(low / step) - 1
        last = math.ceil(high / step) + 1
        mix, q = pair.masses(np.arange(first, last + 1) * step)
        return first, mix, q
    # A client that joins: the loss is ln(Q/mix), so the grid is reversed.
    first = math.floor(-high / step) - 1
    last = math.ceil(-low / step) + 1
    mix, q = pair.masses(np.arange(-last, -first + 1) * step)
    return first, q[::-1], mix[::-1]


def _replaced(pair: Pair, step: float, points: int) -> Losses:
    """Positive losses of (mix, Q), negative losses of (Q, mix), and the rest at 0."""
    mix, q = pair.masses(np.arange(points + 1) * step)
    up = connect_the_dots(0, step, mix, q)
    down = connect_the_dots(-points, step, q[::-1], mix[::-1])
    mass = np.append(down[:-1], down[-1] + up[0])
    mass = np.append(mass, up[1:])
    half = pair.place(np.zeros(1))  # where the loss is 0
    of_mix = (1 - pair.release.sampling.rate) * pair.noise.above(half, 0.0)
    of_mix = float((of_mix + pair.release.sampling.rate * pair.noise.above(half, 1.0))[0])
    of_q = float(pair.noise.above(half, 0.0)[0])
    mass[points] += max(0.0, 1 - of_mix - of_q)
    infinite = max(0.0, of_mix - float(mix.sum()))
    mass[0] += max(0.0, of_q - float(q.sum()))
    return Losses(step, -points, mass, infinite)


def _finished(step: float, first: int, ours: np.ndarray, theirs: np.ndarray) -> Losses:
    """Mass beyond either end of the grid counts as infinite loss."""
    mass = connect_the_dots(first, step, ours, theirs)
    return Losses(step, first, mass, max(0.0, 1 - float(mass.sum())))


# The epsilons printed in PrivRec's tables 4 and 5. For comparison only: this is not a valid
# accounting of the releases.
#
# All 36 finite cells are reproduced to the last digit if every client of every round is counted as
# a release of its own (M T releases sampled without replacement instead of T), with autodp's older
# bound (theorem 9 of Wang et al. 2019), the older conversion R(a) + ln(1/delta) / (a - 1) at the
# best integer order, cut off after four decimals.

_ORDERS = np.arange(2, 129)


class Paper(Backend):
    """The arithmetic of PrivRec's tables."""

    name = "paper"
    method = (
        "as PrivRec's tables 4 and 5 (every client of a round counted as a release); for comparison"
        " only"
    )

    def __init__(self) -> None:
        self._curves: dict[Release, np.ndarray] = {}

    def epsilon(self, releases: Mapping[Release, int], delta: float) -> Bound:
        """Smallest epsilon that the method proves for all releases together. Truncated to four
        decimals, as printed."""
        curve = np.zeros(len(_ORDERS))
        for release, count in releases.items():
            if release not in self._curves:
                self._curves[release] = _curve_of_all_clients(release)
            curve += count * self._curves[release]
        if delta == 0:
            return Bound(math.inf)
        epsilons = curve + math.log(1 / delta) / (_ORDERS - 1)
        best = int(np.argmin(epsilons))
        return Bound(math.floor(epsilons[best] * 1e4) / 1e4, float(_ORDERS[best]))


def _curve_of_all_clients(release: Release) -> np.ndarray:
    sampling = release.sampling
    pair = pair_of(release)
    if pair.mu is None or not isinstance(sampling, FixedSize):
        raise ExperimentError(
            "the paper's arithmetic is for Gaussian noise and cohorts of fixed size only",
            expected="mechanism gaussian, sampler fixed, adjacency replace-one, cohort < clients",
            got=f"{release.mechanism} noise, {sampling}",
            fix="choose the backend autodp or pld",
        )
    from autodp.rdp_acct import anaRDPacct

    def rdp(order: float) -> float:
        return float(pair.rdp(np.array(order)))

    accountant = anaRDPacct(m=len(_ORDERS) + 1)
    with np.errstate(all="ignore"):
        accountant.compose_subsampled_mechanism(rdp, sampling.rate, coeff=sampling.cohort)
        return accountant.get_rdp(_ORDERS)
