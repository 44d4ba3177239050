# SPDX-License-Identifier: Apache-2.0
"""What is kept between runs: found again by what it depends on, never damaged, never too much."""

import os

import numpy as np
import pytest

from fedrec.runs.kept import keep, kept_arrays, read_kept


@pytest.fixture
def computed():
    """How often something was computed, and what computes it."""
    calls = []

    def compute():
        calls.append(1)
        return {"values": np.arange(3, dtype=np.float32), "more": np.eye(2)}

    return calls, compute


def test_arrays_are_computed_once_for_the_same_values(kept, computed):
    calls, compute = computed
    first = kept_arrays(compute, "name", 3, np.ones(2))
    again = kept_arrays(compute, "name", 3, np.ones(2))
    assert len(calls) == 1 and list(again) == list(first)
    for name, array in first.items():
        np.testing.assert_array_equal(again[name], array)
        assert again[name].dtype == array.dtype
    kept_arrays(compute, "name", 3, np.zeros(2))
    assert len(calls) == 2 and len(list(kept.glob("*.npz"))) == 2
    assert kept.stat().st_mode & 0o077 == 0


def test_other_code_or_threads_compute_anew(kept, computed, monkeypatch):
    calls, compute = computed
    kept_arrays(compute, 1)
    monkeypatch.setattr("fedrec.runs.kept.source_digest", lambda folder: "other")
    kept_arrays(compute, 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    kept_arrays(compute, 1)
    assert len(calls) == 3


@pytest.mark.parametrize("damage", [b"", b"{", b"PK\x03\x04" + bytes(50)], ids=len)
def test_a_damaged_file_is_computed_anew(kept, computed, damage):
    calls, compute = computed
    kept_arrays(compute, 1)
    [file] = kept.iterdir()
    file.write_bytes(damage)
    np.testing.assert_array_equal(kept_arrays(compute, 1)["more"], np.eye(2))
    assert len(calls) == 2 and file.read_bytes() != damage


def test_nothing_is_kept_when_it_is_switched_off(kept, computed, monkeypatch):
    monkeypatch.setenv("FEDREC_CACHE_BASELINES", "no")
    calls, compute = computed
    kept_arrays(compute, 1)
    kept_arrays(compute, 1)
    assert len(calls) == 2 and not kept.exists()


def test_what_was_used_least_recently_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("fedrec.runs.kept.LARGEST", 100)
    files = [tmp_path / name for name in ("a.json", "b.npz", "c.json")]
    for age, file in zip((30, 20), files, strict=False):
        keep(file, "x" * 40)
        then = file.stat().st_mtime_ns - age * 10**9
        os.utime(file, ns=(then, then))
    assert read_kept(files[0]) == b"x" * 40
    keep(files[2], b"y" * 40)
    assert [file.exists() for file in files] == [True, False, True]
    assert read_kept(files[1]) is None
