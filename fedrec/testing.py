# SPDX-License-Identifier: Apache-2.0
"""Contract tests for components: subclass one, name your class, and pytest runs its tests.

    from fedrec.testing import StepContract
    from mypackage.steps import MyStep

    class TestMyStep(StepContract):
        component = MyStep
        settings = {"epochs": 2}

There is one contract per kind. They need the packages above this core library, so they live in
`simulations.contracts` and are looked up by name on first use, as `fedrec.run` is.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = "simulations.contracts"
_CONTRACTS = (
    "Attack",
    "Baseline",
    "Callback",
    "Dataset",
    "Mechanism",
    "Metric",
    "Model",
    "Perturbation",
    "Sampler",
    "Split",
    "Step",
    "Strategy",
)

__all__ = [f"{kind}Contract" for kind in _CONTRACTS]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_HOME), name)
    raise AttributeError(f"module 'fedrec.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
