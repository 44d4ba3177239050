# SPDX-License-Identifier: Apache-2.0
"""Equations 8 and 9 against loops over plain torch modules."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedrec.pretext.contrast import Contrast, info_nce, item_loss, segment_loss
from fedrec.pretext.encoder import initial_encoder
from fedrec.pretext.views import ViewLayout

LAYOUT = ViewLayout(session=4, item_negatives=2, segment=2, segment_negatives=3)
NONE = -1
# Item-masked session | true item, negatives | segment-masked session | true segment, three negative
# segments.
VIEWS = [
    [[9, 1, 2, 3], [0, 9, 8], [0, 5, 6, 3], [1, 2, 5, 6, 6, 7, 3, 4]],
    [[4, 7, NONE, NONE], [5, 7, 6], [8, 5, NONE, NONE], [4, NONE, 8, NONE, 1, NONE, 1, NONE]],
    [[3, 3, 7, NONE], [3, 7, 7], [NONE] * 4, [NONE] * 8],
    [[NONE] * 4, [NONE] * 3, [NONE] * 4, [NONE] * 8],
]


@pytest.fixture
def setting():
    """Encoders of one client, an item table, and the rows of `VIEWS`."""
    parameters = initial_encoder(3, 5, torch.Generator().manual_seed(0))
    table = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    return (
        parameters,
        table,
        torch.tensor([[item for part in view for item in part] for view in VIEWS]),
    )


class Plain(nn.Module):
    """The two encoders with torch's own modules."""

    def __init__(self, parameters, table):
        super().__init__()
        self.table = nn.Embedding.from_pretrained(table.clone(), freeze=False)
        self.gru = nn.GRU(3, 5, batch_first=True)
        self.items = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5, bias=False))
        self.gru.load_state_dict(
            {
                "weight_ih_l0": parameters["session.gru.input.weight"].T,
                "weight_hh_l0": parameters["session.gru.state.weight"].T,
                "bias_ih_l0": parameters["session.gru.input.bias"],
                "bias_hh_l0": parameters["session.gru.state.bias"],
            }
        )
        first = {
            "weight": parameters["session.item0.weight"].T,
            "bias": parameters["session.item0.bias"],
        }
        self.items[0].load_state_dict(first)
        self.items[2].load_state_dict({"weight": parameters["session.item1.weight"].T})

    def session(self, items):
        items = torch.tensor([item for item in items if item != NONE])
        return self.gru(self.table(items).unsqueeze(0))[1][0, 0]

    def item_loss(self):
        losses = []
        for masked, candidates, _, _ in VIEWS[:3]:
            scores = self.items(self.table(torch.tensor(candidates))) @ self.session(masked)
            losses.append(F.cross_entropy(scores.unsqueeze(0), torch.tensor([0])))
        return torch.stack(losses).mean()

    def segment_loss(self):
        losses = []
        for _, _, masked, segments in VIEWS[:2]:
            encoded = torch.stack(
                [self.session(segments[start : start + 2]) for start in range(0, 8, 2)]
            )
            losses.append(
                F.cross_entropy((encoded @ self.session(masked)).unsqueeze(0), torch.tensor([0]))
            )
        return torch.stack(losses).mean()


@pytest.mark.parametrize("measure", [item_loss, segment_loss])
def test_losses_and_gradients_equal_those_of_plain_modules(setting, measure):
    parameters, table, views = setting
    leaves = {name: value.unsqueeze(0).requires_grad_() for name, value in parameters.items()}
    own = table.clone().requires_grad_()
    found = measure(leaves, own[views.clamp(min=0)].unsqueeze(0), (views >= 0).unsqueeze(0), LAYOUT)
    found.sum().backward()
    plain = Plain(parameters, table)
    expected = getattr(plain, measure.__name__)()
    expected.backward()
    torch.testing.assert_close(found, expected.unsqueeze(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own.grad, plain.table.weight.grad, rtol=1e-5, atol=1e-6)
    assert own.grad.abs().max() > 1e-3
    weight = leaves["session.gru.state.weight"].grad[0]
    torch.testing.assert_close(weight, plain.gru.weight_hh_l0.grad.T, rtol=1e-5, atol=1e-6)
    if measure is item_loss:
        first = leaves["session.item0.weight"].grad[0]
        torch.testing.assert_close(first, plain.items[0].weight.grad.T, rtol=1e-5, atol=1e-6)


def test_clients_do_not_see_each_other(setting):
    parameters, table, views = setting
    both = {name: torch.stack([value, 2 * value]) for name, value in parameters.items()}
    rows = torch.stack([views, views.flip(0)])
    found = segment_loss(both, table[rows.clamp(min=0)], rows >= 0, LAYOUT)
    for client, scale in ((0, 1), (1, 2)):
        own = {name: scale * value.unsqueeze(0) for name, value in parameters.items()}
        alone = segment_loss(
            own, table[views.clamp(min=0)].unsqueeze(0), (views >= 0).unsqueeze(0), LAYOUT
        )
        torch.testing.assert_close(found[client], alone[0])


@pytest.mark.parametrize(("measure", "temperature"), [(item_loss, 0.2), (segment_loss, 0.7)])
def test_directions_are_compared_by_torchs_cosines(setting, measure, temperature):
    _, table, views = setting
    own = table.clone().requires_grad_()
    contrast = Contrast("mean", temperature)
    rows = own[views.clamp(min=0)].unsqueeze(0)
    found = measure({}, rows, (views >= 0).unsqueeze(0), LAYOUT, contrast)
    found.sum().backward()
    plain = table.clone().requires_grad_()
    expected = cosine_loss(plain, measure is item_loss, temperature)
    expected.backward()
    torch.testing.assert_close(found, expected.unsqueeze(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own.grad, plain.grad, rtol=1e-4, atol=1e-5)
    assert own.grad.abs().max() > 1e-3


def cosine_loss(table, of_items, temperature):
    """Equation 8, or 9, with cosines of mean directions, one view after the other."""

    def direction(items):
        return sum(table[item] / table[item].norm() for item in items if item != NONE)

    losses = []
    for masked, candidates, replaced, segments in VIEWS[: 3 if of_items else 2]:
        query = direction(masked if of_items else replaced)
        others = [[item] for item in candidates]
        if not of_items:
            others = [segments[start : start + 2] for start in range(0, 8, 2)]
        scores = [F.cosine_similarity(query, direction(one), dim=0) for one in others]
        scores = torch.stack(scores).unsqueeze(0) / temperature
        losses.append(F.cross_entropy(scores, torch.tensor([0])))
    return torch.stack(losses).mean()


def test_an_empty_place_is_as_if_the_item_had_never_been_there(setting):
    """For every place, also the first."""
    _, table, _ = setting
    contrast = Contrast("mean", 0.5)
    sessions = [[NONE, 1, 2, 3], [1, NONE, 2, 3], [1, 2, 3, NONE]]
    views = [[*session, 5, 6, 7, *([NONE] * 12)] for session in sessions]
    rows = torch.tensor(views)[:, None, None]
    found = [
        item_loss({}, table[row.clamp(min=0)], row >= 0, LAYOUT, contrast).item() for row in rows
    ]
    assert found == pytest.approx([found[0]] * 3) and found[0] > 0


def test_without_views_the_loss_is_zero(setting):
    parameters, table, _ = setting
    own = {name: value.unsqueeze(0) for name, value in parameters.items()}
    for count in (0, 2):
        rows = torch.full((1, count, LAYOUT.width), NONE)
        for measure in (item_loss, segment_loss):
            assert measure(own, table[rows.clamp(min=0)], rows >= 0, LAYOUT).tolist() == [0]


def test_info_nce_is_torchs_cross_entropy_with_the_first_class():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 6, 8, generator=generator)
    candidates = torch.randn(4, 6, 5, 8, generator=generator)
    scores = torch.einsum("cvh,cvkh->cvk", query, candidates)
    expected = F.cross_entropy(
        scores.flatten(0, 1), torch.zeros(24, dtype=torch.int64), reduction="none"
    )
    torch.testing.assert_close(info_nce(query, candidates).flatten(), expected)
