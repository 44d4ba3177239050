# SPDX-License-Identifier: Apache-2.0
"""Packages that tests install with pip, app bundles that they give to `flwr run`, inputs of fuzz
tests and what these accept as an answer, addresses that processes listen on, and experiments whose
systems are attacked or audited."""

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


# Addresses that processes listen on, by Linux's `/proc`.


def listening_below(pid):
    """Addresses that a process and its descendants listen on: those of loopback, and all others,
    as in `/proc/net/tcp`."""
    group = {pid}
    while (
        more := {
            int(file.parent.name)
            for file in Path("/proc").glob("[0-9]*/stat")
            if parent_of(file) in group
        }
        - group
    ):
        group |= more
    found = {row for one in group for row in _listening(one)}
    own = {row for row in found if row.endswith("0100007F")}  # 127.0.0.1; zeros are all
    return own, found - own


def parent_of(file):
    """The parent of a process, by its `stat`."""
    try:
        return int(file.read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def _listening(pid):
    sockets = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    except OSError:
        return
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                yield local.partition(":")[0]


# Experiments on synthetic data.


def synthetic(users, items, mean, **more):
    """The section of a synthetic dataset."""
    return {"name": "synthetic", "users": users, "items": items, "mean-interactions": mean, **more}


def experiment_on(dataset, nodes=1, **sections):
    """The table of an experiment in one process, with few metrics."""
    return {
        "positive-above": 3.0,
        "dataset": dataset,
        "evaluation": {"ks": [5], "baselines": []},
        "engine": {"name": "serial", "nodes": nodes, "threads": 1, "device": "cpu"},
        **sections,
    }
