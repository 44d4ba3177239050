# SPDX-License-Identifier: Apache-2.0
"""A node: the clients that it hosts, with their data, model and private state; the training path of
a step, and the number of clients trained at once.

A phone hosts one client; a simulation worker hosts thousands. Client c is on node c mod n, the same
node in every round, so its private state can stay there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from clients.malicious import assigned, malicious_workers
from clients.participation import Participation
from clients.step import Step, Train, keeps_state, private_names
from clients.steps.statistics import SufficientStatistics
from clients.storage import PrivateState, SessionSecrets
from fedrec.components import registry
from fedrec.components.sections import (
    Section,
    component_errors,
    component_of,
    component_settings,
    finite,
    named,
    refuse_wrong,
)
from fedrec.config import did_you_mean, fits
from fedrec.data.population import POPULATIONS, Population
from fedrec.device import products_in, resolve_device
from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import Metrics, user_groups
from fedrec.experiment.schema import FINE_TUNE, EngineConfig, Experiment
from fedrec.models.base import HistoryModel, Model
from fedrec.protocol.messages import EvaluateOrder, ItemQuery, TrainOrder
from fedrec.rng import NoiseSource, source_of, torch_stream

if TYPE_CHECKING:
    from fedrec.secure.identity import Identity


# The training path that a node takes for a step: one of three.
#
# - `kernel`: native code takes all steps of a client in one call, for models that declare a kernel.
# - `blocks`: many clients at once, by autograd over a leading cohort dimension.
# - `reference`: blocks with whole item tables, of one client if it is requested. The other paths
#   are tested against it.

PathName = Literal["kernel", "blocks", "reference"]


@dataclass(frozen=True)
class TrainingPath:
    """A training path.

    Attributes:
        name: `kernel`, `blocks` or `reference`.
        reason: why no faster path was taken; empty if it is the fastest, or was requested.
    """

    name: PathName
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def _training_path(step: Step, model: Model, engine: EngineConfig) -> TrainingPath:
    """The fastest path that a step, a model and the engine's settings allow.

    Item tables that stay on the device take `reference` whatever `engine.path` says; steps that
    train nothing, or one client after the other, take `blocks`.

    Raises:
        ExperimentError: `engine.path` is `kernel`, and the step does not train in native code.
    """
    if engine.path == "reference":
        return TrainingPath("reference")
    kernel = _kernel_of(step)
    if step.generated and isinstance(kernel, str):
        return TrainingPath("blocks")
    if private_names(step, model.item_tables):
        return TrainingPath("reference", "item tables are private")
    if engine.path == "blocks" or isinstance(step, SufficientStatistics):  # nothing is trained
        return TrainingPath("blocks")
    if type(step).batches is Step.batches and step.draw() is None:
        return TrainingPath("blocks", f"step {type(step).__name__} trains one client at a time")
    if not isinstance(kernel, str) and engine.precision == "float32":
        return TrainingPath("kernel")
    refusal = kernel
    if not isinstance(refusal, str):
        refusal = f"the kernel computes in float32, not in {engine.precision}"
    if engine.path == "kernel":
        raise ExperimentError(
            f"{named('step', step)} cannot be trained by the kernel",
            expected="plain SGD on the CPU, in float32, with a model that declares a kernel",
            got=refusal,
            fix="leave out engine.path",
        )
    return TrainingPath("blocks", refusal)


_REPLACED = ("batches", "block", "train_block", "objective", "trained", "settings")
"""What native code does, or reads, itself."""


def _kernel_of(step: Step) -> Train | str:
    """The result of `Step.in_kernel`, unless a subclass overrides a method that the kernel
    replaces."""
    replaced = [name for name in _REPLACED if hasattr(type(step), name)]
    if type(step).in_kernel is Step.in_kernel or registry.covers_overrides(
        type(step), "in_kernel", replaced
    ):
        return step.in_kernel()
    return f"step {type(step).__name__} overrides what the kernel of its base class replaces"


class Node:
    """Everything a node needs to answer messages: clients, model, device, private state.

    Args:
        experiment: the resolved experiment.
        partition: this node's index, in `[0, nodes)`.
        nodes: number of nodes.
        private: folder of the private state; None: no private state (parameters then cannot be
            private).
    """

    real = False
    """Whether its clients are real, and the server is not trusted: a client whose training fails
    counts as zero where its update is protected or masked, and a round is masked once."""
    run = ""
    """Key of the run on real nodes."""
    least_nodes = 0
    """Smallest number of nodes in a sum to which this node contributes; 0: it may send its own sum
    unmasked."""
    identity: Identity | None = None
    """Its certificate for other nodes, and the authority that it checks theirs with."""

    def __init__(
        self, experiment: Experiment, partition: int, nodes: int, private: Path | None
    ) -> None:
        self.experiment = experiment
        self.partition = partition
        self.nodes = nodes
        self.private = PrivateState(private / f"node-{partition}.sqlite") if private else None
        self.uploads = Participation(private / f"uploads-{partition}.sqlite" if private else None)
        self.session_secrets = SessionSecrets(
            private / f"secure-{partition}.sqlite" if private else None
        )
        self.device = resolve_device(experiment.engine.device, experiment.engine.precision)
        if experiment.engine.threads is not None:
            # so that nodes do not compete for cores
            torch.set_num_threads(experiment.engine.threads)

    @property
    def name(self) -> str:
        """Name of the node in errors."""
        return f"node {self.partition}"

    @property
    def named_steps(self) -> dict[str, Section]:
        """All local steps that its clients may be ordered to run, by the key of their settings."""
        return self.experiment.steps()

    def path(self, step: Step) -> TrainingPath:
        """The training path of a step."""
        return _training_path(step, self.model, self.experiment.engine)

    def products(self) -> AbstractContextManager[object]:
        """Context manager that sets the precision of matrix products to that of the experiment."""
        return products_in(self.experiment.engine.precision, self.device)

    @cached_property
    def population(self) -> Population:
        """The clients' data; the nodes of a process share one copy."""
        return POPULATIONS.population(self.experiment)

    @cached_property
    def model(self) -> Model:
        """The model of the experiment."""
        schema = self.population.schema()
        return _check_plugin_model(component_of(registry.MODEL, self.experiment.model, schema))

    @cached_property
    def training(self) -> np.ndarray:
        """`int64 [clients]`, ascending: hosted clients that may be sampled for training."""
        return self._hosted(self.population.training_clients)

    @cached_property
    def evaluated(self) -> np.ndarray:
        """`int64 [clients]`, ascending: hosted clients that have held-out rows."""
        return self._hosted(self.population.evaluated_clients(self.experiment.evaluation.held_out))

    @property
    def validated(self) -> np.ndarray | None:
        """`int64 [clients]`, ascending: hosted clients that have validation rows; None without
        early stopping."""
        if self.experiment.early_stopping is None:
            return None
        return self._hosted(self.population.evaluated_clients("validation"))

    @property
    def work(self) -> np.ndarray | None:
        """`int64 [clients]`, number of training rows of each hosted training client; None if other
        nodes must not train it, because private state of a client stays on its node."""
        compression = self.experiment.compression
        left_out = (
            compression is not None and component_of(registry.COMPRESSION, compression).keeps_error
        )
        if left_out or any(
            keeps_state(self.step(section)) for section in self.named_steps.values()
        ):
            return None
        return self.population.counts(self.training)

    @property
    def paths(self) -> dict[str, str]:
        """The training path of each of the experiment's steps, by the step's name."""
        return {
            section.name: str(self.path(self.step(section)))
            for section in self.named_steps.values()
        }

    def check(
        self,
        order: TrainOrder | EvaluateOrder | ItemQuery,
        arrays: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """Refuse an order, or the parameters that came with it; nodes of a simulation accept all.

        Raises:
            RefusalError: it is refused.
        """

    def accept(self, order: TrainOrder) -> TrainOrder:
        """The order as the node executes it; in a simulation, unchanged."""
        return order

    def hosted(self, clients: np.ndarray | None) -> np.ndarray:
        """The evaluated clients among some of its clients, or among all, `int64 [clients]`,
        ascending."""
        return self.evaluated if clients is None else np.sort(clients)

    def groups(self, clients: np.ndarray) -> dict[str, np.ndarray]:
        """`bool [clients]` per group of users, for means over groups."""
        counts = self.population.counts(clients, "known")
        return user_groups(self.population.interactions, clients, counts)

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics of the experiment."""
        return Metrics(self.experiment.task, self.experiment.evaluation)

    def initial(self) -> dict[str, Tensor]:
        """Initial global parameters: the model's, and those that the experiment's steps add.

        Raises:
            ExperimentError: two steps train a parameter of one name and different shapes, or a
                setting of a step, or of fine-tuning, does not fit the parameters.
        """
        seed = self.experiment.seed
        model = self.model.initial(torch_stream(self.experiment.seed, "init"))
        parameters = dict(model)
        prepared: dict[str, Step] = {}
        tuned = self.experiment.fine_tune_step()
        for key, section in (*self.named_steps.items(), (FINE_TUNE, tuned)):
            with _settings_at(key):
                step = prepared[key] = self.step(section)
                added = step.prepare(parameters, torch_stream(seed, "init-added"))
            if key == FINE_TUNE:  # which adds none
                continue
            for name, value in added.items():
                if parameters.setdefault(name, value).shape != value.shape:
                    raise ExperimentError(
                        f"the experiment's steps disagree about parameter {name!r}",
                        expected=f"the shape {tuple(parameters[name].shape)} in all of them",
                        got=f"{tuple(value.shape)} in step {section.name!r}",
                        fix="give the steps equal settings, such as `hidden`",
                    )
        for key, step in prepared.items():
            with _settings_at(key):
                check_private_patterns(step, list(parameters))
                self.path(step)
        return parameters

    @cached_property
    def fresh(self) -> dict[str, Tensor]:
        """The result of `initial`; must not be changed."""
        return self.initial()

    @cached_property
    def noise(self) -> NoiseSource:
        """The source of the noise that clients add themselves."""
        privacy = self.experiment.privacy
        return source_of("reproducible" if privacy is None else privacy.mode, self.experiment.seed)

    def step(self, section: Section, round_: int | None = None) -> Step:
        """A local step by name and settings, with those of a training round if one is given.

        Raises:
            ExperimentError: it clips its uploads itself, and products are to be rounded, which may
                pass the clip norm.
        """
        cls = registry.resolve(registry.STEP, section.name)
        config = component_settings(registry.STEP, section)
        if round_ is not None:
            config = config.in_round(round_)
        with component_errors("step", cls, "when it was made"):
            step: Step = cls(config, self.model, self.device)
        if config.uploads is not None and self.experiment.engine.precision != "float32":
            raise ExperimentError(
                f"step {section.name!r} clips its uploads, and rounding could take them beyond"
                " the clip norm",
                expected="engine.precision = 'float32'",
                got=f"engine.precision = {self.experiment.engine.precision!r}",
                fix="leave engine.precision out",
            )
        return step

    def workers(
        self, step: Step, clients: np.ndarray, round_number: int
    ) -> Iterator[tuple[Step, np.ndarray]]:
        """The steps that some clients of a training round run, and the clients of each, `int64
        [clients]`: the honest step, and in a simulation with an adversary what its clients do."""
        known = self.population.adversary
        if known is None or not len(known.malicious):
            yield from assigned(step, clients)
            return
        malicious = np.isin(clients, known.malicious)
        yield from assigned(step, clients[~malicious])
        yield from malicious_workers(
            self.experiment, known, self.fresh, step, clients[malicious], round_number
        )

    def _hosted(self, clients: np.ndarray) -> np.ndarray:
        return clients[clients % self.nodes == self.partition]


# Checks of steps and models, whose errors name the file of the component.


def check_private_patterns(step: Step, names: Sequence[str]) -> None:
    """Check that each pattern of private parameters matches one, because the intended parameters
    would be sent otherwise, and that they do not match all, because nothing would be learned
    together.

    Raises:
        ExperimentError: a pattern matches none, or they match all.
    """
    for pattern in step.private:
        if not any(fits(name, (pattern,)) for name in names):
            raise ExperimentError(
                f"no parameter fits the pattern {pattern!r} of 'step.private-parameters'",
                expected="patterns of the model's parameters",
                fix=did_you_mean(pattern, names),
            )
    if step.private and not set(names) - set(private_names(step, names)):
        raise ExperimentError(
            "all parameters are private: 'step.private-parameters' leaves none to share",
            expected="patterns that leave out at least one of the model's parameters",
            got=", ".join(map(repr, step.private)),
            fix=f"the model's parameters are {', '.join(map(repr, names))}",
        )


@contextmanager
def _settings_at(key: str) -> Iterator[None]:
    """Errors about the settings of a step name them by the key of the step's table, such as
    `evaluation.fine-tune.rates` for `step.rates`."""
    try:
        yield
    except ExperimentError as error:
        texts = (error.problem, error.expected, error.got, error.fix)
        problem, *rest = (re.sub(r"\bstep\.", f"{key}.", text or "") or None for text in texts)
        expected, got, fix = rest
        raise ExperimentError(problem or "", expected=expected, got=got, fix=fix) from None


def _check_plugin_model(model: Model) -> Model:
    """A plug-in model, tested once: initial parameters and a few predictions.

    Raises:
        ComponentError: shapes or numbers are wrong.
    """
    if registry.ours(registry.MODEL, type(model)):
        return model
    doing = "in its trial"
    wrong = partial(refuse_wrong, "model", model, doing)
    with component_errors("model", model, doing):
        initial = model.initial(torch.Generator().manual_seed(0))
        tables = initial.values() if isinstance(initial, dict) and initial else [None]
        if not all(isinstance(v, Tensor) and v.dtype == torch.float32 for v in tables):
            wrong(expected="float32 tensors by name from `initial`", got=repr(initial)[:200])
        for name, value in initial.items():
            if not finite(value):
                wrong(expected="finite initial parameters", got=f"others in {name!r}")
        if isinstance(model, HistoryModel):
            return model
        both = {name: value.expand(2, *value.shape).clone() for name, value in initial.items()}
        users = tuple(torch.zeros(2, 1, dtype=torch.int64) for _ in model.schema.user_features)
        with torch.no_grad():
            predicted = model.predict(both, users, torch.zeros(2, 3, dtype=torch.int64))
        shape = (
            tuple(predicted.shape) if isinstance(predicted, Tensor) else type(predicted).__name__
        )
        if shape != (2, 3):
            wrong(expected="predictions [2, 3] for 3 items of 2 clients", got=str(shape))
        if not finite(predicted):
            wrong(expected="finite predictions", got="NaN or infinity")
    return model
