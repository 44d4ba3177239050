# SPDX-License-Identifier: Apache-2.0
"""Training of a node's clients in blocks (`fedrec.training`), by autograd or in native code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from clients.node import Node, PathName, TrainingPath
from clients.step import PrivateParameters, Step, private_names, replaced_names
from clients.steps.descent import Update
from clients.steps.statistics import SufficientStatistics
from fedrec.components.registry import line_of
from fedrec.components.sections import file_of, named, refuse_other_arrays, refuse_wrong
from fedrec.data.client_data import ClientData
from fedrec.device import on_device
from fedrec.errors import ClientError, FedrecError
from fedrec.experiment.schema import EngineConfig
from fedrec.protocol.updates import ClientArrays, ItemRequests
from fedrec.rng import stream, streams
from fedrec.training.block import Batches, Block, OwnData
from fedrec.training.results import BlockChange, BlockUpdate, ChangedRows, Dense

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
) -> Iterator[tuple[list[int], BlockUpdate]]:
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
    work = _Training(node, step, path.name, parameters, stream_name, round_, before, given)
    for start in range(0, len(clients), MOST_CLIENTS):
        for indices, trained in work.blocks(clients[start : start + MOST_CLIENTS]):
            yield (start + indices).tolist(), trained
            del trained


def needed_items(node: Node, step: Step, clients: np.ndarray, round_: int) -> ItemRequests:
    """The items of the batches that clients `int64 [clients]` draw in a round."""
    work = _Training(node, step, "kernel", {}, "client", round_, round_, None)
    parts = []
    for start in range(0, len(clients), MOST_CLIENTS):
        together = clients[start : start + MOST_CLIENTS]
        drawn = work.drawn(together)
        for indices in work.cut(drawn, {}, []):
            parts.append(drawn.build(indices).requests(together[indices].tolist()))
    return ItemRequests.joined(parts)


# The blocks of clients that are trained at once: as many as fit into the memory or, on a processor,
# its cache.

_ONE_BY_ONE = 64  # clients of a block in compiled code, which takes one after the other
# GiB of a block in compiled code, with all copies counted: 32 clients of PrivRec's network
_COMPILED_GIB = 3 / 32
_PRIVATE_BYTES = 1 << 26  # of clients whose private parameters are loaded at once
_COPIES = 4  # copies of a client's parameters: values, gradients, and autograd's


class Sizes(NamedTuple):
    """The batches of some clients by their sizes.

    Attributes:
        widths: `int64 [clients]`, examples side by side.
        steps: `int64 [clients]`.
        rows: `int64 [clients]`, how many rows of items all steps refer to.
    """

    widths: np.ndarray
    steps: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, batches: Sequence[Batches]) -> Sizes:
        """Sizes of batches that were drawn."""
        sizes = [(b.items.shape[1], len(b.sizes), b.references()[0].size) for b in batches]
        return cls(*np.array(sizes, dtype=np.int64).reshape(-1, 3).T)


class _ClientDraws(NamedTuple):
    """What some clients draw.

    Attributes:
        sizes: of their batches.
        compact: whether their steps return compact tables.
        together: see `Batches`.
        build: the block of some of them, by their positions `int64 [C]`.
    """

    sizes: Sizes
    compact: bool
    together: int
    build: Callable[[np.ndarray], Block]


def cut_blocks(
    sizes: Sizes,
    parameters: Mapping[str, Tensor],
    item_tables: Sequence[str],
    memory_gib: float,
    largest: int | None,
) -> Iterator[np.ndarray]:
    """Sort clients by their number of steps, most first, and cut them into blocks of one width that
    fit the memory.

    Args:
        sizes: of the clients' batches.
        parameters: the global parameters.
        item_tables: names of those that become compact.
        memory_gib: GiB that one block may take.
        largest: clients per block at most; None: as many as fit the memory.

    Yields:
        Positions of clients, `int64 [C]`, each once. A block has at least one client, even if it
        exceeds the memory.
    """
    order = np.lexsort((-sizes.steps, -sizes.widths))
    budget = memory_gib * 2**30
    dense = sum(value.numel() for name, value in parameters.items() if name not in item_tables)
    width = sum(parameters[name].shape[1] for name in item_tables)
    needs = 4 * _COPIES * (dense + sizes.rows * width) + 40 * sizes.rows
    widths = sizes.widths[order].tolist()
    first = 0
    taken = 0
    for number, need in enumerate(needs[order].tolist()):
        full = number - first == largest or taken + need > budget
        if number > first and (full or widths[number] != widths[first]):
            yield order[first:number]
            first = number
            taken = 0
        taken += need
    if len(order):
        yield order[first:]


def block_limits(
    engine: EngineConfig, device: torch.device, path: PathName, together: int
) -> tuple[float, int | None]:
    """`memory_gib` and `largest` of `cut_blocks` on a device: blocks have one client if the path
    `reference` is requested, and `together` on a processor unless compiled code takes one after the
    other (`Batches.together`)."""
    if engine.path == "reference":
        return engine.memory_gib, 1
    if device.type != "cpu":
        return engine.memory_gib, None
    if path == "kernel":
        return min(engine.memory_gib, _COMPILED_GIB), _ONE_BY_ONE
    return engine.memory_gib, together


@dataclass(frozen=True, eq=False)
class _Training:
    """Training of the clients of a node; see `train_in_blocks`."""

    node: Node
    step: Step
    path: PathName
    parameters: dict[str, Tensor]
    stream: str
    round: int
    before: int
    given: ClientArrays | None

    def blocks(self, clients: np.ndarray) -> Iterator[tuple[np.ndarray, BlockUpdate]]:
        """Positions of clients, whose data are in memory together, and their updates.

        On a CPU no variable here has a block while the next one is built, so that there is memory
        for one; see `train_in_blocks`.
        """
        drawn = self.drawn(clients)
        parameters = self.parameters
        tables = list(self.node.model.item_tables)
        if self.given is not None:
            arrays = self.given.values | self.given.rows
            sent = {name: torch.from_numpy(value[:1]) for name, value in arrays.items()}
            replaced = self._replaced
            parameters = sent | {n: v for n, v in parameters.items() if n not in replaced}
            tables = list(self.given.rows)
        blocks = self.cut(drawn, parameters, tables)
        private = self._private(clients)
        if self.node.device.type == "cpu":
            for indices in blocks:
                block = drawn.build(indices)
                trained = self._trained(clients[indices], block, private(indices))
                del block
                yield indices, trained
                del trained
            return
        built = ((indices, drawn.build(indices)) for indices in blocks)
        coming = next(built, None)
        while coming is not None:
            indices, block = coming
            trained = self._trained(clients[indices], block, private(indices))
            coming = next(built, None)  # while the device trains the one before
            yield indices, trained

    def cut(
        self, drawn: _ClientDraws, parameters: Mapping[str, Tensor], item_tables: Sequence[str]
    ) -> Iterator[np.ndarray]:
        """The clients of each block, see `cut_blocks`."""
        engine = self.node.experiment.engine
        limits = block_limits(engine, self.node.device, self.path, drawn.together)
        if isinstance(self.step, SufficientStatistics):  # no client has parameters of its own
            return cut_blocks(drawn.sizes, {}, [], *limits)
        return cut_blocks(drawn.sizes, parameters, item_tables if drawn.compact else [], *limits)

    def drawn(self, clients: np.ndarray) -> _ClientDraws:
        """What the clients draw."""
        population = self.node.population
        step = self.step
        seed = self.node.experiment.seed
        kind = type(step)
        described = kind.batches is Step.batches and kind.block is Step.block
        draw = step.draw() if described else None
        if draw is not None:
            examples = draw.of(population, clients)
            states = streams(seed, self.stream, clients, self.round)
            codes = population.feature_codes(clients)

            def build_drawn(indices: np.ndarray) -> Block:
                users = [feature[indices] for feature in codes]
                return self._on_tables(
                    examples.block(indices, states[indices], users, self.node.device)
                )

            steps = examples.steps
            sizes = Sizes(examples.widths, steps, steps * examples.widths)
            return _ClientDraws(sizes, True, draw.together, build_drawn)
        data = population.clients(clients)
        batches = []
        for client in data:
            with self._naming_one_of(np.array([client.client])):
                drawn = stream(seed, self.stream, client.client, self.round)
                batches.append(step.batches(client, drawn))

        def build(indices: np.ndarray) -> Block:
            with self._naming_one_of(clients[indices]):
                features = [data[i].features for i in indices]
                parts = [batches[i] for i in indices]
                return self._on_tables(step.block(features, parts, self.node.device))

        compact = not any(isinstance(batch, OwnData) for batch in batches)
        together = max((batch.together for batch in batches), default=Batches.together)
        return _ClientDraws(Sizes.of(batches), compact, together, build)

    def _on_tables(self, block: Block) -> Block:
        """A block with the item tables of the path."""
        if self.path == "reference" and self.given is None:
            return block.on_whole_tables(self.node.model.schema.num_items)
        return block

    def _trained(
        self, clients: np.ndarray, block: Block, private: Mapping[str, Tensor]
    ) -> BlockUpdate:
        """The clients of a block, trained."""
        with self._naming_one_of(clients), self.node.products():
            start = self._client_params(block, clients, private)
            kernel = self.step.in_kernel() if self.path == "kernel" else ""
            train = self.step.train_block if isinstance(kernel, str) else kernel
            arguments = (start,) if start else ()
            trained = train(self.parameters, block, *arguments)
        whose = f"client {clients[0]}" if len(clients) == 1 else f"{len(clients)} clients"
        doing = f"for {whose} (round {self.round}, {self.node.name})"
        _check_block(self.step, trained, self.parameters, doing)
        return trained

    @contextmanager
    def _naming_one_of(self, clients: np.ndarray) -> Iterator[None]:
        """Name a client in errors raised inside."""
        try:
            yield
        except FedrecError as error:  # its text is complete except for the client
            if len(clients) > 1:
                raise
            raise error.about(f"client {clients[0]}") from error
        except Exception as error:
            raise self._blamed(clients, error) from error

    @property
    def _replaced(self) -> list[str]:
        """Parameters that are not loaded. Fine-tuning, which reads the state after the round, may
        have no steps, and then leaves clients as they are."""
        return replaced_names(self.step, self.parameters) if self.before == self.round else []

    def _private(self, clients: np.ndarray) -> Callable[[np.ndarray], Mapping[str, Tensor]]:
        """Loader of the private parameters of some clients: of all at once, if they are small."""
        load = partial(
            private_parameters,
            self.node,
            self.step,
            self.parameters,
            before_round=self.before,
            without=self._replaced,
        )
        names = private_names(self.step, self.parameters)
        if len(clients) * sum(self.parameters[name].nbytes for name in names) > _PRIVATE_BYTES:
            return lambda indices: load(clients[indices])
        loaded = load(clients)
        return lambda indices: {name: value[indices] for name, value in loaded.items()}

    def _client_params(
        self, block: Block, clients: np.ndarray, private: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Values that the clients start from instead of the global parameters, `[C, ...]` each."""
        if self.given is None:
            return private
        sent = self.given.take(np.searchsorted(self.given.requests.clients, clients))
        width = block.touched.shape[1]
        if not np.array_equal(block.touched.cpu().numpy()[sent.real(width)], sent.requests.items):
            raise ClientError(
                f"the parameters of round {self.round} are not those that the clients need",
                expected="the rows of the items that they named",
                got=f"other rows, for some of the clients {clients.tolist()}",
                fix="request the round's items from the nodes before generating parameters",
            )
        return to_device(sent.padded(width), self.node.device) | dict(private)

    def _blamed(self, clients: np.ndarray, error: Exception) -> FedrecError:
        """The error of the client that makes a block fail, found by training the clients one by
        one."""
        step = self.step
        if len(clients) == 1:
            data = self.node.population.client(int(clients[0]))
            return ClientError(
                f"client {data.client} failed in step {type(step).__name__!r} (round {self.round},"
                f" node {self.node.partition}) of {file_of(step)}",
                expected=f"an update from {len(data.items)} rows ({len(data.positives)} positives)"
                f" with {step.config!r}",
                got=f"{type(error).__name__}: {error} ({line_of(error)})",
                fix="run with --engine serial --debug for the whole traceback",
            )
        for client in clients:
            try:
                list(self.blocks(np.array([client])))
            except FedrecError as error_of_client:
                return error_of_client
        return ClientError(
            f"{named('step', step)} failed for a block of clients, but for none of them alone"
            f" (round {self.round})",
            expected=f"updates of clients {clients.tolist()}",
            fix="--set engine.path=reference trains one client after the other",
        )


# One client's parameters and its update.


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Numpy parameters as tensors on a device."""
    return {name: on_device(array, device) for name, array in arrays.items()}


def update_of(
    step: Step, parameters: Mapping[str, Tensor], data: ClientData, random: np.random.Generator
) -> Update:
    """The update of a client alone, with whole item tables, from the global `parameters` (without
    cohort dimension, unchanged)."""
    block = step.block([data.features], [step.batches(data, random)], step.device)
    block = block.on_whole_tables(step.model.schema.num_items)
    trained = step.train_block(parameters, block)
    return Update(trained.changes_of(0), trained.block.examples[0], trained.losses()[0])


def private_parameters(
    node: Node,
    step: Step,
    parameters: dict[str, Tensor],
    clients: np.ndarray,
    before_round: int,
    without: Collection[str] = (),
) -> dict[str, Tensor]:
    """The clients' private parameters, which replace the shared values, `[C, ...]` each, `without`
    some. Those of a client that has none yet are the shared values, or its own with
    `private-std`."""
    names = [name for name in private_names(step, parameters) if name not in without]
    if node.private is None or not names:
        return {}
    values = {
        name: np.repeat(parameters[name].numpy(force=True)[None], len(clients), axis=0)
        for name in names
    }
    fresh = set(range(len(clients)))
    for positions, saved in node.private.load_all(clients.tolist(), before_round, names):
        for name, arrays in saved.items():
            values[name][positions] = arrays
            fresh.difference_update(positions)
    if isinstance(step.config, PrivateParameters) and step.config.private_std is not None:
        for position in sorted(fresh):
            random = stream(node.experiment.seed, "private", int(clients[position]))
            for value in values.values():
                value[position] = step.config.private_std * random.standard_normal(value.shape[1:])
    return to_device(values, node.device)


def _check_block(step: Step, trained: object, parameters: Mapping[str, Tensor], doing: str) -> None:
    """Check that a trained block has updates of known parameters, in their shapes.

    Raises:
        ComponentError: it is none, or has other parameters.
    """
    if not isinstance(trained, BlockUpdate):
        expected = "a fedrec.training.results.BlockUpdate"
        refuse_wrong("step", step, doing, expected=expected, got=type(trained).__name__)
        return
    if step.generated:
        return
    cohort, rows = trained.block.touched.shape
    values: dict[str, object] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, change in trained.changes.items():
        shape = tuple(parameters[name].shape) if name in parameters else None
        if not isinstance(change, BlockChange) or shape is None:
            values[name] = change  # which has none of the expected names or shapes
        elif isinstance(change, Dense):
            values[name] = change.values
            shapes[name] = (cohort, *shape)
        elif isinstance(change, ChangedRows) and change.values.dim() == 3:
            values[name] = change.values
            shapes[name] = (cohort, rows, *shape[1:])
    refuse_other_arrays("step", step, doing, values, shapes)
