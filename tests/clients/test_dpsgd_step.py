# SPDX-License-Identifier: Apache-2.0
"""DP-SGD with the user's own noise on matrix factorization, against gradients in closed form."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.local.examples import labelled
from clients.steps.dpsgd import DpSgd, DpSgdConfig
from clients.training.one_client import update_of
from fedrec.experiment.loading import load
from fedrec.rng import stream

MF = ("model={name='mf', factors=3}", "split={name='ratio'}", "evaluation.fine-tune={upload=false}")
SHARED = ("bias", "item.factors", "item.bias")
LITTLE = {"budgets": "equal", "epsilon": 1e12, "delta": 0.1}  # next to no noise


@pytest.fixture(params=["ranking", "rating"])
def made(request, tiny_experiment, tmp_path):
    table = {**tiny_experiment(), "task": request.param}
    if request.param == "rating":
        del table["positive-above"]
    return Node(
        load(table, [*MF, "step={name='dpsgd', private-parameters=['user.*']}"]),
        0,
        1,
        Path(tmp_path),
    )


@pytest.fixture
def given(made):
    """A client, its examples, and parameters of which none is zero."""
    data, random = made.population.client(3), np.random.default_rng(0)
    parameters = {
        n: torch.from_numpy(random.normal(size=v.shape).astype("f4"))
        for n, v in made.initial().items()
    }
    return data, parameters


def step_of(made, **settings):
    given = {"private_parameters": ("user.*",), "budgets": "equal", **settings}
    return DpSgd(DpSgdConfig(**given), made.model, made.device)


def by_hand(task, parameters, item, label):
    """The gradient of one example's loss with respect to the prediction, and then to each
    parameter."""
    p = {name: value.double().numpy() for name, value in parameters.items()}
    score = (
        p["bias"][0]
        + p["user.bias"][0]
        + p["item.bias"][item, 0]
        + p["item.factors"][item] @ p["user.factors"]
    )
    outer = 2 * (score - label) if task == "rating" else 1 / (1 + math.exp(-score)) - label
    found = {name: np.zeros(value.shape) for name, value in p.items()}
    found["bias"][0] = found["user.bias"][0] = found["item.bias"][item, 0] = outer
    found["item.factors"][item] = outer * p["user.factors"]
    found["user.factors"][:] = outer * p["item.factors"][item]
    return found


def rows_by_hand(made, parameters, items, labels):
    task = made.experiment.task
    parts = [
        by_hand(task, parameters, item, label) for item, label in zip(items, labels, strict=True)
    ]
    return np.array(
        [
            np.concatenate([one[name].ravel() for name in parameters if name in SHARED])
            for one in parts
        ]
    )


def flat(update, parameters, names=SHARED):
    return np.concatenate(
        [update.delta[name].numpy().ravel() for name in parameters if name in names]
    )


def test_gradients_are_those_of_each_example(made, given):
    data, parameters = given
    examples = data.items[:4], np.array([1, 0, 1, 0], dtype=np.float32)
    got, _ = step_of(made, examples=100).gradients(parameters, data, examples, stream(0, "x"))
    order = stream(0, "x").choice(4, size=4, replace=False)
    expected = rows_by_hand(made, parameters, *(part[order] for part in examples))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-6)
    mean, _ = step_of(made, examples=100, clip="user").gradients(
        parameters, data, examples, stream(0, "x")
    )
    np.testing.assert_allclose(mean.numpy(), expected.mean(0, keepdims=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["sound", "paper"])
def test_an_upload_is_the_mean_of_clipped_gradients(made, given, mode):
    """With `paper` and no noise, equation 20 selects the norm with the smallest clipping error: the
    largest norm."""
    data, parameters = given
    # a rate of next to nothing leaves them where they are
    fixed = dict.fromkeys(("user.factors", "user.bias"), 0.0)
    step = step_of(
        made, mode=mode, clip_norm=0.4, learning_rate=0.5, examples=5, private_rate=1e-30, **LITTLE
    )
    update = update_of(step, parameters, data, stream(0, "y"))
    random, config = stream(0, "y"), step.config
    items, labels = labelled(data, made.model.schema, config.negatives, "ignore", random)
    for _ in range(config.epochs):
        random.permutation(len(items))
    drawn = random.choice(len(items), size=5, replace=False)
    rows = rows_by_hand(made, parameters, items[drawn], labels[drawn])
    norms = np.linalg.norm(rows, axis=1)
    bounds = [0.4] if mode == "sound" else norms
    candidates = [-0.5 * (rows * np.minimum(1, bound / norms)[:, None]).mean(0) for bound in bounds]
    gaps = [np.abs(flat(update, parameters) - one).max() for one in candidates]
    assert min(gaps) < 1e-5 and all(
        float(update.delta[name].abs().max()) == value for name, value in fixed.items()
    )
    if mode == "paper":

        def lost(bound):  # H(S) of equation 20 without its first term, by loops
            clipped = [row * min(1, bound / norm) for row, norm in zip(rows, norms, strict=True)]
            mean = np.mean(clipped, axis=0)
            parts = [np.abs(mean - own).sum() for own in clipped]
            return np.mean(
                [
                    p + np.abs(r).sum() / n * max(0, n - bound)
                    for p, r, n in zip(parts, rows, norms, strict=True)
                ]
            )

        ordered = sorted(norms, reverse=True)
        place = ordered.index(bounds[int(np.argmin(gaps))])
        near = [
            lost(ordered[other]) for other in (place - 1, place + 1) if 0 <= other < len(ordered)
        ]
        assert lost(ordered[place]) <= min(near) + 1e-9
        assert math.isfinite(update.loss)


@pytest.mark.slow
def test_noise_has_the_users_own_scale_on_every_shared_number_and_on_no_private_one(made, given):
    data, parameters = given
    settings = {"clip_norm": 0.25, "learning_rate": 0.5}
    noisy, quiet = step_of(made, **settings, epsilon=0.8), step_of(made, **settings, **LITTLE)
    noise = []
    for repeat in range(40):
        one, other = (
            update_of(step, parameters, data, stream(0, "y", repeat)) for step in (noisy, quiet)
        )
        noise.append((flat(one, parameters) - flat(other, parameters)) / 0.5)
        for name in ("user.factors", "user.bias"):
            assert torch.equal(one.delta[name], other.delta[name]) and (one.delta[name] != 0).all()
    noise = np.stack(noise) / (0.25 * math.sqrt(2 * math.log(1.25e5)) / 0.8)
    assert noise.std() == pytest.approx(1, abs=4 / math.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 4 / math.sqrt(noise.size) and (noise.std(0) > 0.5).all()


def test_private_parameters_go_down_their_own_gradient(made, given):
    data, parameters = given
    update = update_of(
        step_of(made, upload=False, epochs=3, batch_size=1000, private_rate=0.2),
        parameters,
        data,
        stream(0, "z"),
    )
    items, labels = labelled(data, made.model.schema, 4, "ignore", stream(0, "z"))
    own = {name: value.clone() for name, value in parameters.items()}
    for _ in range(3):
        parts = [
            by_hand(made.experiment.task, own, i, y) for i, y in zip(items, labels, strict=True)
        ]
        for name in ("user.factors", "user.bias"):
            own[name] = own[name] - 0.2 * torch.from_numpy(
                np.mean([one[name] for one in parts], axis=0)
            )
    for name in ("user.factors", "user.bias"):
        np.testing.assert_allclose(
            update.delta[name].numpy(), (own[name] - parameters[name]).numpy(), rtol=1e-3, atol=1e-5
        )
    assert not flat(update, parameters).any()


def test_a_sound_upload_reveals_only_the_noisy_mean(made, given):
    data, parameters = given
    empty = type(data)(3, data.features, data.items[:0], data.labels[:0], data.positives[:0])
    one, other = (
        update_of(step_of(made), parameters, own, stream(0, "y")) for own in (data, empty)
    )
    assert one.examples == other.examples and math.isnan(one.loss) and math.isnan(other.loss)
    assert (flat(other, parameters) != 0).all()


def test_no_epoch_changes_nothing_and_is_no_upload(made, given):
    data, parameters = given
    step = step_of(made, epochs=0, participations=2)
    assert step.uploads is None
    assert not flat(update_of(step, parameters, data, stream(0, "y")), parameters, parameters).any()
    assert step_of(made, participations=2).uploads == 2
    assert step_of(made, participations=2, upload=False).uploads is None


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="priors"):
        DpSgdConfig.model_validate({"priors": {}})
    with pytest.raises(ValueError, match="compares examples"):
        DpSgdConfig.model_validate({"mode": "paper", "clip": "user"})


@pytest.mark.slow
def test_a_run_goes_through_and_almost_no_noise_learns(run_tiny):
    step = (
        "step={name='dpsgd', private-parameters=['user.*'], clip-norm=1.0, examples=50,"
        " learning-rate=1.0"
    )
    same = (
        "dataset.users=80",
        "dataset.mean-interactions=12",
        *MF,
        "sampler.cohort=20",
        "rounds=30",
    )
    more = (
        "strategy={name='fed-adam', server-lr=0.05}",
        "evaluation.every=0",
        "evaluation.final-users=80",
    )
    enough = f"{step}, budgets='equal', epsilon=1e6, delta=0.1}}"
    trained = run_tiny(*same, enough, *more, output="trained")
    fresh = run_tiny(*same, enough, *more, "rounds=1", "strategy.server-lr=1e-9", output="fresh")
    assert trained.metrics["ndcg@5"] > 1.2 * fresh.metrics["ndcg@5"]
    assert (trained.folder / "epsilons.csv").exists()
