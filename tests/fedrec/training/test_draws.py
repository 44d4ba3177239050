# SPDX-License-Identifier: Apache-2.0
"""Draws of compiled code beside numpy, client by client."""

import dataclasses

import numpy as np
import pytest
import torch

from fedrec.data.client_data import ClientData
from fedrec.data.interactions import FeatureTable, Schema
from fedrec.rng import stream, streams
from fedrec.training.block import Batches, Block
from fedrec.training.draws import ClientExamples, ExampleDraw, _in_compiled_code, _on_device
from tests.clients.oracles import labelled


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**70 + 5])
@pytest.mark.parametrize("address", [(), (3,), (2**40, 1)])
def test_streams_are_those_of_numpy(seed, address):
    """Of 10,000 clients in all, by their states."""
    random = np.random.default_rng(1)
    clients = np.concatenate([np.arange(834), random.integers(2**62, size=10)])
    states = streams(seed, "client", clients, *address)
    for client, state in zip(clients.tolist(), states.tolist(), strict=True):
        numpy = stream(seed, "client", client, *address).bit_generator.state
        numbers = numpy["state"]["state"], numpy["state"]["inc"]
        halves = [half for number in numbers for half in divmod(number, 1 << 64)]
        assert state == [*halves, numpy["uinteger"], numpy["has_uint32"]]


def client_of(random, items, rows, rating):
    """A client with some rows, perhaps twice of an item, a third of them not positive."""
    rows = random.integers(items, size=rows)
    labels = (random.random(len(rows)) < 0.7).astype(np.float32)
    labels = random.integers(1, 6, size=len(rows)).astype(np.float32) if rating else labels
    liked = rows if rating else rows[labels > 0]
    return ClientData(0, (), rows, labels, np.unique(liked))


def by_numpy(draw, data, schema, random):
    """The batches that `draw` describes."""
    epochs = []
    low_rated = "negative" if draw.low_rated else "ignore"
    pool = labelled(data, schema, draw.negatives, low_rated, random) if draw.epochs else ()
    for _ in range(draw.epochs):
        order = random.permutation(len(pool[0])) if draw.shuffled else slice(None)
        epochs.append((pool[0][order], pool[1][order]))
    return Batches.cut(epochs, draw.batch_size)


DRAWS = [
    ExampleDraw(3, 4, 2),
    ExampleDraw(2, 1_000_000, 3, low_rated=True),
    ExampleDraw(1, 8, 1, shuffled=False),
    ExampleDraw(0, 8, 1),
    ExampleDraw(2, 16, 0),
]


@pytest.mark.parametrize("draw", DRAWS, ids=str)
@pytest.mark.parametrize(("task", "items"), [("ranking", 9), ("ranking", 90_000), ("rating", 50)])
def test_a_block_is_what_numpy_draws_for_each_client(draw, task, items):
    """Items and labels to the digit; of a small catalogue some clients like everything, and some
    clients have no row."""
    random = np.random.default_rng(3)
    schema = Schema(items, FeatureTable(items), (), task)
    clients = [client_of(random, items, rows, task == "rating") for rows in (40, 3, 0, 100, 1, 700)]
    if draw.batch_size > 1000:
        clients = clients[:-1]  # all of one width
    parts = []
    for data in clients:
        liked = data.labels > 0
        chosen = slice(None) if task == "rating" or draw.low_rated else liked
        likes = int(liked.sum()) if task == "ranking" else 0
        parts.append((data.items[chosen], data.labels[chosen], data.never_negative, likes))
    rows, labels, avoided, likes = zip(*parts, strict=True)

    def ragged(lists):
        ends = np.cumsum([0, *map(len, lists)])
        return ends, np.concatenate(lists)

    given = ragged(rows), np.concatenate(labels), ragged(avoided), np.array(likes), items
    examples = ClientExamples.of(draw, *given)
    order = np.argsort(-examples.steps, kind="stable")
    states = streams(5, "client", np.arange(len(clients)), 2)
    device = torch.device("cpu")
    drawn = [
        by_numpy(draw, data, schema, stream(5, "client", number, 2))
        for number, data in enumerate(clients)
    ]
    wanted = Block.of([()] * len(clients), [drawn[client] for client in order], device)
    block = examples.block(order, states[order], (), device)
    for field in dataclasses.fields(Block):
        if field.name == "members":
            continue
        got, expected = (getattr(made, field.name) for made in (block, wanted))
        if isinstance(expected, torch.Tensor):
            assert torch.equal(got, expected), field.name
        else:
            assert got == expected, field.name
    assert examples.steps.tolist() == [len(batches.sizes) for batches in drawn]
    assert examples.widths.tolist() == [batches.items.shape[1] for batches in drawn]


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_one_client_alone_leaves_its_stream_where_numpy_does(draw):
    schema = Schema(60, FeatureTable(60), (), "ranking")
    data = client_of(np.random.default_rng(0), 60, 30, False)
    ours, numpy = stream(1, "client", 4), stream(1, "client", 4)
    got, wanted = draw.batches(data, schema, ours), by_numpy(draw, data, schema, numpy)
    for field in dataclasses.fields(Batches):
        assert np.array_equal(getattr(got, field.name), getattr(wanted, field.name)), field.name
    assert ours.random() == numpy.random()


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_a_device_lays_out_what_compiled_code_does(draw):
    random = np.random.default_rng(6)
    counts = np.array([30, 30, 7, 0])
    ends = np.cumsum([0, *counts])
    items = random.integers(80, size=ends[-1])
    labels = (random.random(len(items)) < 0.5).astype(np.float32)
    examples = ClientExamples.of(draw, (ends, items), labels, (ends, items), counts, 80)
    states = streams(0, "client", np.arange(4))
    drawn = examples.drawn(np.arange(4), states)
    cpu = torch.device("cpu")
    for got, wanted in zip(_on_device(drawn, cpu), _in_compiled_code(drawn, cpu), strict=True):
        assert torch.equal(got, wanted)
