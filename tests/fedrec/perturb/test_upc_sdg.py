# SPDX-License-Identifier: Apache-2.0
"""UPC-SDG and other replacements of rows."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from fedrec.data.perturbation import Perturbed
from fedrec.errors import DataError
from fedrec.perturb.substitutes import (
    RandomReplacement,
    Similarity,
    _drawn_by_weight,
    lowest,
    mean_similarity,
    measured_similarity,
    random_substitutes,
    replaced_counts,
    scored_substitutes,
    trained_embeddings,
)
from fedrec.perturb.targeted import RandomisedResponse, RandomisedResponseConfig
from fedrec.perturb.upc_sdg import (
    AttentionConfig,
    GeneratorConfig,
    UpcSdg,
    UpcSdgConfig,
    _Attention,
    _attention_weights,
    _gumbel_softmax,
    _losses,
    _train_attention,
    _train_generator,
)
from fedrec.rng import torch_stream

# UPC-SDG against closed forms: similarities, attention, Gumbel-softmax, and limits of gamma and k.

QUICK = {
    "embeddings": {"factors": 8, "epochs": 30},
    "attention": {"epochs": 2, "hidden": 8},
    "generator": {"steps": 60, "candidates": 40},
}


def synthetic(data, seed=0, **settings):
    return UpcSdg(UpcSdgConfig.parse({**QUICK, **settings}), seed).perturb(data)


@pytest.fixture(scope="module")
def embeddings():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(60, 8, generator=generator), torch.randn(40, 8, generator=generator)


@pytest.mark.parametrize("definition", ["paper", "released", "cosine"])
def test_similarity_is_the_formula(embeddings, definition):
    q = embeddings[1].double()
    got = Similarity(q, definition).rows(torch.arange(40))
    for i, v in np.random.default_rng(0).integers(0, 40, (50, 2)).tolist():
        product, row = q[i] @ q[v], q[v if definition == "released" else i] @ q.T
        wanted = {
            "paper": (product - row.min()) / (q[i] @ q[i] - row.min()),
            "released": (product - row.min()) / (row.max() - row.min()),
            "cosine": product / q[i].norm() / q[v].norm(),
        }[definition]
        assert got[i, v] == pytest.approx(float(wanted), abs=1e-12)


class TestAttention:
    def test_weights_by_hand(self):
        logits, place = torch.tensor([0.3, -1.0, 2.0, 0.0]).double(), torch.tensor([0, 0, 0, 2])
        for beta in (0.0, 0.4, 1.0):
            wanted = logits[:3].exp() / logits[:3].exp().sum() ** beta
            assert torch.allclose(_attention_weights(logits, place, 3, beta)[:3], wanted)

    def test_equations_three_to_six_by_hand(self, embeddings):
        users, items = (part.double() for part in embeddings)
        generator = torch.Generator().manual_seed(1)
        made = _Attention(AttentionConfig(beta=0.5, hidden=5), 8, generator).double()
        own, place = [torch.tensor([3, 4, 9]), torch.tensor([7])], torch.tensor([0, 0, 0, 1])
        total = 0.0
        for p, those in zip(users[:2], own, strict=True):
            inputs = torch.cat([p.expand(len(those), -1), items[those]], dim=1)
            v = torch.relu(inputs @ torch.cat([made.user, made.item]) + made.bias) @ made.out[:, 0]
            a = v.exp() / v.exp().sum() ** 0.5
            t = (a[:, None] * items[those]).sum(0) / len(those)
            f = torch.relu(t @ made.first + made.first_bias) @ made.second + made.second_bias
            total = total + (f - p).square().sum()
        assert torch.allclose(made.loss(users[:2], place, items[torch.cat(own)]), total)

    def test_training_lowers_the_loss(self, two_tastes, embeddings, monkeypatch):
        monkeypatch.setattr("fedrec.perturb.upc_sdg._BATCH_ROWS", 64)
        right, losses = _Attention.loss, []
        monkeypatch.setattr(
            _Attention, "loss", lambda *given: losses.append(right(*given)) or losses[-1]
        )
        config, random = AttentionConfig(epochs=30, dropout=0), torch_stream(0, "t")
        logits = _train_attention(config, two_tastes.rows, *embeddings, random)
        epochs = np.array_split([float(loss.detach()) for loss in losses], 30)
        assert epochs[-1].sum() < 0.9 * epochs[0].sum()
        assert logits.shape == (len(two_tastes.rows),)
        assert np.isfinite(logits).all()

    def test_logits_belong_to_their_rows(self, make_data, embeddings):
        """Rows in another order have the same logits."""
        users, items = np.repeat(np.arange(5), 4), np.arange(20)
        order = np.random.default_rng(1).permutation(20)
        config = AttentionConfig(epochs=1)
        one, other = (
            _train_attention(config, data.rows, *embeddings, torch_stream(0, "t"))
            for rows in (np.arange(20), order)
            for data in [make_data(users[rows], items[rows], 60, 40)]
        )
        assert np.allclose(one[order], other, atol=1e-4)


class TestGenerator:
    def test_the_largest_weight_is_a_draw_from_the_softmax(self):
        """Equation 11 is equation 12's limit: chi-square of the arg max, at any temperature."""
        logits = torch.tensor([0.0, 1.0, -0.5, 2.0])
        random = torch.Generator().manual_seed(0)
        drawn = _gumbel_softmax(logits.repeat(20_000, 1), 0.7, random).argmax(dim=1).numpy()
        wanted = torch.softmax(logits, 0).numpy() * 20_000
        counts = np.bincount(drawn, minlength=4)
        assert chisquare(counts, wanted, sum_check=False).pvalue > 1e-3

    @pytest.mark.parametrize("definition", ["paper", "released", "cosine"])
    def test_losses_of_a_whole_item_are_those_of_the_equations(self, embeddings, definition):
        users, items = embeddings
        similarity = Similarity(items, definition)
        originals, others = torch.tensor([3, 5, 9]), torch.tensor([8, 1, 30])
        gamma = 0.3
        mixture = torch.nn.functional.one_hot(others, 40).float()
        privacy, utility = _losses(similarity, users[:3], originals, gamma, mixture, items)
        alike = similarity.between(originals, others)
        assert privacy.item() == pytest.approx(torch.relu(alike - gamma).sum().item(), abs=1e-5)
        wanted = -torch.sigmoid((users[:3] * items[others]).sum(1)).log().sum()
        assert utility.item() == pytest.approx(wanted.item(), abs=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize(("definition", "gamma"), [("released", 1.0), ("paper", 4.0)])
    def test_where_everything_is_alike_enough_the_user_gets_what_it_likes_best(
        self, two_tastes, embeddings, definition, gamma
    ):
        """L_s is zero, so the best item that the user does not have maximises the rest."""
        users, items = embeddings
        rows = two_tastes.rows
        chosen = rows.user_order[rows.user_offsets[:-1]]
        slow = GeneratorConfig(temperature=0.2, steps=900, candidates=40, learning_rate=0.05)
        similarity, random = Similarity(items, definition), torch_stream(0, "t")
        made = _train_generator(slow, rows, chosen, gamma, users, similarity, random)

        @torch.no_grad()
        def scores(some):
            return made.logits(users[rows.users[some]], items[rows.items[some]], gamma, items)

        found = scored_substitutes(rows, chosen, scores, "best", 0)
        liking = (users @ items.T)[rows.users[chosen]]
        for row, user in enumerate(rows.users[chosen]):
            liking[row, rows.items[rows.rows_of(user)]] = -torch.inf
        rank = (liking > liking[torch.arange(60), torch.from_numpy(found)][:, None]).sum(1)
        # Of about 32 items; the result of training depends slightly on the processor.
        assert (rank == 0).float().mean() > 0.4 and rank.float().mean() < 1.5

    def test_the_softmax_has_no_item_of_the_user(self, make_data, embeddings, monkeypatch):
        """A user with all items but one gets that one as the only candidate with weight."""
        monkeypatch.setattr("fedrec.perturb.upc_sdg._PRIVACY_WEIGHT", 0.0)
        data = make_data([0] * 39, list(range(39)), 1, 40)
        users, items = embeddings
        config, similarity = GeneratorConfig(steps=3, candidates=40), Similarity(items, "paper")
        given = data.rows, np.array([0]), 1.0, users[:1], similarity, torch_stream(0, "t")
        found = []
        monkeypatch.setattr(
            "fedrec.perturb.upc_sdg._losses",
            lambda *of: found.append(_losses(*of)[1].item()) or _losses(*of),
        )
        _train_generator(config, *given)
        only = -torch.sigmoid(users[0] @ items[39]).log().item()
        assert found == pytest.approx([only] * 3, rel=1e-5)


class TestWhole:
    @pytest.mark.parametrize("draw", ["sample", "best"])
    @pytest.mark.parametrize("generate", ["gumbel", "random", "fixed-similarity"])
    def test_everything_is_replaced_at_one(self, two_tastes, generate, draw):
        found = synthetic(two_tastes, generate=generate, draw=draw, **{"replacement-ratio": 1.0})
        rows = two_tastes.rows
        for user in range(60):
            own = rows.rows_of(user)
            new = found.rows.items[own]
            assert len(set(new)) == len(own) and not set(new) & set(rows.items[own])

    def test_the_fixed_similarity_is_the_nearest_to_gamma(self, two_tastes):
        """Ablation f: if one row of each user is replaced, only the user's own items are
        excluded."""
        rows = two_tastes.rows
        settings = {"generate": "fixed-similarity", "similarity": "cosine", "sensitivity": 0.3}
        made = UpcSdg(UpcSdgConfig.parse({**QUICK, **settings, "replacement-ratio": 0.1}), 0)
        new = made.perturb(two_tastes).rows.items
        _, embedded = trained_embeddings(made.config.embeddings, rows)
        similarity = Similarity(embedded, "cosine")
        away = (similarity.rows(torch.arange(40)) - 0.3).abs()
        chosen = np.flatnonzero(new != rows.items)
        for row in chosen:
            free = np.setdiff1d(np.arange(40), rows.items[rows.rows_of(rows.users[row])])
            assert away[rows.items[row], new[row]] == away[rows.items[row], free].min()
        assert len(chosen) == 60

    def test_the_rows_of_least_attention_are_replaced(self, two_tastes, monkeypatch):
        rows = two_tastes.rows
        logits = np.random.default_rng(0).random(len(rows)).astype(np.float32)
        monkeypatch.setattr("fedrec.perturb.upc_sdg._train_attention", lambda *of: logits)
        moved = synthetic(two_tastes, **{"replacement-ratio": 0.3}).rows.items != rows.items
        for own in map(rows.rows_of, range(60)):
            assert logits[own][moved[own]].max() < logits[own][~moved[own]].min()

    def test_threads_do_not_matter(self, two_tastes):
        before, found = torch.get_num_threads(), []
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                found.append(synthetic(two_tastes).rows.items)
                assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        assert (found[0] == found[1]).all()


# Mean similarity of items and their substitutes: by hand, by gamma, and of perturbations without
# embeddings.

ITEMS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [-1.0, 0.5]])


def test_mean_similarity_by_hand():
    originals, substitutes = np.array([0, 1, 2, 3]), np.array([1, 2, 3, 0])
    found = mean_similarity(originals, substitutes, Similarity(ITEMS, "paper"), "0.5")
    assert found["0.5"]["rows"] == 4
    for definition in ("paper", "released", "cosine"):
        alike = Similarity(ITEMS, definition).rows(torch.from_numpy(originals)).numpy()
        assert found["0.5"][definition] == pytest.approx(alike[np.arange(4), substitutes].mean())


def test_nothing_replaced_has_no_similarity(two_tastes):
    nothing = np.empty(0, dtype=np.int64)
    same = Perturbed(two_tastes.rows, np.arange(len(two_tastes.rows)))
    foreign = Perturbed(two_tastes.rows, np.full(len(two_tastes.rows), -1))
    assert mean_similarity(nothing, nothing, Similarity(ITEMS, "paper")) == {}
    assert all(measured_similarity(two_tastes.rows, one, 0) == {} for one in (same, foreign))


def test_random_items_are_less_alike_than_items_of_the_same_taste(two_tastes):
    """Items 0 to 19 are similar to each other, and so are the others."""
    rows = two_tastes.rows
    found = RandomisedResponse(RandomisedResponseConfig(epsilon=1.0), 0).perturb(two_tastes)
    moved = int((found.rows.items != rows.items).sum())
    random = measured_similarity(rows, found, 0)
    near = (rows.items // 20) * 20 + (rows.items % 20 + 1) % 20
    tasteful = Perturbed(dataclasses.replace(rows, items=near), np.arange(len(rows)))
    assert list(random) == ["all"] and random["all"]["rows"] == moved
    assert measured_similarity(rows, tasteful, 0)["all"]["cosine"] > random["all"]["cosine"] + 0.2


# The number of replaced rows, their selection and their substitutes.


def replaced(data, seed=0, **settings):
    config = RandomReplacement.Config.parse(settings)
    return RandomReplacement(config, seed).perturb(data)


@pytest.mark.parametrize(
    ("ratio", "rows", "count"), [(1.0, 7, 7), (0.2, 2, 0), (0.2, 3, 1), (0.5, 3, 2), (0.35, 10, 4)]
)
def test_the_count_is_rounded_half_up(make_data, ratio, rows, count):
    data = make_data([0] * rows, list(range(rows)))
    assert replaced_counts(data.rows, ratio).tolist() == [count]


def test_the_rows_of_least_score_are_chosen(make_data):
    data = make_data([1, 0, 1, 0, 1], [0, 1, 2, 3, 4])
    chosen = lowest(data.rows, np.array([0.3, 0.1, 0.2, 0.1, 0.9]), np.array([1, 2]))
    assert chosen.tolist() == [1, 2, 0]  # of equal scores the first row


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.8, 1.0])
def test_kept_share_and_distinct_unvisited_substitutes(two_tastes, ratio):
    rows, found = two_tastes.rows, replaced(two_tastes, **{"replacement-ratio": ratio})
    moved = found.rows.items != rows.items
    for user in range(rows.num_users):
        own = rows.rows_of(user)
        assert moved[own].sum() == int(ratio * len(own) + 0.5)
        new = found.rows.items[own][moved[own]]
        assert len(set(new)) == len(new) and not set(new) & set(rows.items[own])
    assert (found.origin == np.arange(len(rows))).all() and (found.rows.users == rows.users).all()
    if ratio == 0:
        assert found.rows.items.tobytes() == rows.items.tobytes()


def test_random_substitutes_are_uniform(make_data):
    """Chi-square over many users who have item 0 of six."""
    users = list(range(3000))
    data = make_data(users, [0] * len(users), len(users), 6)
    found = random_substitutes(data.rows, np.arange(len(users)), seed=1)
    assert chisquare(np.bincount(found, minlength=6)[1:]).pvalue > 1e-3


def test_samples_follow_the_softmax_of_what_the_user_has_not(make_data):
    """Chi-square against the softmax without the user's own item."""
    users = list(range(4000))
    data = make_data(users, [2] * len(users), len(users), 5)
    logits = torch.tensor([0.0, 1.0, 9.0, -1.0, 0.5])
    rows = np.arange(len(users))
    found = scored_substitutes(data.rows, rows, lambda s: logits.repeat(len(s), 1), "sample", 3)
    chance = np.exp(logits.double().numpy())
    chance[2] = 0
    seen = np.bincount(found, minlength=5)
    assert seen[2] == 0
    some = [0, 1, 3, 4]
    assert chisquare(seen[some], chance[some] / chance.sum() * len(users)).pvalue > 1e-3


def test_two_samples_of_a_user_follow_draws_without_replacement(make_data):
    """Of two rows with the same three equally likely items, each pair of different items is equally
    likely."""
    users = np.repeat(np.arange(3000), 2).tolist()
    data = make_data(users, [0, 1] * 3000, 3000, 5)
    rows = np.arange(6000)
    found = scored_substitutes(data.rows, rows, lambda s: torch.zeros(len(s), 5), "sample", 0)
    found = found.reshape(-1, 2)
    assert (found[:, 0] != found[:, 1]).all() and found.min() == 2
    assert chisquare(np.unique(found[:, 0] * 5 + found[:, 1], return_counts=True)[1]).pvalue > 1e-3


@pytest.mark.parametrize("draw", ["best", "sample"])
def test_a_user_can_have_all_rows_replaced(make_data, draw):
    """Twenty rows that all prefer the same item, and exactly twenty other items."""
    data = make_data([0] * 20, list(range(20)), 1, 40)
    scores = torch.arange(40, dtype=torch.float32) * 50
    rows = np.arange(20)
    found = scored_substitutes(data.rows, rows, lambda s: scores.repeat(len(s), 1), draw, 0)
    assert sorted(found) == list(range(20, 40))


def test_too_few_other_items_are_an_error(make_data):
    data = make_data([0] * 4 + [1], [0, 1, 2, 3, 4])
    problem = r"too few unvisited items .* user u0(.*\n)*.*at least 4(.*\n)*.*1 of 5"
    with pytest.raises(DataError, match=problem):
        replaced(data, **{"replacement-ratio": 1.0})


@pytest.mark.parametrize("role", ["clients", "tested"])
def test_users_without_training_rows_are_an_error(make_data, role):
    data = dataclasses.replace(make_data([0, 2], [0, 1], 3, 9), **{role: np.array([0, 1, 2])})
    for perturb in (replaced, synthetic):
        with pytest.raises(DataError, match=r"training or test user\n.*1 users without one \(u1\)"):
            perturb(data)


def test_nothing_without_weight_is_drawn_at_either_end():
    """The smallest and the largest share, with weight in the middle alone."""
    weights = np.zeros((1, 800), dtype=np.float32)
    weights[0, [300, 310]] = 0.1, 0.3
    found = _drawn_by_weight(weights, np.array([[0.0, np.nextafter(1.0, 0.0)]]))
    assert found.tolist() == [[300, 310]]
