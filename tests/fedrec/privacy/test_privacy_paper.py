# SPDX-License-Identifier: Apache-2.0
"""PrivRec's tables 4 and 5: all 36 finite cells as printed, and the smaller cost of the actual
releases."""

import math

import pytest

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import NoisyRound
from fedrec.privacy.accounting.sampling import FixedSize, Poisson

DELTAS = (1e-8, 1e-6, 1e-4)
CELLS = {
    (5, 4800): (1.7439, 1.3602, 0.9764),
    (10, 4800): (3.2117, 2.7511, 2.2535),
    (15, 4800): (5.9705, 5.2030, 4.3074),
    (20, 4800): (9.4736, 8.3223, 6.9235),
    (25, 4800): (13.7047, 12.1696, 10.2052),
    (30, 4800): (18.9107, 16.6081, 14.3056),
    (2, 760): (2.2994, 1.8388, 1.3783),
    (5, 760): (7.4618, 6.5408, 5.3932),
    (8, 760): (16.2853, 14.3169, 12.0143),
    (10, 760): (23.7651, 21.4626, 18.6182),
    (12, 760): (34.5025, 30.0690, 25.4638),
    (15, 760): (50.1537, 45.5485, 40.9433),
}


def spent(backend, event, rounds=1000):
    accountant = Accountant(backend)
    accountant.step(event, rounds)
    return accountant


@pytest.mark.slow
@pytest.mark.parametrize("case", CELLS, ids=str)
def test_cells_come_out_as_printed_and_the_releases_cost_less(case):
    event = NoisyRound("gaussian", FixedSize(*case), "replace-one", 1.0)
    paper = spent("paper", event)
    ours = [spent(name, event) for name in ("autodp", "pld")]
    assert math.isinf(paper.epsilon(0.0).epsilon)
    assert all(math.isinf(a.epsilon(0.0).epsilon) for a in ours)
    for delta, printed in zip(DELTAS, CELLS[case], strict=True):
        assert paper.epsilon(delta).epsilon == printed
        assert all(accountant.epsilon(delta).epsilon < printed for accountant in ours)


@pytest.mark.parametrize(
    "event",
    [
        NoisyRound("laplace", FixedSize(5, 50), "replace-one", 1.0),
        NoisyRound("gaussian", Poisson(0.1), "add-remove", 1.0),
    ],
    ids=["laplace", "poisson"],
)
def test_the_papers_arithmetic_is_for_its_own_case_only(event):
    with pytest.raises(ExperimentError, match="paper's arithmetic"):
        spent("paper", event).epsilon(1e-5)
