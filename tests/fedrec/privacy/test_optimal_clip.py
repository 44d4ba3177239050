# SPDX-License-Identifier: Apache-2.0
"""Equation 20 and algorithm 2 of DP-VAE against loops, Monte Carlo, and a search of all norms."""

import math

import numpy as np
import pytest
import torch

from fedrec.privacy.optimal_clip import clip_error, optimal_clip


def gradients(count, width, seed=0):
    random = np.random.default_rng(seed)
    return torch.from_numpy(
        random.standard_normal((count, width)) * random.exponential(2, (count, 1))
    )


def by_hand(bound, rows, multiplier):
    random = np.random.default_rng(1)
    noise = (
        np.abs(random.normal(0, multiplier * bound, (200_000, rows.shape[1]))).sum(1).mean()
        if bound
        else 0.0
    )
    clipped = [row * min(1, bound / np.linalg.norm(row)) for row in rows]
    mean = sum(clipped) / len(clipped)
    terms = [np.abs(mean - own).sum() for own in clipped]
    terms = [
        t + np.abs(row).sum() * max(0, 1 - bound / np.linalg.norm(row))
        for t, row in zip(terms, rows, strict=True)
    ]
    return noise + sum(terms) / len(rows)


@pytest.mark.parametrize("bound", [0.0, 0.5, 2.0, 50.0])
def test_the_error_is_that_of_equation_20(bound):
    rows = gradients(5, 3)
    assert clip_error(bound, rows, 0.4) == pytest.approx(
        by_hand(bound, rows.numpy(), 0.4), rel=5e-3
    )


def test_without_bound_nothing_is_left_but_the_gradients():
    rows = gradients(6, 4)
    assert clip_error(0.0, rows, 3.0) == pytest.approx(float(rows.abs().sum(1).mean()))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("multiplier", [0.0, 0.1, 0.5, 5.0])
def test_the_search_finds_a_norm_that_its_neighbours_do_not_beat(count, multiplier):
    rows = gradients(count, 4, seed=count)
    norms = sorted(rows.norm(dim=1).tolist())
    found = norms.index(pytest.approx(optimal_clip(rows, multiplier)))
    errors = [clip_error(norm, rows, multiplier) for norm in norms]
    assert errors[found] <= min(errors[max(0, found - 1) : found + 2]) + 1e-12


def test_in_many_dimensions_the_smallest_norm_always_wins():
    rows = gradients(10, 5000)
    multiplier = math.sqrt(2 * math.log(1.25 * 80_000))  # epsilon 1
    assert optimal_clip(rows, multiplier) == pytest.approx(float(rows.norm(dim=1).min()))
    assert clip_error(0.0, rows, multiplier) < clip_error(
        optimal_clip(rows, multiplier), rows, multiplier
    )
