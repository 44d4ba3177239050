# SPDX-License-Identifier: Apache-2.0
"""FedRecAttack and A-hum on the splits of their authors, against the exposure that they log.

An iteration of their code passes over all clients in batches of 256, whose gradients are added.
Here a round of FedRecAttack is a batch drawn at random; the sum is 256 times the mean.
"""

import os
import shutil
from pathlib import Path

import pytest

from simulations import runner

DATA = Path(os.environ.get("FEDREC_DATA", Path.home() / ".cache/fedrec/data")) / "attacks"
BASE = {
    "split": {"name": "published"},
    "strategy": {"name": "reptile", "server-lr": 256.0},
    "sampler": {"name": "fixed-size", "cohort": 256},
    "evaluation": {"every": 0, "ks": [5, 20], "baselines": [], "fine-tune": {"epochs": 0}},
    "engine": {"name": "serial", "threads": 1, "device": "cpu"},
}
STEP = {
    "name": "sgd", "epochs": 1, "batch-size": 100_000, "private-parameters": ["user.*"],
}  # fmt: skip
FEDREC_ATTACK = {
    **BASE,
    "name": "fedrec-attack",
    "rounds": 20,  # 5 iterations of 990 clients
    "model": {"name": "mf", "factors": 32, "biases": False, "init-std": 0.01},
    # their loss is a sum over about 200 rows, ours a mean, so rates and limit of rows differ
    "step": {**STEP, "learning-rate": 0.01, "negatives": 1, "rates": {"*": 200.0}},
    "adversary": {
        "attack": {
            "name": "fedrec-attack",
            "row-limit": 1 / 200,
        },
        "share": 0.05,
        "target-choice": "random",
        "public-share": 0.01,
    },
}
A_HUM = {
    **BASE,
    "name": "a-hum",
    # 24 batches are an iteration of 6,046 clients, each of which is in one of them
    "strategy": {"name": "reptile", "server-lr": 251.0},
    "sampler": {"name": "min-separation", "separation": 24, "cohort": 251},
    "model": {
        "name": "neumf", "factors": 0, "tower": [16, 8, 8], "init-std": 0.01, "layers": "kaiming",
    },
    "step": {**STEP, "learning-rate": 0.001, "negatives": 4, "private-std": 0.01},
    "adversary": {
        "attack": {"name": "a-hum", "user-std": 0.01},
        "share": 0.001,
        "target-items": ["1805"],  # as they choose it, with the fewest rows in both files
    },
}  # fmt: skip


@pytest.fixture
def exposure(tmp_path):
    """Exposure at the end of a run on an authors' split, whose files have the given names."""

    def measured(table, folder, *overrides, k, suffix="txt"):
        source = DATA / folder
        if not source.is_dir():
            pytest.skip(f"no data in {source}")
        for name in ("train", "test"):
            shutil.copy(source / f"{name}.{suffix}", tmp_path / f"{name}.txt")
        table = {**table, "dataset": {"name": "gowalla", "path": str(tmp_path), "verify": False}}
        found = runner.run(table, overrides, output=tmp_path / f"run{len(overrides)}")
        return found.metrics[f"exposure@{k}"]

    return measured


@pytest.mark.slow
@pytest.mark.real_data
def test_fedrec_attack_reaches_the_exposure_of_its_log(exposure):
    """.781 after iteration 5, with 5 % malicious clients; none without."""
    folder = "fedrecattack-ml-100k"
    assert exposure(FEDREC_ATTACK, folder, k=5) >= 0.72
    assert exposure(FEDREC_ATTACK, folder, "adversary.share=0.0", k=5) < 0.01


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.timeout(1200)
def test_a_hum_reaches_the_exposure_of_its_log(exposure):
    """1.0 after iteration 10, with six malicious clients beside 6,040."""
    overrides = ("rounds=240", "evaluation.final-users=500")
    assert exposure(A_HUM, "a-hum-ml-1m", *overrides, k=20, suffix="dat") >= 0.95
