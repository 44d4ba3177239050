# SPDX-License-Identifier: Apache-2.0
"""The two possible uploads of each canary, in a model's parameters.

A canary of sign +1 uploads `magnitude` times its vector `up`, one of sign -1 `magnitude` times
`down`; both have norm 1. It is observed along `(up - down) / |up - down|`, where after clipping the
two are as far apart as two clients can be: 2S, or sqrt(2) S where contributions never point in
opposite directions (`fedrec.privacy.adjacency`).

`signed`: a row of a trained parameter each, of the last rows, which nothing depends on
(`simulations.attacks.canaries.reserved`): `up = (1, ..., 1) / sqrt(d)` there, `down = -up`.
Directions are orthonormal, and no other client's update has a component along them. Every trained
parameter with such rows has canaries, so that one that is not clipped is found.

`rows`: two rows each, of which one gets the upload, among the last 2k rows of tables with one
number per item; these rows are of items that nobody has. So the other row is noise alone.

`products`: v v^T with v = (1, 1) / sqrt(2) or (1, -1) / sqrt(2) at a pair of items of its own.
Other clients have items of the pair, too; but all of them upload symmetric matrices, so that the
antisymmetric part of the sum is noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from fedrec.attacks.audit.canaries import CanaryPlan
from fedrec.errors import ExperimentError
from fedrec.rng import stream

Upload = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""For each parameter that it changes, places in the flat array, `int64 [n]`, and values there,
`float64 [n]`."""


@dataclass(frozen=True, eq=False)
class UploadPair:
    """The two possible uploads of a canary, of norm 1.

    Attributes:
        up: that of sign +1.
        down: that of sign -1.
    """

    up: Upload
    down: Upload


class Directions:
    """The uploads of all canaries.

    Args:
        plan: the canaries.
        room: number of each parameter's last rows that nothing depends on.
        shapes: shapes of all parameters.

    Attributes:
        pairs: the two uploads of each canary.
        groups: the parameter of each canary; "" for all if they are in the same.

    Raises:
        ExperimentError: no trained parameter has room for the canaries.
    """

    def __init__(
        self, plan: CanaryPlan, room: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.plan = plan
        self.signs = plan.signs()
        trained = {
            name: shape
            for name, shape in shapes.items()
            if any(fnmatchcase(name, pattern) for pattern in plan.parameters)
        }
        self.groups = [""] * plan.count
        if plan.kind == "signed":
            self.pairs = self._signed(trained, room)
        elif plan.kind == "rows":
            self.pairs = _rows(plan, trained)
        else:
            self._table = next((n for n, shape in trained.items() if _square(shape)), "")
            self.pairs = _products(plan, self._table, trained)
        if not self.pairs:
            raise _no_room(plan, trained)
        self._apart = 2.0 if plan.kind == "signed" else math.sqrt(2.0)

    def upload(self, client: int) -> Upload:
        """What a canary uploads, before it is clipped."""
        place = client - self.plan.first
        pair = self.pairs[place]
        return {
            name: (places, self.plan.magnitude * values)
            for name, (places, values) in (pair.up if self.signs[place] > 0 else pair.down).items()
        }

    def project(self, mean: Mapping[str, np.ndarray]) -> np.ndarray:
        """`float64 [k]`: a mean update along each canary's direction."""
        flat = {name: value.reshape(-1) for name, value in mean.items()}
        apart = [_along(flat, pair.up) - _along(flat, pair.down) for pair in self.pairs]
        return np.array(apart) / self._apart

    def quiet(self, mean: Mapping[str, np.ndarray]) -> np.ndarray:
        """`float64 [n]`: a mean update along orthonormal directions in which no client, canary or
        not, ever moves it; empty for updates of any sign, where absent canaries serve."""
        if self.plan.kind == "signed":
            return np.empty(0)
        if self.plan.kind == "products":
            table = mean[self._table].astype(np.float64)
            rows, columns = np.triu_indices(len(table), 1)
            return (table[rows, columns] - table[columns, rows]) / math.sqrt(2.0)
        flat = {name: value.reshape(-1) for name, value in mean.items()}
        unused = [
            pair.down if sign > 0 else pair.up
            for pair, sign in zip(self.pairs, self.signs, strict=True)
        ]
        return np.array([_along(flat, upload) for upload in unused])

    def _signed(
        self, trained: Mapping[str, tuple[int, ...]], room: Mapping[str, int]
    ) -> list[UploadPair]:
        """A row each: as many in every trained parameter, and the rest in the first."""
        count = self.plan.count
        names = [name for name in room if name in trained]
        if not names:
            return []
        own = {name: min(count // len(names), room[name]) for name in names}
        own[names[0]] += count - sum(own.values())
        if own[names[0]] > room[names[0]]:
            return []
        self.groups = [name for name in names for _ in range(own[name])]
        pairs = []
        for name in names:
            rows, *rest = trained[name]
            width = math.prod(rest)
            for row in range(rows - room[name], rows - room[name] + own[name]):
                places = row * width + np.arange(width)
                values = np.full(width, width**-0.5)
                pairs.append(UploadPair({name: (places, values)}, {name: (places, -values)}))
        return pairs


def _rows(plan: CanaryPlan, trained: Mapping[str, tuple[int, ...]]) -> list[UploadPair]:
    """Two of the last rows for each canary, in all tables with one number per item."""
    tables = [
        name for name, shape in trained.items() if shape[1:] == (1,) and shape[0] >= 2 * plan.count
    ]
    value = np.full(1, 1 / math.sqrt(max(len(tables), 1)))

    def at(back: int) -> Upload:
        return {name: (np.array([trained[name][0] - back]), value) for name in tables}

    return [UploadPair(at(2 * j + 2), at(2 * j + 1)) for j in range(plan.count)] if tables else []


def _products(
    plan: CanaryPlan, table: str, trained: Mapping[str, tuple[int, ...]]
) -> list[UploadPair]:
    """The products of a pair of items for each canary, if there are enough pairs."""
    size = trained[table][0] if table else 0
    firsts, seconds = np.triu_indices(size, 1)
    if len(firsts) < plan.count:
        return []
    drawn = stream(plan.seed, "canary-pairs").permutation(len(firsts))[: plan.count]
    pairs = []
    for one, other in zip(firsts[drawn].tolist(), seconds[drawn].tolist(), strict=True):
        places = np.array([(size + 1) * one, (size + 1) * other])
        places = np.append(places, [size * one + other, size * other + one])
        same = np.full(4, 0.5)
        opposite = np.array([0.5, 0.5, -0.5, -0.5])
        pairs.append(UploadPair({table: (places, same)}, {table: (places, opposite)}))
    return pairs


def _square(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] > 1


def _along(flat: Mapping[str, np.ndarray], upload: Upload) -> float:
    return float(
        sum(
            flat[name][places].astype(np.float64) @ values
            for name, (places, values) in upload.items()
        )
    )


def _no_room(plan: CanaryPlan, trained: Mapping[str, tuple[int, ...]]) -> ExperimentError:
    expected = {
        "signed": "a model with item tables (`item_tables`), and one of them trained",
        "rows": "a trained table with one number per item",
        "products": f"a trained matrix of products with {plan.count} pairs of items",
    }
    return ExperimentError(
        "this model has no room for canaries",
        expected=expected[plan.kind],
        got=", ".join(f"{name} {list(shape)}" for name, shape in trained.items()) or "none",
        fix="audit an experiment with such a model, for example privrec, or with fewer --canaries",
    )
