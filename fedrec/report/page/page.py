# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about some runs: no scripts, network or other files.

It is accessible on phones, in print, in dark mode, by keyboard and with screen readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from fedrec.errors import RunError
from fedrec.experiment.schema import marked
from fedrec.report.page.charts import rendered
from fedrec.report.page.sections import (
    answers,
    central_groups,
    cost_table,
    curves,
    distributions,
    groups,
    lists_tables,
    notes,
    privacy_cards,
    reproductions,
    results_tables,
    tests_table,
    what,
)
from fedrec.report.rows import named
from fedrec.runs.result import Result

_SHOWN_RESULTS = 4  # tables of single runs before the comparison of all
_SHOWN_NOTES = 5  # notes shown above the first section; the others are collapsed


def report(results: Sequence[Result], *, title: str | None = None) -> str:
    """One self-contained HTML page about some finished runs.

    Args:
        results: of finished runs.
        title: of the page; default: from the experiments.

    Raises:
        RunError: there is no run.
    """
    if not results:
        raise RunError(
            "nothing to report",
            expected="one run or more",
            got="none",
            fix="name folders of finished runs",
        )
    import fedrec

    names = list(dict.fromkeys(marked(result.experiment) for result in results))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    count = f"{len(results)} run{'s' if len(results) > 1 else ''}"
    runs = named(results)
    stamp = datetime.now().strftime("%Y-%m-%d %H:%M")
    page = {
        "title": title or results[0].experiment.title * (len(results) == 1) or shown,
        "subtitle": f"{count}, reported by fedrec {fedrec.__version__} on {stamp}",
        "version": fedrec.__version__,
        "answers": answers(runs),
        "notes": notes(runs),
        "what": what(runs),
        "results": results_tables(runs),
        "lists": lists_tables(runs),
        "tests": tests_table(results),
        "curves": curves(runs),
        "distributions": distributions(runs),
        "groups": groups(runs),
        "central_groups": central_groups(runs),
        "privacy": privacy_cards(runs),
        "cost": cost_table(runs),
        "repeat": reproductions(runs),
    }
    return rendered(
        "page.html.j2", page=page, shown_notes=_SHOWN_NOTES, shown_results=_SHOWN_RESULTS
    )
