# SPDX-License-Identifier: Apache-2.0
"""The bench's page: every cell with its command, commit and machine, or why it is missing; in a
browser it filters by keyboard, fits a phone, and opens in under a second."""

import html
import json

import pytest

from simulations.bench.cell import GAP, PROBE
from simulations.bench.declaration import BenchCell, bench
from simulations.bench.page.page import rendered
from simulations.bench.results import NUMBERS, results
from tests.fedrec.report.browser import CONTRAST, OUTSIDE

DONE = [
    BenchCell(dataset, protocol, system)
    for dataset in ("ml-100k", "office")
    for protocol in ("leave-one-out", "user-holdout")
    for system in ("fedmf", "ease", "fold-in")
]


def entry(place, cell):
    numbers = {name: [place / 100, place / 110, place / 90] for name in NUMBERS}
    more = {PROBE: [0.1, 0.09, 0.11], f"{GAP}gender": [0.0123], "epsilon": ["inf"]}
    return {
        "command": f"fedrec bench run {' '.join(cell)} --seeds 1",
        "fedrec": "0.1.0",
        "commit": f"abc{place:05d}",
        "date": "2026-01-31",
        "machine": f"machine {place}",
        "seeds": 1,
        "rows": {cell.system: numbers | more},
        "inputs": {cell.system: {"test_users": True, "settings_tried": 8}},
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of some made-up results; its file."""
    folder = tmp_path_factory.mktemp("bench")
    found = {cell.key: entry(place, cell) for place, cell in enumerate(DONE, 1)}
    (folder / "results.json").write_text(json.dumps(found))
    known = results(folder / "results.json")
    (folder / "bench.html").write_text(rendered(bench(), known), encoding="utf-8")
    return folder / "bench.html"


def test_every_cell_is_there_with_its_source_or_the_reason(page):
    text = html.unescape(page.read_text(encoding="utf-8"))
    for place, cell in enumerate(DONE, 1):
        for words in (f"abc{place:05d}", f"machine {place}", f"bench run {' '.join(cell)}"):
            assert words in text
    found = bench()
    cells = [cell for cell in found.cells() if cell.dataset != "synthetic"]
    assert text.count("<tbody") == len(cells) == 150
    for cell in set(cells) - set(DONE):
        assert f"fedrec bench run {' '.join(cell)}<" in text
        assert not (why := found.reason(cell)) or why in text
    assert text.count("not run: about") + text.count("too large here:") > 100
    assert "known rows of test users in training; 8 settings tried" in text
    assert "gender .012" in text and "at chance" in text
    assert "http" not in text.replace("https://json-schema.org", "")


def test_a_probe_that_is_not_at_chance_is_called_a_leak(tmp_path):
    cell = DONE[0]
    leaking = entry(1, cell)
    leaking["rows"][cell.system][PROBE] = [0.9, 0.89, 0.91]
    (tmp_path / "results.json").write_text(json.dumps({cell.key: leaking}))
    assert "NOT at chance" in rendered(bench(), results(tmp_path / "results.json"))


SHOWN = "[...document.querySelectorAll('tbody')].filter(e => e.checkVisibility()).length"


def test_it_opens_in_under_a_second_and_asks_for_nothing(chromium, page):
    chromium.show()
    assert min(chromium.open(page) for _ in range(3)) < 1
    assert chromium.requests() == [page.as_uri()] and chromium.complaints() == []


def test_cells_are_filtered_by_keyboard(browser):
    assert browser.evaluate(SHOWN) == 150
    browser.evaluate("document.querySelector('[name=missing]').focus()")
    browser.press(" ")
    assert browser.evaluate(SHOWN) == len(DONE)
    browser.evaluate("document.querySelector('[name=dataset]').focus()")
    browser.press("ArrowDown")  # the first dataset, MovieLens-100K
    assert browser.evaluate(SHOWN) == 6
    told = browser.evaluate("document.getElementById('count').textContent")
    assert told == "6 of 150 cells shown"


def test_cells_are_sorted_and_opened_by_keyboard(browser):
    browser.evaluate("document.querySelector('thead button').focus()")
    browser.press("Enter")
    head = "document.querySelector('thead [aria-sort]').getAttribute('aria-sort')"
    assert browser.evaluate(head) == "descending"
    made = browser.evaluate(
        "[...document.querySelectorAll('[data-key]:nth-child(3)')].map(e => Number(e.dataset.key))"
    )
    assert len(made) == len(DONE) and made == sorted(made, reverse=True)
    browser.evaluate("document.querySelector('tbody th button').focus()")
    opened = "document.querySelector('tbody .facts').checkVisibility()"
    assert not browser.evaluate(opened)
    browser.press("Enter")
    assert browser.evaluate(opened)
    assert (
        browser.evaluate("document.querySelector('tbody .facts').textContent").count("Commit") == 1
    )


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_desktop_and_phone_light_and_dark(browser, width, scheme):
    browser.show(width=width, height=740, scheme=scheme)
    browser.evaluate("document.querySelector('[name=facts]').click()")
    found = browser.evaluate(CONTRAST)
    assert len(found) > 1000 and [one for one in found if one[0] < 4.5] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OUTSIDE) == []
