# SPDX-License-Identifier: Apache-2.0
"""SASRec and GRU4Rec trained in one place, beside `cornac`: people who walk from item to item."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.central import Central, CentralConfig

USERS, ITEMS, LENGTH = 200, 40, 12


@pytest.fixture(scope="module")
def walks():
    """Sequences `[users, length + 1]`: mostly one or two items on, else anywhere."""
    random = np.random.default_rng(0)
    places = [random.integers(ITEMS, size=USERS)]
    for _ in range(LENGTH):
        on = (places[-1] + random.integers(1, 3, USERS)) % ITEMS
        places.append(np.where(random.random(USERS) < 0.8, on, random.integers(ITEMS, size=USERS)))
    return np.stack(places, 1)


def known_of(walks):
    offsets = np.arange(0, USERS * LENGTH + 1, LENGTH)
    return Histories(ITEMS, offsets, walks[:, :LENGTH].ravel(), np.arange(USERS))


def hits(scores, walks):
    """Share of the users whose last item is among the first two."""
    found = torch.as_tensor(scores).topk(2).indices
    return float((found == torch.from_numpy(walks[:, -1:])).any(1).double().mean())


RATES = {"sasrec": 0.005, "gru4rec": 0.01}


def ours(walks, name, seed, **settings):
    model = {"name": name, "width": 16, "longest": LENGTH, "dropout": 0.1, **settings}
    made = Central(
        CentralConfig.parse(
            {
                "model": model,
                "epochs": 20,
                "batch-size": 32,
                "learning-rate": RATES[name],
                "seed": seed,
            }
        )
    )
    known = known_of(walks)
    made.fit(known)
    return hits(made.scores(known), walks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sasrec", "gru4rec"])
@pytest.mark.parametrize("loss", ["softmax", "sampled-softmax", "binary"])
def test_next_items_are_learned_in_one_place(walks, name, loss):
    """The two likely ones are .8 of all; by chance two of forty hit .05."""
    negatives = {"softmax": {}, "sampled-softmax": {"negatives": 20}, "binary": {"negatives": 4}}
    assert ours(walks, name, 0, loss=loss, **negatives[loss]) > 0.4


def test_the_order_of_times_is_what_counts(walks):
    """Shuffled sequences have nothing to learn."""
    shuffled = np.random.default_rng(1).permuted(walks, axis=1)
    assert ours(shuffled, "gru4rec", 0) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sasrec", "gru4rec"])
def test_it_ranks_as_well_as_cornac(walks, name):
    """Hits over three seeds of equal sizes, after as many epochs as both need to stop gaining;
    cornac's losses draw items, ours does not."""
    models = pytest.importorskip("cornac.models")
    from cornac.data import SequentialDataset

    rows = [
        (str(user), str(user), str(item), place)
        for user, own in enumerate(walks[:, :LENGTH].tolist())
        for place, item in enumerate(own)
    ]
    data = SequentialDataset.build(rows, fmt="USIT")
    items = [data.iid_map[str(item)] for item in range(ITEMS)]
    mine = [ours(walks, name, seed) for seed in range(3)]
    theirs = []
    for seed in range(3):
        if name == "sasrec":
            model = models.SASRec(
                embedding_dim=16, loss="ce", batch_size=32, learning_rate=0.005, n_sample=200,
                sample_alpha=0.0, n_epochs=20, max_len=LENGTH, dropout=0.1, seed=seed,
            )  # fmt: skip
        else:
            model = models.GRU4Rec(
                layers=[16], batch_size=32, learning_rate=0.05, n_sample=200, sample_alpha=0.0,
                n_epochs=20, dropout_p_embed=0.1, seed=seed,
            )  # fmt: skip
        model.fit(data)
        scores = np.stack(
            [
                model.score(data.uid_map[str(user)], [items[item] for item in own])
                for user, own in enumerate(walks[:, :LENGTH].tolist())
            ]
        )
        theirs.append(hits(scores[:, items], walks))
    apart = abs(np.mean(mine) - np.mean(theirs))
    print(f"ours {np.mean(mine):.4f}, theirs {np.mean(theirs):.4f}, {mine}, {theirs}")
    assert min(*mine, *theirs) > 0.5
    assert apart <= 2 * max(np.std(mine, ddof=1), np.std(theirs, ddof=1)), (mine, theirs)
