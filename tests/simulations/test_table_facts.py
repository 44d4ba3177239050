# SPDX-License-Identifier: Apache-2.0
"""Under privacy, one user's rows change neither the settings of an experiment on an own table nor
what other users upload."""

import json

import numpy as np
import pytest

from fedrec.data.cache import POPULATIONS
from fedrec.errors import DataError, ExperimentError
from fedrec.privacy.accounting import events
from simulations import runner
from simulations.cli.experiments.own_data import OwnTable
from tests.captured_noise import captured, sensitivities

USERS, ITEMS, EACH = 60, 30, 8
HEAD = "user,item,rating"
HOSTILE = {
    "a rating of 0": lambda rows: [(rows[0][0], 0), *rows[1:]],
    "a rating of 10": lambda rows: [(rows[0][0], 10), *rows[1:]],
    "a rating of a million": lambda rows: [(rows[0][0], 1e6), *rows[1:]],
    "a rating of its own in each row": lambda rows: [
        (item, 1 + item / 100) for item in range(ITEMS)
    ],
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
        lines = [
            f"u{user},i{item:02},{value:g}{tail(user)}"
            for user, own in enumerate(users)
            for item, value in own
        ]
        file = tmp_path / "rows.csv"
        file.write_text("\n".join([head, *lines, ""]))
        table = OwnTable(columns, unrated, epsilon=epsilon)
        return table.experiment(file, list(overrides), False)

    return experiment


def trained(experiment):
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
    user = trained(experiment)
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
    with pytest.raises(DataError, match=r"no rating in column 'rating', as in 1 of 474 rows"):
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
