# SPDX-License-Identifier: Apache-2.0
"""Inner loops in compiled code (`compiled.c`), which is made when fedrec is installed.

In a step of a block the products of a perceptron take about half of the time, and the many small operations around
them most of the rest: compiled, both passes are one call each, and where every step is like the first, all steps of a
block are one. Sums of what clients changed are made without the large tensors in between. Without the library (no C
compiler where fedrec was installed, another processor) or where something does not suit it, PyTorch's operations do the
same, with results that differ by rounding.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fedrec.row_sum import RowAccumulator

_POINTER = ctypes.c_void_p
_HELD, _GATHERED, _MIXED = range(3)


class _Plan(ctypes.Structure):
    """`plan_t` of compiled.c."""

    _fields_ = (
        ("sgemm", _POINTER),
        *((name, ctypes.c_int) for name in ("clients", "examples", "parts", "layers", "hidden_width", "largest_width")),
        *((name, _POINTER) for name in ("part_widths", "part_examples", "widths", "weights", "biases")),
        *((name, _POINTER) for name in ("weight_strides", "bias_strides", "weight_rates", "bias_rates")),
    )


class _Source(ctypes.Structure):
    """`source_t` of compiled.c."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kind", "width", "categories")),
        ("rate", ctypes.c_float),
        ("values", _POINTER),
        ("stride", ctypes.c_ssize_t),
        *((name, _POINTER) for name in ("shares", "rates")),
    )


class _Examples(ctypes.Structure):
    """`examples_t` of compiled.c."""

    _fields_ = (
        ("row", ctypes.c_int),
        *((name, _POINTER) for name in ("ends", "places", "labels", "weights", "logits", "biases")),
        ("bias_rate", ctypes.c_float),
    )


class _Sum(ctypes.Structure):
    """`sum_t` of compiled.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("totals", "start", "values")),
        ("stride", ctypes.c_ssize_t),
        ("count", ctypes.c_ssize_t),
    )


class Source(Protocol):
    """Where an input of a perceptron comes from in every step, and what takes a step with its gradient."""

    @property
    def places(self) -> int | None:
        """How many places it has rows for; None: it asks for none."""
        ...

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it can give `[C, B, d]` to the compiled code."""
        ...

    def described(self) -> _Source:
        """For the compiled code; addresses only, so the tensors must be kept alive."""
        ...


@dataclass(frozen=True, eq=False)
class Held:
    """Values that are the same for all examples.

    Attributes:
        values: `[C, 1, d]`.
        rates: step sizes, `[C, 1, d]`.
    """

    values: Tensor
    rates: Tensor
    places: None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """See `Source.fits`."""
        return _lie_flat([self.values, self.rates]) and self.values.shape == self.rates.shape == shape and shape[1] == 1

    def described(self) -> _Source:
        """See `Source.described`."""
        width = self.values.shape[2]
        return _Source(_HELD, width, 0, 0.0, self.values.data_ptr(), width, None, self.rates.data_ptr())


@dataclass(frozen=True, eq=False)
class Gathered:
    """Rows of a table.

    Attributes:
        values: `[P, d]`, the rows of all clients end to end.
        rate: step size; 0: they do not move, whatever the gradient.
    """

    values: Tensor
    rate: float

    @property
    def places(self) -> int:
        """See `Source.places`."""
        return len(self.values)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """See `Source.fits`."""
        return _lie_flat([self.values]) and self.values.shape[1:] == shape[2:]

    def described(self) -> _Source:
        """See `Source.described`."""
        return _Source(_GATHERED, self.values.shape[1], 0, self.rate, self.values.data_ptr(), 0, None, None)


@dataclass(frozen=True, eq=False)
class Mixed:
    """Weighted sums of the rows of a small table of each client.

    Attributes:
        values: `[C, K, d]`.
        rate: step size.
        shares: `[P, K]`, how much each row of the table counts at a place.
    """

    values: Tensor
    rate: float
    shares: Tensor

    @property
    def places(self) -> int:
        """See `Source.places`."""
        return len(self.shares)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """See `Source.fits`."""
        clients, categories, width = self.values.shape
        flat = _lie_flat([self.values, self.shares]) and self.shares.shape[1:] == (categories,)
        return flat and (clients, width) == (shape[0], shape[2])

    def described(self) -> _Source:
        """See `Source.described`."""
        _, categories, width = self.values.shape
        at, stride = self.values.data_ptr(), self.values.stride(0)
        return _Source(_MIXED, width, categories, self.rate, at, stride, self.shares.data_ptr(), None)


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of all steps of C clients.

    Attributes:
        places: `int64 [S, C, B]`, where the item of each is among the places P of `Gathered` and `Mixed`.
        labels: `float32 [S, C, B]`.
        weights: `float32 [S, C, B]`.
        ends: the number of steps of each client that trains; the first of the C.
    """

    places: Tensor
    labels: Tensor
    weights: Tensor
    ends: Sequence[int]

    def fit(self, clients: int, examples: int) -> bool:
        """Whether these are examples for the first clients, so many in each step."""
        if not _lie_flat([self.places, self.labels, self.weights], (torch.int64, torch.float32, torch.float32)):
            return False
        if not self.places.shape == self.labels.shape == self.weights.shape:
            return False
        steps, everyone, own = self.places.shape
        return own == examples and len(self.ends) == clients <= everyone and max(self.ends, default=0) <= steps


class CompiledPerceptron:
    """The perceptrons of some clients, for inputs of one shape; weights and biases are those that were given.

    Args:
        library: the compiled code and what it calls; see `library`.
        parts: the inputs, `[C, B, i]` or `[C, 1, i]` each.
        weights: `[C, in, out]` of each layer.
        biases: `[C, out]` of each layer.
        rates: step sizes of the weights and then of the biases.

    Attributes:
        parameters: the weights and then the biases.
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
        self._library, self.parameters = library, [*weights, *biases]  # kept alive: the plan has their addresses only
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
        self._shapes = [tuple(part.shape) for part in parts]
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
        found = library() if activation == "relu" and at_hand(weights[0].device) else None
        return cls(found, parts, weights, biases, rates) if found is not None and _fit(parts, weights, biases) else None

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

    def train(self, sources: Sequence[Source], given: Examples, biases: Gathered | None = None) -> Tensor | None:
        """Take every step: the inputs from their sources, both passes, and the sources' own steps.

        What is minimised is the weighted cross-entropy of the outputs.

        Args:
            sources: one per input.
            given: the examples.
            biases: `[P, 1]`, added to the outputs by place.

        Returns:
            The logits before each step, `[S, C, B]`, 0 where there was none; None, and nothing has moved, if these are
            no tensors for the compiled code.

        Raises:
            IndexError: a place is beyond the rows of a source.
        """
        clients, outputs, examples = self._outputs
        if outputs != 1 or len(sources) != len(self._shapes) or not given.fit(clients, examples):
            return None
        for source, shape in zip(sources, self._shapes, strict=True):
            if not source.fits(shape) or (source.places is not None and shape[1] != examples):
                return None
        if biases is not None and not biases.fits((clients, examples, 1)):
            return None
        _refuse_beyond(given.places, [*sources, *([biases] if biases is not None else [])])
        described = [source.described() for source in sources]
        room = 1 + sum(2 * source.width + source.categories for source in described)
        scratch, logits = torch.empty(len(self._scratch) + examples * room), torch.zeros(given.labels.shape)
        ends, own = _array(ctypes.c_int, given.ends), _array(_Source, described)
        tensors = given.places, given.labels, given.weights, logits
        added = (biases.values.data_ptr(), biases.rate) if biases is not None else (None, 0.0)
        addresses = ctypes.addressof(ends), *map(Tensor.data_ptr, tensors)
        steps = _Examples(given.labels[0].numel(), *addresses, *added)
        at = (ctypes.addressof(numbers) for numbers in (self._plan, own, steps))
        self._library.train(*at, self._hidden.data_ptr(), scratch.data_ptr())
        return logits


def at_hand(device: torch.device) -> bool:
    """Whether perceptrons on this device are for compiled code at all."""
    return device.type == "cpu" and torch.get_num_threads() == 1 and library() is not None


def add_updates(
    totals: Mapping[str, Tensor], start: Mapping[str, Tensor], values: Mapping[str, Tensor], shares: Tensor
) -> set[str]:
    """Add, over the clients, share times (values - start) to the totals of each parameter.

    Args:
        totals: `float64 [...]` by name.
        start: `float32 [...]` by name, of these at least.
        values: `float32 [C, ...]` by name; a parameter that is not among them did not change.
        shares: `float64 [C]`; a client of share 0 adds nothing, whatever it holds.

    Returns:
        Names of the parameters that are done. The others' are no tensors for the compiled code, or there is none.
    """
    found = library()
    if found is None or not _lie_flat([shares], [torch.float64]):
        return set()
    sums = {name: _sum_of(totals[name], start[name], values[name], len(shares)) for name in totals if name in values}
    fitting = {name: one for name, one in sums.items() if one is not None}
    found.add_updates(_array(_Sum, list(fitting.values())), len(fitting), shares.data_ptr(), len(shares))
    return set(fitting)


def _sum_of(totals: Tensor, start: Tensor, values: Tensor, clients: int) -> _Sum | None:
    """A parameter of so many clients for the compiled code; None if it cannot do with these."""
    if values.shape != (clients, *start.shape) or totals.shape != start.shape:
        return None
    if not _lie_flat((totals, start), (torch.float64, torch.float32)):
        return None
    stride, *own = values.stride()
    if values.dtype != torch.float32 or not values.is_cpu or tuple(own) != start.stride():
        return None
    return _Sum(totals.data_ptr(), start.data_ptr(), values.data_ptr(), stride, start.numel())


def add_row_updates(
    total: RowAccumulator, start: Tensor, touched: Tensor, counts: Sequence[int], values: Tensor, shares: Tensor
) -> bool:
    """Add, over the clients and the rows that each touched, share times (row - its row of start) to a sum.

    Args:
        total: the sum.
        start: `float32 [items, d]`.
        touched: `int64 [C, R]`, items of the rows.
        counts: `[C]`, how many of them are real, the first.
        values: `float32 [C, R, d]`.
        shares: `float64 [C]`; a client of share 0 adds nothing, whatever it holds.

    Returns:
        Whether it was done; see `add_updates`.

    Raises:
        IndexError: an item is beyond the table.
    """
    found, kinds = library(), (torch.float32, torch.int64, torch.float32, torch.float64)
    if found is None or not _lie_flat((start, touched, values, shares), kinds) or total.shape != start.shape:
        return False
    if values.dim() != 3 or values.shape[:2] != touched.shape or values.shape[2:] != start.shape[1:]:
        return False
    clients, widest, width = values.shape
    if not len(counts) == len(shares) == clients or max(counts, default=0) > widest:
        return False
    if touched.numel() and not 0 <= int(touched.min()) <= int(touched.max()) < len(start):
        raise IndexError(f"Expected items below {len(start)}, got {int(touched.min())} to {int(touched.max())}.")
    total.reserve(sum(counts))
    sums = (own.ctypes.data for own in (total.values, total.slots, total.rows))
    given = start.data_ptr(), touched.data_ptr(), _array(ctypes.c_ssize_t, counts), values.data_ptr(), shares.data_ptr()
    total.used = found.add_row_updates(*sums, total.used, *given, clients, widest, width)
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
        self.train = own.fedrec_train
        self.add_updates, self.add_row_updates = own.fedrec_add_updates, own.fedrec_add_row_updates
        self.forward.argtypes, self.backward.argtypes = [_POINTER] * 5, [_POINTER] * 6
        size, count = ctypes.c_ssize_t, ctypes.c_int
        self.add_updates.argtypes = [_POINTER, count, _POINTER, count]
        self.add_row_updates.argtypes = [*[_POINTER] * 3, size, *[_POINTER] * 5, count, size, count]
        self.train.argtypes = [_POINTER] * 5
        for function in (self.forward, self.backward, self.train, self.add_updates):
            function.restype = None
        self.add_row_updates.restype = size
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
    if any(own.dtype != torch.float32 or not own.is_cpu or not own.numel() for own in every):
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


def _lie_flat(tensors: Sequence[Tensor], kinds: Sequence[torch.dtype] | None = None) -> bool:
    """Whether tensors are of these kinds (float32 by default), on the processor, and without gaps."""
    kinds = [torch.float32] * len(tensors) if kinds is None else kinds
    return all(
        own.dtype == kind and own.is_cpu and own.is_contiguous() for own, kind in zip(tensors, kinds, strict=True)
    )


def _refuse_beyond(places: Tensor, sources: Sequence[Source]) -> None:
    """Raises IndexError where a place is beyond the rows of a source."""
    least = min((source.places for source in sources if source.places is not None), default=None)
    if least is not None and places.numel() and not 0 <= int(places.min()) <= int(places.max()) < least:
        raise IndexError(f"Expected places below {least}, got {int(places.min())} to {int(places.max())}.")


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)
