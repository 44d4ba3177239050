# SPDX-License-Identifier: Apache-2.0
"""Import of a local copy: complete and verified, or not at all."""

import os
import shutil
import tarfile
import zipfile

import pytest

from fedrec.data.fetching.importing import import_data
from fedrec.data.reader import data_directory
from fedrec.errors import DataError, ExperimentError

REVIEW = '{"reviewerID": "A2", "asin": "B1", "overall": 5.0, "unixReviewTime": 1367193600}\n'
FILM = "1:\n7,3,2005-09-06\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def copy(tmp_path):
    folder = tmp_path / "copy" / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "Office_5.json").write_text(REVIEW)
    (folder / "unrelated.txt").write_text("not needed")
    return tmp_path / "copy"


def as_folder(copy):
    return copy


def as_zip(copy):
    return shutil.make_archive(str(copy.parent / "a"), "zip", copy)


def as_tar(copy):
    return shutil.make_archive(str(copy.parent / "a"), "gztar", copy)


def as_file(copy):
    return next(copy.rglob("*.json"))


@pytest.mark.parametrize("packed", [as_folder, as_zip, as_tar, as_file])
def test_takes_the_needed_files_from_any_form(home, copy, packed):
    folder = import_data("amazon-5core", type(home)(packed(copy)))
    assert folder == home / "amazon-5core"
    assert [path.name for path in folder.iterdir()] == ["Office_5.json"]
    assert [path.name for path in home.iterdir()] == ["amazon-5core"]
    assert (copy / "deep" / "er" / "Office_5.json").exists()


def test_refused_copy_leaves_nothing(home, copy):
    (copy / "deep" / "er" / "Office_5.json").write_text(REVIEW[:-30])
    with pytest.raises(DataError, match="line 1:"):
        import_data("amazon-5core", copy)
    assert not any(home.iterdir())


def test_subfolders_of_the_documented_form_are_kept(home, tmp_path):
    # The counts of the Netflix data are known, so a small copy is refused because of its counts.
    (tmp_path / "nf" / "download" / "training_set").mkdir(parents=True)
    (tmp_path / "nf" / "download" / "training_set" / "mv_0000001.txt").write_text(FILM)
    with pytest.raises(DataError, match="number of rows") as caught:
        import_data("netflix", tmp_path / "nf")
    assert (caught.value.expected, caught.value.got) == ("100,480,507 rows", "1 rows")
    assert not any(home.iterdir())


def test_missing_file_is_named(home, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "ratings.dat").write_text("1::2::3::4\n")
    with pytest.raises(DataError, match="not the files of 'ml-1m'") as caught:
        import_data("ml-1m", tmp_path / "half")
    assert caught.value.got == "without users.dat, movies.dat"
    assert not any(home.iterdir())


def test_file_nearest_to_the_root_counts(home, copy):
    shutil.copy(as_file(copy), copy / "Office_5.json")
    (copy / "deep" / "er" / "Office_5.json").write_text("not this one")
    assert (import_data("amazon-5core", copy) / "Office_5.json").read_text() == REVIEW


def test_two_files_of_one_name_at_one_depth_are_refused(home, copy):
    (copy / "deep" / "other").mkdir()
    (copy / "deep" / "other" / "Office_5.json").write_text(REVIEW)
    with pytest.raises(DataError, match="two files fit one name"):
        import_data("amazon-5core", copy)


def test_existing_folder_is_kept(home, copy):
    (home / "amazon-5core").mkdir(parents=True)
    (home / "amazon-5core" / "own.json").write_text("precious")
    with pytest.raises(DataError, match="exists already"):
        import_data("amazon-5core", copy)
    assert (home / "amazon-5core" / "own.json").read_text() == "precious"


def test_unsafe_archive_is_refused(home, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../Office_5.json", REVIEW)
    with pytest.raises(DataError, match="not safe"):
        import_data("amazon-5core", tmp_path / "a.zip")
    assert not list(tmp_path.rglob("Office_5.json"))


def test_a_pipe_is_refused_before_it_is_read(home, tmp_path):
    """Reading it would wait for a writer for ever."""
    os.mkfifo(tmp_path / "Office_5.json")
    with pytest.raises(DataError, match="cannot be imported"):
        import_data("amazon-5core", tmp_path / "Office_5.json")


def test_nothing_to_import(home, tmp_path):
    with pytest.raises(DataError, match="nothing to import"):
        import_data("amazon-5core", tmp_path / "absent")
    with pytest.raises(DataError, match="not a dataset to import"):
        import_data("table", tmp_path)
    with pytest.raises(ExperimentError, match="unknown dataset"):
        import_data("ml-2m", tmp_path)


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "folder"), [("ml-100k", "ml-100k"), ("amazon-upc", "office"), ("frappe", "frappe")]
)
def test_published_data_are_imported(tmp_path, monkeypatch, name, folder):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(data_directory() / folder, "some/where")
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path / "home"))
    assert import_data(name, path) == tmp_path / "home" / folder
    if name == "ml-100k":
        assert (tmp_path / "home" / folder / "u3.test").is_file()
    if name == "frappe":
        assert (tmp_path / "home" / folder / "meta.csv").is_file()


@pytest.mark.real_data
def test_damaged_published_data_are_not_imported(tmp_path, monkeypatch):
    shutil.copytree(data_directory() / "ml-100k", tmp_path / "copy")
    with (tmp_path / "copy" / "u.data").open("a") as file:
        file.write("1\t1\t5\t874965758\n")
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path / "home"))
    with pytest.raises(DataError, match="number of rows"):
        import_data("ml-100k", tmp_path / "copy")
    assert not any((tmp_path / "home").iterdir())
