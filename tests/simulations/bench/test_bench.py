# SPDX-License-Identifier: Apache-2.0
"""FedRec-Bench: declaration, cells, probes and page."""

import html
import json
import math

import numpy as np
import pytest

from clients.node import Node
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.loading import load
from simulations.bench.cell import (
    DOWN,
    EPSILON,
    GAP,
    PROBE,
    UP,
    experiment_table,
    search_of,
    study_of,
)
from simulations.bench.check import differing
from simulations.bench.declaration import BenchCell, bench
from simulations.bench.page.page import rendered
from simulations.bench.probe import draws_negatives, never_drawn
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
from simulations.studies.declaration import Found
from tests.fedrec.report.browser import CONTRAST, OUTSIDE

# The declaration of the bench: an experiment or a reason for each cell, equal budgets, and a
# protocol that no system can change.

SYSTEMS = (
    *("privrec", "mf", "fcf", "fed-als", "gram", "fold-in", "fedmf", "fedncf", "pfedrec", "fedrap"),
    *("gpfedrec", "fedgnn", "popularity", "ease", "ials"),
)
MINE = """
[systems.mine]
title = "Mine"
experiment = "experiment.toml"
set = ["split.leaky-negatives=true", "evaluation.held-out=validation", "dataset.name=ml-1m",
       "evaluation.final-users=9", "evaluation.masked=both", "positive-above=4.0", "task=rating"]
"""


@pytest.fixture
def mine(tmp_path):
    """A file with a system whose overrides reach for the protocol."""
    (tmp_path / "experiment.toml").write_text(
        'name = "mine"\nrounds = 2\npositive-above = 3.0\n[dataset]\nname = "ml-1m"\n'
        '[model]\nname = "mf"\n[step]\nname = "sgd"\nprivate-parameters = ["user.*"]\n'
        '[sampler]\nname = "fixed-size"\ncohort = 4\n[evaluation]\nks = [3]\n'
    )
    (tmp_path / "mine.toml").write_text(MINE)
    return tmp_path / "mine.toml"


def test_it_has_the_systems_and_datasets_that_it_promises():
    found = bench()
    assert tuple(found.systems) == SYSTEMS
    real = {"ml-100k", "ml-1m", "gowalla", "office", "amazon-video"}
    assert set(found.datasets) == {*real, "synthetic"} and found.seeds == 5
    assert len(list(found.cells())) == 6 * 2 * 15


def test_every_system_that_has_settings_has_as_many_candidates():
    found = bench()
    counts = {name: len(set(system.candidates)) for name, system in found.systems.items()}
    assert counts.pop("popularity") == 0 and set(counts.values()) == {found.budget}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_cell_has_an_experiment_under_the_protocol_or_a_reason(system):
    found = bench()
    for cell in found.cells(None, None, system):
        if why := found.reason(cell):
            assert why.startswith(("cannot: ", "too large here: "))
            continue
        one = load(experiment_table(found, cell))
        assert one.dataset.name == found.datasets[cell.dataset].dataset["name"]
        assert one.split.name == cell.protocol and one.positive_above is None
        assert one.evaluation.ks == (10,) and one.evaluation.sampled_items == 99
        assert one.evaluation.held_out == "test" and one.task == "ranking"
        if cell.protocol == "user-holdout":
            assert one.split.options["folds"] == 5 and found.systems[system].serves[cell.protocol]
        else:
            assert not one.split.options["leaky-negatives"]


def test_a_contributed_system_cannot_change_the_protocol(mine):
    found = bench(mine)
    table = experiment_table(found, BenchCell("ml-100k", "leave-one-out", "mine"))
    one = load(table)
    assert one.dataset.name == "ml-100k" and one.positive_above is None
    assert not one.split.options["leaky-negatives"]
    assert one.evaluation.held_out == "test" and one.evaluation.ks == (10,)
    assert one.evaluation.final_users is None and one.evaluation.masked == "real"
    assert one.task == "ranking"
    assert one.rounds == 2 and one.model.name == "mf"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("systems.mine", "systems.fedmf", "changes the bench"),
        ("[systems.mine]", "budget = 9\n[systems.mine]", "changes the bench"),
        (MINE, "", "declares no system"),
        ("set =", "papr = 'x'\nset =", "did you mean 'paper'"),
        ("set =", 'baseline = "ease"\nset =', "experiment or baseline, and not both"),
        ("set =", "candidates = [['rounds=1']]\nset =", "4 candidates of mine"),
    ],
)
def test_a_file_that_changes_the_bench_or_is_wrong_is_refused(mine, before, after, words):
    mine.write_text(MINE.replace(before, after))
    with pytest.raises(ExperimentError) as refused:
        bench.__wrapped__(mine)
    assert words in refused.value.text()


def test_a_name_that_is_none_is_refused_with_what_may_be_meant():
    with pytest.raises(ExperimentError, match="no system 'fedfm'") as refused:
        list(bench().cells("ml-100k", None, "fedfm"))
    assert "did you mean 'fedmf'" in refused.value.text()


def test_a_search_ranks_validation_rows_of_every_candidate():
    found = bench()
    study = search_of(found, found.cells("ml-100k", "user-holdout", "fedmf"))
    assert [task.name for task in study.tasks] == [f"fedmf-{place}" for place in range(4)]
    tables = [task.options["experiment"] for task in study.tasks]
    assert {table["evaluation"]["held-out"] for table in tables} == {"validation"}
    assert {table["split"]["validation-role"] for table in tables} == {"held-out"}
    rates = [table["strategy"]["server-lr"] for table in tables]
    assert len(set(rates)) == 4


def test_the_settings_that_were_tried_are_those_of_both_searches():
    """FedMF's own experiment had four; a search of the bench is claimed where it chose."""
    found = bench()
    fedmf = found.systems["fedmf"]
    for chosen, tried in (({}, 4), ({"leave-one-out": 1}, 8)):
        systems = {**found.systems, "fedmf": fedmf.model_copy(update={"chosen": chosen})}
        changed = found.model_copy(update={"systems": systems})
        (task,) = study_of(changed, changed.cells("ml-100k", "leave-one-out", "fedmf")).tasks
        assert task.options["experiment"]["settings-tried"] == tried


# Cells: what is done is not repeated, results are of the schema, and bytes are those of the arrays.

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


BENCH_CELLS_MINE = """
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
    (tmp_path / "mine.toml").write_text(BENCH_CELLS_MINE)
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


# The bench's page: every cell with its command, commit and machine, or why it is missing; in a
# browser it filters by keyboard, fits a phone, and opens in under a second.

DONE = [
    BenchCell(dataset, protocol, system)
    for dataset in ("ml-100k", "office")
    for protocol in ("leave-one-out", "user-holdout")
    for system in ("fedmf", "ease", "fold-in")
]


def entry(place, cell):
    numbers = {name: [place / 100, place / 110, place / 90] for name in NUMBERS}
    more = {PROBE: [0.1, 0.09, 0.11], f"{GAP}gender": [0.0123], "epsilon": ["inf"]}
    return {
        "command": f"fedrec bench run {' '.join(cell)} --seeds 1",
        "fedrec": "0.1.0",
        "commit": f"abc{place:05d}",
        "date": "2026-01-31",
        "machine": f"machine {place}",
        "seeds": 1,
        "rows": {cell.system: numbers | more},
        "inputs": {cell.system: {"test_users": True, "settings_tried": 8}},
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of some made-up results; its file."""
    folder = tmp_path_factory.mktemp("bench")
    found = {cell.key: entry(place, cell) for place, cell in enumerate(DONE, 1)}
    (folder / "results.json").write_text(json.dumps(found))
    known = results(folder / "results.json")
    (folder / "bench.html").write_text(rendered(bench(), known), encoding="utf-8")
    return folder / "bench.html"


def test_every_cell_is_there_with_its_source_or_the_reason(page):
    text = html.unescape(page.read_text(encoding="utf-8"))
    for place, cell in enumerate(DONE, 1):
        for words in (f"abc{place:05d}", f"machine {place}", f"bench run {' '.join(cell)}"):
            assert words in text
    found = bench()
    cells = [cell for cell in found.cells() if cell.dataset != "synthetic"]
    assert text.count("<tbody") == len(cells) == 150
    for cell in set(cells) - set(DONE):
        assert f"fedrec bench run {' '.join(cell)}<" in text
        assert not (why := found.reason(cell)) or why in text
    assert text.count("not run: about") + text.count("too large here:") > 100
    assert "known rows of test users in training; 8 settings tried" in text
    assert "gender .012" in text and "at chance" in text
    assert "http" not in text.replace("https://json-schema.org", "")


def test_a_probe_that_is_not_at_chance_is_called_a_leak(tmp_path):
    cell = DONE[0]
    leaking = entry(1, cell)
    leaking["rows"][cell.system][PROBE] = [0.9, 0.89, 0.91]
    (tmp_path / "results.json").write_text(json.dumps({cell.key: leaking}))
    assert "NOT at chance" in rendered(bench(), results(tmp_path / "results.json"))


SHOWN = "[...document.querySelectorAll('tbody')].filter(e => e.checkVisibility()).length"


def test_it_opens_in_under_a_second_and_asks_for_nothing(chromium, page):
    chromium.show()
    assert min(chromium.open(page) for _ in range(3)) < 1
    assert chromium.requests() == [page.as_uri()] and chromium.complaints() == []


def test_cells_are_filtered_by_keyboard(browser):
    assert browser.evaluate(SHOWN) == 150
    browser.evaluate("document.querySelector('[name=missing]').focus()")
    browser.press(" ")
    assert browser.evaluate(SHOWN) == len(DONE)
    browser.evaluate("document.querySelector('[name=dataset]').focus()")
    browser.press("ArrowDown")  # the first dataset, MovieLens-100K
    assert browser.evaluate(SHOWN) == 6
    told = browser.evaluate("document.getElementById('count').textContent")
    assert told == "6 of 150 cells shown"


def test_cells_are_sorted_and_opened_by_keyboard(browser):
    browser.evaluate("document.querySelector('thead button').focus()")
    browser.press("Enter")
    head = "document.querySelector('thead [aria-sort]').getAttribute('aria-sort')"
    assert browser.evaluate(head) == "descending"
    made = browser.evaluate(
        "[...document.querySelectorAll('[data-key]:nth-child(3)')].map(e => Number(e.dataset.key))"
    )
    assert len(made) == len(DONE) and made == sorted(made, reverse=True)
    browser.evaluate("document.querySelector('tbody th button').focus()")
    opened = "document.querySelector('tbody .facts').checkVisibility()"
    assert not browser.evaluate(opened)
    browser.press("Enter")
    assert browser.evaluate(opened)
    assert (
        browser.evaluate("document.querySelector('tbody .facts').textContent").count("Commit") == 1
    )


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_desktop_and_phone_light_and_dark(browser, width, scheme):
    browser.show(width=width, height=740, scheme=scheme)
    browser.evaluate("document.querySelector('[name=facts]').click()")
    found = browser.evaluate(CONTRAST)
    assert len(found) > 1000 and [one for one in found if one[0] < 4.5] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OUTSIDE) == []


# The probe without a model finds held-out items where they are kept out of the negatives, and
# nothing elsewhere.


@pytest.fixture
def table(tiny_experiment):
    """An experiment of 40 rounds of everybody, with or without the leak."""

    def make(leaky, **changes):
        made = tiny_experiment() | {
            "dataset": {"name": "synthetic", "users": 60, "items": 250, "mean-interactions": 20},
            "split": {"name": "leave-one-out", "leaky-negatives": leaky},
            "sampler": {"name": "full"},
            "rounds": 40,
        }
        made["evaluation"] = {"ks": [10], "sampled-items": 99, "fine-tune": {"epochs": 0}}
        return made | changes

    return make


@pytest.mark.parametrize("leaky", [False, True])
def test_undrawn_items_of_a_run_reveal_nothing_without_the_leak(table, leaky):
    hits = never_drawn(load(table(leaky)))["hits-of-100@10"]
    assert hits.mean() > 0.97 if leaky else abs(hits.mean() - 0.1) < 0.1


def test_draws_on_the_device_before_ranking_count_too(table):
    """Without rounds in which a user is, only fine-tuning can leak."""
    evaluation = {"ks": [10], "sampled-items": 99, "fine-tune": {"epochs": 1, "negatives": 200}}
    sampler = {"name": "fixed-size", "cohort": 1}
    leaky = load(table(True, evaluation=evaluation, sampler=sampler, rounds=1))
    assert never_drawn(leaky)["hits-of-100@10"].mean() > 0.3


def test_a_system_without_negatives_is_at_chance_exactly(table):
    one = load(table(True) | {"model": {"name": "item-weights"}, "step": {"name": "gram"}})
    assert not draws_negatives(Node(one, 0, 1, None).step(one.step))
    np.testing.assert_allclose(never_drawn(one)["hits-of-100@10"], 0.1)


def test_users_in_parts_are_users_at_once(table, monkeypatch):
    whole = never_drawn(load(table(False, rounds=2)))
    monkeypatch.setattr("simulations.bench.probe._CELLS_AT_ONCE", 1000)  # four users
    parts = never_drawn(load(table(False, rounds=2)))
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, rtol=1e-12)
