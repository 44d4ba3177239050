# SPDX-License-Identifier: Apache-2.0
"""Results of centralised systems, kept between runs.

Runs on the same data, split and seed have the same baselines, whose fits often take longer than the
rounds. What a run stores of one is kept (`fedrec.runs.kept`) under a digest of all that it depends
on, data, split and evaluated users, settings and seed among them. Later runs have the same bytes,
but for `seconds`, which are those of the fit that was made.

Private systems are not kept: a run is charged for a release of its own. Nor are systems with parts
from other packages, whose code is not in the digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from fedrec.baselines.base import Baseline
from fedrec.data.population import Population
from fedrec.evaluation.central import CentralEvaluation
from fedrec.experiment.schema import Experiment
from fedrec.runs.kept import keep, kept_folder, read_kept, surroundings
from fedrec.runtime.content_digest import content_digest
from fedrec.runtime.text_files import MOST_JSON, parse_json

_PRIVATE = "fedrec.baselines.private"
_OURS = {"fedrec", "builtins", "numpy", "torch"}


class BaselineCache:
    """The kept results of an experiment's centralised systems.

    Args:
        experiment: the experiment.
        population: its clients.
        evaluation: fits and evaluates the systems.
    """

    def __init__(
        self, experiment: Experiment, population: Population, evaluation: CentralEvaluation
    ) -> None:
        self._experiment = experiment
        self._population = population
        self._evaluation = evaluation
        self._folder = kept_folder()

    def file(self, baseline: Baseline) -> Path | None:
        """The file of a system that is not fitted yet; None if its results are not kept."""
        metrics = self._evaluation.metrics
        measured = [metric for metric, _ in metrics.columns.values()]
        parts = [baseline, *vars(baseline).values(), *measured, *metrics.of_lists]
        modules = {_module(part) for part in parts}
        if self._folder is None or not modules <= _OURS:
            return None
        if type(baseline).__module__.startswith(_PRIVATE):
            return None
        own = content_digest(
            self._common, type(baseline).__name__, baseline.config, str(baseline.device)
        )
        return self._folder / f"{own[:32]}.json"

    @cached_property
    def _common(self) -> str:
        """Digest of what all systems depend on."""
        settings = self._experiment.evaluation.model_dump(mode="json", exclude={"baselines"})
        return content_digest(
            surroundings(),
            settings,
            self._evaluation.clients,
            _content(self._population),
        )


def read_texts(file: Path) -> dict[str, str] | None:
    """Texts by file name; None if nothing is kept, or something damaged."""
    content = read_kept(file)
    try:
        found = None if content is None else parse_json(content, MOST_JSON)
    except ValueError:
        return None
    ours = isinstance(found, dict) and all(isinstance(text, str) for text in found.values())
    return found if ours else None


def keep_texts(file: Path, texts: Mapping[str, str]) -> None:
    """Keep texts by file name."""
    keep(file, json.dumps(dict(texts)))


def _module(part: object) -> str:
    """The package that a class, or a value's class, is from."""
    kind = part if isinstance(part, type) else type(part)
    return kind.__module__.partition(".")[0]


def _content(population: Population) -> list[object]:
    """What the systems learn from and are tested on."""
    perturbed = population.perturbed
    return [
        population.interactions,
        population.partition,
        population.task,
        population.positive_above,
        population.adversary,
        None if perturbed is None else [perturbed.rows, perturbed.origin],
    ]
