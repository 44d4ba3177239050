# SPDX-License-Identifier: Apache-2.0
"""CPU time of process trees: made-up process tables, and one real orphan."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks import watch

TICK = os.sysconf("SC_CLK_TCK")


class Root:
    """The part of a process's interface that a watch needs."""

    pid = 10


@pytest.fixture
def sampled(monkeypatch):
    """A watch of process 10 that has seen the given process tables, one sample each second from
    second 1 on."""

    def make(*tables):
        tree = watch.TreeWatch(Root())
        tree._samples.clear()
        for second, table in enumerate(tables, start=1):
            monkeypatch.setattr(watch.time, "monotonic", lambda second=second: float(second))
            monkeypatch.setattr(watch, "processes", lambda table=table: table)
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
    tree = watch.TreeWatch(process, memory=True)
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
    busy = watch.GpuWatch("cuda", [sys.executable, "-c", says])
    while len(busy._samples) < 3:
        assert time.monotonic() < began + 60
        time.sleep(0.01)
    busy.stop()
    after_first = (busy._samples[0][0] + busy._samples[1][0]) / 2
    assert busy.figures(after_first, time.monotonic()) == {"gpu_busy": pytest.approx(0.3)}
    assert busy.figures(began - 2, began - 1) == {} == watch.GpuWatch("cpu").figures(0, 1)
