# SPDX-License-Identifier: Apache-2.0
"""The plain PyTorch loop gives the same updates as the shipped experiments: an independent oracle
for the kernel."""

import pytest

from benchmarks.experiments import difference, steps_of


def test_the_loop_and_the_kernel_take_the_same_steps():
    assert steps_of("privrec-synthetic") == ["sgd"]
    assert difference("privrec-synthetic", "sgd") < 1e-4


@pytest.mark.parametrize("step", ["counts", "gram"])
def test_the_loop_adds_up_the_same_counts_and_products(step):
    assert sorted(steps_of("linear-synthetic")) == ["counts", "gram"]
    assert difference("linear-synthetic", step) < 1e-12


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", ["privrec-ml1m", "mf-ml1m"])
def test_they_do_on_movielens(name):
    assert difference(name, "sgd") < 1e-4
