# SPDX-License-Identifier: Apache-2.0
"""Writes `jax_privacy.json`, the figures of jax-privacy 2.0.0 that the tests compare with.

It needs JAX, so it runs in an environment of its own:

    python -m venv /tmp/jaxprivacy && /tmp/jaxprivacy/bin/pip install jax-privacy==2.0.0
    /tmp/jaxprivacy/bin/python tests/fedrec/privacy/factorisation/write_jax_privacy.py
"""

import json
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
from jax_privacy.matrix_factorization import sensitivity, toeplitz  # noqa: E402

FILE = Path(__file__).with_name("jax_privacy.json")
SCHEDULES = [(1, None), (4, None), (8, None), (8, 2), (13, 3), (48, None)]  # separation, most


def figures(rounds, bands):
    """Sensitivities of the square root with that many bands, for all schedules."""
    coefficients = toeplitz.optimal_max_error_strategy_coefs(bands)
    dense = toeplitz.materialize_lower_triangular(coefficients, rounds)
    found = {}
    for separation, most in SCHEDULES:
        if separation > rounds:
            continue
        squared = toeplitz.minsep_sensitivity_squared(coefficients, separation, most, n=rounds)
        found[f"{separation} {most}"] = float(squared) ** 0.5
        if separation >= bands:
            least = sensitivity.get_sensitivity_banded(dense, separation, most)
            found[f"banded {separation} {most}"] = float(least)
    values = [float(value) for value in jnp.ravel(coefficients)]
    return {"bands": bands, "coefficients": values, "rounds": rounds, "sensitivities": found}


if __name__ == "__main__":
    sizes = [(40, 1), (40, 8), (60, 48), (100, 13), (300, 48)]
    table = [figures(*size) for size in sizes]
    FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
