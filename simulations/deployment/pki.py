# SPDX-License-Identifier: Apache-2.0
"""Certificates, keys, private files and signed calls of a deployment."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from fedrec.runtime.files import open_atomically
from fedrec.secure.identity import USE

# Certificates of a deployment: its authority, and a certificate for each server and node.

_AUTHORITY_DAYS = 3650
_ISSUED_DAYS = 825
RENEWED_DAYS = 90
"""Remaining days below which a certificate should be renewed."""


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
        self._key = load_pem_private_key(issued.key, None)

    @classmethod
    def create(cls, name: str) -> Authority:
        """Create a self-signed authority, which may not sign other authorities."""
        key = ec.generate_private_key(ec.SECP256R1())
        extensions = [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_usage(key_cert_sign=True, crl_sign=True), True),
        ]
        subject = _named(name)
        certificate = _signed(subject, subject, key.public_key(), _AUTHORITY_DAYS, extensions, key)
        return cls(Issued(certificate, _private(key)))

    def issue(self, hosts: Sequence[str]) -> Issued:
        """Issue a certificate for a server with names or IP addresses."""
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        return self._issue(hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, names)

    def issue_node(self, name: str) -> Issued:
        """Issue a certificate with which a node authenticates to other nodes, which reject a
        server's certificate."""
        return self._issue(name, USE)

    def renewed(self, certificate: bytes) -> bytes:
        """Renew a certificate of this authority, with the same key, names and usage.

        Raises:
            ValueError: another authority signed the certificate.
        """
        old = x509.load_pem_x509_certificate(certificate)
        try:
            old.verify_directly_issued_by(self._certificate)
        except (InvalidSignature, TypeError) as error:
            raise ValueError("the certificate was signed by another authority") from error
        extensions = [
            (extension.value, extension.critical)
            for extension in old.extensions
            if extension.oid != ExtensionOID.SUBJECT_KEY_IDENTIFIER
        ]
        return _signed(
            old.subject, old.issuer, old.public_key(), _ISSUED_DAYS, extensions, self._key
        )

    def _issue(
        self,
        name: str,
        use: x509.ObjectIdentifier,
        names: x509.SubjectAlternativeName | None = None,
    ) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        signer: Any = self._certificate.public_key()
        extensions = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(digital_signature=True), True),
            (x509.ExtendedKeyUsage([use]), False),
            *([] if names is None else [(names, False)]),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), False),
        ]
        subject = _named(name), self._certificate.subject
        certificate = _signed(*subject, key.public_key(), _ISSUED_DAYS, extensions, self._key)
        return Issued(certificate, _private(key))


def days_left(certificate: bytes) -> float:
    """Days until a certificate (PEM) expires."""
    end = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    return (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: Any,
    days: int,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
    signer: Any,
) -> bytes:
    """Sign a certificate (PEM) for a public key, with extensions and whether each is critical."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of clients may be behind
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    for extension, critical in [
        (x509.SubjectKeyIdentifier.from_public_key(key), False),
        *extensions,
    ]:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)


_USAGES = (
    "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
    " key_cert_sign crl_sign encipher_only decipher_only"
)


def _usage(**granted: bool) -> x509.KeyUsage:
    return x509.KeyUsage(**{**dict.fromkeys(_USAGES.split(), False), **granted})


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


SECRET_BYTES = 32


@dataclass(frozen=True)
class NodeKey:
    """A node's key pair (ECDSA P-384), in OpenSSH's format, which Flower reads."""

    private: bytes
    public: bytes

    @classmethod
    def create(cls) -> NodeKey:
        """Generate a new key pair."""
        key = ec.generate_private_key(ec.SECP384R1())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        return cls(_private(key, PrivateFormat.OpenSSH), public + b"\n")


def new_secret() -> bytes:
    """Generate an executor's secret; printable, because Flower reads the raw bytes of its file."""
    return secrets.token_hex(SECRET_BYTES).encode()


def private_folder(path: Path) -> Path:
    """Create a folder that only its owner may access; an existing one keeps its owner's
    permissions."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(path.stat().st_mode & 0o700)
    return path


def write_private(path: Path, content: bytes | str) -> None:
    """Write a file that only its owner may read, atomically."""
    with open_atomically(path, mode=0o600) as file:
        os.fchmod(file.fileno(), 0o600)  # also if an earlier file had another mode
        file.write(content.encode() if isinstance(content, str) else content)


def as_sent(public_key: bytes) -> bytes:
    """Convert a public key from OpenSSH's format to the one that Flower sends (PEM)."""
    key = load_ssh_public_key(public_key)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


# Signatures of calls, in the headers of Flower's SuperNodes.

PUBLIC_KEY = "flwr-public-key"
SIGNATURE = "flwr-signature"
TIMESTAMP = "flwr-timestamp"
"""Headers of a SuperNode's calls: base64, base64, and ISO 8601."""
OLDEST = 305.0
"""Seconds after which Flower refuses a timestamp."""
EARLIEST = 5.0
"""Seconds that a timestamp may be ahead of this machine's clock."""


@dataclass(frozen=True)
class NodeSignature:
    """Signature of a call.

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
        """Read the signature from a call's headers; None if missing."""
        try:
            key = b64decode(headers[PUBLIC_KEY], validate=True)
            value = b64decode(headers[SIGNATURE], validate=True)
            timestamp = headers[TIMESTAMP]
            made = datetime.datetime.fromisoformat(timestamp)
            age = (datetime.datetime.now(tz=datetime.UTC) - made).total_seconds()
        except (KeyError, ValueError, TypeError):
            return None
        return cls(key, value, timestamp, age)

    def fault(self) -> str | None:
        """Reason why the signature is invalid; None if it is valid."""
        if not -EARLIEST < self.age < OLDEST:
            return "an expired signature"
        key = load_pem_public_key(self.key)
        try:
            key.verify(self.value, self.timestamp.encode(), ec.ECDSA(hashes.SHA256()))  # type: ignore[union-attr, call-arg, arg-type]
        except InvalidSignature:
            return "an invalid signature"
        return None
