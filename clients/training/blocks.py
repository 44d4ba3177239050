# SPDX-License-Identifier: Apache-2.0
"""Training of a node's clients in blocks (`fedrec.cohort`), by autograd or in native code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from clients.hosting.node import Node
from clients.hosting.paths import TrainingPath
from clients.hosting.step_checks import Versions, refuse_wrong_block
from clients.local.sufficient_statistics import SufficientStatistics
from clients.step import CohortStep
from clients.training.one_client import client_error, private_parameters, run_step
from fedrec.cohort.outcome import Outcome
from fedrec.components.errors import named
from fedrec.errors import ClientError, FedrecError
from fedrec.rng import stream

_CLIENTS_AT_ONCE = 16_384  # clients whose batches, some 7 KB each, are in memory together


def train_in_blocks(
    node: Node,
    step: CohortStep,
    path: TrainingPath,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    stream_name: str,
    round_: int,
    before_round: int | None = None,
) -> Iterator[tuple[list[int], Outcome]]:
    """Train clients in blocks. Only so many clients' data are in memory together that a round may
    have a million.

    Args:
        node: the node.
        step: what they do.
        path: `kernel` or `blocks`.
        parameters: the global parameters.
        clients: `int64 [clients]`.
        stream_name: stream that they draw from.
        round_: the round, likewise.
        before_round: private parameters are those of the rounds before this one; default: before
            `round_`.

    Yields:
        Places in `clients` of a block's members, and the trained block. The blocks depend on the
        clients' data alone.

    Raises:
        ClientError: the work on a block failed; names its clients.
        FedrecError: the step raised one; of the same kind, with the client named before it.
    """
    for start in range(0, len(clients), _CLIENTS_AT_ONCE):
        part = clients[start : start + _CLIENTS_AT_ONCE]
        given = (node, step, path, parameters, part, stream_name, round_, before_round)
        for places, trained in _blocks_of(*given):
            yield [start + place for place in places], trained


def _blocks_of(
    node: Node,
    step: CohortStep,
    path: TrainingPath,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    stream_name: str,
    round_: int,
    before_round: int | None,
) -> Iterator[tuple[list[int], Outcome]]:
    """The same of clients whose data are in memory together."""
    if isinstance(step, SufficientStatistics) and step.whole:
        yield _whole_block(node, step, parameters, clients, stream_name, round_)
        return
    data = node.population.clients(clients)
    train = step.train_in_kernel if path.name == "kernel" else step.train_block
    batches = []
    for one in data:
        try:
            batches.append(
                step.batches(one, stream(node.experiment.seed, stream_name, one.client, round_))
            )
        except FedrecError as error:
            raise error.about(f"client {one.client}") from error
        except Exception as error:
            raise client_error(step, node, one, round_, error) from error
    before = round_ if before_round is None else before_round
    for places in node.blocks(batches, parameters, node.model.item_tables, path.name):
        users = [data[place].features for place in places]
        untouched = Versions(parameters)
        members = clients[places].tolist()
        with _blaming(node, step, parameters, members, stream_name, round_):
            block = step.block(users, [batches[place] for place in places], node.device)
            own = private_parameters(node, step, parameters, clients[places], before)
            with node.products():
                trained = train(parameters, block, own) if own else train(parameters, block)
        refuse_wrong_block(step, trained, parameters, f"in round {round_}")
        untouched.refuse(step, f"in round {round_}")
        yield places, trained


def _whole_block(
    node: Node,
    step: SufficientStatistics,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    stream_name: str,
    round_: int,
) -> tuple[list[int], Outcome]:
    """All clients as one block, of a step that needs no batches."""
    untouched = Versions(parameters)
    with _blaming(node, step, parameters, clients.tolist(), stream_name, round_):
        found = step.whole_block(parameters, node.population, clients)
    untouched.refuse(step, f"in round {round_}")
    return list(range(len(clients))), found


@contextmanager
def _blaming(
    node: Node,
    step: CohortStep,
    parameters: dict[str, Tensor],
    clients: list[int],
    stream_name: str,
    round_: int,
) -> Iterator[None]:
    """Work on a block of clients, whose failure names one of them.

    Raises:
        ClientError: it failed; see `_blame`.
        FedrecError: it raised one, which stays as it is.
    """
    try:
        yield
    except FedrecError:
        raise
    except Exception as error:
        raise _blame(node, step, parameters, clients, stream_name, round_, error) from error


def _blame(
    node: Node,
    step: CohortStep,
    parameters: dict[str, Tensor],
    clients: list[int],
    stream_name: str,
    round_: int,
    error: Exception,
) -> FedrecError:
    """The error of the client that makes a block fail, found by training the clients one by one; of
    a block of one client, without training it again."""
    if len(clients) == 1:
        return client_error(step, node, node.population.client(clients[0]), round_, error)
    for client in clients:
        try:
            run_step(step, parameters, node, client, stream_name, round_)
        except FedrecError as error:
            return error
    return ClientError(
        f"{named('step', step)} failed for a block of clients, but for none of them alone (round"
        f" {round_})",
        expected=f"updates of clients {', '.join(map(str, clients))}",
        got="an error in the block",
        fix="--set engine.path=reference trains one client after the other",
    )
