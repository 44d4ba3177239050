# SPDX-License-Identifier: Apache-2.0
"""Evaluation of centralised systems on the same rows and lists as federated ones."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedrec.baselines.base import Baseline, Histories, RatingBaseline, Ratings, TooLarge
from fedrec.components.registry import BASELINE, resolve
from fedrec.components.sections import component_errors, refuse_wrong
from fedrec.data.interactions import no_times
from fedrec.data.population import Population
from fedrec.errors import DataError
from fedrec.evaluation.tables import Evaluated, HeldOutLists, Metrics, user_groups
from fedrec.experiment.schema import EvaluationConfig
from fedrec.metrics.base import RatedBlock

_LOG = logging.getLogger("fedrec")
Names = Sequence[str] | Mapping[str, Mapping[str, Any]]
Progress = Callable[[int, int], None]
_CLIENTS_AT_ONCE = 256  # scored at a time; memory grows with it times the items


class CentralEvaluation:
    """Fits centralised systems to the training clients and evaluates them on held-out rows.

    Like the federated systems, they learn from perturbed rows if devices do, and are tested on real
    ones. A baseline that ranks is fitted to the positive training rows of the training clients; the
    known items of a held-out client are the positives of its own training rows. A transductive one
    is also fitted to those of the held-out clients.

    Args:
        population: the clients.
        settings: `[evaluation]` of the experiment.
        clients: `int64 [clients]`, the held-out clients to evaluate; default: all.

    Attributes:
        metrics: metrics of the experiment.
        clients: the evaluated clients.

    Raises:
        DataError: there are no held-out rows.
    """

    def __init__(
        self,
        population: Population,
        settings: EvaluationConfig,
        *,
        clients: np.ndarray | None = None,
    ) -> None:
        held_out = settings.held_out
        self.metrics = Metrics(population.task, settings)
        self.clients = population.evaluated_clients(held_out) if clients is None else clients
        if not len(self.clients):
            raise DataError(
                f"no user of {population.interactions.name} has a positive item to rank",
                expected=f"at least one positive {held_out} row",
                got="none",
                fix="hold out a larger share (split.validation-role = 'held-out' for validation"
                " users), or lower the rating above which a row is positive",
            )
        self._population = population
        self._settings = settings
        self._lists = HeldOutLists(population, self.metrics, settings)

    def takes(self, baseline: Baseline) -> bool:
        """True if a baseline supports this task."""
        return self._population.task == "ranking" or isinstance(baseline, RatingBaseline)

    def fit(self, baseline: Baseline) -> None:
        """Fit a baseline to the training clients; a transductive one also to the evaluated clients.

        Raises:
            DataError: the baseline needs the order of items, and the data have no times.
            TooLarge: the data are too large for the baseline.
        """
        if baseline.ordered and self._population.interactions.times is None:
            name = self._population.interactions.name
            raise no_times(name, f"has no order of items, which {type(baseline).__name__} needs")
        clients = self._population.partition.training_clients
        if self._population.task == "rating" and isinstance(baseline, RatingBaseline):
            with component_errors(BASELINE.name, baseline, "in fit_ratings"):
                baseline.fit_ratings(_ratings(self._population, clients))
            return
        if baseline.transductive:
            clients = np.union1d(clients, self.clients)
        histories = _histories(self._population, clients, baseline.ordered)
        with component_errors(BASELINE.name, baseline, "in fit"):
            baseline.fit(histories)

    def evaluate(self, baseline: Baseline, progress: Progress | None = None) -> Evaluated:
        """Metrics of a fitted baseline, for each user and group of users and of all lists.

        Args:
            baseline: a fitted baseline.
            progress: called with (clients done, all clients) after every block.
        """
        if isinstance(baseline, RatingBaseline):
            evaluated = self._predicted(baseline)
        else:
            evaluated = self._ranked(baseline, progress)
        counts = self._population.counts(self.clients, "known")
        return evaluated.with_groups(
            user_groups(self._population.interactions, self.clients, counts)
        )

    def measure(self, baseline: Baseline) -> Evaluated:
        """Fit and evaluate a baseline."""
        self.fit(baseline)
        return self.evaluate(baseline)

    def _ranked(self, baseline: Baseline, progress: Progress | None) -> Evaluated:
        blocks = []
        for start in range(0, len(self.clients), _CLIENTS_AT_ONCE):
            clients = self.clients[start : start + _CLIENTS_AT_ONCE]
            scores = _scores(baseline, _histories(self._population, clients, baseline.ordered))
            blocks.append(self._lists.measure(clients, scores, sums=True))
            if progress is not None:
                progress(start + len(clients), len(self.clients))
        return Evaluated.joined(blocks)

    def _predicted(self, baseline: RatingBaseline) -> Evaluated:
        rows = self._population.rows(self.clients, self._settings.held_out)
        with component_errors(BASELINE.name, baseline, "in predict"):
            known = _ratings(self._population, self.clients)
            predicted = baseline.predict(known, rows.ids, rows.items)
            targets = self._predicted_targets(baseline, known)
        block = RatedBlock(predicted, rows.labels, rows.owner, len(self.clients), targets)
        return Evaluated(self.clients, self.metrics.of_ratings(block))

    def _predicted_targets(self, baseline: RatingBaseline, known: Ratings) -> np.ndarray | None:
        """Predicted ratings of an adversary's targets, `float [clients, targets]`, NaN for those
        that a client has rated; None without an adversary."""
        unrated = self._population.unrated_targets(self.clients)
        if unrated is None or self._population.adversary is None:
            return None
        users = np.repeat(self.clients, unrated.shape[1])
        items = np.tile(self._population.adversary.targets, len(self.clients))
        predicted = np.asarray(baseline.predict(known, users, items)).reshape(unrated.shape)
        return np.where(unrated, predicted, np.nan)


def evaluate_baselines(
    names: Names, population: Population, *, clients: np.ndarray | None = None, **settings: Any
) -> dict[str, dict[str, float]]:
    """Fit and evaluate centralised systems.

    Baselines that do not support the task or the size of the data are left out.

    Args:
        names: names of baselines, or a mapping from names (or labels, with the baseline's name as
            setting `name`) to settings; a name alone takes the defaults.
        population: the clients.
        clients: see `CentralEvaluation`.
        settings: fields of `[evaluation]`, such as `held_out` and `ks`.

    Returns:
        Metrics by baseline; with a stated guarantee also `nominal-epsilon` and `epsilon`, the exact
        one, see `fedrec.privacy.statement`.

    Raises:
        ExperimentError: a name is unknown, settings are wrong, or a baseline refuses the catalogue.
        DataError: there are no held-out rows.
    """
    evaluation = CentralEvaluation(population, EvaluationConfig(**settings), clients=clients)
    options = names if isinstance(names, Mapping) else {name: {} for name in names}
    baselines = [(label, make_baseline(label, options[label])) for label in options]
    metrics = {}
    for label, baseline in baselines:
        if not evaluation.takes(baseline):
            continue
        try:
            means = evaluation.measure(baseline).means(evaluation.metrics)
        except TooLarge as error:
            _LOG.warning("baseline %s is left out: %s", label, error.got)
            continue
        metrics[label] = means | stated_privacy(label, baseline)
    return metrics


def make_baseline(
    name: str,
    options: Mapping[str, Any],
    *,
    seed: int | None = None,
    device: torch.device | None = None,
) -> Baseline:
    """Create a baseline from its settings.

    Args:
        name: name of the baseline, or its label in the experiment, with the name in
            `options["name"]`.
        options: settings of the baseline.
        seed: seed of the experiment, for baselines that set none; None: 0.
        device: device of baselines that use PyTorch; default: the CPU.

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


def stated_privacy(label: str, baseline: Baseline) -> dict[str, float]:
    """Return stated and exact epsilon of a fitted baseline, and log the caveats."""
    stated = baseline.stated()
    if stated is None:
        return {}
    for line in stated.lines():
        _LOG.warning("%s: %s", label, line)
    return {"nominal-epsilon": stated.nominal, "epsilon": stated.exact}


def _scores(baseline: Baseline, liked: Histories) -> torch.Tensor:
    """Scores of the catalogue by a baseline for users, `float32 [users, items]`."""
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
    return scores


def _histories(population: Population, clients: np.ndarray, ordered: bool) -> Histories:
    data = population.interactions
    low_rated = Histories(data.num_items, *population.rows(clients, positive=False).lists)
    features = data.user_features, data.item_features
    rows = population.rows(clients, positive=True)
    times = rows.times if ordered else None
    return Histories(data.num_items, *rows.lists, clients, *features, low_rated, times)


def _ratings(population: Population, clients: np.ndarray) -> Ratings:
    rows = population.rows(clients)
    data = population.interactions
    values = rows.labels.astype(np.float64)
    return Ratings(data.num_users, data.num_items, rows.ids, rows.items, values)
