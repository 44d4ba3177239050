# SPDX-License-Identifier: Apache-2.0
"""What counts as a line of code, and as two statements in one."""

from benchmarks import size
from benchmarks.size import size_of

SOURCE = '''# a comment
"""A module."""

import os


class Box:
    """A docstring of
    two lines."""

    width: int = 0
    """An attribute."""

    def half(self):
        """Half."""
        text = """a text that is
        a value"""
        return text  # why


def _swap(a, b):
    a, b = b, a
    return a, b
'''


def test_comments_docstrings_and_blank_lines_do_not_count():
    found = size_of(SOURCE)
    assert found.lines == 1 + 2 + 1 + 3 + 3
    assert found.files == 1 and found.public == 2 and found.longest_body == 3


def test_only_independent_assignments_are_two_statements():
    assert size_of(SOURCE).packed == 0
    packed = ("a, b = 1, 2", "self.a, self.b = x, y", "(a, b) = (f(), g())")
    assert [size_of(text).packed for text in packed] == [1, 1, 1]
    single = ("a, b = f()", "a, b = b, a + b", "a = b = 1", "x[i], x[j] = x[j], x[i]")
    assert [size_of(text).packed for text in single] == [0, 0, 0, 0]


def test_the_table_has_a_line_for_each_package(tmp_path, monkeypatch, capsys):
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "box.py").write_text(SOURCE)
    monkeypatch.setattr("sys.argv", ["size.py", "--root", str(tmp_path)])
    size.main()
    table, _, targets = capsys.readouterr().out.partition("\n\n")
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [row[0] for row in rows] == [*size.PACKAGES, "source", "tests", "benchmarks"]
    counts = [row[1:5] for row in rows if row[0] in ("clients", "source")]
    assert counts == [["1", "1", "0", "10"]] * 2
    assert len(targets.splitlines()) == 1 + len(size.TARGETS)


def test_members_are_the_public_names_of_a_body():
    source = """
class Step(Base):
    name = "step"
    width: int = 0
    _own = 1

    @property
    def half(self): ...

    def __init__(self):
        self.other = 1
"""
    assert size.members_of(source) == {"Step": {"name", "width", "half"}}


def test_files_are_short_or_long_by_their_lines_of_code():
    assert [size_of("a = 1\n" * n).short for n in (39, 40)] == [1, 0]
    assert [size_of("a = 1\n" * n).long for n in (500, 501)] == [0, 1]
    assert size_of("", "__init__.py").short == 0


def test_environments_in_hidden_folders_do_not_count(tmp_path):
    for name in ("own.py", ".venvs/pfl/lib/other.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a = 1\nb = 2\n", encoding="utf-8")
    own = size_of("a = 1\nb = 2\n")
    assert size.folder_size(tmp_path) == own
