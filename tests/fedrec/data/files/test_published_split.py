# SPDX-License-Identifier: Apache-2.0
"""The publisher's own split, also in the format of the other Amazon datasets of UPC-SDG's
authors."""

import numpy as np
import pytest

from fedrec.data.interactions import Interactions
from fedrec.data.readers.amazon.amazon_upc import AmazonUpc
from fedrec.data.readers.gowalla import Gowalla
from fedrec.data.readers.synthetic import Synthetic
from fedrec.data.splits.published import Published
from fedrec.errors import DataError


@pytest.fixture
def clothing(tmp_path):
    """Two files in the authors' format of Clothing: a header, items before users, ids and codes."""
    train = [(user * 3 + n, user) for user in range(12) for n in range(1 + user)]
    test = [(user * 3 + 20, user) for user in range(12)]
    for name, rows in (("train", train), ("test", test)):
        lines = [
            "itemID,userID,reviewerID,asin",
            *(f"{item},{user},A{user},B{item}" for item, user in rows),
        ]
        (tmp_path / f"{name}.csv").write_text("\r\n".join(lines) + "\r\n")
    return tmp_path, train, test


def read(reader, folder, **settings) -> Interactions:
    return reader("small", reader.Config(path=folder, verify=False, **settings)).read()


def test_rows_of_the_files_are_what_is_learned_from_and_tested(clothing):
    folder, train, test = clothing
    data = read(AmazonUpc, folder)
    found = Published(Published.Config(), 0).split(data)
    for rows, wanted in ((found.train_rows, train), (found.test_rows, test)):
        pairs = zip(data.item_ids[data.items[rows]], data.user_ids[data.users[rows]], strict=True)
        assert sorted(pairs) == sorted(wanted)
    assert len(found.validation_rows) == 0 and found.training_clients.tolist() == list(range(12))


def test_validation_rows_come_from_the_training_file(clothing):
    folder, train, test = clothing
    data = read(AmazonUpc, folder)
    found, again, other = (
        Published(Published.Config(validation=0.25), seed).split(data) for seed in (0, 0, 1)
    )
    counts = np.bincount(data.users[found.validation_rows], minlength=12)
    assert counts.tolist() == [min(int(0.25 * n + 0.5), n - 1) for n in range(1, 13)]
    assert len(found.test_rows) == len(test) and len(found.train_rows) + counts.sum() == len(train)
    assert (found.validation_rows == again.validation_rows).all()
    assert (found.validation_rows != other.validation_rows).any()


def test_gowalla_has_one_too(tmp_path):
    (tmp_path / "train.txt").write_text("0 5 2\n1 5\n3 8 2 5 \n")
    (tmp_path / "test.txt").write_text("0 8\n1 \n3 9\n")
    found = Published(Published.Config(), 0).split(read(Gowalla, tmp_path))
    assert (len(found.train_rows), len(found.test_rows)) == (6, 2)


def test_datasets_without_such_files_are_refused(clothing):
    generated = Synthetic(
        "synthetic", Synthetic.Config(users=5, items=30, mean_interactions=9)
    ).read()
    with pytest.raises(DataError, match="has no published split"):
        Published(Published.Config(), 0).split(generated)
    with pytest.raises(DataError, match="rows of one file only"):
        Published(Published.Config(), 0).split(read(AmazonUpc, clothing[0], part="train"))
