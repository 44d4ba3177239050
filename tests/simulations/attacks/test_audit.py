# SPDX-License-Identifier: Apache-2.0
"""The audit end to end, on a correct strategy of this file and on broken ones."""

import dataclasses
import io
import json

import numpy as np
import pytest

from fedrec.attacks.audit import check_charges
from fedrec.attacks.canaries import CanaryPlan
from fedrec.config import Config
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.accountant import Charge
from fedrec.privacy.mechanisms import Banded, Gaussian
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from simulations.attacks.audit import _charged_claim, _noisy_plans
from simulations.attacks.base import run_attack
from strategies.base import CohortStrategy
from tests.simulations.helpers import experiment_on, synthetic

CLIP, STD, COHORT, CANARIES = 0.5, 0.05, 20, 200


class NoisyConfig(Config):
    std: float = STD
    denominator: float = COHORT
    server_lr: float = 1.0
    one_seed: bool = False


class Noisy(CohortStrategy):
    """Mean over a fixed number, with noise; clients clip, and the canaries of these tests satisfy
    the clip norm."""

    Config = NoisyConfig
    config: NoisyConfig

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.round = 0

    def apply(self, theta, aggregate):
        self.round += 1
        random = stream(5, "test-noise", 0 if self.config.one_seed else self.round)
        mean = {name: total / self.config.denominator for name, total in aggregate.total().items()}
        noisy = {
            name: value + random.normal(0, self.config.std, value.shape)
            for name, value in mean.items()
        }
        return {name: value + self.config.server_lr * noisy[name] for name, value in theta.items()}


class Weighted(Noisy):
    weighting = "examples"

    def apply(self, theta, aggregate):
        total = {
            name: value * COHORT / aggregate.weight for name, value in aggregate.total().items()
        }
        return super().apply(theta, dataclasses.replace(aggregate, changes=total))


AUDITED = experiment_on(
    synthetic(60, 30, 6, **{"min-interactions": 3}),
    nodes=2,
    name="audited",
    rounds=25,
    model={"name": "privrec", "embedding": 4, "hidden": [4]},
    step={"name": "sgd", "epochs": 1, "learning-rate": 0.01, "batch-size": 64},
    strategy={"name": "test_audit:Noisy"},
    sampler={"name": "fixed-size", "cohort": COHORT},
)


def audited(*overrides):
    return load(AUDITED, overrides)


def run_audit(experiment, output, **settings):
    """Without a claim in the settings, that of the experiment's ledger."""
    chosen = {"name": "audit", "canaries": CANARIES, **settings}
    return run_attack(experiment, chosen, output).figures


def audit(output, *overrides, std=STD, **settings):
    claim = {"clip": CLIP, "noise-std": std, "overshoot": 1.0}
    return run_audit(audited(*overrides), output, **{**claim, **settings})


def check(found, name):
    return next(check for check in found.runs[0].checks if check.name == name)


@pytest.mark.slow
def test_a_correct_strategy_is_not_refuted(tmp_path):
    found = audit(tmp_path, "strategy.server-lr=0.5", seeds=2)
    assert found.verdict != "FAIL" and len(found.runs) == 2
    assert found.runs[0].claim.sampling_rate == pytest.approx(20 / 248)
    assert found.runs[0].claim.epsilon == pytest.approx(found.runs[0].claim.known_epsilon(25))
    assert check(found, "noise-std").measured == pytest.approx(STD, rel=0.03)
    assert check(found, "reach").measured == pytest.approx(CLIP / COHORT, rel=0.5)


def test_what_is_watched_is_what_was_planted(tmp_path):
    audit(tmp_path, "strategy.std=0.0", std=0.0)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "options", "failed"),
    [
        (["strategy.std=0.025"], {}, "noise-std"),
        (["strategy.one-seed=true"], {}, "noise-correlation"),
        ([], {"overshoot": 10.0}, "reach"),
        (["strategy.denominator=10"], {}, "reach"),
        (["strategy.name=test_audit:Weighted"], {"canaries": 40}, "reach"),
    ],
    ids=["half the noise", "one seed", "no clip", "wrong denominator", "weights"],
)
def test_broken_ones_fail(tmp_path, overrides, options, failed):
    found = audit(tmp_path, *overrides, **options)
    assert found.verdict == "FAIL" and not check(found, failed).passed


PRIVATE = {
    "strategy": {"name": "reptile", "server-lr": 0.5},
    "privacy": {"clip-norm": CLIP, "noise-multiplier": 1.0, "backend": "pld"},
}


@pytest.mark.slow
def test_our_own_private_training_passes_with_canaries_that_test_the_clip(tmp_path):
    found = run_audit(load({**AUDITED, **PRIVATE}), tmp_path)
    assert found.verdict != "FAIL"
    claimed = found.runs[0].claim
    assert (claimed.clip, claimed.denominator) == (CLIP, COHORT)
    assert claimed.noise_multiplier == pytest.approx(1.0)
    assert check(found, "noise-std").measured == pytest.approx(2 * CLIP / COHORT, rel=0.03)
    told = json.loads((tmp_path / "run-01" / "result.json").read_text())["privacy"]
    assert claimed.epsilon == pytest.approx(told["epsilon"]) and claimed.delta == told["delta"]


@pytest.mark.slow
def test_a_server_rate_that_falls_is_taken_out_of_what_is_watched(tmp_path):
    """The releases do not depend on the server's rule, so they are the same up to rounding: those
    of a private run, and those that are computed from the parameters of another."""
    own = {**AUDITED, "rounds": 5}
    rule = {"name": "reptile", "server-lr": 0.5}
    for privacy in ({"privacy": PRIVATE["privacy"]}, {}):
        claim = {} if privacy else {"clip": CLIP, "noise-std": 0.0}
        released = []
        for falling in ({}, {"anneal-rounds": 5}):
            folder = tmp_path / f"{len(privacy)}{len(falling)}"
            experiment = load({**own, **privacy, "strategy": {**rule, **falling}})
            run_audit(experiment, folder, overshoot=1.0, **claim)
            with np.load(folder / "run-01" / "canaries.npz") as file:
                released.append(file["main/released"])
        assert released[1] == pytest.approx(released[0], abs=1e-4 * np.abs(released[0]).max())
        assert np.abs(released[0]).max() > CLIP / COHORT / 2


def test_rounds_that_the_ledger_does_not_hold_are_found(tmp_path, monkeypatch):
    from server.privacy.guard import Guard

    charge = Guard._charge
    monkeypatch.setattr(Guard, "_charge", lambda self, number: number % 2 and charge(self, number))
    monkeypatch.setattr(Guard, "check_charged", lambda *a: None)
    found = run_audit(load({**AUDITED, **PRIVATE}), tmp_path)
    missing = check(found, "charged-rounds")
    assert (missing.measured, missing.claimed, missing.passed) == (13, 25, False)
    assert found.verdict == "FAIL" and "ledger does not hold" in found.reasons()[-1]


def test_a_repeated_charge_pays_for_its_round_and_raises_the_claim():
    (plan,) = _noisy_plans(load({**AUDITED, **PRIVATE}), 248).values()
    event = plan.event("main")
    once = [Charge(number, event) for number in range(1, 26)]
    paid, repeated = (_charged_claim(plan, own, 25) for own in (once, [*once, Charge(3, event)]))
    assert repeated.epsilon > paid.epsilon and repeated.noise_std == paid.noise_std
    assert paid.noise_std == pytest.approx(plan.mean_noise_std)
    assert check_charges(range(1, 26), [*range(1, 26), 3]).passed
    assert not check_charges(range(1, 26), [*range(1, 25), 3]).passed


@pytest.mark.parametrize(
    "change",
    [{"mechanism": "laplace"}, {"mode": "secure"}, {"placement": "local"}],
    ids=lambda change: next(iter(change)),
)
def test_claims_that_canaries_cannot_test_are_explained(change):
    private = {**PRIVATE, "privacy": {**PRIVATE["privacy"], **change}}
    with pytest.raises(ExperimentError, match=f"privacy.{next(iter(change))}"):
        _noisy_plans(load({**AUDITED, **private}), 100)


def test_an_experiment_without_a_claim_needs_one(tmp_path):
    with pytest.raises(ExperimentError, match="makes no privacy claim"):
        run_audit(audited(), tmp_path)


@pytest.mark.slow
def test_a_claim_far_below_the_truth_is_refuted_by_a_bound(tmp_path):
    found = audit(tmp_path, "strategy.std=0.001", epsilon=1.0)
    assert found.runs[0].epsilon_verdict == "FAIL"
    assert any("lower bound" in reason and "final" in reason for reason in found.reasons())


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
    with pytest.raises(RunError, match="does not contain the releases of an audited run") as error:
        audit(kept, "rounds=3")
    assert "audit again" in str(error.value)
    file.write_bytes(whole)
    assert audit(kept, "rounds=3").runs


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("engine.name=flower", "the engine flower"),
        ("devices={examples=9, nightly={}}", "late or unavailable clients"),
        ("sampler.name=test_audit:Odd", "no known sampling rate"),
        (
            (
                "strategy={name='two-stage', stage-one={rounds=3, strategy={name='reptile',"
                " server-lr=5.0}}}"
            ),
            "several phases",
        ),
        ("strategy={name='popularity-start'}", "several phases"),
        ("strategy={name='reptile', anneal-rounds=24}", "rate of 0"),
    ],
)
def test_what_cannot_be_audited_is_explained(tmp_path, override, problem):
    with pytest.raises(ExperimentError, match=problem):
        audit(tmp_path, override)


from server.samplers import Sampler  # noqa: E402


class Odd(Sampler):
    """A sampler without a known sampling rate."""

    def draw(self, random):
        return self.clients[:5]


@pytest.fixture
def file(tmp_path):
    (tmp_path / "audited.toml").write_text(load(AUDITED).toml())
    return tmp_path / "audited.toml"


AUDIT = ("--clip", CLIP, "--noise-std", STD, "--canaries", CANARIES)


def test_command_gives_json_and_a_clean_exit(fedrec, file, tmp_path):
    more = ("--overshoot", 1, "-o", tmp_path / "out", "--json", "--canaries", 400)
    code, out, _ = fedrec("audit", file, *AUDIT, *more, sets=["rounds=10"])
    found = json.loads(out)
    assert code == 0 and found["verdict"] == "PASS" and found["reasons"] == []
    observers = {score["observer"] for score in found["runs"][0]["scores"]}
    assert observers == {"final", "trace", "known"}


@pytest.mark.slow
def test_attack_commands_print_tables_and_json(fedrec, file, tmp_path):
    plain = ["strategy.name=reptile", "rounds=2", "sampler.cohort=5"]
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
    "strategy": {"name": "reptile", "server-lr": 0.5},
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
    found = run_audit(load({**AUDITED, **CORRELATED}), tmp_path, canaries=600)
    assert (found.verdict == "FAIL") == broken
    claim = found.runs[0].claim
    assert claim.mixing is not None and claim.sampling_rate == 1
    assert check(found, "noise-correlation").passed != broken
    if not broken:
        assert check(found, "noise-std").measured == pytest.approx(claim.noise_std, rel=0.05)
