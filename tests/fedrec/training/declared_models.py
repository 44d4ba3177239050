# SPDX-License-Identifier: Apache-2.0
"""Declared models with all kinds of inputs, clients to train them, and their predictions in plain
PyTorch."""

import dataclasses
import itertools

import numpy as np
import torch

from fedrec.nn.layers import ItemFeature, KernelModel, Layer
from fedrec.training.block import Batches

ITEMS, WIDTH = 40, 6
GENRES = np.where(
    np.random.default_rng(0).random((ITEMS, 3)) < 0.6,
    np.random.default_rng(1).integers(5, size=(ITEMS, 3)),
    -1,
)
ERAS = np.random.default_rng(2).integers(4, size=(ITEMS, 1))
ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def model_of(hidden=(8, 5), activation="relu", loss="logistic", **changes):
    """A model with two features of the users, two of the items, a bias per item and an offset."""
    widths = [4 * WIDTH + WIDTH, *hidden, 1]
    layers = tuple(Layer(f"w{place}", f"b{place}") for place in range(len(widths) - 1))
    features = ItemFeature("genres", GENRES), ItemFeature("eras", ERAS)
    given = KernelModel(
        layers,
        activation,
        loss,
        ("gender", "age"),
        "items",
        features,
        item_bias="item.bias",
        offsets=("offset",),
    )
    return dataclasses.replace(given, **changes), widths


def start_of(widths, seed=0, scale=0.5):
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "gender": (2, WIDTH),
        "age": (7, WIDTH),
        "genres": (5, WIDTH),
        "eras": (4, WIDTH),
        "items": (ITEMS, WIDTH),
    }
    shapes |= {"item.bias": (ITEMS, 1), "offset": (1,)}
    for place, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        shapes |= {f"w{place}": (inputs, outputs), f"b{place}": (outputs,)}
    scales = {
        name: shape[0] ** -0.5 if name.startswith("w") else scale for name, shape in shapes.items()
    }
    return {
        name: torch.randn(shape, generator=random) * scales[name] for name, shape in shapes.items()
    }


def clients_of(counts=(23, 8, 1, 0), epochs=3, batch=8, seed=3):
    """Users' codes and batches, by falling number of steps; the last client has none."""
    random = np.random.default_rng(seed)
    users, batches = [], []
    for count in counts:
        codes = np.array([1, -1] if count % 2 else [-1, -1])
        users.append((np.array([count % 2]), codes if count != 8 else np.array([2, 5])))
        items = random.integers(ITEMS, size=count)
        labels = (random.random(count) < 0.5).astype(np.float32)
        orders = [random.permutation(count) for _ in range(epochs)]
        batches.append(Batches.cut([(items[order], labels[order]) for order in orders], batch))
    return users, batches


def mean_of(table, codes):
    real = codes >= 0
    return (table[codes.clamp(min=0)] * real.unsqueeze(-1)).sum(-2) / real.sum(
        -1, keepdim=True
    ).clamp(min=1)


def predicted(model, p, user, items):
    """Plain torch, one client."""
    parts = [p[name].expand(len(items), -1) for name in model.user_rows]
    parts += [
        mean_of(p[name], torch.from_numpy(codes)).expand(len(items), -1)
        for name, codes in zip(model.user_tables, user, strict=True)
    ]
    if model.item_table:
        parts.append(p[model.item_table][items])
    parts += [
        mean_of(p[feature.table], torch.from_numpy(feature.codes)[items])
        for feature in model.item_features
    ]
    hidden = torch.cat(parts, 1)
    for place, layer in enumerate(model.layers):
        hidden = ACTIVATIONS[model.activation](hidden) if place else hidden
        if model.product and layer is model.layers[-1]:
            product = p[model.product.user] * p[model.product.item_table][items]
            hidden = torch.cat([product, hidden], 1)
        hidden = hidden @ p[layer.weight].view(hidden.shape[1], -1)
        hidden = hidden + p[layer.bias] if layer.bias else hidden
    outputs = hidden[:, 0] + sum(p[name] for name in model.offsets)
    return outputs + p[model.item_bias][items, 0] if model.item_bias else outputs


def bare_model():
    """A model without features, biases and offsets, and its start."""
    none = {"user_tables": (), "item_features": (), "item_bias": None, "offsets": ()}
    model, _ = model_of((5,), "sigmoid", **none)
    start = start_of([WIDTH, 5, 1])
    return model, {name: start[name] for name in (*model.dense, "items")}


def model_of_features():
    """A model whose items have features alone, and its start."""
    model, _ = model_of((5,), user_tables=("gender",), item_table=None, item_bias=None)
    start = start_of([3 * WIDTH, 5, 1])
    return model, {name: start[name] for name in model.dense}
