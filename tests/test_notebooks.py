"""Every notebook runs from top to bottom, and is stored as such a run left it."""

import json
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from execute import execute
from nbclient.exceptions import CellExecutionError, CellTimeoutError

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
MAX_OUTPUT = 200_000  # bytes; larger ones make a repository heavy and a page slow

every_notebook = pytest.mark.parametrize(
    "path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem
)


def _code_cells(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _counts(cells):
    return [cell.execution_count for cell in cells]


def _write(path, source):
    cell = nbformat.v4.new_code_cell(source)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)


def test_notebooks_are_found():
    assert (NOTEBOOKS / "optax_gradient_accumulation.ipynb").exists()


@every_notebook
@pytest.mark.slow
def test_notebook_runs(path, tmp_path):
    copy = Path(shutil.copy(path, tmp_path))
    execute(copy)
    assert _counts(_code_cells(copy)) == _counts(_code_cells(path))


@every_notebook
def test_notebook_is_stored_executed(path):
    cells = _code_cells(path)
    assert _counts(cells) == list(range(1, len(cells) + 1))

    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert max(len(json.dumps(output).encode()) for output in outputs) <= MAX_OUTPUT


def test_execute_uses_this_interpreter(tmp_path):
    path = tmp_path / "notebook.ipynb"
    _write(path, "import sys\nprint(sys.executable)")
    execute(path)
    (cell,) = _code_cells(path)
    assert cell.outputs[0].text.strip() == sys.executable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("assert 1 + 1 == 3", CellExecutionError),
        ("import time\ntime.sleep(60)", CellTimeoutError),
    ],
)
def test_execute_stores_no_failed_run(source, error, tmp_path):
    path = tmp_path / "notebook.ipynb"
    _write(path, source)
    before = path.read_bytes()
    with pytest.raises(error):
        execute(path, timeout=1)
    assert path.read_bytes() == before
