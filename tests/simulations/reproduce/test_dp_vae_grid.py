# SPDX-License-Identifier: Apache-2.0
"""The grid of DP-VAE: its cells are valid experiments, its tests are the standard ones, and an
interrupted grid continues."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedrec.errors import ClientError
from fedrec.experiment.loading import load
from simulations.reproduce.grids import dp_vae
from simulations.reproduce.grids.dp_vae_tables import WHOLE_MEASURES

CELLS = {(group, cell): how for group, own in dp_vae.cells().items() for cell, how in own.items()}


def loaded(group, cell, seed=3):
    experiment, overrides = CELLS[group, cell]
    return load(experiment, [*overrides, f"seed={seed}"])


def record(*values):
    return {"metrics": dict(zip(dp_vae.MEASURES, values, strict=True))}


@pytest.mark.parametrize("group, cell", CELLS)
def test_a_cell_is_an_experiment_and_its_seed_is_that_of_the_users_budgets(group, cell):
    experiment = loaded(group, cell)
    assert experiment.seed == 3 and experiment.dataset.name == "ml-100k"
    assert experiment.model.name == "vae" or group == "table 11"
    if experiment.step.name in ("dpvae", "dpsgd"):
        assert experiment.step.options["budget-seed"] == 3


def test_the_sound_cells_are_the_shipped_sound_experiment():
    shipped, cell = load("dpvae-sound-ml100k", ["seed=3"]), loaded("budgets", "sound, up to 1.0")
    for part in ("rounds", "split", "model", "step", "strategy", "sampler"):
        assert getattr(cell, part) == getattr(shipped, part)


def test_every_budget_of_table_10_has_a_cell_per_mode():
    for epsilon, (mode, start) in itertools.product(
        (0.3, 0.5, 1.0, 1.5), (("sound", "sound"), ("paper", "paper"), ("paper", "paper, tamed"))
    ):
        step = loaded("budgets", f"{start}, up to {epsilon}").step.options
        assert (step["mode"], step["epsilon"], step["budgets"]) == (mode, epsilon, "uniform")


@pytest.mark.parametrize("model", ["SVD", "MF", "AE"])
def test_the_cells_of_table_11_differ_in_the_clip_norm_alone(model):
    constant, optimal = (loaded("table 11", f"{model}, {how}") for how in ("constant", "optimal"))
    step = constant.step.options
    assert (step["mode"], step["epsilon"], step["budgets"]) == ("sound", 1.0, "equal")
    options = {"name": constant.step.name, **step, "mode": "paper"}
    assert {"name": optimal.step.name, **optimal.step.options} == options
    for part in ("rounds", "dataset", "split", "model", "strategy", "sampler"):
        assert getattr(constant, part) == getattr(optimal, part)
    without = loaded("table 11", model)
    assert without.model == constant.model and without.step.name in ("sgd", "vae")


def test_what_is_compared_differs_in_nothing_else():
    """Tables 6, 7 and 9: priors, the clip norm of algorithm 2, and both."""
    plain = loaded("parts", "constant").table()
    for cell, changed in (
        ("constant, priors", {"priors"}),
        ("optimal", {"mode"}),
        ("optimal, priors", {"mode", "priors"}),
    ):
        other = loaded("parts", cell).table()
        one, two = plain["step"], other["step"]
        assert {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)} == changed
        assert {key: other[key] for key in other if key != "step"} == {
            k: plain[k] for k in plain if k != "step"
        }


def test_cells_that_are_compared_exist():
    assert {
        tuple(name.split(" / ")) for pair in dp_vae.comparisons() for name in pair
    } <= CELLS.keys()


def test_paired_by_seed_as_in_the_textbook():
    """Student's t of the differences by formula; records are in any order."""
    one, other = [0.30, 0.32, 0.29, 0.33, 0.35], [0.31, 0.36, 0.31, 0.32, 0.38]
    known = {f"g / a / seed {seed}": record(0.0, one[seed], 0.0) for seed in range(5)}
    known |= {f"g / b / seed {seed}": record(0.0, other[seed], 0.0) for seed in (4, 0, 3, 1, 2)}
    found = dp_vae.paired(known, "g / a", "g / b", dp_vae.MEASURES[1])
    assert found is not None and found.seeds == 5
    gains = np.subtract(other, one)
    error = gains.std(ddof=1) / math.sqrt(5)
    assert found.gain == pytest.approx(gains.mean())
    assert found.interval == pytest.approx(stats.t.interval(0.95, 4, loc=gains.mean(), scale=error))
    assert found.student == pytest.approx(2 * stats.t.sf(gains.mean() / error, 4))


def test_wilcoxons_p_is_exact_without_ties():
    # the one negative has rank 2; sums of at most 2 are {}, {1}, {2}
    gains = (0.01, 0.05, 0.03, -0.02, 0.08)
    known = {f"g / a / seed {seed}": record(0.2, 0.0, 0.0) for seed in range(5)}
    known |= {
        f"g / b / seed {seed}": record(0.2 + gain, 0.0, 0.0) for seed, gain in enumerate(gains)
    }
    found = dp_vae.paired(known, "g / a", "g / b", dp_vae.MEASURES[0])
    assert found is not None and found.wilcoxon == pytest.approx(2 * 3 / 2**5)


def test_a_run_that_diverged_or_is_missing_has_no_partner():
    known = {f"g / a / seed {seed}": record(0.1 * seed, 0.0, 0.0) for seed in range(4)}
    known |= {"g / b / seed 1": record(0.2, 0.0, 0.0), "g / b / seed 2": {"diverged in round": 3}}
    known["g / b / seed 3"] = record(0.6, 0.0, 0.0)
    found = dp_vae.paired(known, "g / a", "g / b", dp_vae.MEASURES[0])
    assert found is not None and found.seeds == 2 and found.gain == pytest.approx((0.1 + 0.3) / 2)
    del known["g / b / seed 3"]
    assert dp_vae.paired(known, "g / a", "g / b", dp_vae.MEASURES[0]) is None


def test_the_tables_agree_with_the_records(tmp_path, capsys):
    users = {
        "nominal": {"p10": 0.1, "p50": 0.5, "p90": 0.9},
        "replace-one": {"p10": 0.25, "p50": "inf", "p90": "inf"},
    }
    asked = {"p10": 0.3, "p50": 0.3, "p90": 0.3}
    known = {
        "parts / constant / seed 0": {**record(0.1, 0.2, 0.3), "users": users},
        "parts / constant / seed 1": {**record(0.3, 0.2, 0.5), "users": users | {"nominal": asked}},
        "parts / optimal / seed 0": record(0.11, 0.23, 0.4),
        "parts / optimal / seed 1": record(0.33, 0.24, 0.7),
        "budgets / paper, up to 0.3 / seed 0": {"diverged in round": 4},
        "budgets / paper, up to 0.3 / seed 1": {"diverged in round": 7},
        "federated / VAE / seed 2": {
            **record(0.4, 0.5, 0.6), "whole": dict.fromkeys(WHOLE_MEASURES, 0.7)
        },
        "whole / ease / seed 0": {"whole": {WHOLE_MEASURES[0]: 0.8}},
        "central / VAE / seed 0": {
            **record(0.0, 0.0, 0.0), "baselines": {"ease": record(0.41, 0.0, 0.0)["metrics"]}
        },
    }  # fmt: skip
    (tmp_path / "grid.json").write_text(json.dumps(known))
    dp_vae.tables(tmp_path / "grid.json")
    lines = capsys.readouterr().out.splitlines()

    def line(start):
        (found,) = (line for line in lines if line.startswith(start))
        return found

    constant = line("| parts / constant |")
    spread = math.sqrt(0.02)  # of .1 and .3
    assert constant.startswith(
        f"| parts / constant | 2 | ndcg-list@100 0.2000 ± {spread:.4f} | recall@20 0.2000 ± 0.0"
    )
    assert (
        "asked 0.2, 0.4, 0.6; true 0.25, inf, inf; (10, 50, 90 per cent of users, mean of 2 seeds)"
        in constant
    )
    assert (
        line("| budgets / paper")
        == "| budgets / paper, up to 0.3 | 2 | diverged | diverged in rounds 4, 7"
    )
    held_out, whole = (one for one in lines if one.startswith("| federated / VAE |"))
    assert held_out.startswith(
        "| federated / VAE | 1 | ndcg-list@100 0.4000 | recall@20 0.5000 | recall@50 0.6000 |"
    )
    assert whole.count(" 0.7000") == len(WHOLE_MEASURES) and dp_vae.PREFIX in whole
    first = WHOLE_MEASURES[0]
    # without the missing measure
    assert line("| whole / ease |") == f"| whole / ease | 1 | {first} 0.8000 |"
    assert line("| ease beside it |").startswith("| ease beside it | 1 | ndcg-list@100 0.4100 |")
    assert line("parts / constant -> parts / optimal, ndcg-list@100:").startswith(
        "parts / constant -> parts / optimal, ndcg-list@100: +0.0200, 95% interval"
    )
    assert line("federated / VAE -> federated / VAE, priors, recall@20:").endswith("too few runs")


def test_an_interrupted_grid_continues_where_it_stopped(tmp_path, monkeypatch):
    file, asked, breaks = tmp_path / "grid.json", [], [True]

    def measured(experiment, overrides, seed):
        asked.append((experiment, overrides, seed))
        if len(asked) == 6 and breaks.pop():
            raise KeyboardInterrupt
        return record(float(len(asked)), 0.0, 0.0)

    monkeypatch.setattr(dp_vae, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        dp_vae.run(file, ["parts"], [0, 1])
    kept = json.loads(file.read_text())
    assert len(kept) == 5
    dp_vae.run(file, ["parts"], [0, 1])
    whole = json.loads(file.read_text())
    assert len(whole) == 8 and {key: whole[key] for key in kept} == kept
    assert len(asked) == 9 and asked[5] == asked[6] and len({str(one) for one in asked}) == 8
    dp_vae.run(file, ["parts"], [0, 1])
    assert len(asked) == 9


def test_single_cells_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(dp_vae, "measured", lambda *_: record(0.0, 0.0, 0.0))
    dp_vae.run(tmp_path / "grid.json", ["parts", "federated"], [4], ["optimal", "VAE"])
    kept = json.loads((tmp_path / "grid.json").read_text())
    assert set(kept) == {"federated / VAE / seed 4", "parts / optimal / seed 4"}


def test_a_run_that_diverges_is_a_figure_and_any_other_error_is_one(run_tiny, monkeypatch):
    step = "step={name='dpvae', mode='paper', examples=3, learning-rate=1e38}"
    with pytest.raises(ClientError) as caught:
        run_tiny(
            "model={name='vae', hidden=6, latent=3}",
            "split={name='ratio'}",
            step,
            "rounds=9",
            "evaluation.every=0",
        )

    def diverging(*_, **__):
        raise caught.value

    monkeypatch.setattr(dp_vae.runner, "run", diverging)
    assert 1 <= dp_vae.measured(dp_vae.PRIVATE, (), 0)["diverged in round"] <= 9

    def failing(*_, **__):
        raise ClientError("a client fell over")

    monkeypatch.setattr(dp_vae.runner, "run", failing)
    with pytest.raises(ClientError, match="fell over"):
        dp_vae.measured(dp_vae.PRIVATE, (), 0)


def test_whole_histories_over_the_best_list_of_a_hundred(monkeypatch):
    """As the ideal list always has 100 items, the perfect list of a short history scores below
    1."""
    name = f"{dp_vae.PREFIX}ndcg@100"
    table = pd.DataFrame({name: [1.0, 0.5]}, index=[7, 9])
    lengths = {7: 2, 9: 300}
    population = SimpleNamespace(
        whole_history=lambda users: np.array([np.arange(400) < lengths[one] for one in users])
    )
    node = SimpleNamespace(population=population, experiment=SimpleNamespace(rounds=1))
    monkeypatch.setattr(dp_vae, "Node", lambda *_: node)
    monkeypatch.setattr(dp_vae, "evaluate_clients", lambda *_: table.copy())
    found = dp_vae.whole_histories(dp_vae.PRIVATE, [], {})
    best = sum(1 / math.log2(place + 2) for place in range(100))
    assert found[name] == pytest.approx(0.75)
    assert found[dp_vae.OF_ALL] == pytest.approx((1.0 * (1 + 1 / math.log2(3)) / best + 0.5) / 2)
