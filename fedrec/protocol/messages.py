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

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedrec.errors import RefusalError
from fedrec.privacy.protection import Protection
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.orders import (
    EvaluateOrder,
    ItemQuery,
    Presence,
    TrainEach,
    TrainOrder,
    TrainSum,
    arrays_as_updates,
    updates_as_arrays,
)
from fedrec.protocol.secure import KEY_BYTES, MaskOrder, ShareOrder, UnmaskOrder, Words
from fedrec.protocol.serialization import from_record, to_record, zero_copy_arrays
from fedrec.protocol.updates import Change, SparseUpdate, network_bytes
from fedrec.runtime.files import MOST_TEXT, parse_json
from fedrec.runtime.ragged import add_prefix, strip_prefix

# Arrays and settings of a message's records.

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"


def writable_arrays(content: RecordDict) -> dict[str, np.ndarray]:
    """Writable arrays of a message."""
    return from_record(_first(content))


def read_arrays(content: RecordDict) -> dict[str, np.ndarray]:
    """Read-only arrays of a message, without a copy if memory is shared."""
    return zero_copy_arrays(_first(content))


def config_of(content: RecordDict) -> ConfigRecord:
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
_SHARES = "shares"  # factors of compressed updates, sent in place of their sum
_SUM = "sum/"  # prefix of the sums over clients in the answer to an evaluation
_SECURE = "secure-"  # prefix of the settings of a training order for secure aggregation
OVERRIDES = ("proximal-mu",)
"""Additional settings that some of Flower's strategies send."""

AnyOrder = TypeVar("AnyOrder")


class OrderSetting(NamedTuple):
    """Type and limit of an order's setting.

    Attributes:
        kind: its type; a `float` may be an `int`, and members of a `list` are.
        most: largest absolute value of a number, or largest length.
    """

    kind: type
    most: float = math.inf


_NUMBER = OrderSetting(int, 2**31)
_NAME = OrderSetting(str, 100)
_JSON = OrderSetting(str, MOST_TEXT)
_FLAG = OrderSetting(bool)
_ORDER = {"server-round": _NUMBER, "clients": OrderSetting(list, 2**24), "step": _JSON}


def _words(kind: type[Words], prefix: str = "") -> dict[str, OrderSetting]:
    """Settings of an order for the fields of a message of secure aggregation."""
    kinds = {"int": _NUMBER, "bytes": OrderSetting(bytes, 2**27)}
    return {prefix + field.name: kinds[str(field.type)] for field in fields(kind)}  # type: ignore


_SETTINGS: Mapping[str, Mapping[str, OrderSetting]] = {
    "train": {
        **_ORDER,
        **{"weighting": _NAME, "protection": _JSON, "each": _FLAG},
        **dict.fromkeys(OVERRIDES, OrderSetting(float)),
        **_words(MaskOrder, _SECURE),
    },
    "evaluate": {**_ORDER, "each": _FLAG, "held-out": _NAME, "sums": _FLAG},
    ITEMS: {**_ORDER, "purpose": _NAME},
    SECURE_SHARES: _words(ShareOrder),
    SECURE_UNMASK: _words(UnmaskOrder),
}
"""The allowed settings by type of message."""


def check_settings(kind: str, content: RecordDict) -> None:
    """Check an order of a real node before it is unpacked.

    Args:
        kind: the type of the message.
        content: its content.

    Raises:
        RefusalError: a setting is unknown for this type of message, of another type, or larger than
            allowed.
    """
    allowed = _SETTINGS.get(kind, {})
    settings = [item for record in content.config_records.values() for item in record.items()]
    strange = sorted(
        str(name)
        for name, value in settings
        if name not in allowed or not _fits(value, allowed[name])
    )
    if strange:
        raise RefusalError(
            f"the order has an invalid setting {strange[0][:100]!r}"
            + (" of another type or size" if strange[0] in allowed else ""),
            expected="settings of fedrec's orders",
            got=", ".join(f"{name[:100]!r}" for name in strange[:5]),
            fix="run the same version of fedrec on server and node, with no other settings",
        )


def _fits(value: object, setting: OrderSetting) -> bool:
    if type(value) is not setting.kind and (type(value), setting.kind) != (int, float):
        return False
    if isinstance(value, list):
        return len(value) <= setting.most and all(type(item) is int for item in value)
    size = len(value) if isinstance(value, str | bytes) else abs(value)  # type: ignore
    return size <= setting.most


def pack_train(arrays: ArrayRecord, order: TrainOrder) -> RecordDict:
    """Pack a training message; `arrays` is shared between the messages of a round, not copied."""
    config = _order_config(order)
    config["weighting"] = order.weighting
    if order.protection is not None:
        config["protection"] = order.protection.text()
    config["each"] = order.each
    if order.secure is not None:
        config.update({_SECURE + name: value for name, value in order.secure.fields().items()})
    return RecordDict({ARRAYS: arrays, CONFIG: config})


def unpack_train(content: RecordDict) -> tuple[dict[str, np.ndarray], TrainOrder]:
    """Unpack parameters and order of a training message of fedrec's or any Flower strategy."""
    return writable_arrays(content), unpack_train_order(content)


def _refuses_malformed(
    unpack: Callable[[RecordDict], AnyOrder],
) -> Callable[[RecordDict], AnyOrder]:
    """Decorator for functions that unpack an order: errors become refusals that quote the order
    only."""

    @functools.wraps(unpack)
    def unpacked(content: RecordDict) -> AnyOrder:
        try:
            return unpack(content)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            got = f"{type(error).__name__}: {error}"[:300]
            raise RefusalError(
                "the order cannot be decoded",
                got=got,
                fix="run the same version of fedrec on server and node",
            ) from None

    return unpacked


@_refuses_malformed
def unpack_train_order(content: RecordDict) -> TrainOrder:
    """Unpack the order of a training message without its parameters."""
    config = config_of(content)
    masking = strip_prefix(_SECURE, config)
    overrides = {key: float(config[key]) for key in OVERRIDES if key in config}  # type: ignore
    return TrainOrder(
        **_order_fields(config),
        weighting=str(config.get("weighting", "uniform")),  # type: ignore[arg-type]
        overrides=overrides,
        protection=Protection.read(str(config["protection"])) if "protection" in config else None,
        each=bool(config.get("each", False)),
        secure=MaskOrder.read(masking) if masking else None,
    )


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
    if reply.updates:
        compressed = updates_as_arrays(reply.updates)
        if network_bytes(compressed) < network_bytes(arrays):
            arrays = compressed
            metrics[_SHARES] = [float(update.share) for update in reply.updates]
    return RecordDict({ARRAYS: to_record(arrays), METRICS: metrics})


def unpack_sum(content: RecordDict) -> TrainSum:
    """Unpack a node's sum of updates, or its compressed updates."""
    metrics: Any = content[METRICS]
    arrays = read_arrays(content)
    numbers: Any = {name: kind(metrics[key]) for name, (key, kind) in _SUM_METRICS.items()}
    if _SHARES in metrics:
        return TrainSum(
            total={}, updates=arrays_as_updates(arrays, list(metrics[_SHARES])), **numbers
        )
    return TrainSum(total=_changes(arrays), **numbers)


def pack_each(reply: TrainEach) -> RecordDict:
    """Pack the reply to a training message that requests the update of each client."""
    arrays = {**reply.updates.arrays(), "examples": reply.examples, "losses": reply.losses}
    return RecordDict(
        {
            ARRAYS: to_record(arrays),
            METRICS: MetricRecord({"num-examples": int(reply.examples.sum())}),
        }
    )


def unpack_each(content: RecordDict) -> TrainEach:
    """Unpack the update of each of a node's clients."""
    arrays = read_arrays(content)
    return TrainEach(ClientArrays.read(arrays), arrays["examples"], arrays["losses"])


def pack_item_query(order: ItemQuery) -> RecordDict:
    """Pack a request for the items whose rows clients need."""
    config = _order_config(order)
    config["purpose"] = order.purpose
    return RecordDict({CONFIG: config})


@_refuses_malformed
def unpack_item_query(content: RecordDict) -> ItemQuery:
    """Unpack the request packed by `pack_item_query`."""
    config: Any = config_of(content)
    fields = _order_fields(config)
    if fields["clients"] is None or fields["step"] is None:
        raise ValueError("a query needs clients and a step")
    return ItemQuery(**fields, purpose=config["purpose"])


def pack_item_requests(requests: ItemRequests) -> RecordDict:
    """Pack the reply to an item request."""
    return RecordDict({ARRAYS: to_record(requests.arrays())})


def unpack_item_requests(content: RecordDict) -> ItemRequests:
    """Unpack the items that a node's clients need."""
    return ItemRequests.read(read_arrays(content))


def pack_standard(
    arrays: Mapping[str, np.ndarray] | None, metrics: Mapping[str, float | int]
) -> RecordDict:
    """Pack a reply in Flower's standard form: new parameters (training only) and metrics with
    `num-examples`."""
    records: dict[str, Any] = {METRICS: MetricRecord(dict(metrics))}
    if arrays is not None:
        records[ARRAYS] = to_record(arrays)
    return RecordDict(records)


def pack_evaluate(arrays: ArrayRecord, order: EvaluateOrder) -> RecordDict:
    """Pack an evaluation message."""
    config = _order_config(order)
    config["each"] = order.each
    if order.held_out is not None:
        config["held-out"] = order.held_out
    if order.sums:
        config["sums"] = True
    return RecordDict({ARRAYS: arrays, CONFIG: config})


@_refuses_malformed
def unpack_evaluate(content: RecordDict) -> tuple[dict[str, np.ndarray], EvaluateOrder]:
    """Unpack parameters and order of an evaluation message of fedrec's or any Flower strategy."""
    config = config_of(content)
    held_out: Any = config.get("held-out")
    if held_out not in (None, "test", "validation"):
        raise ValueError(f"invalid held-out rows {held_out!r}")
    order = EvaluateOrder(
        **_order_fields(config),
        each=bool(config.get("each", False)),
        held_out=held_out,
        sums=bool(config.get("sums", False)),
    )
    return writable_arrays(content), order


def pack_table(
    clients: np.ndarray,
    columns: Mapping[str, np.ndarray],
    sums: Mapping[str, np.ndarray] | None = None,
) -> RecordDict:
    """Pack the reply to an evaluation message that names clients `int64 [clients]`: one column
    `[clients]` per metric, and sums over the clients."""
    values = np.empty((len(clients), len(columns)))
    for index, column in enumerate(columns.values()):
        values[:, index] = column
    arrays = {"clients": clients.astype(np.int64), "values": values}
    arrays |= add_prefix({_SUM: sums or {}})
    config = ConfigRecord({"columns": list(columns)})
    return RecordDict(
        {
            ARRAYS: to_record(arrays),
            CONFIG: config,
            METRICS: MetricRecord({"num-examples": len(clients)}),
        }
    )


def unpack_table(content: RecordDict) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Unpack the clients `int64 [clients]` and columns `float64 [clients]` of a node's reply.

    Raises:
        ValueError: they do not match, or two columns have the same name.
    """
    arrays = writable_arrays(content)
    clients = arrays["clients"]
    values = arrays["values"]
    names = [str(name) for name in config_of(content)["columns"]]  # type: ignore[union-attr]
    if clients.ndim != 1 or values.shape != (len(clients), len(names)):
        raise ValueError(f"metrics {list(values.shape)} for {len(names)} names")
    if len(set(names)) < len(names):
        raise ValueError("duplicate column names")
    return clients, dict(zip(names, values.T, strict=True))


def unpack_sums(content: RecordDict) -> dict[str, np.ndarray]:
    """Unpack the sums over a node's clients in its reply to an evaluation message."""
    return strip_prefix(_SUM, writable_arrays(content))


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
        paths=parse_json(str(config_of(content).get("paths", "{}"))),
        validated=arrays.get("validated"),
    )


def pack_parameters(arrays: Mapping[str, np.ndarray]) -> RecordDict:
    """Pack the reply to a request for initial parameters."""
    return RecordDict({ARRAYS: to_record(arrays)})


def unpack_parameters(content: RecordDict) -> dict[str, np.ndarray]:
    """Unpack initial parameters from a node; not necessarily writable."""
    return read_arrays(content)


def _change_arrays(name: str, change: Change) -> dict[str, np.ndarray]:
    """Convert a change of one parameter to named arrays."""
    if not isinstance(change, SparseUpdate):
        return {name: change}
    table = np.array([*change.shape, change.drift], dtype=np.float64)
    return {name + _ROWS: change.rows, name + _VALUES: change.values, name + _TABLE: table}


def _changes(arrays: Mapping[str, np.ndarray]) -> dict[str, Change]:
    """Convert named arrays to changes of parameters."""
    changes: dict[str, Change] = {}
    for key, array in arrays.items():
        name, mark, _ = key.rpartition("#")
        if not mark:
            changes[key] = array
        elif key.endswith(_TABLE):
            *shape, drift = array.tolist()
            lengths = tuple(int(length) for length in shape)
            changes[name] = SparseUpdate(
                lengths, arrays[name + _ROWS], arrays[name + _VALUES], drift
            )
    return changes


def _order_config(order: TrainOrder | EvaluateOrder | ItemQuery) -> ConfigRecord:
    config = ConfigRecord({"server-round": int(order.round)})
    if order.clients is not None:
        config["clients"] = [int(client) for client in order.clients]
    if order.step is not None:
        config["step"] = json.dumps(order.step, sort_keys=True)
    return config


def _order_fields(config: ConfigRecord) -> dict[str, Any]:
    """Read the fields common to all orders."""
    step = parse_json(str(config["step"])) if "step" in config else None
    if not isinstance(step, dict | None):
        raise TypeError(f"a step must be a table, not {type(step).__name__}")
    clients = np.asarray(config["clients"], dtype=np.int64) if "clients" in config else None
    return {
        "round": int(config.get("server-round", 0)),  # type: ignore[arg-type]
        "clients": clients,
        "step": step,
    }


# Messages of secure aggregation.

_MASKED = "masked"
_MOST_PROOF = 8192  # bytes
AnyWords = TypeVar("AnyWords", bound=Words)


def pack_masked(masked: np.ndarray) -> RecordDict:
    """Pack the reply to a training message under secure aggregation: only the masked sum, `uint64
    [length]`."""
    return RecordDict({ARRAYS: to_record({_MASKED: masked})})


def unpack_masked(content: RecordDict, length: int) -> np.ndarray:
    """Unpack a node's masked sum, `uint64 [length]`, which is untrusted input.

    Raises:
        ValueError: it has another type or length.
    """
    masked = read_arrays(content)[_MASKED]
    if masked.dtype != np.uint64 or masked.shape != (length,):
        raise ValueError(f"expected uint64 [{length}], got {masked.dtype} {list(masked.shape)}")
    return masked


def pack_words(words: Words) -> RecordDict:
    """Pack an order or a reply of secure aggregation."""
    return RecordDict({CONFIG: ConfigRecord(words.fields())})  # type: ignore[arg-type]


def unpack_words(kind: type[AnyWords], content: RecordDict) -> AnyWords:
    """Unpack the result of `pack_words`, which is untrusted input.

    Raises:
        ValueError: it is malformed.
    """
    return kind.read(config_of(content))


def pack_channel(key: bytes, proof: bytes = b"") -> RecordDict:
    """Pack a node's public channel key, and a proof of its origin."""
    return RecordDict({CONFIG: ConfigRecord({"channel": key, "proof": proof})})


def unpack_channel(content: RecordDict) -> tuple[bytes, bytes]:
    """Unpack a node's public channel key and its proof, which is untrusted input.

    Raises:
        ValueError: it is malformed.
    """
    config = config_of(content)
    key = config.get("channel")
    proof = config.get("proof")
    if (
        not isinstance(key, bytes)
        or len(key) != KEY_BYTES
        or not isinstance(proof, bytes)
        or len(proof) > _MOST_PROOF
    ):
        raise ValueError(
            f"expected a key of {KEY_BYTES} bytes, and a proof of at most {_MOST_PROOF}"
        )
    return key, proof
