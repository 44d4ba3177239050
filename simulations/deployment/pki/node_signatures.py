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
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

PUBLIC_KEY = "flwr-public-key"
SIGNATURE = "flwr-signature"
TIMESTAMP = "flwr-timestamp"
"""Headers of a SuperNode's calls: base64, base64, and ISO 8601."""
OLDEST = 305.0
"""Seconds after which Flower refuses a timestamp."""
EARLIEST = 5.0
"""Seconds that a timestamp may be ahead of this machine's clock."""
_LOOK_AGAIN = 2.0  # seconds between two checks for new keys
_FORGET = 30.0  # seconds after which keys of revoked nodes are refused


@dataclass(frozen=True)
class NodeSignature:
    """The signature of a call.

    Attributes:
        key: public key, as Flower sends it.
        value: ECDSA signature of the timestamp.
        timestamp: time of the call.
        age: seconds since then.
    """

    key: bytes
    value: bytes
    timestamp: str
    age: float

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> NodeSignature | None:
        """The signature in a call's headers; None if there is none."""
        try:
            key = b64decode(headers[PUBLIC_KEY], validate=True)
            value = b64decode(headers[SIGNATURE], validate=True)
            timestamp = headers[TIMESTAMP]
            made = datetime.datetime.fromisoformat(timestamp)
            age = (datetime.datetime.now(tz=datetime.UTC) - made).total_seconds()
        except (KeyError, ValueError, TypeError, binascii.Error):
            return None
        return cls(key, value, timestamp, age)

    def fault(self) -> str | None:
        """The reason why it is not valid; None if it is."""
        if not -EARLIEST < self.age < OLDEST:
            return "an old signature"
        key = load_pem_public_key(self.key)
        try:
            key.verify(self.value, self.timestamp.encode(), ec.ECDSA(hashes.SHA256()))  # type: ignore[union-attr, call-arg, arg-type]
        except InvalidSignature:
            return "a wrong signature"
        return None


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
        signature = NodeSignature.of(headers)
        if signature is None:
            return "no signature"
        return signature.fault() if self._knows(signature.key) else "an unknown key"

    def _knows(self, public: bytes) -> bool:
        limit = _FORGET if public in self._keys else _LOOK_AGAIN
        if time.monotonic() - self._looked > limit:
            self._looked = time.monotonic()
            self._keys = frozenset(
                key for file in self._folder.glob("*/node.pub") if (key := _read(file)) is not None
            )
        return public in self._keys


def as_sent(public_key: bytes) -> bytes:
    """A public key in OpenSSH's format, in the one in which Flower sends it (PEM)."""
    key = load_ssh_public_key(public_key)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _read(file: Path) -> bytes | None:
    """A public key as Flower sends it; None for a file that is being written."""
    try:
        return as_sent(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        return None
