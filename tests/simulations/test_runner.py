# SPDX-License-Identifier: Apache-2.0
"""Runs of experiments from start to end."""

import importlib
import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w

from fedrec.components import registry
from fedrec.data.population import Population
from fedrec.errors import DataError, ExperimentError, RunError
from fedrec.experiment.schema import load
from fedrec.runs.folder import Result, RunFolder
from fedrec.runs.ids import read_ids
from server.callbacks import Callback
from simulations import runner
from simulations.cli import run as command
from tests.runs import assert_close, assert_same_run, parameters_in, resumed
from tests.simulations.helpers import install
from tests.systems import DP_TRANSITIONS, FOLD_IN, SYSTEMS, TRANSITIONS

# Running and resuming experiments.


class Never(Callback):
    def after_round(self, row, seconds):
        raise AssertionError("a round was run")


@pytest.mark.parametrize("baselines", ["[]", "['popularity']"])
def test_missing_data_are_reported_before_any_training(run_tiny, tmp_path, monkeypatch, baselines):
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError) as caught:
        run_tiny("dataset={name='ml-1m'}", f"evaluation.baselines={baselines}", callbacks=[Never()])
    assert "'ml-1m'" in caught.value.problem and "fedrec data" in caught.value.fix
    assert not (tmp_path / "run").exists()


STAGES = (
    "strategy={name='two-stage', main={name='reptile'},"
    " stage-one={rounds=1, step={name='sgd'}, strategy={name='reptile'}}}"
)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (["evaluation.fine-tune.rates={'itm.id'=0.0}"], "evaluation.fine-tune.rates"),
        ([STAGES, "strategy.stage-one.step.rates={'itm.id'=0.0}"], "strategy.stage-one.step.rates"),
        ([STAGES, "strategy.main={name='gram'}"], "no products of items"),
        (["step={name='gram'}"], "'PrivRec' has no products of items"),
        (["step={name='rating-sums'}"], "no item means"),
        (
            [
                "model={name='gpfedrec', embedding=4}",
                "step={name='gpfedrec'}",
                "strategy={name='gpfedrec'}",
                "split={name='leave-one-out'}",
            ],
            "step 'gpfedrec' cannot be fine-tuned",
        ),
        (["positive-above=5.0"], "no client has rows of evaluation.held-out = 'test'"),
    ],
)
def test_settings_of_later_phases_are_checked_before_the_first_round(
    run_tiny, tmp_path, wrong, problem
):
    """Under their own keys, and nothing that would have to be resumed is left."""
    quick = ("rounds=2", "evaluation.every=0", "evaluation.baselines=['popularity']")
    with pytest.raises(ExperimentError) as caught:
        run_tiny(*quick, *wrong, callbacks=[Never()])
    assert problem in caught.value.problem
    assert not (tmp_path / "run").exists()


def test_a_run_can_start_from_a_table_a_file_or_an_experiment(load_tiny, tiny_experiment, tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(load_tiny().toml())
    sources = (tiny_experiment(), file, str(file), load_tiny())
    results = [
        runner.run(source, ["rounds=1"], output=tmp_path / str(i))
        for i, source in enumerate(sources)
    ]
    for result in results[1:]:
        assert result.experiment == results[0].experiment
        pd.testing.assert_frame_equal(result.users, results[0].users)


def test_a_finished_run_is_read_and_not_run_again(run_tiny):
    done = run_tiny()
    again = runner.resume(done.folder, callbacks=[Never()])
    assert again.metrics == done.metrics and again.experiment == done.experiment
    pd.testing.assert_frame_equal(again.rounds, done.rounds)
    pd.testing.assert_frame_equal(again.users, done.users)


def test_a_run_in_use_is_left_alone(run_tiny, tmp_path):
    class Intruder(Callback):
        def after_round(self, row, seconds):
            with pytest.raises(RunError, match="in use"):
                runner.resume(tmp_path / "run")
            return False

    result = run_tiny(callbacks=[Intruder()])
    assert RunFolder(result.folder).status()["state"] == "finished" and len(result.rounds) == 2


def test_a_run_that_counts_as_finished_has_the_ids_of_its_data(run_tiny):
    """A process that is killed after that is not resumed, and `recommend` checks the data by
    them."""

    class Killed(Callback):
        def on_end(self, result):
            assert RunFolder(result.folder).status()["state"] == "finished"
            users, items = read_ids(result.folder) or ((), ())
            assert len(users) == 24 and len(items) == 30

    run_tiny("evaluation.baselines=[]", callbacks=[Killed()])


def test_what_the_machine_decides_is_written_down(load_tiny):
    settled = runner.settle(load_tiny("engine={name='serial', device='auto'}")).engine
    assert settled.nodes == 1 and settled.threads >= 1 and settled.device in ("cpu", "cuda")
    assert runner.settle(load_tiny("engine={name='ray', nodes=7}")).engine.nodes == 7


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        (("rounds=19",), 1),
        (("sampler.cohort=20",), 2),
        (("sampler={name='poisson', cohort=39.5}",), 4),
        (("sampler.cohort=9999",), 16),
        (("sampler={name='full'}",), 16),
        (("engine={name='ray', ray-address='auto', device='cpu'}",), 16),
        (("engine={name='flower', device='cpu'}",), 16),
        (("secure-aggregation={}",), 16),
        (("strategy={name='flwr.serverapp.strategy:FedAvg'}",), 16),
    ],
)
def test_a_long_run_has_a_node_for_8_clients_a_round(load_tiny, monkeypatch, overrides, nodes):
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda process: set(range(16)))
    settings = ("engine={name='ray', device='cpu'}", "rounds=20", *overrides)
    engine = runner.settle(load_tiny(*settings)).engine
    assert (engine.nodes, engine.threads) == (nodes, 1)


def test_a_node_in_this_process_alone_needs_no_ray(run_tiny, monkeypatch):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray is started"))
    assert_same_run(
        run_tiny("engine.nodes=1", output="serial"),
        run_tiny("engine={name='ray', nodes=1, device='cpu'}", output="ray"),
    )


# The demonstration on a few users.

FEW = ("engine.name='serial'", "dataset.users=150", "dataset.items=100", "evaluation.every=0")


@pytest.mark.slow
def test_one_table_of_the_same_users_and_a_report(fedrec, tmp_path, monkeypatch):
    results: list[Result] = []
    run = runner.run

    def small(experiment, **more):
        results.append(run(experiment.table(), FEW, **more))
        return results[-1]

    monkeypatch.setattr(command.runner, "run", small)
    code, printed, _ = fedrec("demo", "-o", tmp_path)
    assert code == 0
    users = {tuple(result.users.index) for result in results if len(result.users)}
    assert len(results) == 5 and len(users) == 1
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(result.experiment.name in text for result in results)
    cells = [[cell.strip() for cell in line.split("│")] for line in printed.splitlines()]
    rows = {line[1]: line[2:] for line in cells if len(line) > 4}
    private = {"private popularity", "DP-PrivRec", "linear, private"}
    for system, *_ in command._ROWS:
        hits, epsilon, *_ = rows[system]
        assert 0 <= float(hits) <= 1 and (epsilon != "-") == (system in private)
        assert epsilon == "-" or float(epsilon) <= 5
    assert "epsilon 5 at delta" in printed


# DP-VAE, and its noise on another model, as whole runs: three engines, an interrupted run, reports,
# cohorts.

COMMON = (
    "model={name='vae', hidden=6, latent=3}",
    "split={name='ratio'}",
    "evaluation.fine-tune={epochs=0}",
    "sampler.cohort=12",
)
MODES = {
    "sound": "step={name='dpvae', participations=2, clip='user', priors={}}",
    "paper": "step={name='dpvae', mode='paper', examples=3, learning-rate=1e-4}",
}


def test_the_papers_mode_reports_no_guarantee_before_and_after(run_tiny, caplog):
    result = run_tiny(*COMMON, MODES["paper"])
    promise = "no finite guarantee: the clip norm comes from private data"
    assert any(
        promise in record.message for record in caplog.records if record.levelname == "WARNING"
    )
    assert sum(promise in line for line in result.privacy) == 1
    assert promise in (result.folder / "log.txt").read_text()
    assert runner.resume(result.folder).privacy == result.privacy
    table = pd.read_csv(result.folder / "epsilons.csv", index_col="client")
    assert np.isinf(table.loc[table["uploads"] > 0, "replace-one"]).all() and len(table) == 24


def test_a_run_ends_when_every_budget_is_spent(run_tiny):
    limited = ("sampler={name='limited', cohort=12, participations=2}", "rounds=9")
    result = run_tiny(*COMMON, "step={name='dpvae', participations=2}", *limited)
    table = pd.read_csv(result.folder / "epsilons.csv")
    assert (table["uploads"] == 2).all() and table["nominal"].nunique() == 24
    np.testing.assert_allclose(table["replace-one"], table["nominal"], rtol=1e-6)
    assert any(line.startswith("0 of 24 users spent more") for line in result.privacy)
    assert result.rounds["num-clients"].sum() == 2 * 24 and result.rounds["num-clients"].min() > 0
    assert RunFolder(result.folder).status() == {"state": "finished", "round": len(result.rounds)}
    assert len(result.rounds) < 9


def test_secure_noise_never_repeats_and_a_repeated_round_counts_again(run_tiny):
    settings = (
        *COMMON,
        "step={name='dpvae', noise='secure', participations=3}",
        "rounds=1",
        "evaluation.every=0",
    )
    one, two = (parameters_in(run_tiny(*settings, output=name).folder) for name in ("one", "two"))
    assert all((one[name] != two[name]).all() for name in one)


def test_a_sampler_that_draws_too_often_gives_a_warning(run_tiny, caplog):
    limited = "sampler={name='limited', cohort=12, participations=2}"
    run_tiny(*COMMON, "step={name='dpvae', participations=2}", limited, output="right")
    assert "devices will refuse" not in caplog.text
    run_tiny(*COMMON, "step={name='dpvae', participations=1}", limited, output="wrong")
    assert "devices will refuse" in caplog.text


def test_secret_cohorts_are_refused(run_tiny):
    with pytest.raises(ExperimentError, match="cannot be counted"):
        run_tiny(
            *COMMON, MODES["sound"], "privacy={clip-norm=1.0, noise-multiplier=1.0, mode='secure'}"
        )


# Federated systems on all engines, and in interrupted runs: the same numbers.

TRIMMED = ("strategy={name='trimmed-mean', cut=0.3}", "rounds=2")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("ray", "flower")]
)
@pytest.mark.parametrize(
    "settings",
    [*SYSTEMS.values(), FOLD_IN, TRANSITIONS, DP_TRANSITIONS, TRIMMED],
    ids=[*SYSTEMS, "fold-in", "transitions", "dp-transitions", "plug-in that sees each update"],
)
def test_an_engine_gives_the_serial_engines_numbers(run_tiny, settings, engine, shared_engine):
    serial = run_tiny(*settings, output="serial")
    found = run_tiny(*settings, f"engine.name={engine}", "engine.nodes=2", output=engine)
    assert_same_run(found, serial, ids=engine != "flower")


REMEMBERING = ("mf", "metamf", "gpfedrec", "fedgnn", "dpvae, sound", "dpsgd")
"""Systems whose server, clients or budgets remember earlier rounds; contracts resume all others."""


@pytest.mark.slow
@pytest.mark.parametrize("system", REMEMBERING)
def test_a_broken_run_ends_as_an_unbroken_one(run_tiny, system):
    """Round 3 is repeated from the checkpoint of round 2; its uploads are the same, and count
    once."""
    settings = (*SYSTEMS[system], "rounds=4", "sampler.cohort=12", "checkpoint.every=2")
    whole = run_tiny(*settings, output="whole")
    assert_same_run(resumed(run_tiny, *settings, after=3), whole)
    if (whole.folder / "epsilons.csv").exists():
        uploads = pd.read_csv(whole.folder / "epsilons.csv")["uploads"]
        assert uploads.sum() == whole.rounds["num-clients"].sum() > 24


# The packages under examples/ install with pip, are listed by their entry points, and their READMEs
# are correct.

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the examples as pip installs them; built from copies, as building leaves files
    behind."""
    import shutil

    folder = tmp_path_factory.mktemp("examples")
    copies = [shutil.copytree(path, folder / path.name) for path in EXAMPLES]
    install(folder / "site", copies)
    return folder / "site"


@pytest.mark.install
@pytest.mark.slow
def test_their_components_are_found_by_name(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    declared = {}
    for path in EXAMPLES:
        for group, names in tomllib.loads((path / "pyproject.toml").read_text())["project"][
            "entry-points"
        ].items():
            declared |= {
                (group.removeprefix("fedrec."), name): target for name, target in names.items()
            }
    assert len(EXAMPLES) == 3 and len(declared) == 6
    kinds = {kind.name: kind for kind in registry.KINDS}
    for (kind, name), target in declared.items():
        found = dict(registry.available(kinds[kind]))[name]
        assert f"{found.__module__}:{found.__qualname__}" == target


# `fedrec synthesise`: the table can be read again, the figures are printed, and errors are
# reported.

QUICK = {
    "embeddings": {"factors": 4, "epochs": 3},
    "attention": {"epochs": 1, "hidden": 4},
    "generator": {"steps": 5},
}


@pytest.fixture
def call(tiny_experiment, tmp_path, fedrec):
    """Runs the command on the tiny experiment with a perturbation: its table, and what `fedrec`
    gives."""

    def call(perturb, *arguments, output="synthetic.csv"):
        table = {**tiny_experiment(), **({"perturb": perturb} if perturb else {})}
        (tmp_path / "tiny.toml").write_text(tomli_w.dumps(table))
        given = (tmp_path / "tiny.toml", "--output", tmp_path / output, *arguments)
        return table, *fedrec("synthesise", *given)

    return call


@pytest.mark.parametrize("output", ["synthetic.csv", "synthetic.parquet"])
def test_the_table_is_what_clients_learn_from(call, tmp_path, output):
    perturb = {"name": "upc-sdg", "replacement-ratio": 0.5, **QUICK}
    table, _, out, _ = call(perturb, output=output)
    found = dict(re.findall(r"^ *([^:\n]+): (\S+)$", out, re.M))
    learned = Population.of(load(table)).perturbed.rows
    columns = {"user": "user", "item": "item", "rating": "rating", "time": "time"}
    dataset = {"name": "table", "path": str(tmp_path / output), **columns}
    del table["perturb"]
    data = Population.of(load({**table, "dataset": dataset})).interactions
    ids = [
        (one.user_ids[one.users].tolist(), one.item_ids[one.items].tolist())
        for one in (data, learned)
    ]
    pairs = [
        sorted(zip(*names, one.ratings, strict=True))
        for names, one in zip(ids, (data, learned), strict=True)
    ]
    assert pairs[0] == pairs[1] and found["training rows"] == str(len(learned))
    kept = float(found["retained, share of the real rows that are in the table"])
    assert 0.3 < kept < 0.7 and {"top-1", "top-10", "paper", "released", "cosine"} <= found.keys()
    assert "no differential privacy" in out


def test_nothing_replaced_is_nothing_to_measure(call):
    _, code, out, _ = call({"name": "random-replacement", "replacement-ratio": 0.0})
    assert code == 0 and "nothing to measure" in out and "nan" not in out
    assert "identified by their profile in the table: " in " ".join(out.split())


def test_a_run_learns_from_synthetic_rows(run_tiny):
    settings = ["perturb.name=upc-sdg", "perturb.embeddings.epochs=2", "perturb.generator.steps=3"]
    one, again = (run_tiny(*settings, output=name) for name in ("one", "again"))
    assert any("no differential privacy" in line for line in one.privacy)
    assert_close(again.parameters, one.parameters)


@pytest.mark.parametrize(
    ("perturb", "output", "words"),
    [
        (None, "a.csv", "has no perturbation"),
        ({"name": "random-replacement"}, "a.txt", "cannot write"),
        ({"name": "random-replacement"}, ".", "cannot write"),
        ({"name": "upc-sdg", "sensitivity": -1}, "a.csv", "perturb.sensitivity"),
        ({"name": "noisy-cooccurrence", "epsilon": 1.0}, "a.csv", "give no ratings"),
    ],
)
def test_faults_are_reported(call, perturb, output, words):
    _, code, _, err = call(perturb, output=output)
    assert code in (2, 3) and words in err and "fix:" in err


def test_who_is_tested_has_a_profile_to_make_synthetic_rows_from(tmp_path):
    """Files as UPC-SDG's authors have them, the last user in the test file alone."""
    for name, shift, users in (("train", 0, 11), ("test", 40, 12)):
        pairs = [(3 * user + shift + n, user) for user in range(users) for n in range(6)]
        lines = [f"{item},{user},A{user},B{item}" for item, user in pairs]
        (tmp_path / f"{name}.csv").write_text("\n".join(["itemID,userID,reviewerID,asin", *lines]))
    table = {
        "name": "clothing",
        "rounds": 1,
        "dataset": {"name": "amazon-upc", "path": str(tmp_path), "verify": False},
        "split": {"name": "published"},
        "sampler": {"name": "fixed-size", "cohort": 4},
        "perturb": {"name": "upc-sdg", "replacement-ratio": 0.5, **QUICK},
    }
    with pytest.raises(DataError, match=r"1 users without one \(11\)"):
        Population.of(load(table))
