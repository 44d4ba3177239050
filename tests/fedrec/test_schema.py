# SPDX-License-Identifier: Apache-2.0
"""Experiments: reading, overrides, validation of all components, resolution, and lossless
writing."""

import tomllib

import pytest

from fedrec.components.registry import DATASET, MODEL, STEP, STRATEGY
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment, from_run_config, load, shipped_experiments
from fedrec.privacy.personal import PersonalNoise

LEAST = {"name": "least", "rounds": 1, "dataset": {"name": "synthetic"}}
ADAM = "flwr.serverapp.strategy:FedAdam"


def refused(*overrides, source=LEAST):
    with pytest.raises(ExperimentError) as caught:
        load(source, overrides)
    return caught.value


@pytest.mark.parametrize("name", sorted(shipped_experiments()))
def test_every_shipped_experiment_loads_by_its_name(name):
    experiment = load(name)
    assert experiment.name == name and experiment == load(shipped_experiments()[name])


def test_resolve_fills_in_every_default():
    experiment = load(LEAST)
    assert experiment.dataset.options["users"] == 600
    assert experiment.model.options["hidden"] == [256, 128, 64, 32]
    assert experiment.step.options["batch-size"] == 32
    assert experiment.strategy.name == "reptile"
    assert experiment.strategy.options == {"server-lr": 1.0, "anneal-after": 0}
    assert experiment.sampler.options == {"cohort": 20}
    assert experiment.evaluation.ks == (5, 10, 20, 30)
    assert experiment.settings(MODEL).embedding == 64
    assert experiment.settings(STEP).learning_rate == 0.1
    assert experiment.resolve() == experiment


def test_a_seed_of_a_components_own_is_the_experiments_unless_it_is_given():
    """It seeds the users' budgets, also in a step within a strategy."""
    dpvae = {"name": "dpvae", "epochs": 1}
    nested = {"name": "two-stage", "stage-one": {"rounds": 1, "step": dpvae}}
    source = {**LEAST, "model": {"name": "vae"}, "step": dpvae, "strategy": nested}
    steps = load(source, ["seed=5"]).steps().values()
    assert [step.options["budget-seed"] for step in steps if step.name == "dpvae"] == [5, 5]
    own = load(source, ["seed=5", "step.budget-seed=0"])
    steps = own.steps().values()
    assert [step.options["budget-seed"] for step in steps if step.name == "dpvae"] == [0, 5]
    drawn = load(source, ["seed=5"]).settings(STEP).requested(7)
    assert (
        drawn
        == PersonalNoise(budget_seed=5).requested(7)
        != own.settings(STEP).requested(7)
        == PersonalNoise(budget_seed=0).requested(7)
    )
    assert load(own.table()) == own


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("seed=7", lambda e: e.seed == 7),
        ("strategy.server-lr=0.5", lambda e: e.settings(STRATEGY).server_lr == 0.5),
        ('strategy.name="fedavg"', lambda e: e.strategy.name == "fedavg"),
        ("strategy.name = fedavg", lambda e: e.strategy.name == "fedavg"),
        (f"strategy.name={ADAM}", lambda e: e.strategy.name == ADAM),
        ("model.hidden=[4, 2]", lambda e: e.settings(MODEL).hidden == (4, 2)),
        ("evaluation.fine-tune={epochs = 3}", lambda e: e.fine_tune_step().options["epochs"] == 3),
        ("engine.nodes=3", lambda e: e.engine.nodes == 3),
        ("title=one = two", lambda e: e.title == "one = two"),
    ],
)
def test_overrides(override, found):
    assert found(load(LEAST, [override]))


DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rounds=100000000000000000000", "wrong value for 'rounds'"),
        ("rounds=1000000", "wrong value for 'rounds'"),
        ("evaluation.ks=[100000000000000000000]", "wrong value for 'evaluation.ks'"),
        ("evaluation.ks=[1000000000]", "wrong value for 'evaluation.ks.0'"),
        ("evaluation.ks=[5, 5]", "wrong value for 'evaluation.ks'"),
        ("model.hidden=[1000000000]", "wrong value for 'model.hidden.0'"),
        ("model.embedding=1000000000", "wrong value for 'model.embedding'"),
        ("privacy={clip-norm=1, noise-multiplier=1, delta=0.9}", "wrong value for 'privacy.delta'"),
        ("privacy={clip-norm=1e-300, noise-multiplier=1}", "wrong value for 'privacy.clip-norm'"),
        (f"title={DEEP}", "'title'... is nested too deeply"),
        (".".join(["a"] * 5_000) + "=1", "invalid override 'a.a."),
        (f"rounds={'9' * 5000}", "wrong value for 'rounds'"),
    ],
    ids=lambda value: value[:40],
)
def test_numbers_and_depths_that_no_run_can_have_are_refused_in_a_few_words(override, problem):
    error = refused(override)
    assert problem in error.problem and len(error.text()) < 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name = 'x'\nrounds = " + "9" * 5000, "is not valid TOML"),
        ("name = 'x'\na = " + "[" * 100_000, "is not valid TOML"),
        ("name = 'x'\ntitle = " + DEEP, "nested too deeply"),
        ("name = 'x'\n" + ".".join(["a"] * 5_000) + " = 1", "nested too deeply"),
    ],
    ids=["digits", "brackets", "lists", "tables"],
)
def test_a_file_with_what_cannot_be_read_is_refused(tmp_path, text, reason):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ExperimentError) as caught:
        load(tmp_path / "x.toml")
    assert reason in caught.value.problem and len(caught.value.text()) < 1000


@pytest.mark.parametrize(
    ("override", "problem", "fix"),
    [
        ("evaluation.evry=2", "unknown key 'evaluation.evry'", "'every'"),
        ("sede=2", "unknown key 'sede'", "'seed'"),
        ("strategy.server-rl=1", "unknown key 'strategy.server-rl'", "'server-lr'"),
        ("step.learning_rat=1", "unknown key 'step.learning_rat'", "'learning-rate'"),
        ("strategy.name=reptil", "unknown strategy 'reptil'", "'reptile'"),
        ("dataset.name=ml-1n", "unknown dataset 'ml-1n'", "'ml-1m'"),
        ("evaluation.fine-tune.epoch=2", "unknown key 'evaluation.fine-tune.epoch'", "'epochs'"),
        ("evaluation.baselines=['eas']", "unknown baseline 'eas'", "'ease'"),
        ("evaluation.every=-1", "wrong value for 'evaluation.every'", "every: Number of rounds"),
        ("strategy.server-lr=0", "wrong value for 'strategy.server-lr'", "alpha2"),
        ("name='Has Space'", "wrong value for 'name'", "Short name"),
        ("rounds='3'", "wrong value for 'rounds'", "Number of training rounds"),
        ("rounds=true", "wrong value for 'rounds'", "Number of training rounds"),
        ("seed", "invalid override 'seed'", "--set"),
        ("a..b=3", "invalid override 'a..b=3'", "--set"),
        ("name.a=3", "cannot apply the override 'name.a=3': 'name' is not a table", "check"),
    ],
)
def test_a_fault_is_named_with_its_full_key_and_a_way_out(override, problem, fix):
    error = refused(override)
    assert error.problem == problem and fix in error.fix
    assert "privrec-synthetic" in refused(source="privrec-syntetic").fix


def test_settings_of_flower_strategies_are_checked_too():
    experiment = load(LEAST, [f"strategy.name={ADAM}", "strategy.beta-1=0.5"])
    assert experiment.settings(STRATEGY) == {"beta_1": 0.5}
    error = refused(f"strategy.name={ADAM}", "strategy.beta-l=0.5")
    assert error.problem == "unknown key 'strategy.beta-l'" and "'beta-1'" in error.fix


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["positive-above=3", "step.learning-rate=1", "dataset.path=/nowhere", "seed=9"],
        [f"strategy.name={ADAM}", "strategy.eta=0.25", "strategy.min-available-nodes=1"],
        [f"seed={2**63 - 1}", 'title="ä \\"quoted\\""'],
    ],
)
def test_toml_and_back_is_the_same_experiment(overrides):
    experiment = load(LEAST, overrides)
    again = load(tomllib.loads(experiment.toml()))
    assert again == experiment and again.digest() == experiment.digest()


def test_digest_tells_experiments_apart():
    overrides = ["seed=1", "rounds=2", "step.epochs=1", "model.hidden=[8]"]
    changed = {load(LEAST, [override]).digest() for override in overrides}
    assert len(changed | {load(LEAST).digest()}) == 5


def test_run_configuration_names_a_file_or_carries_the_whole_experiment(tmp_path):
    (tmp_path / "e.toml").write_text(load(LEAST).toml())
    overridden = load(LEAST, ["seed=4", "strategy.name=fedavg"])
    overrides = "seed=4; strategy={name='fedavg'};"
    named = {"experiment": str(tmp_path / "e.toml"), "overrides": overrides}
    assert from_run_config(named).digest() == overridden.digest()
    whole = from_run_config({"resolved": overridden.model_dump_json(), "experiment": "ignored"})
    assert whole == overridden and whole.digest() == overridden.digest()
    assert isinstance(whole, Experiment) and whole.settings(DATASET).users == 600


def test_another_component_drops_the_settings_of_the_one_before():
    """But engines have the same."""
    engine = load({**LEAST, "engine": {"name": "ray", "path": "blocks"}}, ["engine.name=serial"])
    assert engine.engine.path == "blocks"
    source = {**LEAST, "strategy": {"name": "reptile", "server-lr": 0.5}}
    assert load(source, ["strategy.name=fedavg"]).strategy.options == {}
    other = load(source, [f"strategy.name='{ADAM}'", "strategy.eta=0.2"])
    assert other.strategy.options == {"eta": 0.2}
    assert load(source, ["strategy.name=reptile"]).strategy.options["server-lr"] == 0.5


def test_an_abstract_strategy_and_a_missing_argument_are_named(monkeypatch):
    error = refused("strategy.name='flwr.serverapp.strategy:Strategy'")
    assert "abstract" in error.problem and "aggregate_train" in str(error.got)

    def demanding(self, server_side_secret): ...

    from flwr.serverapp.strategy import FedAdam

    monkeypatch.setattr(FedAdam, "__init__", demanding)
    assert refused(f"strategy.name='{ADAM}'").problem == "missing key 'strategy.server-side-secret'"
