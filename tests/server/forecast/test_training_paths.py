# SPDX-License-Identifier: Apache-2.0
"""What is said of training paths, and compiled before the first round."""

from types import SimpleNamespace
from typing import cast

import pytest

from fedrec.protocol.orders import COMPILED, COMPILED_LOSS, COMPILED_RECURRENCE
from server.cohorts.roster import Roster
from server.forecast.training_paths import announce_paths


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        ({"sgd": "kernel"}, ["train_clients"]),
        ({"maml": "kernel"}, ["train_clients", "move_by_meta_gradients"]),
        ({"fedrap": "kernel"}, ["train_additive"]),
        ({"sequence": f"blocks{COMPILED[COMPILED_LOSS]}", "sgd": "blocks"}, ["losses"]),
        ({"contrastive": f"blocks{COMPILED[COMPILED_RECURRENCE]}"}, ["recurrence"]),
        ({"sgd": "blocks (a reason)"}, []),
        ({"os:system": "kernel"}, []),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_what_nodes_need_is_compiled_once(monkeypatch, paths, wanted, cached):
    """Of the experiment's own steps: what nodes report names nothing that is imported."""
    called = []
    monkeypatch.setattr("fedrec.runtime.compiled_code.is_compiled", lambda *_, **__: cached)
    monkeypatch.setattr("fedrec.cohort.kernel.warm_up.compile_kernel", called.append)
    monkeypatch.setattr(
        "fedrec.models.sequential._native.compile_losses", lambda: called.append("losses")
    )
    monkeypatch.setattr(
        "fedrec.nn.native.recurrence.compile_recurrence", lambda: called.append("recurrence")
    )
    lines = []
    roster = SimpleNamespace(presences=[SimpleNamespace(paths=paths)] * 2)
    own = [name for name in paths if ":" not in name]
    announce_paths(cast(Roster, roster), own, lines.append)
    assert called == ([] if cached else wanted) and len(lines) == 1 + len(called)
    assert all(f"step {step}: {path}" in lines[0] for step, path in paths.items())
