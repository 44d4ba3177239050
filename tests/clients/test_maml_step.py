# SPDX-License-Identifier: Apache-2.0
"""MAML against its closed form for quadratic losses, and in its limiting cases."""

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.steps.personal.maml import Maml, MamlConfig
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.data.client_data import ClientData
from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.models.base import Model
from fedrec.protocol.messages import TrainOrder
from fedrec.protocol.sparse_update import dense_change

ITEMS, WIDTH, RATE = 12, 3, 0.3
DESIGN = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Linear(Model):
    """A rating is a fixed vector of the item times the parameters; the loss is quadratic in
    these."""

    def initial(self, generator):
        return {"w": torch.randn(WIDTH, generator=generator)}

    def predict(self, parameters, users, items, rows=None):
        return torch.einsum("cbd,cd->cb", DESIGN[items], parameters["w"])


def client(number):
    """A client who has rated all items; its optimum is its own."""
    random = np.random.default_rng(number)
    best = random.normal(size=WIDTH)
    ratings = (DESIGN.numpy() @ best).astype(np.float64)
    items = np.arange(ITEMS)
    return ClientData(number, (), items, ratings, items), torch.from_numpy(best)


def step_of(**settings):
    schema = Schema(ITEMS, FeatureTable(ITEMS, ()), (), "rating")
    return Maml(MamlConfig(**settings), Linear(MamlConfig(), schema), torch.device("cpu"))


def curvatures(step, data, seed):
    """Hessians of the mean squared errors of support and query."""
    support, query = step._divided(data, np.random.default_rng(seed))
    rows = [DESIGN[part[0]] for part in (support, query)]
    return [2 * part.T @ part / len(part) for part in rows]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_gradient_is_the_closed_form(order, steps):
    """(I - a A_s)^k A_q (I - a A_s)^k (x - m); the first order lacks the outer factor."""
    step = step_of(order=order, epochs=steps, learning_rate=RATE)
    start = torch.ones(WIDTH, dtype=torch.float64)
    for number in range(4):
        data, best = client(number)
        support, query = curvatures(step, data, number)
        shrink = torch.linalg.matrix_power(
            torch.eye(WIDTH, dtype=torch.float64) - RATE * support, steps
        )
        wanted = query @ shrink @ (start - best)
        wanted = shrink @ wanted if order == 2 else wanted
        update = update_of(step, {"w": start}, data, np.random.default_rng(number))
        torch.testing.assert_close(update.delta["w"], -wanted)
        block = step.block(
            [()], [step.batches(data, np.random.default_rng(number))], torch.device("cpu")
        )
        together = step.train_block({"w": start}, block)
        torch.testing.assert_close(together.values["w"][0] - start, -wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rounds_end_at_the_fixed_point():
    """If all rows are support and query in turn, the mean gradient vanishes at (sum M)^-1 sum M
    m."""
    step, value = step_of(epochs=1, learning_rate=RATE), torch.zeros(WIDTH, dtype=torch.float64)
    left = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    right = torch.zeros(WIDTH, dtype=torch.float64)
    people = [client(number) for number in range(6)]
    for number, (data, best) in enumerate(people):
        support, query = curvatures(step, data, number)
        shrink = torch.eye(WIDTH, dtype=torch.float64) - RATE * support
        weight = shrink @ query @ shrink
        left, right = left + weight, right + weight @ best
    for _ in range(3000):
        moves = [
            update_of(step, {"w": value}, d, np.random.default_rng(n)).delta["w"]
            for n, (d, _) in enumerate(people)
        ]
        value = value + 0.2 * torch.stack(moves).mean(0)
    torch.testing.assert_close(value, torch.linalg.solve(left, right), rtol=1e-6, atol=1e-8)


def test_without_adaptation_it_is_a_plain_gradient():
    """a1 = 0: both orders send minus the query's gradient at the start."""
    start, (data, best) = torch.ones(WIDTH, dtype=torch.float64), client(1)
    for order in (1, 2):
        step = step_of(order=order, learning_rate=0.0)
        query = curvatures(step, data, 5)[1]
        found = update_of(step, {"w": start}, data, np.random.default_rng(5)).delta["w"]
        torch.testing.assert_close(found, -query @ (start - best))


def test_without_a_query_it_is_gradient_descent_on_everything():
    """Equal to `sgd` with one batch of all examples."""
    start, (data, best) = torch.ones(WIDTH, dtype=torch.float64), client(2)
    step = step_of(query_share=0.0, epochs=4, learning_rate=RATE)
    curvature = 2 * DESIGN.T @ DESIGN / ITEMS
    shrink = torch.linalg.matrix_power(torch.eye(WIDTH, dtype=torch.float64) - RATE * curvature, 4)
    found = update_of(step, {"w": start}, data, np.random.default_rng(0)).delta["w"]
    torch.testing.assert_close(start + found, best + shrink @ (start - best))


def test_support_and_query_share_no_positive_and_draw_no_positive(load_tiny):
    node = Node(load_tiny("step.name=maml"), 0, 1, None)
    step = node.step(node.experiment.step)
    for number in node.training.tolist():
        data = node.population.client(number)
        support, query = step._divided(data, np.random.default_rng(number))
        liked = [set(items[labels > 0].tolist()) for items, labels in (support, query)]
        drawn = [set(items[labels == 0].tolist()) for items, labels in (support, query)]
        if len(data.positives) < 2:
            assert not len(support[0]) and not len(query[0])
            continue
        assert not liked[0] & liked[1] and liked[0] | liked[1] == set(data.positives.tolist())
        assert not (drawn[0] | drawn[1]) & set(data.positives.tolist())


@pytest.mark.parametrize("path", ["kernel", "blocks"])
@pytest.mark.parametrize(("order", "share"), [(1, 0.2), (2, 0.2), (2, 0.0)])
def test_faster_paths_are_the_reference_on_a_network(load_tiny, order, share, path):
    """With rates, several steps, and side features; without a query, too."""
    settings = [
        "step.name=maml",
        f"step.order={order}",
        f"step.query-share={share}",
        "step.epochs=2",
        'step.rates={"item.id" = 3.0}',
    ]
    sums = []
    for taken in (path, "reference"):
        node = Node(load_tiny(*settings, f"engine.path={taken}"), 0, 1, None)
        arrays = {name: value.numpy() for name, value in node.initial().items()}
        reply = train_clients(node, arrays, TrainOrder(1, node.training))
        sums.append(
            {name: dense_change(change, arrays[name]) for name, change in reply.total.items()}
        )
    for name, value in sums[1].items():
        np.testing.assert_allclose(sums[0][name], value, rtol=1e-4, atol=1e-5)
    assert any(value.any() for value in sums[1].values())


def test_a_model_with_products_is_trained_in_blocks(load_tiny):
    """The compiled gradient has none."""
    node = Node(load_tiny("step.name=maml", "model.name=neumf"), 0, 1, None)
    path = node.path(node.step(node.experiment.step))
    assert path.name == "blocks" and "products of embeddings" in path.reason
