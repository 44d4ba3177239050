# SPDX-License-Identifier: Apache-2.0
"""Training a block of clients in native code, and whether that is possible."""

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedrec.kernel.compiled import cache_folder, is_compiled, usable
from fedrec.nn.layers import ItemFeature, KernelModel, Layer
from fedrec.protocol.updates import SparseAccumulator
from fedrec.training.arrays import ParameterLayout, check_block, dense_vectors, table_rows
from fedrec.training.block import Batches, Block
from fedrec.training.results import BlockUpdate
from fedrec.training.sgd import SgdSettings
from fedrec.training.steps import train_additive, train_clients


class Guidance(NamedTuple):
    """Targets that each step moves the rows of an item table towards, beside its gradient
    (GPFedRec).

    Attributes:
        share: of the way, in [0, 1); all touched rows go it in every step.
        rows: the targets, `[C, R, d]`.
    """

    share: float
    rows: Tensor


def train_block(
    model: KernelModel | None,
    start: Mapping[str, Tensor],
    block: Block,
    sgd: SgdSettings,
    client_params: Mapping[str, Tensor] | None = None,
    guidance: Guidance | None = None,
) -> BlockUpdate:
    """Train every client of a block on its batches.

    Args:
        model: the model, as it declares itself.
        start: the parameters that are trained, without cohort dimension; unchanged.
        block: the clients.
        sgd: settings of the gradient steps, plain ones.
        client_params: initial values that differ between clients, `[C, ...]` each, unchanged; of
            an item table the block's touched rows.
        guidance: what the rows of the item table are moved towards in each step.

    Raises:
        TypeError: the model declares no kernel.
        ValueError: parameters, codes and items do not match.
    """
    if model is None:
        raise TypeError("Expected a model that declares a kernel.")
    params = client_params or {}
    check_block(model, start, params, block)
    first = torch.zeros(len(block), 1, dtype=torch.int64)  # a table of one row
    users = [*(first for _ in model.user_rows), *(block.users if model.user_tables else ())]
    shapes = tuple((name, tuple(value.shape)) for name, value in start.items())
    layout = _layout(model, shapes, tuple(codes.shape[1] for codes in users))
    steps, last_epoch = (np.array(part, dtype=np.int64) for part in (block.steps, block.last_epoch))
    dense = dense_vectors(layout, start, params, len(block))
    names = (model.item_table, model.item_bias, model.product_table)
    tables = tuple(table_rows(start, params, name, block) for name in names)
    pulled = np.float32(0), tables[0][:, :0]
    if guidance is not None:
        pulled = np.float32(guidance.share), guidance.rows.contiguous().numpy()
    losses = np.full(len(block), np.nan)
    train_clients(
        layout.network,
        (layout.rates(sgd, late=False), layout.rates(sgd, late=True)),
        (block.items.numpy(), block.rows.numpy(), block.labels.numpy(), block.sizes.numpy()),
        steps,
        steps - last_epoch,
        last_epoch,
        np.arange(len(block), dtype=np.int64) * block.touched.shape[1],
        dense,
        tables,
        torch.cat([*users, first[:, :0]], 1).numpy(),
        pulled,
        losses,
    )
    values = {}
    for name, begin in layout.starts.items():  # in the memory of the clients' vectors
        columns = dense[:, begin : begin + start[name].numel()]
        values[name] = columns.reshape(len(block), *start[name].shape)
    values |= {name: table for name, table in zip(names, tables, strict=True) if name is not None}
    trained = {name: torch.from_numpy(value) for name, value in values.items()}
    return BlockUpdate.from_values(start, block, trained, model.item_tables, losses)


@functools.lru_cache(maxsize=16)  # of the models of a process, for all of their blocks
def _layout(
    model: KernelModel, shapes: tuple[tuple[str, tuple[int, ...]], ...], widths: tuple[int, ...]
) -> ParameterLayout:
    return ParameterLayout(model, dict(shapes), widths)


# Whether native code can train a model with given settings, and why not.

# categories of an item feature; a product with all rows of its table is taken in every step
_MOST_CATEGORIES = 1024


def device_refusal(device: torch.device) -> str | None:
    """Why native code cannot train clients on a device; None: it can."""
    return None if device.type == "cpu" else f"the kernel runs on the CPU, not on {device.type}"


def kernel_refusal(
    declared: KernelModel | None, sgd: SgdSettings, device: torch.device
) -> str | None:
    """Why native code cannot train a model, in a few words; None: it can.

    Args:
        declared: the model's declaration for native code, if there is one.
        sgd: settings of the gradient steps.
        device: where clients are trained.
    """
    elsewhere = device_refusal(device)
    if elsewhere is not None:
        return elsewhere
    if not sgd.plain:
        return "the kernel takes plain SGD, without a proximal term"
    if declared is None:
        return "the model declares no kernel"
    most = max((feature.categories for feature in declared.item_features), default=0)
    if most > _MOST_CATEGORIES:
        return f"an item feature has {most:,} categories, of {_MOST_CATEGORIES:,} at most"
    return None


# Compiles the kernels ahead of their first use: `python -m fedrec.training.kernel` compiles that of
# SGD.
#
# This takes half a minute to a minute, once per machine; otherwise the first training round takes
# that much longer. Other kernels are compiled before the first round of a run that needs them.


def compile_ahead(name: str) -> None:
    """Compile the kernel of this name for this process and others, or load it from the cache.

    Another process compiles it where the code can be cached: a process that has compiled functions
    may inline them otherwise than one that reads them from the cache, which changes the last digits
    of sums, and resumed runs and other nodes read them.
    """
    if usable(cache_folder()) and not is_compiled(name):
        search = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path])
        command = [sys.executable, "-P", "-m", "fedrec.training.kernel", name]
        subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": search},
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    compile_kernel(name)


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
    if name == "train_clients":
        trained = train_block(model, start, block, SgdSettings(0.1))
    else:  # FedRAP's, for items of two numbers; the weight is only summed
        values = {"weight": torch.zeros(2, 6, 1), "items": torch.zeros(*block.touched.shape, 2)}
        losses = np.full(2, np.nan)
        train_additive(
            (block.items.numpy(), block.rows.numpy(), block.labels.numpy(), block.sizes.numpy()),
            np.array(block.steps, dtype=np.int64),
            np.array(block.last_epoch, dtype=np.int64),
            (np.zeros((2, 2), dtype=np.float32), np.zeros(2, dtype=np.float32)),
            values["items"].numpy(),
            np.zeros((2, 3, 2), dtype=np.float32),
            np.zeros(3, dtype=np.float32),
            np.zeros(2, dtype=np.float32),
            losses,
        )
        trained = BlockUpdate.from_values(start, block, values, ("items",), losses)
    trained.norms()
    shares = torch.ones(2, dtype=torch.float64)
    weight = torch.zeros(6, 1, dtype=torch.float64)
    trained.add_to({"weight": weight, "items": SparseAccumulator((3, 2))}, shares)


if __name__ == "__main__":
    compile_kernel(*sys.argv[1:])
    print(f"compiled into {cache_folder()}")
