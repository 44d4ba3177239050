# SPDX-License-Identifier: Apache-2.0
"""Systems under attack: training users, canaries, and a trained system as an attacker sees it."""

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from clients.blocks import to_device, update_of
from clients.evaluation import client_scorer, requested_items
from clients.malicious import PlantedStep
from clients.node import Node
from clients.round import train_each
from clients.step import StepConfig, private_names
from clients.steps.descent import Update, one_by_one
from fedrec.components import registry
from fedrec.components.registry import DATASET, MODEL, SPLIT, STEP, STRATEGY, resolve
from fedrec.components.sections import Section, component_of, component_settings, fields_of
from fedrec.config import Config, fits
from fedrec.data.client_data import ClientData
from fedrec.data.interactions import Interactions, Schema, more_ids
from fedrec.data.population import Population
from fedrec.data.reader import Reader, ReaderConfig
from fedrec.data.splits.rules import Partition, Split, partition_by
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.phases import Phase, contributions_of, phases_of, step_table
from fedrec.experiment.schema import Experiment
from fedrec.metrics.ranks import best_items
from fedrec.models.base import HistoryModel, Model, Parameters, Users
from fedrec.models.linear import ProductsModel
from fedrec.models.personal import MetaMf, generate
from fedrec.nn.layers import KernelModel
from fedrec.privacy.accounting.sampling import Adjacency, Contributions
from fedrec.privacy.canaries import CanaryPlan, Directions, Kind
from fedrec.protocol.messages import ItemQuery, TrainOrder
from fedrec.protocol.updates import ClientArrays
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from fedrec.training.block import Block
from fedrec.training.results import BlockUpdate
from simulations.recommending import with_parameters

# Training users of an attack's systems, drawn from the attack's seed, and a split for them.
#
# Held-out users and rows are those of the other split, so that a system under attack is evaluated
# like any other. Training rows of users that are not drawn are not used.
#
# Where this differs from PrivRec section 4.6: there all users of the dataset are shadow users,
# members or others; here the test users of the other split are not attacked.


class TrainingClientsConfig(Config):
    """Settings of a split with other training clients."""

    base: dict[str, Any]
    """The other split: its name and settings."""
    seed: int | None = None
    """Seed of the other split; default: that of the experiment, which differs between the systems
    of an attack."""
    members: str = ""
    """Bit mask of its training clients that train, in base64; default: all."""
    canaries: int = Field(default=0, ge=0)
    """Number of canaries, who train too: the last users, who have no rows."""


class TrainingClients(Split):
    """Split with a part of the training clients of another split, or with canaries in addition."""

    Config = TrainingClientsConfig
    config: TrainingClientsConfig

    @classmethod
    def section(cls, base: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Section with name and settings."""
        return {"name": f"{cls.__module__}:{cls.__name__}", "base": base, **settings}

    @property
    def _base(self) -> tuple[Section, int]:
        """The other split and its seed."""
        seed = self.seed if self.config.seed is None else self.config.seed
        return Section.model_validate(self.config.base), seed

    def depends_on(self, adjacency: Adjacency) -> str:
        """Return the dependence of the other split."""
        return component_of(SPLIT, *self._base).depends_on(adjacency)

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions like the other split, and choose the training clients.

        Raises:
            DataError: see the other split.
            ExperimentError: the number of training clients differs from the number of bits.
        """
        partition = partition_by(*self._base, interactions)
        users = partition.training_clients
        if self.config.members:
            users = users[_members(self.config.members, len(users))]
        canaries = np.arange(interactions.num_users - self.config.canaries, interactions.num_users)
        return replace(partition, training_clients=np.union1d(users, canaries))


def bit_mask(members: np.ndarray) -> str:
    """Bit mask of `members`, `bool [training clients]`, in base64."""
    return base64.b64encode(np.packbits(members).tobytes()).decode()


def _members(mask: str, users: int) -> np.ndarray:
    """Members `bool [users]` of a bit mask."""
    packed = np.frombuffer(base64.b64decode(mask), dtype=np.uint8)
    if len(packed) != -(-users // 8):
        raise ExperimentError(
            "the members of a system were drawn from other users",
            expected=f"a bit for each of {users} training clients",
            got=f"{8 * len(packed)} bits",
            fix="choose another --output",
        )
    return np.unpackbits(packed, count=users).astype(bool)


_USED = 0.8  # share of the shadow users that train the shadow system
_MEMBERS = 0.5  # share of the other users that train the target system


def shadow_parts(users: np.ndarray, shadow_users: int, seed: int) -> list[np.ndarray]:
    """Divide users for the attack of PrivRec (section 4.6).

    Args:
        users: `int64 [users]`, all users.
        shadow_users: number of shadow users of the attacker (paper: 1000).
        seed: seed of the stream `"attack-shadow"`.

    Returns:
        `int64 [n]`, ascending, each: shadow users that train the shadow system, other shadow users,
        users that train the target system, all others.

    Raises:
        ExperimentError: one of the four parts would be empty.
    """
    shuffled = stream(seed, "attack-shadow").permutation(np.sort(users))
    cuts = [
        round(_USED * shadow_users),
        shadow_users,
        shadow_users + round(_MEMBERS * (len(users) - shadow_users)),
    ]
    parts = np.split(shuffled, cuts) if shadow_users < len(users) else []
    if not parts or any(len(part) == 0 for part in parts):
        raise ExperimentError(
            "too few users for the attack",
            expected="shadow users of both kinds, members and others",
            got=f"{len(users)} users, {shadow_users} of them shadow users",
            fix=f"--shadow-users {max(2, len(users) // 3)}",
        )
    return [np.sort(part) for part in parts]


def half_memberships(users: int, runs: int, seed: int) -> np.ndarray:
    """Members of each of an even number of shadow systems, `bool [runs, users]`; every user trains
    exactly half of the systems."""
    order = stream(seed, "attack-halves").random((runs, users)).argsort(axis=0)
    return order.argsort(axis=0) < runs // 2


def half_members(users: int, seed: int) -> np.ndarray:
    """Members of the target system, `bool [users]`: half of the users (rounded down)."""
    member = np.zeros(users, dtype=bool)
    member[stream(seed, "attack-target").permutation(users)[: users // 2]] = True
    return member


# Another model with additional rows in its parameters that nothing depends on, for the canaries of
# an audit.
#
# The catalogue does not change, so the rows of item tables are never drawn as negatives, scored or
# recommended. Those of other parameters are cut off before the model computes anything.


class ReservedConfig(Config):
    """Settings of a model with reserved rows."""

    base: dict[str, Any]
    """The base model: its name and settings."""
    rows: int = Field(ge=1)
    """Number of rows appended to each item table, initially zero; other parameters share this
    number."""
    parameters: tuple[str, ...] = ()
    """Patterns of other parameters that also get rows; they disable training in native code."""


class Reserved(Model):
    """Wrapper that adds rows to the parameters of another model."""

    Config = ReservedConfig
    config: ReservedConfig

    def __init__(self, config: ReservedConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        self.base: Model = component_of(MODEL, Section.model_validate(config.base), schema)
        # item tables of the other model
        self.item_tables = self.base.item_tables  # type: ignore[misc]

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise global parameters `float32`, without the cohort dimension, from `generator` on
        the CPU. The base model's rows have the same values as without reserved rows."""
        parameters = self.base.initial(generator)
        for name, rows in self.room.items():
            table = parameters[name]
            parameters[name] = torch.cat([table, table.new_zeros(rows, *table.shape[1:])])
        return parameters

    @cached_property
    def room(self) -> dict[str, int]:
        """Number of rows added to each parameter that has any; item tables first."""
        others = [
            name
            for name, value in self.base.initial(torch.Generator()).items()
            if value.ndim and name not in self.item_tables and fits(name, self.config.parameters)
        ]
        share = -(-self.config.rows // max(len(others), 1))
        return {**dict.fromkeys(self.item_tables, self.config.rows), **dict.fromkeys(others, share)}

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`."""
        return self.base.predict(self._of_base(parameters), users, items, rows)

    def kernel(self) -> KernelModel | None:
        """Declaration for native code; None if native code does not support the model."""
        return self.base.kernel() if set(self.room) <= set(self.item_tables) else None

    def loss(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean loss over the last dimension, `[C, B] -> [C]`: cross-entropy (PrivRec eq. 2) or
        squared error."""
        return self.base.loss(predictions, labels, weights)

    def scores(self, parameters: Parameters, users: Users) -> Tensor:
        """Scores of the whole catalogue for each slice of the cohort dimension,
        `[C, num_items]`."""
        scores = self.base.scores(self._of_base(parameters), users)
        return scores[:, : self.schema.num_items]  # some models score every row of a table

    def _of_base(self, parameters: Parameters) -> Parameters:
        """Parameters `[C, ...]` without reserved rows, except item tables, which may be compact."""
        cut = {name: rows for name, rows in self.room.items() if name not in self.item_tables}
        return {
            name: value[:, : -cut[name]] if name in cut else value
            for name, value in parameters.items()
        }


# The step of audits: canaries upload fixed updates, all other clients run another step.
#
# Sampler, clip, sum and noise treat a canary like any other client, and these are what an audit
# tests. The other clients do exactly the same as without an audit, in blocks if their step supports
# it. Symmetric matrices are summed as whole squares, as their noise is measured in the
# antisymmetric part (`fedrec.privacy.canaries`).


EXAMPLES = 1000
"""Number of examples that a canary reports, to test that weights do not depend on it."""


class CanaryConfig(StepConfig):
    """Settings of a step with canaries; all further keys are settings of the other step."""

    model_config = ConfigDict(extra="allow")

    base: str = "sgd"
    """Name of the other step."""
    canaries: CanaryPlan
    """Canaries and their uploads."""

    @model_validator(mode="after")
    def _settings_of_the_other_step_are_right(self) -> Self:
        self.other()
        return self

    def other(self) -> StepConfig:
        """Settings of the other step.

        Raises:
            ExperimentError: a setting is unknown or wrong.
        """
        section = Section.model_validate(
            {**(self.model_extra or {}), "name": self.base, "epochs": self.epochs}
        )
        return component_settings(registry.STEP, section, at="step")

    @property
    def contributions(self) -> Contributions:
        """Kind of contributions of the other step, and so of the canaries."""
        return registry.resolve(registry.STEP, self.base).contributions

    @property
    def uploads(self) -> int | None:
        """Largest number of rounds per client, enforced by its device; None: unlimited."""
        return self.other().uploads


class Canary(PlantedStep):
    """Step that uploads fixed updates for the canaries; all other clients run another step.

    Raises:
        ExperimentError: a setting of the other step is wrong.
    """

    Config = CanaryConfig
    paper = "Steinke et al. 2023; Andrew et al. 2023"
    config: CanaryConfig

    def __init__(self, config: CanaryConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        self.base = registry.resolve(registry.STEP, config.base)(config.other(), model, device)
        self.private = self.base.private
        self._directions: Directions | None = None

    def is_planted(self, clients: np.ndarray) -> np.ndarray:
        """Which clients are canaries, `bool [clients]`."""
        plan = self.config.canaries
        return (clients >= plan.first) & (clients < plan.first + plan.count)

    def train_block(
        self,
        parameters: Mapping[str, Tensor],
        block: Block,
        client_params: Mapping[str, Tensor] | None = None,
    ) -> BlockUpdate:
        """Return the fixed updates of a block of canaries."""
        return one_by_one(parameters, block, client_params, self._fixed)

    def _fixed(
        self, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
    ) -> Update:
        plan = self.config.canaries
        delta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        if self._directions is None:
            shapes = {name: tuple(value.shape) for name, value in parameters.items()}
            self._directions = Directions(plan, getattr(self.model, "room", {}), shapes)
        for name, (positions, values) in self._directions.upload(data.client).items():
            flat = delta[name].view(-1)
            flat[torch.from_numpy(positions).to(flat.device)] = torch.from_numpy(values).to(flat)
        return Update(delta, EXAMPLES)

    def prepare(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """Prepare the other step."""
        return self.base.prepare(parameters, generator)


# The canary clients of an audit in the data: another dataset with users without rows and features
# added, and items that no user has; and another split in which these users train.


class CanaryUsersConfig(ReaderConfig):
    """Settings of a dataset with canaries; `path` and `verify` are those of the other dataset,
    below `base`."""

    base: dict[str, Any]
    """The other dataset: its name and settings."""
    count: int = Field(ge=1)
    """Number of users added; their indices follow those of the others."""
    items: int = Field(default=0, ge=0)
    """Number of items added; their indices follow those of the others."""


class CanaryUsers(Reader):
    """Reader that adds users without rows to another dataset."""

    Config = CanaryUsersConfig
    title = "another dataset and canary users; for `fedrec audit`"
    config: CanaryUsersConfig

    def read(self) -> Interactions:
        """Read the other dataset and add users and items.

        Raises:
            DataError: see the other dataset.
        """
        data: Interactions = self._base().read()
        users = self.config.count
        items = self.config.items
        return replace(
            data,
            user_ids=more_ids(data.user_ids, users, "canary"),
            user_features=data.user_features.extended(np.full(users, -1)),
            item_ids=more_ids(data.item_ids, items, "canary"),
            item_features=data.item_features.extended(np.full(items, -1)),
        )

    def files(self) -> list[Path]:
        return self._base().files()

    def _base(self) -> Reader:
        section = Section.model_validate(self.config.base)
        settings = component_settings(DATASET, section, at="dataset.base")
        return resolve(DATASET, section.name)(section.name, settings)


# The audited experiment: the given one with canary clients.
#
# It has k more users in its dataset, who train in its split, k more rows in its model's item
# tables, and in each audited phase a step that sets the canaries' updates. Where clients send one
# number per item, the catalogue also has 2k items that no user has.


def kind_of(phase: Phase) -> Kind:
    """Kind of updates that clients send in a phase."""
    if contributions_of(phase.step) == "signed":
        return "signed"
    outer = getattr(resolve(STEP, str(phase.step["name"])), "outer", False)
    return "products" if outer else "rows"


def changes_for(experiment: Experiment, plans: Mapping[str, CanaryPlan]) -> dict[str, Any]:
    """Changed sections of an experiment with canary clients.

    Args:
        experiment: the experiment, resolved.
        plans: the canaries of each phase, equally many.
    """
    count = next(iter(plans.values())).count
    items = 2 * count if any(plan.kind == "rows" for plan in plans.values()) else 0
    phases = phases_of(experiment)

    def planted(step: Section) -> Section:
        """Add the canaries of its phases to a step; unchanged if no phase has it."""
        chosen = [plans[phase.name] for phase in phases if phase.has_step(step_table(step))]
        if not chosen:
            return step
        plan = max(chosen, key=lambda plan: plan.magnitude)
        options = {"name": f"{__name__}:Canary", "base": step.name, "canaries": plan.table()}
        return Section.model_validate({**step.options, **options})

    changes = {
        "dataset": {
            "name": f"{__name__}:CanaryUsers",
            "base": step_table(experiment.dataset),
            "count": count,
            "items": items,
        },
        "split": TrainingClients.section(step_table(experiment.split), canaries=count),
        "model": _with_rows(experiment, plans),
        "step": step_table(planted(experiment.step)),
    }
    settings = experiment.settings(STRATEGY)
    if isinstance(settings, Config):
        changed = _with_steps(settings, planted).table()
        changes["strategy"] = {"name": experiment.strategy.name, **changed}
    return changes


def _with_rows(experiment: Experiment, plans: Mapping[str, CanaryPlan]) -> dict[str, Any]:
    """Model with rows for the canaries; models of histories have no item tables. Products cover as
    many items as without canaries."""
    base = step_table(experiment.model)
    model = resolve(MODEL, experiment.model.name)
    if issubclass(model, ProductsModel):
        most = Population.of(experiment).interactions.num_items
        base["items"] = min(component_settings(MODEL, experiment.model).items, most)
    if issubclass(model, HistoryModel):
        return base
    signed = [plan for plan in plans.values() if plan.kind == "signed"]
    patterns = sorted({pattern for plan in signed for pattern in plan.parameters})
    count = next(iter(plans.values())).count
    name = f"{__name__}:Reserved"
    return {"name": name, "base": base, "rows": count, "parameters": patterns}


def _with_steps(settings: Config, planted: Callable[[Section], Section]) -> Config:
    """Settings of a strategy with other steps, also in nested strategies."""
    changes: dict[str, Any] = {}
    for name, kind, value in fields_of(settings):
        if kind is STEP:
            changes[name] = planted(value)
        elif kind is STRATEGY:
            inner = component_settings(STRATEGY, value)
            if isinstance(inner, Config):
                table = _with_steps(inner, planted).table()
                changes[name] = Section.model_validate({"name": value.name, **table})
        elif isinstance(value, Config) and not isinstance(value, Section):
            changes[name] = _with_steps(value, planted)
    return settings.model_copy(update=changes)


# A trained system from an attacker's view: parameters, scores, lists, and clients' updates.

_BLOCK = 256  # users whose scores or generated parameters are in memory at a time


class TrainedSystem:
    """A trained system under attack.

    Args:
        experiment: the attacked experiment; its data, model, `engine.device` and `engine.threads`
            are used.
        run: the run.
        members: `int64 [n]`, ascending: the users who trained it.
    """

    def __init__(self, experiment: Experiment, run: RunFolder, members: np.ndarray) -> None:
        self.experiment = experiment
        self.run = run
        self.members = members

    @cached_property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """Final global parameters of the run, read-only.

        Raises:
            RunError: the checkpoint is missing.
        """
        parameters = with_parameters(self.run.read_result()).parameters
        if not parameters:
            fix = "remove the folder and start again"
            raise RunError(f"{self.run.path} has no checkpoint", fix=fix)
        for value in parameters.values():
            value.setflags(write=False)
        return parameters

    def scores(
        self, users: np.ndarray, *, fine_tune: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Scores of the catalogue.

        Args:
            users: `int64 [users]`.
            fine_tune: whether each user first fine-tunes on its own data, as in the experiment's
                evaluation.

        Yields:
            A block of the users, and `float32 [block, items]`.

        Raises:
            ExperimentError: the system has private parameters.
        """
        node = self._node
        tuned = self.experiment.fine_tune_step()
        untuned = Section.model_validate({**tuned.options, "name": tuned.name, "epochs": 0})
        step = node.step(tuned if fine_tune else untuned)
        if private := private_names(step, self.parameters):
            raise ExperimentError(
                f"systems with private parameters ({', '.join(private)}) cannot be attacked",
                fix="--set step.private-parameters=[]",
            )
        scores_of = client_scorer(node, step, self._tensors, self.experiment.rounds)
        for start in range(0, len(users), _BLOCK):
            part = users[start : start + _BLOCK]
            if isinstance(node.model, MetaMf):
                scores = _generated_scores(node, self._tensors, part)
            else:
                scores = scores_of(part)
            yield part, scores.cpu().numpy()

    def lists(self, users: np.ndarray, length: int, *, as_shown: bool = False) -> np.ndarray:
        """Recommendation lists, `int64 [users, length]`, best item first.

        Args:
            users: `int64 [users]`.
            length: items in a list, at most those of the catalogue.
            as_shown: whether to return the lists that users see: fine-tuned, and without items of
                their real training rows.
        """
        population = self._node.population
        codes = population.feature_codes(users)
        # Users with equal features are made adjacent, because those of a block are scored once.
        order = np.lexsort(np.concatenate(codes, axis=1).T) if codes else np.arange(len(users))
        blocks = []
        for part, scores in self.scores(users[order], fine_tune=as_shown):
            if as_shown:
                held_out = population.held_out(part, self.experiment.evaluation.held_out)
                scores = np.where(held_out.known, -np.inf, scores)
            best = best_items(torch.from_numpy(scores), min(length, scores.shape[1]))
            blocks.append(best.numpy())
        return np.concatenate(blocks)[np.argsort(order)]

    def updates(self, users: np.ndarray) -> Iterator[np.ndarray]:
        """Yield descriptions of clients' uploads in one more round, `float32 [columns]`: norms of
        row changes of tables and matrices, changes of vectors. Changed rows and their norms are
        most informative; directions are omitted for brevity.

        Args:
            users: `int64 [users]`.
        """
        node = self._node
        if isinstance(node.model, MetaMf):
            for table in _generated_updates(node, self._tensors, users):
                yield np.concatenate(list(table.values()))
            return
        step = node.step(self.experiment.step)
        private = set(private_names(step, self.parameters))
        names = [name for name in self.parameters if name not in private]
        for user in users.tolist():
            drawn = stream(self.experiment.seed, "client", user, self.experiment.rounds + 1)
            delta = update_of(step, self._tensors, node.population.client(user), drawn).delta
            parts = [
                delta[name].norm(dim=-1).flatten() if delta[name].dim() > 1 else delta[name]
                for name in names
            ]
            yield np.concatenate([part.cpu().numpy() for part in parts])

    @cached_property
    def _node(self) -> Node:
        """Node with all clients of the attacked experiment."""
        return Node(self.experiment, 0, 1, None)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        copies = {name: value.copy() for name, value in self.parameters.items()}
        return to_device(copies, self._node.device)


def _generated_scores(node: Node, parameters: Mapping[str, Tensor], users: np.ndarray) -> Tensor:
    """Scores of the catalogue, `float32 [users, items]`, with each user's generated parameters."""
    with torch.no_grad():
        values, low = generate(parameters, torch.from_numpy(users.copy()).to(node.device), None)
        return node.model.scores({**values, "item.low": low}, ())


def _generated_updates(
    node: Node, parameters: Mapping[str, Tensor], users: np.ndarray
) -> Iterator[dict[str, np.ndarray]]:
    """Yield each client's upload, by name: updates of its generated parameters."""
    rows = node.population.interactions.num_items
    round_ = node.experiment.rounds + 1
    step = step_table(node.experiment.step)
    for part in np.array_split(users, -(-len(users) // _BLOCK)):
        clients = np.sort(part)
        requests = requested_items(node, ItemQuery(round_, clients, "train", step))
        with torch.no_grad():
            values, low = generate(parameters, torch.from_numpy(requests.clients), requests)
        sent = ClientArrays(
            requests,
            {name: value.numpy() for name, value in values.items()},
            {"item.low": low.numpy()},
        )
        order = TrainOrder(round_, clients, step=step, each=True)
        updates = train_each(node, sent.arrays(), order).updates
        for client in part.tolist():
            update = updates.take(np.searchsorted(clients, [client]))
            tables = {name: np.zeros(rows, dtype=np.float32) for name in update.rows}
            for name, gradient in update.rows.items():
                tables[name][update.requests.items] = np.linalg.norm(gradient, axis=-1)
            heads = {
                n: v[0] if v.ndim < 3 else np.linalg.norm(v[0], axis=-1)
                for n, v in update.values.items()
            }
            yield heads | tables
