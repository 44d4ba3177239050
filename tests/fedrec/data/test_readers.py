# SPDX-License-Identifier: Apache-2.0
"""Readers of public datasets, on small files in the documented formats."""

import datetime

import pytest

from fedrec.data.readers.movielens import MovieLens1M, MovieLens20M, MovieLens100K
from fedrec.data.readers.published import AmazonVideo, Beauty, Frappe, Gowalla, Netflix
from fedrec.errors import DataError


def read(reader, folder, **settings):
    return reader("small", reader.Config(path=folder, verify=False, **settings)).read()


def label(feature, row):
    return [feature.categories[code] for code in feature.padded()[row] if code >= 0]


def labels(table, row):
    return {feature.name: label(feature, row) for feature in table.every}


def columns(data):
    """Ids of users and items, and the columns; None where the data have none."""
    ids = [data.user_ids.tolist(), data.item_ids.tolist()]
    rest = [data.users, data.items, data.ratings, data.times]
    return [*ids, *(None if column is None else column.tolist() for column in rest)]


def write_ml_1m(folder, ratings="7::30::5::978300760\n2::10::3::978302109\n7::10::4::978301968\n"):
    (folder / "ratings.dat").write_text(ratings)
    people = "2::M::56::16::70072\n5::M::25::15::55117\n7::F::1::10::48067-1234\n"
    (folder / "users.dat").write_text(people)
    films = "10::Café: The Film (1995)::Animation|Children's|Comedy\n20::Unrated (1999)::War\n"
    (folder / "movies.dat").write_bytes((films + "30::Other (2000)::Drama\n").encode("latin-1"))
    return folder


def write_ml_100k(folder):
    (folder / "u.data").write_text("3\t1\t4\t881250949\n1\t2\t5\t881250950\n")
    (folder / "u.user").write_text("1|49|F|writer|85711\n3|17|M|student|T8H1N\n")
    lines = ['1|"Toy" Story (1995)|01-Jan-1995||http://x', "2|Café (1994)|||http://y"]
    flags = [["0"] * 19, ["0"] * 19]
    flags[0][3] = flags[0][5] = flags[1][0] = "1"
    text = "".join("|".join([line, *row]) + "\n" for line, row in zip(lines, flags, strict=True))
    (folder / "u.item").write_bytes(text.encode("latin-1"))


def write_ml_20m(folder):
    rows = "userId,movieId,rating,timestamp\n1,2,3.5,1112486027\n4,131262,0.5,5\n"
    (folder / "ratings.csv").write_text(rows)
    films = '2,"Café, The (1995)",Adventure|Children\n3,X,Drama\n131262,Y,(no genres listed)\n'
    (folder / "movies.csv").write_text("movieId,title,genres\n" + films, encoding="utf-8")


def write_video(folder):
    (folder / "ratings.dat").write_text("b,X,5.0,86400\na,Y,2.0,0\nb,Y,3.0,172800\n")


def write_beauty(folder):
    (folder / "beauty.txt").write_text("1 7\n1 3\n2 7\n")


FILM_1 = "1:\n1488844,3,2005-09-06\n822109,5,2004-02-29\n"
FILM_2 = "2:\n1488844,1,1999-11-11\n"
FILM_30 = "30:\n7,4,2005-12-31\n"
DATES = [(2005, 9, 6), (2004, 2, 29), (1999, 11, 11), (2005, 12, 31)]
SECONDS = [int(datetime.datetime(*date, tzinfo=datetime.UTC).timestamp()) for date in DATES]
NETFLIX = [[7, 822109, 1488844], [1, 2, 30], [2, 1, 2, 0], [0, 0, 1, 2], [3, 5, 1, 4], SECONDS]


def write_netflix(folder):
    (folder / "training_set").mkdir()
    for number, text in ((1, FILM_1), (2, FILM_2), (30, FILM_30)):
        (folder / "training_set" / f"mv_{number:07}.txt").write_text(text)


def write_combined(folder):
    for number, text in enumerate((FILM_1 + FILM_2, FILM_30), start=1):
        (folder / f"combined_data_{number}.txt").write_text(text)


@pytest.mark.parametrize(
    ("reader", "write", "expected"),
    [
        (
            *(MovieLens1M, write_ml_1m),
            [[2, 7], [10, 30], [1, 0, 1], [1, 0, 0], [5, 3, 4], [978300760, 978302109, 978301968]],
        ),
        (
            *(MovieLens100K, write_ml_100k),
            [[1, 3], [1, 2], [1, 0], [0, 1], [4, 5], [881250949, 881250950]],
        ),
        (
            *(MovieLens20M, write_ml_20m),
            [[1, 4], [2, 131262], [0, 1], [0, 1], [3.5, 0.5], [1112486027, 5]],
        ),
        (
            *(AmazonVideo, write_video),
            [["a", "b"], ["X", "Y"], [1, 0, 1], [0, 1, 1], [5, 2, 3], [86400, 0, 172800]],
        ),
        (Beauty, write_beauty, [[1, 2], [3, 7], [0, 0, 1], [1, 0, 1], None, [0, 1, 2]]),
        (Netflix, write_netflix, NETFLIX),
        (Netflix, write_combined, NETFLIX),
    ],
)
def test_rows_keep_the_order_of_the_file(tmp_path, reader, write, expected):
    write(tmp_path)
    assert columns(read(reader, tmp_path)) == expected


# Frappe.

HEAD = "user\titem\tcnt\tdaytime\tweekday\tisweekend\thomework\tcost\tweather\tcountry\tcity\n"
FRAPPE = f"""{HEAD}3\t9\t1\tmorning\tsunday\tweekend\tunknown\tfree\tsunny\tSpain\t0
0\t9\t4\tnight\tmonday\tworkday\thome\tfree\tcloudy\tUnited States\t5
3\t2\t2\tevening\tsunday\tweekend\tunknown\tpaid\tsunny\tSpain\t0
3\t9\t5\tmorning\tfriday\tworkday\twork\tpaid\trainy\tSpain\t0
"""


class TestFrappe:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "frappe.csv").write_text(FRAPPE)
        return tmp_path

    def test_rows_keep_each_usage_and_users_have_their_most_frequent_context(self, folder):
        data = read(Frappe, folder)
        assert columns(data) == [[0, 3], [2, 9], [1, 0, 1, 1], [1, 1, 0, 1], [1, 4, 2, 5], None]
        context = dict(daytime="morning", weekday="sunday", isweekend="weekend", homework="unknown")
        context |= dict(weather="sunny", country="Spain", city="0")
        assert labels(data.user_features, 1) == {name: [word] for name, word in context.items()}

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


def test_both_files_of_gowalla_share_users_and_items(tmp_path):
    (tmp_path / "train.txt").write_text("0 5 2\n1 5\n3 8 2 5 \n")
    (tmp_path / "test.txt").write_text("0 8\n1 \n3 9\n")
    data = read(Gowalla, tmp_path)
    users, items = [0, 0, 1, 2, 2, 2, 0, 2], [1, 0, 1, 2, 0, 1, 2, 3]
    assert columns(data) == [[0, 1, 3], [2, 5, 8, 9], users, items, None, None]
    assert data.published_test.tolist() == [False] * 6 + [True] * 2


# Features of the MovieLens releases.


def test_features_of_ml_1m_have_readable_labels(tmp_path):
    write_ml_1m(tmp_path)
    data = read(MovieLens1M, tmp_path)
    people = [labels(data.user_features, row) for row in (0, 1)]
    assert people == [
        {"gender": ["M"], "age": ["56+"], "occupation": ["self-employed"]},
        {"gender": ["F"], "age": ["Under 18"], "occupation": ["K-12 student"]},
    ]
    assert labels(data.item_features, 0) == {"genres": ["Animation", "Children's", "Comedy"]}
    reader = MovieLens1M("small", MovieLens1M.Config(path=tmp_path, eras=True, titles=True))
    table = read(MovieLens1M, tmp_path, eras=True, titles=True).item_features
    assert labels(table, 1) == {
        "genres": ["Drama"],
        "eras": ["1995-2004", "2000-2009"],
        "title": ["other"],
    }
    assert label(table["eras"], 0) == ["1990-1999", "1995-2004"]
    assert label(table["title"], 0) == ["café", "film", "the"]  # words without the year
    assert table.names == ("genres", "eras"), "a text is no category"
    assert reader.feature_names().item_texts == ("title",)


def test_features_of_ml_100k_and_ml_20m(tmp_path):
    write_ml_100k(tmp_path)
    data = read(MovieLens100K, tmp_path)
    person = {"gender": ["F"], "age": ["45-49"], "occupation": ["writer"]}
    assert labels(data.user_features, 0) == person
    assert label(data.user_features["age"], 1) == ["Under 18"]
    genres = [label(data.item_features["genres"], row) for row in (0, 1)]
    assert genres == [["Animation", "Comedy"], ["unknown"]]
    write_ml_20m(tmp_path)
    genres = read(MovieLens20M, tmp_path).item_features["genres"]
    assert [label(genres, row) for row in (0, 1)] == [["Adventure", "Children"], []]


@pytest.mark.parametrize(
    ("users", "problem"),
    [
        ("2::M::56::16::1\n", r"users\.dat: id 7 of the ratings is missing"),
        ("2::M::56::16::1\n7::F::1::10::1\n7::F::1::10::1\n", "duplicate id 7"),
        ("2::M::56::21::1\n7::F::1::10::1\n", "unknown occupation"),
    ],
)
def test_wrong_tables_of_users_are_refused(tmp_path, users, problem):
    write_ml_1m(tmp_path)
    (tmp_path / "users.dat").write_text(users)
    with pytest.raises(DataError, match=problem):
        read(MovieLens1M, tmp_path)


# Malformed lines.


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
def test_malformed_line_of_a_table_is_named(tmp_path, line, expected):
    write_ml_1m(tmp_path, f"7::30::5::978300760\n{line}\n7::10::4::978301968\n")
    with pytest.raises(DataError, match=r"ratings\.dat, line 2") as caught:
        read(MovieLens1M, tmp_path)
    assert expected in caught.value.expected and line in caught.value.got


@pytest.mark.parametrize(
    ("reader", "file", "text", "lines"),
    [
        (Gowalla, "train.txt", "0 5 2\n0 1\n{}\n3 8\n", ["1 5x", "1,5", "1 -5", "user 5"]),
        (
            *(Netflix, "combined_data_1.txt", "1:\r\n7,3,2005-09-06\r\n{}\n8,5,2005-05-13"),
            ["1488844,3", "x,3,2005-09-06", "7,6,2005-09-06", "7,3,2005-13-06"],
        ),
    ],
)
def test_malformed_line_of_another_format_is_named(tmp_path, reader, file, text, lines):
    (tmp_path / "test.txt").write_text("0 8\n")
    for line in lines:
        (tmp_path / file).write_text(text.format(line))
        with pytest.raises(DataError, match=f"{file}, line 3") as caught:
            read(reader, tmp_path)
        assert caught.value.got == repr(line)


def test_the_error_for_an_empty_folder_names_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="has neither training_set"):
        read(Netflix, tmp_path)
