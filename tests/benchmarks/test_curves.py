# SPDX-License-Identifier: Apache-2.0
"""Curves: every line, level and text is in the file, and the same numbers give the same bytes."""

from xml.etree import ElementTree

from benchmarks.curves import Panel, write_panels

PANELS = (
    Panel(
        "error",
        "epsilon",
        {"one": [(1.0, 2.0), (0.1, 9.0)]},
        {"flat": 3.0},
        logarithmic=True,
        most=4.0,
    ),
    Panel("recall", "linked", {"other": [(0.5, 0.1, "k=0.2"), (0.2, 0.05, "k=0.8")]}),
)


def test_everything_is_drawn_in_the_same_bytes(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_panels(tmp_path / folder / "curves.svg", PANELS)
    one, again = ((tmp_path / folder / "curves.svg").read_bytes() for folder in ("a", "b"))
    assert one == again
    texts = {
        node.text for node in ElementTree.fromstring(one).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"error", "recall", "epsilon", "linked", "one", "other", "flat", "k=0.2", "0.1"} <= texts
