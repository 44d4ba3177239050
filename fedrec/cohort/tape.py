# SPDX-License-Identifier: Apache-2.0
"""Differentiating a forward pass that consists of this package's layers only, without autograd.

In a step of a small network autograd's own work takes longer than the products. The layers know their gradients anyway,
so it suffices to remember in which order they ran. A tape gives up, by `NotTaped`, as soon as a value that it has not
seen enters a layer or the loss; autograd then does that forward pass again and can differentiate everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class NotTaped(Exception):
    """A forward pass contains something that no layer of this package did; only autograd can differentiate it."""


class Tape:
    """The layers of one forward pass, in order.

    Args:
        leaves: tensors to differentiate by, apart from the parameters that the layers update themselves.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._known = {id(leaf): leaf for leaf in leaves}
        self._steps: list[tuple[type[torch.autograd.Function], _Context, tuple[Any, ...], Tensor]] = []

    def apply(self, function: type[torch.autograd.Function], known: Iterable[Tensor], *arguments: Any) -> Tensor:
        """Run a layer, and remember it.

        Args:
            function: the layer; of its context it may use attributes only.
            known: those of its arguments that have a gradient.
            *arguments: all its arguments.

        Raises:
            NotTaped: one of `known` is neither a leaf nor the output of a layer.
        """
        if not all(id(tensor) in self._known for tensor in known):
            raise NotTaped
        context = _Context()
        output = function.forward(context, *arguments)
        output.tape = self  # type: ignore[attr-defined]
        self._known[id(output)] = output
        self._steps.append((function, context, arguments, output))
        return output

    def gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the sum of `loss`, the last layer's output; the layers' own parameters move on the way.

        Raises:
            NotTaped: the last layer's output is something else; nothing has moved then.
        """
        if not self._steps or self._steps[-1][3] is not loss:
            raise NotTaped
        found = {id(loss): torch.ones_like(loss)}
        for function, context, arguments, output in reversed(self._steps):
            gradient = found.pop(id(output), None)
            if gradient is None:
                continue
            for argument, own in zip(arguments, function.backward(context, gradient), strict=True):
                if own is not None:
                    earlier = found.get(id(argument))
                    found[id(argument)] = own if earlier is None else earlier + own
        return [found.get(id(leaf)) for leaf in leaves]

    def close(self) -> None:
        """Forget everything: outputs name their tape, and it them, so they would stay in memory for a while."""
        self._known.clear()
        self._steps.clear()


class _Context:
    """Where a layer keeps what its backward pass needs."""
