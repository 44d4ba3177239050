# SPDX-License-Identifier: Apache-2.0
"""Running, resuming and changing experiments, for the command line and `fedrec.run`."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec.components.registry import SAMPLER, STRATEGY, resolve
from fedrec.components.sections import Section
from fedrec.data.population import POPULATIONS
from fedrec.errors import DataError, ExperimentError
from fedrec.experiment.phases import last_phase
from fedrec.experiment.schema import EngineConfig, Experiment, load
from fedrec.runs.folder import Result, RunFolder
from fedrec.runs.ids import default_folder
from fedrec.runtime.files import read_json, write_atomically, write_json
from fedrec.runtime.process import interrupting
from server.callbacks import Callback
from simulations.recommending import keep_ids, with_parameters
from strategies.base import CohortStrategy

_CLIENTS_OF_A_NODE = 8  # minimum per round to keep a node busy
_FEW_ROUNDS = 20  # shorter runs end before a second node has started


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
        callbacks: called on each event of the run.

    Raises:
        FedrecError: an error that you can fix; the message says how. If settings or data are
            invalid and no work was done, the run folder is removed.
    """
    settled = settle(with_private_popularity(load(experiment, overrides)))
    folder = RunFolder.create(settled, Path(output) if output else default_folder(settled))
    try:
        return execute(folder, callbacks)
    except (ExperimentError, DataError):
        if not folder.has_progress:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def resume(
    folder: str | Path, overrides: Iterable[str] = (), *, callbacks: Sequence[Callback] = ()
) -> Result:
    """Continue a run from its newest checkpoint; for a finished run, return its result.

    Args:
        folder: the run folder.
        overrides: changed settings, such as `"rounds=200"` for a longer run; see
            `CHANGEABLE`.
        callbacks: called on each event of the run.

    Raises:
        FedrecError: the folder is not a run folder, or another error that you can fix.
    """
    run = _amend(RunFolder(Path(folder)), overrides)
    if run.status()["state"] == "finished":
        return with_parameters(run.read_result())
    return execute(run, callbacks)


def execute(folder: RunFolder, callbacks: Sequence[Callback] = ()) -> Result:
    """Run the remaining part of a run folder on its experiment's engine, and centralised systems in
    this process. A signal that ends the process stops the engine's other processes, too.

    Raises:
        KeyboardInterrupt: the run was interrupted, by Ctrl-C or a signal.
    """
    folder.user_ids = lambda: keep_ids(folder)  # before the run counts as finished
    try:
        with interrupting():
            result = _executed(folder, callbacks)
    except (KeyboardInterrupt, SystemExit):  # the latter by Ray's signal handler
        status = folder.status()
        if status["state"] in ("created", "running"):  # before the first round, or elsewhere
            folder.set_status("interrupted", status["round"])
        raise KeyboardInterrupt from None
    keep_ids(folder)
    return result


def _executed(folder: RunFolder, callbacks: Sequence[Callback]) -> Result:
    POPULATIONS.renew(folder.experiment)
    if not folder.experiment.federated:
        from server.run import execute_central

        return execute_central(folder, callbacks)
    if folder.experiment.engine.name == "flower":
        from simulations.engines import flower

        return flower.launch(folder, callbacks)
    from server.run import execute as execute_on

    if folder.experiment.engine.actors:
        from simulations.engines.ray import open_grid
    else:
        from simulations.engines.grid import open_grid
    with open_grid(folder) as grid:
        return execute_on(folder, grid, callbacks)


def with_private_popularity(experiment: Experiment) -> Experiment:
    """Add private popularity as a baseline to a private experiment with a target epsilon, because
    popularity is not private. It is not added if the experiment has no baselines, already has it or
    is it.
    """
    privacy = experiment.privacy
    evaluation = experiment.evaluation
    if privacy is None or privacy.epsilon is None or experiment.task != "ranking":
        return experiment
    names = [entry if isinstance(entry, str) else entry.name for entry in evaluation.baselines]
    if not names or "dp-popularity" in names or last_phase(experiment) == "popularity":
        return experiment
    settings = {"epsilon": privacy.epsilon, "adjacency": privacy.adjacency}
    if privacy.delta is not None:
        settings["delta"] = privacy.delta
    added = Section.model_validate({"name": "dp-popularity", **settings})
    baselines = (added, *evaluation.baselines)
    changed = evaluation.model_copy(update={"baselines": baselines})
    return experiment.model_copy(update={"evaluation": changed})


def settle(experiment: Experiment, known: EngineConfig | None = None) -> Experiment:
    """Fill in an experiment's number of nodes, threads and device for this machine. They are saved
    in the run folder, because the last digits of sums depend on the number of nodes.

    Args:
        experiment: the resolved experiment.
        known: nodes and threads of an experiment that does not set them; default: chosen for this
            machine.
    """
    from fedrec.device import resolve_device

    engine = experiment.engine
    cores = len(os.sched_getaffinity(0))
    device = engine.device
    if engine.ray_address is None:  # a cluster may have devices that this machine does not have
        resolved = resolve_device(device, engine.precision)
        device = resolved.type if device == "auto" else device
    alone = engine.name == "serial" or not experiment.federated
    before = known or engine
    nodes = engine.nodes or before.nodes or (1 if alone else _workers(experiment, device, cores))
    threads = engine.threads or before.threads or (1 if experiment.federated else cores)
    settled = {**engine.table(), "nodes": nodes, "threads": threads, "device": device}
    return experiment.model_copy(update={"engine": EngineConfig.parse(settled, at="engine")})


def _workers(experiment: Experiment, device: str, cores: int) -> int:
    """Number of nodes: one per core or GPU; on Ray on this machine at most as many as a cohort
    keeps busy, where the number changes only the last digits of results."""
    if device.startswith("cuda"):
        import torch

        return max(1, torch.cuda.device_count())
    engine = experiment.engine
    strategy = resolve(STRATEGY, experiment.strategy.name)
    cohort = getattr(experiment.settings(SAMPLER), "cohort", None)
    here = engine.name == "ray" and engine.ray_address is None
    counts_nodes = experiment.secure_aggregation or not issubclass(strategy, CohortStrategy)
    if not here or counts_nodes:
        return cores
    if experiment.rounds < _FEW_ROUNDS:
        return 1
    return cores if cohort is None else min(cores, max(1, int(cohort) // _CLIENTS_OF_A_NODE))


# Changes to a started run: more rounds, and settings that do not affect training. A run folder
# documents its run, so all other settings are fixed. The digests of earlier versions stay in
# run.json, because checkpoints contain them.

CHANGEABLE = (
    "rounds",
    "callbacks",
    "checkpoint",
    "evaluation.every",
    "evaluation.users",
    "engine.timeout",
    "engine.max-failures",
    "engine.memory-gib",
    "engine.threads",
    "engine.device",
)
"""Keys that may change in a started run."""


def _amend(run: RunFolder, overrides: Iterable[str]) -> RunFolder:
    """Change settings of a run, which is then resumed; a finished run continues with added rounds.

    Args:
        run: the run folder.
        overrides: texts such as `"rounds=200"`.

    Raises:
        ExperimentError: a setting is invalid, or may not change.
    """
    texts = list(overrides)
    before = run.experiment
    after = load(run.experiment.table(), texts)
    if before.digest() == after.digest():
        return run
    for key in (text.partition("=")[0].strip() for text in texts):
        if not any(key == known or key.startswith(f"{known}.") for known in CHANGEABLE):
            raise ExperimentError(
                f"{key!r} of a started run cannot be changed",
                expected="one of " + ", ".join(CHANGEABLE),
                fix="start another run with `fedrec run`",
            )
    _check_rounds(run, before, after)
    _write_amended(run, after)
    return RunFolder(run.path)


def _write_amended(run: RunFolder, experiment: Experiment) -> None:
    """Change the experiment of a started run, and remove its result."""
    about = read_json(run.path / "run.json")
    earlier = [digest for digest in run.digests if digest != experiment.digest()]
    about |= {"experiment-sha256": experiment.digest(), "earlier-sha256": earlier}
    (run.path / "result.json").unlink(missing_ok=True)
    # Write the file that accepts both versions first, so that after a crash the earlier one is
    # valid.
    write_json(run.path / "run.json", about)
    write_atomically(run.path / "experiment.toml", experiment.toml())
    run.set_status("interrupted", run.status()["round"])


def _check_rounds(run: RunFolder, before: Experiment, after: Experiment) -> None:
    done = run.status()["round"]
    if after.rounds < done:
        raise ExperimentError(
            f"{done} completed rounds cannot be removed", fix="start another run with `fedrec run`"
        )
    privacy = before.privacy
    if privacy is not None and privacy.epsilon is not None and after.rounds != before.rounds:
        raise ExperimentError(
            "more rounds would have required more noise in the completed rounds, which was"
            f" calibrated to privacy.epsilon = {privacy.epsilon:g}",
            expected="privacy.noise-multiplier in a run that is extended",
            fix="start another run with `fedrec run`",
        )
