# SPDX-License-Identifier: Apache-2.0
"""Keys that nodes authenticate with, secrets of executors, and files for their owner only."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

SECRET_BYTES = 32


@dataclass(frozen=True)
class NodeKey:
    """A node's key pair (ECDSA P-384), in OpenSSH's format, which Flower reads."""

    private: bytes
    public: bytes

    @classmethod
    def create(cls) -> NodeKey:
        """Generate a new pair."""
        key = ec.generate_private_key(ec.SECP384R1())
        form = serialization.PrivateFormat.OpenSSH
        private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        return cls(private, public + b"\n")


def new_secret() -> bytes:
    """The secret that an executor authenticates with; printable, as it is read byte by byte from a
    file."""
    return secrets.token_hex(SECRET_BYTES).encode()


def private_folder(path: Path) -> Path:
    """A folder that only its owner may access; an existing one keeps its owner's permissions."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(path.stat().st_mode & 0o700)
    return path


def write_private(path: Path, content: bytes | str) -> Path:
    """Write a file that only its owner may read, atomically."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path
