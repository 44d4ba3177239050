# SPDX-License-Identifier: Apache-2.0
"""The Netflix reader on small files in both forms."""

import datetime

import numpy as np
import pytest

from fedrec.data.readers import netflix
from fedrec.data.readers.netflix import Netflix
from fedrec.errors import DataError

FILM_1 = "1:\n1488844,3,2005-09-06\n822109,5,2004-02-29\n"
FILM_2 = "2:\n1488844,1,1999-11-11\n"
FILM_30 = "30:\n7,4,2005-12-31\n"


def read(folder):
    return Netflix("netflix", Netflix.Config(path=folder, verify=False)).read()


def write_files(folder, films=((1, FILM_1), (2, FILM_2), (30, FILM_30))):
    (folder / "training_set").mkdir()
    for number, text in films:
        (folder / "training_set" / f"mv_{number:07}.txt").write_text(text)
    return folder


def write_combined(folder, texts=(FILM_1 + FILM_2, FILM_30)):
    for number, text in enumerate(texts, start=1):
        (folder / f"combined_data_{number}.txt").write_text(text)
    return folder


def seconds(year, month, day):
    return int(datetime.datetime(year, month, day, tzinfo=datetime.UTC).timestamp())


@pytest.mark.parametrize("write", [write_files, write_combined])
def test_both_forms_give_the_same_rows(tmp_path, write):
    data = read(write(tmp_path))
    assert data.user_ids.tolist() == [7, 822109, 1488844]
    assert data.item_ids.tolist() == [1, 2, 30]
    assert data.users.tolist() == [2, 1, 2, 0]
    assert data.items.tolist() == [0, 0, 1, 2]
    assert data.ratings.tolist() == [3.0, 5.0, 1.0, 4.0]
    dates = [(2005, 9, 6), (2004, 2, 29), (1999, 11, 11), (2005, 12, 31)]
    assert data.times.tolist() == [seconds(*date) for date in dates]


@pytest.mark.parametrize("write", [write_files, write_combined])
@pytest.mark.parametrize("size", [1, 7, 50, 64])
def test_block_size_does_not_matter(tmp_path, monkeypatch, write, size):
    whole = read(write(tmp_path))
    monkeypatch.setattr(netflix, "_BLOCK", size)
    blocks = read(tmp_path)
    for column in ("users", "items", "ratings", "times"):
        np.testing.assert_array_equal(getattr(blocks, column), getattr(whole, column))


def test_windows_line_ends_and_a_missing_last_one(tmp_path):
    (tmp_path / "combined_data_1.txt").write_bytes(
        (FILM_1 + FILM_30).replace("\n", "\r\n").encode().rstrip()
    )
    assert read(tmp_path).ratings.tolist() == [3.0, 5.0, 4.0]


def test_year_of_release_is_a_feature(tmp_path):
    write_combined(tmp_path)
    (tmp_path / "movie_titles.csv").write_bytes(
        "1,2003,Café, and more\n2,NULL,X\n30,1997,Y\n".encode("latin-1")
    )
    year = read(tmp_path).item_features["year"]
    assert year.categories == ("1997", "2003")
    assert year.padded().ravel().tolist() == [1, -1, 0]


@pytest.mark.parametrize(
    "line",
    [
        "1488844,3",
        "1488844,3,2005-09-06,1",
        "x,3,2005-09-06",
        "1488844,6,2005-09-06",
        "7,3,2005-13-06",
        "",
    ],
)
@pytest.mark.parametrize("write", [write_files, write_combined])
def test_malformed_line_is_named(tmp_path, write, line):
    write(tmp_path)
    path = next(
        iter([*tmp_path.glob("training_set/mv_0000001.txt"), *tmp_path.glob("combined_data_1.txt")])
    )
    path.write_text(f"1:\n1488844,3,2005-09-06\n{line}\n822109,5,2005-05-13\n")
    with pytest.raises(DataError, match=f"{path.name}, line 3") as caught:
        read(tmp_path)
    assert caught.value.got == repr(line)


def test_ratings_before_the_first_film_are_refused(tmp_path):
    (tmp_path / "combined_data_1.txt").write_text("7,4,2005-12-31\n" + FILM_1)
    with pytest.raises(DataError, match="line 1:"):
        read(tmp_path)


def test_the_error_for_an_empty_folder_names_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="ratings of 'netflix' are missing"):
        read(tmp_path)
