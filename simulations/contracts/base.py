# SPDX-License-Identifier: Apache-2.0
"""Base of all contracts: a small experiment with the component, and checks of its name and
settings; and the contracts that share their tests: of samplers, callbacks, mechanisms,
perturbations, compressions and poisoning attacks."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_equal

from fedrec.components.registry import (
    ATTACK,
    BASELINE,
    CALLBACK,
    COMPRESSION,
    MECHANISM,
    METRIC,
    PERTURBATION,
    POISONING,
    SAMPLER,
    Kind,
    resolve,
)
from fedrec.components.sections import Section, component_settings
from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import TrainingData
from fedrec.data.population import Known, Population, read_interactions
from fedrec.data.splits.rules import partition_by
from fedrec.errors import ComponentError
from fedrec.experiment.schema import Experiment, load
from fedrec.protocol.updates import SparseUpdate
from fedrec.rng import Reproducible, stream
from fedrec.runs.folder import Result
from server.callbacks import Callback
from simulations import runner

if not __debug__:  # every contract would pass
    raise ComponentError(
        "contract tests check nothing without assertions",
        expected="Python with assertions",
        got="python -O, or the environment variable PYTHONOPTIMIZE",
        fix="run pytest without them",
    )

SMALL: dict[str, Any] = {
    "name": "contract",
    "rounds": 2,
    "positive-above": 3.0,
    "dataset": {
        "name": "synthetic",
        "users": 24,
        "items": 30,
        "mean-interactions": 8,
        "min-interactions": 4,
    },
    "split": {"name": "user-holdout", "test-users": 0.25},
    "model": {"name": "privrec", "embedding": 4, "hidden": [8]},
    "step": {"name": "sgd", "epochs": 1, "batch-size": 8},
    "sampler": {"name": "fixed-size", "cohort": 6},
    "evaluation": {"users": 4, "ks": [5], "baselines": [], "fine-tune": {"epochs": 0}},
    "engine": {"name": "serial", "nodes": 2, "threads": 1, "device": "cpu"},
}


class Contract:
    """Base of the contracts. A subclass names the component and, if needed, settings.

    Attributes:
        component: the class, or a name shown by `fedrec list`.
        settings: its settings, as in TOML.
        experiment: sections that replace those of the small experiment, such as the model of a step
            that trains only one model.
        random: whether its result depends on the seed.
    """

    component: ClassVar[Any]
    settings: ClassVar[Mapping[str, Any]] = {}
    experiment: ClassVar[Mapping[str, Any]] = {}
    random: ClassVar[bool] = True
    kind: ClassVar[Kind]

    @property
    def cls(self) -> type:
        """The component's class."""
        return (
            resolve(self.kind, self.component)
            if isinstance(self.component, str)
            else self.component
        )

    def section(self) -> dict[str, Any]:
        """The component's section of an experiment."""
        name = self.component
        path = name if isinstance(name, str) else f"{name.__module__}:{name.__qualname__}"
        return {
            "name": path,
            **{key.replace("_", "-"): value for key, value in self.settings.items()},
        }

    def config(self, **others: Any) -> Any:
        """The component's validated settings, with replacements."""
        section = Section.model_validate({**self.section(), **others})
        return component_settings(self.kind, section)

    def _placed(self) -> dict[str, Any]:
        """Sections of an experiment with the component; empty for a baseline or metric, which
        `[evaluation]` names, or for an attack."""
        named_elsewhere = self.kind in (ATTACK, BASELINE, METRIC)
        return {} if named_elsewhere else {self.kind.key: self.section()}

    def small(self, *overrides: str, **sections: Any) -> Experiment:
        """The small experiment with the component in it."""
        table = {**copy.deepcopy(SMALL), **copy.deepcopy(dict(self.experiment)), **self._placed()}
        return load(
            {**table, **{name.replace("_", "-"): value for name, value in sections.items()}},
            overrides,
        )

    def test_every_setting_has_a_description(self) -> None:
        """Check that each field of the configuration has a docstring."""
        config = getattr(self.cls, "Config", Config)
        described = config.descriptions()
        bare = [name for name in config.model_fields if name not in described]
        assert not bare, f"missing docstring below {', '.join(bare)} of {config.__name__}"


class RunContract(Contract):
    """Base of the contracts of components that are tested in whole runs."""

    _plain: ClassVar[Result]

    def test_a_run_is_a_function_of_its_seed(self, tmp_path: Path) -> None:
        """Check that one seed gives the same bits, also after an interruption and resumption after
        two of three rounds."""
        whole = self.run(tmp_path / "whole", "rounds=3").parameters
        with pytest.raises(KeyboardInterrupt):
            self.run(tmp_path / "broken", "rounds=3", callbacks=[_BreakOff()])
        resumed = runner.resume(tmp_path / "broken").parameters
        if not same_bits(whole, resumed):
            again = self.run(tmp_path / "again", "rounds=3").parameters
            assert same_bits(whole, again), "two runs with one seed end with different parameters"
            pytest.fail("a resumed run ends with different parameters; is its state saved?")

    def plain(self, folder: Path) -> Result:
        """Run the small experiment unchanged, once for all tests."""
        if "_plain" not in vars(type(self)):
            type(self)._plain = self.run(folder / "plain")
        return type(self)._plain

    def run(self, folder: Path, *overrides: str, callbacks: Any = ()) -> Result:
        """Run the small experiment with this component, evaluated only at its end."""
        small = self.small("evaluation.every=0", *overrides)
        return runner.run(small, output=folder, callbacks=callbacks)


class _BreakOff(Callback):
    """Callback that interrupts a run (as Ctrl-C does) after the second round."""

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        if row["round"] == 2:
            raise KeyboardInterrupt
        return False


def assert_numbers(values: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    """Fail unless a tensor `[*shape]` has this shape and no NaN; `what` names it in the text."""
    assert_equal(tuple(values.shape), shape, f"shape of {what}")
    assert not bool(values.isnan().any()), f"{what} has NaN values"


def assert_seeded(
    made: Callable[[int], Any], same: Callable[[Any, Any], bool], random: bool = True
) -> None:
    """Fail unless one seed gives the same result twice, and another seed a different one.

    Args:
        made: computes the result of a seed.
        same: whether two results are equal.
        random: whether the seed must make a difference.
    """
    first = made(0)
    assert same(first, made(0)), "one seed gives two results"
    assert not random or not same(first, made(1)), "the seed makes no difference"


@contextmanager
def unchanged(arrays: Mapping[str, Any]) -> Iterator[None]:
    """Check that the block does not change arrays or tensors in place; None is ignored."""
    now = {name: np.asarray(value) for name, value in arrays.items() if value is not None}
    before = {name: np.copy(value) for name, value in now.items()}
    yield
    changed = [n for n, v in now.items() if not np.array_equal(v, before[n], equal_nan=True)]
    assert not changed, f"changed in place: {changed}"


def columns_of(rows: Interactions) -> dict[str, np.ndarray]:
    """Columns of interactions that are not None."""
    columns = {name: getattr(rows, name) for name in ("users", "items", "ratings", "times")}
    return {name: values for name, values in columns.items() if values is not None}


def same_bits(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return True if named arrays are equal, with NaN equal to NaN."""
    return set(first) == set(second) and all(
        np.array_equal(np.asarray(first[name]), np.asarray(second[name]), equal_nan=True)
        for name in first
    )


def assert_close(
    arrays: Mapping[str, Any], wanted: Mapping[str, Any], what: str, rtol: float = 1e-4
) -> None:
    """Fail unless named arrays are equal up to rounding, relative to an array's largest number."""
    for name, other in wanted.items():
        expected = np.asarray(other, dtype=np.float64)
        atol = 2e-6 * max(1.0, float(np.nanmax(np.abs(expected), initial=0.0)))
        value = np.asarray(arrays[name], dtype=np.float64)
        assert_allclose(value, expected, rtol, atol, err_msg=f"{what}: {name!r} differs")


_CLIENTS = 2 * np.arange(40) + 7
_SIZE = 1000


class _OtherContract(RunContract):
    """Base of these contracts: a component is created from its settings, gives the same result for
    the same seed, alone and in a resumed run, and does not change its input."""

    @abstractmethod
    def _applied(self, seed: int) -> dict[str, np.ndarray]:
        """Result of a new component with a seed, as named arrays."""

    def test_it_is_a_function_of_its_seed_and_changes_no_input(self) -> None:
        """Check for equal results with one seed, and, if `random`, different ones with another."""
        assert_seeded(self._applied, same_bits, self.random)


class SamplerContract(_OtherContract):
    """Contract of a sampler: subclass it and set `component` to a `Sampler`."""

    kind = SAMPLER

    def _applied(self, seed: int) -> dict[str, np.ndarray]:
        clients = _CLIENTS.copy()
        sampler = self.cls(self.config(), clients, seed)
        with unchanged({"clients": clients}):
            return {str(number): sampler.sample(number) for number in range(1, 9)}


class CallbackContract(_OtherContract):
    """Contract of a callback: subclass it and set `component` to a `Callback`."""

    kind = CALLBACK
    random = False

    def _placed(self) -> dict[str, Any]:
        """Section with the list of callbacks."""
        return {"callbacks": [self.section()]}

    def _applied(self, seed: int) -> dict[str, np.ndarray]:
        row = {"round": 1, "loss": 0.5, "hits@5": 0.25}
        before = dict(row)
        stops = self.cls(self.config()).after_round(row, 0.1)
        assert_equal(row, before, "the row of a round")
        return {"stops": np.array(bool(stops))}


class MechanismContract(_OtherContract):
    """Contract of a mechanism: subclass it and set `component` to a `Mechanism`."""

    kind = MECHANISM

    def _placed(self) -> dict[str, Any]:
        """Section `[privacy]` with the mechanism."""
        table = {"clip-norm": 1.0, "noise-multiplier": 1.0, "mechanism": self.section()}
        return {"privacy": table}

    def _applied(self, seed: int) -> dict[str, np.ndarray]:
        mechanism = self.cls(self.config(), self.section()["name"])
        memory: dict[str, np.ndarray] = {}
        return {
            str(number): mechanism.draw("x", _SIZE, memory, Reproducible(seed), number)
            for number in range(1, 5)
        }


class PerturbationContract(_OtherContract):
    """Contract of a perturbation: subclass it and set `component` to a `Perturbation`."""

    kind = PERTURBATION

    def _data(self) -> TrainingData:
        """Training rows of the small experiment."""
        experiment = self.small()
        interactions = read_interactions(experiment)
        split = partition_by(experiment.split, 0, interactions)
        rated = experiment.task == "rating" or experiment.positive_above is not None
        return TrainingData(interactions.with_rows(split.train_rows), split.training_clients, rated)

    def _applied(self, seed: int) -> dict[str, np.ndarray]:
        data = self._data()
        with unchanged(columns_of(data.rows)):
            return columns_of(self.cls(self.config(), seed).perturb(data).rows)


class CompressionContract(_OtherContract):
    """Contract of a compression: subclass it and set `component` to a `Compression`."""

    kind = COMPRESSION
    random = False

    def _applied(self, seed: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        table = random.normal(size=(6, 16)).astype(np.float32)
        rows = np.array([1, 4, 5, 17, 36, 299])
        change_of_rows = SparseUpdate((300, 16), rows, table)
        codec = self.cls(self.config())
        sent: dict[str, np.ndarray] = {}
        with unchanged({"values": table, "rows": rows}):
            for name, change in (("all", table), ("rows", change_of_rows)):
                payload = codec.encode(change, stream(seed, "client"))
                sent |= {f"{name}/{key}": value for key, value in payload.items()}
        return sent


class PoisoningContract(_OtherContract):
    """Contract of a poisoning attack: subclass it and set `component` to a `Poisoning`."""

    kind = POISONING
    random = False

    def _placed(self) -> dict[str, Any]:
        """Section of the adversary, with the component as its attack."""
        return {"adversary": {"attack": self.section(), "share": 0.23, "targets": 2}}

    def _known(self) -> Known:
        """The adversary of the small experiment."""
        known = Population.of(self.small()).adversary
        if known is None:
            pytest.fail("the experiment has no adversary")
        return known

    def _applied(self, seed: int) -> dict[str, np.ndarray]:
        known = self._known()
        attack = self.cls(self.config())
        with unchanged({"malicious": known.malicious}):
            return {
                str(client): np.asarray(attack.profile(known, stream(seed, "contract", client)))
                for client in known.malicious.tolist()
            }
