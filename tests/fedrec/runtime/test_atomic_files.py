# SPDX-License-Identifier: Apache-2.0
"""Files are written completely or not at all."""

import errno
import os

import pytest

from fedrec.errors import RunError
from fedrec.runtime.atomic_files import write_atomically


def fails(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_writes_text_and_bytes_and_makes_folders(tmp_path):
    write_atomically(tmp_path / "new" / "folder" / "text", "grüße\n")
    write_atomically(tmp_path / "bytes", b"\x00\xff")
    assert (tmp_path / "new" / "folder" / "text").read_bytes() == "grüße\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"


@pytest.mark.parametrize("stage", ["open", "fdopen", "fsync", "fchmod", "replace"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, stage):
    file = tmp_path / "file"
    write_atomically(file, "old")
    with monkeypatch.context() as patch, pytest.raises(RunError) as caught:
        patch.setattr(f"os.{stage}", fails)
        write_atomically(file, "new")
    assert str(file) in caught.value.problem and caught.value.got == "No space left on device"
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_disk_that_fills_up_in_the_middle(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_atomically(file, "old")
    opened = os.fdopen

    def half(handle, mode):
        stream = opened(handle, mode, buffering=0)

        class Full:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                stream.close()

            def write(self, data):
                stream.write(data[: len(data) // 2])
                fails()

        return Full()

    with monkeypatch.context() as patch, pytest.raises(RunError):
        patch.setattr("os.fdopen", half)
        write_atomically(file, "new" * 100)
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_file_in_place_of_a_folder_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write"):
        write_atomically(tmp_path / "file" / "inside", "x")


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o027, 0o640)]
)
def test_the_users_umask_determines_who_may_read_a_new_file(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_keeps_its_mode(tmp_path, mode):
    write_atomically(tmp_path / "file", "x")
    (tmp_path / "file").chmod(mode)
    write_atomically(tmp_path / "file", "y")
    assert (tmp_path / "file").read_text() == "y"
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
