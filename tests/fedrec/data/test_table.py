# SPDX-License-Identifier: Apache-2.0
"""Own tables: columns, indices, numbers and labels."""

import re
import sys
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest

from fedrec.data.interactions import band, index_rows, known_labels, labelled
from fedrec.data.readers.table import Table, times_of
from fedrec.errors import DataError
from tests.fedrec.data.test_readers import label

CSV = "who,what,stars,when,city,kind\nu2,x,5,10,Rome,a\nu1,y,2.5,20,,b\nu2,y,1,30,Rome,b\n"
SECOND = 10**9  # nanoseconds
COLUMNS = {"user": "who", "item": "what", "rating": "stars", "time": "when"}


def read(path, **settings):
    return Table("mine", Table.Config(path=path, **settings)).read()


def write(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_without_a_line_of_names_has_columns_named_by_their_places(tmp_path):
    path = write(tmp_path, CSV.split("\n", 1)[1])
    places = {"user": "1", "item": "2", "rating": "3", "time": "4"}
    data = read(path, header=False, user_features=["5"], **places)
    named = read(write(tmp_path, CSV, "named.csv"), user_features=["city"], **COLUMNS)
    for column in ("user_ids", "items", "ratings", "times"):
        assert getattr(data, column).tolist() == getattr(named, column).tolist()
    assert data.user_features["5"].categories == named.user_features["city"].categories
    with pytest.raises(DataError, match="no column 'who'"):
        read(path, header=False, user="who", item="2")
    with pytest.raises(DataError, match=r"dataset\.header = false"):
        read(path, user="who", item="2")


def test_parquet_gives_the_same_as_csv(tmp_path):
    csv = write(tmp_path, CSV)
    pd.read_csv(csv).to_parquet(tmp_path / "table.parquet")
    files = csv, tmp_path / "table.parquet"
    one, two = (read(path, user_features=["city"], **COLUMNS) for path in files)
    assert one.fingerprint() == two.fingerprint()
    assert one.times.tolist() == two.times.tolist()
    for data in (one, two):
        assert [label(data.user_features["city"], row) for row in (0, 1)] == [[], ["Rome"]]


def test_the_error_for_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch):
    path = write(tmp_path, "", "table.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError) as caught:
        read(path)
    assert "pip install 'fedrec[parquet]'" in caught.value.fix


@pytest.mark.parametrize(
    "ids",
    [["007", "7"], ["1.0", "2"], ["1", "NA"], ["1", "12345678901234567890"], ["1", "2" * 5000]],
)
def test_ids_that_are_no_plain_whole_numbers_stay_text(tmp_path, ids):
    numbers = read(write(tmp_path, "user,item\n10,a\n9,b\n"))
    assert numbers.user_ids.tolist() == [9, 10]
    data = read(write(tmp_path, "user,item\n" + "".join(f"{name},a\n" for name in ids)))
    assert data.user_ids.tolist() == sorted(ids)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (["1970-01-02", "1970-01-01"], [86400, 0]),
        (["1970-01-01T00:01:00Z", "1970-01-01T01:00:00+01:00"], [60, 0]),
        (["1970-01-01 00:00:07.9", "1970-01-02"], [7.9, 86400]),
        (["1970-01-01 00:00:07.000000001", "1970-01-02"], [7.000000001, 86400]),
        (["9007199254740993", "5"], [Fraction(9007199254740993, 10**9), Fraction(5, 10**9)]),
        (["1700000000.25", "1700000000"], [1700000000.25, 1700000000]),
        (["1700000000250", "1700000000000.5"], [1700000000.25, 1700000000.0005]),
        (["1700000000250001", "1700000000250000"], [1700000000.250001, 1700000000.25]),
        (["1700000000250000001"], [Fraction(1700000000250000001, 10**9)]),
        (["12.75", "3"], [12.75, 3]),
        (["-0.75", "3"], [-0.75, 3]),
        (["02.01.1970", "1.1.1970 00:01"], [86400, 60]),
        (["02.01.1970", "1970-01-01"], [86400, 0]),
    ],
)
def test_times_are_numbers_or_iso_dates_to_the_nanosecond(tmp_path, times, expected):
    text = "user,item,t\n" + "".join(f'u,{place},"{time}"\n' for place, time in enumerate(times))
    wanted = [round(Fraction(str(seconds)) * SECOND) for seconds in expected]
    assert read(write(tmp_path, text), time="t").times.tolist() == wanted


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_the_last_row_of_a_user_is_the_last_in_fractions_of_a_second(tmp_path, unit):
    """Whatever the form of the times: the oracle is the order in which the rows were drawn."""
    order = np.random.default_rng(0).permutation(30)
    stamps = np.datetime64("2024-05-01T12:00:00", "ms") + order
    forms = {
        "dates": stamps.astype(str),
        "floats": stamps.astype(np.int64) / 1000,
        "numbers": stamps.astype("datetime64[ms]").astype(np.int64),
        "stamps": stamps.astype(f"datetime64[{'ms' if unit == 's' else unit}]"),
    }
    for form, times in forms.items():
        frame = pd.DataFrame({"user": "u", "item": np.arange(30), "t": times})
        frame.to_parquet(tmp_path / "t.parquet")
        frame.to_csv(tmp_path / "t.csv", index=False)
        for name in ("t.parquet", "t.csv"):
            found = read(tmp_path / name, time="t").times
            assert np.argsort(found, kind="stable").tolist() == np.argsort(order).tolist(), form


def test_times_of_two_files_of_one_experiment_can_be_compared(tmp_path):
    """A file whose dates happen to be whole days has the unit of one with milliseconds."""
    early, late = ["2024-05-01T12:00:00.250", "2024-05-01 12:00"], ["2024-06-01", "2024-06-02"]
    times = [times_of(pd.Series(values, name="when"), tmp_path) for values in (early, late)]
    assert times[0].max() < times[1].min()
    numbers = [[1714564800.25, 1714564801.5], [1717200000, 1717286400]]
    times = [times_of(pd.Series(values, name="when"), tmp_path) for values in numbers]
    assert times[0].max() < times[1].min()


def test_dates_beyond_all_nanoseconds_are_first_and_last(tmp_path):
    dates = ["9999-12-31", "2024-01-01", "0001-01-01"]
    times = times_of(pd.Series(dates, name="when"), tmp_path)
    assert np.argsort(times).tolist() == [2, 1, 0] and times[1] == 1704067200 * SECOND


def test_bytes_of_parquet_are_text(tmp_path):
    frame = pd.DataFrame({"user": ["ü".encode(), b"b", b"\x80"], "item": ["x", "y", "z"]})
    frame.to_parquet(tmp_path / "t.parquet")
    assert set(read(tmp_path / "t.parquet").user_ids) == {"ü", "b", "\\x80"}


def test_lists_and_prices_in_fields_are_told(tmp_path, caplog):
    """In a column of the table, and in a further one."""
    tags = ["books|food", "food", "toys ; food;food", ""]
    rows = [f"u{n % 5},i{n},{tags[n % 4]},{n + 0.25}" for n in range(40)]
    path = write(tmp_path, "\n".join(["user,item,tags,price", *rows, ""]))
    own = read(path, item_features=["tags", "price"])
    extra = "\n".join(["item,tags,price", *(row.split(",", 1)[1] for row in rows), ""])
    write(tmp_path, extra, "items.csv")
    for data in (own, read(path, item_features=["items.csv"])):
        assert data.item_features["tags"].categories == ("books", "food", "toys")
        place = data.item_ids.tolist().index("i12")
        assert label(data.item_features["price"], place) == ["10 to 20"]
        assert label(data.item_features["tags"], place) == ["books", "food"]
    assert caplog.text.count("feature 'tags' is interpreted as lists of 3 categories") == 2
    assert caplog.text.count("feature 'price' is interpreted as 40 numbers in") == 2


TITLED = "who,what,name\nu2,x,Red Shoes\nu1,y,\nu2,y,red  hat\n"


def test_texts_are_columns_of_either_table(tmp_path):
    own = read(write(tmp_path, TITLED), user="who", item="what", item_texts=["name"])
    assert own.item_features.names == ()
    assert label(own.item_features["name"], 0) == ["red", "shoes"]
    assert label(own.item_features["name"], 1) == ["hat", "red"]
    write(tmp_path, "what,maker,blurb\ny,Acme,Warm; warm coat\n", "items.csv")
    settings = {"item_features": ["items.csv"], "item_texts": ["blurb"]}
    other = read(write(tmp_path, CSV), **settings, **COLUMNS)
    assert other.item_features.names == ("maker",)
    assert label(other.item_features["blurb"], 0) == []
    assert label(other.item_features["blurb"], 1) == ["coat", "warm"]


FEATURES = {"user_features": ["city"], "item_features": ["kind"]}
WRONG = [
    # old, new, settings, problem
    ("2.5", "good", {}, "row 2 .*'stars'"),
    ("2.5", "", {}, "row 2 .*'stars'"),
    ("2.5", "1e300", {}, "row 2 .*'stars'"),
    (",20,", ",soon,", {}, "row 2 .*'when'"),
    (",20,", ",,", {}, "row 2 .*'when'"),
    ("u1", "", {}, "row 2 .*'who'"),
    ("Rome,a", "Rome,a,b", {}, "line 2:"),
    ("1,30,Rome,b", "1,30,Rome,b,c", {}, "line 4:"),
    (
        "",
        "",
        {"user_features": ["kind"]},
        "feature 'kind' is not constant(.*\n)*.*'u2'.*\n.*'a' and 'b'",
    ),
    ("", "", {"user": "whoo"}, "no column 'whoo'(.*\n)*.*dataset.user(.*\n)*.*did you mean"),
    ("", "", {"item": "whta"}, "no column 'whta'(.*\n)*.*dataset.item"),
    ("", "", {"rating": "star"}, "no column 'star'(.*\n)*.*dataset.rating"),
    ("", "", {"user_features": ["citty"]}, "no column 'citty'(.*\n)*.*dataset.user-features"),
    ("", "", {"item_texts": ["whut"]}, "no column 'whut'(.*\n)*.*dataset.item-texts"),
]


@pytest.mark.parametrize(("old", "new", "settings", "problem"), WRONG)
def test_wrong_values_and_columns_are_named(tmp_path, old, new, settings, problem):
    path = write(tmp_path, CSV.replace(old, new) if old else CSV)
    with pytest.raises(DataError, match=problem):
        read(path, **{**FEATURES, **COLUMNS, **settings})


def test_path_is_needed(tmp_path):
    with pytest.raises(DataError, match="path is missing"):
        Table("mine", Table.Config()).read()
    with pytest.raises(DataError, match="not found"):
        read(tmp_path)
    for text, problem in (
        ("", "is empty"),
        ("user,item\n", "no rows"),
        ("user,user,item\n1,2,3\n", "duplicate"),
    ):
        with pytest.raises(DataError, match=problem):
            read(write(tmp_path, text))
    with pytest.raises(DataError, match=r"two roles: dataset\.user and dataset\.item"):
        read(write(tmp_path, CSV), user="who", item="who")


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([5, 2**63 + 5], 2),
        ([1.0, 1e19], 2),
        ([True, False], 1),
        (["2020-01-01", "1005"], 2),  # a year or a second
        (["7", "2020-01-01"], 1),
        (["2020-01-01", "yesterday"], 2),
        ([1.0, float("nan")], 2),
    ],
)
def test_times_of_two_kinds_or_out_of_range_are_refused(values, row, tmp_path):
    with pytest.raises(DataError, match=rf"row {row} "):
        times_of(pd.Series(values, name="when"), tmp_path)


# Dense indices and the fingerprint of interactions.


def rows(users=(1, 1, 2), items=(7, 8, 7), ratings=(5, 3, 0), times=(1, 2, 3)):
    columns = {name: np.array(column) for name, column in locals().items()}
    return index_rows("x", **columns)


def test_fingerprint_is_pinned():
    # The same on any machine and with any version of the libraries: published data are recognised
    # by it.
    pinned = "5268e73afee1c3d428e1422525f4c8d90c9d4bf99c8566e5e6663eaf9eb91197"
    assert rows().fingerprint() == pinned


def test_fingerprint_ignores_order_times_type_of_ids_and_sign_of_zero():
    same = rows(users=["2", "1", "1"], items=["7", "8", "7"], ratings=(-0.0, 3, 5), times=(9, 9, 9))
    assert same.fingerprint() == rows().fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        rows(ratings=(3, 5, 0)),
        rows(users=(1, 2, 1)),
        rows(items=(8, 7, 7), ratings=(5, 3, 0)),
        rows(users=(7, 8, 7), items=(1, 1, 2)),
        rows(users=(1, 1), items=(7, 8), ratings=(5, 3), times=(1, 2)),
        rows(users=(1, 1, 2, 2), items=(7, 8, 7, 7), ratings=(5, 3, 0, 0), times=(1, 2, 3, 4)),
    ],
)
def test_fingerprint_sees_every_other_change(other):
    assert other.fingerprint() != rows().fingerprint()


def test_amounts_are_in_bands_of_1_2_and_5_times_a_power_of_ten():
    """Each number is in its band, and the edges of all bands are of that series."""
    random = np.random.default_rng(0)
    numbers = np.concatenate([10.0 ** random.uniform(-6, 9, 300), [1, 2, 5, 0.1, 0.2, 0.5, 1000]])
    for number in [*numbers, *-numbers]:
        text = band(repr(float(number)))
        assert text is not None
        low, high = sorted(abs(float(end)) for end in text.split(" to "))
        assert low <= abs(number) < high and text.startswith("-") == (number < 0)
        for end in (low, high):
            assert re.fullmatch(r"[125]\.?0*e[+-]\d+", f"{end:e}"), end
    assert [band(text) for text in ("0", "-0.0", "nan", "inf", "—", "")] == ["0", "0"] + [None] * 4


def test_prices_with_a_sign_for_unknown_are_bands_and_that_sign():
    prices = np.random.default_rng(1).uniform(1, 200, 43).round(2)
    feature, taken = labelled("price", [*map(str, prices), *["—"] * 7, None])
    assert set(feature.categories) <= {
        "1 to 2", "2 to 5", "5 to 10", "10 to 20", "20 to 50", "50 to 100", "100 to 200", "—",
    }  # fmt: skip
    inside = [label(feature, row) for row in range(feature.rows)]
    assert inside[-1] == [] and inside[-2] == ["—"]
    assert sum(row == ["50 to 100"] for row in inside) == ((prices >= 50) & (prices < 100)).sum()
    assert "numbers in" in taken and "bands" in taken


@pytest.mark.parametrize(
    "values",
    [
        [str(year) for year in range(1980, 2000)] * 3,
        [str(brand) for brand in range(1, 60)] * 3,
        ["18", "25", "35.5"],
        ["a", "b", "a"],
    ],
)
def test_numbers_that_many_share_and_labels_stay_categories(values):
    feature, taken = labelled("kind", values)
    assert set(feature.categories) == set(values) and not taken


def test_values_that_were_written_elsewhere_are_known_by_category_list_or_band():
    categories = {"a", "b;c", "20 to 50", "7"}
    assert known_labels("a|b;c", categories) == (["a", "b;c"], [])
    assert known_labels("a; 23.5 |7", categories) == (["a", "20 to 50", "7"], [])
    assert known_labels("z|3|a", categories) == (["a"], ["z", "3"])
    assert known_labels("", categories) == ([], [])
