# SPDX-License-Identifier: Apache-2.0
"""What each system of a table had to learn from, beside who liked which item in training.

It follows from the resolved experiment and the components' classes: the dataset names its side
features (`Reader.feature_names`), models and centralised systems say which of them they use
(`features_used`), a setting called `low-rated`, wherever a component has it, tells the weight of
rated items that are not positive, and the split whether test users train with their known rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedrec.attacks.leaky_negatives import marked
from fedrec.components import registry
from fedrec.config import Config
from fedrec.data.features import FeatureNames
from fedrec.data.population import reader_of
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import make_baseline
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import component_settings
from fedrec.models.base import Model
from fedrec.runs.result import Result

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
