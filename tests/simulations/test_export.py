# SPDX-License-Identifier: Apache-2.0
"""Exported models give the library's own scores, by onnxruntime alone."""

import csv
import io
import subprocess
import sys

import numpy as np
import pytest

from fedrec.data.population import POPULATIONS
from fedrec.errors import DataError, ExperimentError
from simulations import runner
from simulations.export.folder import export
from tests.systems import SYSTEMS as OTHERS
from tests.systems import TRANSITIONS

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
Scorer = pytest.importorskip("simulations.export.score").Scorer

UNTUNED = "evaluation.fine-tune={epochs=0}"
SYSTEMS = {
    **{name: OTHERS[name] for name in ("mf", "sasrec", "gpfedrec")},
    "privrec": (UNTUNED,),
    "privrec, fine-tuned": (),
    "mf of ratings": ("task=rating", *OTHERS["mf"], "model.center=3.0"),
    "ials": ("model={name='ials', factors=4}", "step={name='als'}", "strategy={name='fcf'}"),
    "item-weights": (
        *("model={name='item-weights', items=12}", "step={name='gram', low-rated=0.3}"),
        *("strategy={name='gram'}", UNTUNED),
    ),
    "fold-in": (
        *("model={name='fold-in', items=12, factors=4}", "step={name='gram', low-rated=0.3}"),
        *("strategy={name='fold-in'}", UNTUNED),
    ),
    "transitions": TRANSITIONS,
    "vae": ("model={name='vae', hidden=6, latent=3}", "step={name='vae'}", UNTUNED),
    "pnbm": ("task=rating", "model={name='pnbm'}", "step={name='pnbm'}", UNTUNED),
    "privrec-profile": (
        "model.name=privrec-profile",
        "model.item-bias=true",
        "step.name=sgd-profile",
    ),
}


QUICK = ("privrec", "mf", "fold-in", "transitions")


@pytest.mark.parametrize(
    "system", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in SYSTEMS]
)
def test_the_exported_model_gives_the_librarys_scores(system, tiny_experiment, tmp_path):
    table = tiny_experiment()
    if "task=rating" in SYSTEMS[system]:
        del table["positive-above"]
    result = runner.run(table, SYSTEMS[system], output=tmp_path / "run")
    every = result.scores()
    user = every.index[np.ptp(every, axis=1).argmax()]  # not one that was never in a round
    export(result, tmp_path / "device", user)
    scorer = Scorer(tmp_path / "device")
    found = scorer.scores(scorer.read_rows(tmp_path / "device" / "rows.csv"))
    assert scorer.ids == [str(item) for item in every.columns]
    np.testing.assert_allclose(found, every.loc[user], rtol=0, atol=1e-5)
    assert np.ptp(found) > 1e-3


def score(folder, *arguments):
    """What the script prints in a process that has neither this library nor torch."""
    alone = (
        "import runpy, sys; sys.modules |= dict.fromkeys(['fedrec', 'torch', 'simulations']);"
        " sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", alone, str(folder / "score.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)


@pytest.mark.slow
def test_the_script_prints_the_best_items_without_those_of_the_rows(run_tiny, tmp_path):
    result = run_tiny(*SYSTEMS["item-weights"])
    export(result, tmp_path / "any")
    data = POPULATIONS.population(result.experiment)
    user = data.interactions.user_ids[data.training_clients[0]]
    export(result, tmp_path / "one", user)
    rows = tmp_path / "one" / "rows.csv"
    best = result.recommend([user], k=3)
    rows.write_text(rows.read_text() + "nobody's,5.0,0\n")
    told = score(tmp_path / "any", rows, "--top", 3)
    assert told.returncode == 0, told.stderr
    assert "ignored 1 rows with unknown items" in told.stderr
    table = list(csv.DictReader(io.StringIO(told.stdout)))
    assert [row["item"] for row in table] == [str(item) for item in best["item"]]
    found = [float(row["score"]) for row in table]
    np.testing.assert_allclose(found, best["score"], rtol=0, atol=1e-5)
    rows.write_text("thing\n1\n")
    told = score(tmp_path / "any", rows)
    assert told.returncode == 1 and not told.stdout
    assert told.stderr.startswith("error: ") and "has no column 'item'" in told.stderr


def test_what_devices_hold_is_exported_for_one_of_them_alone(run_tiny, tmp_path):
    tuned = run_tiny(output="tuned")
    with pytest.raises(ExperimentError, match="private values") as error:
        export(tuned, tmp_path / "export")
    assert "feature:gender" in error.value.text()
    with pytest.raises(DataError, match="unknown user 'nobody'"):
        export(tuned, tmp_path / "export", "nobody")
    assert not (tmp_path / "export").exists()


def test_parameters_made_by_the_server_are_refused(run_tiny, tmp_path):
    result = run_tiny(*OTHERS["metamf"])
    with pytest.raises(ExperimentError, match="its server makes for each user"):
        export(result, tmp_path / "export")


@pytest.mark.slow
def test_the_command_writes_the_folder_and_says_what_to_do_next(fedrec, run_tiny, tmp_path):
    run_tiny()
    folder = tmp_path / "device"
    code, told, _ = fedrec("export", tmp_path / "run", "--user", "3", "-o", folder)
    assert code == 0 and f"python {folder / 'score.py'} {folder / 'rows.csv'}" in told
    assert score(folder, folder / "rows.csv", "--top", 2).stdout.count("\n") == 3
    code, _, problem = fedrec("export", tmp_path / "run", "--user", "3", "-o", folder)
    assert code == 4 and "is not empty" in problem


def test_a_missing_package_is_named(run_tiny, tmp_path, monkeypatch):
    result = run_tiny()
    monkeypatch.setattr("simulations.export.folder.find_spec", lambda name: None)
    with pytest.raises(ExperimentError, match=r"exporting needs onnx"):
        export(result, tmp_path / "export")
