# SPDX-License-Identifier: Apache-2.0
"""Items that a user does not like: their ranks, and that all are equally likely."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.stats import chisquare

from fedrec.baselines.triples import Triples, _ranked_others
from fedrec.data.negatives import nth_outside


@pytest.fixture
def liked():
    """Forty users of 25 items; user 0 has none, user 1 all but one."""
    table = np.random.default_rng(0).random((40, 25)) < 0.4
    table[0], table[1] = False, np.arange(25) != 7
    return csr_matrix(table.astype(np.float32))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rank_is_that_among_the_other_items(liked, compiled):
    search = _ranked_others if compiled else _ranked_others.__wrapped__
    for user in range(40):
        own = liked.indices[liked.indptr[user] : liked.indptr[user + 1]]
        ranks = np.arange(25 - len(own))
        found = search(liked.indptr, liked.indices, np.full(len(ranks), user), ranks)
        assert found.tolist() == nth_outside(own, ranks).tolist()
        assert found.tolist() == np.setdiff1d(np.arange(25), own).tolist()


def test_others_are_uniform(liked):
    triples = Triples(liked, "pairs", np.random.default_rng(1))
    found = triples.others(np.full(20_000, 5))
    free = np.setdiff1d(np.arange(25), liked.indices[liked.indptr[5] : liked.indptr[6]])
    seen = np.bincount(found, minlength=25)
    assert seen.sum() == seen[free].sum() and chisquare(seen[free]).pvalue > 1e-3
    assert (triples.others(np.ones(9, dtype=np.int64)) == 7).all()
