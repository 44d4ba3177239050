# SPDX-License-Identifier: Apache-2.0
"""Validation of the updates of single clients in a real node's reply, by node and client.

A reply with other clients or parameters than were asked for is left out as a whole; of a sound
reply, a client whose update is not finite, or whose counts are impossible, is left out alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.orders import TrainEach

LARGEST_LOSS = 1e6  # per client; the mean loss is only reported


def sound_clients(
    found: TrainEach, asked: Sequence[int], theta: Mapping[str, np.ndarray]
) -> tuple[TrainEach, list[int]]:
    """The clients of a reply that count, and those that are left out.

    Args:
        found: the reply.
        asked: the clients that this node was asked for.
        theta: the parameters that were sent.

    Raises:
        ValueError: the reply has other clients or parameters.
    """
    _refuse_other_clients(found, asked)
    _refuse_other_parameters(found.updates, theta)
    with np.errstate(over="ignore"):
        sound = np.isfinite(_squares(found.updates))
    sound &= (found.examples >= 0) & ~(np.abs(found.losses) > LARGEST_LOSS)
    return found.take(np.flatnonzero(sound)), found.clients[~sound].tolist()


def norms_of(found: TrainEach) -> dict[int, float]:
    """Norm of each client's update, by client."""
    norms = np.sqrt(_squares(found.updates))
    return dict(zip(found.clients.tolist(), norms.tolist(), strict=True))


def scaled_clients(found: TrainEach, factors: Mapping[int, float]) -> TrainEach:
    """The updates times the factor of their client; 1 for one that is not named."""
    updates = found.updates
    each = np.array([factors.get(client, 1.0) for client in found.clients.tolist()])
    rows = np.repeat(each, np.diff(updates.requests.offsets))
    moved = ClientArrays(
        updates.requests,
        {name: _times(value, each) for name, value in updates.values.items()},
        {name: _times(value, rows) for name, value in updates.rows.items()},
    )
    return replace(found, updates=moved)


def _times(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return values * factors.reshape(-1, *[1] * (values.ndim - 1)).astype(values.dtype)


def _refuse_other_clients(found: TrainEach, asked: Sequence[int]) -> None:
    requests = found.updates.requests
    clients = requests.clients
    whole = all(a.ndim == 1 and a.dtype.kind == "i" for a in vars(requests).values())
    if not whole or (np.diff(clients) <= 0).any() or not np.isin(clients, asked).all():
        raise ValueError("clients that were not asked for")
    offsets = requests.offsets
    fits = len(offsets) == len(clients) + 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all()
    if not fits or offsets[-1] != len(requests.items):
        raise ValueError("numbers of rows that do not fit the clients")
    if found.examples.shape != clients.shape or found.losses.shape != clients.shape:
        raise ValueError("numbers of examples or losses that do not fit the clients")


def _refuse_other_parameters(updates: ClientArrays, theta: Mapping[str, np.ndarray]) -> None:
    requests = updates.requests
    strange = (updates.values.keys() | updates.rows.keys()) - theta.keys()
    if strange or updates.values.keys() & updates.rows.keys():
        raise ValueError(f"unknown or repeated parameters {sorted(strange)[:3]}")
    shapes = {name: (len(requests.clients), *theta[name].shape) for name in updates.values}
    shapes |= {name: (len(requests.items), *theta[name].shape[1:]) for name in updates.rows}
    for name, value in (updates.values | updates.rows).items():
        if value.shape != shapes[name] or value.dtype.kind != "f":
            raise ValueError(f"{name!r} has a wrong shape or no numbers")
    steps = np.diff(requests.items)
    last = requests.offsets[1:-1] - 1  # from one client to the next, items may fall
    steps[last[(last >= 0) & (last < len(steps))]] = 1
    least = min((len(theta[name]) for name in updates.rows), default=np.inf)
    if len(requests.items) and ((steps <= 0).any() or not _within(requests.items, least)):
        raise ValueError("rows that the tables do not have, or twice")


def _within(items: np.ndarray, count: float) -> bool:
    return bool(items.min() >= 0 and items.max() < count)


def _squares(updates: ClientArrays) -> np.ndarray:
    """Sum of squares of each client's update, `float64 [C]`; NaN or infinite where it is not
    finite."""
    clients = len(updates.requests.clients)
    total = np.zeros(clients)
    for value in updates.values.values():
        total += np.square(value.reshape(clients, -1), dtype=np.float64).sum(axis=1)
    places = np.repeat(np.arange(clients), np.diff(updates.requests.offsets))
    for value in updates.rows.values():
        each = np.square(value.reshape(len(value), -1), dtype=np.float64).sum(axis=1)
        total += np.bincount(places, each, clients)
    return total
