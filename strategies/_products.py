# SPDX-License-Identifier: Apache-2.0
"""Strategies that compute a model from the sum of the clients' products of items (steps `gram` and
`transitions`).

A client's products of its own items with themselves are positive semi-definite, and so is a sum of
them. Without noise, a sum that is not holds what no honest client sends: EASE then has no solution,
or one of any size. The nearest positive semi-definite matrix takes its place, and a warning says
so.

The server needs only the sum, so secure aggregation can hide every client's products, and a single
Gaussian release makes the model private. Cohorts of several rounds are added up and scaled to the
whole population.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedrec.components import registry
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings
from fedrec.factors.chosen_items import BIAS, chosen_items, item_scale
from fedrec.factors.gram import is_semi_definite, noise_edge, semi_definite
from strategies.base import Aggregate, Cohorts, CohortStrategy

_LOG = logging.getLogger("fedrec")


@dataclass(frozen=True, eq=False)
class Products:
    """The sum of all clients' products, with noise where the run is private.

    Attributes:
        gram: of m items in their scale, `float64 [m, m]`; symmetric if the products are, and then
            positive semi-definite unless there is noise.
        chosen: the items of its rows, `int64 [m]`, ascending.
        scale: what each of them is multiplied by, > 0, `float64 [m]`.
        edge: largest singular value of its noise alone; 0 without noise.
    """

    gram: Tensor
    chosen: Tensor
    scale: Tensor
    edge: float


class ProductsStrategy(CohortStrategy):
    """Sums the clients' products; a subclass computes parameters from the sum.

    Attributes:
        products: name of the model's parameter as whose change products are sent.
        model: name of the model.
        sender: name of the step that sends them.
        symmetric: whether the products are.
    """

    products: ClassVar[str]
    model: ClassVar[str]
    sender: ClassVar[str] = "gram"
    symmetric: ClassVar[bool] = True

    def __init__(self, config: Config, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._total = np.zeros((0, 0))
        self._clients = 0.0
        self._variance = 0.0

    @abstractmethod
    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """The parameters that follow from the sum of the products, by name; the others stay.

        Args:
            theta: the present global parameters, unchanged.
            products: the sum of all rounds so far.
        """

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and a round's aggregate with at least
        one client."""
        self.refuse_misfits(theta)  # for loops that do not call it before the first round
        own = aggregate.total(theta)[self.products]
        self._total = own + self._total if self._total.size else own
        self._clients += aggregate.clients
        if self.privacy is not None:
            self._variance += (self.privacy.plan.mean_noise_std * aggregate.clients) ** 2
        return {**theta, **self.solved(theta, self._scaled(theta.get(BIAS)))}

    def refuse_misfits(self, theta: Mapping[str, np.ndarray]) -> None:
        """Refuse a model that is not computed from products of items."""
        if self.products not in theta:
            raise ExperimentError(
                f"the model has no products of items {self.products!r}",
                expected=f"model.name = {self.model!r} and step.name = {self.sender!r}",
                got=", ".join(theta),
                fix="set both, or another strategy",
            )

    def state(self) -> dict[str, np.ndarray]:
        """The sum so far, the number of clients in it, and the variance of its noise."""
        numbers = np.array([self._clients, self._variance])
        return {"total": self._total, "numbers": numbers}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._total = np.asarray(state["total"], dtype=np.float64)
        self._clients, self._variance = (float(number) for number in state["numbers"])

    def _scaled(self, bias: np.ndarray | None) -> Products:
        """The sum so far, scaled to all clients; noise is made symmetric. Without biases all items
        are chosen and count alike."""
        factor = len(self.cohorts.clients) / max(self._clients, 1.0)
        own = (self._total + self._total.T) / 2 if self.symmetric else self._total
        gram = torch.from_numpy(own * factor)
        biases = torch.zeros(len(gram)) if bias is None else torch.from_numpy(np.array(bias[:, 0]))
        chosen = chosen_items(biases, len(gram))
        scale = item_scale(biases[chosen], self._exponent())
        edge = noise_edge(factor * math.sqrt(self._variance), len(gram))
        edge *= 1.0 if self.symmetric else math.sqrt(2)  # noise of a half is in both halves
        if self.symmetric and edge == 0:
            gram = _honest(gram)
        return Products(gram, chosen, scale, edge)

    def _exponent(self) -> float:
        """By which the step scaled the items; a step without that setting counts all alike."""
        return getattr(component_settings(registry.STEP, Section(**self.step)), "exponent", 0.0)


def _honest(gram: Tensor) -> Tensor:
    """A symmetric sum `float64 [m, m]`, or the nearest that clients' products can have."""
    if is_semi_definite(gram):
        return gram
    _LOG.warning(
        "The sum of the clients' products is not positive semi-definite, which it is for any"
        " histories: a client sent something else. The nearest positive semi-definite matrix takes"
        " its place."
    )
    return semi_definite(gram)
