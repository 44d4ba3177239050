# SPDX-License-Identifier: Apache-2.0
"""Experiment of `fedrec run --data` on a user's own table: its system, settings and baselines.

Models that represent users by features cannot learn from data without side features. The linear
item-to-item model represents a user by its items, in two federated rounds in which every client
uploads once (counts, then products). It is trained unless ALS in rounds or popularity is better on
validation users, and compared with popularity and centralised EASE. A
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

import math
import re
import shutil
import sys
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedrec.components.registry import DATASET, SPLIT
from fedrec.config import did_you_mean
from fedrec.data.population import POPULATIONS, Population
from fedrec.data.readers.table import ROLES, Table
from fedrec.data.recognition import Recognised, recognise
from fedrec.errors import DataError, ExperimentError, FedrecError
from fedrec.evaluation.tables import NEW, OLD
from fedrec.experiment.schema import Experiment, load, read
from fedrec.runs.folder import Result
from fedrec.runs.ids import runs_directory, stamp
from fedrec.runtime.files import require_new_folder, write_atomically
from server.callbacks import Callback
from simulations.runner import run
from simulations.table_facts import Signal, TableFacts, has_private_parts, signal_of, threshold_of

_VALIDATION = 0.1
_FEWEST_USERS = 20
_FEW_TEST_USERS = 25
_LOW_RATED = 0.3  # of a rated row that is not positive, as on MovieLens-1M
_OF_THE_SIGNAL = ("split", "model.items")
_EASE_ITEMS = 6000  # a minute or so; it grows with the third power


@dataclass(frozen=True)
class OwnTable:
    """Settings for a user's own table of interactions: its columns, and the system on it.

    Attributes:
        columns: by role, the name of the column; others are recognised.
        unrated: whether no column holds ratings: every row counts as liked.
        time_format: form of the dates, as of `strptime`; None: ISO or dotted.
        epsilon: target of user-level differential privacy, > 0; None: no privacy.
        system: `linear`, `als` or `popularity`; None: the best one on validation users. Not under
            privacy or with item vectors, which have systems of their own.
        item_vectors: files of dense vectors of the items.
        header: whether the first line has names; None: as it looks.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    unrated: bool = False
    time_format: str | None = None
    epsilon: float | None = None
    system: str | None = None
    item_vectors: tuple[Path, ...] = ()
    header: bool | None = None

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

        given = read({}, overrides)
        self._check(given)
        table = self._recognised(path, given)
        if not quiet:
            print(f"{path}:", file=sys.stderr)
        tell([*table.lines(), *_warnings(table)])
        private = self.epsilon is not None or has_private_parts(given)
        facts = TableFacts.of(table, given, private=private)
        declared = self._declared(path, table, facts)
        told: list[str] = []
        if self.epsilon is not None:
            signal = _signal(declared, facts, overrides)
            if "rounds" not in given:  # with two a personal model is trained nevertheless
                told = signal.lines(self.epsilon)
                if not signal.suffices:
                    declared = _popularity_alone(declared, path, self.epsilon)
        if declared["rounds"] > 1 and facts.divisible >= _FEWEST_USERS:
            declared["early-stopping"] = {}
        experiment = load(declared, overrides)
        if experiment.settings(DATASET) == table.config:  # the rows need not be read again
            rows = Table(Table.name, table.config).described(table.data)
            POPULATIONS.hold(experiment, Population.of(experiment, rows))
        chosen: list[str] = []
        if self.epsilon is None and not self.item_vectors:
            system, line = _choose(declared, self.system, overrides, facts.rows, private=private)
            chosen = [line]
            if system != "linear":
                experiment = load(_with_system(declared, system), overrides)
        population = POPULATIONS.cached(experiment)
        tell([] if population is None else _split_lines(population))
        tell([*chosen, *facts.lines()])
        if self.item_vectors and (private or facts.rows > MOST_ROWS):
            tell(
                ["vectors: their gain is not measured under privacy or on more than 5 million rows"]
            )
        elif self.item_vectors and not quiet:
            tell(_vector_gain(declared, overrides))
        tell(told)
        return experiment

    def _check(self, given: Mapping[str, Any]) -> None:
        if self.unrated and "rating" in self.columns:
            raise ExperimentError(
                f"--rating {self.columns['rating']} and --no-rating contradict each other",
                fix="leave one of them out",
            )
        epsilon = self.epsilon
        privacy = given.get("privacy")
        if epsilon is not None and isinstance(privacy, Mapping) and "epsilon" in privacy:
            raise ExperimentError(
                "two target epsilons are given",
                got=f"--epsilon {epsilon} and privacy.epsilon = {privacy['epsilon']}",
                fix="leave out this --set",
            )
        if epsilon is not None and not (
            isinstance(epsilon, Real) and epsilon is not True and 0 < float(epsilon) < math.inf
        ):
            raise ExperimentError(
                "invalid target epsilon",
                got=repr(epsilon),
                fix="give a number > 0, such as 5; smaller is more private",
            )
        if self.system is not None and (epsilon is not None or self.item_vectors):
            raise ExperimentError(
                f"system {self.system!r} is named, but under privacy and with item vectors fold-in"
                " is trained, or private popularity where noise would cover what it learns",
                fix="leave it out",
            )

    def _recognised(self, path: Path, given: Mapping[str, Any]) -> Recognised:
        options = {
            **self.columns,
            "header": self.header,
            "time-format": self.time_format,
            "item-vectors": [str(file.resolve()) for file in self.item_vectors],
        }
        settings = {key: value for key, value in options.items() if value is not None}
        return recognise(
            path,
            settings | _dataset_of(path, given),
            rated=not self.unrated,
            positive_above=threshold_of(given),
        )

    def _declared(self, path: Path, table: Recognised, facts: TableFacts) -> dict[str, Any]:
        """The experiment on the table, as a TOML table. `table` gives the form of the file, `facts`
        all that depends on its rows."""
        if not facts.divisible:
            raise DataError(
                f"no user in {path} has two different items",
                expected="users with several items: one half is learned from, the other is held"
                " out",
                got=f"{facts.rows:,} rows, {facts.users:,} users, one item each",
                fix="name the column of users with --user (not one of orders or sessions), or take"
                " data with more rows per user",
            )
        rated = facts.positive_above is not None
        name = re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).strip("-._") or "own-data"
        kind = "linear item-to-item model"
        system = LINEAR
        if self.epsilon is not None or self.item_vectors:
            kind = "fold-in"
            system = _fold_in_system(self.epsilon, facts.items, facts.rows_per_user, rated=rated)
        split: dict[str, Any] = {"name": "user-holdout"}
        if facts.timed:
            split["halves"] = "temporal"
        if facts.divisible >= _FEWEST_USERS:
            split["validation-users"] = _VALIDATION
        private = self.epsilon is not None
        return {
            "name": f"{name}-private" if private else name,
            "title": f"Federated {kind} on {path.name}"
            + (f" at epsilon {self.epsilon:g}" if private else ""),
            **({"positive-above": facts.positive_above} if rated else {}),
            "dataset": {"name": Table.name, **table.config.table()},
            "split": split,
            **system,
            "evaluation": {
                "every": 0,
                "ks": [10, 20],
                "baselines": _baselines(self.epsilon, facts),
            },
        }


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
        RunError: the folder is not empty. The folder is removed after an error without a run.
    """
    if not isinstance(table, pd.DataFrame):
        raise DataError(
            "the table is not a DataFrame",
            got=f"an object of type {type(table).__name__}",
            fix="pandas.DataFrame(rows, columns=['user', 'item']), or pandas.read_csv(FILE)",
        )
    for role in columns.keys() - set(ROLES):
        raise ExperimentError(
            f"unknown argument or column role {role!r}",
            expected=", ".join(ROLES),
            fix=did_you_mean(role, ROLES),
        )
    folder = Path(output) if output is not None else runs_directory() / f"table-{stamp()}"
    require_new_folder(folder, fix="choose another output")
    file = folder / "table.csv"
    write_atomically(file, table.to_csv(index=False))
    roles = {role: str(name) for role, name in columns.items()}
    files = tuple(map(Path, item_vectors))
    settings = OwnTable(roles, unrated, time_format, epsilon, system, files, header=True)
    try:
        return run(settings.experiment(file, overrides), output=folder / "run", callbacks=callbacks)
    except FedrecError:
        if not (folder / "run").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _signal(declared: Mapping[str, Any], facts: TableFacts, overrides: Sequence[str]) -> Signal:
    """Signal of the private model of an experiment, with the split and the number of items of the
    overrides."""
    if facts.users < _FEWEST_USERS:
        raise ExperimentError(
            "there are too few users for a private system",
            expected=f"at least {_FEWEST_USERS} users; hundreds to learn",
            got=f"{facts.users:,}",
            fix="use a table with more users, or leave out epsilon",
        )
    experiment = load(declared, [each for each in overrides if each.startswith(_OF_THE_SIGNAL)])
    split = experiment.settings(SPLIT)
    held_out = sum(getattr(split, name, 0.0) for name in ("test_users", "validation_users"))
    users = max(int(facts.users * (1 - held_out)), 1)
    return signal_of(experiment, users, facts.rows_per_user)


def _split_lines(population: Population) -> list[str]:
    """Describe the numbers of users and rows for training, testing and validation, and warn of few
    test users."""
    rows = population.partition
    users = population.interactions.users
    owners = users[rows.train_rows]
    trains = rows.training_clients
    tests = np.unique(users[rows.test_rows])
    line = (
        f"split: {len(trains):,} users train on {np.isin(owners, trains).sum():,} rows;"
        f" {len(tests):,} are tested on {len(rows.test_rows):,} held-out rows beside"
        f" {np.isin(owners, tests).sum():,} known"
    )
    validating = len(np.unique(users[rows.validation_rows]))
    line += f"; {validating:,} validate" if validating else ""
    if len(tests) >= _FEW_TEST_USERS:
        return [line]
    few = f"only {len(tests)} test user{'s' if len(tests) > 1 else ''}"
    return [line, f"warning: {few}: differences between systems will be mostly chance"]


def _dataset_of(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the dataset among those given, after a check that they do not name another."""
    dataset = given.get("dataset", {})
    options = dict(dataset) if isinstance(dataset, Mapping) else {"name": dataset}
    name = options.pop("name", Table.name)
    other = options.pop("path", path)
    if name != Table.name or Path(str(other)).resolve() != path.resolve():
        raise ExperimentError(
            "two datasets are given",
            expected=f"the table {path} alone",
            got=f"dataset.name = {name!r}, dataset.path = {other}",
            fix="leave out this --set, or run an experiment instead of a table: fedrec run NAME",
        )
    return options


def _popularity_alone(table: dict[str, Any], path: Path, epsilon: float) -> dict[str, Any]:
    """The same experiment without its second round, so that the first one, private popularity, has
    the whole budget; the order of rare items is kept."""
    baselines = ["popularity", "random"]
    return table | {
        "title": f"Private popularity on {path.name} at epsilon {epsilon:g}",
        "rounds": 1,
        "evaluation": table["evaluation"] | {"baselines": baselines},
    }


def _fold_in_system(
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
    counts = {
        "parameters": ["item.bias"],
        "clip-norm": _count_clip(rows_per_user),
        "noise-factor": 2.0,
    }
    system["privacy"] = {
        "epsilon": epsilon,
        "backend": "pld",
        "clip-norm": min(8.0, max(1.0, rows_per_user)),
        "parameters": ["item.products"],
        "phases": {"popularity": counts},
    }
    return system


def _count_clip(rows_per_user: float) -> float:
    """Clip norm of a user's counts: of a user with the mean number of rows, up to that of films."""
    return min(6.0, max(1.0, rows_per_user**0.5))


def _baselines(epsilon: float | None, facts: TableFacts) -> list[Any]:
    """Popularity, the strongest centralised system that does not take too long, and chance."""
    strongest = ["ease"] if facts.items <= _EASE_ITEMS else ["ials"]
    if facts.items > _EASE_ITEMS and facts.rows > MOST_ROWS:
        strongest = []
    order = ["transitions"] if facts.timed else []
    plain = ["popularity", *strongest, *order, "random"]
    if epsilon is None:
        return plain
    clip = _count_clip(facts.rows_per_user)
    return [{"name": "dp-popularity", "epsilon": epsilon, "clip-norm": clip}, *plain]


def _warnings(table: Recognised) -> list[str]:
    """Reasons why results on a table will be unreliable, one per line."""
    users = len(table.items_of)
    items = len(table.users_of)
    divisible = int((table.items_of > 1).sum())
    shared = int((table.users_of > 1).sum())
    if not divisible:
        return []  # refused
    reasons = {
        f"only {divisible:,} of {users:,} users have two different items; the others"
        " cannot be tested": 2 * divisible < users,
        f"only {shared:,} of {items:,} items have two users or more; about the others,"
        " nothing can be learned from other users": 2 * shared < items,
    }
    return [f"warning: {reason}" for reason, holds in reasons.items() if holds]


# Trial runs on a user's own table before its run: which system ranks the held-out items of
# validation users best, and what vectors of the items gain. Test users play no part in the choice.
# ALS in rounds is centralised iALS sweep by sweep (tests/strategies/test_federated_als.py), and so
# is its score; iALS in native code takes a fraction of the time. All systems have the settings that
# they have without a search.

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
MOST_ROWS = 5_000_000
"""Largest number of rows for which iALS is fitted too; more take many minutes."""
_METRIC = "ndcg@10"
_OF_A_SYSTEM = ("rounds", "model.", "step.", "strategy.", "sampler.", "engine.")


def _choose(
    table: Mapping[str, Any],
    asked: str | None,
    overrides: Sequence[str],
    rows: int,
    *,
    private: bool = False,
) -> tuple[str, str]:
    """Choose the system to train on a table of interactions: the linear item-to-item model,
    alternating least squares in rounds, or popularity.

    Args:
        table: experiment of the linear model on it, as a TOML table.
        asked: the system that the user wants; None: the best one.
        overrides: as for `--set`; those of a system mean the linear one.
        rows: number of rows of the table.
        private: whether a part of the experiment is under privacy.

    Returns:
        `linear`, `als` or `popularity`, and a line about it and the reason for it.

    Raises:
        ExperimentError: the system is unknown, or an override is wrong.
    """
    if asked is not None:
        if asked not in TITLES:
            raise ExperimentError(
                f"unknown system {asked!r}",
                expected=", ".join(TITLES),
                fix="name one of these, or run an experiment: fedrec list experiment",
            )
        return asked, f"system: {TITLES[asked]}, as asked for"
    others = "not compared with others"
    reasons = {
        f"{others} under privacy": private,
        "whose settings are given": any(text.startswith(_OF_A_SYSTEM) for text in overrides),
        f"{others}: there are too few users": "validation-users" not in table["split"],
        f"{others}: there are more than {MOST_ROWS:,} rows (--system als)": rows > MOST_ROWS,
    }
    for reason, holds in reasons.items():
        if holds:
            return "linear", f"system: {TITLES['linear']}, {reason}"
    return _best(table, overrides)


def _best(table: Mapping[str, Any], overrides: Sequence[str]) -> tuple[str, str]:
    """Best system on the held-out rows of validation users, and the scores of all. Popularity is
    what the linear model has after its first round."""
    everybody = {"held-out": "validation", "every": 1, "users": MOST_ROWS}
    result = _result(_trial(table, overrides, {**everybody, "baselines": ["ials"]}))
    popularity, linear = result.rounds[_METRIC]
    scores = {"linear": linear, "als": result.baselines["ials"][_METRIC], "popularity": popularity}
    best = max(scores, key=lambda name: scores[name])
    others = (f"{TITLES[name]} {score:.4f}" for name, score in scores.items() if name != best)
    return best, (
        f"system: {TITLES[best]}, the best on validation users ({_METRIC} {scores[best]:.4f};"
        f" {', '.join(others)}; --system selects another)"
    )


def _with_system(table: Mapping[str, Any], system: str) -> dict[str, Any]:
    """Replace the linear model in an experiment by ALS or popularity. Phases of the linear model
    are what early stopping chooses between, so it is left out."""
    changed = {key: value for key, value in table.items() if key != "early-stopping"}
    changed["title"] = table["title"].replace(TITLES["linear"], TITLES[system])
    if system == "popularity":
        return changed | {"rounds": 1}
    evaluation = {**table["evaluation"], "fine-tune": {"epochs": 1}}  # solves for new users
    return changed | {**ALS, "evaluation": evaluation}


def _vector_gain(table: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Measure what the vectors of a table gain, for items that nobody has used and for others.

    A fifth of the items is held out as a whole (split `new-items`). The system of the run ranks
    these items alone, and other held-out items of the same users, with the vectors and without
    them. This looks at held-out rows, which no guarantee covers.

    Args:
        table: the experiment on the table, as a TOML table.
        overrides: as for `--set`.

    Returns:
        Lines about it.
    """
    trial = _trial(table, overrides, {"baselines": ["content-map", "random"]})
    trial["split"] = {"name": "new-items"}
    bare = {key: value for key, value in trial["dataset"].items() if key != "item-vectors"}
    alone = {**trial, "dataset": bare, "evaluation": {**trial["evaluation"], "baselines": []}}
    try:
        given = _result(trial)
        without = _result(alone)
    except FedrecError as error:
        return [f"vectors: what they gain could not be measured: {error.text().splitlines()[0]}"]
    new, old = (
        f"{given.metrics[kind + _METRIC]:.4f} with them,"
        f" {without.metrics[kind + _METRIC]:.4f} without"
        for kind in (NEW, OLD)
    )
    content, chance = (given.baselines[name][NEW + _METRIC] for name in ("content-map", "random"))
    return [
        f"vectors, for new items (a fifth, held out as a whole, ranked alone): {_METRIC} {new}"
        f" (content-map {content:.4f}, chance {chance:.4f})",
        f"vectors, for other items of the same users (ranked alone): {_METRIC} {old}",
    ]


def _trial(
    table: Mapping[str, Any], overrides: Sequence[str], evaluation: Mapping[str, Any]
) -> dict[str, Any]:
    """Experiment of a trial run, which is evaluated at its end."""
    trial = load(table, overrides).table()
    trial.pop("early-stopping", None)
    return {**trial, "evaluation": {"every": 0, "ks": [10], **evaluation}}


def _result(trial: Mapping[str, Any]) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return run(trial, output=Path(folder) / "run")
