"""The site has a place for every page, every notebook and every public name."""

import re

from pages import DOCS, ROOT

import optax_accum

NOT_LISTED = {DOCS / "index.md"}  # the list itself


def find_listed():
    """What the tables of contents of the index name, as paths without suffix."""
    index = (DOCS / "index.md").read_text()
    tables = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.M | re.S)
    lines = "\n".join(tables).splitlines()
    entries = [line for line in lines if line and not line.startswith(":")]
    targets = [re.sub(r"^.*<(.*)>$", r"\1", entry) for entry in entries]
    return [(DOCS / target).resolve() for target in targets]


def test_every_page_and_notebook_is_listed_once():
    pages = {*DOCS.glob("*.md")} - NOT_LISTED
    notebooks = ROOT.glob("notebooks/*.ipynb")
    files = [*pages, *notebooks, ROOT / "README.md", ROOT / "CHANGELOG.md"]
    assert sorted(find_listed()) == sorted(path.with_suffix("") for path in files)


def find_documented():
    """The public names that the reference has an entry of."""
    page = (DOCS / "api.md").read_text()
    return re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, re.M)


def test_every_public_name_is_in_the_reference_once():
    assert sorted(find_documented()) == sorted(optax_accum.__all__)


def test_modules_of_their_own_are_in_the_reference():
    page = (DOCS / "api.md").read_text()
    modules = {path.stem for path in ROOT.glob("optax_accum/[!_]*.py")}
    documented = re.findall(r"^\.\. automodule:: optax_accum\.(\w+)$", page, re.M)
    assert sorted(documented) == sorted(modules)
