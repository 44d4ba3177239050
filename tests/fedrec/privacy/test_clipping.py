# SPDX-License-Identifier: Apache-2.0
"""Clipping: the table of edge cases, exact sensitivity against adversarial updates, and the
adaptive norm."""

import math

import numpy as np
import pytest

from fedrec.errors import ExperimentError
from fedrec.privacy.clipping import AdaptiveClip, Clip


def update(*values, dtype=np.float32):
    """An update of two parameters that hold the values in turn."""
    values = np.array(values, dtype=dtype)
    return {"table": values[: len(values) // 2].reshape(-1, 1), "bias": values[len(values) // 2 :]}


def flat(found):
    return np.concatenate([value.ravel() for value in found.values()])


# clip norm 5 in L2 and 7 in L1, so that (3, 4) is just not clipped in either
CASES = [
    ((3.0, 4.0), (3.0, 4.0)),
    ((0.0, 0.0), (0.0, 0.0)),
    ((30.0, 40.0), (3.0, 4.0)),
    ((3e30, 4e30), (3.0, 4.0)),
    ((3e-42, 4e-42), (3e-42, 4e-42)),
    ((math.nan, 1.0), (0.0, 0.0)),
    ((math.inf, 1.0), (0.0, 0.0)),
    ((-math.inf, math.nan), (0.0, 0.0)),
]


@pytest.mark.parametrize(("given", "expected"), CASES, ids=str)
@pytest.mark.parametrize(("norm", "order"), [(5.0, 2), (7.0, 1)], ids=["l2", "l1"])
def test_edge_cases(given, expected, norm, order):
    clip, before = Clip(norm, order), update(*given)
    found = clip(before)
    assert found["table"].shape == (1, 1)
    assert all(value.dtype == np.float32 for value in found.values())
    assert flat(found) == pytest.approx(np.array(expected, dtype=np.float32), rel=2e-6, abs=0)
    assert np.linalg.norm(flat(found).astype(np.float64), ord=order) <= norm
    assert flat(before) == pytest.approx(np.array(given, dtype=np.float32), nan_ok=True), (
        "the given update changed"
    )


def test_the_norm_is_over_all_parameters_together():
    found = Clip(1.0)({"a": np.full(9, 1.0), "b": np.full((4, 4), 1.0)})
    assert np.linalg.norm(flat(found)) == pytest.approx(1.0, rel=2e-6)
    assert flat(found) == pytest.approx(0.2, rel=2e-6)


def test_many_norms_at_once_have_the_factors_of_one_by_one():
    norms = np.array([0.0, 2.0, 4.0, 8.0, math.inf, math.nan])
    assert Clip(4.0).factors(norms) == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0, 0.0], rel=2e-6)


def test_rounded_to_float32_the_norm_stays_within_the_bound():
    random = np.random.default_rng(0)
    for size in (3, 1000, 237_184):
        for order in (1, 2):
            clipped = Clip(0.1, order)({"x": random.standard_normal(size).astype(np.float32)})["x"]
            exact = np.linalg.norm(clipped.astype(np.float64), ord=order)
            assert 0.1 * (1 - 3e-6) <= exact <= 0.1


@pytest.mark.parametrize("order", [1, 2])
def test_no_replacement_moves_the_sum_beyond_the_sensitivity(order):
    clip, random = Clip(2.0, order), np.random.default_rng(1)
    others = sum(
        flat(clip(update(*random.standard_normal(6) * 10))).astype(np.float64) for _ in range(4)
    )
    axis = np.eye(6)[0]
    extremes = [
        axis * 1e20,
        -axis * 1e20,
        np.full(6, math.nan),
        np.full(6, math.inf),
        np.zeros(6),
        *random.standard_normal((9, 6)),
    ]
    sums = [others + flat(clip(update(*x))) for x in extremes]
    moved = max(np.linalg.norm(one - other, ord=order) for one in sums for other in sums)
    assert moved <= clip.sensitivity("replace-one") == 4.0
    assert moved == pytest.approx(4.0, rel=1e-5)
    assert (
        max(np.linalg.norm(one - others, ord=order) for one in sums)
        <= clip.sensitivity("add-remove")
        == 2.0
    )


@pytest.mark.parametrize(
    ("norm", "order"), [(0.0, 2), (-1.0, 2), (math.inf, 2), (math.nan, 2), (1.0, 3)]
)
def test_clips_without_a_bound_are_refused(norm, order):
    with pytest.raises(ExperimentError, match="invalid clip"):
        Clip(norm, order)


def test_one_adaptive_step_by_hand():
    clip = AdaptiveClip(norm=1.0, quantile=0.5, learning_rate=0.2, denominator=4)
    count = 3 * 0.5 - 0.5  # three unclipped, one not
    assert clip.after(count).norm == pytest.approx(math.exp(-0.2 * (0.75 - 0.5)))
    assert clip.after(1e9).norm == pytest.approx(math.exp(-0.1))
    assert clip.after(-1e9).norm == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize("start", [0.001, 1.0, 1000.0])
def test_the_adaptive_norm_moves_towards_the_quantile(start):
    norms = np.arange(1, 101) / 10  # 0.1 .. 10
    clip = AdaptiveClip(start, quantile=0.8, learning_rate=0.2, denominator=100)
    for _ in range(400):
        clip = clip.after(float(np.where(norms <= clip.norm, 0.5, -0.5).sum()))
    assert clip.norm == pytest.approx(8.0, rel=0.03)
