# SPDX-License-Identifier: Apache-2.0
"""Recognition of columns, and errors if it is ambiguous."""

import gzip
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from fedrec.data.readers.table import Table, times_of
from fedrec.data.recognition import recognise
from fedrec.data.tables import OwnLayout, read_table
from fedrec.errors import DataError

RATED = [(1, 10, 5, 978300760), (1, 11, 1, 978300761), (2, 10, 3, 978300762), (2, 12, 4, 978300763)]


@pytest.fixture
def written(tmp_path):
    def write(heads, rows=RATED, separator=","):
        file = tmp_path / "table.csv"
        lines = [separator.join(map(str, line)) for line in (heads, *rows)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    return write


def columns(found):
    return {role: choice.column for role, choice in found.roles.items()}


def sizes(found):
    return len(found.data), found.data.num_users, found.data.num_items


@pytest.mark.parametrize(
    "heads",
    [
        ("userId", "movieId", "rating", "timestamp"),
        ("customer_id", "Product ID", "stars", "created_at"),
        ("reviewerID", "asin", "overall", "unixReviewTime"),
    ],
)
def test_columns_are_found_by_their_names(written, heads):
    found = recognise(written(heads))
    assert tuple(columns(found)[role] for role in ("user", "item", "rating", "time")) == heads
    assert found.positive_above == 3.0
    assert sizes(found) == (4, 2, 3)


@pytest.mark.parametrize(
    ("role", "surest", "other"),
    [
        ("user", "user_id", "session_id"),
        ("user", "Kunden-ID", "account_id"),
        ("item", "artículo", "location"),
        ("time", "event_time", "created_at"),
        ("rating", "rating", "score"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_columns_that_fit_the_surer_name_is_taken_wherever_it_stands(
    written, role, surest, other, turned
):
    """And the other one is said."""
    heads = {"user": "user", "item": "item", "rating": "rating", "time": "time", role: surest}
    places = {"user": 0, "item": 1, "rating": 2, "time": 3}
    rows = [(*row, row[places[role]]) for row in RATED]
    names = [*heads.values(), other]
    if turned:
        names, rows = names[::-1], [row[::-1] for row in rows]
    found = recognise(written(names, rows))
    assert columns(found) == heads and found.roles[role].rivals == (other,)
    assert f"{other!r} also fits: --{role} {other}" in "".join(found.lines())
    named = recognise(written(names, rows), {role: other})
    assert columns(named)[role] == other and "fits as well" not in "".join(named.lines())


def test_times_are_found_by_what_is_in_them_and_ratings_by_their_name_only(written):
    found = recognise(written(("user", "item", "a", "b")))
    assert columns(found) == {"user": "user", "item": "item", "time": "b"}
    assert "look like" in found.roles["time"].reason and found.positive_above is None
    assert recognise(written(("user", "item", "a", "b")), {"rating": "a"}).positive_above == 3


@pytest.mark.parametrize(
    ("heads", "values"),
    [
        (("Kunde", "Artikel", "Menge"), [1, 2, 3]),
        (("customer", "sku", "unit price"), [5, 10, 20]),
        (("customer", "sku", "a"), [7.31, 14.62, 21.93]),
        (("user", "item", "note"), [f"text {row}" for row in range(40)]),
        ((1, 1, 1), [2, 1, 3]),  # without names, and no scale of 5 or 10
    ],
)
def test_quantities_prices_and_texts_are_no_ratings(written, heads, values):
    rows = [(row % 4, row % 5, values[row % len(values)]) for row in range(40)]
    table = recognise(written(heads, rows, ";"))
    number = 40 + (heads[0] == 1)
    assert set(columns(table)) == {"user", "item"} and table.positive_above is None
    assert (table.liked, len(table.data), len(table.ignored)) == (number, number, 1)
    assert table.unfit == ({"rating": "note"} if "note" in heads else {})
    if isinstance(values[0], float):  # named by the user, it is
        assert recognise(written(heads, rows), {"rating": "a"}).positive_above == 14.62


@pytest.mark.parametrize("head", ["Bewertung", "user_rating"])
def test_ratings_are_found_by_their_names_in_other_languages_and_can_be_declined(written, head):
    rows = [(*row[:2], row[2]) for row in RATED]
    found = recognise(written(("user", "item", head), rows))
    assert found.positive_above == 3 and found.liked == 2
    assert "the 2 rows with a rating above 3" in found.lines()[0]
    assert repr(head) in found.lines()[0] and "--no-rating" in found.lines()[0]
    declined = recognise(written(("user", "item", head), rows), rated=False)
    assert (declined.positive_above, declined.liked) == (None, 4)
    assert declined.ignored == (head,) and not declined.unfit


def test_a_first_line_of_values_is_a_row_and_columns_are_named_by_their_places(written):
    found = recognise(written(RATED[0], RATED[1:]))
    assert columns(found) == {"user": "1", "item": "2", "rating": "3", "time": "4"}
    assert (found.config.header, *sizes(found)) == (False, 4, 2, 3)
    assert found.roles["user"].reason == "by its place"
    assert "first line is a row" in found.lines()[1]
    other = recognise(written(RATED[0], RATED[1:]), {"user": "2"})
    assert (columns(other)["user"], columns(other)["item"]) == ("2", "1")


@pytest.mark.parametrize("start", ["26.05.2022", "26.05.2022 14:30"])
def test_dates_with_the_day_first_are_times(written, start):
    rows = [(1, 10, start), (1, 11, "1.6.2022"), (2, 10, "27.05.2022 08:00:01")]
    assert columns(recognise(written(("user", "item", "Datum"), rows)))["time"] == "Datum"
    assert columns(recognise(written(("user", "item", "x"), rows)))["time"] == "x"
    assert columns(recognise(written(rows[0], rows[1:]))) == {"user": "1", "item": "2", "time": "3"}
    assert "half of the items are held out by time" in "".join(
        recognise(written(("user", "item", "x"), rows)).lines()
    )


def test_a_column_without_a_name_is_not_used(written):
    rows = [(0, "a", "x"), (1, "a", "y"), (2, "b", "x")]
    found = recognise(written(("", "user", "item"), rows))
    assert columns(found) == {"user": "user", "item": "item"} and found.ignored == ("",)


def test_columns_of_lists_structs_and_maps_are_left_out(tmp_path):
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table(_nested()), file)
    found = recognise(file)
    assert columns(found) == {"user": "user", "item": "item"}
    assert found.ignored == ("rating", "struct", "map")
    for name in found.ignored:
        with pytest.raises(DataError, match="lists, structs or maps") as error:
            read_table(file, OwnLayout({"user": str, name: str}))
        assert repr(name) in str(error.value)
    pyarrow.parquet.write_table(pyarrow.table(_nested()).select(["rating"]), file)
    with pytest.raises(DataError, match="no column with one value per row"):
        recognise(file)


def _nested():
    return {
        "user": [1, 1, 2],
        "item": [1, 2, 1],
        "rating": [[1], [2, 3], []],
        "struct": [{"a": 1}] * 3,
        "map": pyarrow.array([[("a", 1)]] * 3, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    }


def test_users_who_can_be_tested_and_items_that_users_share_are_counted(written):
    rows = [("a", "x"), ("a", "x"), ("b", "x"), ("b", "y"), ("c", "z")]
    found = recognise(written(("user", "item"), rows))
    assert found.items_of.tolist() == [1, 2, 1] and found.users_of.tolist() == [2, 1, 1]
    assert found.lines()[1] == "1 of 5 rows repeat the user and the item of another row"
    with pytest.raises(DataError, match=r"row 2 .* column 'item'"):
        recognise(written(("user", "item"), [("a", "x"), ("b", ""), ("b", "y")]))


@pytest.mark.parametrize(
    ("heads", "rows", "given", "problem"),
    [
        (("a", "b", "c"), [("p", 1, "u"), ("q", 1, "v"), ("p", 2, "v")], {}, "cannot tell which"),
        (("user", "item"), [(1, 2)], {"user": "user", "item": "user"}, "'user' has two roles"),
        (("user", "item"), [(1, 2)], {"user": "nobody"}, "no column 'nobody'"),
        (("user", "item"), [(1, 2)], {"rating": "nobody"}, "no column 'nobody'"),
        (("user", "user", "item"), [(1, 2, 3)], {}, "duplicate column 'user'"),
        ((196,), [(22,)], {}, "one column"),
    ],
)
def test_columns_that_cannot_have_the_roles_are_refused(written, heads, rows, given, problem):
    with pytest.raises(DataError, match=problem):
        recognise(written(heads, rows), given)


def test_what_is_no_table_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")  # reading it would wait for a writer
    for path in (tmp_path, tmp_path / "pipe.csv", Path("/dev/zero")):
        with pytest.raises(DataError, match="not found"):
            recognise(path)
    file = tmp_path / "x.csv"
    file.write_bytes(b"\xff\xfe\x00user")
    with pytest.raises(DataError, match="not text in UTF-8 or UTF-16"):
        recognise(file)


def test_columns_that_are_named_well_and_cannot_be_read_are_said(written):
    dates = ("31/12/2024", "1/1/2025", "2/1/2025", "3/1/2025")
    rows = [(*row[:2], date) for row, date in zip(RATED, dates, strict=True)]
    found = recognise(written(("user", "item", "date"), rows, ";"))
    assert list(columns(found)) == ["user", "item"] and found.unfit == {"time": "date"}
    assert any("'date' is named like" in line and "31.12.2024" in line for line in found.lines())


@pytest.mark.parametrize(
    ("values", "number"),
    [
        (("5", "", "3", "4"), 1),
        (("5", "NULL", "3", "-"), 2),
        (("5", "inf", "1e300", "4"), 2),  # infinite in 32 bits
        (("5,0", "1,0", "3,5", "4,0"), 4),
        (("like", "dislike", "like", "like"), 4),
    ],
)
def test_ratings_that_are_no_numbers_are_refused_and_can_be_declined(written, values, number):
    """They do not make every row liked without a word."""
    rows = [(*row[:2], value) for row, value in zip(RATED, values, strict=True)]
    file = written(("user", "item", "stars"), rows, ";")
    with pytest.raises(DataError, match=rf"'stars', as in {number} of 4 rows") as error:
        recognise(file)
    assert "decimal point" in error.value.text() and "--no-rating" in error.value.text()
    assert recognise(file, rated=False).liked == 4


SCALES = {
    "percent": ([*range(101)] * 3, 0, 100),
    "unit interval": (np.linspace(0, 1, 301).round(3), 0, 1),
    "one to five": ([1, 2, 3, 4, 5] * 60, 1, 5),
    "a typing error": ([1, 2, 3, 4, 5] * 60 + [50], 1, 5),
    "two": ([1, 2, 3, 4, 5] * 60 + [50, 55], 1, 5),
    "a code": ([1, 2, 3, 4, 5] * 60 + [-99], 1, 5),
    "both": ([1, 2, 3, 4, 5] * 60 + [-99, 99], 1, 5),
    "a common code": ([2, 4, 6, 8, 10] * 60 + [-1] * 60, -1, 10),
    "few likes": ([0] * 300 + [1, 1], 0, 1),
    "one dislike": ([1] * 300 + [-1], -1, 1),
    "huge": ([1e30, 2e30, 3e30] * 60, 1e30, 3e30),
}


@pytest.mark.parametrize("kind", SCALES)
def test_a_scale_of_ratings_is_any_but_for_rare_values_far_away(written, kind):
    values, low, high = SCALES[kind]
    rows = [(f"u{row % 7}", f"i{row % 11}", value) for row, value in enumerate(values)]
    file = written(("user", "item", "rating"), rows)
    found = recognise(file)
    outside = sum(not low <= value <= high for value in values)
    assert (found.scale, found.beyond) == ((low, high), outside)
    assert found.positive_above == (low + high) / 2
    assert found.liked == sum(value > (low + high) / 2 for value in values)
    said = found.lines()
    assert f"rating above {(low + high) / 2:g}" in said[0]
    (rated,) = [line for line in said if line.startswith("rating")]
    assert f"a scale of {low:g} to {high:g}" in rated
    assert ("outside" in rated) == (outside > 0)
    given = recognise(file, {"rating": "rating"}, positive_above=low)
    assert f"rating above {low:g}" in given.lines()[0] and given.positive_above == low


def test_ratings_that_are_all_the_same_make_every_row_liked(written):
    found = recognise(written(("user", "item", "rating"), [(*row[:2], 1) for row in RATED]))
    assert found.positive_above is None and "all are 1" in found.lines()[3]


@pytest.mark.parametrize(
    ("content", "what", "fix"),
    [
        (b"PK\x03\x04\xff\xfe", "a spreadsheet or an archive", "export the table as CSV"),
        (b"SQLite format 3\0", "an SQLite database", "export the table as CSV"),
        (gzip.compress(tarfile.TarInfo("a.csv").tobuf(), mtime=0), "an archive", "unpack"),
        (b"user,item\nu\0,1\n", "zero bytes", "UTF-8"),
        ("user,item\nJ\u00fcrgen,1\nu,2\n".encode("latin-1"), "can't decode", "iconv"),
        (b"user,item\n" + b"u,i\n" * 9000 + "J\u00fcr,i\n".encode("latin-1"), "decode", "iconv"),
    ],
)
def test_other_files_are_told_what_they_are_and_how_to_become_a_table(tmp_path, content, what, fix):
    file = tmp_path / "x.csv"
    file.write_bytes(content)
    with pytest.raises(DataError, match="is not text") as error:
        recognise(file)
    assert what in str(error.value.got) and fix in str(error.value.fix)


def test_damaged_packed_files_are_told(tmp_path):
    file = tmp_path / "x.csv.gz"
    whole = gzip.compress(TEXT.encode() * 400, mtime=0)
    for content in (whole[:60], b"\x1f\x8b\x08\x00\xff", whole[:-9] + b"\0" * 9):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be (unpacked|read as a table)"):
            recognise(file)


ROWS = [(f"u{row % 9}", f"i{row % 7}", 1 + row % 5, f"2024-01-0{1 + row % 9}") for row in range(60)]
TEXT = "user_id,item_id,rating,day\n" + "".join(f"{a},{b},{c},{d}\n" for a, b, c, d in ROWS)
JSON = [dict(zip(("user_id", "item_id", "rating", "day"), row, strict=True)) for row in ROWS]
LINES = "\n".join(json.dumps(one) for one in JSON)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(gzip.compress(TEXT.encode(), mtime=0), id="gzip"),
        pytest.param(gzip.compress(TEXT.encode("utf-16"), mtime=0), id="UTF-16 in gzip"),
        pytest.param(LINES.encode(), id="JSON lines"),
        pytest.param(gzip.compress(LINES.encode("utf-8-sig"), mtime=0), id="JSON lines in gzip"),
        pytest.param(json.dumps(JSON, indent=2).encode(), id="JSON list"),
        pytest.param(("sep=;\n" + TEXT.replace(",", ";")).encode(), id="line of Excel"),
        pytest.param(("# by J. Doe, May 1, at 5\n# all\n" + TEXT).encode(), id="comments"),
        pytest.param(("Ratings export,,,\n\n" + TEXT).encode(), id="title with separators"),
        pytest.param(("\n\r\n" + TEXT).encode(), id="empty lines"),
        pytest.param(('"by J.\nDoe"\n' + TEXT).encode(), id="title of two lines"),
        pytest.param(TEXT.replace("\n", "\r").encode(), id="CR"),
        pytest.param(TEXT.replace("\n", "\r\n").encode("utf-8-sig"), id="CR LF and a mark"),
        pytest.param(TEXT.replace(",", ", ").encode(), id="comma and space"),
        pytest.param(TEXT.replace(",", "::").encode(), id="two colons"),
        pytest.param(TEXT.replace(",", "   ").encode(), id="spaces"),
    ],
)
def test_one_table_in_many_forms(tmp_path, content):
    """The oracle are the rows that were written."""
    file = tmp_path / "table"
    file.write_bytes(content)
    found = recognise(file)
    named = {"user": "user_id", "item": "item_id", "rating": "rating", "time": "day"}
    assert columns(found) == named
    data = Table("table", found.config).read()
    days = [int(day[-2:]) - 1 for *_, day in ROWS]
    users, items = data.user_ids[data.users], data.item_ids[data.items]
    read = zip(users, items, data.ratings, data.times, strict=True)
    first = np.datetime64("2024-01-01", "ns").astype(int)
    assert [(a, b, c, (t - first) // (86_400 * 10**9)) for a, b, c, t in read] == [
        (*row[:3], day) for row, day in zip(ROWS, days, strict=True)
    ]


def test_json_of_another_form_is_refused(tmp_path):
    file = tmp_path / "x.json"
    nested = "\n".join(json.dumps({**one, "votes": [1, 2]}) for one in JSON)
    file.write_text(nested, encoding="utf-8")
    assert recognise(file).ignored == ("votes",)
    with pytest.raises(DataError, match="'votes' contains lists"):
        recognise(file, {"item-features": ["votes"]})
    for text in (LINES + "\n{'a': 1}", '{"user": [1, 2],\n"item": [1, 2]}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match="cannot be read as a table") as error:
            recognise(file)
        assert "one object per line" in str(error.value.expected)


def test_titles_with_commas_do_not_make_a_comma_the_separator(written):
    rows = [(f"u{n % 5}", "The Thing, 1982" if n % 3 else "Alien, Aliens") for n in range(30)]
    found = recognise(written(("user", "film"), rows, "\t"))
    assert (found.config.separator, found.data.num_items) == ("\t", 2)


BARE = [(f"A{row % 9}X", f"B{row % 7}", 1.0 + row % 5, 1_400_000_000 + row) for row in range(60)]


@pytest.mark.parametrize("places", [(0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("separator", [",", "\t", "::", " "])
def test_a_first_line_of_text_ids_is_a_row_if_its_values_recur(written, places, separator):
    rows = [tuple(row[place] for place in places) for row in BARE]
    found = recognise(written(rows[0], rows[1:], separator))
    roles = dict(zip(places, ("1", "2", "3", "4"), strict=False))
    names = ("user", "item", "rating", "time")
    assert columns(found) == {names[place]: column for place, column in roles.items()}
    assert (found.config.header, *sizes(found)) == (False, 60, 9, 7)


def test_a_value_that_recurs_in_the_last_line_makes_the_first_a_row(written):
    rows = [(f"p{n}", f"q{n % 70}") for n in range(1, 5000)]
    found = recognise(written(("p0", "q!"), [*rows, ("p0", "q1")]))
    assert (found.config.header, len(found.data)) == (False, 5001)
    assert recognise(written(("p0", "q!"), rows)).config.header


def test_who_knows_better_says_whether_the_first_line_has_names(written):
    file = written(BARE[0], BARE[1:])
    with pytest.raises(DataError, match="no column 'A0X'") as error:
        recognise(file, {"user": "A0X"})
    assert "--user 1" in str(error.value.fix) and "--header" in str(error.value.fix)
    named = recognise(file, {"user": "A0X", "item": "B0", "header": True})
    assert (len(named.data), columns(named)["user"]) == (59, "A0X")
    unlike = written(("x", "y"), [("007", "b"), ("7", "c")])
    assert len(recognise(unlike, {"header": False}).data) == 3
    for given in ({}, {"user": "x", "item": "y"}):
        assert recognise(unlike, given).data.user_ids.tolist() == ["007", "7"]
    named = recognise(written(("user", "item"), [("u", "x"), ("user", "item"), ("u", "y")]))
    assert named.config.header  # as names of roles, although they recur


@pytest.mark.real_data
def test_the_published_ratings_of_amazon_are_read_as_they_are():
    found = recognise(Path(os.environ["FEDREC_DATA"]) / "amazon-video" / "ratings.dat")
    assert columns(found) == {"user": "1", "item": "2", "rating": "3", "time": "4"}
    assert sizes(found) == (63_836, 8_072, 11_830)


AMERICAN = [("12/31/2023 09:05", 1704013500), ("01/02/2024 00:00", 1704153600)]


def test_dates_of_another_form_are_read_by_a_given_one(written):
    rows = [(f"k{row}", f"s{row}", when) for row, (when, _) in enumerate(AMERICAN)]
    file = written(("Kunde", "Artikel", "Datum"), rows, ";")
    without = recognise(file)
    assert "time" not in columns(without) and "--time-format" in without.lines()[-1]
    form = {"time-format": "%m/%d/%Y %H:%M"}
    found = recognise(file, form)
    assert columns(found)["time"] == "Datum"
    unnamed = recognise(written(("Kunde", "Artikel", "x"), rows, ";"), form)
    assert columns(unnamed)["time"] == "x"
    assert found.data.times.tolist() == [second * 10**9 for _, second in AMERICAN]
    with pytest.raises(DataError, match="no column of times in the format"):
        recognise(file, {"time-format": "%d.%m.%y"})
    with pytest.raises(DataError, match=r"a date in the format '%d/%m/%Y"):
        times_of(pd.Series([when for when, _ in AMERICAN]), file, "%d/%m/%Y %H:%M")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_that_have_no_role_are_not_read(tmp_path, monkeypatch, suffix):
    """Only the first rows show that a column of texts holds no times."""
    frame = pd.DataFrame(
        {
            "user": [f"u{row % 40}" for row in range(2000)],
            "item": [f"i{row % 30}" for row in range(2000)],
            "text": ["long"] * 2000,
            "when": np.arange(2000) + 1_700_000_000,
        }
    )
    file = tmp_path / f"wide.{suffix}"
    frame.to_csv(file, index=False) if suffix == "csv" else frame.to_parquet(file)
    file = file.rename(tmp_path / "wide")  # Parquet is known by its content
    read = []

    def recorded(path, layout, rows=None):
        read.append({*layout.columns} if rows is None else set())
        return read_table(path, layout, rows)

    monkeypatch.setattr("fedrec.data.recognition.read_table", recorded)
    found = recognise(file)
    assert read[-1] == {"user", "item", "when"} and found.ignored == ("text",)
    assert (len(found.data), columns(found)["time"]) == (2000, "when")
    recognise(file, {"item-texts": ["text"]})
    assert read[-1] == {"user", "item", "when", "text"}
    first = read_table(file, OwnLayout({"item": str}), rows=7)
    assert first["item"].tolist() == [f"i{row}" for row in range(7)]
