# SPDX-License-Identifier: Apache-2.0
"""The contract of a model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_equal
from torch import Tensor

from clients.node import Node
from clients.round import train_clients
from clients.step import keeps_state
from fedrec.components.registry import MODEL, covers_overrides
from fedrec.data.interactions import FeatureNames, FeatureTable, Schema
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Model
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.updates import dense_change
from simulations.contracts.base import (
    RunContract,
    assert_close,
    assert_numbers,
    assert_seeded,
    same_bits,
    unchanged,
)


class ModelContract(RunContract):
    """Contract of a model: subclass it and set `component` to a `Model`, and `experiment["step"]`
    if `sgd` does not train it."""

    kind = MODEL

    def models(self) -> Iterator[Model]:
        """Models for each supported task."""
        ranking = Population.of(self.small()).schema()
        made = 0
        for task in ("ranking", "rating"):
            schema = Schema(ranking.num_items, ranking.item_features, ranking.user_features, task)
            try:
                model = self.cls(self.config(), schema)
            except ExperimentError:
                continue
            made += 1
            yield model
        assert made > 0, "the model supports neither task"

    def test_initial_parameters_are_a_function_of_the_generator(self) -> None:
        """Check for finite float32 on the CPU, tables with a row per item, and the same values for
        the same seed."""
        for model in self.models():
            first = _initial(model)
            for name, value in first.items():
                right = (
                    value.dtype == torch.float32
                    and value.device.type == "cpu"
                    and bool(value.isfinite().all())
                )
                assert right, f"initial {name!r} is not finite float32 on the CPU"
            assert_seeded(partial(_initial, model), same_bits, self.random)
            for name in model.item_tables:
                rows = first[name].shape[0] if name in first else 0
                assert rows >= model.schema.num_items, f"item table {name!r} has {rows} rows"

    def test_features_that_it_does_not_state_change_nothing(self) -> None:
        """Check that initial parameters do not depend on side features of users or items if
        `features_used` names none."""
        for model in self.models():
            schema = model.schema
            users = tuple(name for name, _ in schema.user_features)
            items = schema.item_features
            known = FeatureNames.of(FeatureTable(0), items)._replace(users=users)
            used = self.cls.features_used(self.config(), known)
            stated = Schema(
                schema.num_items,
                items.only(used.of_items),
                schema.user_features if used.users else (),
                schema.task,
            )
            same = same_bits(_initial(model), _initial(self.cls(self.config(), stated)))
            assert same, f"parameters depend on features other than the stated {used}"

    def test_predictions_have_the_cohorts_shape_and_its_members_do_not_mix(self) -> None:
        """Check that predictions `[C, B]` are finite and equal those of single clients; parameters
        stay unchanged."""
        for model in self._item_models():
            slices, users, items = _inputs(model, 3, 5)
            with unchanged(slices):
                predicted = model.predict(slices, users, items)
                model.scores(slices, users)
            assert_numbers(predicted, (3, 5), "predictions")
            assert predicted.isfinite().all(), "predictions are not finite"
            for client in range(3):
                part = slice(client, client + 1)
                params = {name: value[part] for name, value in slices.items()}
                alone = model.predict(params, tuple(u[part] for u in users), items[part])
                _assert_close(predicted[part], alone, "a cohort and single clients")

    def test_its_kernel_declaration_is_correct(self) -> None:
        """Check that a declared kernel names all parameters and item tables of the model. A class
        that overrides `predict` or `loss` declares its own kernel."""
        for model in self._item_models():
            declared = model.kernel()
            if declared is None:
                continue
            described = covers_overrides(self.cls, "kernel", ("predict", "loss"))
            assert described, "the class overrides `predict` or `loss` but not `kernel`"
            named = {*declared.dense, *declared.item_tables}
            assert_equal(named, set(_initial(model)), "parameters of the kernel")
            assert_equal({*declared.item_tables}, {*model.item_tables}, "item tables of the kernel")

    def test_scores_are_those_of_the_catalogue(self) -> None:
        """Check that scores `[C, items]` are the predictions of all items."""
        for model in self.models():
            slices, users, _ = _inputs(model, 2, 1)
            catalogue = torch.arange(model.schema.num_items).expand(2, -1)
            if isinstance(model, HistoryModel):
                histories = torch.ones(2, 3, model.schema.num_items)
                if model.form.longest is not None:
                    histories = torch.ones(2, 3, model.form.longest, dtype=torch.int64)
                scores = model.history_scores(slices, histories)
                wanted = (2, 3, model.schema.num_items)
                assert_equal(tuple(scores.shape), wanted, "shape of history scores")
            else:
                predicted = model.predict(slices, users, catalogue)
                _assert_close(model.scores(slices, users), predicted, "`scores` and `predict`")

    def test_the_loss_is_one_number_per_client_with_finite_gradients(self) -> None:
        """Check for a mean loss `[C]`, equal with weights 1 / B, and finite gradients that are not
        all zero."""
        for model in self._item_models():
            slices, users, items = _inputs(model, 2, 4)
            leaves = {name: value.clone().requires_grad_() for name, value in slices.items()}
            labels = torch.tensor([[1.0, 0.0, 1.0, 0.0]] * 2)
            predicted = model.predict(leaves, users, items)
            loss = model.loss(predicted, labels)
            weighted = model.loss(predicted, labels, torch.full((2, 4), 0.25))
            assert_equal(tuple(loss.shape), (2,), "shape of the loss")
            _assert_close(weighted.detach(), loss.detach(), "weights of 1 / B and the mean")
            gradients = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
            moving = [value for value in gradients if value is not None]
            assert any(bool(v.any()) for v in moving), "no parameter has a gradient"
            assert all(bool(v.isfinite().all()) for v in moving), "a gradient is not finite"

    def test_training_many_clients_equals_one_by_one(self, tmp_path: Path) -> None:
        """Check that updates and private states of the kernel, if declared, and of blocks equal the
        per-client reference."""
        sums: list[dict[str, Any]] = []
        for path in ("auto", "blocks", "reference"):
            node = Node(self.small(f"engine.path={path}"), 0, 1, tmp_path / path)
            arrays = {name: value.numpy() for name, value in node.initial().items()}
            reply = train_clients(node, arrays, TrainOrder(1, node.training))
            total = {n: dense_change(change, arrays[n]) for n, change in reply.total.items()}
            sums.append({**total, **_private(node)})
        assert_close(sums[0], sums[2], "the fastest path and single clients")
        assert_close(sums[1], sums[2], "blocks and single clients")
        assert any(np.any(value) for value in sums[2].values()), (
            "training does not change parameters"
        )

    def _item_models(self) -> Iterator[Model]:
        """Models that predict single items."""
        for model in self.models():
            if isinstance(model, HistoryModel):
                pytest.skip("predicts from whole histories")
            yield model


def _private(node: Node) -> dict[str, np.ndarray]:
    """Private parameters of a node's clients after the first round."""
    if node.private is None or not keeps_state(node.step(node.experiment.step)):
        return {}
    return {
        f"{client}/{name}": np.asarray(value, dtype=np.float64)
        for client in node.training
        for name, value in node.private.load(int(client), 2).items()
    }


def _initial(model: Model, seed: int = 0) -> dict[str, Tensor]:
    return model.initial(torch.Generator().manual_seed(seed))


def _assert_close(values: Tensor, wanted: Tensor, what: str) -> None:
    assert_close({"values": values}, {"values": wanted}, what)


def _inputs(
    model: Model, clients: int, items: int
) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Tensor]:
    """Parameters, codes and items that differ between clients."""
    drawn = [_initial(model, seed) for seed in range(clients)]
    slices = {name: torch.stack([params[name] for params in drawn]) for name in drawn[0]}
    random = torch.Generator().manual_seed(9)
    sizes = [size for _, size in model.schema.user_features]
    users = tuple(torch.randint(size, (clients, 1), generator=random) for size in sizes)
    chosen = torch.stack(
        [torch.randperm(model.schema.num_items, generator=random)[:items] for _ in range(clients)]
    )
    return slices, users, chosen
