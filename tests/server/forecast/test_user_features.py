# SPDX-License-Identifier: Apache-2.0
"""The warning about users whom a model cannot tell apart."""

import pytest

from simulations import runner

ROWS = "\n".join(f"u{n % 20},i{n * 7 % 41},{n % 7}" for n in range(240))
PRIVREC = {"name": "privrec", "embedding": 4, "hidden": [8]}
FEATURES = {"user-features": ["group"]}
CASES = {
    "no features": (PRIVREC, {}, True),
    "features": (PRIVREC, FEATURES, False),
    "without features by choice": ({**PRIVREC, "features": False}, {}, False),
    "a vector for each user": ({"name": "mf", "factors": 4}, {}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_features_is_warned_of_data_without_features(case, tmp_path, caplog):
    model, features, warned = CASES[case]
    table = tmp_path / "table.csv"
    rows = [f"{row},g{int(row[1:].split(',')[0]) % 3}" for row in ROWS.splitlines()]
    table.write_text("\n".join(["user,item,rating,group", *rows]) + "\n")
    experiment = {
        "name": "warned",
        "rounds": 1,
        "dataset": {"name": "table", "path": str(table), **features},
        "split": {"name": "user-holdout"},
        "model": model,
        "step": {"name": "sgd"},
        "strategy": {"name": "reptile"},
        "sampler": {"name": "fixed-size", "cohort": 4},
        "evaluation": {"every": 0, "baselines": []},
        "engine": {"name": "serial"},
    }
    runner.run(experiment, output=tmp_path / "run")
    assert any("represents users by features" in line for line in caplog.messages) == warned
