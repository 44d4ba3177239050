# SPDX-License-Identifier: Apache-2.0
"""A second device without hardware: its tensors say that they are on it, are computed with on the
processor, and refuse what a GPU would refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")
"""Stands for the device: PyTorch knows the name, and refuses numpy for it."""
_MOVES = ("_to_copy", "copy_")
_TAKES_INDICES_OF_THE_PROCESSOR = ("index", "index_put_", "_index_put_impl_")


class Placed(torch.Tensor):
    """A tensor on the device.

    Attributes:
        inner: the same numbers on the processor.
    """

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Placed:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def numpy(self, *, force: bool = False) -> Any:
        """As of a GPU: copied to the processor only where that is asked for."""
        if not force:
            raise TypeError("can't convert a tensor on the device to numpy")
        return self.inner.numpy(force=True)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


class SecondDevice(_python_dispatch.TorchDispatchMode):
    """While it is entered, `DEVICE` is a device that computes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    there = any(isinstance(one, Placed) for one in tensors)
    name = func._schema.name.split("::")[1]
    if there and name not in _MOVES:
        checked = tensors[:1] if name in _TAKES_INDICES_OF_THE_PROCESSOR else tensors
        strangers = [one for one in checked if one.dim() and not isinstance(one, Placed)]
        if strangers:
            raise RuntimeError(f"{func}: {list(strangers[0].shape)} is on the processor")
    asked = kwargs.get("device")
    goes = there if asked is None else torch.device(asked) == DEVICE
    inner = {**kwargs, **({"device": torch.device("cpu")} if asked is not None else {})}
    plain = tree_map_only(Placed, lambda one: one.inner, (args, inner))
    found = func(*plain[0], **plain[1])
    if not goes or (name == "copy_" and not isinstance(args[0], Placed)):
        return found
    found = tree_map_only(torch.Tensor, Placed, found)
    return _python_dispatch.return_and_correct_aliasing(func, args, kwargs, found)
