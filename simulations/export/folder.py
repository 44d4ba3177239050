# SPDX-License-Identifier: Apache-2.0
"""The folder of an exported model.

    model.onnx     the scoring of one user (`_Scoring`)
    scoring.json   the data's id of each item, and how a user's rows become inputs of the graph
    score.py       a script that scores rows with only numpy and onnxruntime
    user.npz       with a user: private parameters, and codes of features
    rows.csv       with a user: the rows of the history

A device holds codes of its user's features, private parameters after its last round, and, with
fine-tuning in `[evaluation]`, all fine-tuned parameters. If it holds any, the export is for one
user's device.

The graph's inputs are, if the model has them, the user's history (`history`), codes of the user's
features (`feature:NAME`), and the user's own parameters, by their names; its output is the score of
every item. Shared parameters are constants of the graph.
"""

import logging
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from clients.evaluation import history_of, own_parameters
from clients.node import Node
from clients.step import private_names
from fedrec.data.interactions import Interactions
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Model
from fedrec.runs.folder import Result
from fedrec.runtime.files import open_atomically, require_new_folder, write_atomically, write_json
from simulations.recommending import (
    clients_of,
    evaluation_of,
    host_of,
    population_of,
    with_new_items,
)

_NEEDED = ("onnx", "onnxscript")
HISTORY = "history"
FEATURE = "feature:"


def export(
    result: Result, folder: Path, user: str | None = None, new_items: Path | None = None
) -> None:
    """Write the model of a finished run with its scoring.

    Args:
        result: result of the run.
        folder: new or empty folder.
        user: id, as in the data, of the device's user; None: any user.
        new_items: file of items that the run did not have, see `fedrec recommend`.

    Raises:
        ExperimentError: a package is missing, the run has no federated system, the server generates
            parameters for each user, or devices hold private parameters and no user is given.
        DataError: the user is not in the data, or the data have changed.
        RunError: the folder is not empty.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ExperimentError(f"exporting needs {missing[0]}", fix="pip install 'fedrec[export]'")
    require_new_folder(folder)
    population = population_of(result)
    if new_items is not None:
        result, population = with_new_items(result, population, new_items)
    client = None if user is None else int(clients_of(population, [user])[0])
    node = host_of(result, population, client or 0)
    node.device = torch.device("cpu")
    rows = _inputs(node, client or 0)
    step, parameters = evaluation_of(node, result, np.array([client or 0]))
    features = [name for name in rows if name.startswith(FEATURE)]
    device = [*private_names(step, parameters), *features]
    if client is None and (device or step.config.epochs):
        raise ExperimentError(
            "each device has private values",
            expected="the user of the device",
            got=", ".join(device) or "fine-tuning on the device ([evaluation] fine-tune)",
            fix="fedrec export RUN --user ID",
        )
    private: Mapping[str, Tensor] = {}
    if client is not None:
        private = own_parameters(node, step, parameters, client, result.best_round)
    graph = _graph_of(node.model, parameters, {**rows, **private})
    data = population.interactions
    script = Path(__file__).with_name("score.py").read_text(encoding="utf-8")
    write_atomically(folder / "model.onnx", graph)
    write_json(folder / "scoring.json", _form(node, data))
    write_atomically(folder / "score.py", script)
    if client is not None:
        rows.pop(HISTORY, None)
        arrays = {name: value.numpy() for name, value in {**rows, **private}.items()}
        with open_atomically(folder / "user.npz") as file:
            np.savez(file, allow_pickle=False, **arrays)
        write_atomically(folder / "rows.csv", _rows(node, client))


def _inputs(node: Node, client: int) -> dict[str, Tensor]:
    """A client's history or codes of features, by the names of the inputs."""
    clients = np.array([client])
    if isinstance(node.model, HistoryModel):
        return {HISTORY: history_of(node, node.model, clients)[0]}
    names = [name for name, _ in node.model.schema.user_features]
    codes = node.population.feature_codes(clients)
    return {
        FEATURE + name: torch.from_numpy(code[0]) for name, code in zip(names, codes, strict=False)
    }


def _form(node: Node, data: Interactions) -> dict[str, Any]:
    """Ids of the items, and the conversion of rows to inputs."""
    experiment = node.experiment
    above = 0.0 if experiment.task == "rating" else experiment.positive_above
    history: dict[str, Any] | None = None
    needed = {"rating": False, "time": False}
    if isinstance(node.model, HistoryModel):
        form = node.model.form
        needed = {"rating": above is not None, "time": True}
        if form.longest is not None:
            history = {"kind": "sequence", "longest": form.longest}
        elif form.recency is not None:
            recent = form.recency
            history = {"kind": "recent", "window": recent.window, "decay": recent.decay}
        else:
            history = {"kind": "weights", "rated": form.rated, "low-rated": form.low_rated}
            needed = {"rating": above is not None or form.rated, "time": form.rated}
    present = {"rating": data.ratings is not None, "time": data.times is not None}
    return {
        "run": experiment.name,
        "task": experiment.task,
        "items": data.item_ids.astype(str).tolist(),
        "columns": [name for name in needed if needed[name] and present[name]],
        "positive-above": above,
        "history": history,
    }


def _rows(node: Node, client: int) -> str:
    """Training rows of a client, in the format of `score.py`."""
    data = node.population.client(client)
    ids = node.population.interactions.item_ids
    columns = {"item": ids[data.items], "rating": data.ratings, "time": data.times}
    given = {name: values for name, values in columns.items() if values is not None}
    return pd.DataFrame(given).to_csv(index=False)


# The scoring of one user as an ONNX graph.


class _Scoring(nn.Module):
    """Module that scores one user.

    Args:
        model: model of the run.
        shared: the constant parameters, without cohort dimension.
        names: names of the inputs, in order.
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
        private = {name: value[None] for name, value in given.items() if not _of_rows(name)}
        parameters = {**self._shared, **private}
        if isinstance(self._model, HistoryModel):
            return self._model.history_scores(parameters, given[HISTORY][None, None])[0, 0]
        codes = tuple(value[None] for name, value in given.items() if name.startswith(FEATURE))
        items = torch.arange(self._model.schema.num_items)
        return self._model.predict(parameters, codes, items[None])[0]


def _graph_of(
    model: Model, parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> bytes:
    """Export the graph as the content of an ONNX file.

    Args:
        model: model of the run.
        parameters: the shared parameters, without cohort dimension.
        inputs: an example of each input by name.
    """
    shared = {name: value for name, value in parameters.items() if name not in inputs}
    logging.disable(logging.WARNING)  # messages of the exporter
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                _Scoring(model, shared, tuple(inputs)).eval(),
                tuple(inputs.values()),
                input_names=list(inputs),
                output_names=["scores"],
                custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
                dynamo=True,
                verbose=False,
            )
    finally:
        logging.disable(logging.NOTSET)
    return program.model_proto.SerializeToString()


def _stable_sort(
    values: Any, stable: bool = True, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    """Stable sort for the exporter; TopK takes the first of equal numbers first."""
    from onnxscript import opset18

    op: Any = opset18
    size = op.Shape(values, start=dim, end=dim + 1 or None)
    return op.TopK(values, size, axis=dim, largest=descending, sorted=True)


def _of_rows(name: str) -> bool:
    """True if an input comes from a user's rows or features, and is not a parameter."""
    return name == HISTORY or name.startswith(FEATURE)
