# SPDX-License-Identifier: Apache-2.0
"""`fedrec doctor`: check the installation and the machine's resources. Each check has its own
imports, so that one failure does not hide other results."""

import importlib
import os
import sys
from importlib.metadata import version

import typer

import fedrec
from fedrec.errors import ROOT

PACKAGES = ("flwr", "torch", "numpy", "numba", "pandas", "autodp", "ray", "pydantic")


def doctor() -> None:
    """Check the installation; the exit status is 1 if a check fails."""
    typer.echo(f"fedrec {fedrec.__version__} in {ROOT}, Python {sys.version}, {sys.executable}")
    failed = False
    checks = {package: lambda package=package: _version(package) for package in PACKAGES}
    for name, check in {**checks, **_CHECKS}.items():
        try:
            typer.echo(f"ok    {name}: {check()}")
        except Exception as error:
            failed = True
            typer.secho(f"WRONG {name}: {error}", fg=typer.colors.RED)
    raise typer.Exit(1 if failed else 0)


def _version(package: str) -> str:
    importlib.import_module(package)
    return version(package)


def _flower() -> str:
    from simulations.engines.grid import TaskIdentity, identify_server
    from simulations.flower_commands import script

    identify_server()
    return f"messages work (run {TaskIdentity.run_id}), commands as {script('flwr')}"


def _devices() -> str:
    import torch

    cores = len(os.sched_getaffinity(0))
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{cores} cores, {', '.join(cuda) or 'no CUDA device'}"


def _kernel() -> str:
    """Check the kernel, which is compiled on first use and then cached."""
    from fedrec.kernel.compiled import cache_folder, is_compiled

    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if is_compiled():
        return f"compiled, cached in {folder}"
    if not os.access(existing, os.W_OK):
        raise OSError(f"{existing} is not writable, so each process recompiles it: FEDREC_CACHE")
    return f"will be compiled once (a minute), into {folder}"


_CHECKS = {"flower": _flower, "devices": _devices, "kernel": _kernel}
