# SPDX-License-Identifier: Apache-2.0
"""Inputs of the systems of a table, as values and in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from typing import Any

from fedrec.components import registry
from fedrec.components.sections import component_settings
from fedrec.config import Config
from fedrec.data.interactions import FeatureNames
from fedrec.data.population import reader_of
from fedrec.errors import ExperimentError
from fedrec.evaluation.central import make_baseline
from fedrec.experiment.schema import Experiment, marked
from fedrec.models.base import Model
from fedrec.runs.folder import Result
from fedrec.runtime.ragged import flat

# The inputs of a system in addition to the likes in training.
#
# It follows from the resolved experiment and the components' classes: the dataset names its side
# features (`Reader.feature_names`), models and centralised systems state those that they use
# (`features_used`), a setting called `low-rated`, wherever a component has it, tells the weight of
# rated items that are not positive, and the split whether test users train with their known rows.

_BUDGETS = {"client-rounds": "client_rounds", "settings tried": "settings_tried"}
DIFFERENT = "rows differ in their inputs"
"""Start of the line of a table whose rows have different inputs."""
_LIKES = "likes alone"
_UNKNOWN = "not stated"
_LISTED = 6  # rows whose own numbers are listed
_TRAINED = (registry.MODEL, registry.STEP, registry.STRATEGY)


@dataclass(frozen=True)
class Inputs:
    """Inputs of one system.

    Attributes:
        user_features: names of the users' side features that it uses.
        item_features: names of the items' side features that it uses.
        low_rated: weights of rated items that are not positive, or how they are used
            (`"negative"`); empty: they are ignored.
        test_users: whether the known rows of the test users are used in training.
        client_rounds: total participations of clients in rounds; None: it has no clients.
        settings_tried: number of settings tried in tuning; None: not stated.
    """

    user_features: tuple[str, ...] = ()
    item_features: tuple[str, ...] = ()
    low_rated: tuple[str, ...] = ()
    test_users: bool = False
    client_rounds: int | None = None
    settings_tried: int | None = None

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> Inputs:
        """Create from the fields as JSON values."""
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        return cls(**{**table, **lists})

    def cells(self) -> dict[str, Any]:
        """Return the values by `COLUMNS`: lists as texts, "yes" or "no", numbers or None."""
        cells: dict[str, Any] = dict(zip(COLUMNS, astuple(self), strict=True))
        for name, value in cells.items():
            if isinstance(value, tuple):
                cells[name] = ", ".join(value)
            elif isinstance(value, bool):
                cells[name] = "yes" if value else "no"
        return cells


COLUMNS = tuple(field.name.replace("_", "-") for field in fields(Inputs))
"""Names of an `Inputs`' fields in a table for programs, in their order."""


def system_inputs(result: Result) -> dict[str, Inputs | None]:
    """Inputs of the federated system (first, if any) and of the baselines, by label; None if
    unknown, because a component is not installed or the dataset does not name its features."""
    experiment = result.experiment
    settings = experiment.evaluation.baseline_settings()
    federated = [marked(experiment)] if experiment.federated else []
    inputs: dict[str, Inputs | None] = dict.fromkeys([*federated, *settings, *result.baselines])
    features = None
    with suppress(ExperimentError):
        features = reader_of(experiment).stated_features()
    if features is None:
        return inputs
    for label in inputs:
        with suppress(ExperimentError):
            inputs[label] = (
                _federated(result, features)
                if label in federated
                else _central(experiment, label, settings.get(label, {}), features)
            )
    return inputs


def _federated(result: Result, features: FeatureNames) -> Inputs:
    experiment = result.experiment
    model: type[Model] = registry.resolve(registry.MODEL, experiment.model.name)
    settings = {kind: experiment.settings(kind) for kind in _TRAINED}
    fine_tuned = component_settings(registry.STEP, experiment.fine_tune_step())
    clients = result.rounds.get("num-clients")
    used = model.features_used(settings[registry.MODEL], features)
    return Inputs(
        used.users,
        used.of_items,
        low_rated=_low_rated(experiment, [*settings.values(), fine_tuned]),
        test_users=_test_users_train(experiment),
        client_rounds=None if clients is None else int(clients.sum()),
        settings_tried=experiment.settings_tried,
    )


def _central(
    experiment: Experiment, label: str, options: Mapping[str, Any], features: FeatureNames
) -> Inputs:
    baseline = make_baseline(label, options)
    used = baseline.features_used(baseline.config, features)
    return Inputs(
        used.users,
        used.of_items,
        low_rated=_low_rated(experiment, [baseline.config]),
        test_users=baseline.transductive or _test_users_train(experiment),
        settings_tried=experiment.evaluation.settings_tried().get(label),
    )


def _test_users_train(experiment: Experiment) -> bool:
    """True if test users also train, unless the split holds users out."""
    return getattr(experiment.settings(registry.SPLIT), "generalisation", "weak") == "weak"


def _low_rated(experiment: Experiment, settings: Iterable[Any]) -> tuple[str, ...]:
    """Distinct weights of rated items that are not positive; empty without such rows."""
    if experiment.task != "ranking" or experiment.positive_above is None:
        return ()
    tables = (item.table() if isinstance(item, Config) else item for item in settings)
    return tuple(dict.fromkeys(weight for table in tables for weight in low_rated_weights(table)))


def low_rated_weights(table: Mapping[str, Any]) -> list[str]:
    """Values of `low-rated` settings in a component's nested tables, unless they leave out rated
    items that are not positive."""
    values = [value for key, value in flat(table) if key.rpartition(".")[2] == "low-rated"]
    weights = [value for value in values if value not in (0, "ignore")]
    return [f"{weight:g}" if isinstance(weight, float) else str(weight) for weight in weights]


# The inputs of a table's rows in words, with a warning where rows differ, as such rows do not tell
# which system is better with equal inputs.


def inputs_line(rows: Mapping[str, Inputs | None]) -> str:
    """Describe the inputs of a table's rows, by groups of rows if they differ. Empty if all rows
    learn from likes alone, or none states its inputs.

    Args:
        rows: inputs of each row; None: not stated.
    """
    groups: dict[str, list[str]] = {}
    for row, inputs in rows.items():
        groups.setdefault(_text(inputs), []).append(row.strip())
    if len(groups) == 1:
        (text,) = groups
        return "" if text in (_LIKES, _UNKNOWN) else f"inputs: {text}"
    texts = sorted(groups, key=lambda text: len(groups[text]))
    names = [" / ".join(groups[text]) for text in texts]
    if names and len(groups[texts[-1]]) > 1:
        names[-1] = "all others"
    named = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
    return f"{DIFFERENT}: {'; '.join(named)}" if named else ""


def budgets_line(rows: Mapping[str, Inputs | None]) -> str:
    """Describe client-rounds and numbers of settings tried of a table's rows, where known.

    One number if all rows have the same, each row's number if rows differ, the smallest and the
    largest if many rows differ.
    """
    texts = []
    for title, field in _BUDGETS.items():
        numbers = {
            row: number for row, inputs in rows.items() if (number := getattr(inputs, field, 0))
        }
        distinct = sorted(set(numbers.values()))
        if len(numbers) > 1 and len(distinct) == 1:
            texts.append(f"{title}: {distinct[0]:,} each")
        elif len(numbers) > _LISTED:
            texts.append(f"{title}: {distinct[0]:,} to {distinct[-1]:,}")
        elif numbers:
            listed = ", ".join(f"{row} {number:,}" for row, number in numbers.items())
            texts.append(f"{title}: {listed}")
    return "; ".join(texts)


def _text(inputs: Inputs | None) -> str:
    if inputs is None:
        return _UNKNOWN
    weights = f" (weight {', '.join(inputs.low_rated)})"
    texts = {
        f"users' {', '.join(inputs.user_features)}": inputs.user_features,
        f"items' {', '.join(inputs.item_features)}": inputs.item_features,
        f"rated items that are not liked{weights}": inputs.low_rated,
        "known rows of test users in training": inputs.test_users,
    }
    return " + ".join(text for text, used in texts.items() if used) or _LIKES
