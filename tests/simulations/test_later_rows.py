# SPDX-License-Identifier: Apache-2.0
"""Recommendations after a run: for users who came later, and with data that have grown."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedrec
from fedrec.data.cache import POPULATIONS
from fedrec.errors import DataError, ExperimentError
from simulations.cli import app
from simulations.later_rows import _as_in

_TASTE = 15  # items of each of two tastes


@pytest.fixture(scope="module")
def table():
    """60 users, every second of the other taste; ids are sorted as texts."""
    random = np.random.default_rng(0)
    rows = [
        (f"u{user:02d}", f"i{item + _TASTE * (user % 2):02d}")
        for user in range(60)
        for item in random.choice(_TASTE, 8, replace=False)
    ]
    return pd.DataFrame(rows, columns=["user", "item"])


@pytest.fixture(scope="module")
def trained(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("later")
    table.to_csv(folder / "likes.csv", index=False)
    command = ["try", str(folder / "likes.csv"), "--system", "linear", "-o", str(folder / "run")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    result = fedrec.Result.load(folder / "run")
    assert np.any(result.parameters["item.weights"])
    return result


@pytest.fixture
def with_data(trained, table):
    """Puts other rows into the place of the data."""
    file = trained.folder.parent / "likes.csv"

    def put(rows):
        rows.to_csv(file, index=False)
        POPULATIONS.drop(trained.experiment)
        return trained

    yield put
    put(table)


def twin(table, name, of="u07"):
    """Rows of a user with the items of another."""
    return table[table["user"] == of].assign(user=name)


def lists(found, user):
    own = found[found["user"] == user]
    return own["item"].tolist(), own["score"].tolist()


@pytest.mark.slow
def test_a_table_that_has_grown_serves_old_and_new_users(with_data, table):
    """The new user comes first among the ids, and so does the new item, so that all numbers in
    the table have changed."""
    added = pd.DataFrame([("u07", "a-new-item")], columns=["user", "item"])
    grown = pd.concat([twin(table, "a-new-user"), added, table])
    result = with_data(grown)
    found = result.recommend(k=5)
    assert len(set(found["user"])) == 61 and "a-new-item" not in set(found["item"])
    assert lists(found, "a-new-user") == lists(found, "u07")
    known = set(grown.itertuples(index=False, name=None))
    assert not known & set(zip(found["user"], found["item"], strict=True))
    taste = [f"i{item:02d}" for item in range(_TASTE, 2 * _TASTE)]
    assert set(lists(found, "a-new-user")[0]) <= set(taste)
    assert result.scores(["a-new-user"]).shape == (1, 2 * _TASTE)


def test_a_history_serves_users_who_were_not_there(trained, table, tmp_path):
    history = pd.concat([twin(table, "new"), twin(table, "newer", of="u08")])
    found = trained.recommend(k=5, history=history)
    assert set(found["user"]) == {"new", "newer"}
    own, taste = set(lists(found, "new")[0]), set(history["item"][history["user"] == "new"])
    assert not own & taste and all(int(item[1:]) >= _TASTE for item in own)
    file = tmp_path / "new.csv"
    history.to_csv(file, index=False)
    command = ["recommend", str(trained.folder), "--history", str(file), "--top", "5"]
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "lists.csv")])
    assert done.exit_code == 0, done.output
    assert pd.read_csv(tmp_path / "lists.csv")["item"].tolist() == found["item"].tolist()
    one = trained.recommend(["newer"], k=5, history=file)
    assert lists(one, "newer") == lists(found, "newer") and set(one["user"]) == {"newer"}


def test_a_history_adds_to_the_rows_of_a_user_of_the_run(trained, table):
    best = trained.recommend(["u07"], k=1)["item"][0]
    history = pd.DataFrame({"user": ["u07"], "item": [best]})
    assert best not in set(trained.recommend(k=30, history=history)["item"])
    own = set(table["item"][table["user"] == "u07"])
    assert not own & set(trained.recommend(k=30, history=history)["item"])


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (pd.DataFrame({"user": ["new"]}), "no column 'item'"),
        (pd.DataFrame({"user": [], "item": []}), "no rows"),
        (pd.DataFrame({"user": ["new"], "item": [None]}), "wrong value"),
        ("nowhere.csv", "there is no table"),
    ],
)
def test_a_damaged_history_is_refused(trained, history, words):
    with pytest.raises(DataError, match=words):
        trained.recommend(history=history)


def test_data_that_lack_users_or_items_of_the_run_are_refused(with_data, table):
    for column, name in (("user", "u07"), ("item", "i03")):
        result = with_data(table[table[column] != name])
        with pytest.raises(DataError, match="data have changed") as error:
            result.recommend()
        assert f"no {column} '{name}'" in error.value.text()


def test_a_new_user_is_fine_tuned_on_the_device(run_tiny):
    history = pd.DataFrame({"user": ["new"] * 4, "item": [1, 2, 3, 4], "rating": [5.0] * 4})
    tuned = run_tiny("evaluation.fine-tune={epochs=5}").recommend(k=30, history=history)
    shared = run_tiny("evaluation.fine-tune={epochs=0}", output="shared")
    assert set(tuned["user"]) == {"new"}
    assert not np.allclose(tuned["score"][:5], shared.recommend(k=30, history=history)["score"][:5])


def test_a_new_user_without_its_private_parameters_is_refused(run_tiny):
    history = pd.DataFrame({"user": ["new"] * 4, "item": [1, 2, 3, 4], "rating": [5.0] * 4})
    private = ('step.private-parameters=["user.*"]', "evaluation.fine-tune={epochs=0}")
    result = run_tiny('model={name="mf", factors=4}', *private)
    assert len(result.recommend(k=3))
    with pytest.raises(ExperimentError, match="user 'new' came after the run"):
        result.recommend(history=history)


@pytest.mark.parametrize("name", ["new", "²", "9" * 20])
def test_a_name_that_is_no_number_of_63_bits_stays_text(name):
    assert _as_in(np.array([1, 2]), pd.Index(["1", "2"])).tolist() == [1, 2]
    assert _as_in(np.array([1, 2]), pd.Index(["1", name])).tolist() == ["1", name]
