# SPDX-License-Identifier: Apache-2.0
"""The architecture page: every path that it names exists, and its picture is that of the script."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_and_module_that_the_page_names_is_there():
    paths = set(
        re.findall(r"`((?:fedrec|clients|server|strategies|simulations|tests)/[\w./]+)`", PAGE)
    )
    modules = set(re.findall(r"`((?:fedrec|clients|server|strategies)(?:\.\w+)+)(?::\w+)?`", PAGE))
    files = {f"{name.replace('.', '/')}.py" for name in modules}
    assert len(paths) > 15 and len(files) > 5
    assert not [path for path in paths | files if not (ROOT / path).exists()]


def test_the_picture_is_the_one_that_the_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))["draw"]()
    assert (ROOT / "docs" / "images" / "architecture.svg").read_text(encoding="utf-8") == drawn
    assert drawn.count("<rect") == 6
