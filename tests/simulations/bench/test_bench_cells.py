# SPDX-License-Identifier: Apache-2.0
"""Cells: what is done is not repeated, results are of the schema, and bytes are those of the
arrays."""

import json
import math

import pytest

from fedrec.errors import ExperimentError, RunError
from simulations.bench.cell import DOWN, EPSILON, PROBE, UP, study_of
from simulations.bench.check import differing
from simulations.bench.declaration import BenchCell
from simulations.bench.results import (
    FILE,
    NUMBERS,
    SCHEMA,
    at_chance,
    recorded_cells,
    results,
    schema,
    state,
)
from simulations.reproduce.recorded import Number
from simulations.study.study import Found

FEDMF = ("synthetic", "leave-one-out", "fedmf")
POPULARITY = ("synthetic", "leave-one-out", "popularity")


def test_a_cell_that_was_broken_off_does_only_the_seeds_that_are_left(
    small, command, results_of, tmp_path
):
    assert command("bench", "run", *POPULARITY, "--seeds", 2, "-o", tmp_path) == 0
    whole = results_of(tmp_path)["/".join(POPULARITY)]
    tasks = tmp_path / "synthetic-leave-one-out" / "tasks"
    kept = tasks / "popularity-seed0" / "found.json"
    (tasks / "popularity-seed1" / "found.json").unlink()
    before = kept.stat().st_mtime_ns
    assert command("bench", "run", *POPULARITY, "--seeds", 2, "-o", tmp_path) == 0
    assert results_of(tmp_path)["/".join(POPULARITY)] == whole and whole["seeds"] == 2
    assert kept.stat().st_mtime_ns == before


def test_a_seed_after_a_missing_one_does_not_count(small, command, results_of, tmp_path):
    command("bench", "run", *POPULARITY, "--seeds", 3, "-o", tmp_path)
    tasks = tmp_path / "synthetic-leave-one-out" / "tasks"
    (tasks / "popularity-seed1" / "found.json").rename(tmp_path / "away")
    study = study_of(small, [BenchCell(*POPULARITY)])
    from simulations.bench.results import done

    jobs = study.jobs(tmp_path / "synthetic-leave-one-out", 3, quick=False)
    found = done(small, [BenchCell(*POPULARITY)], jobs)["/".join(POPULARITY)]
    assert found["seeds"] == 1 and found["command"].endswith("popularity --seeds 1")


def test_a_result_has_all_numbers_its_command_and_bytes_of_the_arrays(
    small, command, results_of, tmp_path
):
    """A client of FedMF gets a table of 32 factors and a bias for each item, a bias for all, and
    the start of its own, 4 bytes a number; 30 client-rounds are three quarters of a round for
    each of 40 clients. Biases are zero in the first of three rounds, its own always, and then not
    sent. The change of the items that it touches goes up, at most the same."""
    assert command("bench", "run", *FEDMF, "--seeds", 1, "-o", tmp_path) == 0
    found = results_of(tmp_path)
    one = found["/".join(FEDMF)]
    assert one["command"] == "fedrec bench run synthetic leave-one-out fedmf --seeds 1"
    assert one["commit"] and "cores" in one["machine"] and one["seeds"] == 1
    row = one["rows"]["fedmf"]
    assert set(NUMBERS) <= row.keys() and row[EPSILON] == ["inf"]
    parameters = 150 * (32 + 1) + 1 + (32 + 1)
    zeros = 10 * (150 + 1) + 30
    assert row[DOWN] == [4 * (parameters * 30 - zeros) / 40]
    assert 0 < row[UP][0] <= row[DOWN][0]
    assert one["inputs"]["fedmf"]["client_rounds"] == 30
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))


def test_systems_with_the_data_in_one_place_send_no_bytes(small, command, results_of, tmp_path):
    command("bench", "run", *POPULARITY, "--seeds", 1, "-o", tmp_path)
    row = results_of(tmp_path)["/".join(POPULARITY)]["rows"]["popularity"]
    assert row[UP] == row[DOWN] == [None]


@pytest.mark.ray
@pytest.mark.slow
def test_seeds_run_at_once_on_ray(command, results_of, tmp_path):
    words = ("bench", "run", *POPULARITY, "--seeds", 2, "-o")
    command(*words, tmp_path / "ray", "--workers", 2)
    command(*words, tmp_path / "here")
    assert results_of(tmp_path / "ray") == results_of(tmp_path / "here")


def test_the_schema_is_that_of_the_entries_and_what_is_recorded_is_of_it():
    assert SCHEMA.read_text() == schema()
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(FILE.read_text()), json.loads(schema()))


@pytest.mark.parametrize("cell", list(recorded_cells()), ids=lambda cell: cell.key)
def test_the_probe_of_a_recorded_cell_is_at_chance(cell):
    record = recorded_cells()[cell]
    assert at_chance(record.rows[cell.system][PROBE])
    assert record.commit and record.machine and record.command.endswith(f"--seeds {record.seeds}")


@pytest.mark.parametrize(
    ("probe", "sound"),
    [
        (Number(0.1), True),
        (Number(0.12, 0.105, 0.135), True),
        (Number(0.108, 0.107, 0.109), True),
        (Number(0.13, 0.12, 0.14), False),
        (Number(0.99, 0.98, 1.0), False),
    ],
)
def test_a_probe_is_at_chance_within_twice_its_interval(probe, sound):
    assert at_chance(probe) == sound


def test_the_state_of_a_cell_says_why_it_is_missing(small):
    cell = BenchCell("ml-100k", "leave-one-out", "fedmf")
    assert state(small, cell, {}).startswith("not run: about ")
    system = small.systems["fedmf"].model_copy(
        update={"missing": {"ml-1*/leave-one-out": "cannot: for a test"}}
    )
    changed = small.model_copy(update={"systems": {**small.systems, "fedmf": system}})
    assert state(changed, cell, {}) == "cannot: for a test"
    with pytest.raises(ExperimentError, match="runs nothing of ml-100k/leave-one-out/fedmf"):
        study_of(changed, [cell])
    assert state(changed, cell._replace(protocol="user-holdout"), {}).startswith("not run")


@pytest.mark.parametrize(
    ("words", "reason", "others"),
    [
        (("run", "office", "leave-one-out", "privrec"), "embeddings of items", "mf, fcf"),
        (("run", "gowalla", "user-holdout", "ease"), "too large here", "popularity, ials"),
        (("tune", "ml-100k", "user-holdout", "popularity"), "no settings", "ease, ials"),
    ],
)
def test_a_cell_that_cannot_be_run_is_refused(command, tmp_path, words, reason, others):
    with pytest.raises(ExperimentError, match="/".join(words[1:])) as error:
        command("bench", *words, "-o", tmp_path)
    assert reason in error.value.got and others in error.value.expected
    assert f"fedrec bench list {words[1]} {words[2]}" in error.value.fix


ENTRY = {
    "command": "fedrec bench run a b c --seeds 1",
    "fedrec": "0.1.0",
    "commit": "",
    "date": "2026-01-31",
    "machine": "x86_64, 2 cores",
    "seeds": 1,
    "rows": {"c": {name: [0.1] for name in NUMBERS}},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"commit": None}, "commit"),
        ({"date": "yesterday"}, "date"),
        ({"command": "python mine.py"}, "command"),
        ({"sedes": 1}, "did you mean 'seeds'"),
        ({"rows": {"c": {"hits@10": [0.9]}}}, "discounted-hits@10"),
        ({"rows": {"c": {name: ["many"] for name in NUMBERS}}}, "rows"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, change, words):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"a/b/c": {**ENTRY, **change}}))
    if words is None:
        assert results(file)[BenchCell("a", "b", "c")].seeds == 1
        return
    with pytest.raises(RunError, match="no file of results") as refused:
        results(file)
    assert words in refused.value.text()


@pytest.mark.parametrize("text", ["{", "[]", '{"ab": {}}'])
def test_what_is_no_file_of_results_is_refused(tmp_path, text):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(RunError, match="no file of results"):
        results(tmp_path / "mine.json")


def test_a_true_result_passes_and_a_changed_number_is_refused(
    small, command, results_of, tmp_path, capsys
):
    command("bench", "run", *FEDMF, "--seeds", 2, "-o", tmp_path)
    found = results_of(tmp_path)
    words = ("bench", "check", tmp_path / "results.json", "-o", tmp_path / "again")
    assert command(*words) == 0 and "as recorded" in capsys.readouterr().out
    row = found["/".join(FEDMF)]["rows"]["fedmf"]
    row["discounted-hits@10"] = [value + 0.01 for value in row["discounted-hits@10"]]
    (tmp_path / "results.json").write_text(json.dumps(found))
    assert command(*words) == 1
    told = capsys.readouterr().out
    assert "discounted-hits@10: recorded" in told and "\nhits@10:" not in told


def test_a_result_whose_probe_is_not_at_chance_is_refused(tmp_path, command):
    cell = {
        **ENTRY,
        "rows": {"fedmf": {name: [0.1] for name in NUMBERS} | {PROBE: [0.4, 0.3, 0.5]}},
    }
    (tmp_path / "mine.json").write_text(json.dumps({"ml-100k/leave-one-out/fedmf": cell}))
    with pytest.raises(RunError, match="without a model finds held-out items"):
        command("bench", "check", tmp_path / "mine.json", "--cells", 0)


def test_numbers_differ_beyond_what_processors_make_of_them():
    known = {"a": Number(0.2), "bytes": Number(1e6), "e": Number(math.inf), "n": Number(math.nan)}
    same = {"a": 0.202, "bytes": 1.005e6, "e": math.inf, "n": math.nan}
    found = [Found("d", "m", name, value) for name, value in same.items()]
    assert not list(differing(known, found, 0))
    other = {"a": 0.21, "bytes": 1.2e6, "e": 5.0, "n": 0.0}
    found = [Found("d", "m", name, value) for name, value in other.items()]
    assert [line.partition(":")[0] for line in differing(known, found, 0)] == list(known)
    assert next(differing(known, found[1:], 0)) == "a: only recorded"


MINE = """
[systems.mine]
title = "Mine"
experiment = "experiment.toml"
package = "numpy"
"""


@pytest.mark.slow
def test_a_contributed_system_is_run_shown_and_checked(command, results_of, tmp_path, capsys):
    """Two rounds of matrix factorization, with the bench's own synthetic data."""
    (tmp_path / "experiment.toml").write_text(
        'name = "mine"\nrounds = 2\n[dataset]\nname = "ml-1m"\n[model]\nname = "mf"\n'
        '[step]\nname = "sgd"\nprivate-parameters = ["user.*"]\n'
        '[sampler]\nname = "fixed-size"\ncohort = 4\n'
    )
    (tmp_path / "mine.toml").write_text(MINE)
    more = ("--systems", tmp_path / "mine.toml")
    cell = ("synthetic", "leave-one-out", "mine")
    assert command("bench", "run", *cell, "--seeds", 1, *more, "-o", tmp_path / "runs") == 0
    file = tmp_path / "runs" / "results.json"
    one = results_of(tmp_path / "runs")["/".join(cell)]
    assert one["package"].startswith("numpy ") and one["inputs"]["mine"]["client_rounds"] == 8
    assert command("bench", "check", file, *more, "-o", tmp_path / "again") == 0
    assert command("bench", "page", file, *more, "-o", tmp_path / "bench.html") == 0
    assert one["package"] in (tmp_path / "bench.html").read_text()
    with pytest.raises(ExperimentError, match="no system 'mine'"):
        command("bench", "check", file)
    capsys.readouterr()
