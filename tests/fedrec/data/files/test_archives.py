# SPDX-License-Identifier: Apache-2.0
"""Archives must not write outside the folder into which they are unpacked."""

import io
import stat
import tarfile
import zipfile

import pytest

from fedrec.data.files import archives
from fedrec.data.files.archives import unpack
from fedrec.errors import DataError


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "inner" / "target"
    folder.mkdir(parents=True)
    return folder


def make_zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def make_tar(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make_zip, "a.zip"),
        (make_tar, "a.tar.gz"),
        (lambda path, members: make_tar(path, members, "w"), "a.tar"),
        (lambda path, members: make_tar(path, members, "w:bz2"), "a.tar.bz2"),
    ],
)
def test_unpacks_files_at_any_depth(tmp_path, target, make, name):
    unpack(make(tmp_path / name, {"top/one.txt": "1", "two.txt": "2"}), target)
    assert (target / "top" / "one.txt").read_text() == "1"
    assert (target / "two.txt").read_text() == "2"


def test_plain_file_is_copied(tmp_path, target):
    (tmp_path / "reviews.json").write_text("{}\n")
    unpack(tmp_path / "reviews.json", target)
    assert (target / "reviews.json").read_text() == "{}\n"


@pytest.mark.parametrize("make", [make_zip, make_tar])
@pytest.mark.parametrize(
    "name", ["../out.txt", "/out.txt", "a/../../out.txt", "..\\out.txt", "C:out.txt"]
)
def test_path_out_of_the_folder_is_refused(tmp_path, target, make, name):
    archive = make(tmp_path / "a", {"good.txt": "1", name: "bad"})
    with pytest.raises(DataError, match="not safe"):
        unpack(archive, target)
    assert not list(tmp_path.rglob("*out.txt"))


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path, target, kind):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(DataError, match="not safe"):
        unpack(tmp_path / "a.tar", target)
    assert not list(target.iterdir())


def test_link_in_a_zip_is_refused(tmp_path, target):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(DataError, match="link"):
        unpack(tmp_path / "a.zip", target)


def test_damaged_zip_is_refused(tmp_path, target):
    path = make_zip(tmp_path / "a.zip", {"one.txt": "content " * 50})
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        unpack(path, target)


def test_cut_tar_is_refused(tmp_path, target):
    path = make_tar(tmp_path / "a.tar", {"one.txt": "x" * 5000}, "w")
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match="damaged"):
        unpack(path, target)


def make_small_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize("make", [make_small_zip, make_tar])
def test_an_archive_that_fills_the_disk_is_refused(tmp_path, target, make, monkeypatch):
    """Zeros are compressed by a factor of 1,000."""
    path = make(tmp_path / "bomb", {"one": "0" * 3_000_000, "two": "0" * 3_000_000})
    unpack(path, target)  # allowed for archives of any size
    monkeypatch.setattr(archives, "_AT_LEAST", 1 << 20)
    assert path.stat().st_size * 200 < 6_000_000
    (target / "one").unlink()
    with pytest.raises(
        DataError, match=r"not safe to unpack(.*\n)*.*200 times what the archive weighs"
    ):
        unpack(path, target)
    assert sum(file.stat().st_size for file in target.iterdir() if file.name == "one") <= 3_000_000
    monkeypatch.setattr(archives, "_MOST_FILES", 1)
    monkeypatch.setattr(archives, "_AT_LEAST", 1 << 30)
    with pytest.raises(DataError, match="more than 1 files"):
        unpack(path, target)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"one.txt", b"\xa0ne.txt", "is damaged"),  # marked as UTF-8, which it is not
        (b"\x07\x00", b"\x00\x00", "is not safe to unpack|is damaged"),  # no name
    ],
)
def test_a_member_without_a_readable_name_is_refused(tmp_path, target, old, new, told):
    file = make_zip(tmp_path / "a.zip", {"one.txt": "1"})
    content = file.read_bytes()
    directory = content.rindex(b"PK\x01\x02")
    entry = bytearray(content[directory:])
    entry[9] |= 8  # the name is UTF-8
    file.write_bytes(content[:directory] + bytes(entry).replace(old, new, 1))
    with pytest.raises(DataError, match=told):
        unpack(file, target)


@pytest.mark.parametrize("left", [11, 40])
def test_a_cut_archive_is_damaged(tmp_path, target, left):
    file = make_tar(tmp_path / "a.tar.gz", {"one.txt": "1"})
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(DataError, match="is damaged"):
        unpack(file, target)


@pytest.mark.parametrize("members", [["a", "a/b"], ["a/b", "a"]])
def test_a_file_that_is_a_folder_of_another_is_damage(tmp_path, target, members):
    with pytest.raises(DataError, match="is damaged"):
        unpack(make_zip(tmp_path / "a.zip", dict.fromkeys(members, "1")), target)


@pytest.mark.parametrize("name", ["a" * 256, "x/" + "é" * 128])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, target, name):
    with pytest.raises(DataError, match="not safe to unpack"):
        unpack(make_tar(tmp_path / "a.tar.gz", {name: "1"}), target)
