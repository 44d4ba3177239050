# SPDX-License-Identifier: Apache-2.0
"""Privacy loss distributions of the pairs that dominate a round
(`fedrec/privacy/accounting/dominating_pairs.py`): the tightest bound here.

Sampling without replacement and replace-one have one pair, whose composition is an upper bound.
Poisson sampling and add-remove have two, one for a client that leaves and one for a client that
joins; the result is the larger epsilon, and the bound is tight: it is also what the best attack
achieves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.backend import Backend, Bound
from fedrec.privacy.accounting.dominating_pairs import Pair
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.loss_distribution import (
    Losses,
    compose,
    connect_the_dots,
    epsilon_of,
)
from fedrec.privacy.accounting.noise_pair import pair_of
from fedrec.privacy.accounting.rdp import pure_epsilon

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
