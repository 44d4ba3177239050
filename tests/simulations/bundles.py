# SPDX-License-Identifier: Apache-2.0
"""Packages that tests install with pip, and app bundles that they give to `flwr run`."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from simulations.engines import flower

ROOT = Path(__file__).resolve().parents[2]


def install(target, folders):
    """Install packages into a folder with pip, without a network."""
    flags = "--no-deps --no-build-isolation --no-index --quiet --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "install", *flags.split(), "--target", str(target)]
    subprocess.run([*command, *map(str, folders)], check=True)


def flwr_command(app, folder, config, path=()):
    """`flwr run` of an app bundle on two SuperNodes, whose processes find fedrec, with a SuperLink
    of its own below `folder`; the finished process."""
    port = flower._free_port()
    environment = flower._environment(folder / "home", port)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *path])
    sizes = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=2"
    command = [flower.script("flwr"), "run", str(app), "fedrec", "--stream", "-c", config]
    with flower._superlink(SimpleNamespace(path=folder), environment, port):
        return subprocess.run(
            [*command, "--federation-config", sizes],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
