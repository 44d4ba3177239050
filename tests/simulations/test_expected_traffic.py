# SPDX-License-Identifier: Apache-2.0
"""What devices will send, told before a run, is what is counted in it."""

import pytest

from fedrec.report.page.costs import byte_text
from simulations.expected_traffic import traffic_lines
from tests.systems import FOLD_IN

CASES = {
    "masked": "secure-aggregation=true",
    "noise of the clients": "privacy.placement='distributed'",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_every_device_sends(run_tiny, case):
    result = run_tiny(*FOLD_IN, CASES[case], "engine.nodes=3")
    items = result.parameters["item.bias"].size
    (_, said) = traffic_lines(result.experiment, items, 9.0)
    counted = result.rounds["bytes-up"].sum() / 18
    counts = 2 * 6 * 8 if case == "masked" else 0  # of clients, examples and the like
    assert said.startswith(f"traffic: every device sends {byte_text(counted - counts)} ")
