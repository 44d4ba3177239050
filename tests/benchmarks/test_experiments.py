# SPDX-License-Identifier: Apache-2.0
"""The plain PyTorch loop gives the same updates as the shipped experiments: an independent oracle
for the kernel. The table of both goes on where it was interrupted."""

from types import SimpleNamespace

import pytest

from benchmarks import experiments
from benchmarks.contestants.command_parts import PARTS
from benchmarks.experiments import COLUMNS, difference, lines_of, steps_of, table


def test_the_loop_and_the_kernel_take_the_same_steps():
    assert list(steps_of("privrec-synthetic")) == ["sgd"]
    assert difference("privrec-synthetic", "sgd") < 1e-4


@pytest.mark.parametrize("step", ["counts", "gram"])
def test_the_loop_adds_up_the_same_counts_and_products(step):
    assert sorted(steps_of("linear-synthetic")) == ["counts", "gram"]
    assert difference("linear-synthetic", step) < 1e-12


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", ["privrec-ml1m", "mf-ml1m"])
def test_they_do_on_movielens(name):
    assert difference(name, "sgd") < 1e-4


STEPS = dict.fromkeys(("sgd", "contrastive"), SimpleNamespace(generated=False))
PRINTED = {
    "shipped": {"users": 40, "seconds": [2.0], "path": "kernel", "peak_mib": 500.0},
    "shipped_loop": {"users": 20, "seconds": [4.0]},
    "command_parts": dict.fromkeys(PARTS, 2.0),
}


class FakeMeasurements:
    """Contestants that are not started, and which were."""

    def __init__(self):
        self.started = []
        self.fails = ""

    def measured(self, module, *arguments, **environment):
        if module == self.fails:
            raise KeyboardInterrupt
        self.started.append((module, *arguments[:2]))
        return PRINTED[module]


@pytest.fixture
def contestants(monkeypatch):
    fake = FakeMeasurements()
    monkeypatch.setattr(experiments, "measured", fake.measured)
    monkeypatch.setattr(experiments, "difference", lambda name, step: 1e-7)
    monkeypatch.setattr(experiments, "steps_of", lambda name: STEPS)
    return fake


def cells(printed):
    return [[own.strip() for own in line.split("|")[1:-1]] for line in printed.splitlines()]


def test_the_first_line_of_an_experiment_has_the_parts_of_its_command(contestants, capsys):
    table(["privrec-two-stage-synthetic"], list(COLUMNS), 1, None)
    head, rule, first, second = cells(capsys.readouterr().out)
    assert len(head) == len(rule) == len(first) == len(second)
    found = dict(zip(head, first, strict=True))
    assert found["experiment, step"] == "privrec-two-stage-synthetic, sgd"
    assert (found["users/s"], found["plain loop"], found["ratio"]) == ("20", "5", "4.0")
    assert found["processor s of the command"] == "14.0" and found["imports"] == "2.0"
    assert second[0] == "privrec-two-stage-synthetic, contrastive"
    assert second[1:8] == first[1:8]
    assert second[8:] == [""] * (1 + len(PARTS))


def test_an_interrupted_table_goes_on(contestants, capsys, tmp_path):
    kept = tmp_path / "rows.json"
    contestants.fails = "command_parts"
    with pytest.raises(KeyboardInterrupt):
        table(["privrec-two-stage-synthetic"], list(COLUMNS), 1, kept)
    own = [
        ("shipped", "privrec-two-stage-synthetic"),
        ("shipped_loop", "privrec-two-stage-synthetic"),
    ]
    assert contestants.started == [(*one, "sgd") for one in own]
    contestants.started.clear()
    contestants.fails = ""
    table(["privrec-two-stage-synthetic"], list(COLUMNS), 1, kept)
    assert contestants.started[0] == ("command_parts", "privrec-two-stage-synthetic")
    assert contestants.started[1:] == [(*one, "contrastive") for one in own]
    whole = capsys.readouterr().out.splitlines()[-4:]
    contestants.started.clear()
    table(["privrec-two-stage-synthetic"], list(COLUMNS), 1, kept)
    assert not contestants.started and capsys.readouterr().out.splitlines() == whole


def test_columns_that_are_left_out_are_not_measured(contestants, capsys, monkeypatch):
    command = ["experiments.py", "--only", "privrec-two-stage-synthetic", "--without"]
    monkeypatch.setattr("sys.argv", [*command, "speeds"])
    experiments.main()
    assert contestants.started == [("command_parts", "privrec-two-stage-synthetic")]
    assert cells(capsys.readouterr().out)[0] == [
        "experiment, step",
        "processor s of the command",
        *PARTS,
    ]
    contestants.started.clear()
    monkeypatch.setattr("sys.argv", [*command, "parts"])
    experiments.main()
    assert {module for module, *_ in contestants.started} == {"shipped", "shipped_loop"}
    assert "imports" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", ["fedgnn-ml100k", "gpfedrec-ml100k", "metamf-ml1m"])
def test_clients_with_generated_parameters_are_timed_in_whole_runs(name, monkeypatch):
    started = []

    def measured(module, *arguments):
        started.append((module, *arguments))
        return {"users_per_second": [8.0], "evaluation": 1.0, "peak_mib": 500.0}

    monkeypatch.setattr(experiments, "measured", measured)
    lines = lines_of(name, 1)
    assert list(lines) == [name]
    assert lines[name]["speeds"]()["path"] in ("blocks", "kernel")
    assert [one[:3] for one in started] == [
        ("shipped_run", name, "reference"),
        ("shipped_run", name, "auto"),
    ]


@pytest.mark.parametrize("text", ['{"privrec": ', "[1]", '{"privrec": 3}', None])
def test_a_file_without_measurements_is_refused(tmp_path, text):
    kept = tmp_path / "rows.json"
    if text is None:
        kept.mkdir()
    else:
        kept.write_text(text)
    with pytest.raises(SystemExit, match=r"rows\.json has no measurements(.|\n)*fix: give another"):
        table([], list(COLUMNS), 1, kept)
