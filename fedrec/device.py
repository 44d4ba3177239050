# SPDX-License-Identifier: Apache-2.0
"""Device and precision of local training.

With `bf16` the matrix products of local training take bfloat16 inputs (`torch.autocast`).
Parameters stay float32, and so do losses, sums of updates, norms, clipping and noise, evaluation
except fine-tuning, and the linear systems of steps that solve for factors, because rounded sums of
products need not be positive definite.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from fedrec.errors import EngineError
from fedrec.experiment.schema import Precision


def resolve_device(name: str, precision: Precision = "float32") -> torch.device:
    """Convert `auto`, `cpu`, `cuda` or `cuda:N` to a torch device.

    Raises:
        EngineError: the CUDA device does not exist, or bfloat16 is set without a CUDA device.
    """
    device = (
        torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if name == "auto"
        else torch.device(name)
    )
    if precision == "bf16" and device.type != "cuda":
        raise EngineError(
            f"engine.precision = 'bf16' on device {device.type!r}",
            expected="a CUDA device",
            fix="set engine.precision = 'float32'",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"device {name!r} not found",
            expected=f"one of {torch.cuda.device_count()} CUDA devices",
            fix="--set engine.device=cpu, or auto",
        )
    return device


def takes_compiled(values: Tensor) -> bool:
    """True if compiled code computes the gradients by values `[C, ...]`: for several clients, on a
    CPU, in single precision. For one client, compilation would take longer than it saves."""
    several = values.requires_grad and len(values) > 1
    return several and values.is_cpu and values.dtype == torch.float32


@contextmanager
def one_thread() -> Iterator[None]:
    """Context with one PyTorch thread, for many small operations.

    Several threads wait for the slowest after each operation, which takes many times as long as the
    operation on a busy machine. Dividing sums among threads also changes their last digits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Move an array or a CPU tensor `[...]` to a device; copies to a GPU are asynchronous."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@contextmanager
def summed_on_processor(total: Tensor) -> Iterator[Tensor]:
    """Context with a CPU tensor to add to, of the shape `[...]` of `total`: `total` itself if it is
    on the CPU, otherwise a tensor that is added to `total` at the end, in one copy."""
    if total.is_cpu:
        yield total
        return
    part = torch.zeros_like(total, device="cpu")
    yield part
    total += on_device(part, total.device)


def products_in(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Context in which matrix products of local training use the given precision; contexts may be
    nested."""
    kind = device.type
    if precision == "float32":
        lowered = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return torch.autocast(kind, enabled=False) if lowered else nullcontext()
    # No caching: parameters change in place, and their cached bfloat16 copies would be outdated.
    return torch.autocast(kind, torch.bfloat16, cache_enabled=False)
