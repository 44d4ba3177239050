# SPDX-License-Identifier: Apache-2.0
"""The folder of an exported model.

    model.onnx     the scoring of one user (`simulations.export.graph`)
    items.txt      line n: the data's id of item n, as a JSON text
    scoring.json   how a user's rows become the graph's inputs
    score.py       a script that scores rows with numpy and onnxruntime alone
    user.npz       with a user: parameters of its own, and codes of its features
    rows.csv       with a user: the rows that its history is made of

What a device holds is one of three: nothing, where users are represented by their rows alone;
private parameters, as they were after its last round; or, with fine-tuning in
`[evaluation]`, all parameters that this changes. In the latter two cases the export is for one
user's device.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.evaluation import history_of, own_parameters
from clients.node import Node
from clients.step import Step
from fedrec.data.interactions import Interactions
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel
from fedrec.runs.ids import id_lines
from fedrec.runs.result import Result
from fedrec.runtime.files import open_atomically, require_new_folder, write_atomically
from simulations.export.graph import FEATURE, HISTORY, graph_of, used_parameters
from simulations.recommending import clients_of, evaluation_of, host_of, population_of

_NEEDED = ("onnx", "onnxscript")


def export(result: Result, folder: Path, user: str | None = None) -> None:
    """Write the model of a finished run with its scoring.

    Args:
        result: of the run.
        folder: new or empty.
        user: id as in the data, of the user whose device it is for; None: of no particular one.

    Raises:
        ExperimentError: a package is missing, the run has no federated system, its parameters are
            made for each user by the server, or devices hold parameters of their own and no user
            is named.
        DataError: the user is not in the data, or the data have changed.
        RunError: the folder is not empty.
    """
    _require_packages()
    require_new_folder(folder)
    population = population_of(result)
    client = None if user is None else int(clients_of(population, [user])[0])
    node = host_of(result, population, client or 0)
    node.device = torch.device("cpu")
    rows = _inputs(node, client or 0)
    step, parameters = evaluation_of(node, result, np.array([client or 0]))
    _refuse_nobody(step, parameters, client)
    own = {}
    if client is not None:
        own = own_parameters(node, step, parameters, client, result.best_round)
    used = used_parameters(node.model, {**parameters, **own}, rows)
    own = {name: value for name, value in own.items() if name in used}
    graph = graph_of(node.model, parameters, {**rows, **own})
    data = population.interactions
    script = Path(__file__).with_name("score.py").read_text(encoding="utf-8")
    write_atomically(folder / "model.onnx", graph)
    write_atomically(folder / "items.txt", id_lines(data.item_ids))
    write_atomically(folder / "scoring.json", json.dumps(_form(node, data), indent=2) + "\n")
    write_atomically(folder / "score.py", script)
    if client is not None:
        rows.pop(HISTORY, None)
        with open_atomically(folder / "user.npz") as file:
            np.savez(file, allow_pickle=False, **{n: v.numpy() for n, v in {**rows, **own}.items()})
        write_atomically(folder / "rows.csv", _rows(node, client))


def _require_packages() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ExperimentError(
            f"exporting needs {missing[0]}",
            expected=f"the optional packages {' and '.join(_NEEDED)}",
            got=f"{missing[0]} is not installed",
            fix="pip install 'fedrec[export]'",
        )


def _inputs(node: Node, client: int) -> dict[str, Tensor]:
    """What comes from the rows and features of a client, by the names of the inputs."""
    clients = np.array([client])
    if isinstance(node.model, HistoryModel):
        return {HISTORY: history_of(node, node.model, clients)[0]}
    names = [name for name, _ in node.model.schema.user_features]
    codes = node.population.feature_codes(clients)
    return {
        FEATURE + name: torch.from_numpy(own[0]) for name, own in zip(names, codes, strict=False)
    }


def _refuse_nobody(step: Step, parameters: Mapping[str, Tensor], client: int | None) -> None:
    """Refuse an export for nobody where each device scores with parameters of its own.

    Raises:
        ExperimentError: each does.
    """
    private = step.private_names(list(parameters))
    if client is None and (private or step.config.epochs):
        raise ExperimentError(
            "each device scores with parameters of its own",
            expected="the user whose device the export is for",
            got=f"private parameters {', '.join(private)}"
            if private
            else "fine-tuning on the device ([evaluation] fine-tune)",
            fix="fedrec export RUN --user ID",
        )


def _form(node: Node, data: Interactions) -> dict[str, Any]:
    """How rows become inputs."""
    experiment = node.experiment
    above = 0.0 if experiment.task == "rating" else experiment.positive_above
    history = _history_form(node)
    columns = []
    if history and data.ratings is not None and (above is not None or history.get("rated")):
        columns.append("rating")
    if history and data.times is not None and (history["kind"] != "weights" or history["rated"]):
        columns.append("time")
    kinds = data.user_features.features if node.model.schema.user_features else ()
    features = {
        kind.name: {"categories": list(kind.categories), "width": max(1, kind.width)}
        for kind in kinds
    }
    return {
        "run": experiment.name,
        "task": experiment.task,
        "columns": columns,
        "positive-above": above,
        "history": history,
        "features": {} if history else features,
    }


def _history_form(node: Node) -> dict[str, Any] | None:
    model = node.model
    if not isinstance(model, HistoryModel):
        return None
    form = model.form
    if form.longest is not None:
        return {"kind": "sequence", "longest": form.longest}
    if form.recency is not None:
        return {"kind": "recent", "window": form.recency.window, "decay": form.recency.decay}
    return {"kind": "weights", "rated": form.rated, "low-rated": form.low_rated}


def _rows(node: Node, client: int) -> str:
    """The training rows of a client, as `score.py` reads them."""
    data = node.population.client(client)
    ids = node.population.interactions.item_ids
    columns: dict[str, Any] = {"item": ids[data.items]}
    if data.ratings is not None:
        columns["rating"] = data.ratings
    if data.times is not None:
        columns["time"] = data.times
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))
    return text.getvalue()
