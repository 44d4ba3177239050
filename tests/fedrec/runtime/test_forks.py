# SPDX-License-Identifier: Apache-2.0
"""Forks end with the status of their work."""

import os
import sys

import pytest

from fedrec.runtime.forks import Fork


def _fail():
    raise ValueError("as meant")


@pytest.mark.parametrize(
    ("work", "status"),
    [
        (lambda: None, 0),
        (_fail, 1),
        (lambda: sys.exit(), 0),
        (lambda: sys.exit(3), 3),
        (lambda: sys.exit("a reason"), 1),
    ],
)
def test_a_fork_ends_with_the_status_of_its_work(work, status):
    _, ended = os.waitpid(Fork(work).pid, 0)
    assert os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == status


def test_what_the_parent_would_do_at_its_end_is_left_to_it(tmp_path):
    cleaned = tmp_path / "cleaned"
    try:
        os.waitpid(Fork(lambda: None).pid, 0)
    finally:
        with cleaned.open("a") as file:
            file.write("once ")
    assert cleaned.read_text() == "once "


def test_the_error_of_a_fork_is_written(capfd):
    os.waitpid(Fork(_fail).pid, 0)
    assert "ValueError: as meant" in capfd.readouterr().err
