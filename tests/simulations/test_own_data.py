# SPDX-License-Identifier: Apache-2.0
"""The experiment on a user's own table, and what the commands say of it."""

from __future__ import annotations

import os

import numpy as np
import pytest
from typer.testing import CliRunner

from simulations.cli import app
from simulations.cli.experiments.own_data import own_table

COLUMNS = ("user", "item", "rating", "time")


def written(tmp_path, head="Menge", users=40, each=6):
    random = np.random.default_rng(0)
    lines = [
        f"k{user};s{item};{random.integers(1, 4)}"
        for user in range(users)
        for item in random.choice(30, each, replace=False)
    ]
    file = tmp_path / "mine.csv"
    file.write_text("\n".join([f"Kunde;Artikel;{head}", *lines]) + "\n")
    return file


def experiment(file, overrides=(), **columns):
    roles = {role: columns.get(role) for role in COLUMNS}
    return own_table(file, roles, None, unrated=False, overrides=list(overrides), quiet=False)


def test_quantities_are_no_ratings_and_what_was_taken_is_said_first(tmp_path, capsys):
    table = experiment(written(tmp_path))
    assert "rating" not in table["dataset"] and "positive-above" not in table
    assert capsys.readouterr().err.splitlines()[1].strip() == (
        "240 rows, 40 users, 30 items; every row counts as liked"
    )


@pytest.mark.parametrize("declined", ["none", ""])
def test_ratings_can_be_declined(tmp_path, declined):
    file = written(tmp_path, "Bewertung")
    assert experiment(file)["positive-above"] == 2
    table = experiment(file, rating=declined)
    assert "rating" not in table["dataset"] and "positive-above" not in table


@pytest.mark.parametrize("command", [["try"], ["run", "--data"]])
def test_the_commands_have_a_switch_against_ratings(tmp_path, command):
    file = written(tmp_path, "Bewertung")
    both = CliRunner().invoke(app, [*command, str(file), "--no-rating", "--rating", "Bewertung"])
    assert "two answers" in str(both.exception)
    only = [*command, str(file), "--no-rating", "-s", "rounds=0", "-o", str(tmp_path / "run")]
    assert "every row counts as liked" in CliRunner().invoke(app, only).output


@pytest.mark.parametrize("command", [["try"], ["run", "--data"]])
@pytest.mark.parametrize("override", ["dataset.name=ml-1m", "dataset.path=other.csv"])
def test_a_table_and_another_dataset_are_refused(tmp_path, command, override):
    done = CliRunner().invoke(app, [*command, str(written(tmp_path)), "-s", override])
    assert "two datasets are given" in str(done.exception)


@pytest.mark.parametrize("command", [["try"], ["run", "--data"]])
def test_pipes_and_devices_are_refused(tmp_path, command):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        done = CliRunner().invoke(app, [*command, path])
        assert "a pipe or a device" in str(done.exception)
