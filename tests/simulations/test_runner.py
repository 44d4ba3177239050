# SPDX-License-Identifier: Apache-2.0
"""Running and resuming experiments."""

import pandas as pd
import pytest

from fedrec.errors import DataError, ExperimentError, RunError
from fedrec.runs.folder import RunFolder
from server.callbacks.base import Callback
from simulations import runner
from simulations.cli.experiments.finishing import finish
from simulations.study.runs import run_once
from tests.runs import Interrupt, assert_same_run


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
        (
            ["evaluation.fine-tune.rates={'item.id'=0.0, 'item.*'=0.5}"],
            "several patterns of evaluation.fine-tune.rates",
        ),
        (
            ["evaluation.fine-tune.late-parameters=['itm.id']"],
            "evaluation.fine-tune.late-parameters",
        ),
        (
            ["evaluation.fine-tune.private-parameters=['itm.id']"],
            "evaluation.fine-tune.private-parameters",
        ),
        (
            [STAGES, "strategy.stage-one.step.rates={'itm.id'=0.0}"],
            "strategy.stage-one.step.rates",
        ),
        ([STAGES, "step.rates={'itm.id'=0.0}"], "no parameter fits step.rates"),
        ([STAGES, "strategy.main={name='gram'}"], "no products of items"),
        ([STAGES, "strategy.main={name='union', embeddings='itm'}"], "UNION compares"),
        (
            [
                "model={name='gpfedrec', embedding=4}",
                "step={name='gpfedrec'}",
                "strategy={name='gpfedrec'}",
                "split={name='leave-one-out'}",
            ],
            "step 'gpfedrec' are not fine-tuned",
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


def test_a_folder_is_used_for_one_run_only(run_tiny):
    run_tiny("rounds=1")
    with pytest.raises(RunError, match="not empty"):
        run_tiny("rounds=1")


def test_a_run_in_use_is_left_alone(run_tiny, tmp_path):
    class Intruder(Callback):
        def after_round(self, row, seconds):
            with pytest.raises(RunError, match="in use"):
                runner.resume(tmp_path / "run")
            return False

    result = run_tiny(callbacks=[Intruder()])
    assert RunFolder(result.folder).status()["state"] == "finished" and len(result.rounds) == 2


def test_a_damaged_checkpoint_costs_one_round_and_nothing_else(run_tiny, tmp_path):
    whole = run_tiny("rounds=4", output="whole")
    with pytest.raises(KeyboardInterrupt):
        run_tiny("rounds=4", callbacks=[Interrupt(3)])
    newest = tmp_path / "run" / "checkpoints" / "round-000003.npz"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert_same_run(runner.resume(tmp_path / "run"), whole)
    assert "damaged" in (tmp_path / "run/log.txt").read_text()


def test_what_the_machine_decides_is_written_down(load_tiny):
    settled = runner.settle(load_tiny("engine={name='serial', device='auto'}")).engine
    assert settled.nodes == 1 and settled.threads >= 1 and settled.device in ("cpu", "cuda")
    assert runner.settle(load_tiny("engine={name='ray', nodes=7}")).engine.nodes == 7


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        (("sampler.cohort=31",), 1),
        (("sampler.cohort=64",), 2),
        (("sampler={name='poisson', cohort=159.5}",), 4),
        (("sampler.cohort=9999",), 16),
        (("sampler={name='full'}",), 16),
        (("engine={name='ray', ray-address='auto', device='cpu'}",), 16),
        (("engine={name='flower', device='cpu'}",), 16),
        (("secure-aggregation={}",), 16),
        (("strategy={name='flwr.serverapp.strategy:FedAvg'}",), 16),
    ],
)
def test_a_cohort_has_a_node_for_32_of_its_clients(load_tiny, monkeypatch, overrides, nodes):
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda process: set(range(16)))
    engine = runner.settle(load_tiny("engine={name='ray', device='cpu'}", *overrides)).engine
    assert (engine.nodes, engine.threads) == (nodes, 1)


def test_a_run_goes_on_with_its_own_nodes(load_tiny, tmp_path):
    experiment = load_tiny("engine={name='serial', device='cpu'}")
    three = load_tiny("engine={name='serial', device='cpu', nodes=3}")
    made = runner.run(three, output=tmp_path / "run")
    assert run_once(experiment, tmp_path / "run").path == made.folder
    assert finish(experiment, tmp_path / "run", True, go_on=True).experiment.engine.nodes == 3


def test_a_node_in_this_process_alone_needs_no_ray(run_tiny, monkeypatch):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray is started"))
    assert_same_run(
        run_tiny("engine.nodes=1", output="serial"),
        run_tiny("engine={name='ray', nodes=1, device='cpu'}", output="ray"),
    )
