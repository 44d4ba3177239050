# SPDX-License-Identifier: Apache-2.0
"""Switches off telemetry and automatic installations of Flower and Ray, unless the user has set
them."""

from __future__ import annotations

from collections.abc import MutableMapping

_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def disable_telemetry(environment: MutableMapping[str, str]) -> None:
    """Set the switches that an environment does not set already."""
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)
