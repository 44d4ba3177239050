# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel of SGD ahead of its first use: `python -m fedrec.training.warm_up`.

This takes half a minute to a minute, once per machine; otherwise the first training round takes
that much longer. Other kernels, of which `Step.kernels` names those that a step calls, are compiled
before the first round of a run that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from fedrec.nn.layers import ItemFeature, KernelModel, Layer
from fedrec.protocol.updates import SparseAccumulator
from fedrec.runtime.compilation import cache_folder
from fedrec.training.block import Batches, Block
from fedrec.training.kernel import train_block
from fedrec.training.meta_learning import meta_learn_block
from fedrec.training.results import Trained
from fedrec.training.sgd import SgdSettings
from fedrec.training.steps import train_additive

_SGD = SgdSettings(0.1)


def compile_kernel(name: str = "train_clients") -> None:
    """Train two clients of a tiny model by the kernel of this name, and sum their updates."""
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
    trained = _KERNELS[name](model, start, block)
    shares = torch.ones(2, dtype=torch.float64)
    trained.add_dense({"weight": torch.zeros(6, 1, dtype=torch.float64)}, shares)
    trained.add_rows("items", SparseAccumulator((3, 2)), shares)


def _by_sgd(model: KernelModel, start: Mapping[str, Tensor], block: Block) -> Trained:
    return train_block(model, start, block, _SGD)


def _by_meta_gradients(model: KernelModel, start: Mapping[str, Tensor], block: Block) -> Trained:
    return meta_learn_block(model, start, block, _SGD, second=True)


def _by_additive_parts(model: KernelModel, start: Mapping[str, Tensor], block: Block) -> Trained:
    """By FedRAP's kernel, of items of two numbers; the model's weight is there to be summed."""
    values = {"weight": torch.zeros(2, 6, 1), "items": torch.zeros(*block.touched.shape, 2)}
    losses = np.full(2, np.nan)
    train_additive(
        (block.items.numpy(), block.places.numpy(), block.labels.numpy(), block.sizes.numpy()),
        np.array(block.steps, dtype=np.int64),
        np.array(block.last_epoch, dtype=np.int64),
        (np.zeros((2, 2), dtype=np.float32), np.zeros(2, dtype=np.float32)),
        values["items"].numpy(),
        np.zeros((2, 3, 2), dtype=np.float32),
        np.zeros(3, dtype=np.float32),
        np.zeros(2, dtype=np.float32),
        losses,
    )
    return Trained(start, block, values, ("items",), torch.ones(2), losses)


_KERNELS: Mapping[str, Callable[[KernelModel, Mapping[str, Tensor], Block], Trained]] = {
    "train_clients": _by_sgd,
    "move_by_meta_gradients": _by_meta_gradients,
    "train_additive": _by_additive_parts,
}


if __name__ == "__main__":
    compile_kernel()
    print(f"compiled into {cache_folder()}")
