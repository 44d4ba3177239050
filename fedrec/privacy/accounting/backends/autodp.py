# SPDX-License-Identifier: Apache-2.0
"""RDP curves from autodp (Wang et al. 2019, Zhu and Wang 2019), turned into epsilon by our own
tight conversion.

Not used from autodp 0.2.3: `get_eps` (older conversion, epsilon too large by 0.3 to
0.7), the default bound for sampling without replacement (theorem 9, up to twice as large), orders
above 100 (there it falls back to that bound), its accountant's memory (a Poisson and a
without-replacement release of one function are merged), and everything that goes through
characteristic functions (silently negative). A new accountant is created for each curve.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.rdp import INTEGER_ORDERS, RdpBackend, unsampled
from fedrec.privacy.accounting.sampling import FixedSize, Full


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
