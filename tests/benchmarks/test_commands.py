# SPDX-License-Identifier: Apache-2.0
"""Commands of benchmarks: processes, curves, peers, sizes, archives and watching."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from benchmarks import processes, size
from benchmarks.contestants.archive import BATCH, Arrays, RoundClock
from benchmarks.contestants.loop import Net, batches, train
from benchmarks.simulation import Task, command, commands
from benchmarks.size import size_of

# Names of contestants resolve to modules and environments.

TASK = Task("work.npz", 2, 3)


@pytest.mark.parametrize("name", commands(TASK))
def test_every_contestant_is_a_module_with_the_work_as_its_first_argument(name):
    _, arguments = commands(TASK)[name]
    place = max(at for at, word in enumerate(arguments) if word == "-m") + 1
    assert importlib.util.find_spec(arguments[place]) is not None
    assert arguments[place + 1] == "work.npz"


def test_fedrecs_own_environment_is_the_running_python():
    assert command("loop", TASK)[0] == sys.executable


def test_environments_are_looked_up_where_the_variable_points(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDREC_BENCHMARK_VENVS", str(tmp_path))
    with pytest.raises(SystemExit, match="make benchmark-venvs"):
        command("pfl", TASK)
    (tmp_path / "pfl" / "bin").mkdir(parents=True)
    (tmp_path / "pfl" / "bin" / "python").touch()
    assert command("pfl", TASK)[0] == str(tmp_path / "pfl" / "bin" / "python")


def test_unknown_contestants_are_refused_with_the_known_ones():
    with pytest.raises(SystemExit, match=r"'flour'.*flower"):
        command("flour", TASK)


def test_a_gpu_is_asked_of_those_who_can_use_it():
    task = Task("work.npz", 2, 3, "cuda", 8.0)
    assert command("fedrec", task)[-3:] == ["ray", "cuda", "8.0"]
    assert command("loop", task)[-1] == "cuda"
    with pytest.raises(SystemExit, match="'pfl' on cuda"):
        command("pfl", task)


SOURCE = '''# a comment
"""A module."""

import os


class Box:
    """A docstring of
    two lines."""

    width: int = 0
    """An attribute."""

    def half(self):
        """Half."""
        text = """a text that is
        a value"""
        return text  # why


def _swap(a, b):
    a, b = b, a
    return a, b
'''


def test_comments_docstrings_and_blank_lines_do_not_count():
    found = size_of(SOURCE)
    assert found.lines == 1 + 2 + 1 + 3 + 3
    assert found.files == 1 and found.public == 2


def test_only_independent_assignments_are_two_statements():
    assert size_of(SOURCE).packed == 0
    packed = ("a, b = 1, 2", "self.a, self.b = x, y", "(a, b) = (f(), g())")
    assert [size_of(text).packed for text in packed] == [1, 1, 1]
    single = ("a, b = f()", "a, b = b, a + b", "a = b = 1", "x[i], x[j] = x[j], x[i]")
    assert [size_of(text).packed for text in single] == [0, 0, 0, 0]


def test_the_table_has_a_line_for_each_package(tmp_path, monkeypatch, capsys):
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "box.py").write_text(SOURCE)
    monkeypatch.setattr("sys.argv", ["size.py", "--root", str(tmp_path)])
    size.main()
    table, _, targets = capsys.readouterr().out.partition("\n\n")
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [row[0] for row in rows] == [*size.PACKAGES, "others", "source", "tests", "benchmarks"]
    counts = [row[1:5] for row in rows if row[0] in ("clients", "others", "source")]
    assert counts == [["1", "1", "0", "10"]] * 3
    assert len(targets.splitlines()) == 1 + len(size.TARGETS)


def test_members_are_the_public_names_of_a_body():
    source = """
class Step(Base):
    name = "step"
    width: int = 0
    _own = 1

    @property
    def half(self): ...

    def __init__(self):
        self.other = 1
"""
    assert size.members_of(source) == {"Step": {"name", "width", "half"}}


def test_files_are_short_or_long_by_their_lines_of_code():
    assert [size_of("a = 1\n" * n).short for n in (39, 40)] == [1, 0]
    assert [size_of("a = 1\n" * n).long for n in (500, 501)] == [0, 1]
    assert size_of("", "__init__.py").short == 0


def test_every_size_is_within_its_target():
    numbers = size.figures(size.ROOT)
    assert not {name: number for name, number in numbers.items() if number > size.TARGETS[name]}


def test_environments_in_hidden_folders_do_not_count(tmp_path):
    for name in ("own.py", ".venvs/pfl/lib/other.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a = 1\nb = 2\n", encoding="utf-8")
    own = size_of("a = 1\nb = 2\n")
    assert size.folder_size(tmp_path) == own


# The archive of the benchmark's workload as contestants read it.


@pytest.fixture
def work(tmp_path):
    random = np.random.default_rng(0)
    shapes = {
        "user.gender": (2, 4),
        "item.id": (9, 4),
        "item.genres": (3, 4),
        "layer0.weight": (12, 5),
    }
    shapes |= {"layer0.bias": (5,), "layer1.weight": (5, 1), "layer1.bias": (1,)}
    lengths = [3, 40]
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths) * 2)])
    np.savez(
        tmp_path / "work.npz",
        **{
            f"initial/{name}": random.normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()
        },
        genres=np.array([[0, -1], [1, 2], [-1, -1]] * 3),
        users=np.array([[[0]], [[1]]]),
        cohorts=np.array([[5], [6]]),
        items=np.arange(offsets[-1]) % 9,
        labels=(np.arange(offsets[-1]) % 2).astype(np.float32),
        lengths=np.array(lengths),
        offsets=offsets,
    )
    return Arrays(str(tmp_path / "work.npz"))


def test_epochs_are_the_users_rows_in_order(work):
    assert [items.tolist() for items, _ in work.epochs(0)] == [[0, 1, 2], [3, 4, 5]]
    assert [len(labels) for _, labels in work.epochs(1)] == [40, 40]


def test_batches_do_not_reach_into_the_next_epoch(work):
    assert [len(items) for items, _ in batches(work, 1)] == [BATCH, 8, BATCH, 8]


@pytest.mark.slow
def test_training_does_not_change_the_work(work):
    before = {name: value.copy() for name, value in work.initial().items()}
    net = Net(work, sparse=False)
    train(net, torch.tensor([1]), batches(work, 1))
    assert all(np.array_equal(value, before[name]) for name, value in work.initial().items())
    pairs = zip(net.arrays(), Net(work, sparse=False).arrays(), strict=True)
    assert all(not np.array_equal(after, start) for after, start in pairs)


def test_a_report_holds_rounds_sum_and_change():
    clock = RoundClock()
    clock.begin()
    clock.end()
    clock.end()
    final = [np.array([3.0, 4.0]), np.array([[2.0]])]
    initial = [np.array([3.0, 1.0]), np.array([[0.0]])]
    report = json.loads(clock.report(final, initial))
    assert (report["squared_sum"], report["squared_change"]) == (29.0, 13.0)
    (first, second), (third, fourth) = report["rounds"]
    assert first <= second == third <= fourth


TICK = os.sysconf("SC_CLK_TCK")


class Root:
    """The part of a process's interface that a watch needs."""

    pid = 10


@pytest.fixture
def sampled(monkeypatch):
    """A watch of process 10 that has seen the given process tables, one sample each second from
    second 1 on."""

    def make(*tables):
        tree = processes.TreeWatch(Root())
        tree._samples.clear()
        for second, table in enumerate(tables, start=1):
            monkeypatch.setattr(processes.time, "monotonic", lambda second=second: float(second))
            monkeypatch.setattr(processes, "processes", lambda table=table: table)
            tree.sample()
        return tree

    return make


def test_children_with_lower_ids_count_and_strangers_do_not(sampled):
    tree = sampled(
        {10: (1, 5, 0), 7: (10, 6, 0), 8: (7, 6, 3 * TICK), 11: (1, 5, 0)},
        {10: (1, 5, 1 * TICK), 7: (10, 6, 2 * TICK), 8: (7, 6, 4 * TICK), 11: (1, 5, 100 * TICK)},
    )
    assert tree.cpu_seconds(1.0, 2.0) == 4.0


def test_ended_processes_keep_their_time_and_orphans_stay(sampled):
    tree = sampled(
        {10: (1, 5, 0), 20: (10, 6, 3 * TICK), 21: (20, 6, 0)},
        {10: (1, 5, 0), 21: (1, 6, 2 * TICK)},
        {10: (1, 5, 0), 21: (1, 6, 5 * TICK)},
    )
    assert tree.cpu_seconds(1.0, 3.0) == 5.0
    assert tree.cpu_seconds(2.0, 3.0) == 3.0


def test_a_process_that_got_an_old_id_is_no_member(sampled):
    tree = sampled({10: (1, 5, 0), 20: (10, 6, TICK)}, {10: (1, 5, 0), 20: (1, 99, 50 * TICK)})
    assert tree.cpu_seconds(1.0, 2.0) == 0.0


def test_time_is_linear_between_samples_and_ends_with_them(sampled):
    tree = sampled({10: (1, 5, 0)}, {10: (1, 5, 4 * TICK)}, {10: (1, 5, 6 * TICK)})
    assert tree.cpu_seconds(1.25, 2.5) == pytest.approx(4 - 1 + 1)
    assert tree.cpu_seconds(0.0, 9.0) == pytest.approx(6)


def test_an_orphan_of_a_real_tree_is_counted():
    burn = "import os, sys, time\nend = time.monotonic() + 60\n"
    burn += "while str(os.getppid()) == sys.argv[1] and time.monotonic() < end: time.sleep(0.01)\n"
    burn += "while time.process_time() < 0.6: pass\ntime.sleep(0.5)"
    middle = "import os, subprocess, sys\n"
    middle += (
        f"subprocess.Popen([sys.executable, '-c', {burn!r}, str(os.getpid())])\nsys.stdin.read()"
    )
    root = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {middle!r}],"
        " stdout=subprocess.PIPE)"
    )
    process = subprocess.Popen([sys.executable, "-c", root], stdin=subprocess.PIPE)
    tree = processes.TreeWatch(process, memory=True)
    tree.start()
    while len(tree._ticks) < 3 and process.poll() is None:
        time.sleep(0.01)
    # the middle process ends; the root waits for the orphan, which holds the other pipe
    process.stdin.close()
    tree.join()
    assert tree.cpu_seconds(0.0, float("inf")) >= 0.5
    assert tree.peak_mib > 1


def test_gpu_utilisation_is_averaged_over_the_measured_time():
    says = (
        "import time\nfor n in (100, 20, 40):\n print(n, flush=True);"
        " time.sleep(0.2)\ntime.sleep(60)"
    )
    began = time.monotonic()
    busy = processes.GpuWatch("cuda", [sys.executable, "-c", says])
    while len(busy._samples) < 3:
        assert time.monotonic() < began + 60
        time.sleep(0.01)
    busy.stop()
    after_first = (busy._samples[0][0] + busy._samples[1][0]) / 2
    assert busy.figures(after_first, time.monotonic()) == {"gpu_busy": pytest.approx(0.3)}
    assert busy.figures(began - 2, began - 1) == {} == processes.GpuWatch("cpu").figures(0, 1)
