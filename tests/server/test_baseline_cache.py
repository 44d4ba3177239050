# SPDX-License-Identifier: Apache-2.0
"""Kept results of centralised systems: the same bytes, and nothing that a run must do itself."""

import json

import pytest

from fedrec.baselines.simple.popularity import Popularity
from fedrec.evaluation.central import CentralEvaluation
from simulations import runner

TESTED = ["popularity", {"name": "ease", "regularisation": 5.0}]
PRIVATE = {"name": "dp-gram", "epsilon": 4.0, "items": 12}


class Alike(Popularity):
    """A system of somebody else's."""


@pytest.fixture
def fitted(monkeypatch):
    """Names of the systems that were fitted."""
    names = []
    fit = CentralEvaluation.fit

    def told(self, baseline):
        names.append(type(baseline).__name__)
        fit(self, baseline)

    monkeypatch.setattr(CentralEvaluation, "fit", told)
    return names


@pytest.fixture
def run(tiny_experiment, tmp_path):
    """Runs an experiment of centralised systems into a folder by number."""
    federated = ("rounds", "model", "step", "strategy", "sampler")
    table = {key: value for key, value in tiny_experiment().items() if key not in federated}

    def made(number, baselines=TESTED, **more):
        evaluation = {"ks": [5], "baselines": baselines, **more.pop("evaluation", {})}
        runner.run({**table, "evaluation": evaluation, **more}, output=tmp_path / str(number))
        return tmp_path / str(number)

    return made


def stored(folder):
    """Bytes by file of what a run says of its systems, without the seconds."""
    names = [*folder.glob("baselines/*/*"), *folder.glob("*.json"), *folder.glob("*.csv")]
    found = {str(name.relative_to(folder)): name.read_bytes() for name in names}
    for name in [name for name in found if name.endswith("result.json")]:
        found[name] = {k: v for k, v in json.loads(found[name]).items() if k != "seconds"}
    return {name: found[name] for name in found if name not in ("run.json", "environment.json")}


def test_a_second_run_has_the_same_bytes_without_a_fit(kept, fitted, run, monkeypatch):
    first = run(1)
    assert fitted == ["Popularity", "Ease"]
    again = run(2)
    assert fitted == ["Popularity", "Ease"]
    monkeypatch.setenv("FEDREC_CACHE_BASELINES", "no")
    without = run(3)
    assert fitted == ["Popularity", "Ease"] * 2
    assert stored(first) == stored(again) == stored(without)
    assert len(stored(first)) >= 9
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 5},
        {"evaluation": {"ks": [4]}},
        {"baselines": ["popularity", {"name": "ease", "regularisation": 6.0}]},
    ],
)
def test_what_a_system_depends_on_is_fitted_anew(kept, fitted, run, change):
    run(1)
    del fitted[:]
    run(2, **change)
    assert "Ease" in fitted


def test_private_systems_and_those_of_others_are_never_kept(kept, fitted, run):
    for number in (1, 2):
        run(number, [PRIVATE, {"name": f"{__name__}:Alike", "label": "alike"}])
    assert len(fitted) == 4 and not list(kept.glob("*"))


def test_a_damaged_file_is_fitted_anew(kept, fitted, run):
    first = run(1)
    for file in kept.glob("*.json"):
        file.write_text("{", encoding="utf-8")
    assert stored(run(2)) == stored(first) and len(fitted) == 4
