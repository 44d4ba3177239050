# SPDX-License-Identifier: Apache-2.0
"""Explanations of the meaning of an epsilon for one user."""

from __future__ import annotations

import math

from fedrec.privacy.accounting.accountant import Report
from fedrec.privacy.adjacency import Adjacency


def probability_factor(epsilon: float) -> float:
    """Largest factor between the probabilities of a set of outcomes on neighbouring data, e^epsilon
    (delta aside); infinite if it exceeds the range of floats."""
    return math.exp(epsilon) if epsilon < 700 else math.inf


def attack_ceiling(epsilon: float, delta: float) -> float:
    """Largest accuracy of any membership attack on a fair coin: (e^epsilon + delta) / (1 +
    e^epsilon), at most 1."""
    return min(
        1.0, 1 / (1 + math.exp(-epsilon)) + delta * math.exp(-epsilon) / (1 + math.exp(-epsilon))
    )


def sentence(report: Report, adjacency: Adjacency) -> str:
    """One line: unit, epsilon, delta and adjacency, how strong that is, and its meaning for a
    user."""
    if math.isinf(report.epsilon):
        return f"epsilon is infinite at delta {report.delta:g}: nothing is guaranteed to anybody."
    question = (
        "whether the run used a user's data or another user's"
        if adjacency == "replace-one"
        else "whether a user took part"
    )
    unit = "all data of a user" if adjacency == "replace-one" else "a user's taking part"
    return (
        f"epsilon {report.epsilon:.4g} at delta {report.delta:g} for {unit} ({adjacency}) is"
        f" {_strength(report.epsilon)[0]}: who guesses {question} on a fair coin is right in"
        f" {_share(attack_ceiling(report.epsilon, report.delta))} of cases (50% without looking)."
    )


def _share(accuracy: float) -> str:
    """A largest share in words; one that would be rounded to all is not called a bound."""
    return f"at most {accuracy:.1%}" if accuracy < 0.9995 else "up to practically all"


def lines(report: Report, adjacency: Adjacency) -> list[str]:
    """A whole explanation, one paragraph per line: the meaning, the phases, the method, and what is
    not covered."""
    if not report.events:
        return ["No round was charged to the privacy ledger, so nothing is claimed."]
    said = [sentence(report, adjacency)]
    neighbour = (
        "with another user's data in place of one's own"
        if adjacency == "replace-one"
        else "without one's data"
    )
    if math.isfinite(report.epsilon):
        said.append(
            "Whatever an observer looks for in the model, its probability is at most"
            f" {probability_factor(report.epsilon):.3g} times what it would be {neighbour}, plus"
            f" {report.delta:g}. This is about sets of outcomes: the odds of a single outcome may"
            " change by more, with a probability that can exceed delta."
        )
        said.append(_strength(report.epsilon)[1])
    if report.attack is not None and math.isfinite(report.epsilon):
        proven = f"{report.epsilon:.4g}"
        reached = f"{report.attack:.4g}"
        said.append(
            f"The true epsilon is {proven}, to four digits: the proven bound and what the noise"
            " gives away to an observer who knows all else, both computed, agree."
            if proven == reached
            else f"The true epsilon lies between {reached} and {proven}, both computed from the"
            " noise: the former is what an observer who knows all else gets, the latter is proven."
        )
        said.append("Neither tests the code of the run, which an audit does (`fedrec audit`).")
    said += [f"Phase {phase} alone: epsilon {value:.4g}." for phase, value in _told(report.phases)]
    said.append(f"Method: {report.method}.")
    return [*said, *report.caveats]


def _told(phases: dict[str, float]) -> list[tuple[str, float]]:
    return list(phases.items()) if len(phases) > 1 else []


def _strength(epsilon: float) -> tuple[str, str]:
    """How strong a guarantee is: in a word, and as a sentence."""
    if epsilon <= 1:
        return "strong", "That is a strong guarantee."
    if epsilon <= 3:
        return "moderate", (
            "That is a moderate guarantee: the worst attack does far better than chance, and is"
            " still often wrong."
        )
    if epsilon <= 10:
        return "weak", (
            "That is a weak guarantee: it does not rule out an attack that is nearly always right."
        )
    return "very weak", (
        "That is next to no guarantee: it does not rule out an attack that is practically always"
        " right."
    )
