# SPDX-License-Identifier: Apache-2.0
"""The report in a browser: no console messages or requests; usable by keyboard, on a phone, with a
screen reader, in print and in dark mode; fast to open."""

import base64
import itertools

import pytest

import fedrec
from fedrec.report.page.page import report
from tests.fedrec.report.browser import CONTRAST, OUTSIDE

SCHEMES = ("light", "dark")
PHONE, PAPER = 360, 718  # pixels; A4 within its margins
FOCUSABLE = "a[href], summary, [tabindex='0']"


@pytest.fixture(scope="module")
def runs(tiny_experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def run(name, **changes):
        table = tiny_experiment() | changes | {"name": name}
        table["evaluation"]["baselines"] = ["popularity"]
        return fedrec.run(table, output=folder / f"{name}-{changes.get('seed', 0)}")

    private = {"clip-norm": 1.0, "noise-multiplier": 1.0}
    return [
        run("plain", title="A plain run with a title that is longer than a phone is wide"),
        run("a-private-run-with-a-name-longer-than-usual", privacy=private),
        run("plain", seed=1),
    ]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(report(runs), encoding="utf-8")
    return file


@pytest.mark.slow
def test_it_asks_for_nothing_and_complains_about_nothing(browser, page):
    assert browser.requests() == [page.as_uri()] and browser.complaints() == []


def test_a_broken_page_would_be_noticed(chromium, tmp_path):
    """The browser does report what the test above excludes."""
    file = tmp_path / "broken.html"
    file.write_text("<img src='none.png'><script>console.error('x'); undefined.y</script>")
    chromium.open(file)
    seen = {one["method"] for one in chromium.events}
    assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown"} <= seen
    assert any("none.png" in str(one) for one in chromium.events)


def test_links_within_the_page_lead_to_their_sections(browser):
    links = browser.evaluate("[...document.querySelectorAll('a')].map(a => a.hash)")
    assert len(links) >= 7
    for link in links:
        browser.evaluate(f"document.querySelector('a[href=\"{link}\"]').click()")
        assert browser.evaluate("location.hash") == link
        top = browser.evaluate(f"document.querySelector('{link}').getBoundingClientRect().top")
        at_end = browser.evaluate(
            "scrollY + innerHeight >= document.documentElement.scrollHeight - 2"
        )
        assert abs(top) < 5 or at_end


def test_the_tab_key_reaches_everything_and_shows_where_it_is(browser):
    expected = browser.evaluate(
        f'[...document.querySelectorAll("{FOCUSABLE}")].filter(e => e.checkVisibility()).length'
    )
    browser.evaluate(
        f'[...document.querySelectorAll("{FOCUSABLE}")].forEach((e, i) => e.dataset.place = i)'
    )
    reached, outlines = [], []
    for _ in range(expected + 5):
        browser.press("Tab")
        place = browser.evaluate("document.activeElement.dataset.place ?? null")
        if place is None:
            break
        reached.append(int(place))
        outlines.append(
            browser.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        )
    assert len(reached) == expected and reached == sorted(reached)
    assert min(outlines) >= 2


def test_the_first_link_skips_to_the_content(browser):
    browser.press("Tab")
    left = browser.evaluate("document.activeElement.getBoundingClientRect().left")
    browser.press("Enter")
    assert left >= 0 and browser.evaluate("location.hash") == "#content"


def test_everything_has_a_name_for_screen_readers(browser):
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""), node)
        for node in nodes
        if not node["ignored"]
    ]
    for role in ("image", "table", "region", "link", "navigation"):
        names = [
            name for kind, name, _ in named if kind in (role, "img" if role == "image" else "")
        ]
        assert names and all(names), role
    levels = [
        prop["value"]["value"]
        for kind, _, node in named
        if kind == "heading"
        for prop in node["properties"]
        if prop["name"] == "level"
    ]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(levels))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [PHONE, 1280])
def test_texts_have_enough_contrast(browser, scheme, width):
    browser.show(width=width, scheme=scheme)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    found = browser.evaluate(CONTRAST)
    assert len(found) > 200
    assert [(ratio, text) for ratio, text in found if ratio < 4.5] == []
    dark = (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    )
    assert dark == (scheme == "dark")


@pytest.mark.parametrize("width", [PHONE, 768, 1280])
def test_nothing_extends_beyond_the_window(browser, width):
    browser.show(width=width, height=740)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OUTSIDE) == []


def test_texts_in_charts_can_be_read(browser):
    for width in (PHONE, 1280):
        browser.show(width=width, height=740)
        heights = browser.evaluate(
            "[...document.querySelectorAll('svg .tick')].map(e => e.getBoundingClientRect().height)"
        )
        assert min(heights) >= 11


def test_in_print_all_text_is_black_on_white(browser):
    browser.show(width=PAPER, scheme="dark", media="print")
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.evaluate("document.documentElement.scrollWidth") <= PAPER
    assert browser.evaluate(OUTSIDE.replace(".scroll table, pre,", "")) == []
    assert browser.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    shown = "[...document.querySelectorAll('.said li')].map(e => e.checkVisibility())"
    assert browser.evaluate(shown) and all(browser.evaluate(shown))
    printed = base64.b64decode(browser.send("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF") and len(printed) > 20_000


def test_twenty_runs_open_in_a_second(chromium, runs, tmp_path):
    file = tmp_path / "twenty.html"
    file.write_text(report(([*runs] * 7)[:20]), encoding="utf-8")
    assert file.stat().st_size < 2_000_000
    chromium.show()
    assert min(chromium.open(file) for _ in range(3)) < 1
