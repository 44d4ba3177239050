# SPDX-License-Identifier: Apache-2.0
"""Choices of settings of centralised systems: on validation rows, each setting once."""

from __future__ import annotations

import pytest

from benchmarks import central_choices
from fedrec.components.registry import BASELINE, resolve


@pytest.fixture
def asked(monkeypatch):
    """What is measured, without data."""
    found = []

    class Protocol:
        def __init__(self, population, *, held_out, ks):
            self.held_out, self.population = held_out, population

    def measured(protocol, name, settings, seed):
        found.append((protocol.held_out, protocol.population, name, settings, seed))
        metrics = {"ndcg-list@100": settings["factors"] / 100}
        return {"settings": settings, "metrics": metrics, "errors": metrics, "cpu": 1.0}

    class Kept:
        @staticmethod
        def population(experiment):
            return experiment.name, experiment.seed

    monkeypatch.setattr(central_choices, "POPULATIONS", Kept)
    monkeypatch.setattr(central_choices, "RankingProtocol", Protocol)
    monkeypatch.setattr(central_choices, "measured", measured)
    return found


def test_what_is_there_is_not_measured_again(asked, tmp_path):
    file, given = tmp_path / "choices.json", ("central-ml100k", "puresvd", 3)
    assert not central_choices.fill(file, *given, minutes=-1.0) and not asked
    assert central_choices.fill(file, *given, minutes=1.0)
    assert central_choices.fill(file, *given, minutes=1.0)
    wanted = central_choices.settings_of("central-ml100k", "puresvd")
    assert [one[3] for one in asked] == wanted
    assert {one[:3] for one in asked} == {("validation", ("central-ml100k", 3), "puresvd")}
    (records,) = central_choices.read(file).values()
    first = central_choices.shown("central-ml100k", records)[0]
    assert first.startswith("ndcg-list@100 0.4800") and "'factors': 48" in first


def test_a_setting_of_a_grid_exists():
    for experiment, name in central_choices.GRIDS:
        for settings in central_choices.settings_of(experiment, name):
            assert resolve(BASELINE, name).Config.parse(settings)
