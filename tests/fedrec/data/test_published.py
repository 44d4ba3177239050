# SPDX-License-Identifier: Apache-2.0
"""Published data and splits, and files of vectors."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedrec.components.registry import DATASET, resolve
from fedrec.data.interactions import Feature, FeatureNames, FeatureTable, Interactions, Vectors
from fedrec.data.reader import Catalogue, data_directory, read_vectors
from fedrec.data.readers.published import AmazonUpc
from fedrec.data.readers.table import Table
from fedrec.data.splits.folds import Published, read_test_fold
from fedrec.errors import DataError

# The readers on the published data, and on damaged copies, which are refused.


def reader(name, **settings):
    found = resolve(DATASET, name)
    return found(name, found.Config(**settings))


def copied(name, folder):
    ignored = shutil.ignore_patterns("ncf", "*.npz")
    return shutil.copytree(reader(name).folder(), folder, dirs_exist_ok=True, ignore=ignored)


def replace_line(path: Path, number: int, change):
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = change(lines[number])
    path.write_bytes(b"".join(lines))


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "users", "items"),
    [
        ("ml-100k", 100_000, 943, 1_682),
        ("ml-1m", 1_000_209, 6_040, 3_706),
        ("frappe", 96_203, 957, 4_082),
        ("gowalla", 810_128 + 217_242, 29_858, 40_981),
        ("amazon-upc", 37_027 + 15_930, 4_874, 2_406),
        ("amazon-video", 63_836, 8_072, 11_830),
        ("beauty", 353_962, 40_226, 54_542),
    ],
)
def test_published_data_are_accepted(name, rows, users, items):
    data = reader(name).read()
    assert (len(data), data.num_users, data.num_items) == (rows, users, items)


@pytest.mark.real_data
def test_shipped_folds_cover_ml_100k_once():
    data = reader("ml-100k").read()
    folds = [read_test_fold(data_directory() / "ml-100k", fold, data) for fold in range(1, 6)]
    assert [len(fold) for fold in folds] == [20_000] * 5
    np.testing.assert_array_equal(np.sort(np.concatenate(folds)), np.arange(100_000))


INJECTED = b"".join(b"0\t%d\t4\t881250949\n" % item for item in range(1, 8))


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "file", "change", "expected", "got"),
    [
        ("ml-100k", "u.data", lambda data: data + INJECTED, "100,000 rows", "100,007 rows"),
        ("ml-1m", "ratings.dat", lambda data: data[:-9], "a line end", "the last line '6040::"),
        (
            *("ml-1m", "ratings.dat"),
            lambda data: b"".join(data.splitlines(keepends=True)[:50_440]),
            *("1,000,209 rows", "50,440 rows"),
        ),
    ],
)
def test_damaged_copies_that_circulate_are_refused(tmp_path, name, file, change, expected, got):
    path = copied(name, tmp_path) / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        reader(name, path=tmp_path).read()
    assert expected in caught.value.expected and got in caught.value.got


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "number", "old", "new"),
    [
        ("ml-100k", "u.data", 0, b"\t3\t", b"\t4\t"),
        ("ml-1m", "ratings.dat", 0, b"::5::", b"::4::"),
        ("frappe", "frappe.csv", 2, b"1\t1\t7\t", b"1\t1\t8\t"),
        ("amazon-upc", "train.csv", 1, b"0,0,", b"1,0,"),
        ("gowalla", "train.txt", 0, b"0 0 1 ", b"0 0 0 "),
    ],
)
def test_one_changed_value_is_refused(tmp_path, name, file, number, old, new):
    folder = copied(name, tmp_path)
    replace_line(folder / file, number, lambda line: line.replace(old, new, 1))
    with pytest.raises(DataError, match="was changed") as caught:
        reader(name, path=folder).read()
    assert caught.value.expected.startswith("fingerprint ")
    assert reader(name, path=folder, verify=False).read() is not None


@pytest.mark.real_data
def test_pair_moved_from_test_to_train_is_refused(tmp_path):
    folder = copied("amazon-upc", tmp_path)
    train, test = (
        (folder / name).read_bytes().splitlines(keepends=True) for name in ("train.csv", "test.csv")
    )
    train[5], test[5] = test[5], train[5]
    (folder / "train.csv").write_bytes(b"".join(train))
    (folder / "test.csv").write_bytes(b"".join(test))
    with pytest.raises(DataError, match="was changed"):
        reader("amazon-upc", path=folder).read()


@pytest.mark.real_data
def test_the_error_for_missing_data_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path))
    with pytest.raises(DataError, match="not found") as caught:
        reader("ml-1m").read()
    assert str(tmp_path / "ml-1m") in caught.value.problem
    assert "fedrec data fetch ml-1m" in caught.value.fix


# The publisher's own split, also in the format of the other Amazon datasets of UPC-SDG's authors.


@pytest.fixture
def clothing(tmp_path):
    """Two files in the authors' format of Clothing: a header, items before users, ids and codes."""
    train = [(user * 3 + n, user) for user in range(12) for n in range(1 + user)]
    test = [(user * 3 + 20, user) for user in range(12)]
    for name, rows in (("train", train), ("test", test)):
        body = (f"{item},{user},A{user},B{item}" for item, user in rows)
        lines = ["itemID,userID,reviewerID,asin", *body]
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


def test_datasets_without_such_files_are_refused(clothing):
    data = read(AmazonUpc, clothing[0])
    for rows, problem in (
        (replace(data, published_test=None), "has no published split"),
        (data.with_rows(~data.published_test), "rows of one file only"),
    ):
        with pytest.raises(DataError, match=problem):
            Published(Published.Config(), 0).split(rows)


# Files of dense vectors of items, and what becomes of them.

IDS = np.array([10, 20, 30])
NAMES = ["30", "10", "7"]
VALUES = np.array([[1.0, 2.0], [3.0, -4.0], [9.0, 9.0]])


def npy(tmp_path, values=VALUES, names=NAMES):
    np.save(tmp_path / "cover.npy", values)
    (tmp_path / "cover.txt").write_text("\n".join(names) + "\n")
    return tmp_path / "cover.npy"


def test_rows_go_by_their_ids_and_other_items_are_left_out(tmp_path):
    vectors = read_vectors(npy(tmp_path), IDS, complete=False)
    assert vectors.name == "cover" and vectors.values.dtype == np.float32
    np.testing.assert_array_equal(vectors.values, [[3, -4], [0, 0], [1, 2]])
    assert vectors.known.tolist() == [True, False, True]
    with pytest.raises(DataError, match="1 of them, such as 'x'"):
        read_vectors(npy(tmp_path), np.array(["x"]), complete=False)
    with pytest.raises(DataError, match=r"none\.npy"):
        read_vectors(tmp_path / "none.npy", IDS, complete=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        (VALUES, NAMES, "1 of them, such as 20"),
        (VALUES, ["30", "10", "30"], "duplicate '30'"),
        (VALUES, ["30", "10"], "2 ids and an array"),
        (VALUES[:, 0], NAMES, r"an array \[3\]"),
        (np.where(VALUES > 8, np.nan, VALUES), NAMES, "NaN or infinity"),
        (np.where(VALUES > 8, 1e300, VALUES), NAMES, "NaN or infinity"),
        (np.array([["a"], ["b"], ["c"]]), NAMES, "of <U1"),
        (VALUES + 1j, NAMES, "of complex128"),
    ],
)
def test_vectors_that_cannot_be_used_are_refused(tmp_path, values, names, message):
    with pytest.raises(DataError, match=message):
        read_vectors(npy(tmp_path, values, names), IDS, complete=True)


def test_a_table_names_them_as_features_of_their_own_kind(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("user,item\n1,10\n1,30\n2,20\n")
    settings = {"item_vectors": [npy(tmp_path)], "items_without_vector": "mean"}
    reader = Table("mine", Table.Config(path=path, **settings))
    table = reader.described(reader.read()).item_features
    assert table.names == () and table.vectors[0].known.tolist() == [True, False, True]
    assert reader.stated_features() == FeatureNames(item_vectors=("cover",))
    assert {file.name for file in reader.files()} == {"rows.csv", "cover.npy", "cover.txt"}


def vectors(values=VALUES, known=(True, True, False)):
    values = np.where(np.array(known)[:, None], values, 0).astype(np.float32)
    return Vectors("cover", values, np.array(known))


def test_they_are_centred_and_scaled_and_follow_their_rows():
    found = vectors().standardised()
    own = VALUES[:2] - VALUES[:2].mean(0)
    np.testing.assert_allclose(found[:2], own / np.sqrt((own**2).sum(1).mean()), rtol=1e-6)
    assert not found[2].any()
    moved = vectors().renumbered(np.array([1, -1, 2, 0]))
    assert moved.known.tolist() == [True, False, False, True]
    np.testing.assert_array_equal(moved.values[[0, 3]], VALUES[[1, 0]])
    assert not moved.values[1:3].any()


def test_the_catalogue_of_a_deployment_carries_them(tmp_path):
    title = Feature.words("title", ["Red hat", "", "hat"])
    table = FeatureTable(3, (Feature.single("kind", "aba"),), (title,), (vectors(),))
    Catalogue(np.array(["x", "y", "z"]), table, (), False, False).write(tmp_path / "c.json")
    found = Catalogue.read(tmp_path / "c.json").item_features
    assert found.names == ("kind",) and found["title"].categories == title.categories
    np.testing.assert_array_equal(found.vectors[0].values, vectors().values)
    np.testing.assert_array_equal(found.vectors[0].known, vectors().known)
    written = json.loads((tmp_path / "c.json").read_text())
    written["item-vectors"][0]["width"] = 3
    (tmp_path / "c.json").write_text(json.dumps(written))
    with pytest.raises(DataError, match="not a catalogue"):
        Catalogue.read(tmp_path / "c.json")
    for values in (np.zeros((3, 0), np.float32), np.full((3, 2), np.inf, np.float32)):
        with pytest.raises(DataError, match="invalid vectors"):
            replace(vectors(), values=values)
