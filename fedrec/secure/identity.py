# SPDX-License-Identifier: Apache-2.0
"""Identity of a node towards other nodes: a key certified by the deployment's authority, and proofs
made with it.

The server relays proofs but cannot create them: the authority's key is needed at set-up only, and
certificates of servers are not valid for this use. Keys are ECDSA P-256.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from fedrec.protocol.secure import listed, unlisted

KEY = "signing.key"
CERTIFICATE = "signing.crt"
AUTHORITY = "ca.crt"
REVOKED = "revoked.txt"
"""Names of nodes with revoked certificates, one per line; from the operator, like the authority's
certificate."""
USE = x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH
"""Extended key usage of node certificates, which server certificates do not have."""


class Identity:
    """A node's key with its certificate, and the authority for verifying others.

    Args:
        key: private key, PEM.
        certificate: its certificate, PEM.
        authority: certificate of the authority, PEM.
        revoked: names of nodes with revoked certificates.

    Raises:
        ValueError: one of them is invalid.
    """

    def __init__(
        self, key: bytes, certificate: bytes, authority: bytes, revoked: Iterable[str] = ()
    ) -> None:
        private_key = load_pem_private_key(key, None)
        if not isinstance(private_key, EllipticCurvePrivateKey):
            raise ValueError("the node's signing key is not an ECDSA key")
        self._key = private_key
        self._authority = x509.load_pem_x509_certificate(authority)
        self._revoked = frozenset(revoked)
        self._certificate = x509.load_pem_x509_certificate(certificate).public_bytes(Encoding.DER)

    @classmethod
    def read(cls, folder: Path) -> Identity | None:
        """Load the identity from a node's join folder; None without one.

        Raises:
            ValueError: a file is damaged.
        """
        file = folder / REVOKED
        names = file.read_text(encoding="utf-8").split() if file.is_file() else []
        if not ((folder / KEY).is_file() and (folder / CERTIFICATE).is_file()):
            return None
        files = ((folder / name).read_bytes() for name in (KEY, CERTIFICATE, AUTHORITY))
        return cls(*files, revoked=names)

    def proof(self, statement: bytes) -> bytes:
        """Sign a statement, as a proof that it is from this node."""
        return listed([self._certificate, self._key.sign(statement, ECDSA(SHA256()))])

    def author(self, proof: bytes, statement: bytes) -> bytes:
        """Verify a proof, and return the public key of its node.

        Raises:
            ValueError: the proof is not from a node certified by the authority, or is for another
                statement.
        """
        parts = unlisted(proof)
        if len(parts) != 2:
            raise ValueError("a proof needs a certificate and a signature")
        certificate = x509.load_der_x509_certificate(parts[0])
        self._check(certificate)
        key = certificate.public_key()
        if not isinstance(key, EllipticCurvePublicKey):
            raise ValueError("a node's certificate has no ECDSA key")
        try:
            key.verify(parts[1], statement, ECDSA(SHA256()))
        except InvalidSignature:
            raise ValueError("a channel key is not signed by its node") from None
        return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def _check(self, certificate: x509.Certificate) -> None:
        try:
            certificate.verify_directly_issued_by(self._authority)
            uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        except (InvalidSignature, TypeError, ValueError, x509.ExtensionNotFound):
            raise ValueError("a node's certificate is not signed by the authority") from None
        now = datetime.now(UTC)
        if list(uses) != [USE]:
            raise ValueError("a certificate is not for use by a node")
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise ValueError("a node's certificate has expired")
        names = certificate.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)
        if any(name.value in self._revoked for name in names):
            raise ValueError("a node's certificate was revoked")
