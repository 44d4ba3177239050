# SPDX-License-Identifier: Apache-2.0
"""Folders must be new or empty."""

import pytest

from fedrec.errors import RunError
from fedrec.runtime.new_folders import require_new_folder


def test_new_and_empty_folders_pass(tmp_path):
    require_new_folder(tmp_path)
    require_new_folder(tmp_path / "new")


@pytest.mark.parametrize(
    ("name", "got"), [("notes.txt", "got: other files"), ("run.json", "got: a run folder")]
)
def test_a_folder_with_files_is_refused(tmp_path, name, got):
    (tmp_path / name).write_text("")
    with pytest.raises(RunError, match=got):
        require_new_folder(tmp_path)
    require_new_folder(tmp_path, usable=lambda _: True)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"got: a file\n *fix: choose another --output"):
        require_new_folder(tmp_path / "file", usable=lambda _: True)
