# SPDX-License-Identifier: Apache-2.0
"""The contract of a client step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_equal

from clients.blocks import update_of
from clients.malicious import assigned
from clients.node import Node
from clients.round import train_clients
from clients.step import Step, private_names
from clients.steps.descent import Update
from fedrec.components.registry import STEP
from fedrec.data.client_data import ClientData
from fedrec.privacy.clipping import Clip, Protection
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.updates import dense_change
from fedrec.rng import stream
from simulations.contracts.base import RunContract, assert_close, same_bits, unchanged

CLIP_NORM = 0.01
FEW = 5


class StepContract(RunContract):
    """Contract of a step: subclass it and set `component` to a `Step`."""

    kind = STEP

    def node(self, path: str = "auto", private: Path | None = None) -> Node:
        """A node that hosts all clients."""
        return Node(self.small(f"engine.path={path}"), 0, 1, private)

    def test_an_update_has_the_parameters_shapes_and_is_finite(self) -> None:
        """Check that `delta` has all parameters, that `examples` is a count, and that some update
        is not zero. Parameters and data are not changed in place."""
        node, start = self._node_and_start()
        moved = False
        for client in node.training.tolist()[:FEW]:
            data = node.population.client(client)
            rows = {"items": data.items, "labels": data.labels, "positives": data.positives}
            with unchanged({**start, **rows}):
                update = self._update(node, start, client, data)
            shapes = {name: tuple(value.shape) for name, value in update.delta.items()}
            wanted = {name: tuple(value.shape) for name, value in start.items()}
            assert_equal(shapes, wanted, f"shapes of client {client}")
            right = _finite(update) and update.examples >= 0
            assert right, f"the update of client {client} is not finite"
            moved |= any(bool(value.any()) for value in update.delta.values())
        assert moved, "all updates are zero; choose settings with which the step trains"

    def test_an_update_is_a_function_of_the_random_stream(self) -> None:
        """Check that the same stream gives the same bits and another stream another update, without
        state between calls."""
        node, start = self._node_and_start()
        step = node.step(node.experiment.step, 1)
        differ = False
        for client in node.training.tolist()[:FEW]:
            first, again, other = (
                self._update(node, start, client, seed=seed, step=step).delta for seed in (0, 0, 1)
            )
            assert same_bits(first, again), f"two updates of client {client} with one stream differ"
            differ |= not same_bits(first, other)
        words = "the stream makes no difference; set random = False if this is intended"
        assert differ or not self.random, words

    def test_no_epochs_change_nothing(self) -> None:
        """Check that `epochs = 0`, used to evaluate the shared model, changes nothing."""
        node, start = self._node_and_start()
        section = node.experiment.step
        table = {"name": section.name, **section.options, "epochs": 0}
        step = node.step(type(section).model_validate(table))
        for client in node.training.tolist()[:FEW]:
            delta = self._update(node, start, client, step=step).delta
            moved = any(bool(value.any()) for value in delta.values())
            assert not moved, "epochs = 0 changes parameters"

    def test_a_client_without_data_is_no_error(self) -> None:
        """Check the update of a new user without interactions."""
        node, start = self._node_and_start()
        none = np.empty(0, np.int64)
        known = node.population.client(int(node.training[0]))
        times = None if known.times is None else none
        data = ClientData(known.client, known.features, none, np.empty(0, np.float32), none, times)
        assert _finite(self._update(node, start, known.client, data)), "the update is not finite"

    def test_many_clients_at_once_equal_one_by_one(self, tmp_path: Path) -> None:
        """Check that the fastest path and blocks equal the per-client reference for all clients of
        the small dataset."""
        fast, blocks, slow = (
            self.node(path, tmp_path / path) for path in ("auto", "blocks", "reference")
        )
        wanted = self._sums(slow, slow.training)
        assert_close(self._sums(fast, fast.training), wanted, "the fastest path against one by one")
        assert_close(self._sums(blocks, blocks.training), wanted, "blocks against one by one")

    def test_the_sum_is_the_sum_of_the_clients(self, tmp_path: Path) -> None:
        """Check that no client's update depends on the other clients of the round."""
        node = self.node(private=tmp_path)
        clients = node.training[:FEW]
        alone = [self._sums(node, np.array([client])) for client in clients.tolist()]
        wanted = {name: sum(update[name] for update in alone) for name in alone[0]}
        assert_close(self._sums(node, clients), wanted, "the sum and the sum of single updates")

    def test_a_client_moves_the_private_sum_by_the_clip_norm_at_most(self, tmp_path: Path) -> None:
        """Check the sensitivity: S if a client is removed, 2 S (or sqrt(2) S, if the step is
        `non-negative`) if it is replaced."""
        node = self.node(private=tmp_path)
        clients = node.training[:FEW]
        norm = Clip(CLIP_NORM, 2).measure
        everyone = self._sums(node, clients, CLIP_NORM)
        lacking = [
            self._sums(node, np.delete(clients, left_out), CLIP_NORM) for left_out in range(3)
        ]
        bound = Clip(CLIP_NORM, 2, self.cls.contributions).sensitivity("replace-one")
        changes = [("removing a client", CLIP_NORM, everyone, sums) for sums in lacking]
        changes += [("replacing a client", bound, lacking[0], sums) for sums in lacking[1:]]
        for what, most, before, after in changes:
            moved = norm({name: after[name] - before[name] for name in after})
            assert moved <= most * (1 + 1e-4), f"{what} changes the sum by {moved / CLIP_NORM} S"

    def test_symmetric_parameters_change_by_symmetric_matrices(self, tmp_path: Path) -> None:
        """Check `symmetric` parameters, of which only one half is sent."""
        node = self.node(private=tmp_path)
        sums = self._sums(node, node.training[:FEW])
        halves = {name: sums[name] for name in self.cls.symmetric if name in sums}
        assert_close({name: half.T for name, half in halves.items()}, halves, "the two halves")

    def test_private_parameters_are_kept_and_never_sent(self, tmp_path: Path) -> None:
        """Check that private parameters are zero in the update, and stored."""
        node = self.node(private=tmp_path)
        names = private_names(node.step(node.experiment.step), node.initial())
        if not names:
            pytest.skip("has no private parameters")
        sums = self._sums(node, node.training)
        assert not any(sums[name].any() for name in names), "private parameters are sent"
        private = node.private
        if private is None:
            pytest.fail("the node has no private state")
        assert_equal(set(private.load(int(node.training[0]), 2)), set(names), "kept")

    def _node_and_start(self) -> tuple[Node, dict[str, torch.Tensor]]:
        node = self.node("reference")
        return node, node.initial()

    def _update(
        self,
        node: Node,
        start: Mapping[str, torch.Tensor],
        client: int,
        data: ClientData | None = None,
        *,
        seed: int = 0,
        step: Step | None = None,
    ) -> Update:
        step = node.step(node.experiment.step, 1) if step is None else step
        worker = next(worker for worker, part in assigned(step, np.array([client])) if len(part))
        rows = node.population.client(client) if data is None else data
        return update_of(worker, start, rows, stream(seed, "client", client, 1))

    def _sums(
        self, node: Node, clients: np.ndarray, clip_norm: float | None = None
    ) -> dict[str, Any]:
        """A node's sums as full arrays, clipped if a clip norm is given."""
        arrays = {name: value.numpy() for name, value in node.initial().items()}
        protection = None if clip_norm is None else Protection(clip_norm, 2, tuple(arrays))
        reply = train_clients(node, arrays, TrainOrder(1, clients, protection=protection))
        return {name: dense_change(change, arrays[name]) for name, change in reply.total.items()}


def _finite(update: Update) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in update.delta.values())
