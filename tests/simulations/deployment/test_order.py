# SPDX-License-Identifier: Apache-2.0
"""Systems with order on real processes, whose nodes read the times of their own data: the
parameters of a simulation."""

import pytest

from tests.runs import assert_close
from tests.simulations.deployment.federation import Federation
from tests.systems import GRU4REC, LAST_OUT, SASREC, TRANSITIONS

# Biases of keys have no gradient but rounding, which Adam on the server would make large.
PLAIN = (*SASREC, "strategy={name='fedavg'}")
pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ordered(small, tmp_path_factory):
    """A running deployment of two nodes, each with all but the last items of its users."""
    table = small() | {"split": {"name": "leave-one-out"}}
    made = Federation(tmp_path_factory.mktemp("order") / "deployment", table)
    try:
        yield made.up()
    finally:
        made.down()


@pytest.mark.parametrize(
    ("name", "system"), [("sasrec", PLAIN), ("gru4rec", GRU4REC), ("transitions", TRANSITIONS)]
)
def test_the_same_parameters_as_in_a_simulation(ordered, tmp_path, name, system):
    settings = [one for one in system if one not in LAST_OUT]
    ordered.must_run(name, *settings)
    simulated = ordered.simulated(tmp_path / "simulated", *settings)
    assert_close(ordered.parameters(name), simulated, rtol=1e-5, atol=1e-6)
