# SPDX-License-Identifier: Apache-2.0
"""fedrec: federated recommender systems with differential privacy, simulated, measured and
deployed.

    result = fedrec.run("privrec-synthetic", ["rounds=5"])
    result.metrics["hits@10"], result.rounds, result.users

`run`, `resume` and `try_table` live in the package `simulations`, above this core library, and are
looked up by name on first use: this package imports nothing from the packages above it, and `import
fedrec` stays fast.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fedrec.errors import require_own_packages

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedrec.data.interactions import Interactions
    from fedrec.errors import FedrecError
    from fedrec.experiment.schema import Experiment, load
    from fedrec.runs.folder import Result

    run: Callable[..., Result]
    resume: Callable[..., Result]
    try_table: Callable[..., Result]

__all__ = [
    "Experiment",
    "FedrecError",
    "Interactions",
    "Result",
    "load",
    "resume",
    "run",
    "try_table",
]

_HOMES = {
    "run": "simulations.runner",
    "resume": "simulations.runner",
    "try_table": "simulations.own_table",
    "load": "fedrec.experiment.schema",
    "Experiment": "fedrec.experiment.schema",
    "FedrecError": "fedrec.errors",
    "Interactions": "fedrec.data.interactions",
    "Result": "fedrec.runs.folder",
}

require_own_packages()
try:
    __version__ = version("fedrec")
except PackageNotFoundError:  # running from a source tree that was not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedrec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
