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
from jax_privacy.matrix_factorization import buffered_toeplitz, sensitivity, toeplitz  # noqa: E402

FILE = Path(__file__).with_name("jax_privacy.json")
SCHEDULES = [(1, None), (4, None), (8, None), (8, 2), (13, 3), (48, None)]  # separation, most


def shown(values):
    return [float(value) for value in jnp.ravel(jnp.asarray(values))]


def strategy(coefficients, rounds):
    """Sensitivities of a Toeplitz matrix for all schedules, and its errors on prefix sums."""
    dense = toeplitz.materialize_lower_triangular(coefficients, rounds)
    found = {}
    for separation, most in SCHEDULES:
        if separation > rounds:
            continue
        squared = toeplitz.minsep_sensitivity_squared(coefficients, separation, most, n=rounds)
        found[f"{separation} {most}"] = float(squared) ** 0.5
        if separation >= len(coefficients):
            least = sensitivity.get_sensitivity_banded(dense, separation, most)
            found[f"banded {separation} {most}"] = float(least)
    return {
        "coefficients": shown(coefficients),
        "rounds": rounds,
        "sensitivities": found,
        "errors": shown(toeplitz.per_query_error(strategy_coef=coefficients, n=rounds)),
    }


def banded(rounds, bands):
    root = toeplitz.optimal_max_error_strategy_coefs(bands)
    best = toeplitz.optimize_banded_toeplitz(rounds, bands, max_optimizer_steps=5000)
    return {
        "bands": bands,
        "square root": strategy(root, rounds),
        "optimised": strategy(best / best[0], rounds),
    }


def buffered(rounds, separation, buffers):
    blt = buffered_toeplitz.optimize(
        n=rounds,
        min_sep=separation,
        max_participations=None,
        error="mean",
        min_buffers=buffers,
        max_buffers=buffers,
    )
    return {
        "separation": separation,
        "decays": shown(blt.buf_decay),
        "scales": shown(blt.output_scale),
        **strategy(blt.toeplitz_coefs(rounds), rounds),
    }


def main():
    """Write the file."""
    sizes = [(40, 1), (40, 8), (60, 48), (100, 13), (300, 48)]
    blts = [(60, 60, 2), (60, 48, 3), (300, 48, 3)]
    found = {
        "banded": [banded(*size) for size in sizes],
        "buffered": [buffered(*size) for size in blts],
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
