# SPDX-License-Identifier: Apache-2.0
"""Studies that are declared in a TOML file, a section each:

    [sets]                          # lists of overrides, `"@quiet"` in a `set`
    quiet = ["evaluation.every=0"]

    [defaults]                      # of all sections
    metrics = {"hits@10" = "Hits@10"}

    [table2]
    title = "Systems beside each other"
    tasks = [
        {name = "mf", experiment = "mf-ml1m", set = ["@quiet"], row = "MF", seconds = 30},
        {name = "lr-{lr:g}", vary = {lr = [0.1, 0.5]}, set = ["strategy.server-lr={lr}"], ...},
    ]

A section's keys that are not its own (see `Study`) hold for all its tasks; `like` takes over those
of another section, `"@name"` among tasks those of `[parts]`. `vary` makes a task for each
combination of values, `cases` one for each table of keys; `set` adds to the overrides outside.
`{key}` and `{key:format}` in texts are replaced by the value of a key of the task, `{varied}` by
all that `vary` varies, as TOML; a text that is `{key}` alone becomes the value itself. In an
experiment `{seed}` is the seed of the run and `{data-directory}` the folder of the data. A task's
other keys are the arguments of its `measure`, by default `simulations.study.runs:measure`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedrec.config import did_you_mean
from fedrec.errors import ExperimentError
from fedrec.runtime.text_files import read_toml
from simulations.study.study import Study, Task
from simulations.study.templates import filled

_RUN = "simulations.study.runs:measure"
_OF_TASK = ("seconds", "slower", "measure", "seeded", "sample")
Table = dict[str, Any]


def declared(file: Path) -> Iterator[Study]:
    """The studies of a file, in its order; `paper` is the file's name.

    Raises:
        ExperimentError: the file is missing or not TOML, or a study is not complete.
    """
    document = read_toml(file, ExperimentError)
    defaults = document.pop("defaults", {})
    names = _Names(document.pop("sets", {}), document.pop("parts", {}))

    def section(item: str) -> Table:
        own = names.find(document, item)
        return {**(section(own["like"]) if "like" in own else defaults), **own}

    for item in document:
        try:
            yield _study(file.stem, item, section(item), names)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ExperimentError(
                f"{file}: the study {item!r} cannot be read",
                expected="title, tasks, and of each task name and seconds",
                got=f"{type(error).__name__}: {error}",
                fix="see docs/how-to.md, Studies of your own",
            ) from None


class _Names:
    """What a file names once and uses several times.

    Args:
        sets: lists of overrides, by name.
        parts: tasks, by name.
    """

    def __init__(self, sets: Mapping[str, list[str]], parts: Mapping[str, Any]) -> None:
        self.sets = sets
        self.parts = parts

    def overrides(self, texts: list[str]) -> list[str]:
        """Overrides with those of the named lists in place of `@name`."""
        named = [
            self.overrides(self.find(self.sets, text[1:])) if text.startswith("@") else [text]
            for text in texts
        ]
        return list(itertools.chain.from_iterable(named))

    def task(self, task: str | Table) -> Table:
        """A task, or the one that `@name` stands for."""
        return self.find(self.parts, task[1:]) if isinstance(task, str) else task

    @staticmethod
    def find(known: Mapping[str, Any], name: str) -> Any:
        """What a name stands for."""
        if name not in known:
            raise ExperimentError(
                f"nothing is named {name!r}",
                expected="one of " + ", ".join(known),
                got=name,
                fix=did_you_mean(name, known),
            )
        return known[name]


def _study(paper: str, item: str, section: Table, names: _Names) -> Study:
    section.pop("like", None)
    own = {
        "title": section.pop("title"),
        "datasets": tuple(section.pop("data", ())),
        "differs": tuple(section.pop("differs", ())),
        "seeds": section.pop("seeds", 1),
        "first_seed": section.pop("first-seed", 0),
        "published": section.pop("published", ""),
        "best": section.pop("best", False),
        "compared": tuple(
            tuple(filled(one["rows"], one)) for one in _expanded(section.pop("compared", []), names)
        ),
    }
    tasks = section.pop("tasks")
    shared = frozenset(section)
    found = [_task(one, names, shared) for one in _expanded({**section, "cases": tasks}, names)]
    texts = {key: filled(value, section) for key, value in own.items() if isinstance(value, str)}
    return Study(paper, item, tasks=tuple(found), **{**own, **texts})


def _expanded(table: Table | list[Table], names: _Names) -> Iterator[Table]:
    """The tables that one stands for."""
    rest = {"cases": table} if isinstance(table, list) else dict(table)
    if "cases" in rest:
        for case in rest.pop("cases"):
            own = names.task(case)
            together = {"set": [*rest.get("set", []), *own.get("set", [])]}
            yield from _expanded({**rest, **own, **together}, names)
    elif "vary" in rest:
        varied = filled(rest.pop("vary"), rest)
        for values in itertools.product(*varied.values()):
            own = dict(zip(varied, values, strict=True))
            text = ", ".join(f"{key}={json.dumps(value)}" for key, value in own.items())
            yield from _expanded({**rest, **own, "varied": text, "varying": own.keys()}, names)
    else:
        yield rest


def _task(table: Table, names: _Names, shared: frozenset[str]) -> Task:
    overrides = names.overrides(table.pop("set"))
    if overrides:
        table["set"] = overrides
    used = set[str]()
    varying = table.pop("varying", ())
    found = filled(table, table, used)
    used.update(varying if "varied" in used else ())
    return Task(
        found["name"].lower(),
        float(found["seconds"]) * found.get("slower", 1),
        found.get("measure", _RUN),
        {key.replace("-", "_"): value for key, value in found.items() if key not in _OF_TASK},
        found.get("seeded", True),
        _sampled(found),
        frozenset(key.replace("-", "_") for key in used | shared | {"name", "varied"}),
    )


def _sampled(task: Table) -> bool:
    """`sample`: true, false, or a list of values that keys of the task must have."""
    wanted = task.get("sample", True)
    if isinstance(wanted, bool):
        return wanted
    return any(one.items() <= task.items() for one in wanted)
