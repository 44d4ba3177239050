# SPDX-License-Identifier: Apache-2.0
"""The item-kNN of the study of federated peers."""

import torch

from benchmarks.item_knn import counted_cosines, judge, learned_cosines
from fedrec.data.population import Population


def test_an_items_cosines_by_hand():
    """Users 0 and 1 like items 0 and 1, only user 1 likes item 2, and no user likes item 3."""
    liked = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    half = 0.5**0.5
    wanted = torch.tensor([[0.0, 1.0, half, 0], [1.0, 0, half, 0], [half, half, 0, 0], [0.0] * 4])
    torch.testing.assert_close(counted_cosines(liked), wanted)
    learned = learned_cosines(torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]]))
    wanted = torch.tensor([[1, 0, half], [0, 1, half], [half, half, 1]])
    torch.testing.assert_close(learned, wanted)


def test_a_list_of_everything_hits_everything(load_tiny):
    """With as many places as items every item is found, even by a constant score."""
    population = Population.of(load_tiny())
    told = judge(population, "test", (3706,))
    assert told(torch.zeros(population.interactions.num_items)) == "Hits@3706 1.0000"
