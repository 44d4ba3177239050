# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page about runs: no scripts, network or other files.

It is accessible on phones, in print, in dark mode, by keyboard and with screen readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from fedrec.errors import RunError
from fedrec.experiment.schema import marked
from fedrec.report.page import sections
from fedrec.report.page.charts import rendered
from fedrec.report.rows import named
from fedrec.runs.result import Result

_SHOWN_RESULTS = 4  # tables of single runs before the comparison of all
_SHOWN_NOTES = 5  # notes shown above the first section; the others are collapsed


def report(results: Sequence[Result], *, title: str | None = None) -> str:
    """Render a self-contained HTML page about finished runs.

    Args:
        results: results of finished runs.
        title: title of the page; default: from the experiments.

    Raises:
        RunError: `results` is empty.
    """
    if not results:
        raise RunError(
            "no runs to report",
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
        "answers": sections.answers(runs),
        "notes": sections.notes(runs),
        "what": sections.what(runs),
        "results": [sections.results_table(run) for run in runs],
        "lists": sections.lists_tables(runs),
        "tests": sections.tests_table(results),
        "curves": sections.curves(runs),
        "distributions": sections.distributions(runs),
        "groups": sections.groups(runs),
        "central_groups": sections.central_groups(runs),
        "privacy": sections.privacy_cards(runs),
        "cost": sections.cost_table(runs),
        "repeat": sections.reproductions(runs),
    }
    return rendered(
        "page.html.j2", page=page, shown_notes=_SHOWN_NOTES, shown_results=_SHOWN_RESULTS
    )
