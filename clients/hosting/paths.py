# SPDX-License-Identifier: Apache-2.0
"""The training path that a node takes for a step: one of three.

- `kernel`: native code takes all steps of a client in one call, for models that declare a kernel.
- `blocks`: many clients at once, by autograd over a leading cohort dimension.
- `reference`: blocks with whole item tables, of one client if it is requested. The other paths are
  tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clients.local.sufficient_statistics import SufficientStatistics
from clients.step import Step
from fedrec.components.errors import named
from fedrec.errors import ExperimentError
from fedrec.experiment.tables import EngineConfig
from fedrec.models.base import Model

PathName = Literal["kernel", "blocks", "reference"]


@dataclass(frozen=True)
class TrainingPath:
    """A training path.

    Attributes:
        name: `kernel`, `blocks` or `reference`.
        reason: why no faster path was taken; empty if it is the fastest, or was requested.
    """

    name: PathName
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def training_path(step: Step, model: Model, engine: EngineConfig) -> TrainingPath:
    """The fastest path that a step, a model and the engine's settings allow.

    Item tables that stay on the device take `reference` whatever `engine.path` says; steps that
    train nothing, or one client after the other, take `blocks`.

    Raises:
        ExperimentError: `engine.path` is `kernel`, and the step does not train in native code.
    """
    if engine.path == "reference":
        return TrainingPath("reference")
    if step.generated and step.declared_refusal() is not None:
        return TrainingPath("blocks")
    if step.private_names(list(model.item_tables)):
        return TrainingPath("reference", "item tables are private")
    if engine.path == "blocks" or isinstance(step, SufficientStatistics):  # nothing is trained
        return TrainingPath("blocks")
    if type(step).batches is Step.batches:
        return TrainingPath("blocks", f"step {type(step).__name__} trains one client at a time")
    refusal = step.declared_refusal()
    if refusal is None and engine.precision != "float32":
        refusal = f"the kernel computes in float32, not in {engine.precision}"
    if refusal is None:
        return TrainingPath("kernel")
    if engine.path == "kernel":
        raise ExperimentError(
            f"{named('step', step)} cannot be trained by the kernel",
            expected="plain SGD on the CPU, in float32, with a model that declares a kernel",
            got=refusal,
            fix="leave out engine.path",
        )
    return TrainingPath("blocks", refusal)
