# SPDX-License-Identifier: Apache-2.0
"""The compose file of a deployment, and the user that its containers run as.

The user that the containers of a deployment run as, and the files that docker compose reads.

Containers run as the owner of the deployment folder, because only the owner can read its keys; and
never as root, which in a container is root of the machine. If root owns the folder, they run as
another user, who gets ownership of the files that containers open.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedrec.runtime.files import write_atomically
from simulations.deployment.layout import Deployment
from simulations.deployment.pki import write_private

COMPOSE_FILE = "docker-compose.yml"
CONTAINER_USER = 10001
"""User and group of containers if root owns the deployment; the image's own user."""


def container_user() -> tuple[int, int]:
    """User and group of the containers of a deployment that this process creates."""
    return (os.getuid(), os.getgid()) if os.getuid() else (CONTAINER_USER, CONTAINER_USER)


def write_compose(deployment: Deployment) -> None:
    """Copy the project's `docker-compose.yml` into the deployment folder, beside the `.env` that
    each command of docker compose reads there. An installation without it has no containers."""
    project = Path(__file__).resolve().parents[2]
    if not deployment.revoked.exists():  # docker would make a folder of it
        write_atomically(deployment.revoked, "")
    user, group = container_user()
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
