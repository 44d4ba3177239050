# SPDX-License-Identifier: Apache-2.0
"""A model's scoring of one user as an ONNX graph.

Its inputs are, where the model has them, the user's history (`history`), codes of the user's
features (`feature:NAME`), and parameters that are the user's own, by their names; its output is the
score of every item. Shared parameters are constants of the graph; those that no score depends on,
such as sums that clients send, are left out.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Model, Parameters

HISTORY = "history"
FEATURE = "feature:"
_LARGEST = 2_000_000_000  # bytes of a message of Protocol Buffers, which an ONNX file is


class Scoring(nn.Module):
    """Scores of one user.

    Args:
        model: of the run.
        shared: the parameters that are constants, without cohort dimension.
        names: of the inputs, in order.
    """

    def __init__(self, model: Model, shared: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
        super().__init__()
        self._model = model
        self._shared = {name: value[None] for name, value in shared.items()}
        self._names = names
        self._prepared = None
        if isinstance(model, HistoryModel) and names == (HISTORY,):
            self._prepared = model.scorer(self._shared)

    def forward(self, *inputs: Tensor) -> Tensor:
        """`[items]`."""
        given = dict(zip(self._names, inputs, strict=True))
        if self._prepared is not None:
            return self._prepared(given[HISTORY][None, None])[0, 0]
        own = {name: value[None] for name, value in given.items() if not _of_rows(name)}
        return _scores(self._model, {**self._shared, **own}, given)


def used_parameters(
    model: Model, parameters: Mapping[str, Tensor], rows: Mapping[str, Tensor]
) -> set[str]:
    """Names of the parameters that the scores of a user with these inputs depend on."""
    read = _Read({name: value[None] for name, value in parameters.items()})
    with torch.no_grad():
        _scores(model, read, rows)
    return read.names


def graph_of(model: Model, parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> bytes:
    """The graph as the content of an ONNX file.

    Args:
        model: of the run.
        parameters: the shared ones, without cohort dimension.
        inputs: an example of each input, by its name.

    Raises:
        ExperimentError: the parameters are larger than an ONNX file may be.
    """
    shared = {name: value for name, value in parameters.items() if name not in inputs}
    size = sum(value.nbytes for value in shared.values())
    if size > _LARGEST:
        raise ExperimentError(
            "the model is too large for one ONNX file",
            expected=f"at most {_LARGEST / 1e9:.0f} GB of shared parameters",
            got=f"{size / 1e9:.1f} GB",
            fix="train a smaller model: less width, or fewer items with weights",
        )
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            Scoring(model, shared, tuple(inputs)).eval(),
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=["scores"],
            custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
            dynamo=True,
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    return program.model_proto.SerializeToString()


def _stable_sort(
    values: Any, stable: bool = True, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    """What the exporter has no translation of; of equal numbers, TopK takes the first one first."""
    from onnxscript import opset18

    op: Any = opset18
    size = op.Shape(values, start=dim, end=dim + 1 or None)
    return op.TopK(values, size, axis=dim, largest=descending, sorted=True)


def _of_rows(name: str) -> bool:
    """Whether an input comes from a user's rows and features, and is no parameter."""
    return name == HISTORY or name.startswith(FEATURE)


def _scores(model: Model, parameters: Parameters, given: Mapping[str, Tensor]) -> Tensor:
    if isinstance(model, HistoryModel):
        return model.history_scores(parameters, given[HISTORY][None, None])[0, 0]
    codes = tuple(value[None] for name, value in given.items() if name.startswith(FEATURE))
    items = torch.arange(model.schema.num_items)
    return model.predict(parameters, codes, items[None])[0]


class _Read(dict[str, Tensor]):
    """Parameters that note which of them are read."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self.names = set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)


@contextmanager
def _quiet() -> Iterator[None]:
    """No notes of the exporter on its own work."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
