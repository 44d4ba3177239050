# SPDX-License-Identifier: Apache-2.0
"""Meta-learning of a block of clients in native code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from fedrec.kernel.products import product_by_address
from fedrec.nn.layers import KernelModel
from fedrec.training.arrays import BlockArrays
from fedrec.training.block import Block
from fedrec.training.results import Trained
from fedrec.training.second_order import move_by_meta_gradients
from fedrec.training.sgd import SgdSettings


def meta_learn_block(
    model: KernelModel,
    start: Mapping[str, Tensor],
    block: Block,
    sgd: SgdSettings,
    second: bool,
) -> Trained:
    """Move every client of a block by minus the gradient of its query's loss.

    Args:
        model: the model, as it declares itself, without a product of embeddings.
        start: the parameters that are trained, without cohort dimension; unchanged.
        block: the clients; the last step of each is its query, the others its support.
        sgd: settings of the steps on the support, plain ones.
        second: whether the gradient is by the parameters before these steps, otherwise by those
            after them.

    Raises:
        ValueError: parameters, codes and items do not match.
    """
    arrays = BlockArrays.of(model, start, block)
    layout = arrays.layout
    dense_rates = np.zeros(layout.size, dtype=np.float32)
    for name, place in layout.places.items():
        dense_rates[place : place + start[name].numel()] = sgd.rate(name)
    item_rate, bias_rate = (
        np.float32(0 if name is None else sgd.rate(name))
        for name in (model.item_table, model.item_bias)
    )
    losses = np.full(len(block), np.nan)
    move_by_meta_gradients(
        layout.network(),
        (dense_rates, item_rate, bias_rate),
        second,
        arrays.examples,
        arrays.steps,
        arrays.first_rows,
        arrays.dense,
        arrays.tables[:2],
        arrays.codes,
        product_by_address(),
        losses,
    )
    return arrays.trained(losses)
