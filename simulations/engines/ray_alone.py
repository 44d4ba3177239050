# SPDX-License-Identifier: Apache-2.0
"""Restricts a local Ray to its user: it listens on loopback, and its processes authenticate by a
token. It collects no metrics, and its nodes have this process's priority.

By default Ray listens on all interfaces without authentication: anyone who reaches its port can run
code as the user who started it. The token is only in the environment of Ray's processes, which
other users cannot read. These settings apply to a local Ray only; a cluster is joined with the
user's settings.
"""

from __future__ import annotations

import functools
import importlib
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_METRICS = "RAY_enable_metrics_collection"
_NICENESS = "RAY_worker_niceness"
_TOKEN_BYTES = 32


@functools.cache
def _token() -> str:
    """The token of this process: Ray reads it once, so a second local Ray must use that of the
    first."""
    return secrets.token_hex(_TOKEN_BYTES)


def settings_of_a_local_ray() -> dict[str, str]:
    """Environment variables of Ray's processes."""
    return {
        # without clusters Ray takes 127.0.0.1 for the machine's address, on Linux too
        _LOOPBACK: "0",
        _MODE: "token",
        _TOKEN: _token(),
        _METRICS: "0",  # which it would offer at a port
        # by default other processes come before the nodes, and a round waits for the last node
        _NICENESS: "0",
    }


@contextmanager
def alone() -> Iterator[None]:
    """The environment in which a local Ray is started, used and stopped; the user's own settings
    are kept."""
    before = dict(os.environ)
    given = _MODE in before or _TOKEN in before
    settings = settings_of_a_local_ray()
    for name, value in settings.items():
        if not given or name not in (_MODE, _TOKEN):
            os.environ.setdefault(name, value)
    _authentication_is_read_again()
    try:
        with _seen_by_ray():
            yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        _authentication_is_read_again()


@contextmanager
def _seen_by_ray() -> Iterator[None]:
    """Ray reads its address when it is imported, which may have happened before."""
    constants: Any = sys.modules.get("ray._private.ray_constants")
    if constants is None or os.environ[_LOOPBACK] != "0":
        yield
        return
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _authentication_is_read_again() -> None:
    """Make Ray read its authentication mode and token from the environment.

    It reads them when it is imported, which may have happened before. If it then starts a local Ray
    that requires a token, it cannot connect to it. A Ray that runs keeps what it has.
    """
    raylet: Any = sys.modules.get("ray._raylet")
    if raylet is None or sys.modules["ray"].is_initialized():
        return
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")


def has_token() -> bool:
    """Whether this process's Ray authenticates by a token."""
    raylet: Any = importlib.import_module("ray._raylet")
    return raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN
