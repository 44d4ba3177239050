# SPDX-License-Identifier: Apache-2.0
"""The picture in README.md: its style has a rule for everything that it draws."""

import re
from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "report.svg"


def test_the_picture_has_a_rule_for_everything_that_it_draws():
    text = PICTURE.read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", style)
    assert re.sub(r"[^{}]+\{[^{}]*\}", "", style).strip() == ""
    known = {name for rule in rules for name in re.findall(r"\.([a-z0-9]+)", rule)}
    drawn = {one for names in re.findall(r'class="([^"]+)"', text) for one in names.split()}
    assert drawn - {"bar"} <= known
    assert "var(" not in text
