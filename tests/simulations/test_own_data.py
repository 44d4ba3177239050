# SPDX-License-Identifier: Apache-2.0
"""The experiment on a user's own table, and what the commands say of it."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.population import POPULATIONS
from fedrec.data.splits.rules import Partition, Split
from fedrec.errors import DataError, ExperimentError, FedrecError
from fedrec.evaluation.tables import UNTRAINED_ITEMS
from fedrec.experiment.schema import Experiment, load
from fedrec.report.comparison import compare
from fedrec.report.summary import result_lines
from fedrec.runs.folder import Result
from simulations.own_table import LINEAR, TITLES, OwnTable, _fold_in_system, try_table
from simulations.runner import run
from simulations.table_facts import signal_of


def written(tmp_path, head="Menge", users=40, each=6):
    random = np.random.default_rng(0)
    lines = [f"Kunde;Artikel;{head}"]
    for user in range(users):
        items = random.choice(30, each, replace=False)
        lines += [f"k{user};s{item};{random.integers(1, 4)}" for item in items]
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def experiment(file, overrides=(), **columns):
    return OwnTable(columns, system="linear").experiment(file, list(overrides), False).table()


def test_ratings_can_be_declined(tmp_path):
    file = written(tmp_path, "Bewertung")
    assert experiment(file)["positive-above"] == 2
    table = OwnTable(unrated=True, system="linear").experiment(file, [], True).table()
    assert "rating" not in table["dataset"] and "positive-above" not in table


def test_the_threshold_that_is_given_is_used_and_printed(tmp_path, capsys):
    file = written(tmp_path, "Bewertung")
    assert experiment(file, ["positive-above=1"])["positive-above"] == 1
    assert "with a rating above 1 in column 'Bewertung'" in capsys.readouterr().err
    named = experiment(written(tmp_path), ["positive-above=2.5"], rating="Menge")
    assert (named["positive-above"], named["dataset"]["rating"]) == (2.5, "Menge")


def test_a_table_without_a_line_of_names_is_one_whether_seen_or_said(tmp_path):
    file = written(tmp_path)
    rows = file.read_text().split("\n", 1)[1]
    file.write_text(rows)
    seen = experiment(file)["dataset"]
    assert (seen["header"], seen["user"], seen["item"]) == (False, "1", "2")
    assert experiment(file, ["dataset.header=false"], user="1", item="2")["dataset"] == seen
    file.write_text("user;item;n\n" + rows)  # known names, which the user says are none
    assert experiment(file, ["dataset.header=false"], item="2")["dataset"] == seen
    said = OwnTable(system="linear", header=False).experiment(file, [], True)
    assert said.table()["dataset"] == seen


def test_settings_of_the_table_are_used_when_its_columns_are_recognised(tmp_path):
    """A feature is no column of ratings, and is read although it has no role."""
    file = tmp_path / "shop.csv"
    lines = [f"k{n % 40},s{n % 7},x{n % 11},{n % 11}" for n in range(400)]
    file.write_text("\n".join(["user,item,sku,score", *lines]) + "\n")
    options = ["dataset.item-features=['score']", "dataset.item=sku"]
    chosen = OwnTable(system="linear").experiment(file, options, True)
    assert "rating" not in chosen.table()["dataset"]
    data = POPULATIONS.population(chosen).interactions
    assert (data.num_users, data.num_items) == (40, 11)
    assert [len(feature.categories) for feature in data.item_features.features] == [11]


def table_of(tmp_path, rows):
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["user,item", *(f"u{user},i{item}" for user, item in rows)]) + "\n")
    return file


def test_users_with_one_item_each_are_refused_with_what_would_help(tmp_path):
    with pytest.raises(DataError, match=r"no user in .* has two different items") as error:
        experiment(table_of(tmp_path, [(user, user % 7) for user in range(50)]))
    assert "--user" in str(error.value) and "validation-users" not in str(error.value)


def test_few_test_users_and_items_of_one_user_are_warned_of(tmp_path, capsys):
    experiment(table_of(tmp_path, [(user, item) for user in range(10) for item in range(4)]))
    said = capsys.readouterr().err
    assert "only 2 test users" in said and "items have" not in said
    experiment(table_of(tmp_path, [(user, 3 * user + n) for user in range(200) for n in range(3)]))
    said = capsys.readouterr().err
    assert "only 0 of 600 items have two users" in said and "test user" not in said
    lonely = [(0, 1), (0, 2), *((user, user % 2) for user in range(1, 200))]
    experiment(table_of(tmp_path, lonely))
    assert "only 1 of 200 users have two different items" in capsys.readouterr().err
    experiment(written(tmp_path), ["split.test-users=0.5"])
    assert "only 20 test users" in capsys.readouterr().err
    experiment(written(tmp_path, users=200))
    assert "warning" not in capsys.readouterr().err


def test_large_catalogues_leave_out_the_system_that_takes_minutes(tmp_path):
    found = experiment(table_of(tmp_path, [(row % 2000, row) for row in range(7000)]))
    assert found["evaluation"]["baselines"] == ["popularity", "ials", "random"]
    small = experiment(written(tmp_path))
    assert small["evaluation"]["baselines"] == ["popularity", "ease", "random"]


def private(tmp_path, epsilon, users=60, overrides=()):
    file = written(tmp_path, users=users)
    return OwnTable({}, epsilon=epsilon).experiment(file, list(overrides), False).table()


@pytest.mark.slow
def test_too_small_a_signal_leaves_the_whole_budget_to_private_popularity(tmp_path, capsys):
    table = private(tmp_path, 1.0)
    assert table["rounds"] == 1 and table["evaluation"]["baselines"] == ["popularity", "random"]
    said = capsys.readouterr().err
    assert "the whole budget goes to private popularity" in said
    needed = int(re.search(r"needs about ([\d,]+) training users", said)[1].replace(",", ""))  # pyright: ignore[reportOptionalSubscript]
    assert needed > 42  # training users of the table
    nevertheless = private(tmp_path, 1.0, overrides=["rounds=2"])
    assert nevertheless["title"] == "Federated fold-in on mine.csv at epsilon 1"
    assert "private popularity" not in capsys.readouterr().err
    personal = load({**table, "rounds": 2})
    assert not signal_of(personal, int(0.95 * needed), 8).suffices
    assert signal_of(personal, int(1.05 * needed), 8).suffices
    assert private(tmp_path, 50.0)["rounds"] == 2
    said = capsys.readouterr().err
    assert "private popularity" not in said and "a personal model is trained (fold-in" in said


@pytest.mark.parametrize(
    ("split", "users"), [("test-users=0.5", 24), ("validation-users=0.3", 30), ("name='ratio'", 60)]
)
def test_the_signal_follows_the_given_split_and_number_of_items(tmp_path, capsys, split, users):
    private(tmp_path, 50.0, overrides=[f"split.{split}", "model.items=7"])
    said = capsys.readouterr().err
    assert f"split: {users} users train" in said and "sums of products of 7 items" in said
    assert f"epsilon 50 with {users} training users" in said


def test_the_signal_is_that_of_its_definition(tmp_path):
    """Two Gaussian releases, of multipliers z and 2 z, have mu^2 = 1.25 / z^2."""
    experiment = load({**private(tmp_path, 4.0), "rounds": 2})
    delta = 1e-5

    def excess(z):
        mu = math.sqrt(1.25) / z
        return norm.cdf(mu / 2 - 4 / mu) - math.exp(4) * norm.cdf(-mu / 2 - 4 / mu) - delta

    z = brentq(excess, 0.1, 20)
    found = signal_of(experiment, 100, 6.0)
    assert (found.clients, found.items) == (100, 30)
    assert found.ratio == pytest.approx(100 * 6 / (30**2 * z), rel=0.01)


def test_clip_norms_follow_the_rounded_number_of_rows_and_private_popularity_is_beside(tmp_path):
    """Of 6 rows each, 8 is the nearest power of two."""
    table = private(tmp_path, 50.0)
    privacy = table["privacy"]
    assert privacy["clip-norm"] == 8.0
    assert privacy["phases"]["popularity"]["clip-norm"] == pytest.approx(8**0.5)
    beside = table["evaluation"]["baselines"][0]
    assert (beside["name"], beside["epsilon"]) == ("dp-popularity", 50.0)
    assert beside["clip-norm"] == pytest.approx(8**0.5)
    many = _fold_in_system(1.0, 5000, 400.0, rated=True)
    assert many["privacy"]["clip-norm"] == 8.0 and many["model"]["items"] == 300
    assert many["privacy"]["phases"]["popularity"]["clip-norm"] == 6.0
    weights = {many[part]["low-rated"] for part in ("model", "step")}
    assert weights == {many["strategy"]["step"]["low-rated"]} == {0.3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--no-rating --rating Menge", "contradict each other"),
        ("--rating none", "no column 'none'"),
        ("--no-header --user Kunde", "no column 'Kunde'"),
        ("--set dataset.name=ml-1m", "two datasets are given"),
        ("--set dataset.path=other.csv", "two datasets are given"),
        ("--epsilon 0", "a number > 0"),
        ("--epsilon 5 --set privacy.epsilon=6", "two target epsilons"),
        ("--epsilon nan", "a number > 0"),
        ("--system forest", "unknown system 'forest'"),
        ("--system als --epsilon 5", "system 'als' is named"),
    ],
)
def test_wrong_options_of_a_table_are_refused(tmp_path, fedrec, options, words):
    code, _, err = fedrec("run", "--data", written(tmp_path), *options.split())
    assert code != 0 and words in err


def test_options_of_a_table_need_one(fedrec):
    code, _, err = fedrec("run", "privrec-synthetic", "--item-vectors", "v.npy")
    assert code != 0 and "table options without --data" in err


def test_a_private_system_of_few_users_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match=r"(?s)too few users.*at least 20.*got: 12"):
        private(tmp_path, 5.0, users=12)


@pytest.mark.slow
def test_the_command_and_python_run_the_same_private_system(tmp_path, fedrec):
    file = written(tmp_path, users=60)
    given = ("--epsilon", 50, "-q", "-o", tmp_path / "run")
    assert fedrec("run", "--data", file, *given, sets=["seed=3"])[0] == 0
    result = Result.load(tmp_path / "run")
    assert result.experiment.model.name == "fold-in" and "dp-popularity" in result.baselines
    frame = pd.read_csv(file, sep=";")
    python = try_table(frame, epsilon=50.0, overrides=["seed=3"], output=tmp_path / "python")
    assert python.metrics == result.metrics


def frame_of(users=40, each=6):
    random = np.random.default_rng(0)
    items = np.concatenate([random.choice(25, each, replace=False) for _ in range(users)])
    return pd.DataFrame({"user": np.repeat(np.arange(users), each), "item": items})


QUICK = {"system": "popularity", "overrides": ["evaluation.baselines=[]"]}


@pytest.mark.parametrize("names", [["user", "item"], [0, 1], ["2023", "2024"]])
def test_the_names_of_a_frame_are_no_row_and_what_is_taken_for_what_is_printed(
    tmp_path, capsys, names
):
    """A frame of an array has the names 0 and 1."""
    frame = frame_of().set_axis(names, axis=1)
    result = try_table(frame, output=tmp_path / "run", **QUICK)
    user, item = map(str, names)
    said = capsys.readouterr().err
    assert "240 rows, 40 users, 25 items" in said
    assert f"user: column {user!r} (by its" in said and f"item: column {item!r} (by its" in said
    assert POPULATIONS.population(result.experiment).interactions.num_users == 40
    turned = try_table(frame, output=tmp_path / "turned", user=names[1], item=names[0], **QUICK)
    assert POPULATIONS.population(turned.experiment).interactions.num_users == 25


@pytest.mark.parametrize(
    ("table", "given", "message"),
    [
        ("mine.csv", {}, r"(?s)not a DataFrame.*type str.*pandas.read_csv"),
        (frame_of(), {"usr": "user"}, r"(?s)column role 'usr'.*did you mean 'user'"),
        (frame_of(), {"user": "usr"}, r"(?s)no column 'usr'.*did you mean 'user'"),
        (frame_of(), {"epsilon": "5"}, r"(?s)got: '5'.*a number > 0"),
        (frame_of(), {"epsilon": True}, r"a number > 0"),
    ],
)
def test_wrong_arguments_in_python_get_an_error_of_fedrec(tmp_path, table, given, message):
    with pytest.raises(FedrecError, match=message):
        try_table(table, output=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()  # so that a corrected call can use it


class KnownItemsAreTested(Split):
    """Every user trains; the second of two rows of the same pair is tested."""

    Config = Config

    def split(self, interactions: Interactions) -> Partition:
        rows = np.arange(len(interactions))
        later = rows >= len(rows) // 2
        users = np.arange(interactions.num_users)
        return Partition(users, rows[~later], rows[:0], rows[later], repeated_use=True)


def test_metrics_that_no_user_has_are_null_in_files_and_named_by_compare(tmp_path, recwarn, caplog):
    """No list has an item that its user knows. JSON has no NaN."""
    caplog.set_level("INFO")
    frame = frame_of()
    pd.concat([frame, frame]).to_csv(tmp_path / "twice.csv", index=False)
    table = {
        "name": "known",
        "dataset": {"name": "table", "path": str(tmp_path / "twice.csv")},
        "split": {"name": f"{__name__}:KnownItemsAreTested"},
        **LINEAR,
        "evaluation": {"ks": [10], "baselines": ["popularity"]},
    }
    result = run(table, output=tmp_path / "run")
    assert not [one for one in recwarn if one.category is RuntimeWarning]
    assert "240 of 480 rows repeat the user and the item of another row" in caplog.text
    assert math.isnan(result.metrics["recall@10"])
    for file in result.folder.rglob("*.json"):
        json.loads(file.read_text(), parse_constant=pytest.fail)
    again = Result.load(result.folder)
    assert again.metrics == pytest.approx(result.metrics, nan_ok=True)
    with pytest.raises(ExperimentError, match=r"no test user of .* has a value of recall@10"):
        compare([again], metric="recall@10")


def test_repeated_rows_change_no_private_setting(tmp_path, capsys):
    """A client uploads each of its items once."""
    frame = frame_of()
    tables = []
    for rows in (frame, pd.concat([frame] * 3)):
        rows.to_csv(tmp_path / "rows.csv", index=False)
        tables.append(OwnTable({}, epsilon=5.0).experiment(tmp_path / "rows.csv", [], False))
    assert tables[0] == tables[1]
    assert "480 of 720 rows repeat the user and the item of another row" in capsys.readouterr().err


def test_vectors_of_items_serve_items_that_nobody_trained_with(tmp_path):
    """Users like one of two kinds, which vectors tell; of 160 items 120 are in one row each."""
    random = np.random.default_rng(1)
    kinds = np.arange(160) % 2
    rows = []
    for user in range(120):
        own = np.flatnonzero(kinds[:40] == user % 2)
        rows += [(f"u{user}", f"i{item}") for item in random.choice(own, 8, replace=False)]
        rows.append((f"u{user}", f"i{40 + user}"))
    np.save(tmp_path / "kinds.npy", np.stack([kinds, 1 - kinds], 1) + 0.01)
    (tmp_path / "kinds.txt").write_text("\n".join(f"i{item}" for item in range(160)))
    frame = pd.DataFrame(rows, columns=["user", "item"])
    files = [tmp_path / "kinds.npy"]
    result = try_table(frame, item_vectors=files, output=tmp_path / "run", unrated=True)
    assert result.experiment.model.name == "fold-in" and result.experiment.privacy is None
    line = result.groups.loc[UNTRAINED_ITEMS]
    assert line["count"] >= 5
    popular = result.baseline_groups["popularity"].loc[UNTRAINED_ITEMS]
    assert line["mrr"] > 1.3 * popular["mrr"] > 0


def test_a_run_of_private_popularity_shows_the_level_of_chance_and_no_prose(tmp_path, fedrec):
    given = ("--epsilon", 1, "-o", tmp_path / "run")
    _, out, err = fedrec("run", "--data", written(tmp_path), *given)
    result = Result.load(tmp_path / "run")
    assert set(result.baselines) == {"popularity", "random"}
    assert result.rounds["epsilon"].iloc[-1] == pytest.approx(1.0, abs=0.01)
    chance = result.baselines["random"]["hits@10"]
    told = " ".join((out + err).split())
    assert re.search(rf"random [^a-z]*{chance:.4f}", told) and "random (not private)" not in told
    assert "It is per value of Kunde; 28 of them train" in told  # of 40, 8 tested, 4 validating
    assert "the guarantee is per value of Kunde, 40 of them" in told
    for prose in ("Whatever", "model.items", "not better than", "Neighbours differ"):
        assert prose not in told
    assert "See the report" in told and any("Whatever" in line for line in result.privacy)


@pytest.mark.parametrize(
    ("options", "built"), [(["--system", "linear"], 1), (["--epsilon", "50"], 2)]
)
def test_the_table_is_read_once_and_the_experiment_built_once(
    tmp_path, monkeypatch, fedrec, options, built
):
    """Before, its first rows are looked at. A private system is built once more, to ask whether it
    can learn anything."""
    reads, builds, read, parse = [], [], pd.read_csv, Experiment.parse.__func__
    file = written(tmp_path)

    def counted(text, **settings):
        mine = str(getattr(text, "name", text)) == str(file)
        reads.extend([file] if mine and settings["nrows"] is None else [])
        return read(text, **settings)

    def parsed(cls, settings, *, at=""):
        builds.append(settings)
        return parse(cls, settings, at=at)

    def stop(folder, callbacks):
        folder.experiment.digest()
        assert POPULATIONS.population(folder.experiment).interactions.num_users == 40
        raise KeyboardInterrupt

    monkeypatch.setattr(pd, "read_csv", counted)
    monkeypatch.setattr(Experiment, "parse", classmethod(parsed))
    monkeypatch.setattr("simulations.runner.execute", stop)
    assert fedrec("run", "--data", file, *options, "-o", tmp_path / "run")[0] == 130
    assert len(reads) == 1 and len(builds) == built


def test_a_table_with_times_is_compared_with_a_system_that_knows_the_order(tmp_path):
    lines = [f"u{n % 40},i{n % 7},{n}" for n in range(400)]
    file = tmp_path / "timed.csv"
    file.write_text("\n".join(["user,item,timestamp", *lines]) + "\n")
    table = experiment(file)
    assert table["split"]["halves"] == "temporal"
    assert table["evaluation"]["baselines"] == ["popularity", "ease", "transitions", "random"]


def test_rows_of_one_time_are_told_of_and_have_no_later_half(tmp_path, caplog, fedrec):
    """Items at random, all bought on one day, and listed by item."""
    random = np.random.default_rng(5)
    bought = [np.sort(random.choice(90, 12, replace=False)) for _ in range(120)]
    lines = [f"u{user},i{item:02},2024-03-01" for user, own in enumerate(bought) for item in own]
    file = tmp_path / "one-day.csv"
    file.write_text("\n".join(["user,item,timestamp", *lines]) + "\n")
    _, _, told = fedrec("run", "--data", file, "-o", tmp_path / "run")
    shared = "100.0% of the rows have the same time as another item of their user"
    assert caplog.text.count(shared) == 1
    assert "later half" not in told


def test_users_and_the_split_are_written_with_the_ids_of_the_table(tmp_path, fedrec):
    """Each row of the table is in one part; tested users are those of users.csv, with half of
    their rows held out, and nobody who trains is tested."""
    file = written(tmp_path, users=60)
    run = tmp_path / "run"
    assert fedrec("run", "--data", file, "--output", run, "--quiet")[0] == 0
    tables = [run / "users.csv", run / "baselines" / "ease" / "users.csv"]
    for users in map(pd.read_csv, tables):
        assert users["user"].tolist() == [f"k{n}" for n in sorted_as_text(users["client"])]
    assert "user" not in Result.load(run).users

    assert fedrec("data", "split", run, "--output", tmp_path / "split.csv")[0] == 0
    split = pd.read_csv(tmp_path / "split.csv")
    rows = pd.read_csv(file, sep=";")
    assert split["user"].tolist() == rows["Kunde"].tolist()
    assert split["item"].tolist() == rows["Artikel"].tolist()
    counts = split.groupby("user")["part"].value_counts().unstack(fill_value=0)
    tested = counts[counts["test"] > 0]
    assert sorted(tested.index) == sorted(pd.read_csv(run / "users.csv")["user"])
    assert (tested[["known", "test"]] == 3).all(axis=None) and not tested["training"].any()
    assert (counts["training"] == 6).sum() == 60 - 12 - 6  # a fifth tested, a tenth validates


def sorted_as_text(clients):
    """Ids such as k10 are numbered in the order of their texts."""
    return [int(name[1:]) for name in np.array(sorted(f"k{n}" for n in range(60)))[clients]]


@pytest.mark.slow
def test_the_split_and_the_answer_are_printed(tmp_path, fedrec):
    """The difference to popularity is that of users.csv; chance is a row."""
    file = written(tmp_path, users=150)
    code, out, err = fedrec("run", "--data", file, "--output", tmp_path / "run")
    told = " ".join(out.split())
    assert code == 0
    assert "105 users train on 630 rows; 30 are tested on 90 held-out rows beside 90" in err
    result = Result.load(tmp_path / "run")
    apart = result.users["hits@10"] - result.baseline_users["popularity"]["hits@10"]
    assert re.search(rf"than popularity[^;]*, by \{apart.mean():+.4f} \[", told)
    assert "random" in result.baseline_users
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    number = r"[+-]?\d\.\d{4}"
    shape = rf"hits@10 {number}: [a-z ]+ than popularity.*, by {number} \[{number}, {number}\]"
    assert re.search(shape, told) and re.search(shape, readme)


def clustered(tmp_path, users=200, repeats=1):
    """Users of two tastes: half of the items each, any of them alike; of every tenth user each row
    is repeated."""
    random = np.random.default_rng(0)
    rows = [
        (user, 30 * (user % 2) + item)
        for user in range(users)
        for item in random.choice(30, 12, replace=False)
        for _ in range(1 if user % 10 else repeats)
    ]
    return table_of(tmp_path, rows)


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 20])
def test_the_best_system_on_validation_users_is_trained_and_named(tmp_path, capsys, repeats):
    """Popularity does not know tastes; what is said of the others is what they have in runs of
    their own on validation users."""
    file = clustered(tmp_path, repeats=repeats)
    chosen = OwnTable().experiment(file, [], False)
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "system: " in line]
    names = {"item-weights": "linear item-to-item model", "ials": "alternating least squares"}
    assert f"system: {names[chosen.model.name]}, the best" in said
    held_out = ["evaluation.held-out=validation", "evaluation.baselines=[]"]
    for system, title in TITLES.items():
        own = OwnTable(system=system).experiment(file, held_out, True)
        found = run(own, output=tmp_path / system).metrics["ndcg@10"]
        assert re.search(rf"{title}[^;,]* {found:.4f}|{title}, [^;]* {found:.4f}", said), system


@pytest.mark.parametrize(
    ("words", "reason", "rounds"),
    [
        ("--system popularity", "as asked for", 1),
        ("-s model.items=20", "whose settings are given", 2),
    ],
)
def test_a_system_that_is_asked_for_is_not_compared(tmp_path, fedrec, words, reason, rounds):
    given = ("--data", clustered(tmp_path), *words.split(), "-o", tmp_path / "run")
    code, _, err = fedrec("run", *given)
    assert code == 0 and reason in err
    result = Result.load(tmp_path / "run")
    assert len(result.rounds) == rounds
    if "popularity" in words:  # which is not advised to be popularity
        assert result.metrics["hits@10"] <= result.baselines["popularity"]["hits@10"]
        assert not any("popularity-start" in line for line in result_lines(result))
