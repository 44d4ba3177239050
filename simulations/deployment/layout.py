# SPDX-License-Identifier: Apache-2.0
"""The folder of a deployment: settings and paths; authority, certificates, keys, secrets and docker
compose files; renewal of certificates and revocation of nodes."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, NamedTuple, Self

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import Field, field_validator, model_validator

from fedrec.config import Config, did_you_mean
from fedrec.errors import RunError
from fedrec.runtime.files import open_atomically, read_toml, require_new_folder, write_atomically
from fedrec.secure.identity import CERTIFICATE, REVOKED, USE
from simulations.flower_commands import connection

SETTINGS = "deployment.toml"
DATA = "FEDREC_NODE_DATA"
CATALOGUE = "FEDREC_NODE_CATALOGUE"
"""Environment variables with the files that a client's executor reads before the first message."""
REVOKED_KEY = "node.pub.revoked"
"""Public key of a revoked node, in its folder; the gateway reads `node.pub` only."""
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_LAST_PORT = 65535
_STRANGE = set("\"'`{};$\\\n\r")


class DeploymentConfig(Config):
    """Settings of a deployment, in `deployment.toml`."""

    hosts: tuple[str, ...] = Field(default=("localhost", "127.0.0.1"), min_length=1)
    """Names and addresses at which clients reach this machine; the first one is written into their
    files."""
    bind: str = "127.0.0.1"
    """Address that the gateway listens on; 0.0.0.0 for all."""
    port: int = Field(default=8443, ge=1, le=_LAST_PORT)
    """Port of the gateway, the only port that clients can reach."""
    superlink_port: int = Field(default=18000, ge=1, le=_LAST_PORT)
    """Port of the SuperLink on 127.0.0.1. Anyone who reaches it can start runs: never publish
    it."""
    node_port: int = Field(default=19100, ge=1, le=_LAST_PORT)
    """First port on 127.0.0.1 of the nodes on this machine, which take one port each."""
    nodes: int = Field(default=2, ge=0, le=4096)
    """Number of nodes with keys, revoked ones included."""
    revoked: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of nodes whose keys were revoked (`fedrec deploy revoke`)."""
    most_clients: int | None = Field(default=None, ge=1)
    """Largest number of clients per node; a node that announces more is not admitted. Required for
    runs with noise, because the computed noise decreases with the number of clients. `init
    --experiment` writes the size of the largest shard."""
    local_nodes: bool = True
    """Whether `up` also starts the nodes on this machine."""

    @field_validator("hosts", "bind", mode="after")
    @classmethod
    def _hosts_that_can_be(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        for host in (value,) if isinstance(value, str) else value:
            if not _is_host(host):
                raise ValueError(
                    "use IP addresses or names of letters, digits, '-' and '.' (others as xn--...)"
                )
        return value

    @model_validator(mode="after")
    def _ports_that_differ(self) -> Self:
        ports = [self.port, self.superlink_port]
        local = range(self.node_port, self.node_port + self.nodes) if self.local_nodes else ()
        if len(set(ports)) < len(ports) or any(port in local for port in ports):
            raise ValueError(
                "use three different ports outside those of nodes (one per node from node-port on)"
            )
        if local and local[-1] > _LAST_PORT:
            raise ValueError(
                f"ports of nodes must not exceed {_LAST_PORT} (one per node from node-port on)"
            )
        return self


def check_path(path: Path) -> None:
    """Check that a path has no characters that files and command lines of other programs forbid.

    Raises:
        RunError: the path has quotes, braces or similar characters.
    """
    strange = sorted(set(str(path)) & _STRANGE)
    if strange or not str(path).isprintable():
        raise RunError(
            f"invalid path {str(path)!r} for a deployment",
            got=" ".join(strange) or "a character that cannot be printed",
            fix="choose a folder without quotes, braces, semicolons, dollars and backslashes",
        )


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        # a name that ends in a number is an invalid address, such as 999.1.1.1
        ends_in_number = text.rpartition(".")[2].isdecimal()
        return len(text) <= 253 and _HOST.fullmatch(text) is not None and not ends_in_number
    return True


class Deployment:
    """A deployment folder.

    Args:
        path: the folder.

    Attributes:
        authority: public certificate of the authority.
        authority_key: its private key, used to sign certificates and never by a running process.
        server: folder of the files of the server's processes.
        logs: folder of the processes' output.
        revoked: file with the names of revoked nodes, for all others.
        registered: a file that exists after the nodes' keys were registered.
        flower_home: Flower's home for the operator's commands and the server's processes.
        settings: from `deployment.toml`.

    Raises:
        RunError: the folder is not a deployment.
    """

    def __init__(self, path: Path) -> None:
        got = "no such file"
        try:
            self.path = path.expanduser().resolve()
            file = self.path / SETTINGS
            exists = file.is_file()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, no such home
            exists = False
            got = getattr(error, "strerror", None) or str(error)
        if not exists:
            raise RunError(
                f"{str(path)[:200]} is not a deployment: {SETTINGS}",
                got=got,
                fix="create one with fedrec deploy init FOLDER",
            )
        self.authority = self.path / "ca.crt"
        self.authority_key = self.path / "authority" / "ca.key"
        self.server = self.path / "server"
        self.logs = self.path / "logs"
        self.revoked = self.path / REVOKED
        self.registered = self.server / "registered"
        self.flower_home = self.server / "flwr"
        self.settings = DeploymentConfig.parse(read_toml(file, RunError), at="deployment")

    @classmethod
    def create(cls, path: Path, settings: DeploymentConfig) -> Deployment:
        """Create the folder with only its settings."""
        write_atomically(path.expanduser().resolve() / SETTINGS, tomli_w.dumps(settings.table()))
        return cls(path)

    def changed(self, **settings: object) -> Deployment:
        """Save changed settings, and return the changed deployment."""
        return self.create(self.path, self.settings.model_copy(update=settings))

    @property
    def superlink(self) -> str:
        """HOST:PORT of the SuperLink, on this machine only; in a container, from
        `FEDREC_SUPERLINK`."""
        return os.environ.get("FEDREC_SUPERLINK") or f"127.0.0.1:{self.settings.superlink_port}"

    @property
    def gateway(self) -> str:
        """HOST:PORT that clients connect to."""
        return f"{self.settings.hosts[0]}:{self.settings.port}"

    def node(self, number: int) -> Path:
        """Folder of a node; numbers start at 1."""
        return self.path / "nodes" / f"node-{number}"

    @property
    def numbers(self) -> list[int]:
        """Numbers of all nodes that are not revoked, in order."""
        every = range(1, self.settings.nodes + 1)
        return [number for number in every if number not in self.settings.revoked]

    def node_folders(self) -> list[Path]:
        """Folders of all nodes that are not revoked, in order."""
        return [self.node(number) for number in self.numbers]


# Certificates of a deployment: its authority, and a certificate for each server and node.

Extension = tuple[x509.ExtensionType, bool]
"""An extension of a certificate, and whether it is critical."""
_AUTHORITY_DAYS = 3650
_ISSUED_DAYS = 825
RENEWED_DAYS = 90
"""Remaining days below which a certificate should be renewed."""


class Issued(NamedTuple):
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
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_usage(key_cert_sign=True, crl_sign=True), True),
        ]
        subject = _named(name)
        certificate = _signed(subject, subject, key.public_key(), _AUTHORITY_DAYS, extensions, key)
        return cls(Issued(certificate, _private(key)))

    def issue(self, name: str, hosts: Sequence[str] = ()) -> Issued:
        """Issue a certificate for a new key, see `certify`."""
        key = ec.generate_private_key(ec.SECP256R1())
        return Issued(self.certify(key.public_key(), name, hosts), _private(key))

    def certify(self, key: Any, name: str, hosts: Sequence[str] = ()) -> bytes:
        """Sign a certificate (PEM) for a public key.

        Args:
            key: the public key.
            name: of its holder.
            hosts: names or IP addresses of a server; none for a node, which authenticates to other
                nodes: these reject a server's certificate.
        """
        signer: Any = self._certificate.public_key()
        extensions = [
            (x509.SubjectKeyIdentifier.from_public_key(key), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(digital_signature=True), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH if hosts else USE]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), False),
        ]
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            extensions.append((names, False))
        subject = _named(name), self._certificate.subject
        return _signed(*subject, key, _ISSUED_DAYS, extensions, self._key)


def days_left(certificate: bytes) -> float:
    """Days until a certificate (PEM) expires."""
    end = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    return (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: Any,
    days: int,
    extensions: Sequence[Extension],
    signer: Any,
) -> bytes:
    """Sign a certificate (PEM) for a public key."""
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
    for extension, critical in extensions:
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


class NodeKey(NamedTuple):
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
    return secrets.token_hex(32).encode()


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


# The files of a new deployment.


def _servers(settings: DeploymentConfig) -> dict[str, Sequence[str]]:
    """Names and addresses in the certificates of the server's processes."""
    superlink = ("superlink", "localhost", "127.0.0.1")
    return {"superlink": superlink, "gateway": (*settings.hosts, "gateway")}


def initialise(path: Path, settings: DeploymentConfig) -> Deployment:
    """Create a new deployment folder.

    Raises:
        RunError: `path` exists.
    """
    path = path.expanduser().resolve()
    check_path(path)
    require_new_folder(path, fix="choose another folder")
    private_folder(path)
    deployment = Deployment.create(path, settings)
    authority = Authority.create(f"fedrec deployment {path.name}")
    write_atomically(deployment.authority, authority.issued.certificate)
    write_atomically(deployment.revoked, "")
    write_private(private_folder(path / "authority") / "ca.key", authority.issued.key)
    private_folder(deployment.server)
    for name, hosts in _servers(settings).items():
        _write(deployment.server, name, authority.issue(hosts[0], hosts))
    write_private(deployment.server / "superexec.secret", new_secret())
    home = private_folder(deployment.flower_home)  # for the operator's commands
    write_private(home / "config.toml", connection(deployment.superlink, deployment.authority))
    private_folder(deployment.logs)
    private_folder(path / "nodes")
    for folder in deployment.node_folders():
        _make_node(deployment, authority, folder)
    _write_compose(deployment)
    return deployment


def _make_node(deployment: Deployment, authority: Authority, folder: Path) -> None:
    """Create a node's folder: its key for the server, its key and certificate for other nodes, and
    the authority's certificate."""
    private_folder(folder)
    _write(folder, Path(CERTIFICATE).stem, authority.issue(folder.name))
    key = NodeKey.create()
    write_private(folder / "node.key", key.private)
    write_atomically(folder / "node.pub", key.public)
    shutil.copyfile(deployment.authority, folder / "ca.crt")
    shutil.copyfile(deployment.revoked, folder / REVOKED)


def add_nodes(deployment: Deployment, count: int) -> Deployment:
    """Add nodes, with the catalogue of the others, to a deployment; once registered, they may join
    while it runs.

    Raises:
        ExperimentError: the number of nodes is too large.
        RunError: the authority's key is missing.
    """
    before = deployment.settings.nodes
    table = {**deployment.settings.table(), "nodes": before + count}
    DeploymentConfig.parse(table, at="deployment")
    authority = _authority_of(deployment)
    for number in range(before + 1, before + count + 1):
        _make_node(deployment, authority, deployment.node(number))
    grown = deployment.changed(nodes=before + count)
    _copy_catalogue(grown.node_folders())
    _write_compose(grown)
    return grown


def _copy_catalogue(folders: Sequence[Path]) -> None:
    """Copy the catalogue of one node to all others."""
    files = [folder / "catalogue.json" for folder in folders]
    known = next((file.read_bytes() for file in files if file.is_file()), None)
    for file in files:
        if known is not None and not file.exists():
            write_atomically(file, known)


def _authority_of(deployment: Deployment) -> Authority:
    """Load the authority of a deployment, which signs certificates.

    Raises:
        RunError: the authority's key is missing.
    """
    if not deployment.authority_key.is_file():
        raise RunError(
            f"the authority's key {deployment.authority_key} is missing",
            fix="restore it temporarily",
        )
    return Authority(
        Issued(deployment.authority.read_bytes(), deployment.authority_key.read_bytes())
    )


def _write(folder: Path, name: str, issued: Issued) -> None:
    write_atomically(folder / f"{name}.crt", issued.certificate)
    write_private(folder / f"{name}.key", issued.key)


# The user of a deployment's containers, and the files for docker compose.
#
# Containers run as the owner of the deployment folder, because only the owner can read its keys;
# and never as root, which in a container is root of the machine. If root owns the folder, they run
# as another user, who gets ownership of the files that containers open.

COMPOSE_FILE = "docker-compose.yml"
CONTAINER_USER = 10001
"""User and group of containers if root owns the deployment: the image's user."""


def _write_compose(deployment: Deployment) -> None:
    """Copy the project's `docker-compose.yml` into the deployment folder, and write `.env`, which
    docker compose reads. Without this file in the installation, there are no containers."""
    project = Path(__file__).resolve().parents[2]
    settings = deployment.settings
    values = {
        "FEDREC_UID": os.getuid() or CONTAINER_USER,
        "FEDREC_GID": os.getgid() if os.getuid() else CONTAINER_USER,
        "FEDREC_DEPLOYMENT": f"'{deployment.path}'",
        "FEDREC_BIND": f"[{settings.bind}]" if ":" in settings.bind else settings.bind,
        "FEDREC_PORT": settings.port,
        "FEDREC_BUILD": f"'{project}'",
    }
    text = "".join(f"{name}={value}\n" for name, value in values.items())
    write_private(deployment.path / ".env", text)
    if (project / COMPOSE_FILE).is_file():
        shutil.copyfile(project / COMPOSE_FILE, deployment.path / COMPOSE_FILE)
    hand_over(deployment)


def hand_over(deployment: Deployment) -> None:
    """Change the owner of root's files that containers open, except the authority's key."""
    if os.getuid():
        return
    for path in (deployment.path, *deployment.path.rglob("*")):
        if deployment.authority_key.parent not in (path, path.parent):
            os.chown(path, CONTAINER_USER, CONTAINER_USER, follow_symlinks=False)


# Renewal of certificates, and revocation of nodes.


def renew(deployment: Deployment) -> list[Path]:
    """Renew the certificates of SuperLink, gateway and nodes, with the same keys, for the present
    names and addresses.

    Returns:
        The certificates to transfer to the nodes; they are not secret.

    Raises:
        RunError: the authority's key is missing.
    """
    authority = _authority_of(deployment)
    for file, name, hosts in _certificates(deployment):
        key = x509.load_pem_x509_certificate(file.read_bytes()).public_key()
        write_atomically(file, authority.certify(key, name, hosts))
    hand_over(deployment)
    return [folder / CERTIFICATE for folder in deployment.node_folders()]


def days_of_certificates(deployment: Deployment) -> dict[Path, float]:
    """Days until each certificate of the deployment, the authority's first, expires."""
    files = [deployment.authority, *(file for file, *_ in _certificates(deployment))]
    return {file: days_left(file.read_bytes()) for file in files}


def check_certificates(deployment: Deployment) -> None:
    """Check that no certificate of a deployment has expired.

    Raises:
        RunError: a certificate has expired.
    """
    ended = [file for file, days in days_of_certificates(deployment).items() if days <= 0]
    if ended:
        raise RunError(
            f"Certificate {ended[0]} has expired, by this machine's clock",
            fix="create a new deployment"
            if ended[0] == deployment.authority
            else f"fedrec deploy renew {quote(str(deployment.path))}",
        )


def revoke(deployment: Deployment, name: str) -> Deployment:
    """Revoke a node: its key is not registered again, the gateway refuses it, and other nodes
    refuse its certificate once they have `revoked.txt`.

    The SuperLink removes it at the next `register_nodes`.

    Raises:
        RunError: the node is unknown.
    """
    before = deployment.settings
    nodes = {deployment.node(number).name: number for number in range(1, before.nodes + 1)}
    if name not in nodes:
        raise RunError(f"unknown node {name[:100]!r}", fix=did_you_mean(name, nodes))
    if nodes[name] in before.revoked:
        return deployment
    folder = deployment.node(nodes[name])
    changed = deployment.changed(revoked=(*before.revoked, nodes[name]))
    (folder / "node.pub").replace(folder / REVOKED_KEY)
    text = "".join(f"{deployment.node(number).name}\n" for number in changed.settings.revoked)
    for holder in (changed.path, *changed.node_folders()):
        write_atomically(holder / REVOKED, text)
    hand_over(changed)
    return changed


def _certificates(deployment: Deployment) -> Iterator[tuple[Path, str, Sequence[str]]]:
    """Files of the certificates, with the name of their holder and a server's addresses."""
    for name, hosts in _servers(deployment.settings).items():
        yield deployment.server / f"{name}.crt", hosts[0], hosts
    for folder in deployment.node_folders():
        yield folder / CERTIFICATE, folder.name, ()
