# SPDX-License-Identifier: Apache-2.0
"""Hooks of the whole test suite."""

import os

import pytest


def pytest_collection_modifyitems(items):
    """Tests on the raw data are skipped where these are not there."""
    if os.environ.get("FEDREC_DATA"):
        return
    for item in items:
        if item.get_closest_marker("real_data"):
            item.add_marker(pytest.mark.skip(reason="FEDREC_DATA is not set"))
