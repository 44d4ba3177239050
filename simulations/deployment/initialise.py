# SPDX-License-Identifier: Apache-2.0
"""The files of a deployment folder: authority, certificates, keys, secrets, settings and docker
compose files; renewal of certificates and revocation of nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from fedrec.config import did_you_mean
from fedrec.errors import RunError
from fedrec.runtime.files import require_new_folder, write_atomically
from fedrec.secure.identity import CERTIFICATE, KEY, REVOKED
from simulations.deployment.layout import REVOKED_KEY, Deployment, DeploymentConfig, check_path
from simulations.deployment.pki import (
    Authority,
    Issued,
    NodeKey,
    days_left,
    new_secret,
    private_folder,
    write_private,
)
from simulations.flower_commands import connection

SUPERLINK_HOSTS = ("superlink", "localhost", "127.0.0.1")


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
    write_private(private_folder(path / "authority") / "ca.key", authority.issued.key)
    private_folder(deployment.server)
    _write(deployment.server, "superlink", authority.issue(SUPERLINK_HOSTS))
    _write(deployment.server, "gateway", authority.issue([*settings.hosts, "gateway"]))
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
    issued = authority.issue_node(folder.name)
    write_private(folder / KEY, issued.key)
    write_atomically(folder / CERTIFICATE, issued.certificate)
    key = NodeKey.create()
    write_private(folder / "node.key", key.private)
    write_atomically(folder / "node.pub", key.public)
    shutil.copyfile(deployment.authority, folder / "ca.crt")
    if deployment.revoked.exists():
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


def _container_user() -> tuple[int, int]:
    """User and group for the containers of a deployment created by this process."""
    return (os.getuid(), os.getgid()) if os.getuid() else (CONTAINER_USER, CONTAINER_USER)


def _write_compose(deployment: Deployment) -> None:
    """Copy the project's `docker-compose.yml` into the deployment folder, and write `.env`, which
    docker compose reads. Without this file in the installation, there are no containers."""
    project = Path(__file__).resolve().parents[2]
    if not deployment.revoked.exists():  # otherwise docker would create a folder
        write_atomically(deployment.revoked, "")
    user, group = _container_user()
    settings = deployment.settings
    values = {
        "FEDREC_UID": user,
        "FEDREC_GID": group,
        "FEDREC_DEPLOYMENT": f"'{deployment.path}'",
        "FEDREC_BIND": f"[{settings.bind}]" if ":" in settings.bind else settings.bind,
        "FEDREC_PORT": settings.port,
        "FEDREC_BUILD": f"'{project}'",
    }
    text = "".join(f"{name}={value}\n" for name, value in values.items())
    write_private(deployment.path / ".env", text)
    template = project / COMPOSE_FILE
    if template.is_file():
        write_atomically(deployment.path / COMPOSE_FILE, template.read_bytes())
    hand_over(deployment)


def hand_over(deployment: Deployment) -> None:
    """Change the owner of root's files that containers open, except the authority's key."""
    user, group = _container_user()
    if user == os.getuid():
        return
    for folder, _, files in os.walk(deployment.path):
        if Path(folder) == deployment.authority_key.parent:
            continue
        for name in (".", *files):
            os.chown(Path(folder) / name, user, group, follow_symlinks=False)


# Renewal of certificates, and revocation of nodes.


def renew(deployment: Deployment) -> list[Path]:
    """Renew the certificates of SuperLink, gateway and nodes, with the same keys.

    Returns:
        The certificates to transfer to the nodes; they are not secret.

    Raises:
        RunError: the authority's key is missing, or another authority signed a certificate.
    """
    authority = _authority_of(deployment)
    for file in _certificates(deployment):
        try:
            write_atomically(file, authority.renewed(file.read_bytes()))
        except ValueError as error:
            raise RunError(
                f"{file} cannot be renewed: {error}", fix="restore it, or create a new deployment"
            ) from None
    hand_over(deployment)
    return [folder / CERTIFICATE for folder in deployment.node_folders()]


def days_of_certificates(deployment: Deployment) -> dict[Path, float]:
    """Days until each certificate of the deployment, the authority's first, expires."""
    files = [deployment.authority, *_certificates(deployment)]
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
    names = {deployment.node(number).name: number for number in deployment.numbers}
    gone = {deployment.node(number).name for number in deployment.settings.revoked}
    if name in gone:
        return deployment
    if name not in names:
        raise RunError(f"unknown node {name[:100]!r}", fix=did_you_mean(name, names))
    folder = deployment.node(names[name])
    changed = deployment.changed(revoked=(*deployment.settings.revoked, names[name]))
    (folder / "node.pub").replace(folder / REVOKED_KEY)
    text = "".join(f"{node}\n" for node in sorted({*gone, name}))
    for holder in (changed.path, *changed.node_folders()):
        write_atomically(holder / REVOKED, text)
    hand_over(changed)
    return changed


def _certificates(deployment: Deployment) -> Iterator[Path]:
    yield from (deployment.server / f"{name}.crt" for name in ("superlink", "gateway"))
    yield from (folder / CERTIFICATE for folder in deployment.node_folders())
