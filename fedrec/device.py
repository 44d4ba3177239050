# SPDX-License-Identifier: Apache-2.0
"""Which device the local work runs on."""

from __future__ import annotations

import torch

from fedrec.errors import EngineError


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a torch device.

    Raises:
        EngineError: a CUDA device is asked for and there is none of that number.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"there is no device {name!r}",
            expected=f"one of {torch.cuda.device_count()} CUDA devices",
            got=name,
            fix="--device cpu, or --device auto",
        )
    return device
