# SPDX-License-Identifier: Apache-2.0
"""PureSVD against the dense decomposition."""

import numpy as np
import pytest

from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.puresvd import Puresvd, PuresvdConfig


def by_hand(liked, asked, rank):
    right = np.linalg.svd(liked.csr().toarray().astype(np.float64), full_matrices=False)[2][:rank]
    return asked.csr().toarray() @ right.T @ right


# by full decomposition, and by Lanczos iteration
@pytest.mark.parametrize("shape", [(80, 50), (600, 300)])
def test_scores_are_those_of_the_dense_decomposition(shape, drawn):
    liked, asked = drawn(*shape, 12), drawn(9, shape[1], 12, seed=1)
    model = Puresvd(PuresvdConfig(factors=7))
    model.fit(liked)
    np.testing.assert_allclose(model.scores(asked).numpy(), by_hand(liked, asked, 7), atol=1e-5)


def test_more_factors_than_there_are(liked, others):
    """With all singular vectors, histories in the training users' space are reconstructed."""
    model = Puresvd(PuresvdConfig(factors=500))
    model.fit(liked)
    np.testing.assert_allclose(model.scores(liked).numpy(), liked.matrix().numpy(), atol=1e-5)


def test_nothing_is_liked():
    model = Puresvd(PuresvdConfig(factors=2))
    model.fit(Histories(5, np.zeros(4, dtype=np.int64), np.zeros(0, dtype=np.int64)))
    assert model.scores(Histories(5, np.array([0, 1]), np.array([3]))).isfinite().all()
