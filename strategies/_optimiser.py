# SPDX-License-Identifier: Apache-2.0
"""A PyTorch optimiser over named numpy arrays, with a state that can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedrec.nn.optimisers import SGD, Adam

Kind = Literal["adam", "sgd"]


class Optimiser:
    """Adam (Kingma and Ba 2015) or gradient descent.

    Args:
        kind: which.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._memory: dict[str, dict[str, Tensor]] = {}

    def step(
        self,
        values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rates: Mapping[str, float],
        decays: Mapping[str, float],
    ) -> None:
        """Update values in place, each with its own learning rate and L2 penalty, which is added to
        the gradient."""
        groups: list[dict[str, Any]] = []
        for name, value in values.items():
            value.grad = gradients[name]
            groups.append({"params": [value], "lr": rates[name], "weight_decay": decays[name]})
        optimiser = self._made(groups)
        for name, value in values.items():
            if name in self._memory:
                optimiser.state[value] = self._memory[name]
        optimiser.step()
        self._memory = {
            name: {
                key: kept
                for key, kept in optimiser.state[value].items()
                if isinstance(kept, Tensor)
            }
            for name, value in values.items()
        }

    def state(self) -> dict[str, np.ndarray]:
        """The optimiser's state as named arrays."""
        return {
            f"{name}/{key}": v.numpy()
            for name, own in self._memory.items()
            for key, v in own.items()
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._memory = {}
        for key, array in state.items():
            name, _, part = key.rpartition("/")
            self._memory.setdefault(name, {})[part] = torch.from_numpy(np.array(array))

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if self.kind == "adam":
            return Adam(groups, fused=True)
        return SGD(groups, lr=0.0)
