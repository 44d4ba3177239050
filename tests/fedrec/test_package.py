# SPDX-License-Identifier: Apache-2.0
"""The package itself: its names, and the packages beside it."""

import os
import subprocess
import sys

import pandas as pd
import pytest

import fedrec
from fedrec.neighbours import NEIGHBOURS, ROOT


def test_every_public_name_is_there(tmp_path):
    table = {
        "name": "tiny",
        "dataset": {"name": "synthetic", "users": 24, "items": 30, "mean-interactions": 9},
        "evaluation": {"baselines": ["popularity"]},
    }
    rows = [(user, (user * 7 + n * n) % 13) for user in range(30) for n in range(4)]
    frame = pd.DataFrame(rows, columns=["Kunde", "Artikel"])
    given = {"output": tmp_path / "tried", "system": "linear"}
    tried = fedrec.try_table(frame, **given, overrides=["seed=1"])
    assert tried.folder == tmp_path / "tried" / "run" and tried.experiment.seed == 1
    assert len(repr(tried)) < 1000 and "popularity" in repr(tried)
    assert tried._repr_html_().count("<tr") == len(tried.baselines) + 2
    with pytest.raises(fedrec.FedrecError, match="not empty"):
        fedrec.try_table(frame, output=tmp_path / "tried")
    used = {
        "load": lambda: fedrec.load(table).name == "tiny",
        "run": lambda: fedrec.run(table, output=tmp_path / "run").metrics == {},
        "resume": lambda: fedrec.resume(tmp_path / "run").experiment.name == "tiny",
        "Result": lambda: "popularity" in fedrec.Result.load(tmp_path / "run").baselines,
        "Experiment": lambda: fedrec.Experiment.parse(table).resolve() == fedrec.load(table),
        "FedrecError": lambda: "fix: b" in str(fedrec.FedrecError("a", fix="b")),
        "try_table": lambda: "ease" in tried.baselines,
        "Interactions": lambda: callable(fedrec.Interactions.with_rows),
    }
    assert set(used) == set(fedrec.__all__) <= set(dir(fedrec))
    assert [name for name, works in used.items() if not works()] == []
    for nothing in (None, 3):
        with pytest.raises(fedrec.FedrecError, match="no experiment is given"):
            fedrec.run(nothing)  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = fedrec.rum


def import_in(folder, *options, code="import fedrec", **environment):
    (folder / "script.py").write_text(code)
    return subprocess.run(
        [sys.executable, *options, "script.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_file_that_hides_a_package_is_named_with_what_to_do(tmp_path, monkeypatch, name, form):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    hiding = tmp_path / (name if form == "folder" else f"{name}.py")
    if form == "folder":
        hiding.mkdir()
    (hiding / "__init__.py" if form == "folder" else hiding).touch()
    done = import_in(tmp_path)
    assert done.returncode == 1 and f"ImportError: {hiding} hides a package" in done.stderr
    assert f"the package {name!r} in {ROOT}" in done.stderr and "rename" not in done.stderr
    assert "fix: python -P script.py, or PYTHONSAFEPATH=1" in done.stderr
    works = "import fedrec; fedrec.run"
    assert import_in(tmp_path, "-P", code=works).returncode == 0
    assert import_in(tmp_path, code=works, PYTHONSAFEPATH="1").returncode == 0


@pytest.mark.slow
def test_a_folder_of_data_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in NEIGHBOURS:
        (tmp_path / name).mkdir()
    assert import_in(tmp_path, code="import fedrec; fedrec.run").returncode == 0
