# SPDX-License-Identifier: Apache-2.0
"""The user that the containers of a deployment run as, and the files that docker compose reads.

Containers run as the owner of the deployment folder, because only the owner can read its keys; and
never as root, which in a container is root of the machine. If root owns the folder, they run as
another user, who gets ownership of the files that containers open.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedrec.runtime.atomic_files import write_atomically
from simulations.deployment.compose import ELSEWHERE, compose
from simulations.deployment.layout import Deployment, refuse_unwritable
from simulations.deployment.pki.keys import private_folder, write_private

CONTAINER_USER = 10001
"""User and group of containers if root owns the deployment; the image's own user."""


def container_user() -> tuple[int, int]:
    """User and group of the containers of a deployment that this process creates."""
    return (os.getuid(), os.getgid()) if os.getuid() else (CONTAINER_USER, CONTAINER_USER)


def write_compose(deployment: Deployment, place: Path | None = None) -> Path:
    """Write `docker-compose.yml`, and the `.env` that each command of docker compose reads.

    Args:
        deployment: the deployment.
        place: folder of the two files; default: the deployment folder.

    Returns:
        The compose file.

    Raises:
        RunError: the files cannot hold the folder's path.
    """
    project = Path(__file__).resolve().parents[2]
    folder = deployment.path if place is None else place.expanduser().resolve()
    refuse_unwritable(folder)
    if not folder.exists():
        private_folder(folder)
    mounted = "." if folder == deployment.path else ELSEWHERE
    text = compose(
        deployment.settings.nodes,
        bind=deployment.settings.bind,
        port=deployment.settings.port,
        build=str(project),
        deployment=mounted,
        revoked=deployment.settings.revoked,
    )
    if not deployment.revoked.exists():  # docker would make a folder of it
        write_atomically(deployment.revoked, "")
    user, group = container_user()
    lines = (f"FEDREC_UID={user}", f"FEDREC_GID={group}", f"FEDREC_DEPLOYMENT='{deployment.path}'")
    write_atomically(folder / "docker-compose.yml", text)
    write_private(folder / ".env", "\n".join(lines) + "\n")
    hand_over(deployment)
    return folder / "docker-compose.yml"


def hand_over(deployment: Deployment) -> None:
    """Change the owner of the files that containers open, if root owns them; not of the authority's
    key."""
    user, group = container_user()
    if user == os.getuid():
        return
    kept = deployment.authority_key.parent
    for folder, _, files in os.walk(deployment.path):
        if Path(folder) == kept:
            continue
        for name in (".", *files):
            os.chown(Path(folder) / name, user, group, follow_symlinks=False)
