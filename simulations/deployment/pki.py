# SPDX-License-Identifier: Apache-2.0
"""Certificates, keys and signed calls of a deployment."""

from __future__ import annotations

import binascii
import datetime
import ipaddress
import os
import secrets
import time
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from fedrec.secure.identity import USE

# Certificates of a deployment: one authority of its own, and a certificate for each server and each
# node.

_AUTHORITY_DAYS = 3650
_ISSUED_DAYS = 825
RENEWED_DAYS = 90
"""Days before its end from which on a certificate is to be renewed."""


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A certificate authority (ECDSA P-256) that signs certificates of servers and nodes.

    Args:
        issued: its own certificate and key.
    """

    def __init__(self, issued: Issued) -> None:
        self.issued = issued
        self._certificate = x509.load_pem_x509_certificate(issued.certificate)
        self._key = serialization.load_pem_private_key(issued.key, None)

    @classmethod
    def create(cls, name: str) -> Authority:
        """A new self-signed authority, which may not sign other authorities."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _named(name)
        usage = _usage(key_cert_sign=True, crl_sign=True)
        builder = _builder(subject, subject, key.public_key(), _AUTHORITY_DAYS)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        builder = builder.add_extension(usage, critical=True)
        return cls(Issued(_pem(builder.sign(key, hashes.SHA256())), _private(key)))

    def issue(self, hosts: Sequence[str]) -> Issued:
        """A certificate for a server that is reached under some names or IP addresses."""
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        return self._issue(hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, names)

    def issue_node(self, name: str) -> Issued:
        """A certificate with which a node authenticates to other nodes, who do not accept a
        server's certificate."""
        return self._issue(name, USE)

    def renewed(self, certificate: bytes) -> bytes:
        """A new certificate for the key, names and use of an earlier one of this authority.

        Raises:
            ValueError: it is not of this authority.
        """
        old = x509.load_pem_x509_certificate(certificate)
        try:
            old.verify_directly_issued_by(self._certificate)
        except (InvalidSignature, TypeError) as error:
            raise ValueError("the certificate is not of this authority") from error
        builder = _builder(old.subject, old.issuer, old.public_key(), _ISSUED_DAYS)
        for extension in old.extensions:
            if extension.oid != ExtensionOID.SUBJECT_KEY_IDENTIFIER:
                builder = builder.add_extension(extension.value, extension.critical)
        return _pem(builder.sign(self._key, hashes.SHA256()))  # type: ignore[arg-type]

    def _issue(
        self,
        name: str,
        use: x509.ObjectIdentifier,
        names: x509.SubjectAlternativeName | None = None,
    ) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._certificate.subject, key.public_key(), _ISSUED_DAYS)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        issuer: Any = self._certificate.public_key()
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer)
        builder = builder.add_extension(signer, critical=False)
        return Issued(_pem(builder.sign(self._key, hashes.SHA256())), _private(key))  # type: ignore


def days_left(certificate: bytes) -> float:
    """Days until a certificate (PEM) ends."""
    end = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    return (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of clients may be behind
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(identifier, critical=False)
    )


def _usage(**granted: bool) -> x509.KeyUsage:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
    )
    names += ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: granted.get(name, False) for name in names})


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


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


# Verifies that a call is signed by a node of the deployment, from the headers of Flower's
# SuperNodes.
#
# The SuperLink verifies it again, with the identity of the node, but it reads the whole body first.

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
