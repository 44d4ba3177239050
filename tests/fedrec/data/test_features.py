# SPDX-License-Identifier: Apache-2.0
"""Features as tables of shares."""

import numpy as np
import pytest
import torch

from fedrec.data.features import Feature, FeatureNames, FeatureTable
from fedrec.errors import DataError
from fedrec.nn.layers import row_shares


def test_shares_of_rows_with_equal_codes_are_kept_once():
    """Equal to the matrix of codes; a row may have no code, or a category twice."""
    feature = Feature.multiple(
        "genre", [["b", "a"], [], ["c"], ["a", "b"], ["b", "a"], ["a", "a", "c"], []]
    )
    shares, index = feature.distinct_shares()
    expected = row_shares(torch.from_numpy(feature.padded()), len(feature.categories))
    np.testing.assert_array_equal(shares[index], expected.numpy())
    assert shares.shape == (5, 3) and index.dtype == np.int32


def test_renumbered_rows_keep_the_categories_of_the_known_rows():
    feature = Feature.multiple("genres", [["b"], ["z", "c"], [], ["a", "b"]])
    other = feature.renumbered(np.array([3, 0, 1, -1]), 2)
    assert other.categories == ("a", "b")  # "c" and "z" occur in rows behind the known ones alone
    words = [
        [other.categories[code] for code in other.codes[start:end]]
        for start, end in zip(other.offsets, other.offsets[1:], strict=False)
    ]
    assert words == [["a", "b"], ["b"], [], []]


def test_texts_stay_apart_and_follow_their_rows():
    title = Feature.words("title", ["Red shoes", "red hat", ""])
    table = FeatureTable(3, (Feature.single("kind", "aba"),), (title,))
    assert table.names == ("kind",) and table["title"] is title
    assert FeatureNames.of(FeatureTable(9), table) == FeatureNames(
        items=("kind",), item_texts=("title",)
    )
    moved = table.renumbered(np.array([1, -1, 0]), known=3)["title"]
    words = [{moved.categories[code] for code in row if code >= 0} for row in moved.padded()]
    assert words == [{"red", "hat"}, set(), {"red", "shoes"}]
    assert table.only({"title"}).every == (title,)
    with pytest.raises(DataError, match="one name"):
        FeatureTable(3, (Feature.single("title", "aba"),), (title,))


def test_codes_of_some_rows_are_those_of_all():
    several = Feature(
        "genre", ("a", "b", "c"), np.array([0, 2, 2, 3, 6]), np.array([1, 0, 2, 0, 1, 2])
    )
    assert several.padded().tolist() == [[1, 0, -1], [-1, -1, -1], [2, -1, -1], [0, 1, 2]]
    one = Feature.single("gender", ["F", "M", "F"])
    gaps = Feature("year", ("1", "2"), np.array([0, 1, 1, 2]), np.array([1, 0]))
    assert one.padded().tolist() == [[0], [1], [0]] and gaps.padded().tolist() == [[1], [-1], [0]]
    for feature in (several, one, gaps):
        rows = np.array([2, 0, 2, 1])
        assert feature.padded(rows).tolist() == feature.padded()[rows].tolist()
        assert feature.padded(rows).flags.writeable
