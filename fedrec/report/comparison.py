# SPDX-License-Identifier: Apache-2.0
"""Systems of runs as rows of a table, and their paired comparison over users: differences,
intervals and tests."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedrec.components.registry import BASELINE
from fedrec.components.sections import Section, resolved_section
from fedrec.errors import ExperimentError, unknown
from fedrec.evaluation.tables import lower_is_better, main_metric
from fedrec.experiment.schema import marked
from fedrec.report.inputs import COLUMNS, Inputs, system_inputs
from fedrec.runs.folder import Result, RunFolder
from fedrec.runtime.ragged import flat

# Names of runs.

_APART = ("name", "seed", "title", "settings-tried", "callbacks", "checkpoint", "engine")
_MOST_SETTINGS = 3  # in a name; runs that differ in more are told apart by their folders
_LONGEST_VALUE = 40  # characters of a setting in a name, likewise


class Run(NamedTuple):
    """A run with its names.

    Attributes:
        name: name of its system; equal for runs that differ only in their seed.
        label: name and seed.
        result: result of the run.
    """

    name: str
    label: str
    result: Result

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.result.folder)

    @property
    def baseline_seconds(self) -> float | None:
        """Time of fitting and evaluating the centralised systems; None without any."""
        states = [self.folder.read_baseline(label) or {} for label in self.result.baselines]
        return sum(sum(s.get("seconds", {}).values()) for s in states) if states else None


def named(results: Sequence[Result]) -> list[Run]:
    """Name runs by system: the experiment's name, marked if its negatives leak, and in brackets the
    settings in which runs of that name differ. Runs that differ only in their seed have the same
    name; repetitions under one seed are told apart by their folders."""
    systems = [
        _System(marked(result.experiment), dict(flat(_decisive(result))), result)
        for result in results
    ]
    names = [_name(system, systems, repeats=True) for system in systems]
    return [
        Run(name, f"{name}, seed {result.experiment.seed}", result)
        for name, result in zip(names, results, strict=True)
    ]


def _baseline_names(results: Sequence[Result]) -> list[dict[str, str]]:
    """Names of each run's centralised systems, by label: the label, and in brackets the settings in
    which systems of that label differ, such as `dp-popularity (epsilon=5)`. Equal settings under
    one seed are one system."""
    runs = [
        {label: _System(label, _baseline(result, label), result) for label in result.baseline_users}
        for result in results
    ]
    every = [system for systems in runs for system in systems.values()]
    return [
        {label: _name(system, every, repeats=False) for label, system in systems.items()}
        for systems in runs
    ]


class _System(NamedTuple):
    """A system of a run: its name, the settings on which its results depend, and the run."""

    title: str
    settings: Mapping[str, Any]
    result: Result


def _name(system: _System, systems: Sequence[_System], *, repeats: bool) -> str:
    """Name of a system among those of its title; with `repeats`, equal settings under one seed are
    repetitions."""
    group = [other for other in systems if other.title == system.title]
    same = [other.result for other in group if other.settings == system.settings]
    seeds = [result.experiment.seed for result in same]
    repeated = repeats and seeds.count(system.result.experiment.seed) > 1
    keys = _differing([other.settings for other in group])
    values = [_text(other.settings.get(key)) for key in keys for other in group]
    if repeated or len(keys) > _MOST_SETTINGS or max(map(len, values), default=0) > _LONGEST_VALUE:
        run = system.result if repeated else same[0]
        texts = [_folder(run, [other.result for other in group])]
    else:
        texts = [f"{_short(key, keys)}={_text(system.settings.get(key))}" for key in keys]
    return system.title + (f" ({', '.join(texts)})" if texts else "")


def _text(value: Any) -> str:
    """Format a value in a name; whole numbers without decimals."""
    return "none" if value is None else str(value).removesuffix(".0")


def _folder(result: Result, others: Sequence[Result]) -> str:
    """Last part of a run's folder if unique, else the whole path."""
    name = result.folder.name
    alike = {other.folder for other in others if other.folder.name == name}
    return name if len(alike) == 1 else str(result.folder)


def _settings_table(result: Result) -> dict[str, Any]:
    """Experiment as a table, with the defaults of settings newer than the run."""
    try:
        return result.experiment.resolve().table()
    except ExperimentError:  # a component that is not installed here, or no longer has a setting
        return result.experiment.table()


def _decisive(result: Result) -> dict[str, Any]:
    """Settings that determine the results of the federated system."""
    table = {key: value for key, value in _settings_table(result).items() if key not in _APART}
    evaluation = {**table.get("evaluation", {})}
    evaluation.pop("baselines", None)
    return {**table, "evaluation": evaluation}


def _baseline(result: Result, label: str) -> dict[str, Any]:
    """Settings that determine the results of a centralised system, with defaults."""
    options = result.experiment.evaluation.baseline_settings().get(label, {})
    section = Section.model_validate({"name": label, **options})
    with suppress(ExperimentError):  # see `_settings_table`
        section = resolved_section(BASELINE, section)
    perturbed = _settings_table(result).get("perturb")
    return dict(flat({"name": section.name, **section.options, "perturb": perturbed}))


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys with different values."""
    absent = object()
    return [
        key
        for key in dict.fromkeys(key for table in settings for key in table)
        if any(table.get(key, absent) != settings[0].get(key, absent) for table in settings)
    ]


def _short(key: str, keys: Sequence[str]) -> str:
    """Last word of a key if unique among the keys, else the key."""
    last = key.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in keys].count(last) == 1 else key


# The systems of a run as rows of a table, and their privacy.

BEFORE = "before fine-tuning"


def system_rows(result: Result) -> dict[str, dict[str, Any]]:
    """Metrics of the federated system (first, if there is one) and of the baselines, by label."""
    rows: dict[str, dict[str, Any]] = {}
    if result.experiment.federated:
        epsilon = {} if result.epsilon is None else {"epsilon": result.epsilon}
        rows[marked(result.experiment)] = {**result.metrics, **epsilon}
        if result.before_fine_tuning:
            rows[f"  {BEFORE}"] = result.before_fine_tuning
    for label, metrics in result.baselines.items():
        epsilon = _baseline_epsilon(result, label)
        rows[label] = dict(metrics) | ({} if epsilon is None else {"epsilon": epsilon})
    return rows


def _baseline_epsilon(result: Result, label: str) -> float | None:
    """Epsilon of a private centralised system, else None."""
    state = RunFolder(result.folder).read_baseline(label) or {}
    metrics = result.baselines.get(label, {})
    epsilon = state.get("privacy", {}).get("epsilon", metrics.get("epsilon"))
    return None if epsilon is None else float(epsilon)


def epsilon_of(result: Result, label: str) -> float | None:
    """Epsilon of a system in a table; None without differential privacy."""
    federated = (marked(result.experiment), f"  {BEFORE}")
    if label in federated and result.experiment.federated:
        return result.epsilon
    return _baseline_epsilon(result, label)


def is_private(result: Result, label: str) -> bool:
    """True if a row of a table has a finite epsilon."""
    epsilon = epsilon_of(result, label)
    return epsilon is not None and math.isfinite(epsilon)


# Bootstrap intervals of means over users (Efron 1979), of many samples at once.
#
# A resample of n users is a row of n counts, how often each user is drawn. All samples of n values
# share the rows, so the means of all resamples are one product of two matrices, and drawing, which
# dominates the time, is done once. With many users fewer resamples suffice: their number is bounded
# by 50 million draws in total, but is at least 1,000.

_DRAWS = 50_000_000  # in all
_FEWEST = 1000  # resamples
_CELLS = 2_000_000  # counts held at once, 16 MB

Interval = tuple[float, float]


def bootstrap_intervals(
    samples: Sequence[np.ndarray], *, resamples: int = 10_000
) -> list[Interval]:
    """95 % percentile bootstrap intervals of the means of samples, in order.

    Args:
        samples: finite values `[n]`, one array per sample, of any lengths.
        resamples: largest number of resamples per sample, see above; samples of equal length share
            their draws.

    Raises:
        ValueError: a sample has no values.
    """
    lengths = np.array([len(values) for values in samples], dtype=np.int64)
    if not lengths.all():
        raise ValueError("Expected values, got none.")
    ends = np.empty((len(samples), 2))
    for length in np.unique(lengths):
        indices = np.flatnonzero(lengths == length)
        table = np.stack([samples[index] for index in indices.tolist()], axis=1).astype(np.float64)
        ends[indices] = np.quantile(_resampled(table, resamples), [0.025, 0.975], axis=0).T
    return [(low, high) for low, high in ends.tolist()]


def _resampled(table: np.ndarray, resamples: int) -> np.ndarray:
    """Means `[resamples, samples]` of resamples of the rows of `table [n, samples]`."""
    users = len(table)
    resamples = min(resamples, max(_FEWEST, _DRAWS // users))
    random = np.random.default_rng(0)
    means = []
    at_once = max(1, _CELLS // users)
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        drawn = random.integers(0, users, (count, users), dtype=np.int64)
        drawn += np.arange(count)[:, None] * users
        counts = np.bincount(drawn.ravel(), minlength=count * users).reshape(count, users)
        means.append(counts.astype(np.float64) @ table / users)
    return np.concatenate(means)


# Paired tests over users, and over seeds: whether one system is better than another.
#
# A difference of means over users is tested three ways, because metrics of single users are far
# from normal: Student's paired t, Wilcoxon's signed ranks, and a bootstrap interval of the mean
# difference (Sakai 2014; Smucker, Allan and Carterette 2007). With several comparisons, p-values
# are corrected by Holm's step-down procedure.
#
# A test over users holds for the seeds that were run: it treats training and split as given. A test
# over seeds treats each seed's mean difference as one value, and so includes their variation.


def _seed_test(differences: np.ndarray) -> dict[str, float]:
    """Paired t test over seeds.

    Args:
        differences: system minus reference, mean over users by seed, `[seeds]`.

    Returns:
        `common_seeds`, the number of seeds; `seed_difference`, the mean difference; and `seed_p`,
        the two-sided p-value, in [0, 1], with `common_seeds` - 1 degrees of freedom; NaN with one
        seed, or where all seeds have the same difference.
    """
    varied = len(differences) > 1 and float(np.ptp(differences)) > 0
    p = _t_test(differences) if varied else math.nan
    return {
        "common_seeds": len(differences),
        "seed_difference": float(differences.mean()),
        "seed_p": p,
    }


def paired_tests(
    differences: Sequence[np.ndarray], *, lower_is_better: bool = False
) -> list[dict[str, float]]:
    """Test several comparisons over users with shared bootstrap draws.

    Args:
        differences: for each comparison, system minus reference by user, `[users]`; NaN for a user
            without a value.
        lower_is_better: whether a negative difference is an improvement.

    Returns:
        For each comparison: `users`, the number of users with a value by both; `difference`, the
        mean of system minus reference; `low` and `high`, the ends of its bootstrap interval; `t_p`
        and `wilcoxon_p`, two-sided p-values of the paired t test and of Wilcoxon's signed-rank
        test, in [0, 1], 1 if no user differs; `effect`, Cohen's d of paired differences (mean /
        standard deviation), 0 if no user differs; `better` and `worse`, the numbers of users with a
        better and a worse value of the system.

    Raises:
        ValueError: a comparison has fewer than two users with values.
    """
    samples = [values[np.isfinite(values)] for values in differences]
    if min(map(len, samples), default=2) < 2:
        raise ValueError("Expected two users or more with both values in each comparison.")
    sign = -1 if lower_is_better else 1
    return [
        _tested(values, *ends, sign)
        for values, ends in zip(samples, bootstrap_intervals(samples), strict=True)
    ]


def _tested(differences: np.ndarray, low: float, high: float, sign: int) -> dict[str, float]:
    spread = float(differences.std(ddof=1))
    mean = float(differences.mean())
    differ = bool(differences.any())
    if differ and spread > 0:
        t_p = _t_test(differences)
        effect = mean / spread
    else:  # all differences are equal
        t_p, effect = (0.0, math.copysign(math.inf, mean)) if differ else (1.0, 0.0)
    return {
        "users": len(differences),
        "difference": mean,
        "low": low,
        "high": high,
        "t_p": t_p,
        "wilcoxon_p": wilcoxon(differences),
        "effect": effect,
        "better": int((sign * differences > 0).sum()),
        "worse": int((sign * differences < 0).sum()),
    }


def _t_test(differences: np.ndarray) -> float:
    from scipy import stats  # importing it is slow, and a run without baselines tests nothing

    return float(np.asarray(stats.ttest_1samp(differences, 0.0))[1])


def wilcoxon(differences: np.ndarray) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test (1945) that differences are symmetric
    about 0, in [0, 1]; 1 if no user differs.

    Args:
        differences: finite values, `[users]`; zeros are left out.
    """
    from scipy import stats  # as above

    changes = differences[differences != 0]
    return float(np.asarray(stats.wilcoxon(changes))[1]) if len(changes) else 1.0


def _holm(p_values: np.ndarray) -> np.ndarray:
    """P-values `float [n]` with Holm's correction (1979), in order, at most 1; NaN, for a missing
    test, stays NaN and does not count."""
    corrected = np.array(p_values, dtype=np.float64)
    order = np.argsort(corrected, kind="stable")  # NaN last
    order = order[: np.isfinite(corrected).sum()]
    rising = np.maximum.accumulate(corrected[order] * np.arange(len(order), 0, -1))
    corrected[order] = np.minimum(1.0, rising)
    return corrected


# Paired comparison of runs over users: differences between systems, with intervals and tests.
#
# Runs that differ in nothing but their seed are one system. Each user counts once: a user who was
# tested under several seeds enters with the mean of its differences. With several seeds, a second
# test is over seeds, each with its mean difference. Only systems that were tested on the same users
# of the same data are compared.

_LEVELS: list = ["seed", "client"]
_SAME = ("dataset", "split", "task", "positive-above")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Comparison of all systems of runs with a reference system.

    Attributes:
        metric: the metric that is compared.
        lower_is_better: whether smaller values are better.
        reference: label of the system that the others are compared with.
        inputs: inputs of each system in the first run that states them; None: not stated.
        table: one row per system: `mean`, `mean_low`, `mean_high` (95% over users), `sd` over
            seeds, `seeds`, `private` (a finite epsilon in every run), its inputs
            (`fedrec.report.inputs.COLUMNS`, with `_`), and for all but the reference what
            `paired_tests` and `_seed_test` return, with `t_holm`, `wilcoxon_holm` and `seed_holm`.
    """

    metric: str
    lower_is_better: bool
    reference: str
    inputs: dict[str, Inputs | None]
    table: pd.DataFrame


def compare(
    results: Sequence[Result], *, metric: str | None = None, against: str | None = None
) -> Comparison:
    """Compare all systems of runs with a reference system.

    Args:
        results: results of finished runs.
        metric: a column of users.csv; default: hits@10, the first hit rate, rmse, or the first.
        against: label of the reference; default: the first run's system.

    Raises:
        ExperimentError: the runs have different data or splits, the metric or system is unknown, or
            there is only one system.
    """
    _check_same_data(results)
    tables = results[0].users, *results[0].baseline_users.values()
    columns = [str(name) for table in tables for name in table]
    metric = metric or main_metric(columns) or "hits@10"
    lower = lower_is_better(metric, results[0].experiment.evaluation)
    systems = _systems(results, metric)
    reference = against or next(iter(systems))
    if reference not in systems:
        raise unknown("system", reference, systems)
    if len(systems) < 2:
        fix = "name more runs, or add evaluation.baselines"
        raise ExperimentError(f"only one system to compare: {reference}", fix=fix)
    for system in systems.values():
        if system.users.isna().all():
            raise ExperimentError(
                f"no test user of {system.label!r} has a value of {metric}",
                fix="choose another --metric (some cover only items that a user does not know), or"
                " hold out items that users have no other row of",
            )
    differences = {
        label: _differences(system, systems[reference])
        for label, system in systems.items()
        if label != reference
    }
    over_users = paired_tests(
        [_means_by("client", values) for values in differences.values()], lower_is_better=lower
    )
    over_seeds = (_seed_test(_means_by("seed", values)) for values in differences.values())
    tested = [users | seeds for users, seeds in zip(over_users, over_seeds, strict=True)]
    tests = pd.DataFrame(tested, list(differences))
    for name in ("t", "wilcoxon", "seed"):
        tests[f"{name}_holm"] = _holm(tests[f"{name}_p"].to_numpy())
    means = pd.DataFrame(_means(list(systems.values())), list(systems))
    inputs = {label: system.inputs for label, system in systems.items()}
    nothing = dict.fromkeys(COLUMNS)
    cells = [nothing if stated is None else stated.cells() for stated in inputs.values()]
    named = pd.DataFrame(cells, list(inputs)).rename(columns=lambda name: name.replace("-", "_"))
    table = means.join([named, tests]).rename_axis("system")
    return Comparison(metric, lower, reference, inputs, table)


def system_users(result: Result) -> dict[str, pd.DataFrame]:
    """Per-user metrics of each system of a run, by label: the federated one first, if any."""
    federated = {marked(result.experiment): result.users} if result.experiment.federated else {}
    # the last one keeps its table from a baseline of the same label
    return {**federated, **result.baseline_users, **federated}


class _Compared(NamedTuple):
    """Name of a system in tables; metric of each user, indexed by (seed, client), and its mean
    under each seed; whether its epsilon is finite in every run; and its inputs."""

    label: str
    users: pd.Series
    by_seed: np.ndarray
    private: bool
    inputs: Inputs | None


def _means(systems: Sequence[_Compared]) -> list[dict[str, Any]]:
    """Mean of each system, with its interval over users and its deviation over seeds."""
    users = [_means_by("client", system.users) for system in systems]
    return [
        {
            "private": system.private,
            "seeds": len(system.by_seed),
            "mean": float(system.by_seed.mean()),
            "sd": float(system.by_seed.std(ddof=1)) if len(system.by_seed) > 1 else np.nan,
            "mean_low": low,
            "mean_high": high,
        }
        for system, (low, high) in zip(systems, bootstrap_intervals(users), strict=True)
    ]


def _differences(system: _Compared, reference: _Compared) -> pd.Series:
    """Differences of each user under each seed, indexed by (seed, client)."""
    differences = pd.Series((system.users - reference.users).dropna())
    if differences.index.get_level_values("client").nunique() < 2:
        raise ExperimentError(
            f"{system.label!r} and {reference.label!r} were tested on different users",
            expected="the same test users under the same seed",
            got=f"{len(differences)} users in common",
            fix="run both with the same [dataset], [split], evaluation and seed",
        )
    return differences


def _means_by(level: str, values: pd.Series) -> np.ndarray:
    """Mean of each seed or client with a value."""
    return pd.Series(values.groupby(level=level).mean()).dropna().to_numpy()


def _systems(results: Sequence[Result], metric: str) -> dict[str, _Compared]:
    values: dict[str, dict[int, pd.Series]] = {}
    private: dict[str, bool] = {}
    inputs: dict[str, Inputs | None] = {}
    for run, baselines in zip(named(results), _baseline_names(results), strict=True):
        result = run.result
        federated = marked(result.experiment)
        stated = system_inputs(result)
        for label, table in system_users(result).items():
            if metric not in table:
                continue
            name = run.name if label == federated else baselines[label]
            inputs[name] = inputs.get(name) or stated.get(label)
            private[name] = private.get(name, True) and is_private(result, label)
            by_seed = values.setdefault(name, {})
            by_seed.setdefault(result.experiment.seed, pd.Series(table[metric]))
    if not values:
        raise unknown("metric", metric, sorted({str(name) for r in results for name in r.users}))
    return {
        name: _Compared(
            name,
            pd.concat(by_seed, names=_LEVELS),
            np.array([float(series.mean()) for series in by_seed.values()]),
            private[name],
            inputs[name],
        )
        for name, by_seed in values.items()
    }


def _check_same_data(results: Sequence[Result]) -> None:
    """Check that all runs were tested on the same data and rows."""
    first, *others = (_tested_on(result) for result in results)
    for result, settings in zip(results[1:], others, strict=True):
        keys = [key for key in first | settings if first.get(key) != settings.get(key)]
        if keys:
            names = [key for key in keys if key.endswith(".name")]
            expected, got = (
                ", ".join(f"{key} = {table.get(key)!r}" for key in names or keys)
                for table in (first, settings)
            )
            raise ExperimentError(
                f"{result.folder.name} cannot be compared with {results[0].folder.name}",
                expected=expected,
                got=got,
                fix="compare runs on the same data and split, evaluated on the same rows",
            )


def _tested_on(result: Result) -> dict[str, Any]:
    """Settings of the data, the split and the tested rows, without those that change only
    training."""
    table = _settings_table(result)
    sections = {key: table.get(key) for key in _SAME}
    evaluation = {"held-out": result.experiment.evaluation.held_out}
    settings = dict(flat(sections | {"evaluation": evaluation}))
    settings.pop("split.leaky-negatives", None)
    return settings
