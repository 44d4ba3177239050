# SPDX-License-Identifier: Apache-2.0
"""Contract tests for components: subclass one, name your class, and pytest runs its tests.

    from fedrec.testing import StepContract
    from mypackage.steps import MyStep

    class TestMyStep(StepContract):
        component = MyStep
        settings = {"epochs": 2}

There is one contract per kind; those of samplers, callbacks, mechanisms, perturbations,
compressions and poisoning attacks share their tests. They need the packages above this core
library, so they live in `simulations.contracts` and are looked up by name on first use, as
`fedrec.run` is.
"""

import importlib
from typing import Any

from fedrec.components.registry import KINDS

_HOME = "simulations.contracts"
_FILES = {
    **dict.fromkeys(("model", "step", "strategy"), "training"),
    **dict.fromkeys(("dataset", "split", "baseline", "metric", "attack"), "data"),
}
"""File of each kind's contract; the other kinds share one."""
_MODULES = {
    f"{kind.name.capitalize()}Contract": f"{_HOME}.{_FILES.get(kind.name, 'base')}"
    for kind in KINDS
}

__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'fedrec.testing' has no attribute {name!r}")
