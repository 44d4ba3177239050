# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation data of centralised baselines: the same rows and lists as for the
federated systems."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from fedrec.baselines.base import Baseline, Histories, RatingBaseline, Ratings
from fedrec.components.errors import Unchanged, component_errors, refuse_wrong
from fedrec.components.registry import BASELINE, resolve
from fedrec.data.population import Population
from fedrec.errors import DataError
from fedrec.experiment.schema import Masked
from fedrec.metrics.beyond_accuracy import ListStatistics
from fedrec.metrics.ranking import ranking_metrics
from fedrec.metrics.reconstruction import reconstruction_metrics
from fedrec.metrics.sampled import sampled_metrics

_LOG = logging.getLogger("fedrec")

Progress = Callable[[int, int], None]
Settings = Mapping[str, Mapping[str, Any]]
_Masks = dict[str, torch.Tensor]
_MASK_BYTES = 2**29  # of all clients' masks, up to which they are made once for all baselines


def make_baseline(
    name: str,
    options: Mapping[str, Any],
    *,
    seed: int | None = None,
    device: torch.device | None = None,
) -> Baseline:
    """A baseline from its settings.

    Args:
        name: its name, or its label in the experiment, with the baseline's name in
            `options["name"]`.
        options: its settings.
        seed: of the experiment, for baselines without a seed of their own; None: 0.
        device: for baselines that use PyTorch; default: the CPU.

    Raises:
        ExperimentError: the name is unknown, or a setting is unknown or wrong.
    """
    options = dict(options)
    baseline_class = resolve(BASELINE, options.pop("name", name))
    settings = baseline_class.Config.parse(options, at=f"baselines.{name}")
    with component_errors(BASELINE.name, baseline_class, "when it was made"):
        baseline = baseline_class(settings if seed is None else settings.seeded(seed))
    if device is not None:
        baseline.device = device
    return baseline


def settings_that_fit(
    settings: Settings, num_users: int, num_items: int, say: Callable[[str], None]
) -> Settings:
    """Settings of the baselines that can handle data of this size, and of the replacements of those
    that cannot.

    Args:
        settings: of baselines, by label.
        num_users: number of training clients.
        num_items: size of the catalogue.
        say: called with a line for each baseline that is skipped, with the reason.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for label, options in settings.items():
        baseline = make_baseline(label, options)
        reason = baseline.too_large(num_users, num_items)
        if not reason:
            found[label] = options
            continue
        instead = baseline.stand_in
        say(
            f"baseline {label} is left out: {reason}"
            + (f"; {instead} stands in" if instead else "")
        )
        if instead and instead not in settings:
            found[instead] = {}
    return found


class RankingProtocol:
    """Ranking of the items of held-out clients; the same for every baseline.

    A baseline is fitted to the positive training rows of the training clients; the known items of a
    held-out client are the positives of its own training rows. A transductive one is also fitted to
    those of the held-out clients. A positive that occurs in several held-out rows counts that often
    in `hits@k` and `ndcg@k`.

    Args:
        population: the clients; its task is ranking.
        held_out: the part that is ranked.
        ks: lengths of the lists.
        clients: `int64 [clients]`, the held-out clients to evaluate; default: all.
        block: clients scored at a time; memory grows with block x items.
        protocol: `reconstruction` ranks the whole catalogue against the whole history instead.
        masked: which known items whole lists leave out, where training rows are perturbed.
        sampled: number of drawn items that each positive is also ranked among; None: none.

    Raises:
        DataError: no held-out row is positive.
    """

    def __init__(
        self,
        population: Population,
        *,
        held_out: Literal["test", "validation"],
        ks: tuple[int, ...],
        clients: np.ndarray | None = None,
        block: int = 256,
        protocol: Literal["reconstruction"] | None = None,
        masked: Masked = "real",
        sampled: int | None = None,
    ) -> None:
        self._sampled = sampled
        self.clients = population.evaluated_clients(held_out) if clients is None else clients
        if not len(self.clients):
            raise DataError(
                f"{population.interactions.name} has nothing to rank",
                expected=f"at least one positive {held_out} row",
                got="none",
                fix="hold out a larger share, or lower the rating above which a row is positive",
            )
        self._population = population
        self._ks = ks
        self._protocol = protocol
        self._held_out: Literal["test", "validation"] = held_out
        self._masked: Masked = masked
        self._blocks = [
            self.clients[start : start + block] for start in range(0, len(self.clients), block)
        ]
        self.training = _histories(population, population.partition.training_clients)
        self._masks: dict[int, _Masks] = {}
        masks = 1 if protocol is not None else 4
        self._keeps = masks * len(self.clients) * population.interactions.num_items <= _MASK_BYTES

    def fit(self, baseline: Baseline) -> None:
        """Fit a baseline to the training clients, a transductive one to all clients that it is to
        score as well."""
        given = self.training
        if baseline.transductive:
            given = _histories(
                self._population,
                np.union1d(self._population.partition.training_clients, self.clients),
            )
        with component_errors(BASELINE.name, baseline, "in fit"):
            untouched = Unchanged({"items": given.items, "offsets": given.offsets})
            baseline.fit(given)
            untouched.refuse(BASELINE.name, baseline, "in fit")

    def statistics(self) -> ListStatistics | None:
        """Empty statistics of whole lists; None for a protocol without lists."""
        if self._protocol is not None:
            return None
        likes = self.training.csr().sum(0) / max(self.training.num_users, 1)
        return ListStatistics(torch.from_numpy(likes), self._ks)

    def rank(
        self,
        baseline: Baseline,
        progress: Progress | None = None,
        statistics: ListStatistics | None = None,
    ) -> dict[str, torch.Tensor]:
        """Metrics of a fitted baseline, `float64 [clients]` each; NaN for a client without a
        held-out positive.

        Args:
            baseline: a fitted baseline.
            progress: called with (clients done, all clients) after every block.
            statistics: the lists are added to them.
        """
        tables = []
        done = 0
        for number, part in enumerate(self._blocks):
            liked = _histories(self._population, part)
            scores = _scores(baseline, liked)
            tables.append(self._metrics(number, scores))
            if statistics is not None:
                statistics.add(scores.cpu(), self._masks_of(number)["known"], liked.matrix() > 0)
            done += len(part)
            if progress is not None:
                progress(done, len(self.clients))
        return {
            metric: torch.cat([table[metric] for table in tables]).cpu() for metric in tables[0]
        }

    def measure(self, baseline: Baseline) -> dict[str, torch.Tensor]:
        """`fit` and `rank`."""
        self.fit(baseline)
        return self.rank(baseline)

    def _metrics(self, number: int, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        masks = self._masks_of(number)
        on_device = {name: mask.to(scores.device) for name, mask in masks.items()}
        if self._protocol is not None:
            return reconstruction_metrics(scores, on_device["history"], self._ks)
        found = ranking_metrics(scores, **on_device, ks=self._ks)
        if self._sampled is None:
            return found
        own = {
            name: mask
            for name, mask in on_device.items()
            if name in ("seen", "relevant", "weights")
        }
        return found | sampled_metrics(scores, **own, ks=self._ks, sampled=self._sampled)

    def _masks_of(self, number: int) -> _Masks:
        """Masks of a block, kept for the next baseline if memory allows."""
        if number in self._masks:
            return self._masks[number]
        clients = self._blocks[number]
        if self._protocol is not None:
            found: _Masks = {"history": torch.from_numpy(self._population.whole_history(clients))}
        else:
            lists = self._population.held_out(clients, self._held_out)
            found = {
                name: torch.from_numpy(getattr(lists, name))
                for name in ("seen", "known", "relevant")
            }
            found["masked"] = torch.from_numpy(lists.masked(self._masked))
            if lists.weight is not None:
                found["weights"] = torch.from_numpy(lists.weight)
        if self._keeps:
            self._masks[number] = found
        return found


class RatingProtocol:
    """The ratings of the held-out clients of a population; the same for every baseline.

    Args:
        population: the clients; its task is rating.
        held_out: the part that is predicted.
        clients: `int64 [clients]`, the held-out clients to evaluate; default: all.
    """

    def __init__(
        self,
        population: Population,
        *,
        held_out: Literal["test", "validation"],
        clients: np.ndarray | None = None,
    ) -> None:
        self.clients = population.evaluated_clients(held_out) if clients is None else clients
        self._training = _ratings(population, population.partition.training_clients)
        self._known = _ratings(population, self.clients)
        self._asked = population.held_out_rated(self.clients, held_out)

    def measure(self, baseline: RatingBaseline) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fit a baseline and predict: users, predicted and actual ratings of the held-out rows,
        `[rows]` each."""
        users, items, actual = self._asked
        with component_errors(BASELINE.name, baseline, "in fit_ratings"):
            baseline.fit_ratings(self._training)
        with component_errors(BASELINE.name, baseline, "in predict"):
            return users, baseline.predict(self._known, users, items), actual


def stated_privacy(label: str, baseline: Baseline) -> dict[str, float]:
    """Stated and exact privacy of a fitted baseline; the caveats are logged."""
    stated = baseline.stated()
    if stated is None:
        return {}
    for line in stated.lines():
        _LOG.warning("%s: %s", label, line)
    return {"nominal-epsilon": stated.nominal, "epsilon": stated.exact}


def _scores(baseline: Baseline, liked: Histories) -> torch.Tensor:
    """A baseline's scores of the catalogue for some users, `float32 [users, items]`."""
    untouched = Unchanged({"items": liked.items, "offsets": liked.offsets})
    with component_errors(BASELINE.name, baseline, "in scores"):
        scores = baseline.scores(liked)
        expected = (liked.num_users, liked.num_items)
        shape = tuple(getattr(scores, "shape", ()))
        if not isinstance(scores, torch.Tensor) or shape != expected:
            got = f"{type(scores).__name__} {list(shape)}"
            refuse_wrong(
                BASELINE.name, baseline, "in scores", expected=f"a tensor {list(expected)}", got=got
            )
        if bool(torch.isnan(scores).any()):
            refuse_wrong(BASELINE.name, baseline, "in scores", expected="numbers", got="NaN")
        untouched.refuse(BASELINE.name, baseline, "in scores")
    return scores


def _histories(population: Population, clients: np.ndarray) -> Histories:
    data = population.interactions
    low_rated = Histories(data.num_items, *population.low_rated(clients))
    features = data.user_features, data.item_features
    return Histories(data.num_items, *population.liked(clients), clients, *features, low_rated)


def _ratings(population: Population, clients: np.ndarray) -> Ratings:
    users, items, values = population.rated(clients)
    data = population.interactions
    return Ratings(data.num_users, data.num_items, users, items, values.astype(np.float64))
