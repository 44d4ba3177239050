# SPDX-License-Identifier: Apache-2.0
"""Made-up profiles: how many items of which kind."""

import numpy as np
import pytest

from fedrec.components.registry import POISONING, resolve
from fedrec.data.adversary.known import Known
from fedrec.experiment.sections import Section, component_settings

ITEMS = 200
TARGETS = np.array([7, 150])
PUBLIC = np.repeat(np.arange(ITEMS), np.arange(ITEMS)[::-1] // 10)  # item 0 is the most popular


def profile(name, seed=0, **settings):
    table = Section.model_validate({"name": name, **settings})
    attack = resolve(POISONING, name)(component_settings(POISONING, table))
    known = Known(ITEMS, TARGETS, np.array([9]), 1, 30, np.array([0, len(PUBLIC)]), PUBLIC, seed=0)
    return attack.profile(known, np.random.default_rng(seed))


@pytest.mark.parametrize("name", ["random", "bandwagon", "popular"])
@pytest.mark.parametrize(("settings", "number"), [({}, 30), ({"items": 12}, 12), ({"items": 1}, 2)])
def test_a_profile_has_the_targets_and_as_many_items_as_usual(name, settings, number):
    items = profile(name, **settings)
    assert len(set(items.tolist())) == len(items) == number
    assert set(TARGETS) <= set(items)


def test_popular_profiles_are_the_most_popular_items():
    others = [item for item in profile("popular", items=22).tolist() if item not in TARGETS]
    assert sorted(others) == [item for item in range(21) if item != 7]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_bandwagon_profiles_is_popular(share):
    """Beside the random items, a tenth of which is popular by chance."""
    settings = {"items": 42, "popular-share": share}
    counts = [
        len({item for item in profile("bandwagon", seed, **settings).tolist() if item <= 20} - {7})
        for seed in range(40)
    ]
    expected = 40 * share + (40 - 40 * share) * (20 - 40 * share) / (198 - 40 * share)
    assert np.mean(counts) == pytest.approx(expected, abs=1.0)
