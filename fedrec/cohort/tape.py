# SPDX-License-Identifier: Apache-2.0
"""Differentiating a forward pass that consists of this package's layers only, without autograd.

In a step of a small network autograd's own work takes longer than the products. The layers know their gradients anyway,
so it suffices to remember in which order they ran. A tape gives up, by `NotTaped`, as soon as a value that it has not
seen enters a layer or the loss; autograd then does that forward pass again and can differentiate everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class NotTaped(Exception):
    """A forward pass contains something that no layer of this package did; only autograd can differentiate it."""


class TapeContext:
    """Where a layer keeps what its backward pass needs.

    Attributes:
        later: what an ending computes its losses from.
    """

    later: tuple[Tensor, ...]


class Ending(torch.autograd.Function):
    """A layer that ends a forward pass with a loss, whose numbers training itself does not need.

    On a tape its output is a stand-in, NaN, that may only be handed on: the losses of many steps are computed at once.
    """

    @staticmethod
    def backward_of_sum(ctx: Any) -> tuple[Tensor | None, ...]:
        """Gradients of the sum of the losses by the arguments."""
        raise NotImplementedError

    @staticmethod
    def losses(contexts: Sequence[Any]) -> Tensor:
        """The losses of some steps, `[steps, C]`."""
        raise NotImplementedError


Ended = tuple[type[Ending], TapeContext]


class Layer(NamedTuple):
    """One layer of a forward pass.

    Attributes:
        function: which.
        context: what its backward pass needs.
        arguments: all of them.
        output: what it gave.
    """

    function: type[torch.autograd.Function]
    context: TapeContext
    arguments: tuple[Any, ...]
    output: Tensor


class Tape:
    """The layers of one forward pass, in order.

    Args:
        leaves: tensors to differentiate by, apart from the parameters that the layers update themselves.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._known = {id(leaf): leaf for leaf in leaves}
        self._layers: list[Layer] = []

    def apply(self, function: type[torch.autograd.Function], known: Iterable[Tensor], *arguments: Any) -> Tensor:
        """Run a layer, and remember it.

        Args:
            function: the layer; of its context it may use attributes only.
            known: those of its arguments that have a gradient.
            *arguments: all its arguments.

        Raises:
            NotTaped: one of `known` is neither a leaf nor the output of a layer.
        """
        for tensor in known:
            if id(tensor) not in self._known:
                raise NotTaped
        context = TapeContext()
        output = function.forward(context, *arguments)
        output.tape = self  # type: ignore[attr-defined]
        self._known[id(output)] = output
        self._layers.append(Layer(function, context, arguments, output))
        return output

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What ran so far, in order."""
        return tuple(self._layers)

    def gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> tuple[list[Tensor | None], Ended]:
        """Gradients of the sum of `loss`, the output of an `Ending`; the layers' own parameters move on the way.

        Returns:
            The gradients, and the ending with its context, for `Ending.losses`.

        Raises:
            NotTaped: the last layer is no ending, or its output is not `loss`; nothing has moved then.
        """
        if not self._layers:
            raise NotTaped
        ending, last, arguments, output = self._layers.pop()
        if output is not loss or not issubclass(ending, Ending):
            raise NotTaped
        found: dict[int, Tensor] = {}
        _add(found, arguments, ending.backward_of_sum(last))
        for function, context, arguments, output in reversed(self._layers):
            gradient = found.pop(id(output), None)
            if gradient is not None:
                _add(found, arguments, function.backward(context, gradient))
        return [found.get(id(leaf)) for leaf in leaves], (ending, last)

    def close(self) -> None:
        """Forget everything: outputs name their tape, and it them, so they would stay in memory for a while."""
        self._known.clear()
        self._layers.clear()


def _add(found: dict[int, Tensor], arguments: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    for argument, own in zip(arguments, gradients, strict=True):
        if own is not None:
            earlier = found.get(id(argument))
            found[id(argument)] = own if earlier is None else earlier + own
