# SPDX-License-Identifier: Apache-2.0
"""What the vectors of a user's own table gain, for items that nobody has used and for the others.

Before the run a fifth of the items is held out as a whole (split `new-items`), and the system of
the run ranks these items alone, and other held-out items of the same users, with the vectors and
without them. This looks at held-out rows, which no guarantee covers, so that it is not done under
privacy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec.errors import FedrecError
from fedrec.evaluation.tables import NEW, OLD
from fedrec.experiment.loading import load
from fedrec.runs.result import Result
from simulations.runner import run

_METRIC = "ndcg@10"
_BESIDE = ("content-map", "random")
UNKNOWN = "vectors: their gain is not measured under privacy or on more than 5 million rows"


def gain_lines(declared: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """What the vectors gain, in lines.

    Args:
        declared: the experiment on the table, as a TOML table.
        overrides: as for `--set`.
    """
    trial = load(declared, overrides).table()
    trial.pop("early-stopping", None)
    trial["split"] = {"name": "new-items"}
    trial["evaluation"] = {"every": 0, "ks": [10], "baselines": list(_BESIDE)}
    names = [name for name in trial["dataset"] if name != "item-vectors"]
    without = {
        **trial,
        "dataset": {name: trial["dataset"][name] for name in names},
        "evaluation": {**trial["evaluation"], "baselines": []},
    }
    try:
        given = _result(trial)
        bare = _result(without)
    except FedrecError as error:
        return [f"vectors: what they gain could not be measured: {error.text().splitlines()[0]}"]
    by_content, chance = (given.baselines[name][NEW + _METRIC] for name in _BESIDE)
    new, old = (
        f"{given.metrics[kind + _METRIC]:.4f} with them, {bare.metrics[kind + _METRIC]:.4f} without"
        for kind in (NEW, OLD)
    )
    return [
        f"vectors, for new items (a fifth, held out as a whole, ranked alone): {_METRIC} {new}"
        f" (content-map {by_content:.4f}, chance {chance:.4f})",
        f"vectors, for other items of the same users (ranked alone): {_METRIC} {old}",
    ]


def _result(trial: Mapping[str, Any]) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return run(dict(trial), output=Path(folder) / "run")
