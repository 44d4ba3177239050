# SPDX-License-Identifier: Apache-2.0
"""Search spaces of sweeps: from texts of the command line to points and overrides."""

import itertools

import pytest

from fedrec.errors import ExperimentError
from fedrec.experiment.overrides import override
from simulations.sweep.space import (
    Choice,
    Range,
    drawn,
    from_record,
    grid,
    overrides,
    space_of,
    to_record,
)


def test_a_grid_is_the_product_of_the_values():
    space = space_of(["step.epochs=[1, 2]", "strategy.server-lr=[0.1, 0.5, 1.0]"])
    expected = [
        {"step.epochs": epochs, "strategy.server-lr": rate}
        for epochs, rate in itertools.product((1, 2), (0.1, 0.5, 1.0))
    ]
    assert grid(space) == expected


def test_values_come_back_as_they_were_written():
    values = [1, 0.1, 1e-07, "fedavg", True, [5, 10], {"epochs": 2, "learning-rate": 0.5}]
    space = {"key.inner": Choice(tuple(values))}
    found = [override({}, text)["key"]["inner"] for p in grid(space) for text in overrides(p)]
    assert found == values
    assert all(type(one) is type(two) for one, two in zip(found, values, strict=True))


def test_numbers_may_begin_with_a_point_and_texts_stay_as_they_are():
    assert space_of(["a=[.5, -.25]"]) == {"a": Choice((0.5, -0.25))}
    assert space_of(["a={low=.5, high=1.0}"]) == {"a": Range(0.5, 1.0)}
    assert space_of(["a=['.5', 'x .5']"]) == {"a": Choice((".5", "x .5"))}


def test_points_of_ranges_stay_within_and_are_a_function_of_the_number():
    space = space_of(["a={low=1, high=3}", "b={low=0.001, high=1.0, log=true}", "c=[[1], [2]]"])
    points = [drawn(space, 5, number) for number in range(300)]
    assert points == [drawn(space, 5, number) for number in range(300)]
    assert {point["a"] for point in points} == {1, 2, 3}
    assert all(0.001 <= point["b"] <= 1 for point in points)
    # uniform by order of magnitude: a third of the values lies below each power of ten
    assert 70 < sum(point["b"] < 0.01 for point in points) < 130


def test_whole_numbers_on_a_log_scale_reach_both_ends():
    found = {Range(1, 4, log=True).rounded(value) for value in (0.6, 1.4, 3.6, 4.4)}
    assert found == {1, 4}


def test_a_record_gives_the_space_back():
    space = space_of(["a={low=0.1, high=1.0, log=true}", "b=['x', 'y']", "c=[[1, 2], {d = 3}]"])
    assert from_record(to_record(space)) == space


BAD = {
    "no list": ("rounds=5", "one value only"),
    "no key": ("[1, 2]", "cannot read"),
    "empty": ("rounds=[]", "at least one value"),
    "twice": ("rounds=[1, 1]", "each of them once"),
    "seed": ("seed=[1, 2]", "--seeds"),
    "held-out": ("evaluation.held-out=['test', 'validation']", "validation"),
    "range upside down": ("rounds={low=5, high=1}", "low < high"),
    "log of zero": ("rounds={low=0, high=1, log=true}", "0 < low"),
    "unknown key": ("rounds={low=1, high=2, step=1}", "low and high"),
    "no TOML": ("rounds=[1, ", "KEY=[VALUE"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_texts_are_refused_with_an_example(case):
    text, words = BAD[case]
    with pytest.raises(ExperimentError) as refused:
        space_of([text])
    assert words in refused.value.text() and "--vary" in refused.value.text()


def test_a_key_is_varied_once_and_a_range_has_no_grid():
    with pytest.raises(ExperimentError, match="varied twice"):
        space_of(["rounds=[1]", "rounds=[2]"])
    with pytest.raises(ExperimentError, match="has no grid"):
        grid(space_of(["rounds={low=1, high=3}"]))
    with pytest.raises(ExperimentError, match="grid has"):
        grid(space_of([f"k{n}={list(range(10))}" for n in range(5)]))
