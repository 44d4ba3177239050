# SPDX-License-Identifier: Apache-2.0
"""Files of dense vectors of items, and what becomes of them."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedrec.data.catalogue import Catalogue
from fedrec.data.features import Feature, FeatureNames, FeatureTable, Vectors
from fedrec.data.files.vectors import read_vectors, vector_files
from fedrec.data.readers.table import Table
from fedrec.errors import DataError

IDS = np.array([10, 20, 30])
NAMES = ["30", "10", "7"]
VALUES = np.array([[1.0, 2.0], [3.0, -4.0], [9.0, 9.0]])


def npy(tmp_path, values=VALUES, names=NAMES):
    np.save(tmp_path / "cover.npy", values)
    (tmp_path / "cover.txt").write_text("\n".join(names) + "\n")
    return tmp_path / "cover.npy"


def lists(tmp_path, values=VALUES, names=NAMES):
    pytest.importorskip("pyarrow")
    pd.DataFrame({"item": names, "vector": [*map(list, values)]}).to_parquet(
        tmp_path / "cover.parquet"
    )
    return tmp_path / "cover.parquet"


def columns(tmp_path, values=VALUES, names=NAMES):
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"item": names, "a": values[:, 0], "b": values[:, 1]})
    frame.to_parquet(tmp_path / "cover.parquet")
    return tmp_path / "cover.parquet"


@pytest.mark.parametrize("written", [npy, lists, columns])
def test_rows_go_by_their_ids_and_other_items_are_left_out(tmp_path, written):
    found = read_vectors(written(tmp_path), IDS, complete=False)
    assert found.name == "cover" and found.values.dtype == np.float32
    np.testing.assert_array_equal(found.values, [[3, -4], [0, 0], [1, 2]])
    assert found.known.tolist() == [True, False, True]


def test_an_item_without_a_vector_is_refused_unless_it_may_have_the_mean(tmp_path):
    with pytest.raises(DataError, match=r"(?s)none for 1 of them, such as 20.*'mean'"):
        read_vectors(npy(tmp_path), IDS, complete=True)
    with pytest.raises(DataError, match="name items as the data do"):
        read_vectors(npy(tmp_path), np.array(["x"]), complete=False)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        (VALUES, ["30", "10", "30"], "two of '30'"),
        (VALUES, ["30", "10"], "2 ids and an array"),
        (VALUES[:, 0], NAMES, r"an array of shape \[3\]"),
        (np.where(VALUES > 8, np.nan, VALUES), NAMES, "NaN or infinity"),
        (np.where(VALUES > 8, 1e300, VALUES), NAMES, "NaN or infinity"),
        (np.array([["a"], ["b"], ["c"]]), NAMES, "of <U1"),
        (VALUES + 1j, NAMES, "of complex128"),
    ],
)
def test_vectors_that_cannot_be_used_are_refused(tmp_path, values, names, message):
    with pytest.raises(DataError, match=message):
        read_vectors(npy(tmp_path, values, names), IDS, complete=False)


def test_missing_and_other_files_are_refused(tmp_path):
    for name in ("none.npy", "none.parquet", "none.csv"):
        with pytest.raises(DataError, match=name):
            read_vectors(tmp_path / name, IDS, complete=False)
    assert vector_files(tmp_path / "none.npy") == []
    assert len(vector_files(npy(tmp_path))) == 2


def test_lists_of_unequal_length_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    ragged = pd.DataFrame({"item": NAMES, "vector": [[1.0], [1.0, 2.0], [3.0]]})
    ragged.to_parquet(tmp_path / "cover.parquet")
    with pytest.raises(DataError, match="lists of equal length"):
        read_vectors(tmp_path / "cover.parquet", IDS, complete=False)


def test_a_table_names_them_as_features_of_their_own_kind(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("user,item\n1,10\n1,30\n2,20\n")
    settings = {"item_vectors": [npy(tmp_path)], "items_without_vector": "mean"}
    reader = Table("mine", Table.Config(path=path, **settings))
    table = reader.described(reader.read()).item_features
    assert table.names == () and table.vectors[0].known.tolist() == [True, False, True]
    assert reader.stated_features() == FeatureNames(item_vectors=("cover",))
    assert {file.name for file in reader.every_file()} == {"rows.csv", "cover.npy", "cover.txt"}


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


def test_vectors_of_wrong_shape_are_refused():
    for values in (np.zeros((3, 0), np.float32), np.full((3, 2), np.inf, np.float32)):
        with pytest.raises(DataError, match="not usable"):
            replace(vectors(), values=values)
