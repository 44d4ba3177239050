# SPDX-License-Identifier: Apache-2.0
"""The message format: all messages between server and nodes, as Flower records.

Every order carries `arrays` (the shared parameters) and `config`; every answer carries `arrays` and
`metrics`. An order that names no clients means "all clients you host" and is answered in Flower's
standard form (new parameters and `num-examples`), which is what Flower's own strategies expect. An
order that names clients is answered with a sum of updates, or with the update of each client if the
strategy requests these, so that a round has one reply per node and not one per client. A strategy
whose server generates the parameters of each client asks first which items' rows they need
(`ITEMS`), and sends all clients of a node their parameters in one message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedrec.errors import RefusalError
from fedrec.privacy.clipping import Protection
from fedrec.protocol.secure import MaskOrder, ShareOrder, UnmaskOrder, Words
from fedrec.protocol.serialization import from_record, to_record, zero_copy_arrays
from fedrec.protocol.updates import Change, ClientArrays, SparseUpdate
from fedrec.runtime.files import MOST_TEXT, parse_json
from fedrec.runtime.ragged import add_prefix, strip_prefix

# Orders of the server and replies of nodes.

Weighting = Literal["uniform", "examples"]
Reply = Literal["sum", "each"]
"""Reply of a node: the sum of its clients' updates, or the update of each."""
HeldOutPart = Literal["test", "validation"]
Purpose = Literal["train", "evaluate", "validate"]


@dataclass(frozen=True, eq=False)
class TrainOrder:
    """An order to train clients in a round.

    Attributes:
        round: number of the round, from 1; 0 when the server gives none.
        clients: `int64 [clients]`, which of its clients train; None: all training clients it hosts,
            answered in standard form.
        weighting: an update enters the sum with weight 1 (`uniform`) or with its number of
            examples.
        step: name and settings of the local step; None: the experiment's own.
        overrides: additional settings of some of Flower's strategies, such as FedProx's
            `proximal-mu`.
        protection: clip and noise of each client's update; all clients then have weight 1.
        each: whether to reply with the update of each client, not their sum.
        secure: how the sum is masked, under secure aggregation.
    """

    round: int = 0
    clients: np.ndarray | None = None
    weighting: Weighting = "uniform"
    step: dict[str, Any] | None = None
    overrides: Mapping[str, float] | None = None
    protection: Protection | None = None
    each: bool = False
    secure: MaskOrder | None = None


@dataclass(frozen=True, eq=False)
class TrainEach:
    """Updates of single clients.

    Attributes:
        updates: each client's update; of item tables the rows that may have changed.
        examples: `int64 [C]`, number of examples of each client.
        losses: `float64 [C]`, each one's mean loss; NaN without examples.
    """

    updates: ClientArrays
    examples: np.ndarray
    losses: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[TrainEach]) -> TrainEach:
        """Join several blocks or nodes; clients are ascending."""
        updates = ClientArrays.joined([part.updates for part in parts])
        clients = np.concatenate([updates.requests.clients[:0], *(part.clients for part in parts)])
        order = np.argsort(clients)
        examples = np.concatenate([np.empty(0, np.int64), *(part.examples for part in parts)])
        losses = np.concatenate([np.empty(0), *(part.losses for part in parts)])
        return cls(updates, examples[order], losses[order])

    @property
    def clients(self) -> np.ndarray:
        """Client ids, `int64 [C]`, ascending."""
        return self.updates.requests.clients

    def take(self, indices: np.ndarray) -> TrainEach:
        """Select the clients at the given positions, `int64 [n]`."""
        return TrainEach(self.updates.take(indices), self.examples[indices], self.losses[indices])


@dataclass(frozen=True, eq=False)
class ItemQuery:
    """A request for the items of clients, before parameters are generated for them.

    Attributes:
        round: number of the round.
        clients: `int64 [clients]`, ascending.
        purpose: the items that they train on in this round, those of the held-out rows that the
            experiment evaluates, or those of their validation rows.
        step: name and settings of the local step.
    """

    round: int
    clients: np.ndarray
    purpose: Purpose
    step: dict[str, Any]


@dataclass(frozen=True, eq=False)
class TrainSum:
    """A node's sum over the clients that it trained.

    Attributes:
        total: weighted sum of the clients' updates, per parameter; only the changed rows of a table
            with few of them.
        clients: number of clients in it.
        weight: sum of their weights.
        examples: sum of their numbers of examples.
        loss: sum of the losses of clients with training examples.
        losses: number of clients with training examples.
        sent: bytes that its clients would send, each as a separate device (`compact`); 0 if not
            reported.
    """

    total: dict[str, Change]
    clients: int
    weight: float
    examples: int
    loss: float
    losses: int
    sent: int = 0


@dataclass(frozen=True, eq=False)
class EvaluateOrder:
    """An order to evaluate clients.

    Attributes:
        round: number of the round after which this is.
        clients: `int64 [clients]`, which of its clients; None: all it hosts that have held-out
            rows, answered in standard form.
        step: the local step of on-device fine-tuning; None: the experiment's own.
        each: whether parameters are generated for each client.
        held_out: which held-out rows are ranked; None: those that the experiment evaluates.
        sums: whether to compute the sums over clients that list metrics need.
    """

    round: int = 0
    clients: np.ndarray | None = None
    step: dict[str, Any] | None = None
    each: bool = False
    held_out: HeldOutPart | None = None
    sums: bool = False


@dataclass(frozen=True, eq=False)
class Presence:
    """A node's description of itself.

    Attributes:
        partition: the node's position among the nodes.
        training: `int64 [clients]`, clients it hosts that may be sampled for training.
        evaluated: `int64 [clients]`, clients it hosts that have held-out rows.
        work: `int64 [clients]`, number of training rows of each of `training`, reported only by
            nodes of a simulation that hold all clients' data and may train each other's clients.
            None: only the host can train a client.
        paths: training path for each of the experiment's steps, by the step's name, if reported;
        validated: `int64 [clients]`, clients it hosts that have validation rows; reported only with
            early stopping.
    """

    partition: int
    training: np.ndarray
    evaluated: np.ndarray
    work: np.ndarray | None = None
    paths: Mapping[str, str] = field(default_factory=dict)
    validated: np.ndarray | None = None


# Arrays and settings of a message's records.

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> RecordDict:
    """Pack a reply of arrays alone: initial parameters, or the items that clients need."""
    return RecordDict({ARRAYS: to_record(arrays)})


def writable_arrays(content: RecordDict) -> dict[str, np.ndarray]:
    """Writable arrays of a message."""
    return from_record(_first(content))


def read_arrays(content: RecordDict) -> dict[str, np.ndarray]:
    """Read-only arrays of a message, without a copy if memory is shared."""
    return zero_copy_arrays(_first(content))


def _config_of(content: RecordDict) -> ConfigRecord:
    records = list(content.config_records.values())
    return records[0] if records else ConfigRecord()


def _first(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


HELLO = "query.hello"
INITIAL = "query.initial"
ITEMS = "query.items"
SECURE_CHANNEL = "query.secure_channel"
SECURE_SHARES = "query.secure_shares"
SECURE_UNMASK = "query.secure_unmask"
_ROWS = "#rows"
_VALUES = "#values"
_TABLE = "#table"  # a table of which only some rows changed, in three arrays
_METRIC = "metric/"  # prefixes of metrics of clients in the answer to an evaluation
_SUM = "sum/"  # and of sums over the clients
_MOST_PROOF = 8192  # bytes
_SECURE = "secure-"  # prefix of the settings of a training order for secure aggregation
OVERRIDES = ("proximal-mu",)
"""Additional settings that some of Flower's strategies send."""

AnyOrder = TypeVar("AnyOrder")


class _OrderSetting(NamedTuple):
    """How a field of an order is written into a message.

    Attributes:
        key: its name there.
        kind: its type there; a `float` may be an `int`, and members of a `list` are.
        most: largest absolute value of a number, or largest length.
        write: converts the field to that type.
        read: converts it back.
    """

    key: str
    kind: type
    most: float = math.inf
    write: Callable[[Any], Any] = lambda value: value
    read: Callable[[Any], Any] = lambda value: value

    def fits(self, value: object) -> bool:
        """Return True if a value of a message, which is untrusted input, has its type and size."""
        if type(value) is not self.kind and (type(value), self.kind) != (int, float):
            return False
        if isinstance(value, list):
            return len(value) <= self.most and all(type(item) is int for item in value)
        size = len(value) if isinstance(value, str | bytes) else abs(value)  # type: ignore
        return size <= self.most


def _read_step(text: str) -> dict[str, Any]:
    step = parse_json(text)
    if not isinstance(step, dict):
        raise TypeError(f"a step must be a table, not {type(step).__name__}")
    return step


def _read_held_out(name: str) -> str:
    if name not in get_args(HeldOutPart):
        raise ValueError(f"invalid held-out rows {name!r}")
    return name


def _plain(kind: type) -> dict[str, _OrderSetting]:
    """Settings for the fields of a message of secure aggregation."""
    kinds = {"int": (int, 2**31), "bytes": (bytes, 2**27)}
    settings = {f.name: _OrderSetting(f.name, *kinds[str(f.type)]) for f in fields(kind)}
    if "proof" in settings:  # the server sends it to all other nodes
        settings["proof"] = _OrderSetting("proof", bytes, _MOST_PROOF)
    return settings


_ORDER = {
    "round": _OrderSetting("server-round", int, 2**31, int),
    "clients": _OrderSetting(
        "clients", list, 2**24, np.ndarray.tolist, partial(np.asarray, dtype=np.int64)
    ),
    "step": _OrderSetting("step", str, MOST_TEXT, partial(json.dumps, sort_keys=True), _read_step),
}
_EACH = {"each": _OrderSetting("each", bool)}
_SETTINGS: Mapping[type, Mapping[str, _OrderSetting]] = {
    TrainOrder: {
        **_ORDER,
        **_EACH,
        "weighting": _OrderSetting("weighting", str, 100),
        "protection": _OrderSetting("protection", str, MOST_TEXT, Protection.text, Protection.read),
    },
    EvaluateOrder: {
        **_ORDER,
        **_EACH,
        "held_out": _OrderSetting("held-out", str, 100, read=_read_held_out),
        "sums": _OrderSetting("sums", bool),
    },
    ItemQuery: {**_ORDER, "purpose": _OrderSetting("purpose", str, 100)},
    **{kind: _plain(kind) for kind in Words.__subclasses__()},
}
"""Settings by type of order, and by its field; a field that is None has no setting."""
_ALLOWED: Mapping[str, Iterable[_OrderSetting]] = {
    "train": [
        *_SETTINGS[TrainOrder].values(),
        *(setting._replace(key=_SECURE + name) for name, setting in _SETTINGS[MaskOrder].items()),
        *(_OrderSetting(key, float) for key in OVERRIDES),
    ],
    "evaluate": _SETTINGS[EvaluateOrder].values(),
    ITEMS: _SETTINGS[ItemQuery].values(),
    SECURE_SHARES: _SETTINGS[ShareOrder].values(),
    SECURE_UNMASK: _SETTINGS[UnmaskOrder].values(),
}
"""Allowed settings by type of message."""


def _written(order: object) -> dict[str, Any]:
    """Settings of an order, by key."""
    return {
        setting.key: setting.write(value)
        for name, setting in _SETTINGS[type(order)].items()
        if (value := getattr(order, name)) is not None
    }


def _read(kind: type[AnyOrder], config: Mapping[str, Any], **others: Any) -> AnyOrder:
    """Read the settings of an order, and its other fields.

    Raises:
        ValueError: a setting has another type or is too large, or one without a default is missing.
    """
    values = {
        name: (setting, config[setting.key])
        for name, setting in _SETTINGS[kind].items()
        if setting.key in config
    }
    wrong = [setting.key for setting, value in values.values() if not setting.fits(value)]
    if wrong:
        raise ValueError(f"setting {wrong[0]!r} has another type or size")
    read = {name: setting.read(value) for name, (setting, value) in values.items()}
    try:
        return kind(**read, **others)
    except TypeError as error:
        raise ValueError(f"a setting is missing: {error}") from None


def check_settings(kind: str, content: RecordDict) -> None:
    """Check an order of a real node before it is unpacked.

    Args:
        kind: the type of the message.
        content: its content.

    Raises:
        RefusalError: a setting is unknown for this type of message, of another type, or larger than
            allowed.
    """
    allowed = {setting.key: setting for setting in _ALLOWED.get(kind, ())}
    settings = [item for record in content.config_records.values() for item in record.items()]
    strange = sorted(
        str(name)
        for name, value in settings
        if name not in allowed or not allowed[name].fits(value)
    )
    if strange:
        raise RefusalError(
            f"the order has an invalid setting {strange[0][:100]!r}"
            + (" of another type or size" if strange[0] in allowed else ""),
            expected="settings of fedrec's orders",
            got=", ".join(f"{name[:100]!r}" for name in strange[:5]),
            fix="run the same version of fedrec on server and node, with no other settings",
        )


def pack_order(order: object, arrays: ArrayRecord | None = None) -> RecordDict:
    """Pack an order, or a reply of secure aggregation.

    Args:
        order: the order.
        arrays: parameters beside it; shared between the messages of a round, not copied.
    """
    masking = getattr(order, "secure", None)
    written = add_prefix({_SECURE: {} if masking is None else _written(masking)})
    config = ConfigRecord({**_written(order), **written})
    return RecordDict({CONFIG: config} if arrays is None else {ARRAYS: arrays, CONFIG: config})


def unpack_order(kind: type[AnyOrder], content: RecordDict) -> AnyOrder:
    """Unpack an order of fedrec's or any Flower strategy, without the parameters beside it.

    Args:
        kind: its type.
        content: the content of the message.

    Raises:
        RefusalError: it is malformed; the error quotes the order only.
    """
    config = _config_of(content)
    others: dict[str, Any] = {}
    try:
        if kind is TrainOrder:
            masking = strip_prefix(_SECURE, config)
            others["secure"] = _read(MaskOrder, masking) if masking else None
            others["overrides"] = {key: float(config[key]) for key in OVERRIDES if key in config}  # type: ignore
        return _read(kind, config, **others)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise RefusalError(
            "the order cannot be decoded",
            got=f"{type(error).__name__}: {error}"[:300],
            fix="run the same version of fedrec on server and node",
        ) from None


_SUM_METRICS: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "clients": ("num-clients", int),
    "examples": ("num-examples", int),
    "weight": ("weight", float),
    "loss": ("loss-sum", float),
    "losses": ("loss-count", int),
    "sent": ("bytes", int),
}
"""Name in a message and type of each number of a `TrainSum`."""


def pack_sum(reply: TrainSum) -> RecordDict:
    """Pack the reply to a training message that names clients."""
    metrics = MetricRecord(
        {key: kind(getattr(reply, name)) for name, (key, kind) in _SUM_METRICS.items()}
    )
    arrays = {
        key: array
        for name, change in reply.total.items()
        for key, array in _change_arrays(name, change).items()
    }
    return RecordDict({ARRAYS: to_record(arrays), METRICS: metrics})


def unpack_sum(content: RecordDict) -> TrainSum:
    """Unpack a node's sum of updates."""
    metrics: Any = content[METRICS]
    numbers: Any = {name: kind(metrics[key]) for name, (key, kind) in _SUM_METRICS.items()}
    return TrainSum(total=_changes(read_arrays(content)), **numbers)


def pack_each(reply: TrainEach) -> RecordDict:
    """Pack the reply to a training message that requests the update of each client."""
    return pack_arrays(
        {**reply.updates.arrays(), "examples": reply.examples, "losses": reply.losses}
    )


def unpack_each(content: RecordDict) -> TrainEach:
    """Unpack the update of each of a node's clients."""
    arrays = read_arrays(content)
    return TrainEach(ClientArrays.read(arrays), arrays["examples"], arrays["losses"])


def pack_standard(
    arrays: Mapping[str, np.ndarray] | None, metrics: Mapping[str, float | int]
) -> RecordDict:
    """Pack a reply in Flower's standard form: new parameters (training only) and metrics with
    `num-examples`."""
    records: dict[str, Any] = {METRICS: MetricRecord(dict(metrics))}
    if arrays is not None:
        records[ARRAYS] = to_record(arrays)
    return RecordDict(records)


def pack_table(
    clients: np.ndarray,
    columns: Mapping[str, np.ndarray],
    sums: Mapping[str, np.ndarray] | None = None,
) -> RecordDict:
    """Pack the reply to an evaluation message that names clients `int64 [clients]`: one column
    `[clients]` per metric, and sums over the clients."""
    values = {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}
    named = add_prefix({_METRIC: values, _SUM: sums or {}})
    return pack_arrays({"clients": clients.astype(np.int64), **named})


def unpack_table(
    content: RecordDict,
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Unpack the clients `int64 [clients]` and columns `float64 [clients]` of a node's reply, and
    its sums over the clients.

    Raises:
        ValueError: a column has not a number for each client.
    """
    arrays = writable_arrays(content)
    clients = arrays["clients"]
    columns = strip_prefix(_METRIC, arrays)
    wrong = [name for name, column in columns.items() if column.shape != clients.shape]
    if clients.ndim != 1 or wrong:
        raise ValueError(f"{len(clients)} clients, and other numbers of metrics {wrong[:3]}")
    return clients, columns, strip_prefix(_SUM, arrays)


_PRESENCE_ARRAYS = ("training", "evaluated", "work", "validated")


def pack_presence(presence: Presence) -> RecordDict:
    """Pack the reply to a request for a node's clients."""
    every = {name: getattr(presence, name) for name in _PRESENCE_ARRAYS}
    arrays = {name: array for name, array in every.items() if array is not None}
    metrics = MetricRecord({"partition-id": presence.partition})
    config = ConfigRecord({"paths": json.dumps(dict(presence.paths))})
    return RecordDict({ARRAYS: to_record(arrays), METRICS: metrics, CONFIG: config})


def unpack_presence(content: RecordDict) -> Presence:
    """Unpack a node's description of itself."""
    arrays = writable_arrays(content)
    metrics = content[METRICS]
    return Presence(
        int(metrics["partition-id"]),  # type: ignore[index]
        arrays["training"],
        arrays["evaluated"],
        work=arrays.get("work"),
        paths=parse_json(str(_config_of(content).get("paths", "{}"))),
        validated=arrays.get("validated"),
    )


def _change_arrays(name: str, change: Change) -> dict[str, np.ndarray]:
    """Convert a change of one parameter to named arrays."""
    if not isinstance(change, SparseUpdate):
        return {name: change}
    table = np.array(change.shape, dtype=np.int64)
    return {name + _ROWS: change.rows, name + _VALUES: change.values, name + _TABLE: table}


def _changes(arrays: Mapping[str, np.ndarray]) -> dict[str, Change]:
    """Convert named arrays to changes of parameters."""
    changes: dict[str, Change] = {}
    for key, array in arrays.items():
        name, mark, _ = key.rpartition("#")
        if not mark:
            changes[key] = array
        elif key.endswith(_TABLE):
            shape = tuple(int(length) for length in array.tolist())
            changes[name] = SparseUpdate(shape, arrays[name + _ROWS], arrays[name + _VALUES])
    return changes


# Messages of secure aggregation.

_MASKED = "masked"
AnyWords = TypeVar("AnyWords", bound=Words)


def pack_masked(masked: np.ndarray) -> RecordDict:
    """Pack the reply to a training message under secure aggregation: only the masked sum, `uint64
    [length]`."""
    return pack_arrays({_MASKED: masked})


def unpack_masked(content: RecordDict, length: int) -> np.ndarray:
    """Unpack a node's masked sum, `uint64 [length]`, which is untrusted input.

    Raises:
        ValueError: it has another type or length.
    """
    masked = read_arrays(content)[_MASKED]
    if masked.dtype != np.uint64 or masked.shape != (length,):
        raise ValueError(f"expected uint64 [{length}], got {masked.dtype} {list(masked.shape)}")
    return masked


def unpack_words(kind: type[AnyWords], content: RecordDict, **lengths: int) -> AnyWords:
    """Unpack the result of `pack_order`, from a node, which is untrusted input.

    Args:
        kind: its type.
        content: the content of the message.
        lengths: bytes that fields must have.

    Raises:
        ValueError: it is malformed, or a field has another length.
    """
    words = _read(kind, _config_of(content))
    wrong = [name for name, length in lengths.items() if len(getattr(words, name)) != length]
    if wrong:
        raise ValueError(f"wrong length of {', '.join(wrong)}")
    return words
