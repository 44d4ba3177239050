# SPDX-License-Identifier: Apache-2.0
"""Certificates of a deployment: one authority of its own, and a certificate for each server and
each node."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from fedrec.secure.identity import USE

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
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer)
        builder = builder.add_extension(own, critical=False)
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
