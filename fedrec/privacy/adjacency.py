# SPDX-License-Identifier: Apache-2.0
"""Adjacency of datasets, and the sensitivity of a sum of clipped updates.

`replace-one`: all data of one client are replaced by another client's; the number of clients is
fixed. The sum moves by up to 2S, the diameter of the ball that updates are clipped to (PrivRec
definition 1, theorem 1). `add-remove`: one client more or less; the sum moves by up to S.
`fedrec.privacy.clipping.Clip.sensitivity` is the only place where a clip norm becomes a
sensitivity.

The papers write z for both noise/2S and noise/S. The factor of two is a factor of four in Rényi
divergence, so a plan keeps noise/S and divides it by the sensitivity under its adjacency.

For contributions that never point in opposite directions, 2S is too large. Let a and b be the
contributions of two users, both of L2 norm at most S. Replacing one by the other changes the sum by
|a - b|, and

    |a - b|^2 = |a|^2 + |b|^2 - 2 <a, b> <= 2 S^2    whenever <a, b> >= 0,

so the sensitivity under replace-one is sqrt(2) S. The inner product of any two contributions is
non-negative when

* all are vectors without a negative coordinate (counts),
* all are such vectors rotated by the same angle, which changes no length and no inner product:
  ratings mapped to [-1, 1], each with a 1 beside it, are sqrt(2) times the rotated pairs ((1 + r) /
  2, (1 - r) / 2), or
* all are positive semi-definite matrices with the Frobenius norm, where
  <A, B> = trace(A B) = |A^(1/2) B^(1/2)|^2 >= 0.

Clipping multiplies by a number >= 0, and a failed client counts as zero, so these properties are
preserved. The bound is reached by two users without a common item. It does not hold for signed
vectors such as gradients and model updates, where b = -a is possible; nor in the L1 norm, in which
two users without a common item are 2S apart; and add-remove gains nothing, as |a - 0| = S already.
"""

from __future__ import annotations

from typing import Literal

Adjacency = Literal["replace-one", "add-remove"]
Contributions = Literal["signed", "non-negative"]
"""`non-negative`: all vectors without a negative coordinate, or rotated from such, or all positive
semi-definite matrices; `signed`: anything."""
