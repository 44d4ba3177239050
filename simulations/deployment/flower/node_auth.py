# SPDX-License-Identifier: Apache-2.0
"""Verifies that a call is signed by a node of the deployment, from the headers of Flower's
SuperNodes.

The SuperLink verifies it again, with the identity of the node, but it reads the whole body first.
"""

from __future__ import annotations

import binascii
import datetime
import time
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    public_key_to_bytes,
    verify_signature,
)

_LOOK_AGAIN = 2.0  # seconds between two checks for new keys
_FORGET = 30.0  # seconds after which keys of revoked nodes are refused


class NodeSignatures:
    """Public keys of a deployment's nodes, and the signatures that were seen.

    Args:
        folder: holds a folder with `node.pub` for each node; nodes may be added and revoked while
            this runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys: frozenset[bytes] = frozenset()
        self._looked = float("-inf")

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """The reason why a call with these headers is not from a node; None if it is."""
        try:
            public = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            timestamp = headers[TIMESTAMP_HEADER]
            age = (now() - datetime.datetime.fromisoformat(timestamp)).total_seconds()
        except (KeyError, ValueError, TypeError, binascii.Error):
            return "no signature"
        if not self._knows(public):
            return "an unknown key"
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return "an old signature"
        if not verify_signature(bytes_to_public_key(public), timestamp.encode(), signature):
            return "a wrong signature"
        return None

    def _knows(self, public: bytes) -> bool:
        limit = _FORGET if public in self._keys else _LOOK_AGAIN
        if time.monotonic() - self._looked > limit:
            self._looked = time.monotonic()
            self._keys = frozenset(
                key for file in self._folder.glob("*/node.pub") if (key := _read(file)) is not None
            )
        return public in self._keys


def _read(file: Path) -> bytes | None:
    """A public key as Flower sends it; None for a file that is being written."""
    try:
        return public_key_to_bytes(load_ssh_public_key(file.read_bytes()))  # type: ignore[arg-type]
    except (OSError, ValueError, UnsupportedAlgorithm):
        return None
