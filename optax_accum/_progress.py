"""A progress bar on the terminal, for those who have ``rich``."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any


@contextlib.contextmanager
def progress_bar(total: int) -> Generator[Callable[[str], None]]:
    """Hands out what is told that the next of `total` pieces of work begins, and which.

    Shown in a terminal or a notebook, and removed at the end. It is a convenience:
    without ``rich``, which the package does not depend on, nothing is shown.
    """
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        Console = Progress = None
    console = None if Console is None else Console(stderr=True)
    if console is None or Progress is None or not _is_watched(console):
        # Outside of the `except`, or every error of the work would be shown as another
        # one, which came while this one was handled.
        yield lambda description: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def begin(description):
            nonlocal begun
            progress.update(task, completed=begun, description=description)
            begun += 1

        yield begin


def _is_watched(console: Any) -> bool:
    if not console.is_jupyter:
        return console.is_terminal
    # Without ipywidgets, rich leaves a warning in the notebook, and no bar.
    import importlib.util

    return importlib.util.find_spec("ipywidgets") is not None
