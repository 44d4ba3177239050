# SPDX-License-Identifier: Apache-2.0
"""The declaration of the bench: an experiment or a reason for each cell, equal budgets, and a
protocol that no system can change."""

import pytest

from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from simulations.bench.cell import experiment_table, search_of, study_of
from simulations.bench.declaration import BenchCell, bench

SYSTEMS = (
    *("privrec", "mf", "fcf", "fed-als", "gram", "fold-in", "fedmf", "fedncf", "pfedrec", "fedrap"),
    *("gpfedrec", "fedgnn", "popularity", "ease", "ials"),
)
MINE = """
[systems.mine]
title = "Mine"
experiment = "experiment.toml"
set = ["split.leaky-negatives=true", "evaluation.held-out=validation", "dataset.name=ml-1m",
       "evaluation.final-users=9", "evaluation.masked=both", "positive-above=4.0", "task=rating"]
"""


@pytest.fixture
def mine(tmp_path):
    """A file with a system whose overrides reach for the protocol."""
    (tmp_path / "experiment.toml").write_text(
        'name = "mine"\nrounds = 2\npositive-above = 3.0\n[dataset]\nname = "ml-1m"\n'
        '[model]\nname = "mf"\n[step]\nname = "sgd"\nprivate-parameters = ["user.*"]\n'
        '[sampler]\nname = "fixed-size"\ncohort = 4\n[evaluation]\nks = [3]\n'
    )
    (tmp_path / "mine.toml").write_text(MINE)
    return tmp_path / "mine.toml"


def test_it_has_the_systems_and_datasets_that_it_promises():
    found = bench()
    assert tuple(found.systems) == SYSTEMS
    real = {"ml-100k", "ml-1m", "gowalla", "office", "amazon-video"}
    assert set(found.datasets) == {*real, "synthetic"} and found.seeds == 5
    assert len(list(found.cells())) == 6 * 2 * 15


def test_every_system_that_has_settings_has_as_many_candidates():
    found = bench()
    counts = {name: len(set(system.candidates)) for name, system in found.systems.items()}
    assert counts.pop("popularity") == 0 and set(counts.values()) == {found.budget}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_cell_has_an_experiment_under_the_protocol_or_a_reason(system):
    found = bench()
    for cell in found.cells(None, None, system):
        if why := found.reason(cell):
            assert why.startswith(("cannot: ", "too large here: "))
            continue
        one = load(experiment_table(found, cell))
        assert one.dataset.name == found.datasets[cell.dataset].dataset["name"]
        assert one.split.name == cell.protocol and one.positive_above is None
        assert one.evaluation.ks == (10,) and one.evaluation.sampled_items == 99
        assert one.evaluation.held_out == "test" and one.task == "ranking"
        if cell.protocol == "user-holdout":
            assert one.split.options["folds"] == 5 and found.systems[system].serves[cell.protocol]
        else:
            assert not one.split.options["leaky-negatives"]


def test_a_contributed_system_cannot_change_the_protocol(mine):
    found = bench(mine)
    table = experiment_table(found, BenchCell("ml-100k", "leave-one-out", "mine"))
    one = load(table)
    assert one.dataset.name == "ml-100k" and one.positive_above is None
    assert not one.split.options["leaky-negatives"]
    assert one.evaluation.held_out == "test" and one.evaluation.ks == (10,)
    assert one.evaluation.final_users is None and one.evaluation.masked == "real"
    assert one.task == "ranking"
    assert one.rounds == 2 and one.model.name == "mf"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("systems.mine", "systems.fedmf", "changes the bench"),
        ("[systems.mine]", "budget = 9\n[systems.mine]", "changes the bench"),
        (MINE, "", "declares no system"),
        ("set =", "papr = 'x'\nset =", "did you mean 'paper'"),
        ("set =", 'baseline = "ease"\nset =', "experiment or baseline, and not both"),
        ("set =", "candidates = [['rounds=1']]\nset =", "4 candidates of mine"),
    ],
)
def test_a_file_that_changes_the_bench_or_is_wrong_is_refused(mine, before, after, words):
    mine.write_text(MINE.replace(before, after))
    with pytest.raises(ExperimentError) as refused:
        bench.__wrapped__(mine)
    assert words in refused.value.text()


def test_a_name_that_is_none_is_refused_with_what_may_be_meant():
    with pytest.raises(ExperimentError, match="no system 'fedfm'") as refused:
        list(bench().cells("ml-100k", None, "fedfm"))
    assert "did you mean 'fedmf'" in refused.value.text()


def test_a_search_ranks_validation_rows_of_every_candidate():
    found = bench()
    study = search_of(found, found.cells("ml-100k", "user-holdout", "fedmf"))
    assert [task.name for task in study.tasks] == [f"fedmf-{place}" for place in range(4)]
    tables = [task.options["experiment"] for task in study.tasks]
    assert {table["evaluation"]["held-out"] for table in tables} == {"validation"}
    assert {table["split"]["validation-role"] for table in tables} == {"held-out"}
    rates = [table["strategy"]["server-lr"] for table in tables]
    assert len(set(rates)) == 4


def test_the_settings_that_were_tried_are_those_of_both_searches():
    """FedMF's own experiment had four; a search of the bench is claimed where it chose."""
    found = bench()
    fedmf = found.systems["fedmf"]
    for chosen, tried in (({}, 4), ({"leave-one-out": 1}, 8)):
        systems = {**found.systems, "fedmf": fedmf.model_copy(update={"chosen": chosen})}
        changed = found.model_copy(update={"systems": systems})
        (task,) = study_of(changed, changed.cells("ml-100k", "leave-one-out", "fedmf")).tasks
        assert task.options["experiment"]["settings-tried"] == tried
