# SPDX-License-Identifier: Apache-2.0
"""Cost of an upload under each setting, against the composition of Gaussian releases."""

import math

import pytest
from pydantic import ValidationError

from fedrec.privacy.accounting.gdp import gdp_epsilon
from fedrec.privacy.personal.noise import PersonalNoise, QuantileConfig
from fedrec.privacy.personal.priors import PriorsConfig
from fedrec.privacy.personal.report import epsilon_table, promises, words

ALL = {
    "plain": {},
    "quantile": {"quantile": QuantileConfig(share=0.3)},
    "priors": {"priors": PriorsConfig(share=0.4)},
    "both": {"quantile": QuantileConfig(), "priors": PriorsConfig()},
    "quiet-priors": {"priors": PriorsConfig(noise=False)},
}


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("uploads", [1, 7])
def test_calibrated_noise_spends_the_budget_and_not_more(case, uploads):
    noise = PersonalNoise(epsilon=0.8, participations=uploads, **ALL[case])
    for client in range(4):
        budget = noise.budget(client)
        mu = math.sqrt(noise.cost(client, "replace-one", uploads))
        assert gdp_epsilon(mu, budget.delta) == pytest.approx(budget.epsilon, rel=1e-9)


def test_cost_is_the_sum_over_everything_that_leaves_the_device():
    noise = PersonalNoise(budgets="equal", participations=3, **ALL["both"])
    # Replacing a user moves the gradient by 2S, the share within the bound by 1, and the prior by
    # its sensitivity, once.
    by_hand = 3 * (2 / noise.gradient_multiplier(0)) ** 2 + 3 / noise.share_std(0) ** 2
    assert noise.cost(0, "replace-one", 3) == pytest.approx(
        by_hand + 1 / noise.prior_multiplier(0) ** 2
    )
    assert noise.cost(0, "replace-one", 0) == 0
    assert noise.cost(0, "add-remove", 3) < noise.cost(0, "replace-one", 3)


def test_the_papers_noise_is_that_of_one_upload():
    noise = PersonalNoise(budgets="equal", epsilon=0.5, delta=1e-5)
    assert noise.noise_multiplier(3) == pytest.approx(math.sqrt(2 * math.log(1.25e5)) / 0.5)
    assert noise.cost(3, "add-remove", 4) == pytest.approx(4 / noise.noise_multiplier(3) ** 2)


def test_weights_are_precisions_of_the_noise():
    for participations in (None, 5):
        noise = PersonalNoise(epsilon=1.2, participations=participations)
        generous = PersonalNoise(epsilon=1.2, participations=participations, budgets="equal")
        for client in range(5):
            ratio = generous.noise_multiplier(client) / noise.noise_multiplier(client)
            assert noise.weight(client) == pytest.approx(ratio**2) and noise.weight(client) <= 1


def test_a_device_makes_no_more_uploads_than_planned_and_the_table_knows():
    table = epsilon_table(PersonalNoise(participations=2), [4, 9], [1, 50])
    assert table["uploads"].tolist() == [1, 2]
    assert table.loc[9, "replace-one"] == pytest.approx(table.loc[9, "nominal"])
    assert table.loc[4, "replace-one"] < table.loc[4, "nominal"]


def test_reports_of_a_run():
    paper, one = PersonalNoise(mode="paper"), PersonalNoise(budgets="equal")
    assert any(
        "no finite guarantee: the clip norm comes from private data" in line
        for line in promises(paper)
    )
    assert not any("no finite" in line for line in promises(one))
    said = words(one, epsilon_table(one, range(10), [5] * 10))
    assert any("10 of 10 users spent more" in line for line in said)
    assert any("one upload alone" in line for line in said)


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "paper", "quantile": {}}, {"noise": "secure", "priors": {}}],
)
def test_settings_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValidationError):
        PersonalNoise.model_validate(wrong)
    PersonalNoise.model_validate({"noise": "secure", "priors": {"noise": False}})
