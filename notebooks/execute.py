"""Executes notebooks in place: ``python notebooks/execute.py [NOTEBOOK ...]``.

Without arguments, every notebook beside this file. What would differ from one run or
machine to the next, and is no result, is left out, so that diffs stay small.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient

TIMEOUT = 400  # seconds for a whole notebook
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class _ThisInterpreter(KernelSpecManager):
    """Every kernel is the running interpreter, whatever is installed as "python3"."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=launch, display_name=kernel_name, language="python")


def execute(path: Path, timeout: float = TIMEOUT) -> None:
    """Runs the notebook at `path` from top to bottom, in its folder, and stores it.

    Args:
      path: where the notebook is read and written.
      timeout: seconds for all cells together.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised; nothing is stored.
      nbclient.exceptions.CellTimeoutError: `timeout` has passed; nothing is stored.
    """
    notebook = nbformat.read(path, as_version=4)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as sockets:
        # Sockets in a folder of their own: ports may be taken by a run beside this one.
        kernel = AsyncKernelManager(
            kernel_spec_manager=_ThisInterpreter(),
            transport="ipc",
            connection_file=str(Path(sockets, "kernel.json")),
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            # nbclient's timeout is for each cell; 0 would be none.
            timeout_func=lambda cell: max(1, deadline - time.monotonic()),
            resources={"metadata": {"path": str(path.parent)}},
            record_timing=False,
            coalesce_streams=True,
        )
        # A client that was given its kernel manager would leave the kernel running.
        asyncio.run(client.async_execute(cleanup_kc=True))

    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        kept = {key: cell.metadata[key] for key in cell.metadata if key == "tags"}
        cell.metadata = nbformat.from_dict(kept)
    nbformat.write(notebook, path)


def main(arguments: list[str]) -> None:
    paths = map(Path, arguments) if arguments else Path(__file__).parent.glob("*.ipynb")
    for path in sorted(paths):
        start = time.perf_counter()
        execute(path)
        print(f"{path.name}: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
