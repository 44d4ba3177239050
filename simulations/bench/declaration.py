# SPDX-License-Identifier: Apache-2.0
"""What the bench consists of: `bench.toml`, and files of contributed systems of the same form."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field, model_validator

from fedrec.config import Config, did_you_mean
from fedrec.errors import ExperimentError
from fedrec.runtime.files import read_toml

FILE = Path(__file__).with_name("bench.toml")
CONTRIBUTED = Path(__file__).with_name("contributed")
_NAME = r"^[a-z0-9][a-z0-9-]*$"


class BenchProtocol(Config):
    """Which rows train, and which are tested."""

    title: str
    """Name in tables."""
    about: str
    """What is held out, in sentences."""
    split: dict[str, Any]
    """The split with its settings; `{order}` of the dataset and `{role}` of validation users are
    filled in."""


class BenchDataset(Config):
    """A dataset, and how long systems train on it."""

    title: str
    """Name in tables."""
    dataset: dict[str, Any]
    """The dataset with its settings."""
    order: str = "temporal"
    """Order in which a user's last row is the one that is left out; `random` without times."""
    rounds: int = Field(ge=1)
    """Rounds of systems that train in rounds with a part of the clients."""
    cohort: int = Field(ge=1)
    """Clients in each of these rounds."""
    slower: float = Field(default=1.0, gt=0)
    """About how many times as long as on MovieLens-100K a run takes."""


class BenchSystem(Config):
    """A system: an experiment, and the settings that are searched."""

    title: str
    """Name in tables."""
    paper: str = ""
    """Who proposed it, and when."""
    experiment: str = ""
    """Name of a shipped experiment, or a TOML file beside the file of the system. Its model, step,
    strategy, sampler, privacy and on-device fine-tuning count; the protocol sets all else."""
    baseline: str = ""
    """Instead of an experiment: a centralised system, without clients."""
    package: str = ""
    """Installed package that brings its components, where these are not fedrec's own."""
    set: tuple[str, ...] = ()
    """Overrides of the experiment; `{rounds}` and `{cohort}` of the dataset are filled in."""
    protocols: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Further overrides, by protocol."""
    candidates: tuple[tuple[str, ...], ...] = ()
    """Settings that are searched, as overrides; none where the system has no settings."""
    chosen: dict[str, int] = Field(default_factory=dict)
    """Place of the candidate that the search chose, from 0, by protocol; the first one, and no
    search is claimed, where a protocol is not named."""
    private: str = ""
    """Parameters that a device keeps, and without which it cannot rank for its user."""
    serves: dict[str, str] = Field(default_factory=dict)
    """How users who were in no round are served, by protocol; `cannot: ...` where they are not."""
    missing: dict[str, str] = Field(default_factory=dict)
    """Why cells are missing, by pattern of `DATASET/PROTOCOL`: `cannot: ...` or
    `too large here: ...`."""
    seconds: float = Field(default=60.0, gt=0)
    """About how long a run on MovieLens-100K takes, on one core."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if bool(self.experiment) == bool(self.baseline):
            raise ValueError("experiment or baseline, and not both")
        return self


class BenchCell(NamedTuple):
    """A dataset, a protocol and a system, by their names."""

    dataset: str
    protocol: str
    system: str

    @property
    def key(self) -> str:
        """`DATASET/PROTOCOL/SYSTEM`."""
        return "/".join(self)


class Bench(Config):
    """All of it."""

    seeds: int = Field(ge=1)
    """Seeds of a cell, or folds of users."""
    budget: int = Field(ge=1)
    """Number of candidates that the search compares for each system that has settings."""
    searched: str
    """Dataset on whose validation rows candidates are compared."""
    searched_by: str
    """Metric that decides."""
    protocols: dict[str, BenchProtocol]
    datasets: dict[str, BenchDataset]
    systems: dict[str, BenchSystem]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for name, system in self.systems.items():
            if len(system.candidates) not in (0, self.budget):
                raise ValueError(f"{self.budget} candidates of {name}, as of all, or none")
            for protocol in (*system.protocols, *system.chosen, *system.serves):
                if protocol not in self.protocols:
                    raise ValueError(f"protocols of {name} among {', '.join(self.protocols)}")
            if any(place >= len(system.candidates) for place in system.chosen.values()):
                raise ValueError(f"places of candidates in chosen of {name}")
        return self

    def cells(self, *asked: str | None) -> Iterator[BenchCell]:
        """The cells of a dataset, protocol and system, each of them all where it is None or not
        given, in the order of the declaration.

        Raises:
            ExperimentError: there is no such dataset, protocol or system.
        """
        axes = {"dataset": self.datasets, "protocol": self.protocols, "system": self.systems}
        names = []
        for (axis, known), name in zip(axes.items(), (*asked, None, None, None), strict=False):
            if name is not None and name not in known:
                raise ExperimentError(
                    f"the bench has no {axis} {name!r}",
                    expected="one of " + ", ".join(known),
                    got=name,
                    fix=did_you_mean(name, known),
                )
            names.append(known if name is None else [name])
        for dataset in names[0]:
            for protocol in names[1]:
                yield from (BenchCell(dataset, protocol, system) for system in names[2])

    def reason(self, cell: BenchCell) -> str:
        """Why a cell is not to be run; empty: it is."""
        place = f"{cell.dataset}/{cell.protocol}"
        known = self.systems[cell.system].missing.items()
        return next((why for pattern, why in known if fnmatchcase(place, pattern)), "")


def contributed() -> list[Path]:
    """The declarations of contributed systems, `NAME/system.toml`; beside each lie its
    `results.json` and its experiment."""
    return sorted(CONTRIBUTED.glob("*/system.toml"))


@cache
def bench(*further: Path) -> Bench:
    """The bench, with contributed systems and those of further files.

    Args:
        further: TOML files with `[systems.NAME]` tables; their experiments lie beside them.

    Raises:
        ExperimentError: a file cannot be read, a key is unknown or a value wrong, or a system has a
            name that is taken.
    """
    table = read_toml(FILE, ExperimentError)
    for file in (*contributed(), *further):
        more = read_toml(file, ExperimentError)
        _refuse_other_tables(file, more, table["systems"])
        for name, system in more["systems"].items():
            BenchSystem.parse(system, at=f"systems.{name}")  # whose errors name its keys
            beside = file.resolve().parent / str(system.get("experiment", ""))
            known = {"experiment": str(beside)} if beside.suffix == ".toml" else {}
            table["systems"][name] = {**system, **known}
    return Bench.parse(table)


def _refuse_other_tables(file: Path, more: dict[str, Any], taken: dict[str, Any]) -> None:
    named = more.get("systems")
    if not isinstance(named, dict) or not all(isinstance(one, dict) for one in named.values()):
        named = {}
    strange = sorted(more.keys() - {"systems"})
    twice = sorted(named.keys() & taken.keys())
    if strange or twice or not named:
        raise ExperimentError(
            f"{file} declares no system of its own" if not named else f"{file} changes the bench",
            expected="[systems.NAME] tables with new names, and nothing else",
            got=", ".join([*strange, *twice]) or "none",
            fix="give the system another name; protocols and datasets are the bench's",
        )
