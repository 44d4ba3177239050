# SPDX-License-Identifier: Apache-2.0
"""Running and resuming experiments: the door that the command line and `fedrec.run` share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec.experiment import EngineConfig, Experiment, load
from fedrec.runs import Result, RunFolder, default_folder
from server.callbacks.base import Callback


def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    overrides: Iterable[str] = (),
    *,
    output: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run an experiment from the beginning.

    Args:
        experiment: a TOML file, the name of a shipped experiment, a table, or an `Experiment`.
        overrides: texts such as `"strategy.server-lr=0.5"`.
        output: the run folder, new or empty; default: below `$FEDREC_RUNS` or `runs/`.
        callbacks: told what happens.

    Raises:
        FedrecError: something that you can mend; the message says how.
    """
    source = experiment.table() if isinstance(experiment, Experiment) else experiment
    settled = settle(load(source, overrides))
    folder = RunFolder.create(settled, Path(output) if output else default_folder(settled))
    return execute(folder, callbacks)


def resume(folder: str | Path, *, callbacks: Sequence[Callback] = ()) -> Result:
    """Continue a run from its newest checkpoint; a finished run gives its result again.

    Raises:
        FedrecError: the folder is not a run folder, or something else that you can mend.
    """
    found = RunFolder(Path(folder))
    if found.status()["state"] == "finished":
        return found.read_result()
    return execute(found, callbacks)


def execute(folder: RunFolder, callbacks: Sequence[Callback] = ()) -> Result:
    """Run what is left of a run folder on the engine that its experiment names; centralised systems in this process."""
    if not folder.experiment.federated:
        from server.execution import execute_central

        return execute_central(folder, callbacks)
    if folder.experiment.engine.name == "flower":
        from simulations.engines import flower

        return flower.launch(folder, callbacks)
    from server.execution import execute as execute_on

    if folder.experiment.engine.name == "ray":
        from simulations.engines.ray import open_grid
    else:
        from simulations.engines.serial import open_grid
    with open_grid(folder) as grid:
        return execute_on(folder, grid, callbacks)


def settle(experiment: Experiment) -> Experiment:
    """The same experiment with the number of nodes, the threads and the device of this machine filled in.

    They go into the run folder, because sums depend on the number of nodes in their last digits.
    """
    from fedrec.device import resolve_device

    engine = experiment.engine
    cores = len(os.sched_getaffinity(0))
    device = engine.device
    if engine.ray_address is None:  # a cluster may have devices that this machine has not
        resolved = resolve_device(device, engine.precision)
        device = resolved.type if device == "auto" else device
    alone = engine.name == "serial" or not experiment.federated
    nodes = engine.nodes or (1 if alone else _workers(device, cores))
    threads = engine.threads or (1 if experiment.federated else cores)
    settled = {**engine.table(), "nodes": nodes, "threads": threads, "device": device}
    return experiment.model_copy(update={"engine": EngineConfig.parse(settled, at="engine")})


def _workers(device: str, cores: int) -> int:
    if device.startswith("cuda"):
        import torch

        return max(1, torch.cuda.device_count())
    return cores
