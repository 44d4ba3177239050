# SPDX-License-Identifier: Apache-2.0
"""One layer of graph attention (Velickovic et al. 2018, equations 1 to 4, one head)."""

import torch
from torch import Tensor
from torch.nn import functional as F

_SLOPE = 0.2  # of the leaky ReLU, as in the paper


def attended(
    targets: Tensor,
    sources: Tensor,
    there: Tensor,
    weight: Tensor,
    of_source: Tensor,
    of_target: Tensor,
) -> Tensor:
    """The aggregated neighbours of each target.

        a_ij = softmax_j LeakyReLU(of_source . W s_ij + of_target . W t_i),    sum_j a_ij W s_ij

    Args:
        targets: `[..., n, d]`, of each graph.
        sources: `[..., n, k, d]`, up to k neighbours of each target.
        there: `bool [..., n, k]`, which of them are no padding.
        weight: W, `[..., d, o]`.
        of_source: `[..., o]`.
        of_target: `[..., o]`.

    Returns:
        `[..., n, o]`; zero for a target without neighbours.
    """
    flat = sources.flatten(-3, -2) @ weight
    each = sources.shape[:-1]  # a neighbour
    of_neighbours = (flat @ of_source.unsqueeze(-1)).view(each)
    fitting = F.leaky_relu(of_neighbours + targets @ (weight @ of_target.unsqueeze(-1)), _SLOPE)
    lowest = torch.finfo(fitting.dtype).min
    shares = torch.softmax(torch.where(there, fitting, lowest), dim=-1) * there
    return (shares.unsqueeze(-2) @ flat.view(*each, -1)).squeeze(-2)
