# SPDX-License-Identifier: Apache-2.0
"""What is said of training paths, and compiled before the first round."""

from types import SimpleNamespace
from typing import cast

import pytest

from fedrec.protocol.orders import COMPILED_LOSS
from server.cohorts.roster import Roster
from server.forecast.training_paths import announce_paths


@pytest.mark.parametrize(
    ("paths", "kernel", "losses"),
    [
        ({"sgd": "kernel"}, True, False),
        ({"sequence": f"blocks{COMPILED_LOSS}", "sgd": "blocks"}, False, True),
        ({"sgd": "blocks (a reason)"}, False, False),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_what_nodes_need_is_compiled_once(monkeypatch, paths, kernel, losses, cached):
    called = []
    monkeypatch.setattr("fedrec.runtime.compiled_code.is_compiled", lambda *_: cached)
    monkeypatch.setattr(
        "fedrec.cohort.kernel.warm_up.compile_kernel", lambda: called.append("kernel")
    )
    monkeypatch.setattr(
        "fedrec.models.sequential._native.compile_losses", lambda: called.append("losses")
    )
    lines = []
    roster = SimpleNamespace(presences=[SimpleNamespace(paths=paths)] * 2)
    announce_paths(cast(Roster, roster), lines.append)
    wanted = [name for name, one in (("kernel", kernel), ("losses", losses)) if one and not cached]
    assert called == wanted and len(lines) == 1 + len(wanted)
    assert all(f"step {step}: {path}" in lines[0] for step, path in paths.items())
