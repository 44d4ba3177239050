# SPDX-License-Identifier: Apache-2.0
"""Compiled code is cached between processes, depends on its source, and is not required for
training."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fedrec.errors import NEIGHBOURS
from fedrec.kernel import compiled
from fedrec.training import kernel as training_kernel
from fedrec.training import steps as kernel
from fedrec.training.kernel import compile_kernel

ADDITION = """
import numpy as np
from fedrec.kernel.rows import add_dense
totals = np.zeros(3)
add_dense(totals, np.zeros(3, np.float32), np.ones(6, np.float32), 3, np.ones(2))
stats = add_dense.stats
print(totals.tolist(), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def add(cache, root=None):
    """The output of a new process that computes sums."""
    environment = {
        **os.environ,
        "FEDREC_CACHE": str(cache),
        "PYTHONPATH": str(root or Path(kernel.__file__).parents[2]),
    }
    command = [sys.executable, "-c", ADDITION]
    done = subprocess.run(
        command, env=environment, cwd=cache.parent, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_second_process_finds_what_the_first_compiled_of_the_same_sources(tmp_path):
    cache = tmp_path / "cache"
    copy = tmp_path / "copy"
    for package in ("fedrec", *NEIGHBOURS):
        shutil.copytree(
            Path(kernel.__file__).parents[2] / package,
            copy / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    assert add(cache, copy) == "[2.0, 2.0, 2.0] 0 1"
    assert add(cache, copy) == "[2.0, 2.0, 2.0] 1 0"
    source = copy / "fedrec" / "training" / "sgd.py"  # another file than that of the function
    source.write_text(source.read_text() + "\n")
    assert add(cache, copy) == "[2.0, 2.0, 2.0] 0 1"
    folders = list(cache.glob("kernel-*"))
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700, 0o700]


def printed(*command):
    return subprocess.check_output([sys.executable, *command], text=True).strip()


@pytest.mark.slow
def test_where_nothing_can_be_written_each_process_compiles(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert add(blocked).startswith("[2.0, 2.0, 2.0]")


@pytest.mark.parametrize(
    ("base", "folder", "usable"),
    [
        (0o755, 0o755, True),
        (0o1777, 0o755, True),
        (0o777, 0o755, False),
        (0o755, 0o775, False),
        (0o755, 0o1777, False),
    ],
)
def test_code_that_others_can_replace_is_not_executed(tmp_path, caplog, base, folder, usable):
    (tmp_path / "cache" / "kernel-0").mkdir(parents=True)
    (tmp_path / "cache" / "kernel-0").chmod(folder)
    (tmp_path / "cache").chmod(base)
    assert compiled.usable(tmp_path / "cache" / "kernel-0") is usable
    assert ("other users can write" in caplog.text) is not usable


def test_the_folder_is_that_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDREC_CACHE", str(tmp_path))
    assert compiled.cache_folder().parent == tmp_path and not compiled.is_compiled()
    monkeypatch.delenv("FEDREC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiled.cache_folder().parent == tmp_path / ".cache" / "fedrec"


ROUND = """
import sys
import fedrec
from fedrec.training.{file} import {name}
fedrec.run(sys.argv[1], sys.argv[3:], output=sys.argv[2])
print(sum({name}.stats.cache_misses.values()), sum({name}.stats.cache_hits.values()) > 0)
"""


@pytest.mark.parametrize("cached", [False, True])
def test_a_process_is_started_only_for_what_is_not_cached(monkeypatch, cached):
    commands, loaded = [], []
    monkeypatch.setattr(training_kernel, "usable", lambda _: True)
    monkeypatch.setattr(training_kernel, "is_compiled", lambda _: cached)
    monkeypatch.setattr(training_kernel, "compile_kernel", loaded.append)
    monkeypatch.setattr(
        training_kernel.subprocess, "run", lambda command, **_: commands.append(command)
    )
    training_kernel.compile_ahead("train_additive")
    assert loaded == ["train_additive"]
    assert [command[-1] for command in commands] == ([] if cached else ["train_additive"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "file", "name"),
    [("privrec-synthetic", "steps", "train_clients"), ("fedrap-ml1m", "steps", "train_additive")],
)
def test_rounds_need_no_more_than_is_compiled_ahead(tmp_path, experiment, file, name):
    compile_kernel(name)
    few = [
        *("engine.name=serial", "rounds=1", "sampler.cohort=2", "evaluation.baselines=[]"),
        *("dataset={name='synthetic', users=30, items=40}", "evaluation.final-users=2"),
        *("evaluation.sampled-items=5", "evaluation.ks=[2]"),
    ]
    program = ROUND.format(file=file, name=name)
    assert printed("-c", program, experiment, str(tmp_path / "run"), *few) == "0 True"
