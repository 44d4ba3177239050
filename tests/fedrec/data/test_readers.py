# SPDX-License-Identifier: Apache-2.0
"""Readers of public datasets, on small files in the documented formats and on the published data,
with published splits, and files of vectors."""

import datetime
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from fedrec.components.registry import DATASET, resolve
from fedrec.data.interactions import Feature, FeatureNames, FeatureTable, Interactions, Vectors
from fedrec.data.reader import Catalogue, data_directory, read_vectors
from fedrec.data.readers.table import Table
from fedrec.data.splits.folds import Kfold, Published
from fedrec.errors import DataError


def reader(name, **settings):
    found = resolve(DATASET, name)
    return found(name, found.Config(**settings))


def read(name, folder, **settings) -> Interactions:
    return reader(name, path=folder, verify=False, **settings).read()


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
            *("ml-1m", write_ml_1m),
            [[2, 7], [10, 30], [1, 0, 1], [1, 0, 0], [5, 3, 4], [978300760, 978302109, 978301968]],
        ),
        (
            *("ml-100k", write_ml_100k),
            [[1, 3], [1, 2], [1, 0], [0, 1], [4, 5], [881250949, 881250950]],
        ),
        (
            *("ml-20m", write_ml_20m),
            [[1, 4], [2, 131262], [0, 1], [0, 1], [3.5, 0.5], [1112486027, 5]],
        ),
        (
            *("amazon-video", write_video),
            [["a", "b"], ["X", "Y"], [1, 0, 1], [0, 1, 1], [5, 2, 3], [86400, 0, 172800]],
        ),
        ("beauty", write_beauty, [[1, 2], [3, 7], [0, 0, 1], [1, 0, 1], None, [0, 1, 2]]),
        ("netflix", write_netflix, NETFLIX),
        ("netflix", write_combined, NETFLIX),
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
        data = read("frappe", folder)
        assert columns(data) == [[0, 3], [2, 9], [1, 0, 1, 1], [1, 1, 0, 1], [1, 4, 2, 5], None]
        context = dict(daytime="morning", weekday="sunday", isweekend="weekend", homework="unknown")
        context |= dict(weather="sunny", country="Spain", city="0")
        assert labels(data.user_features, 1) == {name: [word] for name, word in context.items()}

    def test_of_equally_frequent_values_the_first_in_the_alphabet_counts(self, folder):
        # App 9 is free in two rows and paid in one; app 2 only paid. A fourth row for app 9 makes
        # it a tie.
        with (folder / "frappe.csv").open("a") as file:
            file.write("0\t9\t4\tnight\tmonday\tworkday\thome\tpaid\tcloudy\tUnited States\t5\n")
        cost = read("frappe", folder).item_features["cost"]
        assert (label(cost, 0), label(cost, 1)) == (["paid"], ["free"])

    def test_categories_come_from_meta(self, folder):
        assert read("frappe", folder).item_features.names == ("cost",)
        (folder / "meta.csv").write_text(
            'item\tpackage\tcategory\tname\n9\tcom.x\tTools\t"It\'s\ta tab"\n7\tb\tGames\tc\n'
        )
        category = read("frappe", folder).item_features["category"]
        assert (label(category, 0), label(category, 1)) == ([], ["Tools"])


def test_both_files_of_gowalla_share_users_and_items(tmp_path):
    (tmp_path / "train.txt").write_text("0 5 2\n1 5\n3 8 2 5 \n")
    (tmp_path / "test.txt").write_text("0 8\n1 \n3 9\n")
    data = read("gowalla", tmp_path)
    users, items = [0, 0, 1, 2, 2, 2, 0, 2], [1, 0, 1, 2, 0, 1, 2, 3]
    assert columns(data) == [[0, 1, 3], [2, 5, 8, 9], users, items, None, None]
    assert data.published_test.tolist() == [False] * 6 + [True] * 2


# Features of the MovieLens releases.


def test_features_of_ml_1m_have_readable_labels(tmp_path):
    write_ml_1m(tmp_path)
    data = read("ml-1m", tmp_path)
    people = [labels(data.user_features, row) for row in (0, 1)]
    assert people == [
        {"gender": ["M"], "age": ["56+"], "occupation": ["self-employed"]},
        {"gender": ["F"], "age": ["Under 18"], "occupation": ["K-12 student"]},
    ]
    assert labels(data.item_features, 0) == {"genres": ["Animation", "Children's", "Comedy"]}
    described = {"eras": True, "titles": True}
    table = read("ml-1m", tmp_path, **described).item_features
    assert labels(table, 1) == {
        "genres": ["Drama"],
        "eras": ["1995-2004", "2000-2009"],
        "title": ["other"],
    }
    assert label(table["eras"], 0) == ["1990-1999", "1995-2004"]
    assert label(table["title"], 0) == ["café", "film", "the"]  # words without the year
    assert table.names == ("genres", "eras"), "a text is no category"
    assert reader("ml-1m", **described).feature_names().item_texts == ("title",)


def test_features_of_ml_100k_and_ml_20m(tmp_path):
    write_ml_100k(tmp_path)
    data = read("ml-100k", tmp_path)
    person = {"gender": ["F"], "age": ["45-49"], "occupation": ["writer"]}
    assert labels(data.user_features, 0) == person
    assert label(data.user_features["age"], 1) == ["Under 18"]
    genres = [label(data.item_features["genres"], row) for row in (0, 1)]
    assert genres == [["Animation", "Comedy"], ["unknown"]]
    write_ml_20m(tmp_path)
    genres = read("ml-20m", tmp_path).item_features["genres"]
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
        read("ml-1m", tmp_path)


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
        read("ml-1m", tmp_path)
    assert expected in caught.value.expected and line in caught.value.got


@pytest.mark.parametrize(
    ("reader", "file", "text", "lines"),
    [
        ("gowalla", "train.txt", "0 5 2\n0 1\n{}\n3 8\n", ["1 5x", "1,5", "1 -5", "user 5"]),
        (
            *("netflix", "combined_data_1.txt", "1:\r\n7,3,2005-09-06\r\n{}\n8,5,2005-05-13"),
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
        read("netflix", tmp_path)


# The readers on the published data, and on damaged copies, which are refused.


def copied(name, folder):
    ignored = shutil.ignore_patterns("ncf", "*.npz")
    return shutil.copytree(reader(name).folder(), folder, dirs_exist_ok=True, ignore=ignored)


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
    of_all = {"folder": data_directory() / "ml-100k"}
    splits = (Kfold(Kfold.Config(fold=fold, **of_all), 0) for fold in range(1, 6))
    folds = [split.split(data).test_rows for split in splits]
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
        (
            *("ml-100k", "u.data", lambda data: data.replace(b"\t3\t", b"\t4\t", 1)),
            *("fingerprint 33caa63b", "fingerprint "),
        ),
    ],
)
def test_damaged_copies_that_circulate_are_refused(tmp_path, name, file, change, expected, got):
    path = copied(name, tmp_path) / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        reader(name, path=tmp_path).read()
    assert expected in caught.value.expected and got in caught.value.got
    if "fingerprint" in expected:
        assert reader(name, path=tmp_path, verify=False).read() is not None


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


def test_rows_of_the_files_are_what_is_learned_from_and_tested(clothing):
    folder, train, test = clothing
    data = read("amazon-upc", folder)
    found = Published(Published.Config(), 0).split(data)
    for rows, wanted in ((found.train_rows, train), (found.test_rows, test)):
        pairs = zip(data.item_ids[data.items[rows]], data.user_ids[data.users[rows]], strict=True)
        assert sorted(pairs) == sorted(wanted)
    assert len(found.validation_rows) == 0 and found.training_clients.tolist() == list(range(12))


def test_validation_rows_come_from_the_training_file(clothing):
    folder, train, test = clothing
    data = read("amazon-upc", folder)
    found, again, other = (
        Published(Published.Config(validation=0.25), seed).split(data) for seed in (0, 0, 1)
    )
    counts = np.bincount(data.users[found.validation_rows], minlength=12)
    assert counts.tolist() == [min(int(0.25 * n + 0.5), n - 1) for n in range(1, 13)]
    assert len(found.test_rows) == len(test) and len(found.train_rows) + counts.sum() == len(train)
    assert (found.validation_rows == again.validation_rows).all()
    assert (found.validation_rows != other.validation_rows).any()


def test_datasets_without_such_files_are_refused(clothing):
    data = read("amazon-upc", clothing[0])
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
