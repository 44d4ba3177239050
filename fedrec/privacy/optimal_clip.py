# SPDX-License-Identifier: Apache-2.0
"""DP-VAE's "optimal" clip norm of one user's gradients (Fang et al. 2022, equation 20 and algorithm
2).

    H(S) = l sqrt(2/pi) (sigma / S) S
           + 1/J sum_j [ |g~ - g-_j| + |g_j| / ||g_j|| * max(0, ||g_j|| - S) ]

with |.| the L1 and ||.|| the L2 norm, l the number of coordinates, g-_j the clipped gradients and
g~ their mean. The first term is the expected L1 norm of the noise. S is sought among the norms of
the gradients by bisection.

The choice is made for utility and is not private: S is computed from the user's gradients, and the
noise, which is proportional to it, reveals S (in l = 275,802 coordinates to 0.13 per cent). A
release whose variance depends on the data has no finite epsilon. It is also trivial: one unit of S
costs l sqrt(2/pi) sigma/S in noise, and saves at most about sqrt(l) in clipping, so that the
smallest norm wins unless l is tiny.

Where this differs from the paper: algorithm 2 compares three neighbours even in a list of one or
two norms; here only norms that exist are compared.
"""

import math

import torch
from torch import Tensor


def _clip_error(
    bound: float,
    gradients: Tensor,
    noise_multiplier: float,
    counts: Tensor | None = None,
    coordinates: int | None = None,
) -> float:
    """Error H(S) of a clip norm S.

    Args:
        bound: S, >= 0.
        gradients: `float [J, m]`; whole, or with columns for several coordinates, see `counts`.
        noise_multiplier: sigma / S of the user's noise.
        counts: `float [2, m]`, how much each column counts in squared L2 norms and in L1 norms;
            None: once.
        coordinates: l; None: m.
    """
    norms = _gradient_norms(gradients, counts)
    lengths = torch.ones_like(gradients[0]) if counts is None else counts[1]
    clipped = gradients * (bound / norms.clamp(min=1e-30)).clamp(max=1)[:, None]
    spread = ((clipped.mean(0) - clipped).abs() * lengths).sum(1)
    lost = (
        (gradients.abs() * lengths).sum(1) / norms.clamp(min=1e-30) * (norms - bound).clamp(min=0)
    )
    noise = (coordinates or gradients.shape[1]) * math.sqrt(2 / math.pi) * noise_multiplier * bound
    return noise + float((spread + lost).mean())


def _gradient_norms(gradients: Tensor, counts: Tensor | None = None) -> Tensor:
    """L2 norm of each gradient, `[J]`; see `_clip_error`."""
    return (
        gradients.norm(dim=1) if counts is None else (gradients.square() * counts[0]).sum(1).sqrt()
    )


def noise_decides(noise_multiplier: float, coordinates: int) -> bool:
    """True if H(S) increases everywhere, so that algorithm 2 returns the smallest norm, whatever
    the gradients.

    One unit of S adds l sqrt(2/pi) sigma/S to the first term. A clipped gradient moves by a vector
    of L2 norm 1, hence of L1 norm sqrt(l) at most, so each of |g~ - g-_j| falls by 2 sqrt(l) at
    most, and what clipping loses by sqrt(l).

    Args:
        noise_multiplier: sigma / S.
        coordinates: l.
    """
    return coordinates * math.sqrt(2 / math.pi) * noise_multiplier >= 3 * math.sqrt(coordinates)


def optimal_clip(
    gradients: Tensor,
    noise_multiplier: float,
    counts: Tensor | None = None,
    coordinates: int | None = None,
) -> float:
    """Clip norm by algorithm 2 for gradients `[n, l]`; arguments as in `_clip_error`."""
    norms = sorted(_gradient_norms(gradients, counts).tolist(), reverse=True)

    def error(index: int) -> float:
        return _clip_error(norms[index], gradients, noise_multiplier, counts, coordinates)

    first = 0
    last = len(norms)  # positions first to last - 1 are left
    while last - first > 2:
        middle = first + (last - first) // 2
        left = error(middle - 1)
        here = error(middle)
        right = error(middle + 1) if middle + 1 < last else math.inf
        if here <= left and here <= right:
            return norms[middle]
        first, last = (middle + 1, last) if right <= here <= left else (first, middle)
    return norms[min(range(first, last), key=error)]
