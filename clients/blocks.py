# SPDX-License-Identifier: Apache-2.0
"""Training of a node's clients in blocks (`fedrec.training`), by autograd or in native code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.node import Node, PathName, TrainingPath
from clients.one_client import private_parameters, to_device
from clients.step import Step
from clients.step_checks import check_block
from clients.steps.statistics import SufficientStatistics
from fedrec.components.errors import file_of, line_of, named
from fedrec.data.client_data import ClientData
from fedrec.errors import ClientError, FedrecError
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.rng import stream
from fedrec.training.block import Batches, Block, OwnData
from fedrec.training.results import Outcome

MOST_CLIENTS = 16_384
"""Largest number of clients whose batches, some 7 KB each, are in memory together."""


def train_in_blocks(
    node: Node,
    step: Step,
    path: TrainingPath,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    stream_name: str,
    round_: int,
    before_round: int | None = None,
    given: ClientArrays | None = None,
) -> Iterator[tuple[list[int], Outcome]]:
    """Train clients in blocks. Only so many clients' data are in memory together that a round may
    have a million.

    Args:
        node: the node.
        step: what they do.
        path: how; on `reference` with whole item tables.
        parameters: the global parameters.
        clients: `int64 [clients]`.
        stream_name: stream that they draw from.
        round_: the round, likewise.
        before_round: private parameters are those of the rounds before this one; default: before
            `round_`.
        given: parameters that the server sent to each of the clients.

    Yields:
        Indices in `clients` of a block's members, and the trained block, which the caller should
        let go before it takes the next one. The blocks depend on the clients' data alone.

    Raises:
        ClientError: the work on a block failed; names its clients. Or the server sent rows of other
            items than the clients need.
        FedrecError: the step raised one; of the same kind, with the client named before it.
    """
    before = round_ if before_round is None else before_round
    work = _NodeTraining(node, step, path.name, parameters, stream_name, round_, before, given)
    for start in range(0, len(clients), MOST_CLIENTS):
        yield from work.blocks(clients[start : start + MOST_CLIENTS], start)


@dataclass(frozen=True, eq=False)
class _NodeTraining:
    """What the clients of a node do; see `train_in_blocks`."""

    node: Node
    step: Step
    path: PathName
    parameters: dict[str, Tensor]
    stream: str
    round: int
    before: int
    given: ClientArrays | None

    def blocks(self, clients: np.ndarray, first: int) -> Iterator[tuple[list[int], Outcome]]:
        """Indices from `first` on and outcomes, of clients whose data are in memory together.

        On a CPU no variable here has a block while the next one is built, so that there is memory
        for one; see `train_in_blocks`.
        """
        whole = isinstance(self.step, SufficientStatistics) and self.step.whole
        if whole and self.path != "reference":
            yield list(range(first, first + len(clients))), self._whole_block(clients)
            return
        data = self.node.population.clients(clients)
        batches = [self._batches(client) for client in data]
        sizes, tables = self._sizes()
        if any(isinstance(batch, OwnData) for batch in batches):
            tables = []  # such steps return whole tables
        one_by_one = self.path == "kernel"
        cut = self.node.blocks(batches, sizes, tables, one_by_one, self.step.block_clients)
        if self.node.device.type == "cpu":
            for indices in cut:
                members = [data[i] for i in indices]
                block = self._built(members, [batches[i] for i in indices])
                trained = self._trained(members, block)
                del block
                yield [first + i for i in indices], trained
                del trained
            return
        built = (
            (indices, self._built([data[i] for i in indices], [batches[i] for i in indices]))
            for indices in cut
        )
        coming = next(built, None)
        while coming is not None:
            indices, block = coming
            trained = self._trained([data[i] for i in indices], block)
            coming = next(built, None)  # while the device trains the one before
            yield [first + i for i in indices], trained

    def _sizes(self) -> tuple[dict[str, Tensor], list[str]]:
        """One client's parameters, and the item tables among them."""
        if self.given is None:
            return self.parameters, list(self.node.model.item_tables)
        arrays = self.given.values | self.given.rows
        sent = {name: torch.from_numpy(value[:1]) for name, value in arrays.items()}
        loaded = {n: value for n, value in self.parameters.items() if n not in self._replaced}
        return sent | loaded, list(self.given.rows)

    @property
    def _replaced(self) -> tuple[str, ...]:
        """Parameters that are not loaded. Fine-tuning, which reads the state after the round, may
        have no steps, and then leaves clients as they are."""
        return self.step.replaced if self.before == self.round else ()

    def _batches(self, data: ClientData) -> Batches:
        drawn = stream(self.node.experiment.seed, self.stream, data.client, self.round)
        try:
            return self.step.batches(data, drawn)
        except FedrecError as error:
            raise error.about(f"client {data.client}") from error
        except Exception as error:
            raise self._failed(data, error) from error

    def _whole_block(self, clients: np.ndarray) -> Outcome:
        """All clients as one block, of a step that needs no batches."""
        step: Any = self.step
        try:
            return step.whole_block(self.parameters, self.node.population, clients)
        except FedrecError:
            raise
        except Exception as error:
            raise self._blamed(self.node.population.clients(clients), error) from error

    def _built(self, data: list[ClientData], batches: list[Batches]) -> Block:
        """A block of clients."""
        with self._naming_one_of(data):
            features = [client.features for client in data]
            block = self.step.block(features, batches, self.node.device)
            if self.path == "reference" and self.given is None:
                return block.on_whole_tables(self.node.model.schema.num_items)
            return block

    def _trained(self, data: list[ClientData], block: Block) -> Outcome:
        """The clients of a block, trained."""
        clients = [client.client for client in data]
        with self._naming_one_of(data), self.node.products():
            start = self._client_params(block, np.array(clients))
            kernel = self.path == "kernel"
            train = self.step.train_in_kernel if kernel else self.step.train_block
            arguments = (start,) if start else ()
            trained = train(self.parameters, block, *arguments)
        check_block(self.step, trained, self.parameters, self._doing(clients))
        return trained

    @contextmanager
    def _naming_one_of(self, data: list[ClientData]) -> Iterator[None]:
        """What fails in it names a client."""
        try:
            yield
        except FedrecError as error:  # its text is complete except for the client
            if len(data) > 1:
                raise
            raise error.about(f"client {data[0].client}") from error
        except Exception as error:
            raise self._blamed(data, error) from error

    def _client_params(self, block: Block, clients: np.ndarray) -> dict[str, Tensor]:
        """What the clients start from instead of the global parameters, `[C, ...]` each."""
        private = private_parameters(
            self.node, self.step, self.parameters, clients, self.before, self._replaced
        )
        if self.given is None:
            return private
        sent = self.given.take(np.searchsorted(self.given.requests.clients, clients))
        width = block.touched.shape[1]
        if not np.array_equal(block.touched.cpu().numpy()[sent.real(width)], sent.requests.items):
            raise ClientError(
                f"the parameters of round {self.round} are not those that the clients need",
                expected="the rows of the items that they named",
                got=f"other rows, for some of the clients {_listed(clients.tolist())}",
                fix="request the round's items from the nodes before generating parameters",
            )
        return to_device(sent.padded(width), self.node.device) | private

    def _blamed(self, data: list[ClientData], error: Exception) -> FedrecError:
        """The error of the client that makes a block fail, found by training the clients one by
        one."""
        if len(data) == 1:
            return self._failed(data[0], error)
        for client in data:
            try:
                self._trained([client], self._built([client], [self._batches(client)]))
            except FedrecError as error_of_client:
                return error_of_client
        return ClientError(
            f"{named('step', self.step)} failed for a block of clients, but for none of them alone"
            f" (round {self.round})",
            expected=f"updates of clients {_listed([client.client for client in data])}",
            fix="--set engine.path=reference trains one client after the other",
        )

    def _failed(self, data: ClientData, error: Exception) -> ClientError:
        step = self.step
        return ClientError(
            f"client {data.client} failed in step {type(step).__name__!r} (round {self.round}, node"
            f" {self.node.partition}) of {file_of(step)}",
            expected=(
                f"an update from {len(data.items)} rows ({len(data.positives)} positives) with"
                f" {step.config!r}"
            ),
            got=f"{type(error).__name__}: {error} ({line_of(error)})",
            fix="run with --engine serial --debug for the whole traceback",
        )

    def _doing(self, clients: list[int]) -> str:
        whose = f"for client {clients[0]}" if len(clients) == 1 else f"for {len(clients)} clients"
        return f"{whose} (round {self.round}, {self.node.name})"


def _listed(clients: list[int]) -> str:
    return ", ".join(map(str, clients))
