# SPDX-License-Identifier: Apache-2.0
"""Small versions of experiments for `--quick`: the same components on synthetic data, with
meaningless numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedrec.components.registry import BASELINE, resolve
from fedrec.errors import ExperimentError

DATA = {
    "name": "synthetic",
    "users": 60,
    "items": 50,
    "mean-interactions": 14,
    "min-interactions": 8,
}
_ROUNDS = 2
_COHORT = 6
_USERS = 10
_SMALL: dict[str, Any] = {"epochs": 1, "items": 20, "factors": 2, "steps": 2, "iterations": 1}

_ABSENT = ("eras", "item.c")  # features of MovieLens-1M and of Frappe


def shrunk(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the same model, step, strategy, noise and baselines, that runs in about a
    second."""
    small = {key: _without_absent(value) for key, value in table.items()}
    table = small.copy()
    small["dataset"] = dict(DATA)
    small["split"] = _split(dict(table.get("split", {})))
    if small.get("rounds"):
        small["rounds"] = _ROUNDS
        small["step"] = {**table.get("step", {}), "epochs": 1}
        small["sampler"] = _sampler(dict(table.get("sampler", {})))
    if "model" in small:
        small["model"] = {k: min(v, 20) if k == "items" else v for k, v in table["model"].items()}
    if "perturb" in small:
        small["perturb"] = _perturbation(dict(table["perturb"]))
    if "strategy" in small:
        small["strategy"] = _strategy(dict(table["strategy"]))
    evaluation = dict(table.get("evaluation", {}))
    fine_tune = evaluation.get("fine-tune")
    evaluation |= {"every": 0, "final-users": _USERS}
    if fine_tune:
        fewer = {"epochs": min(fine_tune["epochs"], 1)} if "epochs" in fine_tune else {}
        evaluation["fine-tune"] = {**fine_tune, **fewer}
    evaluation["baselines"] = [_baseline(one) for one in evaluation.get("baselines", [])]
    small["evaluation"] = evaluation
    return small


def _without_absent(value: Any) -> Any:
    """Synthetic items have only genres, so settings must not name parameters of other features."""
    if isinstance(value, Mapping):
        return {k: _without_absent(v) for k, v in value.items() if not _is_absent(k)}
    if isinstance(value, list):
        return [_without_absent(one) for one in value if not _is_absent(one)]
    return value


def _is_absent(name: object) -> bool:
    return any(feature in str(name) for feature in _ABSENT)


def _split(split: dict[str, Any]) -> dict[str, Any]:
    """Replaces splits that need files: `published` and shipped folds."""
    if split.get("name") == "published":
        return {"name": "ratio"}
    return {key: value for key, value in split.items() if key not in ("shipped", "folder")}


def _sampler(sampler: dict[str, Any]) -> dict[str, Any]:
    if "cohort" in sampler:
        sampler["cohort"] = min(int(sampler["cohort"]), _COHORT)
    return sampler


def _strategy(strategy: dict[str, Any]) -> dict[str, Any]:
    """Phases of a round each, whichever strategies they are nested in."""
    found = {
        key: _strategy(dict(v)) if isinstance(v, Mapping) else v for key, v in strategy.items()
    }
    if "rounds" in found:
        found["rounds"] = 1
    keep = strategy.get("keep")  # Krum's number of updates
    if isinstance(keep, int):
        found["keep"] = min(keep, _COHORT)
    return found


def _perturbation(perturb: dict[str, Any]) -> dict[str, Any]:
    if perturb.get("name") == "upc-sdg":
        perturb["embeddings"] = {**perturb.get("embeddings", {}), "epochs": 1}
    return perturb


def _baseline(entry: str | Mapping[str, Any]) -> dict[str, Any]:
    options = {"name": entry} if isinstance(entry, str) else dict(entry)
    try:
        known = resolve(BASELINE, str(options["name"])).Config.model_fields
    except ExperimentError:
        return options
    small = {key: value for key, value in _SMALL.items() if key in known}
    return {**options, **{k: v for k, v in small.items() if k in options or k == "epochs"}}
