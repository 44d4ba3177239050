# SPDX-License-Identifier: Apache-2.0
"""The test rows and sampled items of NCF's files, and metrics of lists among these items."""

import numpy as np
import pytest
import torch

from fedrec.data.files.indexing import index_rows
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population
from fedrec.data.split import partition_by
from fedrec.errors import DataError
from fedrec.evaluation.lists import HeldOutLists
from fedrec.evaluation.metrics import Metrics
from fedrec.experiment.sections import Section
from fedrec.experiment.tables import EvaluationConfig

# the files call items 9, 7, 8, 5, 6, 4 by 0 to 5, and users 3, 1 by 0, 1: as they first occur
USERS = [3, 3, 3, 3, 1, 1, 1, 1]
ITEMS = [9, 7, 8, 5, 6, 9, 4, 7]
TIMES = [1, 4, 3, 4, 9, 5, 6, 7]
RATING = "0\t1\t5\t4\n1\t4\t3\t9\n"
NEGATIVE = "(0,1)\t4\t5\t1\n(1,4)\t2\t2\n"


@pytest.fixture
def interactions() -> Interactions:
    columns = {"users": USERS, "items": ITEMS, "times": TIMES}
    return index_rows("small", **{name: np.array(value) for name, value in columns.items()})


@pytest.fixture
def split(tmp_path, interactions):
    def made(rating: str = RATING, negative: str = NEGATIVE, **options):
        for name, text in (("rating", rating), ("negative", negative)):
            (tmp_path / f"small.test.{name}").write_text(text)
        section = Section(name="leave-one-out", folder=str(tmp_path), **options)  # type: ignore[call-arg]
        return partition_by(section, 0, interactions)

    return made


def test_rows_of_the_file_are_tested_also_where_another_is_as_late(split, interactions):
    """User 3's rows of items 7 and 5 have the same time; without files the seed chooses one."""
    found = split()
    assert found.test_rows.tolist() == [1, 4]
    assert found.validation_rows.tolist() == [3, 7], "the last of the others"
    assert found.train_rows.tolist() == [0, 2, 5, 6]
    assert split(validation=False).train_rows.tolist() == [0, 2, 3, 5, 6, 7]
    usual = [partition_by(Section(name="leave-one-out"), seed, interactions) for seed in range(9)]
    assert {tuple(one.test_rows.tolist()) for one in usual} == {(1, 4), (3, 4)}
    assert all(one.sampled is None for one in usual)


def test_sampled_items_are_numbered_by_first_occurrence(split, interactions):
    names = interactions.user_ids, interactions.item_ids
    pairs = [(int(names[0][user]), int(names[1][item])) for user, item in split().sampled]
    assert pairs == [(3, 6), (3, 4), (3, 7), (1, 8), (1, 8)]


def test_metrics_rank_each_positive_among_its_own_items(split, interactions):
    """Scores fall with the items' numbers in the file, so that item 1 is above 4 and 5, and 4 below
    2; 3 is above, too, but not in the sample. The test item among its own sample, and a repeated
    item, count once."""
    population = Population(interactions, split(), task="ranking", positive_above=None)
    settings = EvaluationConfig(ks=(1, 2, 3), sampled_items=3)
    metrics = Metrics("ranking", settings)
    order = {9: 0, 7: 1, 8: 2, 5: 3, 6: 4, 4: 5}
    scores = torch.tensor([[-float(order[int(item)]) for item in interactions.item_ids]] * 2)
    clients = np.array([0, 1])
    table = HeldOutLists(population, metrics, settings).measure(clients, scores).table
    last, first = (int(np.flatnonzero(interactions.user_ids == user)[0]) for user in (1, 3))
    hits = table[[f"hits-of-4@{k}" for k in (1, 2, 3)]].to_numpy()
    assert hits[first].tolist() == [1, 1, 1]
    assert hits[last].tolist() == [0, 1, 1]
    assert table["ndcg-of-4@3"].to_numpy()[last] == pytest.approx(1 / np.log2(3))
    assert table["hits@2"].to_numpy()[last] == 0, "3 counts among all never-seen items"
    assert table["hits@1"].to_numpy()[first] == 1, "all never-seen items: 6 and 4, both below"


@pytest.mark.parametrize(
    ("rating", "negative", "error"),
    [
        ("0\t4\t5\t4\n1\t4\t3\t9\n", NEGATIVE, "line 1: a pair that is not"),
        ("0\t1\t5\t4\n1\t9\t3\t9\n", NEGATIVE, "line 2: a pair that is not"),
        ("0\t1\t5\t4\n", NEGATIVE, "one row of each user"),
        ("0\t1\t5\t4\n0\t3\t5\t4\n", NEGATIVE, "one row of each user"),
        (RATING, "(0,1)\t4\n", "does not belong"),
        (RATING, "(0,1)\t4\n(1,4)\t6\n", "does not have"),
        (RATING, "(0,1)\t4\n(1,4)\tx\n", "line 2: not in the expected format"),
        (RATING, NEGATIVE[:-1], "cut off"),
    ],
)
def test_files_of_other_data_are_refused(split, rating, negative, error):
    with pytest.raises(DataError, match=error):
        split(rating, negative)


def test_a_folder_without_the_files_is_named(tmp_path, interactions):
    section = Section(name="leave-one-out", folder=str(tmp_path))  # type: ignore[call-arg]
    with pytest.raises(DataError, match="no published test file"):
        partition_by(section, 0, interactions)
