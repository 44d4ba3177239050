# SPDX-License-Identifier: Apache-2.0
"""A second device without hardware: its tensors say that they are on it, are computed with on the
processor, and refuse what a GPU would refuse.

It counts what makes the processor and a GPU wait for each other: values that are read back, and
arrays that are copied. Steps that a GPU would replay as CUDA graphs are run, and may not do either.
Its times say nothing about a GPU.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")
"""Stands for the device: PyTorch knows the name, and refuses numpy for it."""
_MOVES = ("_to_copy", "copy_")
_TAKES_INDICES_OF_THE_PROCESSOR = ("index", "index_put_", "_index_put_impl_")
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
"""Operations whose result, or its size, a GPU has to tell the processor."""

Direction = Literal["read back", "copied there"]

ROOT = Path(__file__).resolve().parent.parent


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
        entered = _python_dispatch._get_current_dispatch_mode()
        if isinstance(entered, SecondDevice):
            entered.note("read back")
        return self.inner.numpy(force=True)

    def tolist(self) -> Any:
        """Read back."""
        return self.numpy(force=True).tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        given = kwargs or {}
        return _computed(func, _Operation.of(func, args, given), args, given)


class SecondDevice(_python_dispatch.TorchDispatchMode):
    """While it is entered, `DEVICE` is a device that computes.

    Attributes:
        crossings: how often a line, "file:line", read something back or copied something there.
        seconds: processor time of what a device would compute, and of noting it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.crossings: Counter[tuple[Direction, str]] = Counter()
        self._others = ExitStack()

    def __enter__(self) -> SecondDevice:
        target = "fedrec.training.recorded_steps.recorder_of"
        self._others.enter_context(mock.patch(target, lambda _: _Repeating(self)))
        self._others.enter_context(_Numbers())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._others.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begun = time.process_time()
        given = kwargs or {}
        operation = _Operation.of(func, args, given)
        if operation.crossing is not None:
            self.note(operation.crossing)
        result = _computed(func, operation, args, given)
        if operation.lands or any(operation.there):
            self.seconds += time.process_time() - begun
        return result

    def note(self, direction: Direction) -> None:
        """Count a crossing, of the line of this project that it comes from."""
        frame = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path != Path(__file__) and ".venv" not in path.parts:
                line = f"{path.relative_to(ROOT)}:{frame.f_lineno}"
                self.crossings[direction, line] += 1
                return
            frame = frame.f_back


@dataclass(frozen=True)
class _Repeating:
    """Stands for CUDA graphs: what would be replayed is run.

    Attributes:
        device: which then may not cross.
    """

    device: SecondDevice

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Nothing has to be done."""
        yield

    def record(self, work: Callable[[], None]) -> _Postponed:
        """Work, without doing it."""
        return _Postponed(self.device, work)


@dataclass(frozen=True)
class _Postponed:
    """Work that was recorded."""

    device: SecondDevice
    work: Callable[[], None]

    def replay(self) -> None:
        """Do it, without a crossing."""
        before = self.device.crossings.copy()
        self.work()
        if self.device.crossings != before:
            raise RuntimeError(f"a recorded step crosses: {self.device.crossings - before}")


class _Numbers(TorchFunctionMode):
    """Tensors of numbers, which PyTorch makes below what `SecondDevice` sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if func is not torch.tensor or torch.device(given.get("device") or "cpu") != DEVICE:
            return func(*args, **given)
        return func(*args, **{**given, "device": "cpu"}).to(DEVICE)


@dataclass(frozen=True)
class _Operation:
    """An operation of PyTorch.

    Attributes:
        name: without namespace and overload.
        tensors: its operands.
        there: which of them are on the device.
        lands: whether its result is.
    """

    name: str
    tensors: list[torch.Tensor]
    there: list[bool]
    lands: bool

    @classmethod
    def of(cls, func: Any, args: tuple, kwargs: dict[str, Any]) -> _Operation:
        """One that PyTorch dispatches."""
        tensors = [
            leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)
        ]
        there = [isinstance(tensor, Placed) for tensor in tensors]
        name = func._schema.name.split("::")[1]
        asked = kwargs.get("device")
        stays = there[0] if name == "copy_" else any(there)
        return cls(name, tensors, there, stays if asked is None else torch.device(asked) == DEVICE)

    @property
    def crossing(self) -> Direction | None:
        """What it carries over between the processor and the device."""
        if self.name in _MOVES:
            carried = "copied there" if self.lands else "read back"
            return None if self.lands == self.there[-1] else carried
        masks = self.name in _TAKES_INDICES_OF_THE_PROCESSOR
        masked = masks and any(tensor.dtype == torch.bool for tensor in self.tensors[1:])
        return "read back" if any(self.there) and (self.name in _READS or masked) else None

    def refuse_strangers(self, func: Any) -> None:
        """Refuse operands that a GPU would not take."""
        if not any(self.there) or self.name in _MOVES:
            return
        few = 1 if self.name in _TAKES_INDICES_OF_THE_PROCESSOR else len(self.tensors)
        for tensor, there in zip(self.tensors[:few], self.there, strict=False):
            if tensor.dim() and not there:
                raise RuntimeError(f"{func}: {list(tensor.shape)} is on the processor")


def _computed(func: Any, operation: _Operation, args: tuple, kwargs: dict[str, Any]) -> Any:
    operation.refuse_strangers(func)
    inner = {
        **kwargs,
        **({"device": torch.device("cpu")} if kwargs.get("device") is not None else {}),
    }
    plain = tree_map_only(Placed, lambda tensor: tensor.inner, (args, inner))
    result = func(*plain[0], **plain[1])
    if not operation.lands:
        return result
    result = tree_map_only(torch.Tensor, Placed, result)
    return _python_dispatch.return_and_correct_aliasing(func, args, kwargs, result)
