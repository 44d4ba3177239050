# SPDX-License-Identifier: Apache-2.0
"""Categories from lists, numbers and labels in a field."""

import re

import numpy as np
import pytest

from fedrec.data.files.feature_labels import band, known_labels, labelled


def labels(feature):
    return [
        [feature.categories[code] for code in row if code >= 0] for row in feature.padded().tolist()
    ]


@pytest.mark.parametrize("separator", ["|", ";", " ; "])
def test_several_values_in_a_field_are_several_categories(separator):
    values = [separator.join(row) for row in (["books", "food"], ["food"], ["toys", "food"])]
    feature, taken = labelled("tags", [*values, None, f"food{separator}food{separator}"])
    assert feature.categories == ("books", "food", "toys")
    assert labels(feature) == [["books", "food"], ["food"], ["toys", "food"], [], ["food"]]
    assert taken == "lists of 3 categories"


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
    inside = labels(feature)
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


def test_a_category_for_nearly_every_row_is_told():
    feature, taken = labelled("title", [f"film {film}" for film in range(30)])
    assert len(feature.categories) == 30 and "30 categories of 30 values" in taken


def test_values_that_were_written_elsewhere_are_known_by_category_list_or_band():
    categories = {"a", "b;c", "20 to 50", "7"}
    assert known_labels("a|b;c", categories) == (["a", "b;c"], [])
    assert known_labels("a; 23.5 |7", categories) == (["a", "20 to 50", "7"], [])
    assert known_labels("z|3|a", categories) == (["a"], ["z", "3"])
    assert known_labels("", categories) == ([], [])
