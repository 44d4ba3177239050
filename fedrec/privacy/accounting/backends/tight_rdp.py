# SPDX-License-Identifier: Apache-2.0
"""RDP of the pair that dominates a round (`fedrec/privacy/accounting/dominating_pairs.py`), by
numerical integration.

Sampling without replacement, replace-one, with r = 1 - q + q P/Q at the places where P > Q:

    e^((a - 1) R(a)) = 1 + integral of Q [(r^a - r) + (r^(1 - a) - 1)]

Poisson sampling, add-remove: the exact binomial sum of E_Q[r^a] (Mironov, Talwar and Zhang 2019),
which also dominates the opposite direction because a reflection exchanges P and Q.
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln

from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.noise_pair import pair_of
from fedrec.privacy.accounting.rdp import INTEGER_ORDERS, RdpBackend, unsampled
from fedrec.privacy.accounting.sampling import FixedSize, Full


class TightRdp(RdpBackend):
    """RDP of the dominating pair, integer orders 2 to 64."""

    name = "tight-rdp"
    method = "RDP of the dominating pair (orders 2..64), conversion of Canonne, Kamath and Steinke"

    def curve(self, release: Release) -> np.ndarray:
        """R of one release at the integer orders, `float64 [INTEGER_ORDERS]`."""
        if isinstance(release.sampling, Full):
            return unsampled(INTEGER_ORDERS.astype(np.float64), release)
        if isinstance(release.sampling, FixedSize):
            return np.array(
                [_without_replacement(order, release) for order in INTEGER_ORDERS.tolist()]
            )
        return np.array([_poisson(order, release) for order in INTEGER_ORDERS.tolist()])


def _poisson(order: int, release: Release) -> float:
    rate = release.sampling.rate
    terms = np.arange(order + 1)
    log_moments = np.zeros(order + 1)  # of P/Q under Q; the first two are 1
    log_moments[2:] = (terms[2:] - 1) * unsampled(terms[2:].astype(np.float64), release)
    log_binomial = gammaln(order + 1) - gammaln(terms + 1) - gammaln(order - terms + 1)
    log_terms = (
        log_binomial + (order - terms) * np.log1p(-rate) + terms * np.log(rate) + log_moments
    )
    return max(_log_sum(log_terms), 0.0) / (order - 1)


def _without_replacement(order: int, release: Release) -> float:
    rate = release.sampling.rate
    # below log(1 + 1/q) r is about 1, beyond it about q e^u
    knee = np.log1p(1 / rate)
    log_ratio, log_weight = pair_of(release).positive_losses(order, knee)
    log_r = np.logaddexp(np.log1p(-rate), np.log(rate) + log_ratio)
    # log1p keeps the digits of an r near 1; the sum above those of a huge r.
    log_r = np.where(log_ratio < 1, np.log1p(rate * np.expm1(np.minimum(log_ratio, 1.0))), log_r)
    # (r^a - r) + (r^(1-a) - 1) = (1 - r^(1-a)) (r^a - 1), a product of positive numbers.
    with np.errstate(divide="ignore"):
        falls = np.log(-np.expm1(-(order - 1) * log_r))
        grows = order * log_r + np.log(-np.expm1(-order * log_r))
    return float(np.logaddexp(0.0, _log_sum(log_weight + falls + grows))) / (order - 1)


def _log_sum(logarithms: np.ndarray) -> float:
    peak = float(logarithms.max())
    return peak + float(np.log(np.sum(np.exp(logarithms - peak)))) if np.isfinite(peak) else peak
