# SPDX-License-Identifier: Apache-2.0
"""Models of sequences and their losses."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedrec.data.interactions import FeatureTable, Schema, Vectors
from fedrec.models.sequential import (
    Dropout,
    Gru4Rec,
    Gru4RecConfig,
    SasRec,
    SasRecConfig,
    sequence_loss,
)
from fedrec.nn import layers
from fedrec.nn.layers import catalogue_cross_entropy

ITEMS = 11
WIDTH = 6
SEQUENCES = torch.tensor([[3, 0, 7, 7], [5, 2, -1, -1], [9, -1, -1, -1]])
KINDS = [
    (SasRec, SasRecConfig(width=WIDTH, longest=4)),
    (Gru4Rec, Gru4RecConfig(width=WIDTH, longest=4, layers=2)),
]
both = pytest.mark.parametrize(("kind", "config"), KINDS, ids=["sasrec", "gru4rec"])


def made(kind, config, vectors=(), **settings):
    schema = Schema(ITEMS, FeatureTable(ITEMS, (), vectors=vectors), (), "ranking")
    return kind(config.model_copy(update=settings), schema)


def parameters_of(model, seed=1):
    """Its parameters in float64, each different from its start, so that a missing one is seen."""
    random = torch.Generator().manual_seed(seed)
    fresh = model.initial(random)
    return {
        name: (value + 0.3 * torch.randn(value.shape, generator=random)).double()[None]
        for name, value in fresh.items()
    }


def linear(layer, parameters, name):
    layer.weight.data = parameters[f"{name}.weight"][0].T
    layer.bias.data = parameters[f"{name}.bias"][0]


def sasrec_states(parameters, sequence):
    """The states of one sequence without padding, `[n, d]`, by `nn.TransformerEncoderLayer`."""
    count = len(sequence)
    values = parameters["item.id"][0][sequence] * math.sqrt(WIDTH)
    values = values + parameters["place"][0][:count].flip(0)
    for block in ("block0", "block1"):
        layer = nn.TransformerEncoderLayer(
            WIDTH, 1, WIDTH, 0.0, norm_first=True, batch_first=True, dtype=torch.float64
        )
        layer.self_attn.in_proj_weight.data = parameters[f"{block}.attention.weight"][0].T
        layer.self_attn.in_proj_bias.data = parameters[f"{block}.attention.bias"][0]
        linear(layer.self_attn.out_proj, parameters, f"{block}.output")
        linear(layer.linear1, parameters, f"{block}.inner")
        linear(layer.linear2, parameters, f"{block}.outer")
        for norm in ("norm1", "norm2"):
            getattr(layer, norm).weight.data = parameters[f"{block}.{norm}.weight"][0]
            getattr(layer, norm).bias.data = parameters[f"{block}.{norm}.bias"][0]
        later = nn.Transformer.generate_square_subsequent_mask(count, dtype=torch.float64)
        values = layer(values[None], later)[0]
    return F.layer_norm(values, (WIDTH,), parameters["norm.weight"][0], parameters["norm.bias"][0])


def gru4rec_states(parameters, sequence):
    """The same by `nn.GRU`."""
    gru = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dtype=torch.float64)
    for layer in (0, 1):
        for own, name in (("ih", "input"), ("hh", "state")):
            linear_weight = parameters[f"layer{layer}.{name}.weight"][0].T
            getattr(gru, f"weight_{own}_l{layer}").data = linear_weight
            bias = parameters[f"layer{layer}.{name}.bias"][0]
            getattr(gru, f"bias_{own}_l{layer}").data = bias
    values = parameters["item.id"][0][sequence] * math.sqrt(WIDTH)
    return gru(values[None])[0][0]


ORACLES = {SasRec: sasrec_states, Gru4Rec: gru4rec_states}


def real(sequence):
    return sequence[sequence >= 0]


@both
def test_scores_are_those_of_torch_nn_with_the_same_weights(kind, config):
    model = made(kind, config)
    parameters = parameters_of(model)
    with torch.no_grad():
        found = model.history_scores(parameters, SEQUENCES[None])[0]
        for own, sequence in zip(found, SEQUENCES, strict=True):
            last = ORACLES[kind](parameters, real(sequence))[-1]
            torch.testing.assert_close(own, parameters["item.id"][0] @ last)


@both
def test_a_user_without_items_has_no_preference(kind, config):
    model = made(kind, config)
    scores = model.history_scores(parameters_of(model), torch.full((1, 1, 4), -1))
    assert not scores.any()


@both
@pytest.mark.parametrize("cohort", [1, 2])
def test_the_softmax_is_the_cross_entropy_of_each_next_item(kind, config, cohort):
    model = made(kind, config, dropout=0.0)
    parameters = parameters_of(model)
    expected = sum(
        F.cross_entropy(
            ORACLES[kind](parameters, real(one)[:-1]) @ parameters["item.id"][0].T,
            real(one)[1:],
            reduction="sum",
        )
        for one in SEQUENCES[:2]
    )
    joined = {name: value.expand(cohort, *value.shape[1:]) for name, value in parameters.items()}
    rows = SEQUENCES.expand(cohort, -1, -1)
    counts = torch.tensor([3, 1, 0]).expand(cohort, -1)
    found = sequence_loss(model, joined, rows, 0, counts, [])
    torch.testing.assert_close(found, expected.detach().expand(cohort))


@both
def test_training_in_one_place_has_the_mean_of_all_places(kind, config):
    """Of several lengths, padded to several widths; users with one item or none have no place."""
    model = made(kind, config, dropout=0.0, longest=40)
    parameters = parameters_of(model)
    random = torch.Generator().manual_seed(3)
    lengths = [41, 33, 20, 2, 1, 0]
    sequences = torch.full((len(lengths), 41), -1)
    for one, length in zip(sequences, lengths, strict=True):
        one[:length] = torch.randint(ITEMS, (length,), generator=random)
    losses = [
        F.cross_entropy(
            ORACLES[kind](parameters, real(one)[:-1]) @ parameters["item.id"][0].T,
            real(one)[1:],
            reduction="none",
        )
        for one in sequences[:4]
    ]
    found = model.training_loss(parameters, sequences[None], random, 0.0)
    torch.testing.assert_close(found, torch.cat(losses).mean().detach().expand(1, len(lengths)))


def loss_with(model, parameters, negatives):
    """Of the first sequence, with drawn items."""
    items = torch.cat([negatives, SEQUENCES[0]])[None, None]
    return sequence_loss(model, parameters, items, len(negatives), torch.tensor([[3]]), [])


def test_the_binary_loss_is_equation_7():
    model = made(*KINDS[0], dropout=0.0, loss="binary", negatives=2)
    parameters = parameters_of(model)
    table = parameters["item.id"][0]
    negatives = torch.tensor([[1, 2], [4, 6], [8, 10]])
    expected = 0.0
    for place, state in enumerate(sasrec_states(parameters, SEQUENCES[0, :-1])):
        right = torch.sigmoid(state @ table[SEQUENCES[0, place + 1]])
        wrong = torch.sigmoid(table[negatives[place]] @ state)
        expected = expected - right.log() - (1 - wrong).log().mean()
    found = loss_with(model, parameters, negatives.flatten())
    torch.testing.assert_close(found, expected.detach()[None])


def test_the_sampled_softmax_is_a_cross_entropy_of_shifted_logits():
    model = made(*KINDS[0], dropout=0.0, loss="sampled-softmax", negatives=4)
    parameters = parameters_of(model)
    table = parameters["item.id"][0]
    negatives = torch.tensor([1, 2, 4, 6])
    states = sasrec_states(parameters, SEQUENCES[0, :-1])
    wanted = (states * table[SEQUENCES[0, 1:]]).sum(1, keepdim=True)
    others = states @ table[negatives].T + math.log((ITEMS - 1) / 4)
    first = torch.zeros(3, dtype=torch.int64)
    expected = F.cross_entropy(torch.cat([wanted, others], 1), first, reduction="sum")
    torch.testing.assert_close(loss_with(model, parameters, negatives), expected.detach()[None])


@pytest.mark.parametrize("loss", ["binary", "sampled-softmax"])
def test_items_of_a_sequence_are_never_drawn(loss):
    model = made(*KINDS[0], loss=loss, negatives=30)
    sequences = torch.tensor([[3, 0, 7, 7, 5], [9, 1, 1, -1, -1]])
    drawn = model._negatives(sequences, torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 120 if loss == "binary" else 30)
    for own, sequence in zip(drawn.tolist(), sequences.tolist(), strict=True):
        assert set(own) <= set(range(ITEMS)) - set(sequence)
    assert len(set(drawn[0].tolist())) == ITEMS - 4


def test_dropout_hides_a_share_of_each_client_and_keeps_the_mean():
    """Each client's numbers are its generator's, in any company."""
    values = torch.ones(2, 20, 30, 64)
    found = Dropout(0.25, [torch.Generator().manual_seed(seed) for seed in (0, 1)])(values)
    assert found.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(found.mean()) == pytest.approx(1.0, abs=0.01)
    alone = Dropout(0.25, [torch.Generator().manual_seed(1)])
    assert torch.equal(alone(values[:1])[0], found[1])
    assert not torch.equal(alone(values[:1])[0], found[1]), "the same numbers twice"
    assert Dropout(0.0, [])(values) is values


@both
def test_embeddings_that_dropout_hides_do_not_count(kind, config):
    """Hidden everywhere, they leave the same states for all items."""
    model = made(kind, config)
    parameters = parameters_of(model)
    calls = []

    def first_hidden(values):
        calls.append(values)
        return values * (len(calls) > 1)

    inputs = torch.randn(1, 2, 4, WIDTH, dtype=torch.float64)
    states = model.encode(parameters, inputs, torch.tensor([[4, 4]]), first_hidden)
    torch.testing.assert_close(states[0, 0], states[0, 1])
    assert len(calls) == (5 if kind is SasRec else 2)


def test_the_cross_entropy_and_its_gradient_are_those_of_pytorch(monkeypatch):
    monkeypatch.setattr(layers, "_LOGITS_AT_ONCE", 40)  # two examples at a time
    random = torch.Generator().manual_seed(0)
    hidden, table = (
        torch.randn(2, rows, 3, generator=random, dtype=torch.float64, requires_grad=True)
        for rows in (7, 5)
    )
    targets = torch.randint(5, (2, 7), generator=random)
    weights = torch.rand(2, 7, generator=random, dtype=torch.float64)
    found = catalogue_cross_entropy(hidden, table, targets, weights)
    each = F.cross_entropy((hidden @ table.mT).flatten(0, 1), targets.flatten(), reduction="none")
    expected = (each.view(2, 7) * weights).sum(1)
    torch.testing.assert_close(found, expected)
    scale = torch.tensor([2.0, -3.0])
    pairs = zip(
        torch.autograd.grad((found * scale).sum(), [hidden, table]),
        torch.autograd.grad((expected * scale).sum(), [hidden, table]),
        strict=True,
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


@both
@pytest.mark.parametrize("loss", ["softmax", "sampled-softmax", "binary"])
def test_vectors_add_their_projection_to_the_embeddings_at_both_ends(kind, config, loss):
    """Scores and losses are those of embeddings to which the projections were added by hand; item 4
    has no vector, so the mean, which is 0."""
    values = np.random.default_rng(0).normal(size=(ITEMS, 3)).astype(np.float32)
    known = np.arange(ITEMS) != 4
    values[4] = 0.0
    settings = {"dropout": 0.0, "loss": loss, "negatives": 2}
    model = made(kind, config, (Vectors("cover", values, known),), **settings)
    plain = made(kind, config, **settings)
    parameters = {name: value.float() for name, value in parameters_of(model).items()}
    centred = values - values[known].mean(0) * known[:, None]
    centred /= np.sqrt((centred[known] ** 2).sum(1).mean())
    sums = parameters["item.id"] + torch.from_numpy(centred) @ parameters["item.cover"]
    assert parameters["item.cover"].shape == (1, 3, WIDTH)
    by_hand = {n: v for n, v in parameters.items() if n != "item.cover"} | {"item.id": sums}
    torch.testing.assert_close(
        model.history_scores(parameters, SEQUENCES[None]),
        plain.history_scores(by_hand, SEQUENCES[None]),
    )
    counts = torch.tensor([[3, 1, 0]])
    drawn = torch.arange(3 * model.config.drawn(3)).view(1, 3, -1) % ITEMS
    given = torch.cat([drawn, SEQUENCES[None]], -1), drawn.shape[-1], counts, []
    torch.testing.assert_close(
        sequence_loss(model, parameters, *given), sequence_loss(plain, by_hand, *given)
    )
