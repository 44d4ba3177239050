# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel ahead of its first use: `python -m fedrec.cohort.kernel.warm_up`.

This takes half a minute to a minute, once per machine; otherwise the first training round takes
that much longer.
"""

from __future__ import annotations

import numpy as np
import torch

from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.kernel.training import train_block
from fedrec.cohort.sgd import SgdSettings
from fedrec.nn.declaration import ItemFeature, KernelModel, Layer
from fedrec.protocol.sparse_update import SparseAccumulator
from fedrec.runtime.compiled_code import cache_folder


def compile_kernel() -> None:
    """Train two clients of a tiny model and sum their updates."""
    feature = ItemFeature("feature", np.zeros((3, 1), dtype=np.int64))
    model = KernelModel(
        (Layer("weight", "bias"),),
        "identity",
        "logistic",
        ("user",),
        "items",
        (feature,),
        "item.bias",
        ("offset",),
    )
    shapes = {"weight": (6, 1), "bias": (1,), "user": (2, 2), "items": (3, 2), "feature": (1, 2)}
    start = {
        name: torch.zeros(shape)
        for name, shape in {**shapes, "item.bias": (3, 1), "offset": (1,)}.items()
    }
    batches = Batches.cut([(np.arange(3), np.ones(3, dtype=np.float32))], 2)
    block = Block.of([(np.zeros(1, dtype=np.int64),)] * 2, [batches] * 2, torch.device("cpu"))
    trained = train_block(model, start, block, SgdSettings(0.1))
    shares = torch.ones(2, dtype=torch.float64)
    trained.add_dense({"weight": torch.zeros(6, 1, dtype=torch.float64)}, shares)
    trained.add_rows("items", SparseAccumulator((3, 2)), shares)


if __name__ == "__main__":
    compile_kernel()
    print(f"compiled into {cache_folder()}")
