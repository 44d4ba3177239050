# SPDX-License-Identifier: Apache-2.0
"""The page of a report, also in a browser."""

import re
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest

import fedrec
from fedrec.report.comparison import bootstrap_intervals, named
from fedrec.report.page.sections import _histogram, _Line, _line_chart, _privacy_cards, report
from tests.fedrec.report.browser import OUTSIDE

# The report as a page: self-contained, accessible, small, and true to the run.

_VOID = {"meta", "link", "br", "img", "path", "rect", "circle"}


class Outline(HTMLParser):
    """Elements, ids, links and headings of a page; unbalanced ends are errors."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.headings, self.tags = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[key] for key in ("href", "src") if key in found]
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


TITLE = "A <b>title</b> & more, which is longer than a phone is wide"


@pytest.fixture(scope="module")
def runs(tiny_experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def run(name, **changes):
        table = tiny_experiment() | changes | {"name": name}
        table["evaluation"]["baselines"] = ["popularity"]
        return fedrec.run(table, output=folder / f"{name}-{changes.get('seed', 0)}")

    private = {"clip-norm": 1.0, "noise-multiplier": 1.0}
    return [
        run("plain"),
        run("a-private-run-with-a-name-longer-than-usual", privacy=private, title=TITLE),
        run("plain", seed=1),
    ]


@pytest.fixture(scope="module")
def run(runs):
    return runs[1]


@pytest.fixture(scope="module")
def page(run):
    return report([run])


def test_everything_is_on_the_page_and_nothing_is_fetched(page):
    outline = Outline(page)
    assert outline.open == []
    assert all(link.startswith("#") or link == "data:," for link in outline.links)
    assert "<script" not in page and "@import" not in page and "url(" not in page


def test_it_opens_with_the_answer(page, run):
    """Before any box; difference and interval are those of the users' own numbers."""
    content = page.partition('<main id="content">')[2]
    before_boxes = content.partition('class="note')[0].partition("<section")[0]
    assert 'class="answer"' in before_boxes
    apart = (run.users["hits@5"] - run.baseline_users["popularity"]["hits@5"]).dropna()
    ((low, high),) = bootstrap_intervals([apart.to_numpy()])
    verdict = "better" if low > 0 else "worse" if high < 0 else "not significantly different"
    told = f"{verdict} than popularity, the strongest (not private) baseline"
    assert told in before_boxes and f"by {apart.mean():+.4f} [{low:+.4f}, {high:+.4f}]" in content


def test_links_lead_somewhere_and_ids_are_there_once(page):
    outline = Outline(page)
    assert len(set(outline.ids)) == len(outline.ids)
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)


def test_it_can_be_read_without_seeing_it(page):
    outline = Outline(page)
    tags = outline.tags
    assert ("html", {"lang": "en"}) in tags
    assert outline.headings[0] == 1 and outline.headings.count(1) == 1
    steps = np.diff(outline.headings)
    assert (steps <= 1).all()
    assert all("aria-label" in at or "aria-hidden" in at for tag, at in tags if tag == "svg")
    assert all(at.get("scope") in ("row", "col") for tag, at in tags if tag == "th")
    assert page.count("<caption>") == page.count("<table>")
    assert all(at.get("tabindex") == "0" for tag, at in tags if at.get("role") == "region")


def test_texts_of_users_are_escaped(page):
    assert "<b>title" not in page
    assert "A &lt;b&gt;title&lt;/b&gt; &amp; more" in page


def test_it_has_the_numbers_of_the_run(page, run):
    assert f"{run.metrics['hits@5']:.4f}" in page
    assert f"{run.baselines['popularity']['hits@5']:.4f}" in page
    assert f"{run.rounds['epsilon'].iloc[-1]:.4g} at delta" in page
    assert "Simulation, not a release" in page
    assert "popularity (not private)" in page and "<td>∞</td>" in page


def test_lists_and_groups_are_shown_of_every_system(page, run):
    """Metrics of all lists together, and means over groups, for the federated system and the
    centralised one."""
    rows = {
        caption: dict(re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', body, re.S))
        for caption, body in re.findall(r"<caption><span>(.*?)</span>(.*?)</table>", page, re.S)
    }
    name = run.experiment.name
    lists = rows[f"{name}, seed 0: the lists of all users together"]
    groups = rows[f"{name}, seed 0, by groups of users"]
    central = rows[f"{name}, seed 0: popularity, by groups of users"]
    for label, metrics in ((name, run.metrics), ("popularity", run.baselines["popularity"])):
        for name in ("coverage@5", "gini@5", "popularity@5", "popularity-lift@5"):
            assert f"<td>{metrics[name]:.4f}</td>" in lists[label]
    for shown, found in ((groups, run.groups), (central, run.baseline_groups["popularity"])):
        women, men = (found.loc[f"gender={one}", "hits@5"] for one in "FM")
        assert f"<td>{women:.4f}</td>" in shown["gender=F"]
        assert f"<td>{abs(women - men):.4f}</td>" in shown["gap by gender"]


def test_the_card_has_the_clip_norm_of_every_phase(run_tiny):
    popular = ("model.item-bias=true", "model.hidden=[]", "strategy={name='popularity-start'}")
    noise = "privacy={clip-norm=1.0, noise-multiplier=2.0}"
    other = "privacy.phases.popularity={parameters=['item.bias'], clip-norm=8.0}"
    (card,) = _privacy_cards(named([run_tiny(*popular, noise, other)]))
    facts = card["facts"]
    assert (facts["clip norm of phase popularity"], facts["clip norm of phase main"]) == ("8", "1")
    assert "clip norm" not in facts
    (card,) = _privacy_cards(named([run_tiny(*popular, noise, output="alike")]))
    assert card["facts"]["clip norm"] == "1"


def test_colours_of_texts_have_enough_contrast():
    style = (files("fedrec.report.page") / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", part))
        for part in re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    )
    for colours in (light, dark):
        for name in ("ink", "soft", "link", "good", "bad"):
            for ground in ("page", "card"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
        for number in range(8):
            assert contrast(colours[f"c{number}"], colours["page"]) >= 3


def contrast(one, other):
    """Contrast ratio of WCAG 2.2."""
    values = sorted(luminance(colour) for colour in (one, other))
    return (values[1] + 0.05) / (values[0] + 0.05)


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_charts_work_without_numbers_and_with_constant_ones():
    assert _line_chart([_Line("a", [])], "t", "x", "y") == ""
    assert _histogram(np.empty(0), "t", "x") == ""
    chart = _line_chart([_Line("<a>", [(1, 0.0), (2, 0.0)])], "t", "x", "y")
    assert "&lt;a&gt;" in chart and "nan" not in chart
    assert "nan" not in _histogram(np.zeros(3), "t", "x")


def test_a_line_goes_from_its_first_to_its_last_point():
    chart = _line_chart([_Line("a", [(0, 0.0), (10, 1.0)])], "t", "x", "y")
    (path,) = re.findall(r'class="line c0" d="(M[^"]+L[^"]+)"', chart)
    assert path == "M66.0 212.0L466.0 14.0"


def test_the_picture_of_the_readme_can_be_drawn_of_any_run(run):
    """Well-formed, and with the numbers of the run."""
    import runpy
    import xml.etree.ElementTree as ElementTree
    from pathlib import Path

    docs = Path(__file__).resolve().parents[3] / "docs"
    drawn = runpy.run_path(str(docs / "draw_report.py"))["draw"](run, "made-up & small data")
    texts = " ".join(one.text or "" for one in ElementTree.fromstring(drawn).iter())
    assert "var(" not in drawn  # which only browsers resolve
    assert f"{run.metrics['hits@5']:.4f}" in texts and "made-up & small data" in texts
    assert f"{run.baselines['popularity']['hits@5']:.4f}" in texts
    shown = (docs / "images" / "report.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(shown)
    assert "images/report.svg" in (docs.parent / "README.md").read_text(encoding="utf-8")


# The report in a browser: no console messages or requests, and usable on a phone.

PHONE = 360  # pixels


@pytest.fixture(scope="module")
def page_of_browser(runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(report(runs), encoding="utf-8")
    return file


@pytest.mark.slow
def test_it_asks_for_nothing_and_complains_about_nothing(browser, page_of_browser):
    assert browser.requests() == [page_of_browser.as_uri()] and browser.complaints() == []


def test_a_broken_page_would_be_noticed(chromium, tmp_path):
    """The browser does report what the test above excludes."""
    file = tmp_path / "broken.html"
    file.write_text("<img src='none.png'><script>console.error('x'); undefined.y</script>")
    chromium.open(file)
    seen = {one["method"] for one in chromium.events}
    assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown"} <= seen
    assert any("none.png" in str(one) for one in chromium.events)


@pytest.mark.parametrize("width", [PHONE, 768, 1280])
def test_nothing_extends_beyond_the_window(browser, width):
    browser.show(width=width, height=740)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OUTSIDE) == []
