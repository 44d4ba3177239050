# SPDX-License-Identifier: Apache-2.0
"""Self-supervised training on sessions."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import nn
from torch.nn import functional as F

from fedrec import pretext
from fedrec.data.interactions import FeatureTable, Schema
from fedrec.models.privrec import PrivRec, PrivRecConfig
from fedrec.pretext import SessionConfig, SessionTask

# Equations 8 and 9 against loops over plain torch modules.

NONE = -1
# Item-masked session | true item, negatives | segment-masked session | true segment, four negative
# segments.
VIEWS = [
    [[9, 1, 2, 3], [0, 9, 8], [0, 5, 6, 3], [1, 2, 5, 6, 6, 7, 3, 4, 8, 9]],
    [[4, 7, NONE, NONE], [5, 7, 6], [8, 5, NONE, NONE], [4, NONE, 8, NONE, *[1, NONE] * 3]],
    [[3, 3, 7, NONE], [3, 7, 7], [NONE] * 4, [NONE] * 10],
    [[NONE] * 4, [NONE] * 3, [NONE] * 4, [NONE] * 10],
]
LOSSES = ("item_loss", "segment_loss")


def task(**settings):
    """A task on sessions of up to four items, with two negative items."""
    model = PrivRec(PrivRecConfig(), Schema(10, FeatureTable(10), (), "ranking"))
    config = SessionConfig(session_length=4, item_negatives=2, hidden=5, **settings)
    return SessionTask(config, model)


def measured(name, parameters, table, views, **settings):
    """A loss of views `[C, V, width]` with the rows of a table."""
    measure = getattr(task(**settings), name)
    return measure(parameters, table[views.clamp(min=0)], views >= 0)


@pytest.fixture
def setting():
    """Encoders of one client, an item table, and the rows of `VIEWS`."""
    parameters = pretext._initial_encoder(3, 5, torch.Generator().manual_seed(0))
    table = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    views = [[item for part in view for item in part] for view in VIEWS]
    return parameters, table, torch.tensor(views)


def expected_loss(name, session, item, score):
    """Equation 8, or 9, one view after the other; a view without a query does not count."""
    losses = []
    for masked, candidates, replaced, segments in VIEWS:
        query = masked if name == "item_loss" else replaced
        if query[0] == NONE:
            continue
        if name == "item_loss":
            others = [item(candidate) for candidate in candidates]
        else:
            others = [session(segments[start : start + 2]) for start in range(0, 10, 2)]
        scores = torch.stack([score(session(query), other) for other in others])
        losses.append(F.cross_entropy(scores[None], torch.tensor([0])))
    return torch.stack(losses).mean()


def by_modules(name, leaves, table):
    """A loss with torch's own modules; returns it, and gradients by the table and some weights."""
    own = {name: leaf.detach()[0] for name, leaf in leaves.items()}
    rows = nn.Embedding.from_pretrained(table.detach().clone(), freeze=False)
    gru = nn.GRU(3, 5, batch_first=True)
    first, second = nn.Linear(3, 5), nn.Linear(5, 5, bias=False)
    for part, ours in (("ih", "input"), ("hh", "state")):
        getattr(gru, f"weight_{part}_l0").data = own[f"session.gru.{ours}.weight"].T
        getattr(gru, f"bias_{part}_l0").data = own[f"session.gru.{ours}.bias"]
    first.weight.data = own["session.item0.weight"].T
    first.bias.data = own["session.item0.bias"]
    second.weight.data = own["session.item1.weight"].T

    def session(items):
        items = torch.tensor([item for item in items if item != NONE])
        return gru(rows(items)[None])[1][0, 0]

    def item(number):
        return second(torch.relu(first(rows(torch.tensor(number)))))

    loss = expected_loss(name, session, item, torch.dot)
    loss.backward()
    weights = {"session.gru.state.weight": gru.weight_hh_l0}
    if name == "item_loss":
        weights["session.item0.weight"] = first.weight
    return loss, rows.weight.grad, {name: weight.grad.T for name, weight in weights.items()}


def by_cosines(name, table, temperature):
    """The same with cosines of mean directions."""
    leaf = table.detach().clone().requires_grad_()

    def direction(items):
        units = [leaf[item] / leaf[item].norm() for item in items if item != NONE]
        return sum(units, torch.zeros(3))

    def score(query, other):
        return F.cosine_similarity(query, other, dim=0) / temperature

    loss = expected_loss(name, direction, lambda item: direction([item]), score)
    loss.backward()
    return loss, leaf.grad, {}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [None, 0.2, 0.7])
def test_losses_and_gradients_are_those_of_modules_or_of_cosines(setting, name, temperature):
    parameters, table, views = setting
    table.requires_grad_()
    leaves = {n: value.unsqueeze(0).requires_grad_() for n, value in parameters.items()}
    if temperature is None:
        found = measured(name, leaves, table, views[None])
        expected, of_table, of_weights = by_modules(name, leaves, table)
    else:
        own = {"encoder": "mean", "temperature": temperature}
        found = measured(name, {}, table, views[None], **own)
        expected, of_table, of_weights = by_cosines(name, table, temperature)
    found.sum().backward()
    torch.testing.assert_close(found, expected.unsqueeze(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(table.grad, of_table, rtol=1e-4, atol=1e-5)
    assert table.grad.abs().max() > 1e-3
    for name, gradient in of_weights.items():
        torch.testing.assert_close(leaves[name].grad[0], gradient, rtol=1e-5, atol=1e-6)


def test_an_empty_place_is_as_if_the_item_had_never_been_there(setting):
    """For every place, also the first."""
    sessions = [[NONE, 1, 2, 3], [1, NONE, 2, 3], [1, 2, 3, NONE]]
    views = torch.tensor([[*session, 5, 6, 7, *([NONE] * 14)] for session in sessions])
    own = {"encoder": "mean", "temperature": 0.5}
    found = [measured("item_loss", {}, setting[1], row[None, None], **own).item() for row in views]
    assert found == pytest.approx([found[0]] * 3) and found[0] > 0


def test_without_views_the_loss_is_zero(setting):
    parameters, table, _ = setting
    own = {name: value.unsqueeze(0) for name, value in parameters.items()}
    for count in (0, 2):
        views = torch.full((1, count, task().layout.width), NONE)
        assert [measured(name, own, table, views).tolist() for name in LOSSES] == [[0], [0]]


# Masked views: replaced items, their replacements and frequencies, by enumeration.

VIEWS_LAYOUT = pretext._ViewLayout(session=6, item_negatives=3, segment=2, segment_negatives=4)


def parts(views, layout=VIEWS_LAYOUT):
    """The four parts of each view as lists without padding; segments as a list of lists."""
    bounds = np.cumsum((0, *layout.widths))
    for view in views:
        *items, segments = (view[start:stop] for start, stop in pairwise(bounds))
        rows = items, segments.reshape(-1, layout.segment)
        yield [[row[row >= 0].tolist() for row in part] for part in rows]


@pytest.mark.parametrize(
    ("items", "longest", "expected"),
    [
        (0, 5, []),
        (1, 5, []),
        (3, 2, [(1, 2)]),
        (6, 5, [(0, 3), (3, 3)]),
        (11, 4, [(0, 3), (3, 4), (7, 4)]),
    ],
)
def test_sessions_are_few_nearly_equal_and_of_two_items_at_least(items, longest, expected):
    starts, lengths = pretext._cut_sessions(items, longest)
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == expected


def test_every_view_hides_one_item_and_one_segment_of_its_session():
    """27 distinct items in five sessions; items from 100 on are unknown to the user."""
    sequence = np.random.default_rng(0).permutation(27)
    cuts = zip(*pretext._cut_sessions(27, 6), strict=True)
    sessions = [sequence[start : start + length].tolist() for start, length in cuts]
    views = pretext._draw_views(sequence, VIEWS_LAYOUT, 40, 200, np.random.default_rng(1))
    assert views.shape == (5 * 40, VIEWS_LAYOUT.width)
    for number, ((masked, candidates, replaced), segments) in enumerate(parts(views)):
        session = sessions[number // 40]
        ((spot,),) = np.nonzero(np.array(session) != masked)
        assert candidates[0] == session[spot] and candidates[1] == masked[spot]
        assert len(candidates) == 4 and all(27 <= item < 200 for item in candidates[1:])
        true, *negatives = segments
        begin = session.index(true[0])
        assert session[begin : begin + 2] == true
        assert replaced == session[:begin] + negatives[0] + session[begin + 2 :]
        for negative in negatives:
            assert not set(negative) & set(true)
            assert any(negative == list(pair) for own in sessions for pair in pairwise(own))


def test_a_masked_place_may_stay_empty():
    """The same draws except for the replacement; without segments there are no other parts."""
    sequence = np.random.default_rng(0).permutation(27)
    kept = VIEWS_LAYOUT.widths[0] + VIEWS_LAYOUT.widths[1]
    replaced, emptied = (
        pretext._draw_views(
            sequence, pretext._ViewLayout(6, 3, segment, 4, empty), 5, 200, np.random.default_rng(1)
        )
        for segment, empty in ((2, False), (0, True))
    )
    assert emptied.shape[1] == kept < replaced.shape[1]
    changed = emptied != replaced[:, :kept]
    assert (changed.sum(axis=1) == 1).all() and (emptied[changed] == -1).all()
    assert (replaced[:, :kept][changed] == replaced[:, VIEWS_LAYOUT.session + 1]).all()


def test_segments_and_negatives_are_drawn_uniformly():
    """Sessions 0-4 and 5-9, segments of two items: given the true segment, all windows off it are
    equally likely."""
    layout = pretext._ViewLayout(session=5, item_negatives=1, segment=2, segment_negatives=1)
    views = pretext._draw_views(np.arange(10), layout, 6000, 11, np.random.default_rng(0))
    seen = Counter((tuple(segments[0]), tuple(segments[1])) for _, segments in parts(views, layout))
    windows = [(at, at + 1) for at in (0, 1, 2, 3, 5, 6, 7, 8)]
    assert {true for true, _ in seen} == set(windows)
    for true in windows:
        possible = [window for window in windows if not set(window) & set(true)]
        counts = [seen[true, window] for window in possible]
        assert sum(counts) == sum(count for (own, _), count in seen.items() if own == true)
        assert chisquare(counts).pvalue > 1e-4
    of_true = [sum(c for (own, _), c in seen.items() if own == true) for true in windows]
    assert chisquare(of_true).pvalue > 1e-4


def test_one_item_and_a_whole_catalogue_give_no_view():
    for items in (1, 10):
        views = pretext._draw_views(np.arange(items), VIEWS_LAYOUT, 3, 10, np.random.default_rng(0))
        assert views.shape == (0, VIEWS_LAYOUT.width)


def test_a_repeated_item_is_never_its_own_negative():
    views = pretext._draw_views(np.array([1, 1]), VIEWS_LAYOUT, 50, 3, np.random.default_rng(0))
    for (_, candidates, replaced), segments in parts(views):
        assert candidates[0] == 1 and not {1} & set(candidates[1:])
        assert replaced == [1, 1] and segments == [[1]] * 5


def test_a_view_without_another_segment_says_so():
    """One session of four items: a segment in its middle overlaps every other one."""
    layout = pretext._ViewLayout(session=4, item_negatives=1, segment=2, segment_negatives=2)
    found = set()
    views = pretext._draw_views(np.arange(4), layout, 60, 6, np.random.default_rng(0))
    for (masked, _, replaced), segments in parts(views, layout):
        assert len(masked) == 4
        found.add((tuple(replaced), tuple(map(tuple, segments))))
    assert found == {
        ((), ((), (), ())),
        ((2, 3, 2, 3), ((0, 1), (2, 3), (2, 3))),
        ((0, 1, 0, 1), ((2, 3), (0, 1), (0, 1))),
    }
