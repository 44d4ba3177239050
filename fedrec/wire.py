# SPDX-License-Identifier: Apache-2.0
"""The only words that server and client say to each other, as Flower records.

Every order carries `arrays` (the shared parameters) and `config`; every answer carries `arrays` and `metrics`. An order
that names no clients means "all clients you host" and is answered in Flower's standard form (new parameters and
`num-examples`), which is what Flower's own strategies expect. An order that names clients is answered with a sum of
updates, so that a round costs one answer per node and not one per client. A strategy whose server generates the
parameters of each client asks first which items' rows they need (`WANTED`), sends all clients of a node their
parameters in one message, and gets the gradients of each in one answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedrec.generated import Generated, Wanted
from fedrec.live_arrays import from_record, live_arrays, to_record
from fedrec.privacy.protection import Protection
from fedrec.row_sum import Change, RowSum
from fedrec.secure.words import KEY_BYTES, MaskOrder, ShareOrder, UnmaskOrder, Words

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
HELLO, INITIAL, WANTED = "query.hello", "query.initial", "query.wanted"
SECURE_CHANNEL, SECURE_SHARES, SECURE_UNMASK = "query.secure_channel", "query.secure_shares", "query.secure_unmask"
_ROWS, _VALUES, _TABLE = "#rows", "#values", "#table"  # a table of which only some rows changed, in three arrays
_SECURE = "secure-"  # marks what of a training order's settings is for secure aggregation
OVERRIDES = ("proximal-mu",)
"""Settings that some of Flower's strategies send beside."""
GROUP = "group:"  # a column of an evaluation table with this prefix says who belongs to the group, 0 or 1

_MOST_PROOF = 8192  # bytes

Weighting = Literal["uniform", "examples"]
Purpose = Literal["train", "evaluate"]
AnyWords = TypeVar("AnyWords", bound=Words)


_ORDER = frozenset({"server-round", "clients", "step"})
_KEYS: Mapping[str, frozenset[str]] = {
    "train": _ORDER
    | {"weighting", "protection", "each", *OVERRIDES}
    | {_SECURE + field.name for field in fields(MaskOrder)},
    "evaluate": _ORDER | {"each"},
    WANTED: _ORDER | {"purpose"},
    SECURE_SHARES: frozenset(field.name for field in fields(ShareOrder)),
    SECURE_UNMASK: frozenset(field.name for field in fields(UnmaskOrder)),
}
"""By the type of a message, the settings that it may carry."""


@dataclass(frozen=True, eq=False)
class TrainOrder:
    """What a node is asked to do in a training round.

    Attributes:
        round: number of the round, from 1; 0 when the server gives none.
        clients: `int64`, which of its clients train; None: all training clients it hosts, answered in standard form.
        weighting: an update enters the sum with weight 1 (`uniform`) or with its number of examples.
        step: name and settings of the local step; None: the experiment's own.
        overrides: settings that some of Flower's strategies send beside, such as FedProx's `proximal-mu`.
        protection: what is done to each client's update before it is added; then every client counts the same.
        each: the parameters are generated ones, of each client its own, and gradients of each are wanted, not their
            sum.
        secure: how the sum is masked, under secure aggregation.
    """

    round: int
    clients: np.ndarray | None
    weighting: Weighting = "uniform"
    step: dict[str, Any] | None = None
    overrides: Mapping[str, float] | None = None
    protection: Protection | None = None
    each: bool = False
    secure: MaskOrder | None = None


@dataclass(frozen=True, eq=False)
class TrainEach:
    """What a node gives back for clients whose own answers are wanted.

    Attributes:
        gradients: of each client's mean loss with respect to its generated parameters.
        examples: `int64 [C]`, number of examples of each client.
        losses: `float64 [C]`, each one's mean loss; NaN without examples.
    """

    gradients: Generated
    examples: np.ndarray
    losses: np.ndarray


@dataclass(frozen=True, eq=False)
class WantedOrder:
    """What a node is asked to say before parameters are generated for its clients.

    Attributes:
        round: number of the round.
        clients: `int64`, ascending.
        purpose: the items that they train on in this round, or those of their held-out rows.
        step: name and settings of the local step.
    """

    round: int
    clients: np.ndarray
    purpose: Purpose
    step: dict[str, Any]


@dataclass(frozen=True, eq=False)
class TrainSum:
    """What a node gives back for the clients it was asked to train.

    Attributes:
        total: weighted sum of the clients' updates, per parameter; of a table with few changed rows these alone.
        clients: number of clients in it.
        weight: sum of their weights.
        examples: sum of their numbers of examples.
        loss: sum of their losses, over those that had something to learn from.
        losses: how many those are.
        unclipped: number of clients whose update was within the clip norm, if the order asked for it.
    """

    total: dict[str, Change]
    clients: int
    weight: float
    examples: int
    loss: float
    losses: int
    unclipped: int = 0


@dataclass(frozen=True, eq=False)
class EvaluateOrder:
    """What a node is asked to evaluate.

    Attributes:
        round: number of the round after which this is.
        clients: `int64`, which of its clients; None: all it hosts that have held-out rows, answered in standard form.
        step: the local step of on-device fine-tuning; None: the experiment's own.
        each: the parameters are generated ones, of each client its own.
    """

    round: int
    clients: np.ndarray | None
    step: dict[str, Any] | None = None
    each: bool = False


@dataclass(frozen=True, eq=False)
class Presence:
    """What a node says of itself.

    Attributes:
        partition: the node's place among the nodes.
        training: `int64`, clients it hosts that may be sampled for training.
        evaluated: `int64`, clients it hosts that have held-out rows.
        work: `int64`, number of training rows of each of `training`, said only by nodes of a simulation that hold all
            clients' data: they may train each other's clients. None: only the host can train a client.
        memory_mib: memory that its process has held at most, if it says so.
        paths: how it trains the clients of each of the experiment's steps, by the step's name, if it says so.
    """

    partition: int
    training: np.ndarray
    evaluated: np.ndarray
    work: np.ndarray | None = None
    memory_mib: float = 0.0
    paths: Mapping[str, str] = field(default_factory=dict)


def strange_keys(kind: str, content: RecordDict) -> list[str]:
    """Keys that no order of a kind has, of all its settings.

    Args:
        kind: the type of the message.
        content: its content.
    """
    known = _KEYS.get(kind, frozenset())
    return sorted({str(key) for record in content.config_records.values() for key in record} - known)


def pack_train(arrays: ArrayRecord, order: TrainOrder) -> RecordDict:
    """The content of a training message; `arrays` is shared between the messages of a round, not copied."""
    config = _order_config(order.round, order.clients, order.step)
    config["weighting"] = order.weighting
    if order.protection is not None:
        config["protection"] = order.protection.text()
    config["each"] = order.each
    if order.secure is not None:
        config.update({_SECURE + name: value for name, value in order.secure.fields().items()})
    return RecordDict({ARRAYS: arrays, CONFIG: config})


def unpack_train(content: RecordDict) -> tuple[dict[str, np.ndarray], TrainOrder]:
    """Parameters and order of a training message, of ours or of any Flower strategy."""
    return own_arrays(content), unpack_train_order(content)


def own_arrays(content: RecordDict) -> dict[str, np.ndarray]:
    """The arrays of a message, which may be written."""
    return from_record(_first(content))


def read_arrays(content: RecordDict) -> dict[str, np.ndarray]:
    """The same for those who only read them; no copy, and soon found, if memory is shared."""
    return live_arrays(_first(content))


def array_names(content: RecordDict) -> list[str]:
    """Names of the parameters that came with an order, in their order."""
    return list(_first(content))


def unpack_train_order(content: RecordDict) -> TrainOrder:
    """The order of a training message alone; its parameters are not looked at."""
    config = _config_of(content)
    masking = {key.removeprefix(_SECURE): value for key, value in config.items() if key.startswith(_SECURE)}
    overrides = {key: float(config[key]) for key in OVERRIDES if key in config}  # type: ignore[arg-type]
    return TrainOrder(
        round=int(config.get("server-round", 0)),  # type: ignore[arg-type]
        clients=_clients_of(config),
        weighting=str(config.get("weighting", "uniform")),  # type: ignore[arg-type]
        step=_step_of(config),
        overrides=overrides,
        protection=Protection.read(str(config["protection"])) if "protection" in config else None,
        each=bool(config.get("each", False)),
        secure=MaskOrder.read(masking) if masking else None,
    )


def pack_sum(reply: TrainSum) -> RecordDict:
    """The answer to a training message that named clients."""
    metrics = MetricRecord(
        {
            "num-clients": int(reply.clients),
            "num-examples": int(reply.examples),
            "weight": float(reply.weight),
            "loss-sum": float(reply.loss),
            "loss-count": int(reply.losses),
            "unclipped": int(reply.unclipped),
        }
    )
    arrays = {key: array for name, change in reply.total.items() for key, array in _spelled(name, change)}
    return RecordDict({ARRAYS: to_record(arrays), METRICS: metrics})


def unpack_sum(content: RecordDict) -> TrainSum:
    """A node's sum of updates."""
    metrics: Any = content[METRICS]
    return TrainSum(
        total=_changes(read_arrays(content)),
        clients=int(metrics["num-clients"]),
        weight=float(metrics["weight"]),
        examples=int(metrics["num-examples"]),
        loss=float(metrics["loss-sum"]),
        losses=int(metrics["loss-count"]),
        unclipped=int(metrics["unclipped"]),
    )


def pack_masked(numbers: np.ndarray) -> RecordDict:
    """The answer to a training message under secure aggregation: `uint64 [n]`, masked, and nothing beside it."""
    return RecordDict({ARRAYS: to_record({"masked": numbers})})


def unpack_masked(content: RecordDict, length: int) -> np.ndarray:
    """A node's masked sum, which may come from an enemy.

    Raises:
        ValueError: it is not `uint64` of that length.
    """
    numbers = read_arrays(content)["masked"]
    if numbers.dtype != np.uint64 or numbers.shape != (length,):
        raise ValueError(f"expected uint64 [{length}], got {numbers.dtype} {list(numbers.shape)}")
    return numbers


def pack_words(words: Words) -> RecordDict:
    """An order or an answer of secure aggregation."""
    return RecordDict({CONFIG: ConfigRecord(words.fields())})  # type: ignore[arg-type]


def unpack_words(kind: type[AnyWords], content: RecordDict) -> AnyWords:
    """What `pack_words` was given, which may come from an enemy.

    Raises:
        ValueError: it is no such thing.
    """
    return kind.read(_config_of(content))


def pack_channel(key: bytes, proof: bytes = b"") -> RecordDict:
    """A node's public channel key, and a proof that it is that node's."""
    return RecordDict({CONFIG: ConfigRecord({"channel": key, "proof": proof})})


def unpack_channel(content: RecordDict) -> tuple[bytes, bytes]:
    """A node's public channel key and its proof, which may come from an enemy.

    Raises:
        ValueError: it is none.
    """
    config = _config_of(content)
    key, proof = config.get("channel"), config.get("proof")
    if not isinstance(key, bytes) or len(key) != KEY_BYTES or not isinstance(proof, bytes) or len(proof) > _MOST_PROOF:
        raise ValueError(f"expected a key of {KEY_BYTES} bytes, and a proof of at most {_MOST_PROOF}")
    return key, proof


def pack_each(reply: TrainEach) -> RecordDict:
    """The answer to a training message that wanted each client's own."""
    arrays = {**reply.gradients.arrays(), "examples": reply.examples, "losses": reply.losses}
    return RecordDict({ARRAYS: to_record(arrays), METRICS: MetricRecord({"num-examples": int(reply.examples.sum())})})


def unpack_each(content: RecordDict) -> TrainEach:
    """Each client's gradients of a node."""
    arrays = read_arrays(content)
    return TrainEach(Generated.read(arrays), arrays["examples"], arrays["losses"])


def pack_wanted_order(order: WantedOrder) -> RecordDict:
    """The question which items' rows clients need."""
    config = _order_config(order.round, order.clients, order.step)
    config["purpose"] = order.purpose
    return RecordDict({CONFIG: config})


def unpack_wanted_order(content: RecordDict) -> WantedOrder:
    """The question of `pack_wanted_order`."""
    config: Any = _config_of(content)
    clients = np.asarray(config["clients"], dtype=np.int64)
    return WantedOrder(int(config["server-round"]), clients, config["purpose"], json.loads(config["step"]))


def pack_wanted(wanted: Wanted) -> RecordDict:
    """The answer to it."""
    return RecordDict({ARRAYS: to_record(wanted.arrays())})


def unpack_wanted(content: RecordDict) -> Wanted:
    """The items that a node's clients need."""
    return Wanted.read(read_arrays(content))


def pack_standard(arrays: Mapping[str, np.ndarray] | None, metrics: Mapping[str, float | int]) -> RecordDict:
    """An answer in Flower's standard form: new parameters (training only) and metrics with `num-examples`."""
    records: dict[str, Any] = {METRICS: MetricRecord(dict(metrics))}
    if arrays is not None:
        records[ARRAYS] = to_record(arrays)
    return RecordDict(records)


def pack_evaluate(arrays: ArrayRecord, order: EvaluateOrder) -> RecordDict:
    """The content of an evaluation message."""
    config = _order_config(order.round, order.clients, order.step)
    config["each"] = order.each
    return RecordDict({ARRAYS: arrays, CONFIG: config})


def unpack_evaluate(content: RecordDict) -> tuple[dict[str, np.ndarray], EvaluateOrder]:
    """Parameters and order of an evaluation message, of ours or of any Flower strategy."""
    config = _config_of(content)
    each, number = bool(config.get("each", False)), int(config.get("server-round", 0))  # type: ignore[arg-type]
    return own_arrays(content), EvaluateOrder(number, _clients_of(config), _step_of(config), each)


def pack_table(table: pd.DataFrame) -> RecordDict:
    """The answer to an evaluation message that named clients: one row per client, one column per metric."""
    arrays = {"clients": table.index.to_numpy(np.int64), "values": table.to_numpy(np.float64)}
    config = ConfigRecord({"columns": [str(column) for column in table.columns]})
    return RecordDict({ARRAYS: to_record(arrays), CONFIG: config, METRICS: MetricRecord({"num-examples": len(table)})})


def unpack_table(content: RecordDict) -> pd.DataFrame:
    """A node's table of metrics, indexed by client."""
    arrays = own_arrays(content)
    columns = list(_config_of(content)["columns"])  # type: ignore[arg-type]
    return pd.DataFrame(arrays["values"], index=pd.Index(arrays["clients"], name="client"), columns=columns)


def pack_presence(presence: Presence) -> RecordDict:
    """The answer to a hello."""
    arrays = {"training": presence.training, "evaluated": presence.evaluated}
    if presence.work is not None:
        arrays["work"] = presence.work
    metrics = MetricRecord({"partition-id": presence.partition, "memory-mib": presence.memory_mib})
    config = ConfigRecord({"paths": json.dumps(dict(presence.paths))})
    return RecordDict({ARRAYS: to_record(arrays), METRICS: metrics, CONFIG: config})


def unpack_presence(content: RecordDict) -> Presence:
    """What a node says of itself."""
    arrays, metrics = own_arrays(content), content[METRICS]
    partition = int(metrics["partition-id"])  # type: ignore[index]
    memory = float(metrics["memory-mib"])  # type: ignore[index]
    paths = json.loads(str(_config_of(content).get("paths", "{}")))
    return Presence(partition, arrays["training"], arrays["evaluated"], arrays.get("work"), memory, paths)


def pack_parameters(arrays: Mapping[str, np.ndarray]) -> RecordDict:
    """The answer to a request for initial parameters."""
    return RecordDict({ARRAYS: to_record(arrays)})


def unpack_parameters(content: RecordDict) -> dict[str, np.ndarray]:
    """Initial parameters from a node; not necessarily writable."""
    return read_arrays(content)


def _spelled(name: str, change: Change) -> list[tuple[str, np.ndarray]]:
    if not isinstance(change, RowSum):
        return [(name, change)]
    table = np.array([*change.shape, change.drift], dtype=np.float64)
    return [(name + _ROWS, change.rows), (name + _VALUES, change.values), (name + _TABLE, table)]


def _changes(arrays: dict[str, np.ndarray]) -> dict[str, Change]:
    """Totals from the arrays that spell them."""
    found: dict[str, Change] = {}
    for key, array in arrays.items():
        name, mark, _ = key.rpartition("#")
        if not mark:
            found[key] = array
        elif key.endswith(_TABLE):
            *shape, drift = array.tolist()
            rows, values = arrays[name + _ROWS], arrays[name + _VALUES]
            found[name] = RowSum(tuple(int(length) for length in shape), rows, values, drift)
    return found


def _order_config(round_number: int, clients: np.ndarray | None, step: dict[str, Any] | None) -> ConfigRecord:
    config = ConfigRecord({"server-round": int(round_number)})
    if clients is not None:
        config["clients"] = [int(client) for client in clients]
    if step is not None:
        config["step"] = json.dumps(step, sort_keys=True)
    return config


def _config_of(content: RecordDict) -> ConfigRecord:
    records = list(content.config_records.values())
    return records[0] if records else ConfigRecord()


def _first(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


def _clients_of(config: ConfigRecord) -> np.ndarray | None:
    return np.asarray(config["clients"], dtype=np.int64) if "clients" in config else None


def _step_of(config: ConfigRecord) -> dict[str, Any] | None:
    return json.loads(str(config["step"])) if "step" in config else None
