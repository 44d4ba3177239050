# SPDX-License-Identifier: Apache-2.0
"""Backends of the accountant: privacy loss distributions (the tightest bound here), Rényi
differential privacy, and PrivRec's printed values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.events import GAUSSIAN, Backend, Release
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
# (silently negative). A new accountant is created for each curve.


class Autodp(Backend):
    """The analytical moments accountant of autodp, the improved bound, integer orders 2 to 64. A
    curve is computed once per kind of release and cached."""

    method = (
        "RDP curves of autodp (improved bound, orders 2..64), conversion of Canonne, Kamath and"
        " Steinke"
    )

    def __init__(self) -> None:
        self._curves: dict[Release, np.ndarray] = {}

    def epsilon(self, releases: Mapping[Release, int], delta: float) -> float:
        """Smallest epsilon that the method proves for all releases together."""
        return float(epsilon_of(self.total(releases), delta))

    def total(self, releases: Mapping[Release, int]) -> np.ndarray:
        """Rényi curve of all releases together at `ORDERS`, `float64 [orders]`; the last value is
        the pure epsilon."""
        total = np.zeros(len(ORDERS))
        for release, count in releases.items():
            if release not in self._curves:
                self._curves[release] = np.append(self._curve(release), pure_epsilon(release))
            total += count * self._curves[release] if count else 0.0
        return total

    def _curve(self, release: Release) -> np.ndarray:
        """Rényi curve of one release at the integer orders, `float64 [INTEGER_ORDERS]`."""
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


_MOST_RELEASES = 10**9


class Pld(Backend):
    """Composed privacy loss distributions, see `fedrec.privacy.accounting.losses`."""

    method = "privacy loss distribution of the dominating pair (connect the dots, FFT)"

    def epsilon(self, releases: Mapping[Release, int], delta: float) -> float:
        """Smallest epsilon that the method proves for all releases together.

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


class Paper(Backend):
    """Arithmetic of PrivRec's tables."""

    method = (
        "as PrivRec's tables 4 and 5 (every client of a round counted as a release); for comparison"
        " only"
    )

    def __init__(self) -> None:
        self._curves: dict[Release, np.ndarray] = {}

    def epsilon(self, releases: Mapping[Release, int], delta: float) -> float:
        """Smallest epsilon that the method proves for all releases together. Truncated to four
        decimals, as printed."""
        curve = np.zeros(len(_ORDERS))
        for release, count in releases.items():
            if release not in self._curves:
                self._curves[release] = _curve_of_all_clients(release)
            curve += count * self._curves[release]
        if delta == 0:
            return math.inf
        epsilons = curve + math.log(1 / delta) / (_ORDERS - 1)
        return math.floor(epsilons.min() * 1e4) / 1e4


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


@cache
def backend_of(name: str) -> Backend:
    """Return the accountant `autodp`, `pld` or `paper`, shared within the process with its cached
    curves and distributions.

    Raises:
        ExperimentError: the name is unknown.
    """
    backends: dict[str, type[Backend]] = {"autodp": Autodp, "pld": Pld, "paper": Paper}
    if name not in backends:
        raise ExperimentError(f"unknown accountant {name!r}", fix=f"choose {', '.join(backends)}")
    return backends[name]()
