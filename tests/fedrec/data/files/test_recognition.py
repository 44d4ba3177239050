# SPDX-License-Identifier: Apache-2.0
"""Recognition of columns, and errors if it is ambiguous."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from fedrec.data.files.columns import times_of
from fedrec.data.files.recognition import recognise
from fedrec.data.files.tables import TableLayout, read_table
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


@pytest.mark.parametrize(
    "heads",
    [
        ("user", "item", "rating", "time"),
        ("userId", "movieId", "rating", "timestamp"),
        ("customer_id", "Product ID", "stars", "created_at"),
        ("reviewerID", "asin", "overall", "unixReviewTime"),
    ],
)
def test_columns_are_found_by_their_names(written, heads):
    found = recognise(written(heads))
    assert tuple(found.columns[role] for role in ("user", "item", "rating", "time")) == heads
    assert found.positive_above == 3.0
    assert (found.rows, found.users, found.items) == (4, 2, 3)


def test_times_are_found_by_what_is_in_them_and_ratings_by_their_name_only(written):
    found = recognise(written(("user", "item", "a", "b")))
    assert found.columns == {"user": "user", "item": "item", "time": "b"}
    assert "look like" in found.reasons["time"] and found.positive_above is None
    assert recognise(written(("user", "item", "a", "b")), {"rating": "a"}).positive_above == 3


@pytest.mark.parametrize("head", ["Menge", "Anzahl", "qty", "Stueck", "a"])
def test_small_whole_numbers_in_a_column_with_another_name_are_no_ratings(written, head):
    rows = [(f"k{row % 4}", f"s{row % 5}", 1 + (row % 3)) for row in range(12)]
    found = recognise(written(("Kunde", "Artikel", head), rows, ";"))
    assert found.columns == {"user": "Kunde", "item": "Artikel"}
    assert (found.liked, found.rows, found.ignored) == (12, 12, (head,))


@pytest.mark.parametrize("head", ["Bewertung", "Sterne", "Score", "stars", "user_rating"])
def test_ratings_are_found_by_their_names_in_other_languages_and_can_be_declined(written, head):
    rows = [(*row[:2], row[2]) for row in RATED]
    found = recognise(written(("user", "item", head), rows))
    assert found.positive_above == 3 and found.liked == 2
    assert "the 2 rows with a rating above 3" in found.lines()[0]
    assert repr(head) in found.lines()[0] and "--no-rating" in found.lines()[0]
    declined = recognise(written(("user", "item", head), rows), rated=False)
    assert (declined.positive_above, declined.liked) == (None, 4)
    assert declined.ignored == (head,) and not declined.unfit


def test_small_quantities_without_names_are_no_ratings(written):
    rows = [(row % 4, row % 5, 1 + (row % 3)) for row in range(12)]
    found = recognise(written(rows[0], rows[1:]))
    assert found.columns == {"user": "1", "item": "2"} and found.liked == 12


@pytest.mark.parametrize("separator", ["\t", ";", "|"])
def test_the_separator_is_found(written, separator):
    assert recognise(written(("user", "item", "rating", "time"), RATED, separator)).separator == (
        separator
    )


def test_dates_are_times_and_prices_are_no_ratings(written):
    rows = [
        ("a", "x", 12.5, "2024-01-02"),
        ("a", "y", 250, "2024-01-03"),
        ("b", "x", 7.75, "2024-02-01"),
    ]
    found = recognise(written(("buyer", "sku", "amount", "date"), rows))
    assert found.columns == {"user": "buyer", "item": "sku", "time": "date"}
    assert found.positive_above is None
    assert found.ignored == ("amount",)
    assert "every row counts as liked" in found.lines()[0]


@pytest.mark.parametrize(
    ("head", "values"),
    [("unit price", (5, 10, 5, 20)), ("Quantity", (1, 2, 1, 3)), ("a", (7.31, 14.62, 7.31, 21.93))],
)
def test_a_few_prices_or_quantities_are_no_ratings(written, head, values):
    rows = [(*row[:2], value) for row, value in zip(RATED, values, strict=True)]
    found = recognise(written(("customer", "sku", head), rows))
    assert found.positive_above is None and found.ignored == (head,)
    named = recognise(written(("customer", "sku", head), rows), {"rating": head})
    assert named.positive_above == (min(values) + max(values)) / 2


def test_two_columns_without_known_names_are_users_and_items(written):
    found = recognise(written(("a", "b"), [(1, 7), (1, 8), (2, 7)]))
    assert found.columns == {"user": "a", "item": "b"}


def test_prices_are_no_ids(written):
    rows = [("k1", "s1", 1.5), ("k1", "s2", 9.99), ("k2", "s1", 1.5), ("k2", "s3", 2.0)]
    found = recognise(written(("Kunde", "Artikel", "Preis"), rows))
    assert found.columns == {"user": "Kunde", "item": "Artikel"}
    assert found.ignored == ("Preis",)


def test_columns_can_be_named(written):
    given = {"user": "item", "item": "user"}
    found = recognise(written(("user", "item", "rating", "time")), given)
    assert (found.columns["user"], found.reasons["user"]) == ("item", "as given")
    with pytest.raises(DataError, match="no column 'nobody'"):
        recognise(written(("user", "item", "rating", "time")), {"user": "nobody"})


def test_ambiguous_columns_are_asked_for(written):
    rows = [("p", 1, "u"), ("q", 1, "v"), ("p", 2, "v"), ("q", 2, "u")]
    with pytest.raises(DataError, match="cannot tell which column") as error:
        recognise(written(("a", "b", "c"), rows))
    assert "--user COLUMN" in error.value.text()


def test_a_first_line_of_values_is_a_row_and_columns_are_named_by_their_places(written):
    found = recognise(written(RATED[0], RATED[1:]))
    assert found.columns == {"user": "1", "item": "2", "rating": "3", "time": "4"}
    assert (found.header, found.rows, found.users, found.items) == (False, 4, 2, 3)
    assert found.reasons["user"] == "by its place" and "first line is a row" in found.lines()[1]
    other = recognise(written(RATED[0], RATED[1:]), {"user": "2"})
    assert (other.columns["user"], other.columns["item"]) == ("2", "1")
    with pytest.raises(DataError, match="no column 'user_id'"):
        recognise(written(RATED[0], RATED[1:]), {"user": "user_id"})


@pytest.mark.parametrize("start", ["26.05.2022", "26.05.2022 14:30"])
def test_dates_with_the_day_first_are_times(written, start):
    rows = [(1, 10, start), (1, 11, "1.6.2022"), (2, 10, "27.05.2022 08:00:01")]
    assert recognise(written(("user", "item", "Datum"), rows)).columns["time"] == "Datum"
    assert recognise(written(("user", "item", "x"), rows)).columns["time"] == "x"
    assert recognise(written(rows[0], rows[1:])).columns == {"user": "1", "item": "2", "time": "3"}
    assert "the later half of the items is held out" in "".join(
        recognise(written(("user", "item", "x"), rows)).lines()
    )


def test_a_column_without_a_name_is_not_used_and_two_of_one_name_are_refused(written):
    rows = [(0, "a", "x"), (1, "a", "y"), (2, "b", "x")]
    found = recognise(written(("", "user", "item"), rows))
    assert found.columns == {"user": "user", "item": "item"} and found.ignored == ("",)
    with pytest.raises(DataError, match="two columns 'user'"):
        recognise(written(("user", "user", "item"), rows))


def test_ids_keep_their_leading_zeros(written):
    found = recognise(written(("a", "b"), [("007", "1.0"), ("7", "1"), ("007", "2")]))
    assert found.frame["a"].tolist() == ["007", "7", "007"]
    assert (found.users, found.items) == (2, 3)


def test_infinite_ratings_are_said(tmp_path):
    file = tmp_path / "x.parquet"
    frame = pd.DataFrame({"user": [1, 1, 2], "item": [1, 2, 1], "rating": [5.0, np.inf, 1.0]})
    frame.to_parquet(file)
    found = recognise(file)
    assert found.unfit == {"rating": "rating"} and "rating" not in found.columns
    with pytest.raises(DataError, match=r"row 2 .* column 'rating'"):
        recognise(file, {"rating": "rating"})


def test_columns_of_lists_structs_and_maps_are_left_out(tmp_path):
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table(_nested()), file)
    found = recognise(file)
    assert found.columns == {"user": "user", "item": "item"}
    assert found.ignored == ("rating", "struct", "map")
    for name in found.ignored:
        with pytest.raises(DataError, match="lists, structs or maps") as error:
            read_table(file, TableLayout.own({"user": str, name: str}))
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


def test_a_damaged_page_of_a_parquet_file_is_told(tmp_path):
    file = tmp_path / "x.parquet"
    table = pyarrow.table({"user": list(range(500)), "item": list(range(500))})
    pyarrow.parquet.write_table(table, file, compression="snappy", use_dictionary=False)
    damaged = bytearray(file.read_bytes())
    damaged[30:400] = b"\xff" * 370
    file.write_bytes(bytes(damaged))
    with pytest.raises(DataError, match="cannot be read as a table"):
        recognise(file)


def test_users_who_can_be_tested_and_items_that_users_share_are_counted(written):
    rows = [("a", "x"), ("a", "x"), ("b", "x"), ("b", "y"), ("c", "z")]
    found = recognise(written(("user", "item"), rows))
    assert (found.users, found.items, found.divisible, found.shared) == (3, 3, 1, 1)
    with pytest.raises(DataError, match=r"row 2 .* column 'item'"):
        recognise(written(("user", "item"), [("a", "x"), ("b", ""), ("b", "y")]))


def test_pipes_are_refused_without_being_opened(tmp_path):
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(DataError, match="a pipe or a device"):
            recognise(path)


def test_dates_in_the_first_line_are_values_too(written):
    rows = [(1, 10, "2024-01-05"), (1, 11, "2024-02-05"), (2, 10, "2024-02-06")]
    found = recognise(written(rows[0], rows[1:]))
    assert found.columns == {"user": "1", "item": "2", "time": "3"} and found.rows == 3


def test_one_column_without_a_name_is_refused(written):
    with pytest.raises(DataError, match="one column"):
        recognise(written((196,), [(22,)]))


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(DataError, match="there is no table"):
        recognise(tmp_path)
    file = tmp_path / "x.csv"
    file.write_bytes(b"\xff\xfe\x00user")
    with pytest.raises(DataError, match="not UTF-8 text"):
        recognise(file)


@pytest.mark.parametrize(
    ("head", "values", "word"),
    [
        ("rating", ("5", "", "3", "4"), "number"),
        ("stars", ("5,0", "1,0", "3,5", "4,0"), "decimal point"),
        ("date", ("31/12/2024", "1/1/2025", "2/1/2025", "3/1/2025"), "31.12.2024"),
    ],
)
def test_columns_that_are_named_well_and_cannot_be_read_are_said(written, head, values, word):
    rows = [(*row[:2], value) for row, value in zip(RATED, values, strict=True)]
    found = recognise(written(("user", "item", head), rows, ";"))
    assert list(found.columns) == ["user", "item"] and head in found.unfit.values()
    assert any(f"{head!r} is named like" in line and word in line for line in found.lines())


def test_a_named_rating_column_needs_a_number_in_each_row(written):
    table = written(("user", "item", "rating"), [(1, 10, 5), (1, 11, ""), (2, 10, 3)])
    with pytest.raises(DataError, match=r"row 2 .* column 'rating'"):
        recognise(table, {"rating": "rating"})


def test_one_column_for_two_roles_is_refused(written):
    with pytest.raises(DataError, match="'user' is given twice"):
        recognise(written(("user", "item", "rating", "time")), {"user": "user", "item": "user"})


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"PK\x03\x04\xff\xfe", "export"),
        (b"\x1f\x8b\x08\x00\xff", "gunzip"),
        (b"PAR1\x15\xff", ".parquet"),
        ("user,item\nJ\u00fcrgen,1\nu,2\n".encode("latin-1").replace(b"user", b"\xfcser"), "iconv"),
    ],
)
def test_other_files_are_told_how_to_become_a_table(tmp_path, content, word):
    file = tmp_path / "x.csv"
    file.write_bytes(content)
    with pytest.raises(DataError, match="not UTF-8 text") as error:
        recognise(file)
    assert word in error.value.text()


def test_a_letter_of_another_encoding_far_down_is_told_too(tmp_path):
    file = tmp_path / "x.csv"
    rows = "".join(f"u{n},i{n % 9}\n" for n in range(20_000))
    file.write_bytes(f"user,item\n{rows}J\u00fcrgen,i1\n".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8 text") as error:
        recognise(file)
    assert "iconv" in error.value.text()


@pytest.mark.parametrize(
    ("user", "item", "time"),
    [
        ("Käufer", "Artikel-Nr.", "Datum"),
        ("Kunden-ID", "Produkt", "Rechnungsdatum"),
        ("usuario", "artículo", "fecha"),
        ("utilisateur", "produit", "date"),
    ],
)
def test_names_of_other_languages_are_known(written, user, item, time):
    """Quantities beside them are no ratings."""
    rows = [("a", "x", "01.02.2024", 3), ("a", "y", "02.02.2024", 1), ("b", "x", "03.02.2024", 2)]
    found = recognise(written((user, item, time, "Menge"), rows))
    assert found.columns == {"user": user, "item": item, "time": time}
    assert found.ignored == ("Menge",) and found.positive_above is None


AMERICAN = [("12/31/2023 09:05", 1704013500), ("01/02/2024 00:00", 1704153600)]


def test_dates_of_another_form_are_read_by_a_given_one(written):
    rows = [(f"k{row}", f"s{row}", when) for row, (when, _) in enumerate(AMERICAN)]
    file = written(("Kunde", "Artikel", "Datum"), rows, ";")
    without = recognise(file)
    assert "time" not in without.columns and "--time-format" in without.lines()[-1]
    found = recognise(file, time_format="%m/%d/%Y %H:%M")
    assert found.columns["time"] == "Datum"
    unnamed = recognise(written(("Kunde", "Artikel", "x"), rows, ";"), time_format="%m/%d/%Y %H:%M")
    assert unnamed.columns["time"] == "x"
    times = times_of(found.frame["Datum"], file, "%m/%d/%Y %H:%M")
    assert times.tolist() == [second * 10**9 for _, second in AMERICAN]
    with pytest.raises(DataError, match="no column of times of the form"):
        recognise(file, time_format="%d.%m.%y")
    with pytest.raises(DataError, match=r"a date of the form '%d/%m/%Y"):
        times_of(found.frame["Datum"], file, "%d/%m/%Y %H:%M")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_that_have_no_role_are_not_read(tmp_path, suffix):
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
    found = recognise(file)
    assert set(found.frame) == {"user", "item", "when"} and found.ignored == ("text",)
    assert (found.rows, found.columns["time"]) == (2000, "when")
    first = read_table(file, TableLayout.own({"item": str}), rows=7)
    assert first["item"].tolist() == [f"i{row}" for row in range(7)]
