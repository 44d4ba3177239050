# SPDX-License-Identifier: Apache-2.0
"""All steps of a block in compiled code: the same as torch.optim takes one client after the other, in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedrec.cohort import compiled
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.compiled import CompiledPerceptron, Examples, Gathered, Held, Mixed
from fedrec.cohort.descent import descend
from fedrec.cohort.layers import mixed_rows, perceptron, weighted_cross_entropy
from fedrec.cohort.repetition import Recipe, repeatable
from fedrec.cohort.sgd import SgdSettings
from fedrec.data.features import Feature, FeatureTable
from fedrec.models.base import Schema
from fedrec.models.privrec import PrivRec, PrivRecConfig

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="no compiled code here")
ITEMS, BATCH = 40, 4
GENRES = Feature.multiple("genres", [["a", "b", "c"][: row % 4] for row in range(ITEMS)])
SCHEMA = Schema(ITEMS, FeatureTable(ITEMS, (GENRES,)), (("gender", 2), ("age", 5)), "ranking")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def repeated(monkeypatch):
    """Whether each block's steps were taken at once."""
    seen, train = [], Recipe.train

    def noted(self, trainees):
        losses = train(self, trainees)
        seen.append(losses is not None)
        return losses

    monkeypatch.setattr(Recipe, "train", noted)
    return seen


def privrec(kind=PrivRec, schema=SCHEMA, **settings):
    return kind(PrivRecConfig(embedding=6, hidden=(8, 5), **settings), schema)


def start_of(model):
    """Initial parameters of which none is zero."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: value + 0.05 * torch.randn(value.shape, generator=draw) for name, value in model.initial(draw).items()
    }


def block_of(lengths, epochs=2, seed=5):
    """Clients with so many interactions each, some items twice."""
    random = np.random.default_rng(seed)
    batches, users = [], []
    for length in sorted(lengths, reverse=True):
        items, labels = random.integers(0, ITEMS, length), random.integers(0, 2, length).astype(np.float32)
        batches.append(Batches.cut([(items, labels)] * epochs, BATCH))
        ages = np.array([3, 1 if length % 2 else -1])  # of several some have one only
        users.append((random.integers(0, 2, 1), ages))
    return Block.of(users, batches, torch.device("cpu"))


def by_torch(model, block, place, rates=None, learning_rate=0.1):
    """Parameters of one client after its steps by torch.optim on whole float64 tables, and the loss before each."""
    leaves = {name: value.double().requires_grad_() for name, value in start_of(model).items()}
    groups = [{"params": [leaf], "lr": learning_rate * (rates or {}).get(name, 1.0)} for name, leaf in leaves.items()]
    optimiser, losses = torch.optim.SGD(groups), []
    shares, index = (torch.from_numpy(own) for own in GENRES.distinct_shares())
    layers = len([name for name in leaves if name.endswith("weight")])
    for step in range(sum(active > place for active in block.active)):
        items = block.items[step, place]
        pairs = zip(("user.gender", "user.age"), block.users, strict=True)
        user = [leaves[name][codes[place][codes[place] >= 0]].mean(0).expand(len(items), -1) for name, codes in pairs]
        genres = shares[index[items].long()].double() @ leaves["item.genres"]
        hidden = torch.cat([*user, leaves["item.id"][items], genres], 1)
        for layer in range(layers):
            hidden = hidden @ leaves[f"layer{layer}.weight"] + leaves[f"layer{layer}.bias"]
            hidden = torch.relu(hidden) if layer + 1 < layers else hidden
        logits = hidden[:, 0] + (leaves["item.bias"][items, 0] if "item.bias" in leaves else 0)
        weights, labels = block.weights[step, place].double(), block.labels[step, place].double()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return {name: leaf.detach() for name, leaf in leaves.items()}, losses


def assert_as_by_torch(model, block, trained, rates=None):
    close = {"rtol": 1e-4, "atol": 1e-5}
    for place in range(len(block)):
        wanted, losses = by_torch(model, block, place, rates)
        found = trained.parameters_of(place)
        torch.testing.assert_close({name: value[0].double() for name, value in found.items()}, wanted, **close)
        own = trained.step_losses[:, place].double()
        torch.testing.assert_close(own[: len(losses)], torch.tensor(losses, dtype=torch.float64), **close)
        assert not own[len(losses) :].any()


@pytest.mark.parametrize("lengths", [(9, 30, 1, 17), (3,), (11, 0, 2), (4, 4)])
@pytest.mark.parametrize("item_bias", [False, True])
def test_steps_are_those_of_torch_optim(repeated, lengths, item_bias):
    model, block = privrec(item_bias=item_bias), block_of(lengths)
    before = start_of(model)
    trained = descend(model, start_of(model), block, SgdSettings(0.1))
    assert repeated == [True]
    assert_as_by_torch(model, block, trained)
    assert all(map(torch.equal, trained.start.values(), before.values())), "the global parameters moved"


def test_every_parameter_has_its_own_rate(repeated):
    rates = {
        "item.id": 3.0,
        "item.bias": 0.0,
        "user.age": 0.0,
        "user.gender": 2.0,
        "layer1.weight": 0.5,
        "item.genres": 4.0,
    }
    model, block = privrec(item_bias=True), block_of((9, 14))
    trained = descend(model, start_of(model), block, SgdSettings(0.1, rates=rates))
    assert repeated == [True]
    assert_as_by_torch(model, block, trained, rates)


def test_clients_begin_with_parameters_of_their_own(repeated):
    model, block = privrec(), block_of((9, 14))
    own = {"layer0.weight": start_of(model)["layer0.weight"].repeat(2, 1, 1)}
    start = {**start_of(model), "layer0.weight": torch.full_like(own["layer0.weight"][0], 7.0)}
    trained = descend(model, start, block, SgdSettings(0.1), own=own)
    assert repeated == [True]
    assert_as_by_torch(model, block, trained)


def test_a_block_without_steps(repeated):
    model, block = privrec(), block_of((0, 0))
    trained = descend(model, start_of(model), block, SgdSettings(0.1))
    assert not repeated and trained.step_losses.shape == (0, 2)


def test_a_client_has_the_same_bits_in_any_company(repeated):
    model, lengths = privrec(item_bias=True), (30, 17, 9)
    together = descend(model, start_of(model), block_of(lengths), SgdSettings(0.1))
    alone = descend(model, start_of(model), block_of(lengths[:1]), SgdSettings(0.1))
    assert repeated == [True, True]
    for name, value in alone.parameters_of(0).items():
        assert torch.equal(value, together.parameters_of(0)[name]), name


def test_a_client_that_diverges_is_told_and_alone(repeated):
    model, block = privrec(), block_of((9, 14))
    own = {"layer1.bias": start_of(model)["layer1.bias"].repeat(2, 1)}
    own["layer1.bias"][1, 2] = torch.nan
    trained = descend(model, start_of(model), block, SgdSettings(0.1), own=own)
    assert repeated == [True]
    assert all(value.isfinite().all() for value in trained.parameters_of(0).values())
    assert trained.parameters_of(1)["layer0.bias"].isnan().any() and trained.step_losses[:2, 1].isnan().all()


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"proximal_mu": 0.1}, {"late": frozenset(["item.id"])}]
)
def test_steps_of_another_kind_are_taken_one_by_one(repeated, settings):
    model = privrec()
    descend(model, start_of(model), block_of((9, 14)), SgdSettings(0.1, **settings))
    assert not repeated


@pytest.mark.parametrize("reason", ["activation", "task", "threads", "no library", "no users", "many categories"])
def test_what_compiled_code_cannot_do_is_done_all_the_same(repeated, monkeypatch, reason):
    schema = SCHEMA
    if reason == "task":
        schema = Schema(ITEMS, SCHEMA.item_features, SCHEMA.user_features, "rating")
    if reason == "many categories":  # of which rows are picked
        schema = Schema(ITEMS, SCHEMA.item_features, (("gender", 2), ("age", 500)), "ranking")
    if reason == "no users":  # which it can do
        schema = Schema(ITEMS, SCHEMA.item_features, (), "ranking")
    model = privrec(schema=schema, activation="tanh" if reason == "activation" else "relu")
    start, block = start_of(model), block_of((9, 14))
    if reason == "no users":
        block = dataclasses.replace(block, users=())
    if reason == "threads":
        torch.set_num_threads(2)
    if reason == "no library":
        monkeypatch.setattr(compiled, "library", lambda: None)
    trained = descend(model, start, block, SgdSettings(0.1))
    assert repeated == ([True] if reason == "no users" else [])
    monkeypatch.setattr("fedrec.cohort.descent.at_hand", lambda device: False)
    for name, value in descend(model, start, block, SgdSettings(0.1)).values.items():
        torch.testing.assert_close(trained.values[name], value, rtol=1e-4, atol=1e-5)


class Alternating(PrivRec):
    """Predicts the opposite in every second step, and so is not like its first."""

    calls = 0

    def predict(self, parameters, users, items, rows=None):
        self.calls += 1
        assert self.calls < 100
        return super().predict(parameters, users, items, rows)


def test_a_model_that_predicts_anew_must_say_again_that_its_steps_are_alike(repeated):
    model, block = privrec(Alternating), block_of((9, 14))
    assert privrec().repeats and not model.repeats
    trained = descend(model, start_of(model), block, SgdSettings(0.1))
    assert not repeated and model.calls == len(block.active)
    assert_as_by_torch(model, block, trained)


class Layers(PrivRec):
    """A model that says so, of layers in another order than PrivRec's; `kind` says which."""

    kind = ""

    @repeatable
    def predict(self, parameters, users, items, rows=None):
        item = parameters["item.id"]
        weights, biases = ([parameters[f"layer{n}.{kind}"] for n in range(3)] for kind in ("weight", "bias"))
        own = mixed_rows([users[0], users[1]], [parameters["user.gender"], parameters["user.age"]])
        shares = items.inputs[0] * 0.5 if self.kind == "shares of its own" else items.inputs[0]
        third = item if self.kind == "rows twice" else mixed_rows([shares], [parameters["item.genres"]])
        if self.kind == "something between":
            third = third * 2
        return perceptron([[own], [item, third]], weights, biases, "relu")

    @repeatable
    def loss(self, predictions, labels, weights=None):
        return weighted_cross_entropy(predictions, 1 - labels if self.kind == "labels" else labels, weights)


@pytest.mark.parametrize("kind", ["", "rows twice", "something between", "shares of its own", "labels"])
def test_other_layers_are_not_taken_for_those_that_compiled_code_knows(repeated, monkeypatch, kind):
    model, block = privrec(Layers), block_of((9, 14))
    model.kind = kind
    trained = descend(model, start_of(model), block, SgdSettings(0.1))
    assert repeated == ([] if kind else [True])
    monkeypatch.setattr("fedrec.cohort.descent.at_hand", lambda device: False)
    for name, value in descend(model, start_of(model), block, SgdSettings(0.1)).values.items():
        torch.testing.assert_close(trained.values[name], value, rtol=1e-4, atol=1e-5)


def perceptrons():
    """Two perceptrons on an input of each kind, of three examples, and what `train` takes."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, count, 2, generator=draw) for count in (1, 3, 3)]
    weights, biases = [torch.randn(2, 6, 1, generator=draw)], [torch.randn(2, 1, generator=draw)]
    passes = CompiledPerceptron.of(parts, weights, biases, [0.1, 0.1], "relu")
    sources = [
        Held(torch.randn(2, 1, 2, generator=draw), torch.full((2, 1, 2), 0.1)),
        Gathered(torch.randn(10, 2, generator=draw), 0.1),
        Mixed(torch.randn(2, 4, 2, generator=draw), 0.1, torch.rand(10, 4, generator=draw)),
    ]
    places = torch.tensor([[[0, 1, 4], [5, 5, 9]]])
    return passes, sources, Examples(places, torch.ones(1, 2, 3), torch.ones(1, 2, 3), [1, 1])


def changed(given, **others):
    return Examples(**{**vars(given), **others})


WIDE = torch.zeros(1, 2, 4)
WRONG = {
    "a source less": lambda s, given: (s[:2], given, None),
    "another width": lambda s, given: ([s[0], Gathered(torch.randn(10, 3), 0.1), s[2]], given, None),
    "another precision": lambda s, given: ([s[0], Gathered(s[1].values.double(), 0.1), s[2]], given, None),
    "gaps": lambda s, given: ([s[0], Gathered(torch.randn(2, 10).T, 0.1), s[2]], given, None),
    "more shares than rows": lambda s, given: ([*s[:2], Mixed(s[2].values, 0.1, torch.rand(10, 5))], given, None),
    "other clients": lambda s, given: ([*s[:2], Mixed(s[2].values[:1], 0.1, s[2].shares)], given, None),
    "held for all": lambda s, given: ([s[0], Held(torch.randn(2, 3, 2), torch.randn(2, 3, 2)), s[2]], given, None),
    "gathered for one": lambda s, given: ([s[1], *s[1:]], given, None),
    "more examples": lambda s, given: (s, changed(given, places=WIDE.long(), labels=WIDE, weights=WIDE), None),
    "labels of others": lambda s, given: (s, changed(given, labels=given.labels[:, :1]), None),
    "more steps": lambda s, given: (s, changed(given, ends=[1, 2]), None),
    "fewer clients": lambda s, given: (s, changed(given, ends=[1]), None),
    "wide biases": lambda s, given: (s, given, Gathered(torch.randn(10, 2), 0.1)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_not_read_beyond_its_end(wrong):
    passes, sources, given = perceptrons()
    assert passes is not None and passes.train(sources, given) is not None
    sources, given, biases = WRONG[wrong](sources, given)
    before = [own.clone() for own in passes.parameters]
    assert passes.train(sources, given, biases) is None
    assert all(map(torch.equal, before, passes.parameters))


@pytest.mark.parametrize("place", [-1, 10])
@pytest.mark.parametrize("few", ["rows", "shares", "biases"])
def test_places_beyond_the_rows_are_refused(place, few):
    passes, (held, rows, mixed), given = perceptrons()
    given.places[0, 1, 1] = place
    if few == "rows":
        mixed = Mixed(mixed.values, 0.1, torch.rand(20, 4))
    biases = Gathered(torch.randn(10, 1), 0.1) if few == "biases" else None
    if few != "rows":
        rows = Gathered(torch.randn(20, 2), 0.1)
    with pytest.raises(IndexError, match="below 10"):
        passes.train([held, rows, mixed], given, biases)
