# SPDX-License-Identifier: Apache-2.0
"""Audits of strategies with phases, each with its own noise, and of every trained parameter: right
ones are not refuted, and an error in one phase or parameter is found there."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from fedrec.experiment.schema import load
from fedrec.privacy import mechanisms
from fedrec.privacy.accounting.accountant import Ledger
from fedrec.privacy.clipping import Clip
from fedrec.privacy.plan import Plan
from fedrec.training.results import BlockUpdate
from simulations.attacks.base import run_attack
from tests.simulations.helpers import experiment_on, synthetic

CANARIES = 100
COUNTS = {"parameters": ["item.bias"], "clip-norm": 3.0, "noise-factor": 2.0}
PEOPLE = synthetic(100, 40, 6, **{"min-interactions": 3})
BASE = experiment_on(PEOPLE, nodes=2, name="phased", rounds=2, sampler={"name": "full"})
PRIVACY = {"epsilon": 5.0, "clip-norm": 4.0}
GRAM = {
    **BASE,
    "model": {"name": "item-weights", "items": 25},
    "step": {"name": "gram", "exponent": 0.2},
    "strategy": {"name": "popularity-start", "main": {"name": "gram", "solution": "puresvd"}},
    "privacy": {**PRIVACY, "parameters": ["item.weights"], "phases": {"popularity": COUNTS}},
}
FOLD_IN = {
    **GRAM,
    "model": {"name": "fold-in", "items": 60, "factors": 4},
    "step": {"name": "gram", "low-rated": 0.3},
    "strategy": {
        "name": "popularity-start",
        "estimate": "posterior-mean",
        "main": {"name": "fold-in"},
    },
    "privacy": {**PRIVACY, "parameters": ["item.products"], "phases": {"popularity": COUNTS}},
}
SGD = {
    **BASE,
    "model": {"name": "privrec", "embedding": 4, "hidden": [4], "item-bias": True},
    "step": {"name": "sgd", "epochs": 1, "learning-rate": 0.01, "batch-size": 64},
}
COUNTED = {
    **SGD,
    "strategy": {"name": "popularity-start", "main": {"name": "reptile"}},
    "privacy": {**PRIVACY, "clip-norm": 0.5, "phases": {"popularity": COUNTS}},
}
STAGE = {"name": "contrastive", "hidden": 4, "session-length": 4, "masks": 1}
STAGED = {
    **SGD,
    "rounds": 5,
    "sampler": {"name": "fixed-size", "cohort": 50},
    "strategy": {
        "name": "two-stage",
        "stage-one": {"rounds": 2, "step": STAGE, "strategy": {"name": "reptile"}},
        "main": {"name": "reptile"},
    },
    "privacy": {
        "clip-norm": 0.5,
        "noise-multiplier": 1.0,
        "backend": "pld",
        "phases": {"stage-one": {"parameters": ["item.id"], "clip-norm": 0.3}},
    },
}
ALL = {"gram": GRAM, "fold-in": FOLD_IN, "reptile": COUNTED, "two stages": STAGED}


def audit(table, folder):
    return run_attack(load(table), {"name": "audit", "canaries": CANARIES}, folder).figures


def failed(found):
    """The checks that failed, by phase."""
    return {
        run.label.removeprefix("run 1, phase "): {c.name for c in run.checks if not c.passed}
        for run in found.runs
    }


@pytest.mark.slow
@pytest.mark.parametrize("system", ALL)
def test_every_phase_is_audited_against_its_own_ledger(tmp_path, system):
    found = audit(ALL[system], tmp_path)
    first = "stage-one" if system == "two stages" else "popularity"
    assert found.verdict != "FAIL" and failed(found) == {first: set(), "main": set()}
    for run, phase in zip(found.runs, (first, "main"), strict=True):
        checks = {check.name: check for check in run.checks}
        assert {"reach", "noise-std", "charged-rounds"} <= set(checks)
        assert checks["noise-std"].measured == pytest.approx(run.claim.noise_std, rel=0.2)
        events: list[Any] = [
            charge.event
            for charge in Ledger(tmp_path / "run-01" / "privacy.jsonl").charges
            if charge.event.phase == phase
        ]
        stated = [event.noise_multiplier for event in events]
        assert stated == pytest.approx([run.claim.noise_multiplier] * len(events))
        assert run.claim.rounds == len(events)
    trained = {name for name in checks if name.startswith("reach-of-") and name != "reach-of-one"}
    assert (len(trained) > 5) == (system in ("reptile", "two stages"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "share"), [("gram", 0.0), ("gram", 0.5), ("reptile", 0.5), ("two stages", 0.5)]
)
def test_missing_noise_is_found_in_one_release(tmp_path, monkeypatch, system, share):
    right = mechanisms.add_noise
    monkeypatch.setattr(
        mechanisms, "add_noise", lambda m, t, scale, *a, **k: right(m, t, share * scale, *a, **k)
    )
    found = failed(audit(ALL[system], tmp_path))
    assert len(found) == 2 and all("noise-std" in names for names in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("system", ["gram", "reptile", "two stages"])
def test_a_missing_clip_is_found_in_every_phase(tmp_path, monkeypatch, system):
    monkeypatch.setattr(Clip, "factors", lambda self, norms: np.ones(len(norms)))
    found = failed(audit(ALL[system], tmp_path))
    assert len(found) == 2 and all("reach" in names for names in found.values())


@pytest.mark.parametrize("system", ["gram", pytest.param("reptile", marks=pytest.mark.slow)])
def test_a_phase_that_is_charged_for_more_noise_than_it_has_is_found(tmp_path, monkeypatch, system):
    stated = Plan.event

    def doubled(self, phase):
        event = stated(self, phase)
        factor = 2 if phase == "popularity" else 1
        return dataclasses.replace(event, noise_multiplier=factor * event.noise_multiplier)

    monkeypatch.setattr(Plan, "event", doubled)
    found = failed(audit(ALL[system], tmp_path))
    assert found == {"popularity": {"noise-std"}, "main": set()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameter", "error"),
    [
        ("item.genres", "not scaled"),
        ("layer1.bias", "not scaled"),
        ("layer1.bias", "not measured"),
        ("item.bias", "not measured"),
    ],
)
def test_one_parameter_that_skips_the_clip_is_found(tmp_path, monkeypatch, parameter, error):
    norms = BlockUpdate.norms
    add_to = BlockUpdate.add_to

    def part(self, names=None, order=2):
        return norms(self, [name for name in names if name != parameter], order)

    def scaled(self, totals, shares):
        for name, total in totals.items():
            factors = torch.ones_like(shares) if name == parameter else shares
            add_to(self, {name: total}, factors)

    if error == "not measured":
        monkeypatch.setattr(BlockUpdate, "norms", part)
    else:
        monkeypatch.setattr(BlockUpdate, "add_to", scaled)
    single = {**SGD, "privacy": {"clip-norm": 0.5, "noise-multiplier": 1.0}}
    (run,) = audit({**single, "strategy": {"name": "reptile"}}, tmp_path).runs
    names = {check.name for check in run.checks if not check.passed}
    assert f"reach-of-{parameter}" in names
    assert names <= {f"reach-of-{parameter}", "reach", "reach-of-one"}
