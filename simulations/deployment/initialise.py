# SPDX-License-Identifier: Apache-2.0
"""Creates a deployment folder: authority, certificates, keys, secrets, and settings."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from fedrec.errors import RunError
from fedrec.runtime.files import require_new_folder, write_atomically
from fedrec.secure.identity import CERTIFICATE, KEY, REVOKED
from simulations.deployment.compose import write_compose
from simulations.deployment.layout import Deployment, DeploymentConfig, refuse_unwritable
from simulations.deployment.pki import (
    Authority,
    Issued,
    NodeKey,
    new_secret,
    private_folder,
    write_private,
)
from simulations.flower_commands import connection

SUPERLINK_HOSTS = ("superlink", "localhost", "127.0.0.1")


def initialise(path: Path, settings: DeploymentConfig) -> Deployment:
    """Create a new deployment folder.

    Raises:
        RunError: there is something at `path` already.
    """
    path = path.expanduser().resolve()
    refuse_unwritable(path)
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
        make_node(deployment, authority, folder)
    write_compose(deployment)
    return deployment


def make_node(deployment: Deployment, authority: Authority, folder: Path) -> None:
    """The folder that is handed to a node: its keys, its certificate, and the authority's."""
    private_folder(folder)
    _make_signing_key(authority, folder)
    key = NodeKey.create()
    write_private(folder / "node.key", key.private)
    write_atomically(folder / "node.pub", key.public)
    shutil.copyfile(deployment.authority, folder / "ca.crt")
    if deployment.revoked.exists():
        shutil.copyfile(deployment.revoked, folder / REVOKED)


def _make_signing_key(authority: Authority, folder: Path) -> None:
    """The certificate and key with which a node authenticates to other nodes."""
    issued = authority.issue_node(folder.name)
    write_private(folder / KEY, issued.key)
    write_atomically(folder / CERTIFICATE, issued.certificate)


def add_nodes(deployment: Deployment, count: int) -> Deployment:
    """The same deployment with more nodes; they may join while it runs, once they are registered.

    Nodes get the catalogue of the others, and those of an older version the keys that they lack,
    also if no nodes are added.

    Raises:
        ExperimentError: so many nodes are not possible.
        RunError: the authority's key is missing.
    """
    before = deployment.settings.nodes
    grown = {**deployment.settings.table(), "nodes": before + count}
    DeploymentConfig.parse(grown, at="deployment")
    authority = authority_of(deployment)
    for folder in deployment.node_folders():
        if not ((folder / KEY).is_file() and (folder / CERTIFICATE).is_file()):
            _make_signing_key(authority, folder)
    for number in range(before + 1, before + count + 1):
        make_node(deployment, authority, deployment.node(number))
    grown = deployment.changed(nodes=before + count)
    _copy_catalogue(grown.node_folders())
    write_compose(grown)
    return grown


def _copy_catalogue(folders: Sequence[Path]) -> None:
    """Give all nodes the catalogue that one of them has."""
    files = [folder / "catalogue.json" for folder in folders]
    known = next((file.read_bytes() for file in files if file.is_file()), None)
    for file in files:
        if known is not None and not file.exists():
            write_atomically(file, known)


def authority_of(deployment: Deployment) -> Authority:
    """The authority of a deployment, which signs certificates.

    Raises:
        RunError: its key is missing.
    """
    if not deployment.authority_key.is_file():
        raise RunError(
            "the authority's key is missing",
            expected=f"{deployment.authority_key}, to sign certificates with",
            fix="restore it temporarily",
        )
    return Authority(
        Issued(deployment.authority.read_bytes(), deployment.authority_key.read_bytes())
    )


def _write(folder: Path, name: str, issued: Issued) -> None:
    write_atomically(folder / f"{name}.crt", issued.certificate)
    write_private(folder / f"{name}.key", issued.key)
