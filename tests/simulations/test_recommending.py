# SPDX-License-Identifier: Apache-2.0
"""Recommendations of finished runs, with the ids of the data."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedrec
from fedrec.data.population import Population
from fedrec.errors import DataError, ExperimentError
from simulations.cli import app


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    random = np.random.default_rng(0)
    rows = {(f"u{random.integers(40)}", f"i{random.integers(30)}") for _ in range(500)}
    file = tmp_path_factory.mktemp("data") / "likes.csv"
    lines = ["customer,sku", *(",".join(row) for row in sorted(rows))]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = CliRunner().invoke(app, ["try", str(table), "-o", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def test_a_finished_run_gives_its_parameters(run):
    one, other = fedrec.resume(run), fedrec.Result.load(run)
    assert set(one.parameters) == {"item.bias", "item.weights"}
    np.testing.assert_array_equal(one.parameters["item.weights"], other.parameters["item.weights"])


def test_items_that_a_user_has_a_row_about_are_not_recommended(run, table):
    found = fedrec.Result.load(run).recommend(k=5)
    rows = pd.read_csv(table)
    known = set(zip(rows["customer"], rows["sku"], strict=True))
    assert not known & set(zip(found["user"], found["item"], strict=True))
    assert (found.groupby("user")["rank"].max() == 5).all()
    assert (found.groupby("user")["score"].diff().dropna() <= 0).all()


def test_a_user_with_a_row_of_every_item_is_told_so(run, tmp_path):
    more = pd.DataFrame({"customer": "everything", "sku": [f"i{number}" for number in range(30)]})
    more.to_csv(tmp_path / "more.csv", index=False)
    given = ["recommend", str(run), "--history", str(tmp_path / "more.csv")]
    done = CliRunner().invoke(app, [*given, "--user", "everything", "--user", "u1", "--top", "2"])
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines() == [
        "User 'everything' has a row of every item, so there is nothing new to recommend."
    ]
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["user", "u1", "u1"]


def test_scores_are_those_that_were_evaluated(run):
    result = fedrec.Result.load(run)
    scores = result.scores()
    population = Population.of(result.experiment)
    clients = result.users.index.to_numpy()
    held_out = population.held_out(clients, "test")
    values = np.where(held_out.seen & ~held_out.relevant, -np.inf, scores.to_numpy()[clients])
    order = np.argsort(-values, axis=1, kind="stable")
    place = np.argsort(order, axis=1)
    share = ((place < 10) & held_out.relevant).sum(1) / held_out.relevant.sum(1)
    assert np.isfinite(share).all() and share.mean() > 0


def test_users_are_named_by_the_datas_ids(run):
    result = fedrec.Result.load(run)
    found = result.scores(["u7", "u3"])
    assert found.index.tolist() == ["u7", "u3"]
    np.testing.assert_array_equal(found.loc["u3"], result.scores().loc["u3"])
    with pytest.raises(DataError, match="no user 'nobody'"):
        result.recommend(["nobody"])
    with pytest.raises(ExperimentError, match="nothing to recommend"):
        result.recommend(k=0)
    for refused in (result.recommend, result.scores):
        with pytest.raises(ExperimentError, match="users are a text") as error:
            refused("u7")
        assert "['u7']" in error.value.text()


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_files(run, tmp_path, ending):
    pytest.importorskip("pyarrow")
    file = tmp_path / f"lists.{ending}"
    done = CliRunner().invoke(app, ["recommend", str(run), "--top", "3", "-o", str(file)])
    assert done.exit_code == 0, done.output
    read = pd.read_csv if ending == "csv" else pd.read_parquet
    found = read(file)
    expected = fedrec.Result.load(run).recommend(k=3)
    assert found["item"].tolist() == expected["item"].tolist()


def test_ids_that_a_spreadsheet_would_execute_are_written_as_text(run, tmp_path, monkeypatch):
    ids = ["=cmd|'/c calc'!A0", "+1+1", "@SUM(A1)", "-2+3", "-5", "plain", "a=b"]
    rows = {"user": ["-x"] * 7, "rank": range(1, 8), "item": ids, "score": [-0.5] * 7}
    monkeypatch.setattr(fedrec.Result, "recommend", lambda *_, **__: pd.DataFrame(rows))
    done = CliRunner().invoke(app, ["recommend", str(run), "-o", str(tmp_path / "lists.csv")])
    assert done.exit_code == 0, done.output
    printed = CliRunner().invoke(app, ["recommend", str(run)]).output
    assert (tmp_path / "lists.csv").read_text() == printed
    found = pd.read_csv(tmp_path / "lists.csv", dtype=str)
    assert found["item"].tolist() == [*(f"'{one}" for one in ids[:4]), *ids[4:]]
    assert set(found["user"]) == {"'-x"} and set(found["score"]) == {"-0.5"}


def test_fine_tuning_on_the_device_is_part_of_the_scores(tiny_experiment, tmp_path):
    result = fedrec.run(tiny_experiment(), output=tmp_path / "run")
    tuned = fedrec.Result.load(tmp_path / "run").scores()
    assert tuned.shape == (24, 30)
    shared = fedrec.run(
        tiny_experiment(), ["evaluation.fine-tune={epochs=0}"], output=tmp_path / "shared"
    )
    np.testing.assert_array_equal(shared.parameters["item.id"], result.parameters["item.id"])
    assert not np.allclose(tuned, shared.scores())


def test_other_data_than_those_of_the_run_are_refused(tmp_path, table):
    own = tmp_path / "own.csv"
    own.write_text(table.read_text())
    folder = tmp_path / "run"
    done = CliRunner().invoke(app, ["run", "--data", str(own), "-o", str(folder)])
    assert done.exit_code == 0, done.output
    with (folder / "ids" / "users.txt").open("a") as users:
        users.write('"someone"\n')
    with pytest.raises(DataError, match="data have changed"):
        fedrec.Result.load(folder).recommend()


def test_items_that_a_user_rated_low_are_not_recommended(tmp_path):
    random = np.random.default_rng(1)
    pairs = sorted({(random.integers(40), random.integers(30)) for _ in range(500)})
    file = tmp_path / "ratings.csv"
    lines = [f"u{user},i{item},{random.integers(1, 6)}" for user, item in pairs]
    file.write_text("\n".join(["user,item,rating", *lines]) + "\n")
    done = CliRunner().invoke(app, ["try", str(file), "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    found = fedrec.Result.load(tmp_path / "run").recommend(k=5)
    rows = pd.read_csv(file)
    assert (rows["rating"] <= 3).mean() > 0.3  # low ratings, which are not positive
    known = set(zip(rows["user"], rows["item"], strict=True))
    assert len(found) and not known & set(zip(found["user"], found["item"], strict=True))


def test_every_public_name_of_the_package_is_there():
    assert {name: getattr(fedrec, name) for name in fedrec.__all__}
