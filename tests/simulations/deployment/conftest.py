# SPDX-License-Identifier: Apache-2.0
"""Deployments that several tests share."""

import pytest

from tests.simulations.deployment.federation import Federation


@pytest.fixture(scope="session")
def small(tiny_experiment):
    """Makes the table of a small experiment with twelve of its users in a round."""

    def make():
        table = tiny_experiment() | {"name": "small", "rounds": 3}
        table["sampler"]["cohort"] = 12
        table["evaluation"] = {"every": 0, "users": 4, "ks": [5], "fine-tune": {"epochs": 1}}
        table["engine"] |= {"timeout": 180.0, "path": "reference"}
        del table["engine"]["name"]
        return table

    return make


@pytest.fixture(scope="session")
def federation(small, tmp_path_factory):
    """A running deployment of one server and two nodes for all tests, because starting one takes
    longer than most of them."""
    made = Federation(tmp_path_factory.mktemp("deployment") / "loopback", small())
    try:
        yield made.up()
    finally:
        made.down()
