# SPDX-License-Identifier: Apache-2.0
"""Whether native code can train a model with given settings, and why not."""

from __future__ import annotations

import torch

from fedrec.cohort.sgd import SgdSettings
from fedrec.models.base import Model
from fedrec.nn.declaration import KernelModel

_MOST_CATEGORIES = (
    1024  # of an item feature; a product with all rows of its table is taken in every step
)


def device_refusal(device: torch.device) -> str | None:
    """Why native code cannot train clients on a device; None: it can."""
    return None if device.type == "cpu" else f"the kernel runs on the CPU, not on {device.type}"


def kernel_refusal(
    model: Model, declared: KernelModel | None, sgd: SgdSettings, device: torch.device
) -> str | None:
    """Why native code cannot train a model, in a few words; None: it can.

    Args:
        model: the model.
        declared: its declaration for native code, if there is one.
        sgd: settings of the gradient steps.
        device: where clients are trained.
    """
    elsewhere = device_refusal(device)
    if elsewhere is not None:
        return elsewhere
    if not sgd.plain:
        return "the kernel takes plain SGD, without momentum, weight decay and proximal term"
    if declared is None:
        return f"model {type(model).__name__} declares no kernel"
    most = max((feature.categories for feature in declared.item_features), default=0)
    if most > _MOST_CATEGORIES:
        return f"an item feature has {most:,} categories, of {_MOST_CATEGORIES:,} at most"
    return None


def required(declared: KernelModel | None, model: Model) -> KernelModel:
    """The declaration of a model.

    Raises:
        TypeError: there is none.
    """
    if declared is None:
        raise TypeError(f"Expected a model that declares a kernel, got {type(model).__name__}.")
    return declared
