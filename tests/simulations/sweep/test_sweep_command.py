# SPDX-License-Identifier: Apache-2.0
"""`fedrec sweep` on the command line."""

import pytest


def test_a_sweep_prints_a_table_and_is_resumed_by_its_folder(fedrec, tiny_file, tmp_path):
    folder = tmp_path / "sweep"
    vary = ("--vary", "strategy.server-lr=[0.1, 1.0]")
    code, out, err = fedrec("sweep", tiny_file, *vary, "-o", folder)
    assert code == 0 and "server-lr" in out and "No setting was selected" in out
    assert "run 2/2" in err and "left" in err
    lines = err.splitlines()  # before the first run ends
    ended = next(place for place, line in enumerate(lines) if line.startswith("run 1/2"))
    assert "0/2 runs are done" in lines[:ended]
    assert any(line.startswith("0/2 runs, ") and "round 0/" in line for line in lines[:ended])
    assert out.splitlines()[-1] == str(folder)
    again, second, err = fedrec("resume", folder)
    assert again == 0 and second == out and "run 1/2" not in err
    code, out, _ = fedrec("compare", folder)
    assert code == 0 and "server-lr=0.1" in out and "server-lr=1" in out
    code, out, _ = fedrec("report", folder)
    assert code == 0 and "server-lr=0.1" in (folder / "report.html").read_text("utf-8")


def test_at_least_one_worker_is_needed(fedrec, tiny_file):
    code, _, err = fedrec("sweep", tiny_file, "--workers", 0)
    assert code == 2 and "'--workers': 0 is not in the range x>=1" in err


def test_the_spread_in_a_sweeps_table_is_named(fedrec, tiny_file, tmp_path):
    ks = ("--set", "evaluation.ks=[10]", "--set", 'evaluation.baselines=["popularity"]')
    for seeds, named in ((1, False), (2, True)):
        folder = tmp_path / f"sweep-{seeds}"
        code, out, _ = fedrec("sweep", tiny_file, "--seeds", seeds, *ks, "-o", folder)
        assert code == 0 and ("+-: standard deviation over seeds" in out) is named
    code, out, _ = fedrec("compare", folder)
    assert code == 0 and "± sd over seeds" in out and "t over seeds, Holm" in out


def test_a_sweep_without_a_finished_run_is_not_reported(fedrec, tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    code, _, err = fedrec("report", tmp_path)
    assert code != 0 and "no finished run" in err


@pytest.mark.slow
def test_a_varied_key_whose_last_word_is_a_metric_has_its_full_name(fedrec, tiny_file, tmp_path):
    private = '{clip-norm=1.0, epsilon=3.0, backend="pld"}'
    code, out, _ = fedrec(
        *("sweep", tiny_file, "--set", f"privacy={private}", "-v", "privacy.epsilon=[3.0, 9.0]"),
        *("-o", tmp_path / "sweep"),
    )
    heads = next(line for line in out.splitlines() if "setting" in line)
    assert code == 0 and "privacy.epsilon" in heads and heads.count("epsilon") == 2


def test_a_dry_run_prints_the_settings_and_runs_nothing(fedrec, tiny_file, tmp_path):
    code, out, _ = fedrec(
        "sweep", tiny_file, "-v", "rounds=[1, 2]", "--seeds", 3, "--dry-run", "-o", tmp_path / "s"
    )
    assert code == 0 and "2 settings (grid), 3 seeds: 6 runs" in out and "rounds=2" in out
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-v", "strategy.server-lrr=[1]"], "did you mean 'server-lr'"),
        (["-v", "rounds=[1]", "--choose", "hits@5"], "selected by test users"),
        (["--seeds", "0"], "1 to 10000"),
        (["--seeds", "1000000000", "--dry-run"], "1 to 10000"),
        (["-v", "rounds=[1]", "--trials", "1000000000", "--dry-run"], "1 to 10000"),
        (["-v", f"rounds=[{'9' * 5000}]"], "cannot read"),
        (["--trials", "5"], "nothing is varied"),
        (["-v", "rounds=[1]", "--optimise", "a", "--choose", "b"], "both --optimise and --choose"),
    ],
)
def test_bad_input_gives_an_error_with_a_fix(fedrec, tiny_file, tmp_path, arguments, words):
    code, out, err = fedrec("sweep", tiny_file, *arguments, "-o", tmp_path / "sweep")
    assert code == 2 and words in " ".join(err.split()) and "Traceback" not in err + out
    assert not (tmp_path / "sweep").exists()
