# SPDX-License-Identifier: Apache-2.0
"""The epsilons printed in PrivRec's tables 4 and 5. For comparison only: this is not a valid
accounting of the releases.

All 36 finite cells are reproduced to the last digit if every client of every round is counted as a
release of its own (M T releases sampled without replacement instead of T), with autodp's older
bound (theorem 9 of Wang et al. 2019), the older conversion R(a) + ln(1/delta) / (a - 1) at the best
integer order, cut off after four decimals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.backend import Backend, Bound
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.noise_pair import pair_of
from fedrec.privacy.accounting.sampling import FixedSize

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
