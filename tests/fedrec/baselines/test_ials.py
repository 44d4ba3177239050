# SPDX-License-Identifier: Apache-2.0
"""Implicit alternating least squares against its normal equations, its loss, and `implicit`."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.ials import CentralIals, CentralIalsConfig, solved


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_rows_solve_their_normal_equations(exponent, liked):
    config = CentralIalsConfig(
        factors=5, weight=7.0, regularisation=0.3, frequency_exponent=exponent
    )
    fixed = torch.randn(50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, table = solved(liked.csr(), fixed, config).numpy(), liked.matrix().numpy()
    columns = fixed.numpy()
    for user in range(liked.num_users):
        weights = np.where(table[user] > 0, 7.0, 1.0)
        left = columns.T @ (weights[:, None] * columns) + 0.3 * weights.sum() ** exponent * np.eye(
            5
        )
        np.testing.assert_allclose(
            found[user], np.linalg.solve(left, columns.T @ (weights * table[user])), rtol=1e-9
        )


def test_a_row_is_the_minimum_of_its_loss(liked):
    """The gradient of the formula in the module's head, by automatic differentiation, is zero."""
    config = CentralIalsConfig(factors=4, weight=3.0, regularisation=0.5, frequency_exponent=0.5)
    fixed = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = solved(liked.csr(), fixed, config).requires_grad_()
    table = liked.matrix().double()
    weights = 1 + (config.weight - 1) * table
    loss = (weights * (table - own @ fixed.T).square()).sum()
    loss = loss + config.regularisation * (weights.sum(1) ** 0.5 * own.square().sum(1)).sum()
    assert torch.autograd.grad(loss, own)[0].abs().max() < 1e-10


def test_rows_of_all_lengths_and_none():
    """Groups of rows are padded; a row without likes is zero."""
    lists = [[], [3], list(range(40)), [5, 6], list(range(9)), []]
    offsets = np.concatenate([[0], np.cumsum([len(items) for items in lists])])
    histories = Histories(40, offsets, np.array([item for items in lists for item in items]))
    fixed = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    config = CentralIalsConfig(factors=6)
    together = solved(histories.csr(), fixed, config)
    for user in range(6):
        alone = solved(histories.block(user, user + 1).csr(), fixed, config)[0]
        torch.testing.assert_close(alone, together[user], rtol=1e-12, atol=1e-14)
    assert not together[[0, 5]].any() and together[[1, 2, 3, 4]].any(1).all()


def test_it_finds_each_users_own_half(taste):
    model = CentralIals(CentralIalsConfig(factors=2, weight=10.0, regularisation=0.1))
    model.fit(taste)
    scores = model.scores(taste)
    own = torch.stack([scores[0::2, :10].min(1).values, scores[1::2, 10:].min(1).values])
    other = torch.stack([scores[0::2, 10:].max(1).values, scores[1::2, :10].max(1).values])
    assert (own > other).all()


def test_enough_conjugate_gradients_solve_exactly(liked):
    """As many steps as there are factors; rounding aside."""
    fixed = torch.randn(50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = torch.randn(80, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = solved(liked.csr(), fixed, CentralIalsConfig(factors=5, cg_steps=5), start)
    torch.testing.assert_close(
        found, solved(liked.csr(), fixed, CentralIalsConfig(factors=5)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_are_those_of_the_textbook(steps, liked):
    """Against Hestenes and Stiefel's recursion on each row's matrix, made whole."""
    fixed = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = torch.randn(80, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    config = CentralIalsConfig(factors=4, cg_steps=steps, weight=3.0, frequency_exponent=0.5)
    found, table = solved(liked.csr(), fixed, config, start), liked.matrix().double()
    for user in range(0, 80, 7):
        weights = 1 + 2 * table[user]
        ridge = 10.0 * weights.sum() ** 0.5 * torch.eye(4, dtype=torch.float64)
        matrix = fixed.T @ (weights[:, None] * fixed) + ridge
        own = start[user]
        rest = fixed.T @ (weights * table[user]) - matrix @ own
        way = rest
        for _ in range(steps):
            size = rest @ rest / (way @ matrix @ way)
            own, after = own + size * way, rest - size * (matrix @ way)
            way, rest = after + (after @ after) / (rest @ rest) * way, after
        torch.testing.assert_close(found[user], own, rtol=1e-9, atol=1e-12)


def test_the_number_of_threads_changes_nothing_in_the_steps(liked):
    fixed, start = torch.randn(50, 4), torch.randn(80, 4)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(solved(liked.csr(), fixed, CentralIalsConfig(factors=4), start))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_row_without_likes_stays_zero_under_steps():
    histories = Histories(5, np.array([0, 0, 2, 2]), np.array([1, 4]))
    found = solved(
        histories.csr(), torch.randn(5, 3), CentralIalsConfig(factors=3), torch.ones(3, 3)
    )
    assert not found[[0, 2]].any() and found[1].any()


@pytest.mark.parametrize("steps", [0, 3])
def test_a_sweep_gives_the_factors_of_implicit(steps, liked):
    """In double precision, from the same item factors, with its c = alpha r; exactly, and by
    conjugate gradients."""
    als = pytest.importorskip("implicit.cpu.als")
    from scipy.sparse import csr_matrix

    config = CentralIalsConfig(factors=6, weight=5.0, regularisation=0.2, cg_steps=steps or 1)
    start = np.random.default_rng(0).normal(size=(50, 6))
    reference = als.AlternatingLeastSquares(
        factors=6,
        alpha=5.0,
        regularization=0.2,
        use_cg=bool(steps),
        iterations=1,
        dtype=np.float64,
        num_threads=1,
    )
    reference.user_factors, reference.item_factors = np.zeros((80, 6)), start.copy()
    reference.cg_steps = steps
    reference.fit(csr_matrix(liked.csr(np.float64)), show_progress=False)
    first = torch.from_numpy(start)
    users = solved(
        liked.csr(), first, config, torch.zeros(80, 6, dtype=torch.float64) if steps else None
    )
    items = solved(liked.csr().T.tocsr(), users, config, first if steps else None)
    close = 1e-8 if steps else 1e-10  # it takes no further step where the residual is below 1e-10
    np.testing.assert_allclose(users.numpy(), reference.user_factors, rtol=0, atol=close)
    np.testing.assert_allclose(items.numpy(), reference.item_factors, rtol=0, atol=close)
