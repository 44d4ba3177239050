# SPDX-License-Identifier: Apache-2.0
"""True and nominal epsilons of users, from the experiment only."""

import numpy as np
import pytest

from fedrec.errors import ExperimentError
from simulations.personal_epsilons import personal_epsilons

DPVAE = (
    "model={name='vae', hidden=6, latent=3}",
    "evaluation.fine-tune={epochs=0}",
    "rounds=40",
    "sampler={name='limited', cohort=6, participations=5}",
)


def test_calibrated_noise_keeps_all_users_within_the_budget(load_tiny):
    table = personal_epsilons(load_tiny(*DPVAE, "step={name='dpvae', participations=5}"))
    assert len(table) == 18 and (table["uploads"] == 5).all() and table["nominal"].nunique() == 18
    np.testing.assert_allclose(table["replace-one"], table["nominal"], rtol=1e-6)
    assert (table["add-remove"] < table["nominal"]).all()


def test_the_papers_noise_overspends(load_tiny):
    # Thirty uploads at delta 1 / 80,000: the reference of the accountant's own test.
    more = (
        "rounds=120",
        "sampler.participations=30",
        "step={name='dpvae', budgets='equal', delta=1.25e-5}",
    )
    table = personal_epsilons(load_tiny(*DPVAE, *more))
    assert (table["uploads"] == 30).all() and np.allclose(table["nominal"], 1)
    assert np.allclose(table["replace-one"], 11.66, atol=0.006)
    assert np.allclose(table["add-remove"], 5.05, atol=0.006)
    early = personal_epsilons(load_tiny(*DPVAE, *more), rounds=1)
    assert early["uploads"].sum() == 6 and (early["replace-one"][early["uploads"] == 0] == 0).all()


def test_the_papers_clip_norm_guarantees_nothing(load_tiny):
    table = personal_epsilons(load_tiny(*DPVAE, "step={name='dpvae', mode='paper'}"))
    assert np.isinf(table[["add-remove", "replace-one"]]).all().all()


def test_other_steps_have_no_personal_budgets(load_tiny):
    with pytest.raises(ExperimentError, match="dpvae"):
        personal_epsilons(load_tiny())
