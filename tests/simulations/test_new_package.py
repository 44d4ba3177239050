# SPDX-License-Identifier: Apache-2.0
"""`fedrec new`: a module of each kind with a template is written, found by its name, and passes its
contract."""

import json
import os
import subprocess
import sys

import pytest

from simulations.cli.components import TEMPLATES
from tests.simulations.helpers import ROOT


@pytest.mark.slow
def test_each_keeps_its_own_contract(fedrec, tmp_path):
    """With the tests that are written, in a separate process."""
    for kind in TEMPLATES:
        code, out, _ = fedrec("new", kind, f"trial-{kind}", "--into", tmp_path)
        assert code == 0 and f'"trial_{kind}:Trial{kind.capitalize()}"' in out
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 30


@pytest.mark.slow
def test_an_attack_of_ones_own_runs_by_its_name(fedrec, tmp_path, tiny_file, monkeypatch):
    assert fedrec("new", "attack", "trial-attack", "--into", tmp_path)[0] == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "trial_attack:TrialAttack"
    arguments = ["attack", name, tiny_file, "--length", 5, "-o", tmp_path / "a", "--json"]
    code, out, err = fedrec(*arguments)
    assert code == 0, err
    found = json.loads(out)
    assert found["options"]["length"] == 5 and 0 <= found["success"]["auc"]["value"] <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["strategi", "mine"], ["unknown kind of component", "did you mean 'strategy'?"]),
        (["sampler", "mine"], ["unknown kind of component", "baseline"]),
        (["strategy", "Mine"], ["invalid component name", "lower-case"]),
        (["strategy", "my--idea"], ["invalid component name"]),
        (["strategy", "class"], ["invalid component name", "Python keyword"]),
        (["strategy", "numpy"], ["is taken", "importable module"]),
    ],
)
def test_the_error_for_a_bad_name_states_the_reason(arguments, words, fedrec, tmp_path):
    code, _, err = fedrec("new", *arguments, "--into", tmp_path)
    assert code == 2 and all(word in err for word in words), err
    assert not any(tmp_path.iterdir())


def test_a_file_is_not_overwritten(fedrec, tmp_path):
    assert fedrec("new", "split", "in-turn", "--into", tmp_path)[0] == 0
    code, _, err = fedrec("new", "step", "in-turn", "--into", tmp_path)
    assert code == 2 and "exists" in err
