# SPDX-License-Identifier: Apache-2.0
"""Backends of the accountant: privacy loss distributions (the tightest bound here), Rényi
differential privacy, and PrivRec's printed values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import GAUSSIAN, Release
from fedrec.privacy.accounting.rdp import (
    INTEGER_ORDERS,
    ORDERS,
    epsilon_of,
    pure_epsilon,
    unsampled,
)
from fedrec.privacy.accounting.sampling import FixedSize, Full

# RDP curves from autodp (Wang et al. 2019, Zhu and Wang 2019), turned into epsilon by our own tight
# conversion.
#
# Not used from autodp 0.2.3: `get_eps` (older conversion, epsilon too large by 0.3 to 0.7), the
# default bound for sampling without replacement (theorem 9, up to twice as large), orders above 100
# (there it falls back to that bound), its accountant's memory (a Poisson and a without-replacement
# release of one function are merged), and everything that goes through characteristic functions
# (silently negative). A new accountant is created for each curve. A curve is that of the improved
# bound at integer orders 2 to 64, computed once per kind of release.


def rdp_total(releases: Mapping[Release, int]) -> np.ndarray:
    """Rényi curve of all releases together at `ORDERS`, `float64 [orders]`; the last value is the
    pure epsilon."""
    total = np.zeros(len(ORDERS))
    for release, count in releases.items():
        total += count * rdp_curve(release) if count else 0.0
    return total


def _autodp(releases: Mapping[Release, int], delta: float) -> float:
    return float(epsilon_of(rdp_total(releases), delta))


@cache
def rdp_curve(release: Release) -> np.ndarray:
    """Rényi curve of one release at `ORDERS`, `float64 [orders]`."""
    return np.append(_curve(release), pure_epsilon(release))


def _curve(release: Release) -> np.ndarray:
    """Rényi curve of one release at the integer orders, `float64 [INTEGER_ORDERS]`."""
    if isinstance(release.sampling, Full):
        return unsampled(INTEGER_ORDERS.astype(np.float64), release)
    from autodp.rdp_acct import anaRDPacct

    @cache  # autodp asks for each order a hundred times
    def rdp(order: float) -> float:
        return (
            float(unsampled(np.array([order], dtype=np.float64), release)[0]) if order > 1 else 0.0
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


_MOST_RELEASES = 10**9


def _pld(releases: Mapping[Release, int], delta: float) -> float:
    """Composed privacy loss distributions, see `fedrec.privacy.accounting.losses`.

    Raises:
        ExperimentError: more than 1e9 releases, as their rounding errors add up.
    """
    from fedrec.privacy.accounting.losses import composed_epsilon  # imports dp-accounting

    if sum(releases.values()) > _MOST_RELEASES:
        raise ExperimentError(
            "too many releases for the accountant 'pld'",
            expected=f"at most {_MOST_RELEASES:,} in total",
            got=f"{sum(releases.values()):,}",
            fix="use the accountant 'autodp'",
        )
    epsilon = composed_epsilon(tuple(releases.items()), delta)
    return math.inf if epsilon is None else epsilon


def attack_epsilon(releases: Mapping[Release, int], delta: float) -> float | None:
    """Epsilon that the best known attack reaches, to about three digits: no valid bound can be
    below it. None for more than 1e9 releases, whose rounding errors add up to too much, and for
    very little noise on samples.

    Without replacement and replace-one: all other clients upload -S, the target S or -S. Poisson
    and add-remove: the target uploads S, all others nothing.
    """
    from fedrec.privacy.accounting.losses import composed_epsilon  # imports dp-accounting

    if sum(releases.values()) > _MOST_RELEASES:
        return None
    return composed_epsilon(tuple(releases.items()), delta, attack=True)


# The epsilons printed in PrivRec's tables 4 and 5. For comparison only: this is not a valid
# accounting of the releases.
#
# All 36 finite cells are reproduced to the last digit if every client of every round is counted as
# a release of its own (M T releases sampled without replacement instead of T), with autodp's older
# bound (theorem 9 of Wang et al. 2019), the older conversion R(a) + ln(1/delta) / (a - 1) at the
# best integer order, cut off after four decimals.

_ORDERS = np.arange(2, 129)


def _paper(releases: Mapping[Release, int], delta: float) -> float:
    """Truncated to four decimals, as printed."""
    curve = np.zeros(len(_ORDERS))
    for release, count in releases.items():
        curve += count * _curve_of_all_clients(release)
    if delta == 0:
        return math.inf
    epsilons = curve + math.log(1 / delta) / (_ORDERS - 1)
    return math.floor(epsilons.min() * 1e4) / 1e4


@cache
def _curve_of_all_clients(release: Release) -> np.ndarray:
    sampling = release.sampling
    if release.mechanism != GAUSSIAN or not isinstance(sampling, FixedSize):
        raise ExperimentError(
            "accountant 'paper' supports only Gaussian noise and cohorts of fixed size",
            got=f"{release.mechanism} noise, {sampling}",
            fix="choose the backend autodp or pld",
        )
    from autodp.rdp_acct import anaRDPacct

    def rdp(order: float) -> float:
        return float(unsampled(np.array([order]), release)[0])

    accountant = anaRDPacct(m=len(_ORDERS) + 1)
    with np.errstate(all="ignore"):
        accountant.compose_subsampled_mechanism(rdp, sampling.rate, coeff=sampling.cohort)
        return accountant.get_rdp(_ORDERS)


@dataclass(frozen=True)
class Backend:
    """A method to bound the epsilon of counted releases under one adjacency.

    Attributes:
        method: description for reports.
        epsilon: from the number of times of each release, and delta in [0, 1), the smallest epsilon
            >= 0 that the method proves for all together; infinite: none. Raises an ExperimentError
            if it has no bound for one of them.
    """

    method: str
    epsilon: Callable[[Mapping[Release, int], float], float]


_BACKENDS = {
    "autodp": Backend(
        "RDP curves of autodp (improved bound, orders 2..64), conversion of Canonne, Kamath and"
        " Steinke",
        _autodp,
    ),
    "pld": Backend(
        "privacy loss distribution of the dominating pair (connect the dots, FFT)", _pld
    ),
    "paper": Backend(
        "as PrivRec's tables 4 and 5 (every client of a round counted as a release); for comparison"
        " only",
        _paper,
    ),
}


def backend_of(name: str) -> Backend:
    """Return the accountant `autodp`, `pld` or `paper`.

    Raises:
        ExperimentError: the name is unknown.
    """
    if name not in _BACKENDS:
        raise ExperimentError(f"unknown accountant {name!r}", fix=f"choose {', '.join(_BACKENDS)}")
    return _BACKENDS[name]
