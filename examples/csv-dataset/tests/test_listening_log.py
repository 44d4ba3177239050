# SPDX-License-Identifier: Apache-2.0
"""A log written from a known dataset reads back as that dataset; every bad line is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from listening_log.dataset import ListeningLog, ListeningLogConfig

from fedrec.data.population import read_interactions
from fedrec.errors import DataError
from fedrec.experiment.schema import load
from simulations import runner
from simulations.contracts.data import DatasetContract

FOLDER = Path(__file__).resolve().parent.parent
LOG = """time,listener,track,genre
2024-03-01T18:22:00,ann,Blue in Green,jazz
2024-03-02T18:22:00+02:00,ann,Blue in Green,jazz
1709400000,ann,So What,jazz
1709400001,bob,Hurt,
1709400002,bob,"Red, Red Wine",reggae
"""


@pytest.fixture
def write_log():
    spec = importlib.util.spec_from_file_location("make_log", FOLDER / "make_log.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_log


@pytest.fixture
def log(tmp_path):
    def read(text=LOG, **settings):
        file = tmp_path / "plays.csv"
        file.write_text(text)
        return ListeningLog("listening-log", ListeningLogConfig(path=file, **settings)).read()

    return read


class TestListeningLog(DatasetContract):
    component = ListeningLog

    @pytest.fixture(autouse=True)
    def write(self, tmp_path_factory):
        file = tmp_path_factory.mktemp("log") / "plays.csv"
        rows = [
            f"{100 * user + item},u{user},t{(user * item) % 13}"
            for user in range(24)
            for item in range(1, 9)
        ]
        file.write_text("\n".join(["time,listener,track", *rows]) + "\n")
        type(self).settings = {"path": str(file)}


def test_plays_are_counted_and_the_last_one_tells_the_time(log):
    data = log()
    found = {(row.user, row.item): (row.rating, row.time) for row in data.frame().itertuples()}
    assert found == {
        ("ann", "Blue in Green"): (2.0, 1709396520),
        ("ann", "So What"): (1.0, 1709400000),
        ("bob", "Hurt"): (1.0, 1709400001),
        ("bob", "Red, Red Wine"): (1.0, 1709400002),
    }
    genre = data.item_features["genre"]
    labels = {
        name: [
            genre.categories[code]
            for code in genre.codes[genre.offsets[place] : genre.offsets[place + 1]]
        ]
        for place, name in enumerate(data.item_ids.tolist())
    }
    assert labels == {
        "Blue in Green": ["jazz"],
        "So What": ["jazz"],
        "Hurt": [],
        "Red, Red Wine": ["reggae"],
    }


def test_few_plays_and_few_tracks_are_left_out(log):
    assert log(least_plays=2).frame()[["user", "item"]].to_numpy().tolist() == [
        ["ann", "Blue in Green"]
    ]
    more = LOG + "1709400003,cleo,Hurt,\n"
    assert set(log(more, least_tracks=2).user_ids) == {"ann", "bob"}
    with pytest.raises(DataError, match="nothing is left"):
        log(least_plays=9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["lacks a column", "an empty file"]),
        ("time,listener\n1,ann\n", ["lacks a column", "time, listener, track"]),
        (LOG + "1709400003,,Hurt,\n", ["line 7 is not a play", "nothing for listener"]),
        (LOG + "1709400003,ann,Hurt,pop,loud\n", ["line 7", "more values than columns"]),
        (LOG + "yesterday,ann,Hurt,\n", ["line 7", "a time cannot be read", "'yesterday'"]),
        (LOG + "1709400003,ann,So What,pop\n", ["line 7", "two genres", "'jazz'", "'pop'"]),
    ],
)
def test_a_bad_line_is_named(log, text, words, tmp_path):
    with pytest.raises(DataError) as caught:
        log(text)
    assert str(tmp_path / "plays.csv") in caught.value.text()
    assert all(word in caught.value.text() for word in words)


@pytest.mark.parametrize(
    "name", ["synthetic", pytest.param("ml-100k", marks=pytest.mark.real_data)]
)
def test_a_log_of_a_known_dataset_reads_back_as_it(name, write_log, tmp_path):
    known = read_interactions(load({"name": "log", "rounds": 1, "dataset": {"name": name}}))
    write_log(known, tmp_path / "plays.csv")
    found = ListeningLog("listening-log", ListeningLogConfig(path=tmp_path / "plays.csv")).read()
    # users, items and ratings by their ids, in any order
    assert found.fingerprint() == known.fingerprint()
    assert np.array_equal(np.sort(found.times), np.sort(known.times))


def test_an_experiment_on_the_log_runs(write_log, tmp_path):
    small = {"name": "synthetic", "users": 30, "items": 40, "mean-interactions": 8}
    write_log(
        read_interactions(load({"name": "log", "rounds": 1, "dataset": small})),
        tmp_path / "plays.csv",
    )
    overrides = [
        f"dataset.path={tmp_path / 'plays.csv'}",
        "rounds=2",
        "sampler.cohort=4",
        "evaluation.users=4",
    ]
    result = runner.run(FOLDER / "experiment.toml", overrides, output=tmp_path / "run")
    assert len(result.rounds) == 2 and {"popularity", "ease"} == set(result.baselines)
