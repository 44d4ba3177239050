# SPDX-License-Identifier: Apache-2.0
"""Selection of the protected interactions of a profile by the data budget (poster "targeted DP",
section 2).

The poster's argmax stands for the k largest values. Ties are broken at random, so that the order of
a dataset's rows does not decide.
"""

import math
from fractions import Fraction

import numpy as np


def protected_count(rows: int, budget: float) -> int:
    """`ceil((1 - beta) rows)`, with decimal arithmetic: 10 rows and .7 give 3, although 1 - .7 > .3
    in floats."""
    return math.ceil((1 - Fraction(str(budget))) * rows)


def most_stereotypical(scores: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """`int64 [count]`, ascending: places of the highest scores `float [rows]`."""
    order = np.lexsort((random.random(len(scores)), -scores))
    return np.sort(order[:count])


def at_random(rows: int, count: int, random: np.random.Generator) -> np.ndarray:
    """`int64 [count]`, ascending: places drawn uniformly without repetition."""
    return np.sort(random.choice(rows, size=count, replace=False))
