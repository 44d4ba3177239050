# SPDX-License-Identifier: Apache-2.0
"""Digest of a training order that must be the same for all nodes of a session.

Masks cancel whatever the nodes compute. A server that sends parameters or settings under which the
updates of all nodes but one are zero would learn that node's update from the sum (Pasquini,
Francati and Ateniese 2022, "Eluding secure aggregation in federated learning via model
inconsistency"). So the nodes agree on the order before they mask a sum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from fedrec.protocol.orders import TrainOrder
from fedrec.secure import masks


def digest_of(order: TrainOrder, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Digest of an order and the parameters that came with it, without what differs between nodes:
    the clients and the masking.

    Args:
        order: the order.
        arrays: the parameters by name, of any shapes.

    Returns:
        32 bytes (SHA-256).
    """
    settings = {
        "round": order.round,
        "weighting": order.weighting,
        "step": order.step,
        "overrides": dict(order.overrides or {}),
        "protection": None if order.protection is None else order.protection.text(),
        "each": order.each,
    }
    parts = [json.dumps(settings, sort_keys=True).encode()]
    for name, value in sorted(arrays.items()):
        kind = f"{value.dtype.str} {list(value.shape)}"
        parts += [name.encode(), kind.encode(), _digest_of_values(value)]
    return masks.digest(b"training order", *parts)


def _digest_of_values(value: np.ndarray) -> bytes:
    found = Hash(SHA256())
    found.update(np.asarray(value, order="C").reshape(-1).view(np.uint8).data)
    return found.finalize()
