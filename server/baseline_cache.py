# SPDX-License-Identifier: Apache-2.0
"""Results of centralised systems, kept between runs.

Runs on the same data, split and seed have the same baselines, whose fits often take longer than the
rounds. What a run stores of one is kept in `$FEDREC_CACHE/baselines` (default
`~/.cache/fedrec/baselines`) under a digest of all that it depends on: data, split and evaluated
users, settings and seed, the code of fedrec, and the libraries with their threads and the
processor's instructions. So a run has the same bytes with the cache and without it, but for
`seconds`, which are those of the fit that was made.

Private systems are not kept: a run is charged for a release of its own. Nor are systems with parts
from other packages, whose code is not in the digest. `FEDREC_CACHE_BASELINES=no` switches the cache
off. It keeps the most recently used results only, readable by this user alone, because they have
metrics of each user of the data; it may be deleted at any time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch
from threadpoolctl import threadpool_info

import fedrec
from fedrec.baselines.base import Baseline
from fedrec.data.population import Population
from fedrec.errors import RunError
from fedrec.evaluation.central import CentralEvaluation
from fedrec.experiment.schema import Experiment
from fedrec.runs.environment import environment
from fedrec.runtime.atomic_files import write_atomically
from fedrec.runtime.compilation import cache_folder
from fedrec.runtime.content_digest import content_digest, source_digest
from fedrec.runtime.text_files import read_json

LARGEST = 2**29
"""Bytes of the files that are kept."""
_PRIVATE = "fedrec.baselines.private"
_OURS = {"fedrec", "builtins", "numpy", "torch"}


def baseline_cache_folder() -> Path | None:
    """The folder of kept results; None if the cache is switched off."""
    if os.environ.get("FEDREC_CACHE_BASELINES", "").lower() in ("no", "off", "0"):
        return None
    return cache_folder().parent / "baselines"


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
        self._folder = baseline_cache_folder()

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
        libraries = [
            [found.get(key) for key in ("internal_api", "version", "architecture", "num_threads")]
            for found in threadpool_info()
        ]
        machine = {key: value for key, value in environment().items() if key != "commit"}
        return content_digest(
            source_digest(Path(fedrec.__file__).parent),
            machine,
            sorted(map(repr, libraries)),
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
            settings,
            self._evaluation.clients,
            _content(self._population),
        )


def read_kept(file: Path) -> dict[str, str] | None:
    """Texts by file name; None if nothing is kept, or something damaged."""
    try:
        found = read_json(file)
        file.touch()  # the most recently used are kept
    except (OSError, ValueError):
        return None
    ours = isinstance(found, dict) and all(isinstance(text, str) for text in found.values())
    return found if ours else None


def keep(file: Path, texts: Mapping[str, str]) -> None:
    """Keep texts by file name, and delete what was used least recently beyond `LARGEST`. A folder
    that cannot be written keeps nothing."""
    with suppress(RunError, OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # metrics of single users
        write_atomically(file, json.dumps(dict(texts)), durable=False)
        kept = sorted(file.parent.glob("*.json"), key=lambda one: one.stat().st_mtime, reverse=True)
        total = 0
        for one in kept:
            total += one.stat().st_size
            if total > LARGEST:
                one.unlink()


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
