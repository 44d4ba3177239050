# SPDX-License-Identifier: Apache-2.0
"""The ids of the data, kept in a run folder."""

import dataclasses
import json

import numpy as np
import pytest

from fedrec.errors import RunError
from fedrec.runs.ids import read_ids, write_ids

AWKWARD = ['"', "a\nb", "a\u2028b", "a\x85b", "\x0b", "\\", "ü", "", ",", "[1]", " x "]
"""What JSON escapes, and what Python counts as the end of a line and JSON does not."""


def with_users(interactions, ids):
    names = np.array(ids, dtype=object)
    features = dataclasses.replace(interactions.user_features, rows=len(names), features=())
    return dataclasses.replace(interactions, user_ids=names, user_features=features)


@pytest.fixture
def interactions(load_tiny):
    from fedrec.data.population import read_interactions

    return read_interactions(load_tiny()).with_rows(slice(0, 0))


@pytest.mark.parametrize("most", [2, 2**17])
@pytest.mark.parametrize("ids", [AWKWARD, [3, 1, 2], []], ids=["texts", "numbers", "none"])
def test_ids_come_back_as_texts_one_to_a_line(interactions, tmp_path, monkeypatch, ids, most):
    monkeypatch.setattr("fedrec.runs.ids._AT_ONCE", most)
    write_ids(tmp_path, with_users(interactions, ids))
    users, items = read_ids(tmp_path)
    assert users.tolist() == [str(one) for one in ids]
    assert items.tolist() == [str(one) for one in interactions.item_ids]
    lines = (tmp_path / "ids" / "users.txt").read_text("utf-8").removesuffix("\n").split("\n")
    assert [json.loads(line) for line in lines if ids] == [str(one) for one in ids]


def test_a_damaged_file_is_named(interactions, tmp_path):
    write_ids(tmp_path, with_users(interactions, ["a", "b"]))
    (tmp_path / "ids" / "users.txt").write_text('"a"\n"b\n')
    with pytest.raises(RunError, match=r"users\.txt cannot be read"):
        read_ids(tmp_path)
