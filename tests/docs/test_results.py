# SPDX-License-Identifier: Apache-2.0
"""Recorded numbers: pages are filled from them, what a page tells to run has numbers, entries are
of studies that exist, and what is quick comes out as recorded."""

import json
import math
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from fedrec.data.reader import data_directory
from fedrec.errors import RunError
from fedrec.runs.folder import Result
from simulations.reproduce.recorded import (
    NOT_HERE,
    PAPERS,
    UNRECORDED,
    Number,
    key,
    recorded,
    studies,
)
from simulations.studies.declaration import TaskJob, declared
from simulations.studies.runs import folder_of, run_study

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "fill_results.py"))
record = SCRIPT["record"]
entry = runpy.run_path(str(ROOT / "docs" / "record_results.py"))["entry"]
printed = SCRIPT["printed"]
PAGES = SCRIPT["pages"]()
RESULTS = recorded()
BENCHMARKS = [study for file in (ROOT / "benchmarks").glob("*.toml") for study in declared(file)]
COMMAND = re.compile(r"fedrec reproduce ([\w./-]+) ([\w-]+)((?: --[^\n`]*)?)")
STUDIES = {key(study): study for study in [*studies(), *BENCHMARKS]}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_numbers_that_are_recorded(page):
    text = page.read_text(encoding="utf-8")
    assert text == SCRIPT["filled"](text, RESULTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_begins_with_the_marker_of_a_number(page):
    """The site would begin a new paragraph there."""
    assert not re.findall(r"^\s*<!-- (?:r|count) .*", page.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_run_has_numbers_or_a_reason(page):
    """Or the page says that it is not measured. Searches print numbers of validation users, which
    no page quotes."""
    text = page.read_text(encoding="utf-8")
    unmeasured = "\n".join(re.findall(r"^Not measured with this version: .*$", text, re.M))
    excused = {"/".join(name.split()) for name in NOT_HERE.keys() | UNRECORDED.keys()}
    excused |= {study_named(*found) for found in COMMAND.findall(unmeasured)}
    for paper, item, more in COMMAND.findall(text):
        name = study_named(paper, item, more)
        if paper == "mine.toml" or item.startswith("-") or "--quick" in more or name in excused:
            continue
        assert name in STUDIES, f"{page.name} names {name}, which is no study"
        assert name in RESULTS or STUDIES[name].best, f"{page.name}: {name} has no numbers"


def study_named(paper, item, _):
    return f"{Path(paper).stem}/{item}"


def test_every_study_of_the_papers_has_a_place_on_a_page_or_a_reason():
    """A table, a number in a sentence, or its name on the paper's page."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    placed = set(re.findall(r"^<!-- results (\S+)", text, re.M))
    placed |= set(re.findall(r"<!-- r ([^;]+);", text))
    for page in (ROOT / "docs" / "papers").glob("*.md"):
        names = re.findall(r"`([\w-]+)`", page.read_text(encoding="utf-8"))
        placed |= {f"{page.stem}/{name}" for name in names}
    excused = {"/".join(name.split()) for name in UNRECORDED}
    made = {key(study) for study in studies()}
    assert excused <= made and not excused & RESULTS.keys()
    assert made <= placed | excused


README = (ROOT / "README.md").read_text(encoding="utf-8")
HOLD_OUT = "peers/hold-out-ml1m"
README_ROWS = {
    "linear item-to-item model": [
        (HOLD_OUT, "EASE from one sum", "Hits@10"),
        (HOLD_OUT, "EASE", "Hits@10"),
        (HOLD_OUT, "popularity", "Hits@10"),
    ],
    "the same, with rated items": [
        (HOLD_OUT, "EASE from one sum, rated", "Hits@10"),
        (HOLD_OUT, "EASE, rated", "Hits@10"),
        (HOLD_OUT, "popularity", "Hits@10"),
    ],
    "FCF": [("privrec/table2", name, "Hits@10") for name in ("FCF", "iALS", "popularity")],
    "PrivRec": [("privrec/table2", n, "Hits@10") for n in ("PrivRec", "PrivRec-CEN", "popularity")],
    "transitions": [
        ("peers/order", f"MovieLens-1M, {name}", "Hits@10")
        for name in ("transitions, federated", "transitions", "popularity")
    ],
    "fold-in": [
        ("privrec/frontier", "Fold-in, epsilon 5", "Hits@20"),
        ("privrec/fold-in-inputs", "fold-in with titles", "Hits@20"),
        ("privrec/frontier", "dp-popularity beside DP-PrivRec, epsilon 5", "Hits@20"),
    ],
}
"""Rows of the table in README.md by their first words: study, row and metric of its numbers."""


def test_readme_is_short():
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 1100
    assert "<!--" not in README


@pytest.mark.parametrize("words", README_ROWS)
def test_readme_has_the_numbers_that_are_recorded(words):
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {words}"))
    cells = [cell.strip() for cell in line.split("|")]
    marks = (f"<!-- r {'; '.join(number)} ± --><!-- /r -->" for number in README_ROWS[words])
    texts = [re.sub(r"<!--.*?-->", "", SCRIPT["filled"](mark, RESULTS)) for mark in marks]
    assert cells[3:6] == texts


@pytest.mark.parametrize("name", list(RESULTS))
def test_an_entry_is_of_a_study_with_such_rows_and_says_where_it_comes_from(name):
    found = RESULTS[name]
    study = STUDIES[name]
    assert found.command.startswith("fedrec reproduce ") and study.item in found.command
    assert found.fedrec and found.date and found.machine and found.rows
    numbers = [number for row in found.rows.values() for number in row.values()]
    for number in numbers:
        assert len(number.values) != 1
        if number.values:
            mean = sum(number.values) / len(number.values)
            assert number.mean == pytest.approx(mean, abs=2e-4, rel=1e-3, nan_ok=True)


AGAIN = [
    ("dp-vae/table2", None, 1e-4),
    ("dp-vae/table3", None, 1e-4),
    ("privrec/figure2", None, 1e-4),
    ("upc-sdg/table1", None, 1e-4),
    ("pnbm/figure1", "compared-fold1", 1e-3),
    ("central/ml100k", "popularity", 1e-3),
    ("central/ml100k", "ease", 1e-3),
    ("privrec/frontier", "fed-fold-in-ml1m-5", 1e-3),
]
"""Studies, or one task of theirs; trained ones up to what processors differ in float32."""


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(("name", "only", "tolerance"), AGAIN)
def test_what_is_run_again_comes_out_as_recorded(name, only, tolerance, tmp_path):
    """For the first seed, or fold."""
    study = STUDIES[name]
    if only is not None:
        study = replace(study, tasks=tuple(task for task in study.tasks if task.name == only))
        assert study.tasks
    folder = folder_of(study, tmp_path / "study", quick=False)
    assert not run_study(folder, study.jobs(folder, 1, quick=False))
    rows = entry(study, study.jobs(folder, 1, quick=False))["rows"]
    assert rows
    for row, numbers in rows.items():
        for metric in numbers.keys() - {"CPU s"}:
            known = RESULTS[name].rows[row][metric]
            first = known.values[0] if known.values else known.mean
            assert numbers[metric][0] == pytest.approx(first, abs=tolerance), (row, metric)


@pytest.mark.parametrize("name", ["privrec/table4", "privrec/table5"])
def test_epsilons_come_out_as_recorded(name, tmp_path):
    """Those of the smallest cohort."""
    job = TaskJob(tmp_path / "job", 0, True, STUDIES[name].tasks[0])
    found = list(job.task.resolved()(job))
    assert len(found) == 12
    for one in found:
        known = RESULTS[name].rows[one.model][one.metric].mean
        assert one.value == pytest.approx(known, rel=1e-3) or one.value == known == math.inf


def test_a_recorded_study_fills_a_table_and_numbers(tmp_path):
    study = STUDIES["privrec/table4"]
    folder = folder_of(study, tmp_path / "study", quick=False)
    job = study.jobs(folder, 1, quick=False)[0]
    found = [
        {"dataset": "MovieLens-1M", "model": model, "metric": metric, "value": value}
        for model, value in (("DP-PrivRec", 1.7439), ("other", math.inf))
        for metric in ("epsilon, q=5/4800, delta=1e-08", "b")
    ]
    made = {"fedrec": "0.1.0", "commit": "0", "date": "2026-01-31", "machine": "x86_64, 2 cores"}
    (job.folder).mkdir(parents=True)
    (job.folder / "found.json").write_text(json.dumps({"found": found, "seconds": 1.0, **made}))
    file = tmp_path / "results.json"
    name = record(folder, file)
    page = (
        '<!-- results privrec/table4 rows="other;DP*" columns="epsilon*" digits=2 paper -->\n'
        "stale\n<!-- end -->\n<!-- r privrec/table4; DP-PrivRec; b -->.9<!-- /r -->"
    )
    filled = SCRIPT["filled"](page, {name: recorded(file)[name]})
    assert "| other | infinite | - |\n| DP-PrivRec | 1.74 | *1.74* |\n" in filled
    assert "-->1.744<!-- /r -->" in filled and "stale" not in filled
    assert "`fedrec reproduce privrec table4`; fedrec 0.1.0 (commit not known), x86_64" in (filled)
    assert SCRIPT["filled"](filled, recorded(file)) == filled
    assert recorded(file)[name].part == ""
    for unknown in ("privrec/table9; a; b", "privrec/table4; a; b", "privrec/table4; other; c"):
        with pytest.raises(LookupError):
            SCRIPT["filled"](f"<!-- r {unknown} -->.2<!-- /r -->", recorded(file))


def test_small_versions_and_parts_of_a_study_are_not_recorded(tmp_path):
    study = STUDIES["privrec/table4"]
    for quick, words in ((True, "small version"), (False, "is not finished")):
        folder = folder_of(study, tmp_path / str(quick), quick=quick)
        for job in study.jobs(folder, 2, quick=quick)[:-1]:
            job.folder.mkdir(parents=True)
        with pytest.raises(RunError, match=words):
            record(folder, tmp_path / "results.json")
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("number", "text", "bare"),
    [
        (Number(0.2051, 0.2011, 0.2091, (0.2, 0.21)), ".205 ± .004", ".205"),
        (Number(0.2051, 0.19, 0.22), ".205 (.190 to .220)", ".205"),
        (Number(0.004, 0.0, 0.011, (0.001, 0.007)), ".004 (.000 to .011)", ".004"),
        (Number(-0.004), "-.004", "-.004"),
        (Number(275802.0), "275,802", "275,802"),
        (Number(math.inf), "infinite", "infinite"),
    ],
)
def test_a_number_is_written_as_in_papers(number, text, bare):
    assert number.text() == text
    assert number.text(interval=False) == bare


def test_the_list_says_of_each_item_what_it_has_or_why_not(fedrec):
    code, out, _ = fedrec("reproduce", "--list")
    assert code == 0
    for study in studies():
        _, _, own = out.partition(f"{study.paper:12} {study.item:15} {study.title}\n")
        number, command = own.split("\n")[:2]
        if key(study) in RESULTS:
            known = RESULTS[key(study)]
            assert known.headline in number
            assert f"{known.command} ({known.seeds} seed" in command
        else:
            assert UNRECORDED.get(study.name, "not measured with this version") in number
        assert f"fedrec reproduce {study.paper} {study.item}" in command
    for name, why in NOT_HERE.items():
        assert f"{name.split()[1]:15} not reproduced: {why}" in out
    for paper in PAPERS:
        assert f"fedrec reproduce {paper} reproduces all of these in about " in out


def test_the_list_of_a_file_of_ones_own_has_its_commands_and_none_of_our_numbers(fedrec, tmp_path):
    file = tmp_path / "privrec.toml"
    task = '{name = "a", seconds = 60, row = "A"}'
    file.write_text(f'[table4]\ntitle = "Mine"\ntasks = [{task}]\n')
    code, out, _ = fedrec("reproduce", "--list", file)
    assert code == 0 and f"fedrec reproduce {file} table4 (1 seed, about 60 s)" in out
    assert "epsilon" not in out and "not here" not in out and "no numbers" not in out


@pytest.mark.slow
@pytest.mark.real_data
def test_the_first_command_prints_what_readme_says(fedrec, tmp_path, monkeypatch):
    """The best system on MovieLens-100K as a table of the reader's own is the linear one."""
    rows = (data_directory() / "ml-100k" / "u.data").read_text().replace("\t", ",")
    (tmp_path / "ratings.csv").write_text("user_id,item_id,rating,timestamp\n" + rows)
    monkeypatch.chdir(tmp_path)
    code, _, _ = fedrec("run", "--data", "ratings.csv", "--system", "linear", "--output", "run")
    found = Result.load(tmp_path / "run")
    assert code == 0
    systems = {"ratings": found.metrics, **found.baselines}
    for name in ("ratings", "popularity", "ease"):
        cells = [f"{systems[name][metric]:7.4f}" for metric in ("hits@10", "hits@20", "ndcg@10")]
        assert f"│ {name:11} │ {' │ '.join(cells)} │" in README


def test_rows_of_papers_are_named_as_ours():
    assert printed("privrec/table2")["PrivRec", "Hits@10"] == 0.168
    assert printed("privrec/table6")["Frappe, PrivRec", "MIA accuracy"]
    assert printed("central/ml100k") == {}
