# SPDX-License-Identifier: Apache-2.0
"""Equal contents have equal digests, others not."""

import itertools

import numpy as np
import pytest

from fedrec.data.features import FeatureTable
from fedrec.runtime.content_digest import content_digest, source_digest


def test_contents_are_told_apart():
    different = [
        np.arange(4),
        np.arange(4).astype(np.int32),
        np.arange(4).reshape(2, 2),
        np.array(["0", "1"], dtype=object),
        ["0", "1"],
        ("0", "1"),
        [0, 1],
        [[0], [1]],
        [[0, 1]],
        {"a": 1},
        {"a": 1.0},
        None,
        FeatureTable(3),
        FeatureTable(4),
    ]
    for one, other in itertools.combinations(different, 2):
        assert content_digest(one) != content_digest(other), (one, other)
    assert content_digest(np.arange(8)[::2]) == content_digest(np.array([0, 2, 4, 6]))
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})


def test_what_does_not_show_its_content_is_refused():
    with pytest.raises(TypeError, match="object has no digest"):
        content_digest([object()])


def test_sources_count_with_their_names(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("x = 1\n")
    first = source_digest(tmp_path)
    (tmp_path / "inner" / "a.py").rename(tmp_path / "inner" / "b.py")
    second = source_digest(tmp_path)
    (tmp_path / "inner" / "b.py").write_text("x = 2\n")
    assert len({first, second, source_digest(tmp_path)}) == 3
