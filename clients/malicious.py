# SPDX-License-Identifier: Apache-2.0
"""Malicious clients of a simulation.

Those of an attack with made-up profiles train on these like any other client. Those of an attack
with made-up updates send what it computes from the parameters that they receive; the node clips,
weights and sums it like any other update, and their own losses are never reported. The code of
attacks is not in this package, and the nodes of deployments refuse every experiment with an
adversary (`clients.device.policy`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.step import Step, private_names
from fedrec.components import registry
from fedrec.components.sections import component_errors, component_of
from fedrec.data.population import Known
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.models.base import Model, Parameters
from fedrec.training.block import Block, OwnData
from fedrec.training.results import BlockUpdate, Dense


@dataclass(frozen=True, eq=False)
class MaliciousBlock:
    """Data from which malicious clients compute their updates in a round.

    Attributes:
        parameters: the global ones, without cohort dimension, not to be changed.
        initial: those before the first round, a function of the seed that every client can compute.
        shared: names of the parameters that clients send.
        model: the model.
        step: the step of honest clients.
        known: what the adversary knows beforehand.
        clients: `[C]`, the data and the random stream of each of these clients.
        client_params: their private parameters, `[C, ...]` each.
        together: expected number of malicious clients in a round, at least 1.
        round: the round, from 1.
    """

    parameters: Parameters
    initial: Parameters
    shared: tuple[str, ...]
    model: Model
    step: Step
    known: Known
    clients: tuple[OwnData, ...]
    client_params: Parameters
    together: int
    round: int

    @cached_property
    def honest(self) -> tuple[BlockUpdate, ...]:
        """`[C]`: each client after honest training on its profile, as a block of one."""
        blocks = []
        for index, member in enumerate(self.clients):
            batches = self.step.batches(member.data, member.random)
            block = self.step.block([member.data.features], [batches], self.step.device)
            client_params = {
                name: value[index : index + 1] for name, value in self.client_params.items()
            }
            train = self.step.train_block
            blocks.append(train(self.parameters, block, client_params or None))
        return tuple(blocks)

    @property
    def honest_norms(self) -> Tensor:
        """`float64 [C]`: L2 norm of the update that each would send if it trained honestly."""
        return torch.cat([block.norms(self.shared) for block in self.honest])

    def features(self, index: int) -> tuple[Tensor, ...]:
        """Per user feature the category codes of a client, `int64 [1, width]`."""
        codes = self.clients[index].data.features
        return tuple(
            torch.from_numpy(feature.copy())[None].to(self.step.device) for feature in codes
        )


class _MaliciousStep(Step):
    """Sends what an attack computes.

    Args:
        honest: the step of honest clients.
        attack: computes the updates, see `simulations.poisoning`.
        view: makes a `MaliciousBlock` of what differs between blocks.
    """

    def __init__(self, honest: Step, attack: Any, view: Callable[..., MaliciousBlock]) -> None:
        super().__init__(honest.config, honest.model, honest.device)
        self.attack = attack
        self.view = view
        self.private = honest.private

    def train_block(
        self, parameters: Parameters, block: Block, client_params: Parameters | None = None
    ) -> BlockUpdate:
        """The updates of a block of malicious clients; zero where the attack gives none. Each
        claims the usual number of examples."""
        private = private_names(self, parameters)
        view = self.view(
            parameters=parameters,
            shared=tuple(name for name in parameters if name not in private),
            clients=tuple(member for member in block.members if isinstance(member, OwnData)),
            client_params=client_params or {},
        )
        with component_errors(registry.POISONING.name, self.attack, "in updates"):
            updates = self.attack.updates(view)
        sent = {
            name: Dense(updates[name].detach().to(parameters[name]))
            for name in view.shared
            if name in updates
        }
        claimed = replace(block, examples=(view.known.usual,) * len(block))
        return BlockUpdate(parameters, claimed, sent, [math.nan] * len(block), client_params or {})


class PlantedStep(Step):
    """A step of planted clients; all others run another step, `base`."""

    base: Step

    def is_planted(self, clients: np.ndarray) -> np.ndarray:
        """`bool [clients]`: which of a round's clients run this step."""
        raise NotImplementedError


def assigned(step: Step, clients: np.ndarray) -> Iterator[tuple[Step, np.ndarray]]:
    """Steps and the clients of a round that each trains, `int64 [clients]`."""
    if isinstance(step, PlantedStep):
        planted = step.is_planted(clients)
        yield step.base, clients[~planted]
        yield step, clients[planted]
    else:
        yield step, clients


def malicious_workers(
    experiment: Experiment,
    known: Known,
    fresh: Parameters,
    step: Step,
    clients: np.ndarray,
    round_number: int,
) -> Iterator[tuple[Step, np.ndarray]]:
    """The steps of malicious clients in a round, and the clients of each.

    Args:
        experiment: an experiment with an adversary.
        known: what the adversary knows.
        fresh: the initial parameters.
        step: the step of honest clients.
        clients: `int64 [clients]`, malicious ones.
        round_number: from 1.

    Raises:
        ExperimentError: the attack makes up updates, and the server generates parameters.
    """
    adversary = experiment.adversary
    if not len(clients) or adversary is None:
        return
    attack = component_of(registry.POISONING, adversary.attack)
    if not hasattr(attack, "updates"):
        yield from assigned(step, clients)
        return
    if step.generated:
        raise ExperimentError(
            f"attack {adversary.attack.name!r} makes up updates of the global parameters",
            expected="a step whose clients receive these",
            got=f"step {type(step).__name__!r}, whose parameters the server generates",
            fix="set adversary.attack = 'random', or another attack with made-up profiles",
        )
    everyone = known.honest + len(known.malicious)
    cohort = float(experiment.sampler.options.get("cohort", everyone))
    view = partial(
        MaliciousBlock,
        initial=fresh,
        model=step.model,
        step=step,
        known=known,
        together=max(1, round(min(1.0, cohort / everyone) * len(known.malicious))),
        round=round_number,
    )
    yield _MaliciousStep(step, attack, view), clients
