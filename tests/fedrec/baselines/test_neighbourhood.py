# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood predictors on published folds and by hand, and private ones without noise."""

import numpy as np
import pytest

from fedrec.baselines.base import Ratings
from fedrec.baselines.neighbourhood.cos import Cos, CosConfig
from fedrec.baselines.neighbourhood.pcc import Pcc, PccConfig
from fedrec.baselines.neighbourhood.pnbm import CentralPnbm, CentralPnbmConfig
from fedrec.baselines.private.dpsgd_pnbm import DpsgdPnbm, DpsgdPnbmConfig
from fedrec.baselines.simple.item_mean import ItemMean, ItemMeanConfig
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import evaluate_baselines
from tests.fedrec.baselines.histories import published_fold


def planted(seed=0, users=60, items=20, share=0.6):
    """Two groups of items that users like or dislike together; training ratings, and held-out
    ones."""
    random = np.random.default_rng(seed)
    group = np.arange(items) % 2 * 2 - 1
    values = np.clip(
        3 + random.normal(size=(users, 1)) * group + 0.3 * random.normal(size=(users, items)), 1, 5
    )
    rows = np.array(list(np.ndindex(users, items)))
    train = random.random(len(rows)) < share
    whole = Ratings(users, items, rows[:, 0], rows[:, 1], values.ravel())
    return (
        *(
            Ratings(users, items, *(part[kept] for part in (rows[:, 0], rows[:, 1], whole.values)))
            for kept in (train, ~train)
        ),
    )


def rmse(model, data):
    train, held = data
    model.fit_ratings(train)
    found = model.predict(train, held.users, held.items)
    return float(np.sqrt(np.square(found - held.values).mean()))


def test_planted_neighbourhoods_are_found():
    """Correlated items are found by correlation and by gradient descent, and improve on item
    means."""
    data = planted()
    floor = rmse(ItemMean(ItemMeanConfig()), data)
    assert rmse(Pcc(PccConfig()), data) < 0.5 * floor
    learned = CentralPnbm(
        CentralPnbmConfig(
            epochs=60, batch=None, learning_rate=0.5, regularisation=0.0, start="pearson"
        )
    )
    assert rmse(learned, data) < 0.5 * floor
    assert (
        rmse(
            CentralPnbm(
                CentralPnbmConfig(epochs=30, batch=100, learning_rate=0.5, renormalise=True)
            ),
            data,
        )
        < 0.9 * floor
    )
    plain, positive = (rmse(Pcc(PccConfig(positive_only=flag)), data) for flag in (False, True))
    assert plain < positive  # items of the other group have negative weights


def test_cosine_start_and_no_epochs_is_cosine():
    data = planted()
    assert rmse(CentralPnbm(CentralPnbmConfig(epochs=0, start="cosine")), data) == pytest.approx(
        rmse(Cos(CosConfig()), data), abs=1e-12
    )


def test_without_noise_and_within_its_bounds_algorithm_one_is_plain_descent():
    """Step by step: the first K steps on all ratings; the scale is wide, so nothing is clamped."""
    train, _ = planted()
    for steps in (1, 2, 5):
        plain = CentralPnbm(
            CentralPnbmConfig(epochs=steps, batch=None, learning_rate=0.3, regularisation=0.01)
        )
        noisy = DpsgdPnbm(
            DpsgdPnbmConfig(
                start="constant", epsilon=None, iterations=steps, learning_rate=0.3,
                regularisation=0.01, rescale=1.0, minimum_ratings=0,
                scale=(-1000.0, 1000.0), floor=0.0,
            )
        )  # fmt: skip
        plain.fit_ratings(train)
        noisy.fit_ratings(train)
        np.testing.assert_allclose(noisy.similarity, plain.similarity, atol=1e-12)


def test_fallback_and_clipping_by_hand():
    """Two items without a common rater; one user far above the middle of the scale."""
    train = Ratings(
        3, 3, np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1]), np.array([5.0, 1.0, 5.0, 1.0])
    )
    user, item = np.array([0]), np.array([2])
    for scale, expected in (((1, 5), 3.0), ((1, 2), 2.0)):
        model = Cos(CosConfig(scale=scale))
        model.fit_ratings(train)
        assert model.predict(train, user, item) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "settings", "match"),
    [
        (CosConfig, {"neighbours": 0}, "neighbours"),
        (PccConfig, {"scale": [5.0, 1.0]}, "scale"),
        (CentralPnbmConfig, {"start": "zero"}, "start"),
        (CentralPnbmConfig, {"epoch": 3}, "epoch"),
        (DpsgdPnbmConfig, {"floor": 0.0}, "floor"),
        (DpsgdPnbmConfig, {"epsilon": -1.0}, "epsilon"),
        (DpsgdPnbmConfig, {"sample": 1.5}, "sample"),
    ],
)
def test_wrong_settings_are_named(config, settings, match):
    with pytest.raises(ExperimentError, match=match):
        config.parse(settings)


def test_divergence_is_refused():
    train, _ = planted()
    model = CentralPnbm(CentralPnbmConfig(epochs=300, batch=10, learning_rate=1e300))
    with pytest.raises(ExperimentError, match="diverged"), np.errstate(all="ignore"):
        model.fit_ratings(train)


@pytest.mark.slow
@pytest.mark.real_data
def test_published_folds():
    """Surprise 1.1.5, KNNWithMeans of items with k = 900, fold by fold: cosine, and Pearson, which
    drops negatives."""
    expected = {
        "cos": [0.959878, 0.950996, 0.946511, 0.944525, 0.943705],
        "pcc": [0.949471, 0.941064, 0.936800, 0.933607, 0.936367],
    }
    settings = {"neighbours": 900, "neighbours-of": "user", "positive-only": True}
    found = []
    for fold in range(1, 6):
        names = {"cos": settings, "pcc": settings}
        found.append(evaluate_baselines(names, published_fold(fold), held_out="test"))
    for name, values in expected.items():
        assert [one[name]["rmse"] for one in found] == pytest.approx(values, abs=1e-4)
