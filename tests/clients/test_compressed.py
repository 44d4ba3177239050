# SPDX-License-Identifier: Apache-2.0
"""Runs with compressed updates: nothing changes when nothing is lost, bytes by hand, what is left
out is sent later, the clip holds, and what cannot be compressed is refused."""

import json

import numpy as np
import pytest

from clients.training.compressed import CompressedUpdates
from fedrec.errors import FedrecError
from fedrec.privacy.ledger import Ledger

LOSSLESS = "compression={name='rounding', bits=32}"
WEIGHTED = "strategy={name='fedavg', weighting='examples'}"
MF = "model={name='mf', factors=4}", "step.private-parameters=['user.*']"


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), MF])
@pytest.mark.parametrize(
    "more", ["strategy.name=reptile", "strategy={name='fedavg', weighting='examples'}"]
)
def test_nothing_changes_when_nothing_is_lost(run_tiny, model, more):
    plain = run_tiny(more, *model, output="plain")
    found = run_tiny(more, LOSSLESS, *model, output="compressed")
    for name, value in plain.parameters.items():
        assert np.allclose(found.parameters[name], value, rtol=1e-4, atol=1e-6), name
    cost = json.loads((found.folder / "result.json").read_text())["cost"]
    assert cost["bytes-up"] == found.rounds["bytes-up"].sum()


def test_bytes_are_those_of_the_rows_that_clients_change(run_tiny, monkeypatch):
    """Two-byte row numbers at most, four bytes a number; parameters that stay are not counted."""
    seen = []
    sent = CompressedUpdates._sent

    def count(self, client, update, arrays, clip, share):
        size = 0
        for name, change in update.items():
            assert not name.startswith("user")
            if hasattr(change, "rows"):
                size += len(change.rows) * (1 if len(arrays[name]) <= 256 else 2)
                size += 4 * change.values.size
            else:
                size += 4 * change.size
        seen.append(size)
        return sent(self, client, update, arrays, clip, share)

    monkeypatch.setattr(CompressedUpdates, "_sent", count)
    result = run_tiny(LOSSLESS, *MF, "engine.name=serial")
    assert seen and result.rounds["bytes-up"].sum() == sum(seen)


def test_what_is_left_out_is_found_on_any_number_of_nodes(run_tiny):
    """The work is not balanced between nodes: a client's next update is made where it is kept."""
    top = "compression={name='top-k', share=0.1, bits=32}"
    alone, divided = (
        run_tiny(top, "rounds=3", "engine.name=serial", f"engine.nodes={nodes}", output=str(nodes))
        for nodes in (1, 3)
    )
    assert divided.rounds["bytes-up"].tolist() == alone.rounds["bytes-up"].tolist()
    for name, value in alone.parameters.items():
        assert np.allclose(divided.parameters[name], value, rtol=1e-4, atol=1e-6), name


def test_what_is_left_out_is_sent_later(run_tiny, monkeypatch):
    """Over all rounds of a client, what was sent and what is left are what its updates were."""
    updates: dict = {}
    left: dict = {}
    sent: dict = {}
    one_block = CompressedUpdates.of_block

    def watched(self, clients, trained, arrays, names, tables, shares, clip):
        found = one_block(self, clients, trained, arrays, names, tables, shares, clip)
        for place, client in enumerate(clients):
            change = trained.changes_of(place)["item.factors"].double().numpy()
            updates[client] = updates.get(client, 0) + change
            sent[client] = sent.get(client, 0) + found[place]["item.factors"].dense(change)
            kept = self.errors[client]
            left[client] = np.zeros(change.shape)
            rows = kept["compression/rows/item.factors"].astype(np.int64)
            left[client][rows] = kept["compression/values/item.factors"]
            assert left[client][rows].any(1).all()  # rows without a rest are not kept
        return found

    monkeypatch.setattr(CompressedUpdates, "of_block", watched)
    top = "compression={name='top-k', share=0.2, bits=8}"
    run_tiny(top, *MF, "rounds=6", "engine.name=serial", "sampler.cohort=9")
    assert any(np.abs(value).max() > 0 for value in left.values())
    for client, whole in updates.items():
        assert np.allclose(sent[client] + left[client], whole, atol=1e-5)


@pytest.mark.parametrize("feedback", ["true", "false"])
def test_what_is_left_out_is_kept_with_error_feedback_alone(run_tiny, monkeypatch, feedback):
    saved: list = []
    monkeypatch.setattr(
        "clients.training.round.keep_private",
        lambda node, kept, round_: saved.extend(kept.values()),
    )
    run_tiny(f"compression={{name='top-k', share=0.2, error-feedback={feedback}}}")
    names = {name for arrays in saved for name in arrays}
    assert bool(names) == (feedback == "true")
    assert all(name.startswith("compression/") for name in names)


def test_privacy_costs_the_same_and_the_clip_holds(run_tiny, monkeypatch):
    """Rounding makes some updates longer; none of them is above the clip norm."""
    private = "privacy={clip-norm=0.01, noise-multiplier=1.0, delta=1e-5}"
    norms = []
    one_block = CompressedUpdates.of_block

    def watched(self, *arguments):
        found = one_block(self, *arguments)
        norms.extend(
            np.sqrt(sum(np.square(getattr(c, "values", c)).sum() for c in update.values()))
            for update in found
        )
        return found

    plain = run_tiny(private, output="plain")
    monkeypatch.setattr(CompressedUpdates, "of_block", watched)
    run_tiny(private, "compression={name='rounding', bits=2}", output="compressed")
    assert norms and max(norms) <= 0.01 * (1 + 1e-9) and max(norms) > 0.0099
    ledgers = [
        Ledger(plain.folder.parent / name / "privacy.jsonl") for name in ("plain", "compressed")
    ]
    assert ledgers[0].spent(1e-5).epsilon == ledgers[1].spent(1e-5).epsilon > 0


def test_sums_without_signs_may_have_signs_after_compression(load_tiny, tmp_path):
    """So that they are accounted as updates with signs are: 2S and not sqrt(2) S."""
    from server.privacy.phase_plans import PhasePlans

    counted = (
        "model.item-bias=true",
        "step={name='counts'}",
        "strategy={name='fedavg', weighting='uniform'}",
        "privacy={clip-norm=1.0, noise-multiplier=1.0, delta=1e-5}",
    )
    made = [
        PhasePlans.before_a_run(load_tiny(*counted, *more), np.arange(18)).plans
        for more in ((), ("compression={name='rounding', bits=8}",))
    ]
    (plain,), (compressed,) = (plans.values() for plans in made)
    assert compressed.sensitivity == pytest.approx(plain.sensitivity * 2**0.5)


@pytest.mark.parametrize(
    "override",
    [
        "privacy={clip-norm=1.0, noise-multiplier=1.0, placement='local'}",
        "strategy.name=median",
        "compression.bits=7",
        "compression.name=nothing",
    ],
)
def test_what_has_no_effect_is_refused(run_tiny, override):
    with pytest.raises(FedrecError, match=r"compression|bits"):
        run_tiny("compression={name='rounding', bits=8}", override)


GRID = "compression={name='rounding', bits=8, largest=0.05}"
UNIFORM = "strategy={name='fedavg', weighting='uniform'}"
PRIVATE = "privacy={clip-norm=0.05, noise-multiplier=1.0, delta=1e-5}"


@pytest.mark.slow
@pytest.mark.parametrize("more", [(UNIFORM,), (PRIVATE,)], ids=["bare", "private"])
def test_masked_sums_on_a_grid_are_the_sums_without_masks(run_tiny, more):
    """Their messages have two bytes a number: 6 clients of at most 127 steps each need 11 bits."""
    nodes = "engine={name='serial', nodes=3}"
    plain = run_tiny(GRID, *more, nodes, output="plain")
    masked = run_tiny(GRID, *more, nodes, "secure-aggregation=true", output="masked")
    for name, value in plain.parameters.items():
        assert np.allclose(masked.parameters[name], value, rtol=1e-5, atol=1e-7), name
    numbers = sum(value.size for value in plain.parameters.values())
    expected = masked.rounds["num-clients"] * (2 * numbers + 6 * 8)
    assert masked.rounds["bytes-up"].tolist() == expected.tolist()


def test_the_clip_holds_on_a_grid_too(run_tiny, monkeypatch):
    """A coarse grid, on which rounding makes updates much longer than the clip norm."""
    norms = []
    one_block = CompressedUpdates.of_block

    def watched(self, *arguments):
        found = one_block(self, *arguments)
        for update in found:
            values = [getattr(change, "values", change) for change in update.values()]
            multiples = np.concatenate([value.ravel() for value in values]) * (127 / 0.5)
            assert np.allclose(multiples, np.rint(multiples), atol=1e-6)
            norms.append(np.sqrt(sum(np.square(value).sum() for value in values)))
        return found

    monkeypatch.setattr(CompressedUpdates, "of_block", watched)
    coarse = "compression={name='rounding', bits=8, largest=0.5}"
    run_tiny("privacy={clip-norm=0.02, noise-multiplier=1.0, delta=1e-5}", coarse)
    assert norms and max(norms) <= 0.02 and np.mean(norms) > 0.015


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("compression={name='rounding', bits=8}",), "without a common grid"),
        (("compression={name='top-k'}",), "without a common grid"),
        ((GRID, WEIGHTED), "weighting = 'uniform'"),
        (("compression={name='rounding', bits=32, largest=0.1}",), "bits = 2, 4 or 8"),
    ],
)
def test_what_masks_cannot_add_is_refused(run_tiny, overrides, words):
    with pytest.raises(FedrecError) as error:
        run_tiny(*overrides, "secure-aggregation=true", "engine={name='serial', nodes=3}")
    assert words in error.value.text()
