# SPDX-License-Identifier: Apache-2.0
"""Studies that a TOML file declares: what its tasks are, and what is refused."""

from pathlib import Path

import pytest

from fedrec.errors import ExperimentError
from simulations.study.declaration import declared
from simulations.study.study import Found, Task, TaskJob
from simulations.study.templates import filled

FILE = """
[sets]
quiet = ["evaluation.every=0"]
both = ["@quiet", "rounds={rounds}"]

[defaults]
dataset = "data"
measure = "HERE:echo"

[parts.mf]
name = "mf-{lr:g}"
seconds = 2
vary = {lr = "{rates}"}

[table1]
title = "Rates on {dataset}"
rates = [0.1, 1.0]
rounds = 3
slower = 10
set = ["@both"]
compared = [{rows = ["mf {lr}", "other"], vary = {lr = [0.1, 1.0]}}]
tasks = [
    "@mf",
    {seconds = 1, set = ["a={name}"], cases = [
        {name = "One", b = 1},
        {name = "two", b = 2, seeded = false},
    ]},
]

[table2]
like = "table1"
title = "Others"
sample = [{lr = 1.0}]
rates = [1.0, 2.0]
""".replace("HERE", __name__)


def echo(job: TaskJob, dataset: str, lr: float = 0.0, set: tuple = (), b: int = 0):
    return [Found(dataset, "|".join(set), str(b), lr)]


@pytest.fixture
def written(tmp_path):
    """The studies of a text, by item."""

    def write(text: str):
        (tmp_path / "mine.toml").write_text(text)
        return {study.item: study for study in declared(tmp_path / "mine.toml")}

    return write


def test_a_task_for_each_value_and_case_with_everything_filled_in(written):
    study = written(FILE)["table1"]
    assert study.name == "mine table1" and study.title == "Rates on data"
    assert study.compared == (("mf 0.1", "other"), ("mf 1.0", "other"))
    found = {
        (task.name, task.seconds, task.seeded): task.work(TaskJob(Path(), 0, False, task))
        for task in study.tasks
    }
    shared = "evaluation.every=0|rounds=3"
    assert found == {
        ("mf-0.1", 20.0, True): [Found("data", shared, "0", 0.1)],
        ("mf-1", 20.0, True): [Found("data", shared, "0", 1.0)],
        ("one", 10.0, True): [Found("data", f"{shared}|a=One", "1", 0.0)],
        ("two", 10.0, False): [Found("data", f"{shared}|a=two", "2", 0.0)],
    }


def test_a_section_takes_over_what_it_is_like(written):
    study = written(FILE)["table2"]
    sampled = [(task.name, task.sample) for task in study.tasks]
    assert sampled == [("mf-1", True), ("mf-2", False), ("one", False), ("two", False)]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("[sets]", "[sets", "cannot be read"),
        ("[sets]", "[sets]\ndeep = " + "[" * 100_000, "is not TOML"),
        ('like = "table1"', 'like = "tabel1"', "did you mean 'table1'"),
        ('set = ["@both"]', 'set = ["@bot"]', "did you mean 'both'"),
        ('"@mf"', '"@fm"', "nothing is named 'fm'"),
        ("seconds = 2", "", "'seconds'"),
        ("seconds = 2", "", "see docs/how-to.md, Studies of your own"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_reason(written, before, after, words):
    with pytest.raises(ExperimentError) as refused:
        written(FILE.replace(before, after))
    assert words in refused.value.text()


def test_a_misspelt_key_of_a_task_is_refused(written):
    study = written(FILE.replace("b = 2", "datset = 2"))["table1"]
    with pytest.raises(ExperimentError, match="unknown key 'datset'") as refused:
        study.tasks[-1].work(TaskJob(Path(), 0, False, study.tasks[-1]))
    assert "did you mean 'dataset'" in refused.value.text()


def test_what_is_varied_needs_no_other_key(written):
    """`{varied}` names all that is varied, so these keys are no misspelt ones."""
    text = FILE + '[table3]\ntitle = "x"\nseconds = 1\nname = "{varied}"\nset = ["{varied}"]\n'
    made = written(text + "vary = {items = [1, 2]}\ntasks = [{}]\n")["table3"]
    found = [task.work(TaskJob(Path(), 0, False, task)) for task in made.tasks]
    assert found == [[Found("data", f"items={n}", "0", 0.0)] for n in (1, 2)]
    with pytest.raises(ExperimentError, match="unknown key 'items'"):
        made = written(text.replace("{varied}", "x") + "vary = {items = [1]}\ntasks = [{}]\n")
        made["table3"].tasks[0].resolved()


def test_the_seed_of_a_run_can_be_a_setting(tiny_experiment):
    baseline = {"name": "mf", "seed": "{seed}"}
    table = tiny_experiment() | {"evaluation": {"ks": [5], "baselines": [baseline]}}
    job = TaskJob(Path(), 7, False, Task("a", 1, echo))
    assert job.experiment(table).evaluation.baseline_settings()["mf"]["seed"] == 7


def test_texts_keep_what_is_no_key():
    known = {"a": 0.5, "b-c": [1, 2]}
    assert filled("{a:.2f}, {x}, {name='a'}, {b-c}", known) == "0.50, {x}, {name='a'}, [1, 2]"
    assert filled({"{a}": ["{b-c}", {"k": "{a}"}]}, known) == {"0.5": [[1, 2], {"k": 0.5}]}
