"""The Python of README.md and of the pages in docs/, run as users would run it.

As a script, it prints the first example of the README.
"""

import re
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def code_blocks(page: Path) -> list[str]:
    """The blocks of Python in a page, in their order."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


def run_page(page: Path) -> dict[str, Any]:
    """What a page's blocks, run as one program, leave behind."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in code_blocks(page):
            exec(compile(block, page.name, "exec"), namespace)
    return namespace


if __name__ == "__main__":
    print(code_blocks(README)[0])
