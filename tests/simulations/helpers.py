# SPDX-License-Identifier: Apache-2.0
"""Packages that tests install with pip, app bundles that they give to `flwr run`, the number of
inputs of a fuzz test, and what it accepts as an answer."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fedrec.errors import FedrecError
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


TIMES = float(os.environ.get("FEDREC_FUZZ", "1"))
"""`FEDREC_FUZZ=10` tries ten times as many inputs, `FEDREC_FUZZ=.1` a tenth."""


def fuzzed(count):
    """Settings of a fuzz test with so many inputs, the same ones in every run."""
    return settings(
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=max(1, round(count * TIMES)),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.data_too_large,
        ],
    )


BYTES = st.binary(max_size=9)


def spliced(draw, content, new=BYTES):
    """The content with some bytes replaced, removed or inserted."""
    place = draw(st.integers(0, len(content)))
    return content[:place] + draw(new) + content[place + draw(st.integers(0, 9)) :]


def told(action, *arguments):
    """What an action gives, or the error that tells a user what to fix."""
    try:
        return action(*arguments)
    except FedrecError as error:
        return str(error)
