# SPDX-License-Identifier: Apache-2.0
"""Any model trained in one place: against plain PyTorch, on two groups of users, with ratings, with
early stopping; the loop by hand."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedrec.baselines.base import Ratings
from fedrec.baselines.central import Central, CentralConfig
from fedrec.baselines.training import BestValues, MovingAverage, TrainingConfig, train
from fedrec.data.negatives import nth_outside
from fedrec.errors import ExperimentError
from fedrec.rng import stream, torch_stream

HALF = {"epochs": 30, "batch-size": 120, "learning-rate": 0.05}
PERSONAL = {
    "mf": ["user.*"],
    "neumf": ["user.*"],
    "ials": ["user.*"],
    "pfedrec": ["score.*"],
    "fedrap": ["item.personal", "score.*"],
    "gpfedrec": ["user.*", "layer*", "item.own"],
}


def fitted(histories, model, **settings):
    options = {key.replace("_", "-"): value for key, value in settings.items()}
    made = Central(CentralConfig.parse({"model": model, **options}))
    made.fit(histories)
    return made


@pytest.mark.parametrize("name", [*PERSONAL, "vae", "ae"])
def test_every_kind_of_model_finds_each_users_own_half(name, taste):
    private = {"private-parameters": PERSONAL[name]} if name in PERSONAL else {}
    scores = fitted(taste, {"name": name}, **HALF, **private).scores(taste)
    own = scores[0::2, :10].mean(1), scores[1::2, 10:].mean(1)
    other = scores[0::2, 10:].mean(1), scores[1::2, :10].mean(1)
    assert (torch.cat(own) > torch.cat(other)).float().mean() > 0.9


def test_an_epoch_is_gradient_descent_on_all_pairs(taste):
    """One step of plain gradient descent on every liked pair and one drawn item each, written
    down for the loss of a logit p_u . q_i + b_u + b_i + b."""
    made = fitted(
        taste, {"name": "mf", "factors": 3}, epochs=1, batch_size=10_000, optimiser="sgd",
        learning_rate=0.5, negatives=1, regularisation=0.1,
    )  # fmt: skip
    drawn = made.model.initial(torch_stream(0, "baseline-central"))
    values = {name: value.clone() for name, value in drawn.items()}
    for name in ("user.factors", "user.bias"):
        values[name] = values[name].repeat(40, 1)
    values = {name: value.requires_grad_() for name, value in values.items()}
    random = stream(0, "baseline-central-triples")
    pairs = random.permutation(240)
    users, good = taste.rows()[pairs], np.sort(taste.items.reshape(40, 6)).ravel()[pairs]
    ranks = random.integers(0, np.full(240, 14))
    bad = [
        int(nth_outside(np.sort(taste.items[6 * user : 6 * user + 6]), np.array([rank]))[0])
        for user, rank in zip(users, ranks, strict=True)
    ]
    loss = torch.zeros(())
    for items, sign in ((good, 1), (bad, -1)):
        own, other = values["user.factors"][users], values["item.factors"][items]
        biases = values["user.bias"][users, 0] + values["item.bias"][items, 0] + values["bias"]
        loss = loss + F.softplus(-sign * ((own * other).sum(1) + biases)).sum()
        loss = loss + 0.1 * (other.square().sum() + values["item.bias"][items].square().sum())
    for name in ("user.factors", "user.bias"):
        loss = loss + 0.1 * values[name][users].square().sum()
    (loss / 240).backward()
    after = {name: (value - 0.5 * value.grad).detach() for name, value in values.items()}
    rows = torch.cat([after["user.factors"], after["user.bias"]], dim=1)
    torch.testing.assert_close(torch.from_numpy(made.own), rows)
    for name in ("item.factors", "item.bias", "bias"):
        torch.testing.assert_close(made.shared[name][0], after[name])


def test_new_users_are_folded_in_by_their_items(taste):
    made = fitted(
        taste.block(0, 30), {"name": "mf"}, **{**HALF, "epochs": 60}, unseen_users="fold-in"
    )
    assert not made.transductive and fitted(taste, {"name": "mf"}, epochs=1).transductive
    lower, upper = made.scores(taste.block(30, 40)).split(10, dim=1)
    assert (lower[0::2].mean(1) > upper[0::2].mean(1)).all()
    assert (lower[1::2].mean(1) < upper[1::2].mean(1)).all()


def test_models_of_features_and_histories_have_no_rows_and_need_no_test_users():
    for name in ("privrec", "vae"):
        assert not Central(CentralConfig.parse({"model": {"name": name}})).transductive


@pytest.fixture(scope="module")
def ratings():
    """Eighty users of thirty items, with biases of both."""
    random = np.random.default_rng(0)
    users, items = np.divmod(random.permutation(80 * 30)[:1200], 30)
    values = 3 + np.linspace(-1, 1, 80)[users] + np.linspace(-1, 1, 30)[items]
    return Ratings(80, 30, users, items, values)


def test_ratings_are_predicted_for_training_users_and_for_new_ones(ratings):
    old = ratings.users < 60
    made = Central(
        CentralConfig.parse(
            {**HALF, "epochs": 60, "batch-size": 300, "model": {"name": "mf", "center": 3.0}}
        )
    )
    made.fit_ratings(Ratings(80, 30, ratings.users[old], ratings.items[old], ratings.values[old]))
    errors = np.abs(made.predict(ratings, ratings.users, ratings.items) - ratings.values)
    assert errors[old].mean() < 0.2 and errors[~old].mean() < 0.35
    nobody = Ratings(80, 30, np.zeros(0, int), np.zeros(0, int), np.zeros(0))
    assert np.ptp(made.predict(nobody, np.arange(60, 80), np.zeros(20, np.int64))) == 0


@pytest.mark.parametrize("model", ["mf", "vae"])
def test_early_stopping_ends_before_the_loss_rises_on_held_out_data(model, liked, monkeypatch):
    """It stops long before the last epoch, and the held-out part is not trained on."""
    steps = []
    monkeypatch.setattr(MovingAverage, "add", lambda self, tensors: steps.append(1))
    made = fitted(liked, {"name": model}, epochs=400, patience=2, learning_rate=0.1, batch_size=40)
    assert 0 < len(steps) < 400 * 2
    assert made.scores(liked).isfinite().all()


def test_early_stopping_keeps_the_parameters_of_the_smallest_loss():
    stopping = BestValues(2)
    found = [
        stopping.reached(loss, [torch.tensor(loss)]) for loss in (3.0, 2.0, 2.5, 1.0, 1.0, 4.0)
    ]
    assert found == [False, False, False, False, False, True]
    assert stopping.values == [torch.tensor(1.0)]
    assert not BestValues(None).reached(3.0, [])


def test_ratings_can_be_held_out_too(ratings):
    made = Central(
        CentralConfig.parse(
            {**HALF, "epochs": 500, "patience": 1, "batch-size": 1000, "model": {"name": "mf"}}
        )
    )
    made.fit_ratings(ratings)
    assert np.isfinite(made.predict(ratings, ratings.users, ratings.items)).all()


def test_the_learning_rate_falls_to_its_last_value():
    """Steps of gradient descent on x: the gradient is 1."""
    point = torch.zeros(1).requires_grad_()
    config = TrainingConfig(epochs=5, optimiser="sgd", learning_rate=1.0, final_rate=0.2)
    values = train(
        [point], config, lambda _: [None], lambda _: point.sum().backward(), steps=1
    )  # fmt: skip
    torch.testing.assert_close(values[0], -torch.tensor([1.0 + 0.8 + 0.6 + 0.4 + 0.2]))


def test_the_moving_average_of_numbers():
    """By hand: the first steps weigh 9 / 11 and 9 / 12, later ones 1 - decay."""
    mean = MovingAverage([torch.zeros(2)], 0.7)
    for number in (1.0, 2.0, 4.0):
        mean.add([torch.full((2,), number)])
    first = 9 / 11
    second = first + 9 / 12 * (2 - first)
    third = second + 9 / 13 * (4 - second)
    torch.testing.assert_close(mean.values[0], torch.full((2,), third))
    for _ in range(40):
        mean.add([torch.full((2,), 4.0)])
    mean.add([torch.zeros(2)])
    torch.testing.assert_close(mean.values[0], torch.full((2,), 4 * 0.7))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "metamf"}, "generates"),
        ({"name": "item-weights"}, "training_loss"),
        ({"name": "nothing"}, "unknown model"),
        ({"name": "mf", "factorss": 3}, "factorss"),
    ],
)
def test_models_that_are_refused(model, words, taste):
    with pytest.raises(ExperimentError) as refused:
        fitted(taste, model)
    assert words in str(refused.value)


def test_models_of_histories_predict_no_ratings(ratings):
    made = Central(CentralConfig.parse({"model": {"name": "pnbm"}}))
    with pytest.raises(ExperimentError, match="single ratings"):
        made.fit_ratings(ratings)
