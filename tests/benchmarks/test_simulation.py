# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic: medians, ratios, equal results."""

import pytest

from benchmarks.simulation import figures, summary
from benchmarks.watch import GpuWatch


class Watched:
    """A watch with round figures."""

    def cpu_seconds(self, begin, end):
        return 2 * (end - begin)


def runs(*speeds, total=100.0):
    return [
        {"users_per_second": s, "users_per_cpu_second": s / 2, "squared_sum": total} for s in speeds
    ]


def test_speeds_are_of_the_median_round_and_of_the_cpu_time_of_all_counted_rounds():
    found = figures([(0.0, 1.0), (1.0, 3.0), (3.0, 8.0)], 20, Watched(), GpuWatch("cpu"))
    assert found == {"users_per_second": 10.0, "users_per_cpu_second": 60 / 16}


def test_medians_over_repeats_and_the_memory_of_its_own_run():
    found = summary(
        {"a": runs(1.0, 9.0, 2.0), "b": runs(3.0)}, {"a": 1.0, "b": 1.0}, {"a": 90, "b": 30}
    )
    assert found["users_per_second"] == {"a": 2.0, "b": 3.0}
    assert found["users_per_cpu_second"] == {"a": 1.0, "b": 1.5}
    assert found["peak_mib"] == {"a": 90, "b": 30}


@pytest.mark.parametrize(
    ("total", "change", "equal"),
    [(100.005, 1.001, True), (100.02, 1.0, False), (100.0, 1.01, False)],
)
def test_results_are_equal_when_sums_and_changes_are(total, change, equal):
    found = summary(
        {"a": runs(1.0), "b": runs(1.0, total=total)}, {"a": 1.0, "b": change}, {"a": 1, "b": 1}
    )
    assert found["equal_results"] is equal


def test_how_busy_a_gpu_was_is_the_median_over_the_repeats():
    shared = [
        {**run, "gpu_busy": busy} for run, busy in zip(runs(1, 1, 1), (0.2, 0.9, 0.5), strict=True)
    ]
    found = summary({"a": shared}, {"a": 1}, {})
    assert found["gpu_busy"] == {"a": 0.5}
    assert "gpu_busy" not in summary({"a": runs(1.0)}, {"a": 1.0}, {})
