# SPDX-License-Identifier: Apache-2.0
"""The audit end to end, on a correct strategy of this file and on broken ones."""

import io
import json

import numpy as np
import pytest

from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.accountant import Charge
from fedrec.privacy.canaries import CanaryPlan
from fedrec.privacy.mechanisms import Banded, Gaussian
from fedrec.rng import Reproducible
from fedrec.runs.folder import RunFolder
from simulations.attacks.audit import _charged_claim, _noisy_plans
from simulations.attacks.base import run_attack
from simulations.attacks.bounds import check_charges
from strategies import base
from tests.simulations.helpers import experiment_on, synthetic

CLIP, COHORT, CANARIES = 0.5, 20, 200
AUDITED = experiment_on(
    synthetic(60, 30, 6, **{"min-interactions": 3}),
    nodes=2,
    name="audited",
    rounds=25,
    model={"name": "privrec", "embedding": 4, "hidden": [4]},
    step={"name": "sgd", "epochs": 1, "learning-rate": 0.01, "batch-size": 64},
    strategy={"name": "reptile", "server-lr": 0.5},
    sampler={"name": "fixed-size", "cohort": COHORT},
    privacy={"clip-norm": CLIP, "noise-multiplier": 1.0, "backend": "pld"},
)


def audit(output, *overrides, table=AUDITED, **settings):
    chosen = {"name": "audit", "canaries": CANARIES, **settings}
    return run_attack(load(table, overrides), chosen, output).figures


def check(found, name):
    return next(check for check in found.runs[0].checks if check.name == name)


@pytest.mark.slow
def test_a_correct_strategy_is_not_refuted_by_canaries_that_test_the_clip(tmp_path):
    found = audit(tmp_path, seeds=2)
    assert found.verdict != "FAIL" and len(found.runs) == 2
    claimed = found.runs[0].claim
    assert (claimed.clip, claimed.denominator) == (CLIP, COHORT)
    assert claimed.noise_multiplier == pytest.approx(1.0)
    assert claimed.sampling_rate == pytest.approx(20 / 248)
    assert check(found, "noise-std").measured == pytest.approx(2 * CLIP / COHORT, rel=0.03)
    assert check(found, "reach").measured == pytest.approx(CLIP / COHORT, rel=0.5)
    told = json.loads((tmp_path / "run-01" / "result.json").read_text())["privacy"]
    assert claimed.epsilon == pytest.approx(told["epsilon"]) and claimed.delta == told["delta"]


@pytest.mark.parametrize("rule", ["", "strategy.anneal-rounds=25"])
def test_what_is_watched_is_what_was_planted_whatever_the_server_rate(tmp_path, rule):
    audit(tmp_path, "privacy.noise-multiplier=0.0", *filter(None, [rule]))
    with np.load(tmp_path / "run-01" / "canaries.npz") as file:
        released = file["main/released"]
    run = RunFolder(tmp_path / "run-01")
    plan = CanaryPlan.parse(run.experiment.step.options["canaries"])
    moved = np.abs(released) > 1e-9
    assert released.shape == (25, CANARIES) and 0.05 < moved.mean() < 0.12
    assert released[moved] == pytest.approx(
        (np.broadcast_to(plan.signs(), moved.shape) * CLIP / COHORT)[moved], rel=1e-3
    )
    assert (moved.sum(axis=1) < COHORT).all() and moved.sum(axis=1).min() > 5


def one_seed(monkeypatch):
    right = Reproducible.gaussian
    monkeypatch.setattr(Reproducible, "gaussian", lambda self, *of: right(self, *of[:2], 1))


def half_the_denominator(monkeypatch):
    right = base.Aggregate
    monkeypatch.setattr(base, "Aggregate", lambda sums, clients, *of: right(sums, clients / 2, *of))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "failed"), [(one_seed, "noise-correlation"), (half_the_denominator, "reach")]
)
def test_broken_ones_fail(tmp_path, monkeypatch, broken, failed):
    """Missing clips and noise: `test_audit_phases`."""
    broken(monkeypatch)
    found = audit(tmp_path)
    assert found.verdict == "FAIL" and not check(found, failed).passed


def test_rounds_that_the_ledger_does_not_hold_are_found(tmp_path, monkeypatch):
    from server.privacy.guard import Guard

    charge = Guard._charge
    monkeypatch.setattr(Guard, "_charge", lambda self, number: number % 2 and charge(self, number))
    monkeypatch.setattr(Guard, "check_charged", lambda *a: None)
    found = audit(tmp_path)
    missing = check(found, "charged-rounds")
    assert (missing.measured, missing.claimed, missing.passed) == (13, 25, False)
    assert found.verdict == "FAIL" and "ledger does not hold" in found.reasons()[-1]


def test_a_repeated_charge_pays_for_its_round_and_raises_the_claim():
    (plan,) = _noisy_plans(load(AUDITED), 248).values()
    event = plan.event("main")
    once = [Charge(number, event) for number in range(1, 26)]
    paid, repeated = (_charged_claim(plan, own, 25) for own in (once, [*once, Charge(3, event)]))
    assert repeated.epsilon > paid.epsilon and repeated.noise_std == paid.noise_std
    assert paid.noise_std == pytest.approx(plan.mean_noise_std)
    assert check_charges(range(1, 26), [*range(1, 26), 3]).passed
    assert not check_charges(range(1, 26), [*range(1, 25), 3]).passed


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("privacy.adjacency=add-remove", "privacy.adjacency"),
        ("privacy.mechanism=laplace", "privacy.mechanism"),
        ("privacy.mode=secure", "privacy.mode"),
        ("privacy.placement=local", "privacy.placement"),
        ("engine.name=flower", "the engine flower"),
        ("devices={examples=9, nightly={}}", "late or unavailable clients"),
    ],
)
def test_what_cannot_be_audited_is_explained(tmp_path, override, problem):
    with pytest.raises(ExperimentError, match=f"does not support {problem}"):
        audit(tmp_path, override)


def test_an_experiment_without_a_claim_needs_one(tmp_path):
    plain = {name: value for name, value in AUDITED.items() if name != "privacy"}
    with pytest.raises(ExperimentError, match="makes no privacy claim"):
        audit(tmp_path, table=plain)


def other_arrays(**arrays):
    held = io.BytesIO()
    np.savez(held, **arrays)
    return held.getvalue()


def recorded(**arrays):
    """A file of releases, right unless changed."""
    right = {
        "rounds": np.arange(1, 4),
        "released": np.zeros((3, CANARIES)),
        "quiet": np.zeros((3, 0)),
        "groups": np.array([""] * CANARIES),
    }
    return other_arrays(**{f"main/{name}": value for name, value in {**right, **arrays}.items()})


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited")
    audit(folder, "rounds=3")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"PK",
        b"no archive at all",
        other_arrays(seen=np.zeros(3)),
        recorded(released=np.zeros((3, CANARIES + 1))),
        recorded(released=np.zeros((3, CANARIES), np.float32)),
        recorded(released=np.array(["x"] * 3)),
        recorded()[:-60],
    ],
    ids=["gone", "empty", "cut", "text", "other array", "other audit", "float32", "words", "tail"],
)
def test_a_damaged_file_of_releases_is_named(kept, content):
    """With the file restored, the same audit is read from the folder."""
    file = kept / "run-01" / "canaries.npz"
    whole = file.read_bytes()
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(RunError, match=r"canaries.npz is damaged(.*\n)*.*audited run") as error:
        audit(kept, "rounds=3")
    assert "audit again" in str(error.value)
    file.write_bytes(whole)
    assert audit(kept, "rounds=3").runs


@pytest.fixture
def file(tmp_path):
    (tmp_path / "audited.toml").write_text(load(AUDITED).toml())
    return tmp_path / "audited.toml"


def test_command_gives_json_and_a_clean_exit(fedrec, file, tmp_path):
    options = ("-o", tmp_path / "out", "--json", "--canaries", 400)
    code, out, _ = fedrec("audit", file, *options, sets=["rounds=10"])
    found = json.loads(out)
    assert code == 0 and found["verdict"] == "PASS" and found["reasons"] == []
    observers = {score["observer"] for score in found["runs"][0]["scores"]}
    assert observers == {"final", "trace", "known"}


@pytest.mark.slow
def test_attack_commands_print_tables_and_json(fedrec, file, tmp_path):
    plain = ["rounds=2", "sampler.cohort=5"]
    arguments = ("--shadows", 4, "-o", tmp_path / "lira", "--epsilon", 1, "-q")
    code, out, _ = fedrec("attack", "lira", file, *arguments, sets=plain)
    assert code == 0 and "balanced accuracy" in out and "DP ceiling" in out and "0.731" in out
    assert json.loads((tmp_path / "lira" / "attack.json").read_text())["options"]["shadows"] == 4
    arguments = ("--shadow-users", 20, "--trees", 10, "-o", tmp_path / "paper", "-q")
    code, out, _ = fedrec("attack", "membership", file, *arguments, "--json", sets=plain)
    found = json.loads(out)
    assert code == 0
    assert found["success"]["members"] == 14
    assert found["options"]["trees"] == 10


CORRELATED = {
    "rounds": 12,
    "sampler": {"name": "min-separation", "cohort": 20, "separation": 4},
    "privacy": {
        "clip-norm": CLIP,
        "noise-multiplier": 2.0,
        "mechanism": {"name": "banded", "bands": 4},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_correlated_noise_is_tested_for_what_it_claims(tmp_path, monkeypatch, broken):
    """Noise that is independent, and accounted as correlated, is found."""
    if broken:
        monkeypatch.setattr(
            Banded, "draw", lambda self, *arguments: Gaussian.draw(self, *arguments)
        )
    found = audit(tmp_path, table={**AUDITED, **CORRELATED}, canaries=600)
    assert (found.verdict == "FAIL") == broken
    claim = found.runs[0].claim
    assert claim.mixing is not None and claim.sampling_rate == 1
    assert check(found, "noise-correlation").passed != broken
    if not broken:
        assert check(found, "noise-std").measured == pytest.approx(claim.noise_std, rel=0.05)
