# SPDX-License-Identifier: Apache-2.0
"""Compiled training of several checkouts in turns."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks import kernel_versions

HERE = Path(__file__).resolve().parents[2]


class Pair(NamedTuple):
    numbers: np.ndarray
    count: int


def test_copies_of_arguments_are_of_the_same_types_and_other_memory():
    given = Pair(np.arange(6.0).reshape(2, 3), 4), (np.zeros(0, np.int64), "word")
    pair, (empty, word) = kernel_versions.copied(given)
    assert isinstance(pair, Pair) and pair.count == 4 and word == "word"
    np.testing.assert_array_equal(pair.numbers, given[0].numbers)
    assert pair.numbers.flags.c_contiguous and empty.dtype == np.int64
    pair.numbers[:] = 0
    assert given[0].numbers[1, 2] == 5


def test_a_folder_without_the_source_is_an_error(tmp_path, capfd):
    version = kernel_versions.Version(tmp_path)
    with pytest.raises(RuntimeError, match=f"version in {tmp_path} ended"):
        version.milliseconds()
    version.close()
    assert "benchmarks" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_it_prints_a_row_for_each_version(capsys):
    kernel_versions.main([str(HERE), str(HERE), "--repeats", "2"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["ms", "a", "user", "least", "median", "to", "the", "first"]
    assert [row.split()[0] for row in rows] == [str(HERE)] * 2
    assert all(0 < float(row.split()[1]) <= float(row.split()[2]) for row in rows)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere"], "expected checkouts of fedrec, got nowhere"),
        ([str(HERE), "--repeats", "0"], "expected --repeats of 1 or more, got 0"),
        ([], "the following arguments are required: checkouts"),
    ],
)
def test_bad_arguments_are_refused(capsys, given, said):
    with pytest.raises(SystemExit) as error:
        kernel_versions.main(given)
    assert error.value.code == 2 and said in capsys.readouterr().err
