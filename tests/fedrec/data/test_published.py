# SPDX-License-Identifier: Apache-2.0
"""The readers on the published data, and on damaged copies, which are refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fedrec.components.registry import DATASET, resolve
from fedrec.data.reader import data_directory
from fedrec.data.splits.kfold import read_test_fold
from fedrec.errors import DataError

pytestmark = pytest.mark.real_data


def reader(name, **settings):
    found = resolve(DATASET, name)
    return found(name, found.Config(**settings))


def copied(name, folder):
    shutil.copytree(
        reader(name).folder(),
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("ncf", "*.npz"),
    )
    return folder


def replace_line(path: Path, number: int, change):
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = change(lines[number])
    path.write_bytes(b"".join(lines))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "users", "items"),
    [
        ("ml-100k", 100_000, 943, 1_682),
        ("ml-1m", 1_000_209, 6_040, 3_706),
        ("frappe", 96_203, 957, 4_082),
        ("gowalla", 1_027_370, 29_858, 40_981),
        ("amazon-upc", 52_957, 4_874, 2_406),
        ("amazon-video", 63_836, 8_072, 11_830),
        ("beauty", 353_962, 40_226, 54_542),
    ],
)
def test_published_data_are_accepted(name, rows, users, items):
    data = reader(name).read()
    assert (len(data), data.num_users, data.num_items) == (rows, users, items)


@pytest.mark.parametrize(
    ("name", "train", "test"), [("gowalla", 810_128, 217_242), ("amazon-upc", 37_027, 15_930)]
)
def test_parts_have_the_published_sizes(name, train, test):
    assert len(reader(name, part="train").read()) == train
    assert len(reader(name, part="test").read()) == test


def test_features_of_ml_1m():
    data = reader("ml-1m").read()
    sizes = {feature.name: len(feature.categories) for feature in data.user_features.features}
    assert sizes == {"gender": 2, "age": 7, "occupation": 21}
    assert len(data.item_features["genres"].categories) == 18
    # User 1: F::1::10, that is a K-12 student under 18.
    first = [feature.categories[feature.codes[0]] for feature in data.user_features.features]
    assert first == ["F", "Under 18", "K-12 student"]


def test_features_of_ml_100k():
    data = reader("ml-100k").read()
    assert (
        data.user_features["age"].categories
        == reader("ml-1m").read().user_features["age"].categories
    )
    assert len(data.item_features["genres"].categories) == 19


def test_frappe_pairs():
    rows, pairs = reader("frappe").read(), reader("frappe", unit="pairs").read()
    assert len(pairs) == 18_842
    assert pairs.ratings.sum(dtype=np.float64) == rows.ratings.sum(dtype=np.float64)


def test_shipped_folds_cover_ml_100k_once():
    data = reader("ml-100k").read()
    folds = [read_test_fold(data_directory() / "ml-100k", fold, data) for fold in range(1, 6)]
    assert [len(fold) for fold in folds] == [20_000] * 5
    np.testing.assert_array_equal(np.sort(np.concatenate(folds)), np.arange(100_000))


def test_ml_100k_with_seven_injected_lines_is_refused(tmp_path):
    folder = copied("ml-100k", tmp_path)
    with (folder / "u.data").open("a") as file:
        file.writelines(
            f"{user}\t{item}\t4\t881250949\n"
            for item, user in enumerate([0] * 4 + [999] * 3, start=1)
        )
    with pytest.raises(DataError, match="number of rows") as caught:
        reader("ml-100k", path=folder).read()
    assert (caught.value.expected, caught.value.got) == ("100,000 rows", "100,007 rows")


def test_ml_1m_cut_in_the_middle_of_a_line_is_refused(tmp_path):
    folder = copied("ml-1m", tmp_path)
    lines = (folder / "ratings.dat").read_bytes().splitlines(keepends=True)[:50_440]
    (folder / "ratings.dat").write_bytes(b"".join(lines)[:-9])
    with pytest.raises(DataError, match="cut off") as caught:
        reader("ml-1m", path=folder).read()
    assert "1,000,209" in caught.value.expected and "50,440 lines" in caught.value.got


def test_ml_1m_cut_between_lines_is_refused(tmp_path):
    folder = copied("ml-1m", tmp_path)
    lines = (folder / "ratings.dat").read_bytes().splitlines(keepends=True)[:50_440]
    (folder / "ratings.dat").write_bytes(b"".join(lines))
    with pytest.raises(DataError) as caught:
        reader("ml-1m", path=folder).read()
    assert (caught.value.expected, caught.value.got) == ("1,000,209 rows", "50,440 rows")


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


def test_the_error_for_missing_data_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path))
    with pytest.raises(DataError, match="not there") as caught:
        reader("ml-1m").read()
    assert str(tmp_path / "ml-1m") in caught.value.expected
    assert "fedrec data fetch ml-1m" in caught.value.fix
