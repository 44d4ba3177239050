# SPDX-License-Identifier: Apache-2.0
"""Remarks below the result table."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.experiment.sections import Section
from fedrec.report.summary import answer_line, deciding_metric, summary_notes, summary_table
from simulations.own_data import fold_in_system


@pytest.fixture
def result() -> Any:
    """A private run whose system is worse than private popularity."""
    experiment = load(
        {
            "name": "private",
            "rounds": 2,
            "dataset": {"name": "synthetic"},
            "split": {"name": "user-holdout"},
            **fold_in_system(1.0, 100, 20.0),
        }
    )
    return SimpleNamespace(
        experiment=experiment,
        metrics={"hits@10": 0.1},
        baselines={"dp-popularity": {"hits@10": 0.2}},
        baseline_users={},
        early_stopping={},
        parameters={},
    )


@pytest.mark.parametrize(("best", "fewer"), [(1, False), (2, True)])
def test_fewer_items_are_advised_only_where_products_were_summed(result, best, fewer):
    result.early_stopping = {"best-round": best}
    said = " ".join(summary_notes(result))
    assert "a larger epsilon" in said and ("model.items" in said) == fewer


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ((), ["hits@5"]),
        (("evaluation.shown=['recall@5', 'mrr']",), ["recall@5", "mrr"]),
        (("evaluation.shown=['recall@20']",), ["hits@5"]),
    ],
)
def test_the_printed_table_has_the_metrics_that_the_experiment_names(run_tiny, settings, columns):
    result = run_tiny("rounds=1", "evaluation.baselines=['popularity']", *settings)
    heads = [str(column.header) for column in summary_table(result).columns[1:]]
    assert heads == [*columns, "inputs"]
    assert deciding_metric(result) == columns[0]


def test_unknown_metrics_of_the_printed_table_are_refused(run_tiny):
    with pytest.raises(ExperimentError, match=r"evaluation.shown(.*\n)*.*did you mean 'recall'"):
        run_tiny("evaluation.shown=['recal@20']")


def test_how_much_of_a_catalogue_has_products_and_why_is_told(result):
    result.parameters = {"item.bias": np.zeros((250, 1))}
    (said,) = [line for line in summary_notes(result) if "100 of 250 items" in line]
    assert "limit: model.items" in said
    model = Section(name="item-weights", **{"traffic-limit": 0.04})  # 100 x 100 numbers
    result.experiment = result.experiment.model_copy(update={"model": model})
    (said,) = [line for line in summary_notes(result) if "100 of 250 items" in line]
    assert "limit: model.traffic-limit = 0.04 MB" in said
    result.parameters = {"item.bias": np.zeros((100, 1))}
    assert not [line for line in summary_notes(result) if "of 100 items" in line]


def test_a_run_whose_strategy_is_not_installed_has_its_remarks(result):
    gone = Section(name="gone.package:Strategy")
    result.experiment = result.experiment.model_copy(update={"strategy": gone})
    assert "is not better than dp-popularity" in summary_notes(result)[0]


def test_the_answer_names_popularity_and_the_strongest_system_of_equal_inputs(run_tiny):
    """PrivRec with the users' and items' features has inputs that the others have not."""
    bare = ("model={name='mf', factors=2}", "evaluation.fine-tune={epochs=0}")
    baselines = "evaluation.baselines=['popularity', 'ease', 'random']"
    result = run_tiny("rounds=1", baselines, *bare, output="bare")
    best = max(("popularity", "ease"), key=lambda label: result.baselines[label]["hits@5"])
    told = answer_line(result)
    assert f"than {best}, the strongest baseline of equal inputs" in told
    assert "than popularity" in told and "random" not in told
    featured = run_tiny("rounds=1", baselines, output="featured")
    assert f"{best}, the strongest baseline though its inputs differ" in answer_line(featured)


def test_a_result_has_its_epsilon(run_tiny):
    private = run_tiny(
        "privacy={clip-norm=1.0, epsilon=3.0}", "evaluation.baselines=[]", output="a"
    )
    assert private.epsilon == pytest.approx(private.rounds["epsilon"].iloc[-1])
    assert 2.9 < private.epsilon <= 3.0
    assert run_tiny("evaluation.baselines=[]", output="b").epsilon is None
