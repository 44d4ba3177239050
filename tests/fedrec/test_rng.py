# SPDX-License-Identifier: Apache-2.0
"""Named random streams: functions of their address, and independent of each other."""

from itertools import combinations

import numpy as np
import pytest
import torch

from fedrec.rng import seed_sequence, stream, torch_stream


def test_golden_values():
    """If these numbers change, so does every experiment: announce it, and recompute every published
    number."""
    assert stream(0, "cohort", 1).integers(0, 2**32, 3).tolist() == [
        2181975029,
        589668783,
        3742344149,
    ]
    assert stream(7, "client", 12, 3).integers(0, 2**32, 3).tolist() == [
        4285863246,
        1906745036,
        3699478684,
    ]
    assert torch_stream(0, "init").initial_seed() == 3047793464569865906


def test_a_stream_is_a_function_of_its_address():
    first = stream(3, "noise", 5).random(4)
    stream(3, "other", 5).random(9)
    np.testing.assert_array_equal(first, stream(3, "noise", 5).random(4))
    assert torch.equal(
        torch.randn(4, generator=torch_stream(3, "init")),
        torch.randn(4, generator=torch_stream(3, "init")),
    )


ADDRESSES = [
    (0, "client", 1, 23),
    (0, "client", 12, 3),
    (0, "client", 123),
    (0, "client"),
    (0, "client", 0),
    (0, "client", 0, 0),
    (1, "client", 1, 23),
    (0, "client", 23, 1),
    (0, "cohort", 1, 23),
    (2**32, "client", 1, 23),
    (0, "client", 1 + 2**32, 23),
    (2**63 - 1, "client", 1, 23),
]


@pytest.mark.parametrize(("one", "other"), list(combinations(ADDRESSES, 2)))
def test_different_addresses_give_different_streams(one, other):
    assert stream(*one).integers(0, 2**63) != stream(*other).integers(0, 2**63)


def test_neighbouring_streams_are_uncorrelated():
    draws = np.stack([stream(0, "client", client, 1).standard_normal(2000) for client in range(30)])
    correlations = np.corrcoef(draws)[np.triu_indices(30, 1)]
    # Of 435 independent correlations with standard deviation 1/sqrt(2000) = 0.022, none is beyond 5
    # of them.
    assert np.abs(correlations).max() < 0.112
    assert correlations.std() == pytest.approx(1 / np.sqrt(2000), rel=0.15)


@pytest.mark.parametrize("address", [(-1, "client"), (0, "client", -1), (0, "client", 3, -2)])
def test_negative_parts_are_refused(address):
    with pytest.raises(ValueError, match=">= 0"):
        seed_sequence(*address)
