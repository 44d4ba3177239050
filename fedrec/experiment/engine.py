# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine, the table `[engine]` of an experiment."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from fedrec.config import Config

Precision: TypeAlias = Literal["float32", "bf16"]


class EngineConfig(Config):
    """Where the clients run. Only `precision` affects the results (up to the order of
    summation)."""

    name: Literal["serial", "ray", "flower"] = "serial"
    """`serial`: in this process; `ray`: Ray actors; `flower`: Flower's own simulation through
    `flwr run`."""
    nodes: int | None = Field(default=None, ge=1)
    """Number of nodes that host the clients; default: 1 for serial, one per core (or GPU)
    otherwise."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`."""
    precision: Precision = "float32"
    """Precision of matrix products in local training: `float32`, or `bf16` on CUDA; parameters and
    sums stay float32."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads per node; default: 1, because the batches of one client are too small for several
    threads. With centralised systems only, the default is one per core, at most OMP_NUM_THREADS."""
    path: Literal["auto", "kernel", "blocks", "reference"] = "auto"
    """Training path; results are equal up to rounding. `kernel`: native code, an error if step or
    model do not support it; `blocks`: many clients at once by autograd; `reference`: one client at
    a time; `auto`: the fastest supported path."""
    memory_gib: float = Field(default=1.0, gt=0)
    """Memory in GiB that a node may use for the clients that it trains at once."""
    ray_address: str | None = None
    """Address of a running Ray cluster; default: a local one is started."""
    timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for the replies of a round."""
    max_failures: float = Field(default=0.0, ge=0, le=1)
    """Largest tolerated share of failed replies in a round; beyond it the run stops with the first
    client error."""
