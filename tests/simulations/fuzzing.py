# SPDX-License-Identifier: Apache-2.0
"""Number of inputs of a fuzz test, and what such a test accepts as an answer."""

import os

from hypothesis import HealthCheck, settings

from fedrec.errors import FedrecError

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


def told(action, *arguments):
    """What an action gives, or the error that tells a user what to fix."""
    try:
        return action(*arguments)
    except FedrecError as error:
        return str(error)
