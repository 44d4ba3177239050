# SPDX-License-Identifier: Apache-2.0
"""The demonstration on a few users."""

import math

import pytest

from fedrec.runs.result import Result
from simulations.cli.experiments import demo as command
from simulations.demo import ROWS, demo

FEW = ("engine.name='serial'", "dataset.users=150", "dataset.items=100", "evaluation.every=0")


@pytest.mark.slow
def test_one_table_of_the_same_users_and_a_report(tmp_path, capsys):
    results: list[Result] = []
    rows, page = demo(tmp_path, overrides=FEW, show=results.append)
    assert list(rows) == [row.system for row in ROWS]
    users = {tuple(result.users.index) for result in results if len(result.users)}
    assert len(results) == 5 and len(users) == 1
    private = {"private popularity", "DP-PrivRec", "linear, private"}
    for system, values in rows.items():
        assert 0 <= values["hits@10"] <= 1
        finite = values["epsilon"] is not None and math.isfinite(values["epsilon"])
        assert finite == (system in private)
        assert not finite or values["epsilon"] <= 5
    text = page.read_text(encoding="utf-8")
    assert all(result.experiment.name in text for result in results)
    command._print(rows, results)
    printed = capsys.readouterr().out
    assert all(row.system in printed for row in ROWS) and "epsilon 5 at delta" in printed
