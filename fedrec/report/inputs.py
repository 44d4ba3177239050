# SPDX-License-Identifier: Apache-2.0
"""What each system of a table had to learn from, in words and as codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedrec.components import registry
from fedrec.config import Config
from fedrec.data.features import FeatureNames
from fedrec.data.population import reader_of
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import make_baseline
from fedrec.experiment.schema import Experiment, marked
from fedrec.experiment.sections import component_settings
from fedrec.models.base import Model
from fedrec.runs.result import Result

# What each system of a table had to learn from, beside who liked which item in training.
#
# It follows from the resolved experiment and the components' classes: the dataset names its side
# features (`Reader.feature_names`), models and centralised systems say which of them they use
# (`features_used`), a setting called `low-rated`, wherever a component has it, tells the weight of
# rated items that are not positive, and the split whether test users train with their known rows.

COLUMNS = (
    "user-features",
    "item-features",
    "low-rated",
    "test-users",
    "client-rounds",
    "settings-tried",
)
"""Names of an `Inputs`' fields in a table for programs, in their order."""
_TRAINED = (registry.MODEL, registry.STEP, registry.STRATEGY)


@dataclass(frozen=True)
class Inputs:
    """The inputs of one system.

    Attributes:
        user_features: names of the users' side features that it uses.
        item_features: names of the items' side features that it uses.
        low_rated: weights of rated items that are not positive, or how they are used
            (`"negative"`); empty: they are ignored.
        test_users: whether it is trained with the known rows of the users that it is tested on.
        client_rounds: participations of clients in rounds, added up; None: it has no clients.
        settings_tried: number of settings that were tried to choose its own; None: not stated.
    """

    user_features: tuple[str, ...] = ()
    item_features: tuple[str, ...] = ()
    low_rated: tuple[str, ...] = ()
    test_users: bool = False
    client_rounds: int | None = None
    settings_tried: int | None = None

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> Inputs:
        """From its fields as JSON values."""
        lists = {key: tuple(one) for key, one in table.items() if isinstance(one, list)}
        return cls(**{**table, **lists})

    def cells(self) -> dict[str, Any]:
        """By the names of `COLUMNS`: lists as texts, "yes" or "no", numbers or None."""
        values = [getattr(self, field.name) for field in fields(self)]
        return dict(zip(COLUMNS, map(_plain, values), strict=True))


def system_inputs(result: Result) -> dict[str, Inputs | None]:
    """The inputs of the federated system (first, if there is one) and of the baselines, by label;
    None where they cannot be stated: a component is not installed here, or its dataset does not
    name its features."""
    experiment = result.experiment
    found: dict[str, Inputs | None] = {}
    if experiment.federated:
        found[marked(experiment)] = _federated(result)
    settings = experiment.evaluation.baseline_settings()
    stand_ins = [label for label in result.baselines if label not in settings]
    for label in (*settings, *stand_ins):
        found[label] = _central(experiment, label, settings.get(label, {}))
    return found


def _federated(result: Result) -> Inputs | None:
    experiment = result.experiment
    try:
        known = _features(experiment)
        model: type[Model] = registry.resolve(registry.MODEL, experiment.model.name)
        settings = {kind: experiment.settings(kind) for kind in _TRAINED}
        fine_tuned = component_settings(registry.STEP, experiment.fine_tune_step())
    except ExperimentError:
        return None
    if known is None:
        return None
    tables = [_table(one) for one in (*settings.values(), fine_tuned)]
    clients = result.rounds.get("num-clients")
    used = model.features_used(settings[registry.MODEL], known)
    return Inputs(
        used.users,
        used.of_items,
        low_rated=_low_rated(experiment, tables),
        test_users=_test_users_train(experiment),
        client_rounds=None if clients is None else int(clients.sum()),
        settings_tried=experiment.settings_tried,
    )


def _central(experiment: Experiment, label: str, options: Mapping[str, Any]) -> Inputs | None:
    try:
        known = _features(experiment)
        baseline = make_baseline(label, options)
    except ExperimentError:
        return None
    if known is None:
        return None
    used = baseline.features_used(baseline.config, known)
    return Inputs(
        used.users,
        used.of_items,
        low_rated=_low_rated(experiment, [_table(baseline.config)]),
        test_users=baseline.transductive or _test_users_train(experiment),
        settings_tried=experiment.evaluation.settings_tried().get(label),
    )


def _features(experiment: Experiment) -> FeatureNames | None:
    return reader_of(experiment).stated_features()


def _test_users_train(experiment: Experiment) -> bool:
    """Whether the split lets the users who are tested train: all do, unless it holds users out."""
    return getattr(experiment.settings(registry.SPLIT), "generalisation", "weak") == "weak"


def _low_rated(experiment: Experiment, tables: Sequence[Any]) -> tuple[str, ...]:
    """Weights of rated items that are not positive, distinct; none where there are no such rows."""
    if experiment.task != "ranking" or experiment.positive_above is None:
        return ()
    return tuple(dict.fromkeys(weight for table in tables for weight in low_rated_weights(table)))


def low_rated_weights(table: Any) -> list[str]:
    """What settings called `low-rated`, in a component's table and in those within it, say of rated
    items that are not positive, where they do not leave them out."""
    used = [value for value in _all(table, "low-rated") if value not in (0, "ignore")]
    return [f"{one:g}" if isinstance(one, float) else str(one) for one in used]


def _all(table: Any, key: str) -> Iterator[Any]:
    """The values of a key in a table and in the tables and lists within it."""
    if isinstance(table, Mapping):
        yield from (value for name, value in table.items() if name == key)
        yield from (found for value in table.values() for found in _all(value, key))
    elif isinstance(table, list | tuple):
        yield from (found for value in table for found in _all(value, key))


def _table(settings: Any) -> Any:
    return settings.table() if isinstance(settings, Config) else settings


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return ", ".join(value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


# The inputs of a table's systems in short: a code for each row, a legend of the codes, and a
# warning where rows differ, as such rows do not tell which system is better with equal inputs.
#
#     U, U1, U2   side features of users; numbered where rows use different ones
#     G, E, Ge    one side feature of items each, by its initial, or the shortest beginning that is
#                 not taken
#     L           rated items that are not positive
#     T           known rows of test users in training
#     -           none of these: who liked which item, alone
#     ?           not stated

_NAMED = 2  # systems in a warning; of more the rest is counted
_RESERVED = ("U", "L", "T")
_NOTHING = "-"
_UNKNOWN = "?"


@dataclass(frozen=True)
class InputCodes:
    """The inputs of a table in short.

    Attributes:
        codes: by row.
        legend: what the codes mean, one line; empty where no row has any.
        warning: which rows have inputs that others have not, one line; empty where all are equal.
    """

    codes: dict[str, str]
    legend: str
    warning: str

    @property
    def lines(self) -> list[str]:
        """Legend and warning, where there are any."""
        return [line for line in (self.legend, self.warning) if line]


def input_codes(rows: Mapping[str, Inputs | None]) -> InputCodes:
    """The codes of a table's rows.

    Args:
        rows: inputs of each row; None: not stated.
    """
    having: dict[str, dict[str, None]] = {}  # the rows that have each input, by its words
    for row, inputs in rows.items():
        for words in _words(inputs):
            having.setdefault(words, {})[row] = None
    short = _short(list(having))
    codes = {
        row: _UNKNOWN if inputs is None else " ".join(short[one] for one in _words(inputs))
        for row, inputs in rows.items()
    }
    known = [row for row, inputs in rows.items() if inputs is not None]
    legend = "; ".join(f"{short[words]}: {words}" for words in having)
    weights = sorted({one for inputs in rows.values() if inputs for one in inputs.low_rated})
    if weights:
        legend = legend.replace(_LOW, f"{_LOW} (weight {', '.join(weights)})")
    return InputCodes(
        {row: code or _NOTHING for row, code in codes.items()},
        f"inputs: {legend}" if legend else "",
        _warning(having, known),
    )


def budgets(rows: Mapping[str, Inputs | None]) -> list[str]:
    """Client-rounds and numbers of settings tried of a table's rows, where they are known, one line
    at most: one number if all rows have the same, each row's number if rows differ, the smallest and
    the largest if there are many different rows."""
    texts = []
    for title, key in (("client-rounds", "client_rounds"), ("settings tried", "settings_tried")):
        numbers = {
            row: value for row, inputs in rows.items() if (value := getattr(inputs, key, None))
        }
        distinct = sorted(set(numbers.values()))
        if len(numbers) > 1 and len(distinct) == 1:
            texts.append(f"{title}: {distinct[0]:,} each")
        elif len(numbers) > _LISTED:
            texts.append(f"{title}: {distinct[0]:,} to {distinct[-1]:,}")
        elif numbers:
            texts.append(f"{title}: " + ", ".join(f"{row} {n:,}" for row, n in numbers.items()))
    return ["; ".join(texts)] if texts else []


_LISTED = 6  # rows whose own numbers are listed
_LOW = "rated items that are not liked"
_TEST = "known rows of test users in training"


def _words(inputs: Inputs | None) -> list[str]:
    """Each input in words."""
    if inputs is None:
        return []
    found = [f"users' {_listed(inputs.user_features)}"] if inputs.user_features else []
    found += [f"items' {name}" for name in inputs.item_features]
    found += [_LOW] if inputs.low_rated else []
    return found + ([_TEST] if inputs.test_users else [])


def _short(inputs: Sequence[str]) -> dict[str, str]:
    """The code of each input, given in words."""
    users = [words for words in inputs if words.startswith("users' ")]
    found = {words: f"U{n}" if len(users) > 1 else "U" for n, words in enumerate(users, 1)}
    found |= {_LOW: "L", _TEST: "T"}
    for words in inputs:
        if words not in found:
            name = words.removeprefix("items' ").capitalize()
            taken = {*_RESERVED, *found.values()}
            free = (name[:end] for end in range(1, len(name)) if name[:end] not in taken)
            found[words] = next(free, name)
    return found


def _warning(having: Mapping[str, Mapping[str, None]], rows: Sequence[str]) -> str:
    """Who has what, by the rows that have it, or by those that have not if these are fewer."""
    apart: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for words, own in having.items():
        others = [row for row in rows if row not in own]
        if others:
            some = len(own) <= len(others)
            apart.setdefault((tuple(own) if some else tuple(others), some), []).append(words)
    said = [
        f"{_listed(names)} {_verb(names, some)} {_listed(words, 'and' if some else 'nor')}"
        for (names, some), words in apart.items()
    ]
    return f"rows differ in their inputs: {'; '.join(said)}" if said else ""


def _verb(names: Sequence[str], some: bool) -> str:
    has = "has" if len(names) == 1 else "have"
    return f"alone {has}" if some else f"{has} no"


def _listed(names: Sequence[str], last: str = "and") -> str:
    """Names in a sentence; of many the first, and how many others there are."""
    names = [name.strip() for name in names]
    if last == "and" and len(names) > _NAMED + 1:
        names = [*names[:_NAMED], f"{len(names) - _NAMED} others"]
    return f" {last} ".join([part for part in (", ".join(names[:-1]), names[-1]) if part])
