# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from their first cell to their last, are stored without outputs, and show a
progress bar, a result and a plot."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def outputs(notebook, kind):
    """What the cells of a notebook showed in one MIME type."""
    shown = (out for cell in notebook.cells for out in cell.get("outputs", ()))
    return [out["data"][kind] for out in shown if kind in out.get("data", {})]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    notebook = nbformat.read(file, as_version=4)
    assert not outputs(notebook, "text/plain")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=resources).execute()
    pages = outputs(notebook, "text/html")
    assert outputs(notebook, "image/png") and any("<table" in page for page in pages)
    if file.stem != "privacy":
        assert any("<progress" in page for page in pages)
        said = [out for cell in notebook.cells for out in cell.get("outputs", ())]
        assert not any("ipywidgets" in str(out) for out in said)


def test_there_are_three():
    assert len(NOTEBOOKS) == 3
