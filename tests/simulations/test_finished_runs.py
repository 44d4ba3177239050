# SPDX-License-Identifier: Apache-2.0
"""What is done with finished runs: amended results, later rows, recommendations and epsilons."""

import json

import numpy as np
import pandas as pd
import pytest

import fedrec
from fedrec.data.population import POPULATIONS, Population
from fedrec.errors import DataError, ExperimentError
from fedrec.privacy.accounting import events
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.own_table import OwnTable
from simulations.runner import _write_amended
from tests.captured_noise import captured, sensitivities

# Runs that are extended, changed or overwritten, and failed starts that leave nothing behind.

NOISE = "privacy={clip-norm=1.0, noise-multiplier=1.0, backend='pld'}"


def test_a_crash_while_a_run_is_amended_leaves_it_unchanged(run_tiny):
    result = run_tiny()
    text = (result.folder / "experiment.toml").read_text()
    _write_amended(RunFolder(result.folder), result.experiment.model_copy(update={"rounds": 3}))
    (result.folder / "experiment.toml").write_text(text)  # the second file was not written
    assert runner.resume(result.folder).metrics == result.metrics


def test_what_was_learned_with_cannot_change(run_tiny):
    result = run_tiny("privacy={clip-norm=1.0, epsilon=5.0, backend='pld'}")
    for override, words in (
        ("strategy.server-lr=0.3", "cannot be changed"),
        ("evaluation.fine-tune={epochs=5}", "cannot be changed"),
        ("rounds=1", "cannot be removed"),
        ("rounds=4", "more noise"),  # it was calibrated to all rounds
    ):
        with pytest.raises(ExperimentError, match=words):
            runner.resume(result.folder, [override])
    assert runner.resume(result.folder).metrics == result.metrics


def test_a_run_whose_settings_do_not_fit_leaves_no_folder(run_tiny, tmp_path):
    """Refused after the folder was created: eighteen clients train, and no baseline was fitted
    before."""
    with pytest.raises(ExperimentError, match=r"sampler\.cohort"):
        run_tiny("sampler.cohort=100", "evaluation.baselines=['popularity']")
    assert not (tmp_path / "run").exists()
    assert run_tiny().metrics


def test_baselines_that_were_evaluated_alone_are_not_begun_anew(tiny_experiment, tmp_path):
    table = {key: tiny_experiment()[key] for key in ("name", "dataset", "split")}
    table["evaluation"] = {"baselines": ["popularity"]}
    result = runner.run(table, output=tmp_path / "run")
    with pytest.raises(ExperimentError, match="cannot be changed"):
        runner.resume(result.folder, ["evaluation.baselines=['ease']"])
    assert runner.resume(result.folder).baselines == result.baselines


# Recommendations after a run for users who came later.


@pytest.fixture
def call(request):
    """The command line; `fedrec` is the package here."""
    return request.getfixturevalue("fedrec")


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
    output = tmp_path_factory.mktemp("later")
    result = fedrec.try_table(table, system="linear", output=output)
    assert np.any(result.parameters["item.weights"])
    return result


@pytest.fixture
def with_data(trained, table):
    """Puts other rows into the place of the data."""
    file = trained.folder.parent / "table.csv"

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


def test_a_history_serves_users_who_were_not_there(trained, table, tmp_path, call):
    unknown = pd.DataFrame([("new", "a-new-item")], columns=["user", "item"])
    history = pd.concat([twin(table, "new"), twin(table, "newer", of="u08"), unknown])
    found = trained.recommend(k=5, history=history)
    assert set(found["user"]) == {"new", "newer"}
    own, taste = set(lists(found, "new")[0]), set(history["item"][history["user"] == "new"])
    assert not own & taste and all(int(item[1:]) >= _TASTE for item in own)
    file = tmp_path / "new.csv"
    history.to_csv(file, index=False)
    output = tmp_path / "lists.csv"
    assert not call("recommend", trained.folder, "--history", file, "--top", 5, "-o", output)[0]
    assert pd.read_csv(output)["item"].tolist() == found["item"].tolist()
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
        ("nowhere.csv", "not found"),
    ],
)
def test_a_damaged_history_is_refused(trained, history, words):
    with pytest.raises(DataError, match=words):
        trained.recommend(history=history)


def test_data_with_other_users_or_items_than_the_run_are_refused(with_data, table):
    added = pd.DataFrame([("u07", "a-new-item")], columns=["user", "item"])
    grown = (pd.concat([table, twin(table, "new")]), pd.concat([added, table]))
    for rows in (table[table["user"] != "u07"], table[table["item"] != "i03"], *grown):
        with pytest.raises(DataError, match="data have changed"):
            with_data(rows).recommend()


def test_a_new_user_without_its_private_parameters_is_refused(run_tiny):
    history = pd.DataFrame({"user": ["new"] * 4, "item": [1, 2, 3, 4], "rating": [5.0] * 4})
    private = ('step.private-parameters=["user.*"]', "evaluation.fine-tune={epochs=0}")
    result = run_tiny('model={name="mf", factors=4}', *private)
    assert len(result.recommend(k=3))
    with pytest.raises(ExperimentError, match="user 'new' came after the run"):
        result.recommend(history=history)


# Recommendations of finished runs, with the ids of the data.


@pytest.fixture
def run(trained):
    return trained.folder


def test_a_finished_run_gives_its_parameters(run):
    one, other = fedrec.resume(run), fedrec.Result.load(run)
    assert set(one.parameters) == {"item.bias", "item.weights"}
    np.testing.assert_array_equal(one.parameters["item.weights"], other.parameters["item.weights"])


def test_items_that_a_user_has_a_row_about_are_not_recommended(run, table):
    found = fedrec.Result.load(run).recommend(k=5)
    known = set(zip(table["user"], table["item"], strict=True))
    assert not known & set(zip(found["user"], found["item"], strict=True))
    assert (found.groupby("user")["rank"].max() == 5).all()
    assert (found.groupby("user")["score"].diff().dropna() <= 0).all()


def test_a_user_with_a_row_of_every_item_is_told_so(run, tmp_path, call):
    more = pd.DataFrame({"user": "everything", "item": [f"i{number:02d}" for number in range(30)]})
    more.to_csv(tmp_path / "more.csv", index=False)
    users = ("--user", "everything", "--user", "u01", "--top", 2)
    code, out, err = call("recommend", run, "--history", tmp_path / "more.csv", *users)
    assert code == 0 and err.startswith("User 'everything' has rows for all items")
    assert [line.split(",")[0] for line in out.splitlines()] == ["user", "u01", "u01"]


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
    np.testing.assert_allclose(share, result.users["recall@10"])
    assert share.mean() > 0


def test_users_are_named_by_the_datas_ids(run):
    result = fedrec.Result.load(run)
    found = result.scores(["u07", "u03"])
    assert found.index.tolist() == ["u07", "u03"]
    np.testing.assert_array_equal(found.loc["u03"], result.scores().loc["u03"])
    with pytest.raises(DataError, match="unknown user 'nobody'"):
        result.recommend(["nobody"])
    with pytest.raises(ExperimentError, match="nothing to recommend"):
        result.recommend(k=0)
    for refused in (result.recommend, result.scores):
        with pytest.raises(ExperimentError, match="users are one text") as error:
            refused("u07")
        assert "['u07']" in error.value.text()


def test_lists_are_written_as_parquet(run, tmp_path, call):
    pytest.importorskip("pyarrow")
    file = tmp_path / "lists.parquet"
    assert call("recommend", run, "--top", 3, "-o", file)[0] == 0
    expected = fedrec.Result.load(run).recommend(k=3)
    assert pd.read_parquet(file)["item"].tolist() == expected["item"].tolist()


def test_ids_that_a_spreadsheet_would_execute_are_written_as_text(run, tmp_path, monkeypatch, call):
    ids = ["=cmd|'/c calc'!A0", "+1+1", "@SUM(A1)", "-2+3", "-5", "plain", "a=b"]
    rows = {"user": ["-x"] * 7, "rank": range(1, 8), "item": ids, "score": [-0.5] * 7}
    monkeypatch.setattr(fedrec.Result, "recommend", lambda *_, **__: pd.DataFrame(rows))
    assert call("recommend", run, "-o", tmp_path / "lists.csv")[0] == 0
    assert (tmp_path / "lists.csv").read_text() == call("recommend", run)[1]
    found = pd.read_csv(tmp_path / "lists.csv", dtype=str)
    assert found["item"].tolist() == [*(f"'{one}" for one in ids[:4]), *ids[4:]]
    assert set(found["user"]) == {"'-x"} and set(found["score"]) == {"-0.5"}


def test_fine_tuning_on_the_device_is_part_of_the_scores(tiny_experiment, tmp_path):
    result = fedrec.run(tiny_experiment(), output=tmp_path / "run")
    tuned = fedrec.Result.load(tmp_path / "run").scores()
    assert tuned.shape == (24, 30)
    untuned = ["evaluation.fine-tune={epochs=0}"]
    shared = fedrec.run(tiny_experiment(), untuned, output=tmp_path / "shared")
    np.testing.assert_array_equal(shared.parameters["item.id"], result.parameters["item.id"])
    assert not np.allclose(tuned, shared.scores())


def test_items_that_a_user_rated_low_are_not_recommended(tmp_path):
    random = np.random.default_rng(1)
    pairs = sorted({(random.integers(40), random.integers(30)) for _ in range(500)})
    rows = pd.DataFrame(pairs, columns=["user", "item"])
    rows["rating"] = random.integers(1, 6, len(rows))
    found = fedrec.try_table(rows, output=tmp_path / "run").recommend(k=5)
    assert (rows["rating"] <= 3).mean() > 0.3  # low ratings, which are not positive
    known = set(zip(rows["user"], rows["item"], strict=True))
    assert len(found) and not known & set(zip(found["user"], found["item"], strict=True))


def test_every_public_name_of_the_package_is_there():
    assert {name: getattr(fedrec, name) for name in fedrec.__all__}


# Under privacy, one user's rows change neither the settings of an experiment on an own table nor
# what other users upload.

USERS, ITEMS, EACH = 60, 30, 8
HEAD = "user,item,rating"
HOSTILE = {
    "a rating of 0": lambda rows: [(rows[0][0], 0), *rows[1:]],
    "a rating of 10": lambda rows: [(rows[0][0], 10), *rows[1:]],
    "a rating of a million": lambda rows: [(rows[0][0], 1e6), *rows[1:]],
    "a rating of its own in each row": lambda _: [(item, 1 + item / 100) for item in range(ITEMS)],
    "one row fewer": lambda rows: rows[1:],
    "one row": lambda rows: rows[:1],
    "all items": lambda rows: [(item, 5) for item in range(ITEMS)],
    "each row many times": lambda rows: 40 * rows,
}


def honest():
    """Items and ratings, 1 to 5, of each user."""
    random = np.random.default_rng(0)
    return [
        [(int(item), int(random.integers(1, 6))) for item in random.choice(ITEMS, EACH, False)]
        for _ in range(USERS)
    ]


@pytest.fixture
def private(tmp_path):
    """The experiment on the rows of all users, in one file."""

    def experiment(
        users,
        *overrides,
        unrated=False,
        head=HEAD,
        tail=lambda user: "",
        epsilon: float | None = 50.0,
        **columns,
    ):
        lines = [head]
        for user, own in enumerate(users):
            lines += [f"u{user},i{item:02},{value:g}{tail(user)}" for item, value in own]
        file = tmp_path / "rows.csv"
        file.write_text("\n".join([*lines, ""]))
        table = OwnTable(columns, unrated, epsilon=epsilon)
        return table.experiment(file, list(overrides), False)

    return experiment


def trained_user(experiment):
    """A user who trains."""
    return int(POPULATIONS.population(experiment).partition.training_clients[0])


def with_rows_of(users, user, rows):
    return [rows if number == user else own for number, own in enumerate(users)]


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("threshold", ["positive-above=3", None])
def test_one_users_rows_change_no_setting(private, kind, threshold):
    given = [threshold] if threshold else []
    before = private(honest(), *given, unrated=not given)
    for user in (0, USERS - 1):
        rows = with_rows_of(honest(), user, HOSTILE[kind](honest()[user]))
        assert private(rows, *given, unrated=not given).table() == before.table()


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_one_users_rows_move_the_sums_by_no_more_than_is_charged(private, tmp_path, kind):
    """With what is released held fixed; sums of the other users would move by far more."""
    given = ["positive-above=3", "evaluation.baselines=[]", "engine.nodes=1"]
    experiment = private(honest(), *given)
    user = trained_user(experiment)
    with captured() as before:
        runner.run(experiment, output=tmp_path / "before")
    ids = POPULATIONS.population(experiment).interactions.user_ids
    number = int(str(ids[user]).removeprefix("u"))
    rows = with_rows_of(honest(), number, HOSTILE[kind](honest()[number]))
    with captured(before) as after:
        runner.run(private(rows, *given), output=tmp_path / "after")
    lines = map(json.loads, (tmp_path / "before/privacy.jsonl").read_text().splitlines())
    charged = {line["round"]: events.from_record(line["event"]) for line in lines}
    assert set(charged) == {1, 2}
    for one, other in zip(before, after, strict=True):
        assert one.moved(other) <= (1 + 1e-4) * sensitivities(one, charged[one.address[0]])


def test_ratings_need_a_threshold_that_is_given_or_none_at_all(private):
    with pytest.raises(ExperimentError, match=r"(?s)positive-above=3.*--no-rating"):
        private(honest())
    assert private(honest(), "positive-above=2.5").positive_above == 2.5
    assert private(honest(), unrated=True).positive_above is None


@pytest.mark.parametrize(
    "override",
    [
        "privacy={epsilon=50.0, clip-norm=1.0}",
        "privacy.epsilon=50.0",
        "evaluation.baselines=[{name='dp-popularity', epsilon=5.0}]",
        "perturb={name='rnnr', epsilon=1.0}",
    ],
)
def test_privacy_by_overrides_passes_the_same_gate(private, override, capsys):
    with pytest.raises(ExperimentError, match=r"(?s)positive-above=3.*--no-rating"):
        private(honest(), override, epsilon=None)
    if not override.startswith(("privacy.", "perturb")):
        made = private(honest(), override, "positive-above=3", epsilon=None)
        assert made.model.name == "item-weights"
        assert "not compared with others under privacy" in capsys.readouterr().err


def test_columns_are_not_recognised_by_their_values(private):
    head = "a,b,rating"
    with pytest.raises(ExperimentError, match=r"--user a --item b"):
        private(honest(), "positive-above=3", head=head)
    assert private(honest(), "positive-above=3", head=head, user="a", item="b").privacy
    spoiled = with_rows_of(honest(), 0, [(1, np.nan), (2, 3)])
    with pytest.raises(DataError, match=r"column 'rating', as in 1 of 474 rows"):
        private(spoiled, "positive-above=3")
    times = {"head": f"{HEAD},time", "tail": lambda user: f",{user}" if user else ",x"}
    with pytest.raises(ExperimentError, match=r"'time' must not be left out"):
        private(honest(), "positive-above=3", **times)


def test_whose_data_are_protected_is_said_where_two_columns_fit(private):
    head = "session_id,item,rating,user_id"
    more = {"head": head, "tail": lambda user: f",p{user // 2}"}
    with pytest.raises(ExperimentError, match=r"--user user_id, or --user session_id"):
        private(honest(), "positive-above=3", **more)
    given = private(honest(), "positive-above=3", **more, user="user_id")
    assert given.dataset.options["user"] == "user_id"


def test_what_is_public_is_printed(private, capsys):
    """60 users with 8 rows less one have a mean that would tell the number of rows."""
    users = with_rows_of(honest(), 0, honest()[0][1:])
    table = private(users, "positive-above=3").table()
    clips = (table["privacy"]["clip-norm"], table["privacy"]["phases"]["popularity"]["clip-norm"])
    assert clips == (8.0, 8**0.5)
    assert table["evaluation"]["baselines"][0]["clip-norm"] == 8**0.5
    said = capsys.readouterr().err
    assert "the list of 30 items, the number of 60 users and a mean of about 8 items" in said
    assert "the threshold of ratings, 3, is given" in said
