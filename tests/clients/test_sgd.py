# SPDX-License-Identifier: Apache-2.0
"""Local SGD against `torch.optim.SGD` on plain modules, and its selection of examples."""

import numpy as np
import pytest
import torch
from torch import nn

from clients.steps.sgd import Sgd, SgdConfig
from clients.training.one_client import update_of
from fedrec.data.negatives import draw_negatives
from fedrec.errors import ExperimentError
from fedrec.models.privrec import PrivRec, PrivRecConfig
from fedrec.rng import stream

PARTS = {
    "rates": {"item.id": 20.0, "user.gender": 0.0, "layer0.*": 0.5},
    "late_parameters": ("item.id",),
}


@pytest.fixture
def make(world):
    """A step with these settings, the parameters it starts from, and the population."""

    def step(task="ranking", **settings):
        population = world(task)
        model = PrivRec(PrivRecConfig(embedding=3, hidden=(5,)), population.schema())
        parameters = model.initial(torch.Generator().manual_seed(1))
        return Sgd(SgdConfig(**settings), model, torch.device("cpu")), parameters, population

    return step


def expected_factor(config, name, epochs_left):
    """The documented factors of the two cases below, by name instead of by pattern."""
    if not config.rates:
        return 1.0
    if name == "item.id":
        return 20.0 if epochs_left == 1 else 0.0
    return {"user.gender": 0.0, "layer0.weight": 0.5, "layer0.bias": 0.5}.get(name, 1.0)


def by_torch(plain, config, data, batches):
    """Train the plain module with torch's own optimiser; returns the mean loss of the last
    epoch."""
    anchor = [value.detach().clone() for value in plain.parameters()]
    groups = [{"params": [value], "name": name} for name, value in plain.named().items()]
    optimiser = torch.optim.SGD(
        groups, config.learning_rate, config.momentum, weight_decay=config.weight_decay
    )
    users = [torch.from_numpy(codes) for codes in data.features]
    for number, epoch in enumerate(batches):
        losses = []
        for group in optimiser.param_groups:
            group["lr"] = config.learning_rate * expected_factor(
                config, group["name"], config.epochs - number
            )
        for items, labels in epoch:
            predicted = plain(users, torch.from_numpy(items))
            loss = nn.functional.binary_cross_entropy_with_logits(
                predicted, torch.from_numpy(labels)
            )
            losses.append(loss.item())
            pull = sum(
                ((p - a) ** 2).sum() for p, a in zip(plain.parameters(), anchor, strict=True)
            )
            optimiser.zero_grad()
            (loss + config.proximal_mu / 2 * pull).backward()
            optimiser.step()
    return np.mean(losses)


def expected_batches(config, items, labels, positives, random):
    """The batches as documented: positives then their negatives, one pool per round or epoch, one
    shuffle per epoch."""
    pool = None
    for _ in range(config.epochs):
        if pool is None or config.negatives_policy == "epoch":
            drawn = draw_negatives(positives, 6, config.negatives * int(labels.sum()), random)
            pool = (
                np.concatenate([items, drawn]),
                np.concatenate([labels, np.zeros(len(drawn), np.float32)]),
            )
        order = random.permutation(len(pool[0]))
        parts = [
            order[start : start + config.batch_size]
            for start in range(0, len(order), config.batch_size)
        ]
        yield [(pool[0][part], pool[1][part]) for part in parts]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"proximal_mu": 0.7},
        {"momentum": 0.5, "weight_decay": 0.05, "proximal_mu": 0.3, "negatives_policy": "epoch"},
        PARTS,
        {**PARTS, "momentum": 0.5, "weight_decay": 0.05},
    ],
)
def test_update_equals_torchs_optimiser_on_the_same_batches(make, torch_privrec, settings):
    step, parameters, population = make(epochs=3, batch_size=4, learning_rate=0.2, **settings)
    data = population.client(1)
    got = update_of(step, parameters, data, stream(0, "client", 1, 1))
    plain = torch_privrec(step.model, parameters)
    batches = expected_batches(
        step.config, data.items, data.labels, data.positives, stream(0, "client", 1, 1)
    )
    loss = by_torch(plain, step.config, data, list(batches))
    for name, value in plain.values().items():
        torch.testing.assert_close(got.delta[name], value - parameters[name], rtol=1e-5, atol=1e-6)
    assert got.examples == 10 and got.loss == pytest.approx(loss, rel=1e-5)
    assert any(delta.abs().max() > 1e-3 for delta in got.delta.values())


def test_a_client_without_data_changes_nothing_and_has_no_loss(make):
    step, parameters, population = make(weight_decay=0.5, momentum=0.5)
    got = update_of(step, parameters, population.client(3), stream(0, "client", 3, 1))
    assert got.examples == 0 and np.isnan(got.loss)
    assert all(not delta.any() for delta in got.delta.values())


def test_no_epoch_changes_nothing(make):
    step, parameters, population = make(epochs=0)
    got = update_of(step, parameters, population.client(0), stream(0, "client", 0, 1))
    assert got.examples == 0
    assert np.isnan(got.loss)
    assert not any(delta.any() for delta in got.delta.values())


def test_the_global_parameters_stay_as_they_are(make):
    step, parameters, population = make(momentum=0.9)
    before = {name: value.clone() for name, value in parameters.items()}
    update_of(step, parameters, population.client(0), stream(0, "client", 0, 1))
    assert all(torch.equal(parameters[name], before[name]) for name in before)
    assert not any(value.requires_grad for value in parameters.values())


def test_the_update_is_a_function_of_the_stream(make):
    step, parameters, population = make()
    one, same, other = (
        update_of(step, parameters, population.client(0), stream(0, "client", 0, round_))
        for round_ in (1, 1, 2)
    )
    assert all(torch.equal(one.delta[name], same.delta[name]) for name in one.delta)
    assert one.loss == same.loss
    assert not torch.equal(one.delta["item.id"], other.delta["item.id"])


def pools(step, data):
    """The examples of each epoch, largest label first and then by item."""
    epochs = list(step._epochs(data, stream(0, "client", 0, 1)))
    orders = [np.lexsort((items, -labels)) for items, labels in epochs]
    return [
        (items[order], labels[order]) for (items, labels), order in zip(epochs, orders, strict=True)
    ]


@pytest.mark.parametrize(("policy", "distinct"), [("round", 1), ("epoch", 4)])
def test_negatives_are_drawn_once_per_round_or_for_each_epoch(make, policy, distinct):
    step, _, population = make(epochs=4, negatives=20, negatives_policy=policy)
    assert len({items.tobytes() for items, _ in pools(step, population.client(0))}) == distinct


def test_negatives_are_outside_the_training_positives_only(make):
    """Items 0 and 4 of client 1 are held out; item 1 is its training positive, in two rows."""
    step, _, population = make(epochs=1, negatives=200)
    ((items, labels),) = pools(step, population.client(1))
    assert (labels == 1).sum() == 2 and (labels == 0).sum() == 400
    assert set(items[labels == 1]) == {1} and set(items[labels == 0]) == {0, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("low_rated", "client", "expected"),
    [
        ("ignore", 0, [(0, 1)]),
        ("negative", 0, [(0, 1), (1, 0)]),
        ("ignore", 2, []),
        ("negative", 2, [(5, 0)]),
    ],
)
def test_low_rated_rows_are_left_out_or_negative(make, low_rated, client, expected):
    step, parameters, population = make(epochs=1, negatives=0, low_rated=low_rated)
    data = population.client(client)
    ((items, labels),) = pools(step, data)
    assert list(zip(items.tolist(), labels.tolist(), strict=True)) == expected
    update = update_of(step, parameters, data, stream(0, "client", client, 1))
    assert update.examples == len(expected) and np.isnan(update.loss) == (not expected)


def test_low_rated_rows_get_no_negatives_of_their_own(make):
    step, _, population = make(epochs=1, negatives=3, low_rated="negative")
    ((_, labels),) = pools(step, population.client(0))
    assert labels.tolist() == [1, 0, 0, 0, 0]


def test_ratings_are_learned_without_negatives(make):
    step, _, population = make("rating", epochs=1)
    ((items, labels),) = pools(step, population.client(0))
    assert items.tolist() == [0, 1] and labels.tolist() == [5, 2]


@pytest.mark.parametrize(
    "settings",
    [
        {"rates": {"item.ids": 2.0}},
        {"late_parameters": ("layer7.*",)},
        {"rates": {"layer*": 1.0, "layer7*": 1.0}},
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(make, settings):
    step, parameters, population = make(**settings)
    with pytest.raises(ExperimentError, match=r"item\.ids|layer7"):
        update_of(step, parameters, population.client(0), stream(0, "client", 0, 1))


def test_a_parameter_that_fits_two_patterns_is_refused(make):
    """The keys of a table may be reordered, so no rule of precedence would be reliable."""
    step, parameters, population = make(rates={"layer*": 0.5, "layer0.*": 2.0})
    with pytest.raises(ExperimentError, match=r"layer0\.weight.*several"):
        update_of(step, parameters, population.client(0), stream(0, "client", 0, 1))


def test_private_names_are_patterns(make):
    step, parameters, _ = make(private_parameters=("layer1.*", "user.gender"))
    assert step.private_names(list(parameters)) == ["user.gender", "layer1.weight", "layer1.bias"]
    assert make()[0].private_names(list(parameters)) == []
