# SPDX-License-Identifier: Apache-2.0
"""Renewed certificates, and keys of nodes that are not accepted any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from fedrec.config import did_you_mean
from fedrec.errors import RunError
from fedrec.runtime.files import write_atomically
from fedrec.secure.identity import CERTIFICATE, REVOKED
from simulations.deployment.compose import hand_over
from simulations.deployment.initialise import authority_of
from simulations.deployment.layout import REVOKED_KEY, Deployment
from simulations.deployment.pki import days_left


def renew(deployment: Deployment) -> list[Path]:
    """Replace the certificates of SuperLink, gateway and nodes by new ones for the same keys.

    Returns:
        The certificates of nodes, which have to be transferred to them and are not secret.

    Raises:
        RunError: the authority's key is missing, or a certificate is not of this authority.
    """
    authority = authority_of(deployment)
    for file in _certificates(deployment):
        try:
            write_atomically(file, authority.renewed(file.read_bytes()))
        except ValueError as error:
            raise RunError(
                f"{file} cannot be renewed",
                expected="a certificate of this deployment's authority",
                got=str(error),
                fix="restore it, or create a new deployment",
            ) from None
    hand_over(deployment)
    return [folder / CERTIFICATE for folder in deployment.node_folders()]


def days_to_end(deployment: Deployment) -> float:
    """Days until the first certificate of the deployment ends, the authority's included."""
    files = [deployment.authority, *_certificates(deployment)]
    return min(days_left(file.read_bytes()) for file in files)


def refuse_ended(deployment: Deployment) -> None:
    """Refuse a deployment that no node can connect to.

    Raises:
        RunError: a certificate has ended.
    """
    files = [deployment.authority, *_certificates(deployment)]
    ended = [file for file in files if days_left(file.read_bytes()) <= 0]
    if ended:
        raise RunError(
            f"the certificate {ended[0]} has ended",
            expected="certificates that are valid now",
            got=f"{len(ended)} ended, by this machine's clock",
            fix="create a new deployment"
            if ended[0] == deployment.authority
            else f"fedrec deploy renew {quote(str(deployment.path))}",
        )


def revoke(deployment: Deployment, name: str) -> Deployment:
    """The same deployment, which accepts the key of one node no more: it is not registered again,
    the gateway refuses it, and the others refuse its certificate once they have `revoked.txt`.

    The SuperLink removes it at the next `register_nodes`.

    Raises:
        RunError: there is no such node.
    """
    names = {deployment.node(number).name: number for number in deployment.numbers}
    gone = {deployment.node(number).name for number in deployment.settings.revoked}
    if name in gone:
        return deployment
    if name not in names:
        raise RunError(
            f"there is no node {name[:100]!r}",
            expected="the name of a node's folder",
            got=f"{len(names)} nodes",
            fix=did_you_mean(name, names),
        )
    folder = deployment.node(names[name])
    changed = deployment.changed(revoked=(*deployment.settings.revoked, names[name]))
    (folder / "node.pub").replace(folder / REVOKED_KEY)
    text = "".join(f"{one}\n" for one in sorted({*gone, name}))
    for place in (changed.path, *changed.node_folders()):
        write_atomically(place / REVOKED, text)
    hand_over(changed)
    return changed


def _certificates(deployment: Deployment) -> Iterator[Path]:
    yield from (deployment.server / f"{name}.crt" for name in ("superlink", "gateway"))
    found = (folder / CERTIFICATE for folder in deployment.node_folders())
    yield from (file for file in found if file.is_file())  # earlier versions made none
