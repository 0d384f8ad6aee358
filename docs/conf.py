"""How ``make docs`` makes the site of this repository.

The source folder is the repository, not `docs`, so that a link which works between the
files there works in the site.
"""

import ast
import inspect
import textwrap
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

project = "optax_accum"
author = "The optax_accum authors"
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "notebooks/*.ipynb"]
exclude_patterns = ["build", "dist", ".*", "**/.ipynb_checkpoints"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_attr_annotations = False  # evaluated, and long
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"  # what is stored was executed, and is tested to be

# Names in single backticks: links where they are ours, see `keep_as_code`.
default_role = "py:obj"
# Built where nothing can be fetched, so that names of others have nowhere to lead.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|jax|matplotlib|nnx|optax|typing)\..*"),
    ("py:.*", r"Any|ArrayLike|Callable|DTypeLike|Iterable|Mapping|Sequence"),
    ("py:.*", r"Figure|Literal|Protocol|SupportsIndex"),
    # Choices and what is only read: told in the docstrings, not public names.
    ("py:.*", r"(\w+\.)*(Candidate|CollectiveReport|Gather|Mesh|OnSkip|Reduction)"),
    ("py:.*", r"(\w+\.)*(SizeHint|Trials)"),
]

html_theme = "furo"
html_title = "optax_accum"
html_extra_path = ["site"]
html_show_sourcelink = False
html_copy_source = False

# The other classes are made for users, who never call them.
MARKERS = ("Concat", "Last", "Max", "Mean", "Min", "Stack", "Sum")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", use_signature_as_written)
    app.connect("missing-reference", keep_as_code)


def use_signature_as_written(
    app: Sphinx, what: str, name: str, obj: Any, *_: Any
) -> tuple[str, str | None] | None:
    """Types as the source names them: evaluated ones are long and private."""
    if what == "class":
        return None if obj.__name__ in MARKERS else ("", None)
    if what not in ("function", "method"):
        return None
    function = ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    if what == "method":
        del (arguments.posonlyargs or arguments.args)[0]
    # A quoted one is a name that only type checkers import.
    returns = ast.unparse(function.returns).strip("'") if function.returns else None
    return f"({ast.unparse(arguments)})", returns


def keep_as_code(
    app: Sphinx, env: Any, node: nodes.Element, content: nodes.TextElement
) -> nodes.TextElement | None:
    """Of the names in single backticks those that lead nowhere, such as arguments."""
    return content if node["reftype"] == "obj" else None
