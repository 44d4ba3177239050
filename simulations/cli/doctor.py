# SPDX-License-Identifier: Apache-2.0
"""`fedrec doctor`: check the installation and the resources of this machine."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

Check = Callable[[], str]


class _FailedCheck(Exception):
    """A check that failed; its text states the fix."""


def doctor() -> None:
    """Check the installation; the exit status is 1 if a check fails."""
    ill = False
    for name, check in _checks():
        try:
            typer.echo(f"ok    {name}: {check()}")
        except Exception as error:
            ill = True
            typer.secho(f"WRONG {name}: {error}", fg=typer.colors.RED)
    raise typer.Exit(1 if ill else 0)


def _checks() -> Iterator[tuple[str, Check]]:
    yield "python", _python
    yield "our packages", _origins
    for package in ("flwr", "torch", "numpy", "numba", "pandas", "autodp", "ray", "pydantic"):
        yield package, lambda package=package: _version(package)
    yield "flower", _flower
    yield "devices", _devices
    yield "kernel", _kernel
    yield "shared memory", _shared_memory
    yield "data", _data
    yield "runs", _runs


def _python() -> str:
    return f"{sys.version.split()[0]} at {sys.executable}"


def _origins() -> str:
    """Four of the five package names are common words; another package of that name must not
    precede ours on the path."""
    from fedrec.errors import ROOT, require_own_packages

    require_own_packages()
    return f"all below {ROOT}"


def _version(package: str) -> str:
    from importlib.metadata import version

    importlib.import_module(package)
    return version(package)


def _flower() -> str:
    from simulations.engines.grid import TaskIdentity, identify_server

    identify_server()
    commands = Path(sys.executable).parent
    found = (commands / "flower-superlink").exists() or shutil.which("flower-superlink")
    if not found:
        raise _FailedCheck("flower-superlink is not there; pip install 'flwr[simulation]'")
    return f"messages can be made (run {TaskIdentity.run_id}), commands in {commands}"


def _devices() -> str:
    import torch

    cores = len(os.sched_getaffinity(0))
    cuda = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    return f"{cores} cores, {', '.join(cuda) or 'no CUDA device'}"


def _kernel() -> str:
    """The kernel is compiled on first use and then cached."""
    from fedrec.runtime.compilation import cache_folder, is_compiled

    folder = cache_folder()
    if is_compiled():
        return f"compiled, in {folder}"
    existing = next(parent for parent in folder.parents if parent.exists())
    if not os.access(existing, os.W_OK):
        raise _FailedCheck(
            f"{existing} is not writable, so each process compiles the kernel again (a minute); set"
            " FEDREC_CACHE"
        )
    return f"will be compiled once (a minute), into {folder}"


def _shared_memory() -> str:
    """Ray's object store needs space in /dev/shm."""
    if not Path("/dev/shm").exists():
        return "no /dev/shm; Ray will use files"
    free = shutil.disk_usage("/dev/shm").free / 2**20
    if free < 300:
        raise _FailedCheck(
            f"{free:.0f} MiB free in /dev/shm, expected 300; --engine serial does not need it"
        )
    return f"{free:.0f} MiB free in /dev/shm"


def _data() -> str:
    from fedrec.components.registry import DATASET, builtin_names
    from fedrec.data.reader import data_directory

    folder = data_directory()
    here = [name for name in builtin_names(DATASET) if (folder / name).exists()]
    return f"{folder}: {', '.join(here) or 'no datasets yet; the synthetic dataset needs no files'}"


def _runs() -> str:
    folder = Path(os.environ.get("FEDREC_RUNS", "runs"))
    existing = next(
        parent for parent in [folder.resolve(), *folder.resolve().parents] if parent.exists()
    )
    if not os.access(existing, os.W_OK):
        raise _FailedCheck(f"{existing} is not writable; set FEDREC_RUNS")
    free = shutil.disk_usage(existing).free / 2**30
    return f"{folder} ({free:.0f} GiB free)"
