# SPDX-License-Identifier: Apache-2.0
"""The command line."""

import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import tomllib

import click
import pytest
import typer

from fedrec.components.registry import KINDS, STRATEGY, available_names
from fedrec.experiment.schema import Experiment, load
from fedrec.privacy.accounting.accountant import Accountant, Ledger
from simulations import cli
from simulations.cli.run import print_table

# The command line: valid input works; errors state what was expected, what was found, and how to
# fix it.


def test_run_prints_a_table_and_writes_flat_metrics(fedrec, tiny_file, tmp_path):
    sets = ["evaluation.ks=[5, 10]", "evaluation.baselines=['popularity', 'ease']"]
    code, out, _ = fedrec("run", tiny_file, "-o", tmp_path / "run", "--seed", 3, sets=sets)
    assert code == 0
    assert "hits@10" in out and "popularity" in out and "ease" in out
    assert str(tmp_path / "run") in out.replace("\n", "")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for metrics in (
        result["metrics"],
        result["baselines"]["popularity"],
        result["baselines"]["ease"],
    ):
        assert {"hits@5", "hits@10", "ndcg@10", "recall@10", "precision@10", "mrr"} <= set(metrics)
        assert all(isinstance(value, float) for value in metrics.values())
    assert result["seed"] == 3


@pytest.mark.parametrize(("output", "words"), [("a\0b", "embedded null"), ("file/run", "file")])
def test_an_output_that_no_system_allows_is_refused(fedrec, tiny_file, tmp_path, output, words):
    (tmp_path / "file").touch()
    code, out, err = fedrec("run", tiny_file, "-o", f"{tmp_path}/{output}")
    assert code in (3, 4) and words in err and "Traceback" not in out + err


@pytest.mark.parametrize("command", [("run", "x"), ("data", "split", "x")])
def test_an_empty_output_is_not_the_current_folder(fedrec, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, _, err = fedrec(*command, "--output", "")
    assert code == 2 and "the path of --output is empty" in err and not [*tmp_path.iterdir()]


NOWHERE = "dataset={name='ml-1m',path='/nowhere/ml-1m'}"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("run tiny.toml -s strategy.server-lrr=1", 2, ["server-lrr", "did you mean 'server-lr'"]),
        ("run tiny.toml -s rounds='many'", 2, ["'rounds'", "valid integer", "'many'"]),
        ("run tiny.toml --engine rai", 2, ["engine.name", "'serial', 'ray' or 'flower'"]),
        ("run tiny.toml -s engine.device=cuda:7", 6, ["cuda:7", "engine.device=cpu"]),
        ("run tiny.toml -s rounds", 2, ["key=value"]),
        (f"run tiny.toml -s {NOWHERE}", 3, ["/nowhere/ml-1m", "fedrec data fetch ml-1m"]),
        ("run privrec-ml1", 2, ["did you mean 'privrec-ml1m'"]),
        ("run broken.toml", 2, ["broken.toml", "line 1"]),
        ("resume .", 4, ["is not a run folder", "run.json"]),
        ("list strategys_", 2, ["did you mean 'strategy'"]),
        ("list step sgdd", 2, ["did you mean 'sgd'"]),
        ("list no-such-kind noisy", 2, ["no-such", "expected"]),
        ("list experiment privrec-ml1", 2, ["did you mean 'privrec-ml1m'"]),
        ("data fetch frappe", 3, ["fedrec data import frappe PATH"]),
    ],
)
@pytest.mark.usefixtures("tiny_file")
def test_bad_input_gives_an_error_with_a_fix(fedrec, tmp_path, monkeypatch, command, code, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("name = \n")
    status, out, err = fedrec(*command.split())
    assert status == code and not out and "None" not in err and "Traceback" not in err
    assert all(word in " ".join(err.split()) for word in ["error:", *words])


def test_list_in_a_pipe_is_one_line_an_entry(fedrec):
    code, out, _ = fedrec("list")
    entries = {tuple(line.split()[:2]): line for line in out.splitlines()}
    assert code == 0 and len(entries) == len(out.splitlines())
    assert {kind for kind, _ in entries} == {*(kind.name for kind in KINDS), "experiment"}
    line = entries["strategy", "reptile"]
    assert line.rstrip().endswith("strategies/sums.py") and "eq. 6" in line
    _, one, _ = fedrec("list", "strategy")
    assert [line.split()[1] for line in one.splitlines()] == available_names(STRATEGY)


def test_data_are_listed_and_described(fedrec):
    assert "synthetic" in fedrec("data", "list")[1]
    code, out, _ = fedrec("data", "info", "synthetic")
    assert code == 0 and out.startswith("synthetic: 600 users, 400 items")
    assert "user feature gender" in out and "fingerprint" in out


def test_help_imports_nothing_heavy():
    heavy = {"torch", "ray", "flwr", "pandas", "numpy", "scipy", "pydantic", "autodp"}
    script = (
        "import sys\nsys.argv = ['fedrec', '--help']\nfrom simulations.cli"
        " import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print(sorted({heavy} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("sign", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_leaves_a_resumable_run_and_prints_the_command(tiny_file, tmp_path, sign):
    run, told = tmp_path / "run", tmp_path / "stderr.txt"
    line = ["run", str(tiny_file), "-o", str(run), "--set", "rounds=100000"]

    def command():
        os.dup2(os.open(told, os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = sys.__stderr__  # not what pytest captures
        sys.argv = ["fedrec", *line, "--set", "evaluation.every=0"]
        cli.main()

    process = multiprocessing.get_context("fork").Process(target=command)
    process.start()
    deadline = time.monotonic() + 60
    while not list(run.glob("checkpoints/*.npz")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, getattr(signal, sign))
    process.join(60)
    err = told.read_text()
    assert process.exitcode == 130
    assert f"fedrec resume {run}" in err and "Traceback" not in err
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"


def test_a_finished_run_is_extended_and_the_next_commands_are_named(fedrec, tiny_file, tmp_path):
    run = tmp_path / "run"
    _, _, err = fedrec("run", tiny_file, "-o", run)
    assert "Next:" in err and f"fedrec report {run}" in err
    code, _, err = fedrec("run", tiny_file, "-o", run)
    assert code == 4 and "not empty" in err and f"fedrec resume {run}" in err
    code, out, _ = fedrec("resume", run, "--set", "rounds=3")
    assert code == 0 and "3 rounds" in out


def test_one_round_in_ten_gets_a_line_where_no_terminal_is(fedrec, tiny_file, tmp_path):
    _, _, err = fedrec("run", tiny_file, "-o", tmp_path / "run", "--set", "rounds=23")
    told = [line.split()[1] for line in err.splitlines() if line.startswith("round ")]
    assert told == ["1/23", "10/23", "20/23", "23/23"]


def test_list_of_one_component_shows_its_settings(fedrec):
    code, out, _ = fedrec("list", "step", "sgd")
    assert code == 0 and "learning-rate = 0.1    (number, > 0)" in out and "E2 in PrivRec" in out
    code, out, _ = fedrec("list", "attack", "lira")
    assert code == 0 and "shadows = " in out
    code, out, _ = fedrec("list", "experiment", "privrec-ml1m")
    assert code == 0 and load("privrec-ml1m") == Experiment.parse(tomllib.loads(out))


def test_arguments_have_their_help_texts_once():
    command, pages = typer.main.get_command(cli.app), []

    def visit(one, path):
        pages.append(one.get_help(click.Context(one, info_name=path)))
        for name in one.list_commands(click.Context(one)) if isinstance(one, click.Group) else ():
            visit(one.get_command(click.Context(one), name), f"{path} {name}")

    visit(command, "fedrec")
    (new,) = [page for page in pages if page.startswith("Usage: fedrec new ")]
    assert new.count("Name of the component, such as my-idea, which is my_idea:MyIdea.") == 1
    assert len(pages) > 30 and not any("\\[" in page for page in pages)
    bare = [page for page in pages if re.search(r"\n  \[?[A-Z_]+\]?(\.\.\.)?  \[required\]", page)]
    assert not bare, bare[0]


def test_options_of_settings_have_their_meaning_range_and_errors(fedrec, tiny_file):
    _, out, _ = fedrec("privacy", "epsilon", "--help")
    words = " ".join(out.split())
    assert "--clients INTEGER Clients that may be drawn (N)." in words and "[>= 1]" in words
    for value in ("0", "1.5", "many", "1000000000"):
        code, _, err = fedrec("run", tiny_file, sets=[f"engine.nodes={value}"])
        assert code == 2 and "'engine.nodes'" in err and value in err
    code, out, _ = fedrec("privacy", "epsilon", "--clients", 10, "--cohort", 2, "--rounds", 1,
                          "--noise-multiplier", ".5", "--json")  # fmt: skip
    assert code == 0 and json.loads(out)["noise_multiplier"] == 0.5


def test_commands_are_listed_in_groups_and_without_one_it_says_how_to_start(fedrec):
    _, out, _ = fedrec("--help")
    heads = re.findall(r"\n([A-Z][a-z ]+):\n", out.partition("Options:")[2])
    assert heads[0] == "Run" and "Privacy" in heads and "Commands" not in heads
    listed = re.findall(r"\n  ([a-z]+)  ", out.partition("\nRun:")[2])
    assert sorted(listed) == sorted(typer.main.get_command(cli.app).list_commands(None))
    code, out, _ = fedrec()
    assert code == 0 and {line.split()[1] for line in out.splitlines()[:4]} <= set(listed)


def test_a_warning_is_printed_once_a_command(capsys):
    logger = logging.getLogger("fedrec")
    with cli._warnings_shown():
        for text in ("one", "two", "one"):
            logger.warning(text)
        logger.info("three")
    assert capsys.readouterr().err.splitlines() == ["warning: one", "warning: two"]


# `fedrec privacy`: one JSON object, a table with a sentence, explanations, and errors without a
# traceback.

ROUNDS = ("--clients", 4800, "--cohort", 30, "--rounds", 1000, "--delta", 1e-5)
ONE = (*ROUNDS, "--noise-multiplier", 1)
MANY = (*ONE, "--rounds", 10**9, "--sampler", "scheduled")
EPSILON = ("privacy", "epsilon", *ONE)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", 1.318277),
        ("--sampler fixed-size --adjacency replace-one --backend autodp", 2.158129),
        ("--backend pld", 1.318277),
        ("--sampler poisson --adjacency add-remove --backend autodp", 1.410738),
        ("--sampler poisson --adjacency add-remove --backend pld", 1.099601),
        ("--backend paper --delta 1e-6", 16.6081),
        ("--delta 0", "inf"),
    ],
)
def test_epsilon_is_one_json_object(fedrec, options, expected):
    code, out, err = fedrec(*EPSILON, *options.split(), "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert (code, err) == (0, "")
    near = expected if expected == "inf" else pytest.approx(expected, rel=1e-4)
    assert found["epsilon"] == near
    assert found["cohort"] == 30 and found["caveats"]
    assert found["attack_epsilon"] == pytest.approx(1.099601, rel=1e-3) or "--delta" in options


def test_epsilon_as_a_table_with_a_sentence(fedrec):
    code, out, _ = fedrec(*EPSILON, "--delta", 1e-3)
    assert code == 0 and "right at most" in out and "delta 0.001 is above 1/N" in out


def test_calibrated_noise_gives_back_the_target(fedrec):
    shared = (*ROUNDS, "--backend", "pld", "--json")
    code, out, _ = fedrec("privacy", "calibrate", "--epsilon", 2, *shared)
    z = json.loads(out)["noise_multiplier"]
    assert code == 0 and 0.5 < z < 1
    _, out, _ = fedrec("privacy", "epsilon", "--noise-multiplier", z, *shared)
    assert 1.999 <= json.loads(out)["epsilon"] <= 2.0


def test_an_experiment_is_explained(fedrec):
    settings = ("privacy.clip-norm=1", "privacy.noise-multiplier=2", "rounds=10")
    code, out, _ = fedrec("privacy", "explain", "privrec-synthetic", sets=settings)
    assert code == 0 and "from all 2800 clients" in out and "server is trusted" in out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("epsilon", *ROUNDS, "--noise-multiplier", "nan"), "noise-multiplier"),
        (("epsilon", *ROUNDS, "--noise-multiplier", "1e30"), "from 1e-09 to 1e+09"),
        (("epsilon", *ONE, "--clients", 29), "1 to 29"),
        (("epsilon", *ONE, "--cohort", 2.5), "whole number"),
        (("epsilon", *ONE, "--sampler", "poisson"), "no privacy bound is proven"),
        (("calibrate", *ROUNDS, "--epsilon", 1, "--backend", "paper"), "paper's arithmetic"),
        (
            ("calibrate", *ROUNDS, "--epsilon", 0.01, "--backend", "autodp"),
            "target epsilon is not reachable",
        ),
        (("epsilon", *MANY, "--mechanism", "banded"), "at most 1,000,000 rounds"),
        (("explain", "privrec-synthetic"), "no differential privacy"),
        (("epsilon", "--clients", 9), "missing key 'cohort'"),
    ],
    ids=str,
)
def test_bad_input_is_explained(fedrec, arguments, fault):
    code, out, err = fedrec("privacy", *arguments)
    assert (
        code == 2 and out == "" and fault in err and "expected:" in err and "Traceback" not in err
    )


def test_a_private_run_prints_at_most_eight_lines_below_its_table(run_tiny, capsys):
    """The guarantee first, and what all private systems of the table cost together."""
    own = "evaluation.baselines=['popularity', {name='dp-gram', epsilon=5.0}]"
    result = run_tiny("rounds=2", "privacy={clip-norm=1.0, epsilon=5.0}", own)
    print_table(result)
    below = capsys.readouterr().out.rpartition("\u2518")[2].strip().splitlines()
    assert len(below) <= 8
    assert below[0].startswith("epsilon 5 at delta 1e-05 for all data of a user (replace-one) is")
    ledgers = [result.folder / "privacy.jsonl", *result.folder.glob("baselines/*/privacy.jsonl")]
    together = Accountant("pld")
    for charge in (charge for ledger in ledgers for charge in Ledger(ledger).charges):
        together.step(charge.event)
    assert len(ledgers) == 3
    assert f"cost epsilon {together.epsilon(1e-5).epsilon:.4g} at delta 1e-05" in below[1]
    assert "See the report" in below[-1]
    assert any(line.startswith("Not accounted") for line in result.privacy)


def test_all_studies_of_a_paper_are_written_below_one_folder(fedrec, monkeypatch, tmp_path):
    paths = []
    monkeypatch.setattr(cli.studies, "_reproduce", lambda study, path, *_: paths.append(path) or {})
    code, *_ = fedrec("reproduce", "privrec", "-o", tmp_path)
    assert code == 0 and len(set(paths)) > 1 and {path.parent for path in paths} == {tmp_path}
