# SPDX-License-Identifier: Apache-2.0
"""Flower's commands in this process: the console scripts that its package declares."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distribution


def load(name: str) -> Callable[[], None]:
    """The function of one of Flower's commands, such as `flower-superlink`."""
    return distribution("flwr").entry_points.select(name=name)[name].load()


def run(name: str, arguments: Sequence[str]) -> None:
    """Run a command with arguments, as a terminal would."""
    command = load(name)
    sys.argv = [name, *arguments]
    command()
