# SPDX-License-Identifier: Apache-2.0
"""The contract of a model for one with private parameters."""

import pytest

from fedrec.models.mf import Mf
from fedrec.testing import ModelContract


class TestPrivateUserVectors(ModelContract):
    """Matrix factorization with private user vectors and biases."""

    component = Mf
    experiment = {  # noqa: RUF012
        "step": {"name": "sgd", "private-parameters": ["user.*"], "epochs": 2}
    }


def test_a_model_whose_private_parameters_differ_between_paths_fails(monkeypatch, tmp_path):
    """Blocks that lose a client's private state are detected."""
    from simulations.contracts import model as contract

    calls = iter((1.0, 1.0, 2.0))
    kept = contract._kept

    def other(node):
        factor = next(calls)
        return {name: factor * value for name, value in kept(node).items()}

    monkeypatch.setattr(contract, "_kept", other)
    with pytest.raises(AssertionError):
        TestPrivateUserVectors().test_training_many_clients_equals_one_by_one(tmp_path)
