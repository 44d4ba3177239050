# SPDX-License-Identifier: Apache-2.0
"""The comparison of compiled training with the processor's limit runs, and counts operations."""

import pytest

from benchmarks import kernel_limit
from fedrec.cohort.kernel import training


def test_a_product_of_matrices_has_two_operations_a_number():
    assert kernel_limit.operations(("forward", 3, 4, 5)) == 2 * 3 * 4 * 5


@pytest.mark.slow
def test_it_prints_products_and_times(capsys, monkeypatch):
    monkeypatch.setattr(training, "train_clients", training.train_clients)  # put back at the end
    kernel_limit.main("privrec-synthetic", "sgd", "2")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "forward" for line in lines)
    times = {line.rsplit(maxsplit=4)[0].strip(): float(line.split()[-4]) for line in lines[-4:]}
    assert times["everything"] >= times["compiled training"] > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("privrec-synthetic", "other"), "expected a step of privrec-synthetic: sgd; got 'other'"),
        (("privrec-synthetic", "sgd", "x"), "expected a number of users, got 'x'"),
        (("privrec-synthetic", "sgd", "0"), "expected a number of users, got '0'"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, said):
    with pytest.raises(SystemExit, match=said):
        kernel_limit.main(*given)
