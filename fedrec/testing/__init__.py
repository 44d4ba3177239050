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
import pkgutil
from typing import Any

from fedrec.components.registry import KINDS

_HOME = "simulations.contracts"
_BESIDE = {"attack": "poisoning", "callback": "sampler", "split": "dataset"}
"""Kinds whose contract is in the file of another."""
_MODULES = {
    f"{kind.name.capitalize()}Contract": _BESIDE.get(kind.name, kind.name) for kind in KINDS
}

__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        contracts = importlib.import_module(_HOME)
        found = pkgutil.walk_packages(contracts.__path__, f"{contracts.__name__}.")
        home = next(one.name for one in found if one.name.endswith(f".{_MODULES[name]}"))
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'fedrec.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
