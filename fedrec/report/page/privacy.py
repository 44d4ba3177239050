# SPDX-License-Identifier: Apache-2.0
"""Privacy cards: the guarantee of a run and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedrec.privacy.config import PrivacyConfig
from fedrec.report.naming import Run
from fedrec.report.page.charts import Line, line_chart
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from fedrec.runtime.text_files import read_json

RELEASE = "Simulation, not a release: the noise can be recomputed from the seed."
_UNITS = {
    "replace-one": "one user: all of its data, replaced by another user's",
    "add-remove": "one user: all of its data, added or removed",
}
_ATTACKS = {"audit.json": "audit", "attack.json": "attack"}


@dataclass(frozen=True)
class PrivacyCard:
    """The privacy of one run.

    Attributes:
        name: of the run.
        facts: name and value, in order.
        lines: meaning and limits, in sentences.
        chart: epsilon by round, SVG; empty without.
        release: text that must accompany the epsilon; empty if none.
    """

    name: str
    facts: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    chart: str = ""
    release: str = ""


def privacy_cards(runs: Sequence[Run]) -> list[PrivacyCard]:
    """A card per run."""
    return [_card(run.label, run.result) for run in runs]


def _card(name: str, result: Result) -> PrivacyCard:
    privacy = result.experiment.privacy
    if privacy is None:
        none = (
            ("epsilon", "∞: no differential privacy; the model may reveal anything about a user"),
        )
        return PrivacyCard(name, (*none, *_attacks(result)), result.privacy)
    kept = RunFolder(result.folder).summary().get("privacy", {})
    epsilons = {
        key.removeprefix("epsilon of "): _number(value)
        for key, value in kept.items()
        if key.startswith("epsilon of ")
    }
    facts = [
        ("epsilon", f"{_number(kept.get('epsilon'))} at delta {kept.get('delta', 0):g}"),
        *([("epsilon by accountant", str(kept["accountants"]))] if "accountants" in kept else []),
        *_by_phase("epsilon", epsilons),
        ("unit", _UNITS.get(privacy.adjacency, privacy.adjacency)),
        ("adjacency", privacy.adjacency),
        ("accountant", str(kept.get("method", privacy.backend))),
        ("mechanism", f"{privacy.mechanism}, noise added: {privacy.placement}"),
        *_clip_norms(privacy, epsilons),
        ("releases", str(kept.get("releases", "-"))),
        *_interruption(kept),
        *_attacks(result),
    ]
    if kept.get("noise"):
        facts.append(("noise and signal", " ".join(kept["noise"])))
    return PrivacyCard(
        name,
        tuple(facts),
        result.privacy,
        _chart(result),
        RELEASE if privacy.mode == "reproducible" else "",
    )


def _interruption(kept: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Charges for repeated rounds, and rounds that the budget left out, where there are any."""
    counts = {key: kept.get(key, 0) for key in ("charged-again", "rounds-not-run")}
    return [(key.replace("-", " "), str(count)) for key, count in counts.items() if count]


def _by_phase(name: str, values: Mapping[str, str]) -> list[tuple[str, str]]:
    """A fact per phase; none for a single phase."""
    several = values if len(values) > 1 else {}
    return [(f"{name} of phase {phase}", value) for phase, value in several.items()]


def _clip_norms(privacy: PrivacyConfig, phases: Iterable[str]) -> list[tuple[str, str]]:
    """The clip norm of each phase, or the only one; with adaptive clipping where it starts."""
    moves = " at first (adaptive)" if privacy.adaptive_clip else ""
    norms = {
        phase: f"{privacy.in_phase(phase).clip_norm:g}{moves}"
        for phase in phases
        if privacy.covers(phase)
    }
    if len(set(norms.values())) > 1:
        return _by_phase("clip norm", norms)
    return [("clip norm", next(iter(norms.values()), f"{privacy.clip_norm:g}{moves}"))]


def _chart(result: Result) -> str:
    rounds = result.rounds
    if "epsilon" not in rounds or len(rounds) < 2:
        return ""
    line = Line("epsilon", rounds["round"].tolist(), rounds["epsilon"].tolist())
    return line_chart([line], title="Epsilon spent by round", x_label="round", y_label="epsilon")


def _attacks(result: Result) -> list[tuple[str, str]]:
    """Results of audits and attacks of this run folder, or a remark that there are none or that a
    file is damaged."""
    found = []
    for file, name in _ATTACKS.items():
        table = _json(result, file)
        if not table and (result.folder / file).exists():
            found.append((name, f"{file} cannot be read"))
        numbers = [
            f"{key} {value:.4g}" for key, value in table.items() if isinstance(value, float | int)
        ]
        if numbers:
            found.append((name, ", ".join(numbers[:6])))
    return found or [("audit", "none was run (fedrec audit, fedrec attack)")]


def _json(result: Result, name: str) -> dict[str, Any]:
    try:
        found = read_json(result.folder / name)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: object) -> str:
    if isinstance(value, float | int):
        return f"{value:.4g}"
    return "∞" if value == "inf" else "-"
