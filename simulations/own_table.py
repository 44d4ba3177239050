# SPDX-License-Identifier: Apache-2.0
"""Experiment of `fedrec run --data` on a user's own table: its system, settings and epsilons.

Models that represent users by features cannot learn from data without side features. The linear
item-to-item model represents a user by its items, in two federated rounds in which every client
uploads once (counts, then products). It is trained unless ALS in rounds or popularity is
better on validation users (`default_system`), and compared with popularity and centralised EASE. A
fifth of the users are test users, each with one half of its items held out: the later one where the
table has times, and then the baseline `transitions` measures the benefit of the order of items, or
else a random one. A tenth are validation users for tuning (`--set
evaluation.held-out=validation`) and for early stopping (`[early-stopping]`): if popularity scores
better on them than the model, popularity is used.

Under privacy, and with dense vectors of the items, the second round is that of `fold-in`: item
embeddings from the sums, to which each device fits its user's taste. Clip norms follow from the
mean number of rows per user, as sparse users need less noise; where noise would cover what can be
learned from products (`simulations.table_facts`), the first round alone is run: private
popularity with the whole budget. What settings take from the table is in
`simulations.table_facts`.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedrec.components import registry
from fedrec.components.registry import DATASET
from fedrec.config import did_you_mean
from fedrec.data.population import POPULATIONS, Population
from fedrec.data.readers.table import Table
from fedrec.data.recognition import ROLES, Recognised, recognise
from fedrec.errors import DataError, ExperimentError
from fedrec.experiment.loading import load, read
from fedrec.experiment.schema import Experiment
from fedrec.privacy.personal import PersonalNoise, epsilon_table
from fedrec.runs.ids import runs_directory, stamp
from fedrec.runs.result import Result
from fedrec.runtime.files import require_new_folder, write_atomically
from server.callbacks.base import Callback
from server.privacy.personal_budgets import check_no_phases
from simulations.runner import run
from simulations.table_facts import (
    Signal,
    TableFacts,
    given_threshold,
    has_private_parts,
    signal_of,
)
from simulations.vector_gain import UNKNOWN, gain_lines

# Which system is trained on a user's own table without privacy: the linear item-to-item model,
# alternating least squares in rounds, or popularity, whichever ranks the held-out items of
# validation users best. Test users play no part.
#
# ALS in rounds is centralised iALS sweep by sweep (tests/strategies/test_federated_als.py), and so
# is its score; iALS in native code takes a fraction of the time. All have the settings that they
# have without a search.

LINEAR: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "item-weights"},
    "step": {"name": "gram"},
    "strategy": {"name": "popularity-start", "main": {"name": "gram"}},
    "sampler": {"name": "full"},
}
"""Rounds, model, step, strategy and sampler of the federated linear item-to-item model."""
ALS: dict[str, Any] = {
    "rounds": 15,
    "model": {"name": "ials", "moments": True},
    "step": {"name": "als"},
    "strategy": {"name": "fed-als"},
    "sampler": {"name": "full"},
}
"""Likewise for alternating least squares in rounds; users' factors stay on the devices."""
TITLES = {
    "linear": "linear item-to-item model",
    "als": "alternating least squares",
    "popularity": "popularity",
}
_METRIC = "ndcg@10"
MOST_ROWS = 5_000_000
"""Largest number of rows for which iALS is fitted too; more take many minutes."""
_OF_A_SYSTEM = ("rounds", "model.", "step.", "strategy.", "sampler.", "engine.")


@dataclass(frozen=True)
class SystemChoice:
    """Choice of the system to train.

    Attributes:
        system: `linear`, `als` or `popularity`.
        scores: `ndcg@10` on validation users, by system; empty if systems were not compared.
        reason: reason why they were not compared.
    """

    system: str
    scores: Mapping[str, float]
    reason: str = ""

    def line(self) -> str:
        """Describe the system and the reason for it."""
        if not self.scores:
            return f"system: {TITLES[self.system]}, {self.reason}"
        others = ", ".join(
            f"{TITLES[name]} {score:.4f}"
            for name, score in self.scores.items()
            if name != self.system
        )
        best = f"{TITLES[self.system]}, the best on validation users"
        return (
            f"system: {best} ({_METRIC} {self.scores[self.system]:.4f}; {others}; --system selects"
            " another)"
        )


def choose(
    table: Mapping[str, Any], asked: str | None, overrides: Sequence[str], rows: int
) -> SystemChoice:
    """Choose the system to train on a table of interactions.

    Args:
        table: experiment of the linear model on it, as a TOML table.
        asked: the system that the user wants; None: the best one.
        overrides: as for `--set`; those of a system mean the linear one.
        rows: number of rows of the table.

    Raises:
        ExperimentError: the system is unknown, or an override is wrong.
    """
    if asked is not None:
        if asked not in TITLES:
            raise ExperimentError(
                f"unknown system {asked!r}",
                expected=", ".join(TITLES),
                got=asked,
                fix="name one of these, or run an experiment: fedrec list experiment",
            )
        return SystemChoice(asked, {}, "as asked for")
    if any(override.startswith(_OF_A_SYSTEM) for override in overrides):
        return SystemChoice("linear", {}, "whose settings are given")
    if "validation-users" not in table["split"]:
        return SystemChoice("linear", {}, "not compared with others: there are too few users")
    if rows > MOST_ROWS:
        reason = f"not compared with others: there are more than {MOST_ROWS:,} rows (--system als)"
        return SystemChoice("linear", {}, reason)
    scores = _scores(table, overrides)
    return SystemChoice(max(scores, key=lambda name: scores[name]), scores)


def with_system(table: Mapping[str, Any], system: str) -> dict[str, Any]:
    """Replace the linear model in an experiment by another system."""
    title = table["title"].replace(TITLES["linear"], TITLES[system])
    changed = {**table, "title": title}
    if system == "als":
        evaluation = {**table["evaluation"], "fine-tune": {"epochs": 1}}  # solves for new users
        changed |= {**ALS, "evaluation": evaluation}
    elif system == "popularity":
        changed |= {"rounds": 1}
    if system != "linear":  # its phases are what early stopping chooses between
        changed.pop("early-stopping", None)
    return changed


def _scores(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, float]:
    """Ranking quality of each system on the held-out rows of validation users."""
    trial = load(table, overrides).table()
    trial.pop("early-stopping", None)
    trial["evaluation"] = {
        "every": 0,
        "ks": [10],
        "held-out": "validation",
        "baselines": ["popularity", "ials"],
    }
    with tempfile.TemporaryDirectory() as folder:
        result = run(trial, output=Path(folder) / "run")
    return {
        "linear": result.metrics[_METRIC],
        "als": result.baselines["ials"][_METRIC],
        "popularity": result.baselines["popularity"][_METRIC],
    }


_NO_FEATURES = (
    "no user or item features: the system learns from interactions only; models that represent"
    " users by features, such as privrec, would learn nothing here"
)
_VALIDATION = 0.1
_FEWEST_USERS = 20
_TEST_USERS = 0.2  # default of the split
_FEW_TEST_USERS = 25
_LOW_RATED = 0.3  # of a rated row that is not positive, as on MovieLens-1M
_NO_COLUMN = (None, "", "none")  # as the column of ratings
_EASE_ITEMS = 6000  # a minute or so; it grows with the third power


@dataclass(frozen=True)
class OwnTable:
    """Settings for a user's own table of interactions: its columns, and the system on it.

    Attributes:
        columns: by role, the name of the column; None if it is to be recognised. For ratings,
            "none" or nothing means that there are none.
        unrated: whether no column holds ratings: every row counts as liked.
        time_format: form of the dates, as of `strptime`; None: ISO or dotted.
        epsilon: target of user-level differential privacy, > 0; None: no privacy.
        system: `linear`, `als` or `popularity`; None: the best one on validation users. Not under
            privacy or with item vectors, which have systems of their own.
        item_vectors: files of dense vectors of the items.
        header: whether the first line has names; None: as it looks.
    """

    columns: Mapping[str, str | None] = field(default_factory=dict)
    unrated: bool = False
    time_format: str | None = None
    epsilon: float | None = None
    system: str | None = None
    item_vectors: tuple[Path, ...] = ()
    header: bool | None = None

    def is_empty(self) -> bool:
        """True if everything is left to its default."""
        named = (self.time_format, self.system, self.epsilon, self.header, *self.columns.values())
        return not (self.unrated or self.item_vectors) and all(value is None for value in named)

    def experiment(self, path: Path, overrides: Sequence[str], quiet: bool = False) -> Experiment:
        """The experiment on the table, after printing to standard error how its columns were
        recognised, and what will be run. A run of it in this process does not read the table
        again.

        Args:
            path: the table.
            overrides: as for `--set`.
            quiet: print nothing.

        Raises:
            ExperimentError: a column of ratings is named, and `unrated` is set; an override is
                wrong, or names another dataset; epsilon is no number > 0, there are too few users
                for it, or see `TableFacts.of`.
            DataError: see `recognise`; or no user has two different items.
        """

        def tell(lines: Iterable[str]) -> None:
            for line in () if quiet else lines:
                print(f"  {line}", file=sys.stderr)

        table = self._recognised(path, overrides)
        if not quiet:
            print(f"{path}:", file=sys.stderr)
        tell([*table.lines(), *([] if self.item_vectors else [_NO_FEATURES]), *warnings(table)])
        if self.epsilon is not None:
            _check_epsilon(self.epsilon)
        private = self.epsilon is not None or has_private_parts(overrides)
        facts = TableFacts.of(table, overrides, private=private)
        declared = _experiment(path, table, facts, self.epsilon, self.item_vectors)
        signal = None if self.epsilon is None else _signal(declared, facts)
        if self.epsilon is not None and signal is not None and not signal.suffices:
            declared = _popularity_alone(declared, path, self.epsilon)
        elif facts.divisible >= _FEWEST_USERS:
            declared["early-stopping"] = {}
        experiment = load(declared, overrides)
        _check_same_data(experiment, declared["dataset"])
        self._check_system()
        _hold(experiment, table)
        choice = None
        if self.epsilon is None and not self.item_vectors:
            if private and self.system is None:
                choice = SystemChoice("linear", {}, "not compared with others under privacy")
            else:
                choice = choose(declared, self.system, overrides, facts.rows)
            if choice.system != "linear":
                experiment = load(with_system(declared, choice.system), overrides)
        population = POPULATIONS.cached(experiment)
        tell([] if population is None else [_split_line(population)])
        tell([] if choice is None else [choice.line()])
        tell(facts.lines())
        if self.item_vectors and not quiet:
            measured = not private and facts.rows <= MOST_ROWS
            tell(gain_lines(declared, overrides) if measured else [UNKNOWN])
        if self.epsilon is not None and signal is not None:
            tell(signal.lines(self.epsilon))
        return experiment

    def _recognised(self, path: Path, overrides: Sequence[str]) -> Recognised:
        columns = {role: name for role, name in self.columns.items() if name is not None}
        rating = columns.get("rating")
        if rating in _NO_COLUMN:
            columns.pop("rating", None)
        if self.unrated and "rating" in columns:
            raise ExperimentError(
                f"--rating {rating} and --no-rating contradict each other",
                fix="leave one of them out",
            )
        dataset = read({}, overrides).get("dataset")
        header = dataset.get("header") if isinstance(dataset, dict) else None
        return recognise(
            path,
            columns,
            rated=not self.unrated and rating not in _NO_COLUMN[1:],
            header=self.header if header is None else header,
            time_format=self.time_format,
            positive_above=given_threshold(overrides),
        )

    def _check_system(self) -> None:
        if self.system is not None and (self.epsilon is not None or self.item_vectors):
            raise ExperimentError(
                f"system {self.system!r} is named, but under privacy and with item vectors fold-in"
                " is trained, or private popularity where noise would cover what it learns",
                fix="leave it out",
            )


def try_table(
    table: pd.DataFrame,
    *,
    epsilon: float | None = None,
    system: str | None = None,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    unrated: bool = False,
    time_format: str | None = None,
    item_vectors: Sequence[str | Path] = (),
    callbacks: Sequence[Callback] = (),
    **columns: Hashable,
) -> Result:
    """Train a federated recommender on a table in memory, and compare it with popularity and
    centralised EASE, as `fedrec run --data` does with a file.

    Args:
        table: one interaction per row.
        epsilon: target of user-level differential privacy, > 0; None: no privacy.
        system: `linear`, `als` or `popularity`; None: the best one on validation users. Not under
            privacy or with item vectors, which have systems of their own.
        overrides: texts such as `"seed=1"`.
        output: a new or empty folder, for the table (`table.csv`) and the run (`run`); default:
            below `$FEDREC_RUNS` or `runs/`.
        unrated: whether no column holds ratings: every row counts as liked.
        time_format: form of the dates, as of `strptime`; ISO and dotted dates need none.
        item_vectors: files of dense vectors of the items, see `dataset.item-vectors`.
        callbacks: called on each event of the run.
        columns: names of the columns `user`, `item`, `rating` and `time` that are not recognised.

    Returns:
        The result. How the columns were recognised, and what makes results say little, is printed
        to standard error, as by the command.

    Raises:
        DataError: it is no DataFrame, columns are not recognised, or no user has two different
            items.
        ExperimentError: a role of a column or an override is wrong, epsilon is no number > 0, there
            are too few users for a private system, or it would depend on a value that is not given,
            see `simulations.table_facts`.
        RunError: the folder is not empty.
    """
    _check_frame(table)
    _check_roles(columns)
    folder = Path(output) if output is not None else runs_directory() / f"table-{stamp()}"
    require_new_folder(folder, fix="choose another output")
    file = folder / "table.csv"
    write_atomically(file, table.to_csv(index=False))
    roles = {role: str(name) for role, name in columns.items()}
    files = tuple(map(Path, item_vectors))
    settings = OwnTable(roles, unrated, time_format, epsilon, system, files, header=True)
    return run(settings.experiment(file, overrides), output=folder / "run", callbacks=callbacks)


def _signal(declared: Mapping[str, Any], facts: TableFacts) -> Signal:
    """Signal of the private model of an experiment."""
    if facts.users < _FEWEST_USERS:
        raise ExperimentError(
            "there are too few users for a private system",
            expected=f"at least {_FEWEST_USERS} users; hundreds to learn",
            got=f"{facts.users:,}",
            fix="use a table with more users, or leave out epsilon",
        )
    held_out = declared["split"].get("validation-users", 0.0) + _TEST_USERS
    users = max(int(facts.users * (1 - held_out)), 1)
    return signal_of(load(declared), users, facts.rows_per_user)


def _hold(experiment: Experiment, table: Recognised) -> None:
    """Cache the rows that were read, if the experiment reads them in the same way."""
    settings = experiment.settings(DATASET)
    form = table.separator, table.header, table.time_format
    if (settings.separator, settings.header, settings.time_format) == form:
        reader = Table(experiment.dataset.name, settings)
        rows = reader.described(reader.interactions(table.frame))
        POPULATIONS.hold(experiment, Population.of(experiment, rows))


def _split_line(population: Population) -> str:
    """Describe the numbers of users and rows for training, testing and validation."""
    rows = population.partition
    users = population.interactions.users
    trains = np.zeros(population.interactions.num_users, dtype=bool)
    trains[rows.training_clients] = True
    tests = np.zeros_like(trains)
    tests[users[rows.test_rows]] = True
    owners = users[rows.train_rows]
    line = (
        f"split: {trains.sum():,} users train on {trains[owners].sum():,} rows; {tests.sum():,} are"
        f" tested on {len(rows.test_rows):,} held-out rows beside {tests[owners].sum():,} known"
    )
    validating = len(pd.unique(users[rows.validation_rows]))
    return f"{line}; {validating:,} validate" if validating else line


def _check_frame(table: object) -> None:
    """Check that a table in memory is a pandas DataFrame."""
    if not isinstance(table, pd.DataFrame):
        raise DataError(
            "the table is not a DataFrame",
            expected="a pandas DataFrame with one interaction per row",
            got=f"an object of type {type(table).__name__}",
            fix="pandas.DataFrame(rows, columns=['user', 'item']), pandas.read_csv(FILE), or on the"
            " command line: fedrec run --data FILE",
        )


def _check_roles(columns: Mapping[str, Hashable]) -> None:
    """Check that all keyword arguments are roles of columns."""
    for role, name in columns.items():
        if role not in ROLES:
            raise ExperimentError(
                f"unknown argument or column role {role!r}",
                expected=", ".join(ROLES),
                got=f"{role}={name!r}",
                fix=did_you_mean(role, ROLES),
            )


def _check_epsilon(epsilon: object) -> None:
    """Check a target epsilon."""
    if not isinstance(epsilon, Real) or epsilon is True or not 0 < float(epsilon) < math.inf:
        raise ExperimentError(
            "invalid target epsilon",
            got=repr(epsilon),
            fix="give a number > 0, such as 5; smaller is more private",
        )


def _check_same_data(experiment: Experiment, table: Mapping[str, Any]) -> None:
    """Check that overrides do not name another dataset."""
    dataset = experiment.dataset
    path = dataset.options.get("path")
    if dataset.name != table["name"] or str(path) != table["path"]:
        raise ExperimentError(
            "two datasets are given",
            expected=f"the table {table['path']} alone",
            got=f"dataset.name = {dataset.name!r}" + (f", dataset.path = {path}" if path else ""),
            fix="leave out this --set, or run an experiment instead of a table: fedrec run NAME",
        )


def _experiment(
    path: Path,
    table: Recognised,
    facts: TableFacts,
    epsilon: float | None,
    item_vectors: Sequence[Path],
) -> dict[str, Any]:
    """The experiment on a table, as a TOML table. `table` gives the form of the file, `facts` all
    that depends on its rows."""
    if not facts.divisible:
        raise DataError(
            f"no user in {path} has two different items",
            expected="users with several items: one half is learned from, the other is held out",
            got=f"{facts.rows:,} rows, {facts.users:,} users, one item each",
            fix="name the column of users with --user (not one of orders or sessions), or take data"
            " with more rows per user",
        )
    dataset: dict[str, Any] = {"name": "table", "path": str(path.resolve()), **table.columns}
    if table.separator != ",":
        dataset["separator"] = table.separator
    if not table.header:
        dataset["header"] = False
    if table.time_format is not None:
        dataset["time-format"] = table.time_format
    if facts.positive_above is None:
        dataset.pop("rating", None)
    if item_vectors:
        dataset["item-vectors"] = [str(file.resolve()) for file in item_vectors]
    personal = epsilon is not None or bool(item_vectors)
    kind = "fold-in" if personal else "linear item-to-item model"
    return {
        "name": _name(path) + ("" if epsilon is None else "-private"),
        "title": f"Federated {kind} on {path.name}"
        + ("" if epsilon is None else f" at epsilon {epsilon:g}"),
        **({} if facts.positive_above is None else {"positive-above": facts.positive_above}),
        "dataset": dataset,
        "split": {"name": "user-holdout"}
        | ({"halves": "temporal"} if facts.timed else {})
        | ({"validation-users": _VALIDATION} if facts.divisible >= _FEWEST_USERS else {}),
        **(
            fold_in_system(
                epsilon,
                facts.items,
                facts.rows_per_user,
                rated=facts.positive_above is not None,
            )
            if personal
            else LINEAR
        ),
        "evaluation": {
            "every": 0,
            "ks": [10, 20],
            "baselines": _baselines(epsilon, facts),
        },
    }


def _popularity_alone(table: dict[str, Any], path: Path, epsilon: float) -> dict[str, Any]:
    """The same experiment without its second round, so that the first one, private popularity, has
    the whole budget; the order of rare items is kept."""
    baselines = ["popularity", "random"]
    return table | {
        "title": f"Private popularity on {path.name} at epsilon {epsilon:g}",
        "rounds": 1,
        "evaluation": table["evaluation"] | {"baselines": baselines},
    }


def fold_in_system(
    epsilon: float | None, items: int, rows_per_user: float, *, rated: bool = False
) -> dict[str, Any]:
    """Model, step, strategy, sampler and privacy of fold-in on embeddings from two sums.

    Args:
        epsilon: target, > 0; None: no privacy.
        items: size of the catalogue.
        rows_per_user: mean number of rows of a user, which the clip norms follow.
        rated: whether rows have ratings; then those that are not positive count, too.
    """
    most = 1000 if epsilon is None else 300  # fewer are more robust to noise
    weight = _LOW_RATED if rated else 0.0
    system: dict[str, Any] = {
        "rounds": 2,
        "model": {"name": "fold-in", "items": max(1, min(items, most)), "low-rated": weight},
        "step": {"name": "gram", "exponent": 0.2, "low-rated": weight},
        "strategy": {
            "name": "popularity-start",
            "step": {"name": "counts", "low-rated": weight},
            "estimate": "posterior-mean",
            "main": {"name": "fold-in"},
        },
        "sampler": {"name": "full"},
    }
    if epsilon is None:
        return system
    system["privacy"] = {
        "epsilon": epsilon,
        "backend": "pld",
        "clip-norm": min(8.0, max(1.0, rows_per_user)),
        "parameters": ["item.products"],
        "phases": {
            "popularity": {
                "parameters": ["item.bias"],
                "clip-norm": _count_clip(rows_per_user),
                "noise-factor": 2.0,
            }
        },
    }
    return system


def _count_clip(rows_per_user: float) -> float:
    """Clip norm of a user's counts: of a user with the mean number of rows, up to that of films."""
    return min(6.0, max(1.0, rows_per_user**0.5))


def warnings(table: Recognised) -> list[str]:
    """Reasons why results on a table will be unreliable, one per line."""
    test = max(int(_TEST_USERS * table.users + 0.5), 1)
    lines = []
    if not table.divisible:
        return lines  # refused by `_experiment`
    if test < _FEW_TEST_USERS:
        lines.append(
            f"warning: only {test} test user{'s' if test > 1 else ''}: differences between systems"
            " will be mostly chance"
        )
    if 2 * table.divisible < table.users:
        lines.append(
            f"warning: only {table.divisible:,} of {table.users:,} users have two different items;"
            " the others cannot be tested"
        )
    if 2 * table.shared < table.items:
        lines.append(
            f"warning: only {table.shared:,} of {table.items:,} items have two users or more;"
            " about the others, nothing can be learned from other users"
        )
    return lines


def _baselines(epsilon: float | None, facts: TableFacts) -> list[Any]:
    order = ["transitions"] if facts.timed else []
    plain = ["popularity", *_strongest(facts), *order, "random"]
    if epsilon is None:
        return plain
    clip = _count_clip(facts.rows_per_user)
    return [{"name": "dp-popularity", "epsilon": epsilon, "clip-norm": clip}, *plain]


def _strongest(facts: TableFacts) -> list[Any]:
    """Strongest centralised baseline: EASE, or iALS for large catalogues without too many rows."""
    if facts.items <= _EASE_ITEMS:
        return ["ease"]
    return [] if facts.rows > MOST_ROWS else ["ials"]


def _name(path: Path) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).strip("-._") or "own-data"


# The true epsilon of each user in experiments whose users add their own noise, computed before
# training. It follows from the experiment: budgets from their seed, cohorts from seed and round. A
# sampled user is charged even if its upload fails.


def personal_noise(experiment: Experiment) -> PersonalNoise:
    """The users' noise of a resolved experiment.

    Raises:
        ExperimentError: its step has no noise of users.
    """
    settings = experiment.settings(registry.STEP)
    if isinstance(settings, PersonalNoise):
        return settings
    raise ExperimentError(
        "users have no personal budgets with this step",
        expected="step dpvae or dpsgd",
        got=experiment.step.name,
        fix="use an experiment with one of these steps, such as dpvae-ml100k",
    )


def personal_epsilons(experiment: Experiment, rounds: int | None = None) -> pd.DataFrame:
    """Table with one row per training client, see `fedrec.privacy.personal.epsilon_table`.

    Args:
        experiment: a resolved experiment whose users add noise of their own.
        rounds: number of rounds; default: all of the experiment.

    Raises:
        ExperimentError: the experiment has another step, or phases with other steps.
    """
    settings = personal_noise(experiment)
    check_no_phases(experiment)
    clients = Population.of(experiment).partition.training_clients
    sampler_class = registry.resolve(registry.SAMPLER, experiment.sampler.name)
    sampler = sampler_class(experiment.settings(registry.SAMPLER), clients, experiment.seed)
    asked = np.zeros(len(clients), dtype=np.int64)
    for number in range(1, (experiment.rounds if rounds is None else rounds) + 1):
        asked[np.searchsorted(clients, sampler.sample(number))] += 1
    return epsilon_table(settings, clients.tolist(), asked.tolist())
