"""The notebook runs from its first cell to its last and ends in coloured answers."""

import json
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_accepted_tokens_in_colour(monkeypatch, tmp_path):
    spec = tmp_path / "kernels" / "python3"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": command, "display_name": "Python 3", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(kernel), encoding="utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))  # the kernel is this very interpreter
    monkeypatch.setenv("DRAFTERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[2]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    ran = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    outputs = [output for cell in ran.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    answers = [page for page in pages if '<span style="background: #b2f2bb' in page]
    assert len(answers) == 2 and all(len(answer) > 200 for answer in answers)
    assert any("acceptance length: " in output.get("text", "") for output in outputs)


def test_the_notebook_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")
