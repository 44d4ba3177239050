# SPDX-License-Identifier: Apache-2.0
"""PyTorch's optimisers without its compiler.

`torch.optim` tells the compiler to leave some of its methods alone, and imports `torch._dynamo` for
that with the first optimiser of a process, which takes longer than `import torch` itself. Nothing
is compiled here; the arithmetic is PyTorch's.
"""

from __future__ import annotations

import inspect
from typing import TypeVar, cast

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _uncompiled(optimiser: type[Kind]) -> type[Kind]:
    """A subclass whose methods are those below what they are wrapped in."""
    methods = {
        "add_param_group": inspect.unwrap(optimiser.add_param_group),
        "zero_grad": inspect.unwrap(optimiser.zero_grad),
        "step": torch.no_grad()(inspect.unwrap(optimiser.step)),
    }
    return cast(type[Kind], type(optimiser.__name__, (optimiser,), methods))


Adam = _uncompiled(torch.optim.Adam)
AdamW = _uncompiled(torch.optim.AdamW)
SGD = _uncompiled(torch.optim.SGD)
