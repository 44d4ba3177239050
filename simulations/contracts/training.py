# SPDX-License-Identifier: Apache-2.0
"""The contracts of what trains: client steps, models, and strategies, a `CohortStrategy` or one of
Flower's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from numpy.testing import assert_equal
from torch import Tensor

from clients.blocks import update_of
from clients.malicious import assigned
from clients.node import Node
from clients.round import train_clients
from clients.step import Step, keeps_state, private_names
from clients.steps.descent import Update, as_block
from clients.sums import UpdateSum
from fedrec.components.registry import MODEL, STEP, STRATEGY, covers_overrides
from fedrec.components.sections import Section
from fedrec.data.client_data import ClientData
from fedrec.data.interactions import FeatureNames, FeatureTable, Schema
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Model
from fedrec.privacy.accounting.accountant import Ledger
from fedrec.privacy.clipping import Clip, Protection
from fedrec.privacy.plan import Plan, PrivacyConfig
from fedrec.protocol.messages import TrainOrder, pack_sum, unpack_order
from fedrec.protocol.serialization import to_record
from fedrec.protocol.updates import dense_change
from fedrec.rng import Reproducible, stream
from simulations import runner
from simulations.contracts.base import (
    RunContract,
    assert_close,
    assert_numbers,
    assert_seeded,
    same_bits,
    unchanged,
)
from simulations.engines.grid import identify_server
from strategies.base import Aggregate, CohortStrategy, check_private
from strategies.dp import DpFedAvg

_TIGHT_NORM = 0.01
_FEW = 5


class _ClientContract(RunContract):
    """Base of the contracts of what clients train with."""

    def _node(self, path: str = "auto", private: Path | None = None) -> Node:
        """A node that hosts all clients."""
        return Node(self.small(f"engine.path={path}"), 0, 1, private)

    def test_many_clients_at_once_equal_one_by_one(self, tmp_path: Path) -> None:
        """Check that sums and private states of the fastest path and of blocks equal those of the
        per-client reference, for all clients of the small dataset."""
        paths = ("auto", "blocks", "reference")
        nodes = [self._node(path, tmp_path / path) for path in paths]
        fast, blocks, wanted = ({**_sums(node, node.training), **_private(node)} for node in nodes)
        assert_close(fast, wanted, "the fastest path against one by one")
        assert_close(blocks, wanted, "blocks against one by one")
        assert any(np.any(value) for value in wanted.values()), "training changes no parameters"


def _sums(node: Node, clients: np.ndarray, clip_norm: float | None = None) -> dict[str, Any]:
    """A node's sums as full arrays, clipped if a clip norm is given."""
    arrays = {name: value.numpy() for name, value in node.initial().items()}
    protection = None if clip_norm is None else Protection(clip_norm, 2, tuple(arrays))
    reply = train_clients(node, arrays, TrainOrder(1, clients, protection=protection))
    return {name: dense_change(change) for name, change in reply.total.items()}


def _private(node: Node) -> dict[str, np.ndarray]:
    """Private parameters of a node's clients after the first round."""
    if node.private is None or not keeps_state(node.step(node.experiment.step)):
        return {}
    return {
        f"{client}/{name}": np.asarray(value, dtype=np.float64)
        for client in node.training
        for name, value in node.private.load(int(client), 2).items()
    }


class StepContract(_ClientContract):
    """Contract of a step: subclass it and set `component` to a `Step`."""

    kind = STEP

    def test_an_update_has_the_parameters_shapes_and_is_finite(self) -> None:
        """Check that `delta` has all parameters, that `examples` is a count, and that some update
        is not zero. Parameters and data are not changed in place."""
        node, start = self._node_and_start()
        moved = False
        for client in node.training.tolist()[:_FEW]:
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
        for client in node.training.tolist()[:_FEW]:
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
        for client in node.training.tolist()[:_FEW]:
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

    def test_the_sum_is_the_sum_of_the_clients(self, tmp_path: Path) -> None:
        """Check that no client's update depends on the other clients of the round."""
        node = self._node(private=tmp_path)
        clients = node.training[:_FEW]
        alone = [_sums(node, np.array([client])) for client in clients.tolist()]
        wanted = {name: sum(update[name] for update in alone) for name in alone[0]}
        assert_close(_sums(node, clients), wanted, "the sum and the sum of single updates")

    def test_a_client_moves_the_private_sum_by_the_clip_norm_at_most(self, tmp_path: Path) -> None:
        """Check the sensitivity: S if a client is removed, 2 S (or sqrt(2) S, if the step is
        `non-negative`) if it is replaced."""
        node = self._node(private=tmp_path)
        clients = node.training[:_FEW]
        norm = Clip(_TIGHT_NORM, 2).measure
        everyone = _sums(node, clients, _TIGHT_NORM)
        lacking = [_sums(node, np.delete(clients, left_out), _TIGHT_NORM) for left_out in range(3)]
        bound = Clip(_TIGHT_NORM, 2, self.cls.contributions).sensitivity("replace-one")
        changes = [("removing a client", _TIGHT_NORM, everyone, sums) for sums in lacking]
        changes += [("replacing a client", bound, lacking[0], sums) for sums in lacking[1:]]
        for what, most, before, after in changes:
            moved = norm({name: after[name] - before[name] for name in after})
            assert moved <= most * (1 + 1e-4), f"{what} changes the sum by {moved / _TIGHT_NORM} S"

    def test_symmetric_parameters_change_by_symmetric_matrices(self, tmp_path: Path) -> None:
        """Check `symmetric` parameters, of which only one half is sent."""
        node = self._node(private=tmp_path)
        sums = _sums(node, node.training[:_FEW])
        halves = {name: sums[name] for name in self.cls.symmetric if name in sums}
        assert_close({name: half.T for name, half in halves.items()}, halves, "the two halves")

    def test_private_parameters_are_kept_and_never_sent(self, tmp_path: Path) -> None:
        """Check that private parameters are zero in the update, and stored."""
        node = self._node(private=tmp_path)
        names = private_names(node.step(node.experiment.step), node.initial())
        if not names:
            pytest.skip("has no private parameters")
        sums = _sums(node, node.training)
        assert not any(sums[name].any() for name in names), "private parameters are sent"
        private = node.private
        if private is None:
            pytest.fail("the node has no private state")
        assert_equal(set(private.load(int(node.training[0]), 2)), set(names), "kept")

    def _node_and_start(self) -> tuple[Node, dict[str, torch.Tensor]]:
        node = self._node("reference")
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


def _finite(update: Update) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in update.delta.values())


class ModelContract(_ClientContract):
    """Contract of a model: subclass it and set `component` to a `Model`, and `experiment["step"]`
    if `sgd` does not train it."""

    kind = MODEL

    def _models(self) -> Iterator[Model]:
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
        for model in self._models():
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
        for model in self._models():
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
        for model in self._models():
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

    def _item_models(self) -> Iterator[Model]:
        """Models that predict single items."""
        for model in self._models():
            if isinstance(model, HistoryModel):
                pytest.skip("predicts from whole histories")
            yield model


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


_CLIENTS = 6
_CLIP_NORM = 2.0
_SHAPES = {"item.id": (9, 3), "item.bias": (9, 1), "layer.weight": (4, 2), "layer.bias": (2,)}
# updates of one client that try to change the sum by more than the clip norm
_ODD: dict[str, Any] = {
    "as the others": lambda: _update(4),
    "huge": lambda: _update(4, 1e30),
    "huge the other way": lambda: _update(4, -1e30),
    "NaN": lambda: _update(4, np.nan),
    "infinite": lambda: _update(4, np.inf),
    "of a billion examples": lambda: _update(4, 5.0, examples=10**9),
    "zero": lambda: _update(4, 0.0),
}


class StrategyContract(RunContract):
    """Contract of a strategy: subclass it and set `component` to a `Strategy`."""

    kind = STRATEGY

    def test_a_run_moves_finite_parameters_and_keeps_their_shapes(self, tmp_path: Path) -> None:
        """Check that two rounds change the values of parameters but not names, shapes and types."""
        result = self.plain(tmp_path)
        drawn = Node(result.experiment, 0, 1, None).initial()
        start = {name: value.numpy() for name, value in drawn.items()}
        for name, before in start.items():
            after = result.parameters[name]
            same = after.shape == before.shape and after.dtype == before.dtype
            assert same, f"{name!r} has a different shape or type"
            assert np.isfinite(after).all(), f"{name!r} is not finite"
        moved = any(not np.array_equal(start[name], result.parameters[name]) for name in start)
        assert moved, "two rounds do not change parameters"

    def test_the_distribution_over_nodes_makes_no_difference(self, tmp_path: Path) -> None:
        """Check that two and three nodes give the same parameters; Flower's own strategies see
        nodes, not clients."""
        self._skip_flowers()
        two = self.plain(tmp_path).parameters
        three = self.run(tmp_path / "three", "engine.nodes=3").parameters
        assert_close(three, two, "three nodes against two", 1e-3)

    def test_privacy_is_bounded_or_refused(self, tmp_path: Path) -> None:
        """Check that replacing a client changes the sum by at most 2 S and not the denominator, or
        that the strategy is refused under differential privacy, with a reason."""
        if not issubclass(self.cls, CohortStrategy):
            sections = {"privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0}}
            with pytest.raises(ExperimentError, match="cannot be made private"):
                runner.run(self.small(**sections), output=tmp_path / "private")
            return
        try:
            released = {name: self._released(make()) for name, make in _ODD.items()}
        except ExperimentError as error:
            assert error.fix, f"refused without the reason: {error}"
            return
        released["gone"] = self._released(None)
        for name, (sums, clients) in released.items():
            for other_name, (other, other_clients) in released.items():
                squares = [float(np.square(sums[n] - other[n]).sum()) for n in _SHAPES]
                moved = float(np.sqrt(sum(squares))) / _CLIP_NORM
                words = f"replacing {name!r} by {other_name!r} changes the sum by {moved:.3f} S"
                assert moved <= 2 * (1 + 1e-4), words
                assert_equal(clients, other_clients, f"{name!r}: the denominator")

    def test_a_private_run_is_charged_or_refused(self, tmp_path: Path) -> None:
        """Check that each round of a private run is charged to the ledger, or that the strategy is
        refused, with a reason."""
        self._skip_flowers()
        try:
            result = self.run(tmp_path / "private", "privacy={clip-norm=1.0, noise-multiplier=1.0}")
        except ExperimentError as error:
            assert error.fix, f"refused without the reason: {error}"
            return
        ledger = Ledger(result.folder / "privacy.jsonl")
        charged = {charge.round_number for charge in ledger.charges}
        done = set(result.rounds["round"])
        assert charged >= done, f"rounds {sorted(done - charged)} are not charged"

    def _released(self, odd: Update | None) -> tuple[dict[str, np.ndarray], float]:
        """Aggregate of a private round without noise in which client 4 sends `odd`.

        Raises:
            ExperimentError: the strategy cannot be made private.
        """
        identify_server()
        strategy, aggregates = self._private()
        theta = {name: np.ones(shape, np.float32) for name, shape in _SHAPES.items()}
        for part in strategy.phases().values():
            part.check_parameters(theta)
        grid: Any = None
        sent = list(strategy.configure_train(1, to_record(theta), ConfigRecord(), grid))
        updates = {client: odd if client == 4 else _update(client) for client in range(_CLIENTS)}
        replies = [
            reply for message in sent if (reply := _answer(message, theta, updates)) is not None
        ]
        strategy.aggregate_train(1, replies)
        assert len(aggregates) == 1, "the rule did not receive the private sum"
        changes = aggregates[0].changes
        sums = {name: dense_change(changes[name]) for name in _SHAPES}
        return sums, aggregates[0].clients

    def _skip_flowers(self) -> None:
        if not issubclass(self.cls, CohortStrategy):
            pytest.skip("Flower's own strategies see nodes, not clients, and are never private")

    def _private(self) -> tuple[CohortStrategy, list[Aggregate]]:
        """Strategy with a clip norm and without noise, and a list to which its aggregates are
        appended."""
        aggregates: list[Aggregate] = []
        strategy: CohortStrategy = self.cls(self.config(), _Everyone(), {"name": "sgd"})
        plan = Plan.of(
            PrivacyConfig(clip_norm=_CLIP_NORM, noise_multiplier=0.0),
            "fixed-size",
            {"cohort": _CLIENTS},
            _CLIENTS,
            10,
        )
        for phase, part in strategy.phases().items():
            check_private(part)
            part.privacy = DpFedAvg(plan, phase, Reproducible(5), lambda number: None)
            part.apply = _recording(part.apply, aggregates)  # type: ignore[method-assign]
        return strategy, aggregates


class _Everyone:
    """Cohorts of all clients, each on its own node."""

    section = Section(name="fixed-size")

    clients = np.arange(_CLIENTS)

    def sample(self, round_number: int) -> np.ndarray:
        """All clients, `int64 [clients]`."""
        return self.clients

    def by_node(self, clients: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Node numbers and their clients, for clients `int64 [n]`."""
        yield from ((100 + int(client), clients[[index]]) for index, client in enumerate(clients))

    def draw(self, name: str, share: float) -> np.ndarray:
        """All clients, `int64 [clients]`."""
        return self.clients

    def among(self, clients: np.ndarray, sampler: Section | None = None) -> _Everyone:
        """These cohorts, for any clients `int64 [n]`."""
        return self


def _update(client: int, scale: float = 1.0, examples: int = 3) -> Update:
    random = np.random.default_rng(client)
    with np.errstate(all="ignore"):
        drawn = {
            n: (scale * random.standard_normal(s)).astype(np.float32) for n, s in _SHAPES.items()
        }
    return Update({name: torch.from_numpy(value) for name, value in drawn.items()}, examples, 0.5)


def _answer(
    message: Message, theta: Mapping[str, np.ndarray], updates: Mapping[int, Update | None]
) -> Message | None:
    """Reply of a node; None if its only client left."""
    order = unpack_order(TrainOrder, message.content)
    clients = [] if order.clients is None else order.clients.tolist()
    total = UpdateSum(
        theta, ["item.id"], order.weighting, order.protection, Reproducible(5), order.round
    )
    start = {name: torch.from_numpy(value) for name, value in theta.items()}
    present = {client: update for client in clients if (update := updates[client]) is not None}
    for client, update in present.items():
        total.add_block([client], as_block(start, [update]))
    return Message(pack_sum(total.sum()), reply_to=message) if present else None


def _recording(apply: Any, aggregates: list[Aggregate]) -> Any:
    def wrapped(theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        aggregates.append(aggregate)
        return apply(theta, aggregate)

    return wrapped
