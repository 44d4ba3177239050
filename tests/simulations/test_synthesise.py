# SPDX-License-Identifier: Apache-2.0
"""`fedrec synthesise`: the table can be read again, the figures are printed, and errors are
reported."""

import json

import pytest
import tomli_w
from typer.testing import CliRunner

from fedrec.data.population import Population
from fedrec.errors import DataError, ExperimentError
from fedrec.experiment.loading import load
from simulations.cli import app
from tests.runs import assert_close

QUICK = {
    "embeddings": {"factors": 4, "epochs": 3},
    "attention": {"epochs": 1, "hidden": 4},
    "generator": {"steps": 5},
}


@pytest.fixture
def call(tiny_experiment, tmp_path):
    """Runs the command on the tiny experiment with a perturbation."""

    def call(perturb, *arguments, output="synthetic.csv"):
        table = {**tiny_experiment(), **({"perturb": perturb} if perturb else {})}
        (tmp_path / "tiny.toml").write_text(tomli_w.dumps(table))
        command = [
            "synthesise",
            str(tmp_path / "tiny.toml"),
            "--output",
            str(tmp_path / output),
            *arguments,
        ]
        return table, CliRunner().invoke(app, command)

    return call


@pytest.mark.parametrize("output", ["synthetic.csv", "synthetic.parquet"])
def test_the_table_is_what_clients_learn_from(call, tmp_path, output):
    table, done = call(
        {"name": "upc-sdg", "replacement-ratio": 0.5, **QUICK}, "--json", output=output
    )
    assert done.exit_code == 0, done.output
    found, learned = json.loads(done.stdout), Population.of(load(table)).perturbed.rows
    columns = {"user": "user", "item": "item", "rating": "rating", "time": "time"}
    dataset = {"name": "table", "path": str(tmp_path / output), **columns}
    del table["perturb"]
    data = Population.of(load({**table, "dataset": dataset})).interactions
    ids = [
        (one.user_ids[one.users].tolist(), one.item_ids[one.items].tolist())
        for one in (data, learned)
    ]
    pairs = [
        sorted(zip(*names, one.ratings, strict=True))
        for names, one in zip(ids, (data, learned), strict=True)
    ]
    assert pairs[0] == pairs[1] and found["rows"] == len(learned)
    assert found["kept"] + found["replaced"] == pytest.approx(1) and 0.3 < found["kept"] < 0.7
    assert 0 <= found["linked"] <= 1 and set(found["recovered"]) == {"top-1", "top-10"}
    assert set(found["mean similarity by sensitivity"]["0.9"]) == {
        "rows",
        "paper",
        "released",
        "cosine",
    }
    assert any("no differential privacy" in line for line in found["in words"])


def test_people_get_it_in_lines(call):
    _, done = call({"name": "random-replacement", "replacement-ratio": 0.25})
    output = " ".join(done.output.split())
    assert done.exit_code == 0 and "found by their profile in the table: " in output
    assert "top-10" in output and "mean similarity by sensitivity" in output


def test_nothing_replaced_is_nothing_to_measure(call):
    _, done = call({"name": "random-replacement", "replacement-ratio": 0.0})
    assert done.exit_code == 0 and "nothing to measure" in done.output and "nan" not in done.output


def test_a_run_learns_from_synthetic_rows(run_tiny):
    settings = ["perturb.name=upc-sdg", "perturb.embeddings.epochs=2", "perturb.generator.steps=3"]
    one, again = (run_tiny(*settings, output=name) for name in ("one", "again"))
    assert any("no differential privacy" in line for line in one.privacy)
    assert_close(again.parameters, one.parameters)


@pytest.mark.parametrize(
    ("perturb", "output", "words"),
    [
        (None, "a.csv", "perturbs nothing"),
        ({"name": "random-replacement"}, "a.txt", "unknown format"),
        ({"name": "random-replacement"}, ".", "cannot write"),
        ({"name": "random-replacment"}, "a.csv", "unknown perturbation"),
        ({"replacement-ratio": 0.5}, "a.csv", "missing key 'perturb.name'"),
        (
            {"name": "random-replacement", "replacement-ratio": 2},
            "a.csv",
            "perturb.replacement-ratio",
        ),
        ({"name": "upc-sdg", "sensitivity": -1}, "a.csv", "perturb.sensitivity"),
        ({"name": "random-replacement", "users": "nowhere.csv"}, "a.csv", "there is no table"),
        ({"name": "noisy-cooccurrence", "epsilon": 1.0}, "a.csv", "have no ratings"),
    ],
)
def test_faults_are_reported(call, perturb, output, words):
    _, done = call(perturb, output=output)
    assert done.exit_code != 0 and isinstance(done.exception, Exception)
    assert words in str(done.exception), done.exception


def test_faults_are_errors_that_can_be_mended(call):
    _, done = call({"name": "random-replacement"}, output="a.txt")
    assert isinstance(done.exception, ExperimentError) and done.exception.fix


@pytest.fixture
def authors_files(tmp_path):
    """Files as UPC-SDG's authors have them for Clothing, and an experiment on them. The last user
    is in the training file if asked for."""

    def write(last_user_trains):
        for name, shift, users in (("train", 0, 11 + last_user_trains), ("test", 40, 12)):
            pairs = [(3 * user + shift + n, user) for user in range(users) for n in range(6)]
            lines = [f"{item},{user},A{user},B{item}" for item, user in pairs]
            text = "\n".join(["itemID,userID,reviewerID,asin", *lines])
            (tmp_path / f"{name}.csv").write_text(text + "\n")
        table = {
            "name": "clothing",
            "rounds": 1,
            "dataset": {"name": "amazon-upc", "path": str(tmp_path), "verify": False},
            "split": {"name": "published"},
            "sampler": {"name": "fixed-size", "cohort": 4},
            "perturb": {"name": "upc-sdg", "replacement-ratio": 0.5, **QUICK},
        }
        (tmp_path / "clothing.toml").write_text(tomli_w.dumps(table))
        output = str(tmp_path / "out.csv")
        command = ["synthesise", str(tmp_path / "clothing.toml"), "--json", "--output", output]
        return CliRunner().invoke(app, command)

    return write


def test_a_table_comes_from_the_authors_files(authors_files):
    done = authors_files(True)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["rows"] == 12 * 6 and found["replaced rows"] == 12 * 3


def test_who_is_tested_has_a_profile_to_make_synthetic_rows_from(authors_files):
    done = authors_files(False)
    assert isinstance(done.exception, DataError) and "none of 1 (11)" in str(done.exception)
