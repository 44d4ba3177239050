# SPDX-License-Identifier: Apache-2.0
"""Readers of public datasets."""

import datetime

import numpy as np
import pytest

from fedrec.data.readers.amazon import AmazonVideo, Beauty
from fedrec.data.readers.movielens import MovieLens1M, MovieLens20M, MovieLens100K
from fedrec.data.readers.published import Frappe, Gowalla, Netflix
from fedrec.errors import DataError

# Frappe, Gowalla and the Amazon readers on small files in the documented formats.

FRAPPE = """user\titem\tcnt\tdaytime\tweekday\tisweekend\thomework\tcost\tweather\tcountry\tcity
3\t9\t1\tmorning\tsunday\tweekend\tunknown\tfree\tsunny\tSpain\t0
0\t9\t4\tnight\tmonday\tworkday\thome\tfree\tcloudy\tUnited States\t5
3\t2\t2\tevening\tsunday\tweekend\tunknown\tpaid\tsunny\tSpain\t0
3\t9\t5\tmorning\tfriday\tworkday\twork\tpaid\trainy\tSpain\t0
"""


def read(reader, folder, **settings):
    return reader("small", reader.Config(path=folder, verify=False, **settings)).read()


def label(feature, row):
    return [feature.categories[code] for code in feature.padded()[row] if code >= 0]


class TestFrappe:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "frappe.csv").write_text(FRAPPE)
        return tmp_path

    def test_rows_keep_each_usage(self, folder):
        data = read(Frappe, folder)
        assert data.user_ids.tolist() == [0, 3]
        assert data.item_ids.tolist() == [2, 9]
        assert data.users.tolist() == [1, 0, 1, 1]
        assert data.items.tolist() == [1, 1, 0, 1]
        assert data.ratings.tolist() == [1.0, 4.0, 2.0, 5.0]
        assert data.times is None

    def test_user_features_are_the_most_frequent_values(self, folder):
        features = read(Frappe, folder).user_features
        assert features.names == (
            "daytime",
            "weekday",
            "isweekend",
            "homework",
            "weather",
            "country",
            "city",
        )
        assert [label(feature, 1) for feature in features.features] == [
            *(["morning"], ["sunday"], ["weekend"], ["unknown"], ["sunny"], ["Spain"], ["0"])
        ]

    def test_of_equally_frequent_values_the_first_in_the_alphabet_counts(self, folder):
        # App 9 is free in two rows and paid in one; app 2 only paid. A fourth row for app 9 makes
        # it a tie.
        with (folder / "frappe.csv").open("a") as file:
            file.write("0\t9\t4\tnight\tmonday\tworkday\thome\tpaid\tcloudy\tUnited States\t5\n")
        cost = read(Frappe, folder).item_features["cost"]
        assert (label(cost, 0), label(cost, 1)) == (["paid"], ["free"])

    def test_categories_come_from_meta(self, folder):
        assert read(Frappe, folder).item_features.names == ("cost",)
        (folder / "meta.csv").write_text(
            'item\tpackage\tcategory\tname\n9\tcom.x\tTools\t"It\'s\ta tab"\n7\tb\tGames\tc\n'
        )
        category = read(Frappe, folder).item_features["category"]
        assert (label(category, 0), label(category, 1)) == ([], ["Tools"])


class TestGowalla:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "train.txt").write_text("0 5 2\n1 5\n3 8 2 5 \n")
        (tmp_path / "test.txt").write_text("0 8\n1 \n3 9\n")
        return tmp_path

    def test_both_files_share_users_and_items(self, folder):
        data = read(Gowalla, folder)
        assert data.user_ids.tolist() == [0, 1, 3]
        assert data.item_ids.tolist() == [2, 5, 8, 9]
        assert data.users.tolist() == [0, 0, 1, 2, 2, 2, 0, 2]
        assert data.items.tolist() == [1, 0, 1, 2, 0, 1, 2, 3]
        assert data.published_test.tolist() == [False] * 6 + [True] * 2
        assert data.ratings is None and data.times is None

    @pytest.mark.parametrize("line", ["1 5x", "1,5", "1 -5", "user 5"])
    def test_malformed_line_is_named(self, folder, line):
        (folder / "train.txt").write_text(f"0 5 2\n{line}\n3 8\n")
        with pytest.raises(DataError, match=r"train\.txt, line 2") as caught:
            read(Gowalla, folder)
        assert caught.value.got == repr(line)


class TestOrdered:
    def test_amazon_video_keeps_ratings_and_times(self, tmp_path):
        (tmp_path / "ratings.dat").write_text("b,X,5.0,86400\na,Y,2.0,0\nb,Y,3.0,172800\n")
        data = read(AmazonVideo, tmp_path)
        assert data.user_ids.tolist() == ["a", "b"] and data.item_ids.tolist() == ["X", "Y"]
        assert data.users.tolist() == [1, 0, 1] and data.items.tolist() == [0, 1, 1]
        assert data.ratings.tolist() == [5.0, 2.0, 3.0]
        assert data.times.tolist() == [86400, 0, 172800]

    def test_rows_of_beauty_are_in_the_order_of_the_file(self, tmp_path):
        (tmp_path / "beauty.txt").write_text("1 7\n1 3\n2 7\n")
        data = read(Beauty, tmp_path)
        assert data.users.tolist() == [0, 0, 1] and data.items.tolist() == [1, 0, 1]
        assert data.times.tolist() == [0, 1, 2] and data.ratings is None


# The MovieLens readers on small files in the documented formats.


def read_of_readers_movielens(reader, folder):
    return reader("small", reader.Config(path=folder, verify=False)).read()


def labels(feature, row):
    codes = feature.codes[feature.offsets[row] : feature.offsets[row + 1]]
    return [feature.categories[code] for code in codes]


def write_ml_1m(folder, ratings="7::30::5::978300760\n2::10::3::978302109\n7::10::4::978301968\n"):
    (folder / "ratings.dat").write_text(ratings)
    (folder / "users.dat").write_text(
        "2::M::56::16::70072\n5::M::25::15::55117\n7::F::1::10::48067-1234\n"
    )
    films = (
        "10::Café: The Film (1995)::Animation|Children's|Comedy\n20::Unrated (1999)::War\n30::Other"
        " (2000)::Drama\n"
    )
    (folder / "movies.dat").write_bytes(films.encode("latin-1"))
    return folder


def write_ml_100k(folder):
    (folder / "u.data").write_text("3\t1\t4\t881250949\n1\t2\t5\t881250950\n")
    (folder / "u.user").write_text("1|49|F|writer|85711\n3|17|M|student|T8H1N\n")
    lines = ['1|"Toy" Story (1995)|01-Jan-1995||http://x', "2|Café (1994)|||http://y"]
    flags = [["0"] * 19, ["0"] * 19]
    flags[0][3] = flags[0][5] = flags[1][0] = "1"
    text = "".join("|".join([line, *row]) + "\n" for line, row in zip(lines, flags, strict=True))
    (folder / "u.item").write_bytes(text.encode("latin-1"))
    return folder


class TestMovieLens1M:
    def test_features_have_readable_labels(self, tmp_path):
        data = read_of_readers_movielens(MovieLens1M, write_ml_1m(tmp_path))
        assert data.user_features.names == ("gender", "age", "occupation")
        assert [labels(feature, 0) for feature in data.user_features.features] == [
            ["M"],
            ["56+"],
            ["self-employed"],
        ]
        assert [labels(feature, 1) for feature in data.user_features.features] == [
            ["F"],
            ["Under 18"],
            ["K-12 student"],
        ]
        assert labels(data.item_features["genres"], 0) == ["Animation", "Children's", "Comedy"]
        assert labels(data.item_features["genres"], 1) == ["Drama"]

    def test_eras_are_the_two_decades_that_hold_the_year(self, tmp_path):
        folder = write_ml_1m(tmp_path)
        assert read_of_readers_movielens(MovieLens1M, folder).item_features.names == ("genres",)
        data = MovieLens1M("small", MovieLens1M.Config(path=folder, verify=False, eras=True)).read()
        assert labels(data.item_features["eras"], 0) == ["1990-1999", "1995-2004"]
        assert labels(data.item_features["eras"], 1) == ["1995-2004", "2000-2009"]

    def test_titles_are_words_without_the_year(self, tmp_path):
        folder = write_ml_1m(tmp_path)
        config = MovieLens1M.Config(path=folder, verify=False, titles=True)
        reader = MovieLens1M("small", config)
        table = reader.read().item_features
        assert labels(table["title"], 0) == ["café", "film", "the"]
        assert labels(table["title"], 1) == ["other"]
        assert table.names == ("genres",), "a text is no category"
        assert reader.feature_names().item_texts == ("title",)

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("7::30::5", "4 values"),
            ("7::30::5::1::2", "4 values"),
            ("7::x::5::1", "a whole number as 'item'"),
            ("7::30::::1", "a number as 'rating'"),
            ("7::99999999999::5::1", "a whole number as 'item'"),
            ("7::30::nan::1", "a number as 'rating'"),
        ],
    )
    def test_malformed_line_is_named(self, tmp_path, line, expected):
        write_ml_1m(tmp_path, f"7::30::5::978300760\n{line}\n7::10::4::978301968\n")
        with pytest.raises(DataError, match=r"ratings\.dat, line 2") as caught:
            read_of_readers_movielens(MovieLens1M, tmp_path)
        assert expected in caught.value.expected
        assert line in caught.value.got

    @pytest.mark.parametrize(
        ("users", "problem"),
        [
            ("2::M::56::16::1\n", r"users\.dat: id 7 of the ratings is missing"),
            ("2::M::56::16::1\n7::F::1::10::1\n7::F::1::10::1\n", "duplicate id 7"),
            ("2::M::56::21::1\n7::F::1::10::1\n", "unknown occupation"),
        ],
    )
    def test_wrong_tables_of_users_are_refused(self, tmp_path, users, problem):
        write_ml_1m(tmp_path)
        (tmp_path / "users.dat").write_text(users)
        with pytest.raises(DataError, match=problem):
            read_of_readers_movielens(MovieLens1M, tmp_path)


class TestMovieLens100K:
    def test_reads_rows_and_features(self, tmp_path):
        data = read_of_readers_movielens(MovieLens100K, write_ml_100k(tmp_path))
        assert data.users.tolist() == [1, 0]
        assert data.items.tolist() == [0, 1]
        assert data.ratings.tolist() == [4.0, 5.0]
        assert [labels(feature, 0) for feature in data.user_features.features] == [
            ["F"],
            ["45-49"],
            ["writer"],
        ]
        assert labels(data.user_features["age"], 1) == ["Under 18"]
        assert labels(data.item_features["genres"], 0) == ["Animation", "Comedy"]
        assert labels(data.item_features["genres"], 1) == ["unknown"]


class TestMovieLens20M:
    def test_reads_rows_and_genres(self, tmp_path):
        (tmp_path / "ratings.csv").write_text(
            "userId,movieId,rating,timestamp\n1,2,3.5,1112486027\n4,131262,0.5,5\n"
        )
        (tmp_path / "movies.csv").write_text(
            'movieId,title,genres\n2,"Café, The (1995)",Adventure|Children\n3,X,Drama\n131262,Y,(no'
            " genres listed)\n",
            encoding="utf-8",
        )
        data = read_of_readers_movielens(MovieLens20M, tmp_path)
        assert data.user_ids.tolist() == [1, 4]
        assert data.item_ids.tolist() == [2, 131262]
        np.testing.assert_array_equal(data.ratings, np.float32([3.5, 0.5]))
        assert data.times.tolist() == [1112486027, 5]
        assert labels(data.item_features["genres"], 0) == ["Adventure", "Children"]
        assert labels(data.item_features["genres"], 1) == []


# The Netflix reader on small files in both forms.

FILM_1 = "1:\n1488844,3,2005-09-06\n822109,5,2004-02-29\n"
FILM_2 = "2:\n1488844,1,1999-11-11\n"
FILM_30 = "30:\n7,4,2005-12-31\n"


def read_of_readers_netflix(folder):
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
    data = read_of_readers_netflix(write(tmp_path))
    assert data.user_ids.tolist() == [7, 822109, 1488844]
    assert data.item_ids.tolist() == [1, 2, 30]
    assert data.users.tolist() == [2, 1, 2, 0]
    assert data.items.tolist() == [0, 0, 1, 2]
    assert data.ratings.tolist() == [3.0, 5.0, 1.0, 4.0]
    dates = [(2005, 9, 6), (2004, 2, 29), (1999, 11, 11), (2005, 12, 31)]
    assert data.times.tolist() == [seconds(*date) for date in dates]


@pytest.mark.parametrize(
    "line", ["1488844,3", "x,3,2005-09-06", "7,6,2005-09-06", "7,3,2005-13-06"]
)
def test_malformed_line_is_named(tmp_path, line):
    (tmp_path / "combined_data_1.txt").write_text(f"1:\r\n7,3,2005-09-06\r\n{line}\n8,5,2005-05-13")
    with pytest.raises(DataError, match=r"combined_data_1\.txt, line 3") as caught:
        read_of_readers_netflix(tmp_path)
    assert caught.value.got == repr(line)


def test_the_error_for_an_empty_folder_names_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="has neither training_set"):
        read_of_readers_netflix(tmp_path)
