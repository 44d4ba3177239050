# SPDX-License-Identifier: Apache-2.0
"""Initial weights of layers."""

import math

import torch
from torch import Tensor


def uniform(rows: int, columns: int, bound: float, generator: torch.Generator) -> Tensor:
    """Weights `[rows, columns]`, uniform in [-bound, bound)."""
    return (2 * torch.rand(rows, columns, generator=generator) - 1) * bound


def glorot(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Glorot-uniform weights `[rows, columns]`."""
    return uniform(rows, columns, math.sqrt(6 / (rows + columns)), generator)


def kaiming(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Kaiming-uniform weights `[rows, columns]`, for ReLU (He et al. 2015)."""
    return uniform(rows, columns, math.sqrt(6 / rows), generator)
