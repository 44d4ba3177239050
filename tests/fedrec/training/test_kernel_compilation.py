# SPDX-License-Identifier: Apache-2.0
"""Compiled code is cached between processes, depends on its source, and is not required for
training."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedrec.errors import NEIGHBOURS
from fedrec.runtime import compilation
from fedrec.training import steps as kernel
from fedrec.training.warm_up import compile_kernel

ADDITION = """
import numpy as np
from fedrec.training.update_sums import add_dense
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
def test_the_second_process_and_a_copy_of_fedrec_find_what_the_first_compiled(tmp_path):
    """A copy with another path and other times, as made by Flower, uses the cache; a changed source
    is recompiled."""
    cache = tmp_path / "cache"
    assert add(cache) == "[2.0, 2.0, 2.0] 0 1"
    assert add(cache) == "[2.0, 2.0, 2.0] 1 0"
    copy = tmp_path / "copy"
    root = Path(kernel.__file__).parents[2]
    for package in ("fedrec", *NEIGHBOURS):
        shutil.copytree(
            root / package,
            copy / package,
            ignore=shutil.ignore_patterns("__pycache__"),
            copy_function=shutil.copy,
        )
    assert add(cache, copy) == "[2.0, 2.0, 2.0] 1 0"
    source = copy / "fedrec" / "training" / "sgd.py"  # another file than that of the function
    source.write_text(source.read_text() + "\n")
    assert add(cache, copy) == "[2.0, 2.0, 2.0] 0 1"
    assert len(list(cache.glob("training-*"))) == 2


BY_ADDRESS = """
import numpy as np
from fedrec.kernel.products import product_by_address
from fedrec.runtime.compilation import compiled

@compiled
def multiplied(a, b, out, room, add_product):
    add_product(np.float32(2), a, False, b, False, np.float32(1), out, room)

ones = np.ones((3, 3), np.float32)
out = np.ones((3, 3), np.float32)
multiplied(ones, ones, out, np.empty(9, np.float32), product_by_address())
print(out.sum())
"""
WORDS = """
import sys
from fedrec.runtime.compilation import compiled

@compiled
def distinct(one, other):
    return len({one, other, "third"})

print(distinct("first", "first"), distinct("first", "second"))
"""

INCLUDING = """
import sys
import numpy as np
from fedrec.runtime.compilation import compiled

@compiled
def pair(number):
    return np.full(2, number)

@compiled
def doubled(number):
    return pair(number) + pair(number)

print(pair(3.0).sum(), *(doubled(number).sum() for number in map(float, sys.argv[1:])))
print(sum(pair.stats.cache_hits.values()))
"""


def printed(*command):
    return subprocess.check_output([sys.executable, *command], text=True).strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "found"),
    [(WORDS, "2 3"), (BY_ADDRESS, "63.0")],
    ids=["hashes of this process", "a function by its address"],
)
def test_cached_code_finds_what_it_needs(tmp_path, monkeypatch, source, found):
    monkeypatch.setenv("FEDREC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "program.py").write_text(source)
    assert [printed(tmp_path / "program.py") for _ in range(2)] == [found] * 2


@pytest.mark.slow
def test_code_that_is_compiled_later_may_include_cached_code(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDREC_CACHE", str(tmp_path / "cache"))
    program = tmp_path / "program.py"
    program.write_text(INCLUDING)
    assert printed(program) == "6.0\n0"
    assert printed(program, "4") == "6.0 16.0\n1"
    assert printed(program, "5") == "6.0 20.0\n1"


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
    assert compilation.usable(tmp_path / "cache" / "kernel-0") is usable
    assert ("other users can write" in caplog.text) is not usable


def test_the_folder_is_that_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDREC_CACHE", str(tmp_path))
    assert compilation.cache_folder().parent == tmp_path and not compilation.is_compiled()
    monkeypatch.delenv("FEDREC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compilation.cache_folder().parent == tmp_path / ".cache" / "fedrec"


@pytest.mark.parametrize("name", ["CompileResultCacheImpl", "FunctionCache", "_CacheLocator"])
def test_numba_has_what_its_cache_is_changed_by(name):
    """Undocumented parts of Numba, which a release may rename."""
    import numba.core.caching

    assert hasattr(numba.core.caching, name)


ROUND = """
import sys
import fedrec
from fedrec.training.{file} import {name}
fedrec.run(sys.argv[1], sys.argv[3:], output=sys.argv[2])
print(sum({name}.stats.cache_misses.values()), sum({name}.stats.cache_hits.values()) > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "file", "name"),
    [
        ("privrec-synthetic", "steps", "train_clients"),
        ("nn-maml-ml1m", "second_order", "move_by_meta_gradients"),
        ("fedrap-ml1m", "steps", "train_additive"),
    ],
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
