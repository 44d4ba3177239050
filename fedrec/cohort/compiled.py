# SPDX-License-Identifier: Apache-2.0
"""Inner loops in compiled code (`compiled.c`), which is made when fedrec is installed.

In a step of a block the products of a perceptron take about half of the time, and the many small operations around
them most of the rest: compiled, both passes are one call each. Sums of what clients changed are made without the large
tensors in between. Without the library (no C compiler where fedrec was installed, another processor) or where
something does not suit it, PyTorch's operations do the same, with results that differ by rounding.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

_POINTER = ctypes.c_void_p


class _Plan(ctypes.Structure):
    """`plan_t` of compiled.c."""

    _fields_ = (
        ("sgemm", _POINTER),
        *((name, ctypes.c_int) for name in ("clients", "examples", "parts", "layers", "hidden_width", "largest_width")),
        *((name, _POINTER) for name in ("part_widths", "part_examples", "widths", "weights", "biases")),
        *((name, _POINTER) for name in ("weight_strides", "bias_strides", "weight_rates", "bias_rates")),
    )


class CompiledPerceptron:
    """The perceptrons of some clients, for inputs of one shape; weights and biases are those that were given.

    Args:
        library: the compiled code and what it calls; see `library`.
        parts: the inputs, `[C, B, i]` or `[C, 1, i]` each.
        weights: `[C, in, out]` of each layer.
        biases: `[C, out]` of each layer.
        rates: step sizes of the weights and then of the biases.
    """

    def __init__(
        self,
        library: _Library,
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        rates: Sequence[float],
    ) -> None:
        clients, examples = len(weights[0]), max(part.shape[1] for part in parts)
        widths, inputs = [weight.shape[2] for weight in weights], [part.shape[2] for part in parts]
        largest, hidden = max(*inputs, *widths), sum(widths[:-1])
        self._library, self._parameters = library, [*weights, *biases]  # kept alive: the plan has their addresses only
        self._arrays = [
            _array(ctypes.c_int, inputs),
            _array(ctypes.c_int, [part.shape[1] for part in parts]),
            _array(ctypes.c_int, widths),
            _array(_POINTER, [weight.data_ptr() for weight in weights]),
            _array(_POINTER, [bias.data_ptr() for bias in biases]),
            _array(ctypes.c_ssize_t, [weight.stride(0) for weight in weights]),
            _array(ctypes.c_ssize_t, [bias.stride(0) for bias in biases]),
            _array(ctypes.c_float, rates[: len(weights)]),
            _array(ctypes.c_float, rates[len(weights) :]),
        ]
        numbers = clients, examples, len(parts), len(weights), hidden, largest
        self._plan = _Plan(library.sgemm, *numbers, *map(ctypes.addressof, self._arrays))
        self._outputs = clients, widths[-1], examples
        with torch.inference_mode(False):  # later steps may not be in inference mode, and change them all the same
            self._hidden = torch.empty(clients, hidden, examples)
            self._scratch = torch.empty((2 * examples + 1) * largest)
            self._to_parts = [torch.empty(part.shape) for part in parts]
        self._inputs = _array(_POINTER, [0] * len(parts))
        self._gradients = _array(_POINTER, [own.data_ptr() for own in self._to_parts])
        given = ctypes.addressof(self._plan), ctypes.addressof(self._inputs)
        self._at = *given, self._hidden.data_ptr(), self._scratch.data_ptr(), ctypes.addressof(self._gradients)

    @classmethod
    def of(
        cls,
        parts: Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        rates: Sequence[float],
        activation: str,
    ) -> Self | None:
        """The perceptrons of these clients; None where PyTorch's operations have to do it.

        They have to where the library is not there, with other activations than ReLU, on a GPU, in other precision
        than float32, and with several threads, which PyTorch shares out among clients and the library does not. They
        also have to where shapes do not fit each other: they say so.
        """
        if activation != "relu" or torch.get_num_threads() > 1 or not _fit(parts, weights, biases):
            return None
        found = library()
        return None if found is None else cls(found, parts, weights, biases, rates)

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """Outputs `[C, B, out]`, `[C, B]` if there is one, for contiguous inputs of the shapes that it was made for."""
        plan, inputs, hidden, scratch, _ = self._at
        outputs = torch.empty(self._outputs)
        for place, part in enumerate(parts):
            self._inputs[place] = part.data_ptr()
        self._library.forward(plan, inputs, hidden, outputs.data_ptr(), scratch)
        return outputs[:, 0] if self._outputs[1] == 1 else outputs.transpose(1, 2)

    def backward(self, parts: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
        """Move weights and biases, given the gradient of what `forward` last gave for the same inputs.

        Returns:
            The gradients of the inputs, in memory that the next call uses again.
        """
        plan, inputs, hidden, scratch, to_parts = self._at
        gradient = (gradient if gradient.dim() == 2 else gradient.transpose(1, 2)).contiguous()
        for place, part in enumerate(parts):
            self._inputs[place] = part.data_ptr()
        self._library.backward(plan, inputs, hidden, gradient.data_ptr(), to_parts, scratch)
        return self._to_parts


def add_updates(totals: Tensor, start: Tensor, values: Tensor, shares: Tensor) -> bool:
    """Add, over the clients, share times (values - start) to totals.

    Args:
        totals: `float64 [...]`.
        start: `float32 [...]`.
        values: `float32 [C, ...]`.
        shares: `float64 [C]`; a client of share 0 adds nothing, whatever it holds.

    Returns:
        Whether it was done. If not, these are no tensors for the compiled code, or there is none.
    """
    found, kinds = library(), (torch.float64, torch.float32, torch.float32, torch.float64)
    given = totals, start, values[0], shares
    if found is None or not _lie_flat(given, kinds) or not start.shape == values.shape[1:] == totals.shape:
        return False
    if len(shares) != len(values):
        return False
    at = totals.data_ptr(), start.data_ptr(), values.data_ptr(), values.stride(0)
    found.add_updates(*at, shares.data_ptr(), len(shares), totals.numel())
    return True


def add_row_updates(
    totals: Tensor, slots: Tensor, start: Tensor, items: Tensor, rows: Tensor, places: Tensor, shares: Tensor
) -> bool:
    """Add share times (row - its row of start) to rows of totals.

    Args:
        totals: `float64 [R, d]`.
        slots: `int64 [n]`, which row of totals each is added to; may repeat.
        start: `float32 [items, d]`.
        items: `int64 [n]`, each one's row of start.
        rows: `float32 [m, d]`.
        places: `int64 [n]`, the rows.
        shares: `float64 [n]`.

    Returns:
        Whether it was done; see `add_updates`.
    """
    found, given = library(), (totals, slots, start, items, rows, places, shares)
    whole, single, number = torch.float64, torch.float32, torch.int64
    if found is None or not _lie_flat(given, (whole, number, single, number, single, number, whole)):
        return False
    if totals.dim() != 2 or not totals.shape[1] == start.shape[1] == rows.shape[1]:
        return False
    if not len(slots) == len(items) == len(places) == len(shares):
        return False
    for index, table in ((slots, totals), (items, start), (places, rows)):
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(table):
            raise IndexError(f"Expected rows below {len(table)}, got {int(index.min())} to {int(index.max())}.")
    found.add_row_updates(*map(Tensor.data_ptr, given), len(items), totals.shape[1])
    return True


class _Library:
    """The functions of `compiled.c`, and the BLAS that PyTorch brings with it.

    Raises:
        OSError: a file is not there, or is no library for this machine.
        AttributeError: a library has no such function.
    """

    def __init__(self, path: Path) -> None:
        own = ctypes.CDLL(str(path))
        self.forward, self.backward = own.fedrec_perceptron_forward, own.fedrec_perceptron_backward
        self.add_updates, self.add_row_updates = own.fedrec_add_updates, own.fedrec_add_row_updates
        self.forward.argtypes, self.backward.argtypes = [_POINTER] * 5, [_POINTER] * 6
        self.add_updates.argtypes = [*[_POINTER] * 3, ctypes.c_ssize_t, _POINTER, ctypes.c_int, ctypes.c_ssize_t]
        self.add_row_updates.argtypes = [*[_POINTER] * 7, ctypes.c_ssize_t, ctypes.c_int]
        for function in (self.forward, self.backward, self.add_updates, self.add_row_updates):
            function.restype = None
        blas = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        self.sgemm = ctypes.cast(blas.sgemm_, _POINTER).value


@functools.cache
def library() -> _Library | None:
    """The compiled code; None where it was not made, was made from another version, or PyTorch brings no MKL.

    It lies beside its source. A copy of fedrec that has Python files only, such as Flower makes to send an app around,
    uses that of the installed one.
    """
    if platform.machine() != "x86_64" or not torch.backends.mkl.is_available():
        return None
    wrapper = Path(__file__)
    for folder in [wrapper.parent, *(Path(entry, "fedrec", "cohort") for entry in sys.path)]:
        source = folder / "compiled.c"
        try:
            digest = hashlib.sha256(source.read_bytes() + wrapper.read_bytes()).hexdigest()
            return _Library(folder / f"compiled-{digest[:16]}.so")
        except (OSError, AttributeError):
            continue
    return None


def _fit(parts: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Whether the compiled code can do with these: it looks at nothing but addresses."""
    every = [*parts, *weights, *biases]
    if any(own.dtype != torch.float32 or own.device.type != "cpu" or not own.numel() for own in every):
        return False
    if any(own.dim() != 3 for own in [*parts, *weights]) or len({len(own) for own in every}) > 1:
        return False
    examples, width = max(part.shape[1] for part in parts), sum(part.shape[2] for part in parts)
    for weight, bias in zip(weights, biases, strict=True):
        if weight.shape[1] != width or bias.shape != weight.shape[::2]:
            return False
        if not weight[0].is_contiguous() or not bias[0].is_contiguous():
            return False
        width = weight.shape[2]
    return all(part.shape[1] in (1, examples) for part in parts)


def _lie_flat(tensors: Sequence[Tensor], kinds: Sequence[torch.dtype]) -> bool:
    """Whether tensors are of these kinds, on the processor, and without gaps."""
    return all(
        own.dtype == kind and own.device.type == "cpu" and own.is_contiguous()
        for own, kind in zip(tensors, kinds, strict=True)
    )


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)
