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

        a_ij = softmax_j LeakyReLU(of_source . W s_ij + of_target . W t_i),    W sum_j a_ij s_ij

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
    # products with W are of targets, not of their neighbours, which are several times as many
    ends = weight @ torch.stack([of_source, of_target], -1)
    of_neighbours = (sources.flatten(-3, -2) @ ends[..., :1]).view(sources.shape[:-1])
    fitting = F.leaky_relu(of_neighbours + targets @ ends[..., 1:], _SLOPE)
    lowest = torch.finfo(fitting.dtype).min
    shares = torch.softmax(torch.where(there, fitting, lowest), dim=-1) * there
    return (shares.unsqueeze(-1) * sources).sum(-2) @ weight
