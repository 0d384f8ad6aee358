"""Records with which versions all tests have passed.

``make test-oldest`` and ``make test-newest`` run the tests in an environment of their
own, and this script in it, with the folder of the reports that pytest has written.
``python benchmarks/readme.py`` publishes.
"""

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from origin import ROOT, describe_origin
from packaging.requirements import Requirement
from tables import render_rows

RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
ENVIRONMENTS = ("oldest", "newest")
REPORTS = ("quick.xml", "slow.xml")
TOOLS = ("dev", "docs")  # extras that no test needs
BENEATH = ("jaxlib", "numpy")  # nothing of ours asks for them, and all depends on them


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", choices=ENVIRONMENTS, help="what this one is of")
    parser.add_argument("reports", type=Path, help="a folder with those of pytest")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    tests = count_tests(options.reports)
    record = describe_origin() | {"tests": tests, "versions": find_versions()}
    output = options.output
    results = json.loads(output.read_text()) if output.exists() else {}
    results |= {options.environment: record}
    output.parent.mkdir(parents=True, exist_ok=True)
    ordered = {name: results[name] for name in ENVIRONMENTS if name in results}
    output.write_text(json.dumps(ordered, indent=2) + "\n")


def count_tests(reports: Path) -> dict[str, int]:
    """How many passed and were skipped, quick and slow ones; exits where one failed."""
    counts: Counter[str] = Counter()
    for path in (reports / name for name in REPORTS):
        if not path.exists():
            sys.exit(
                f"{path} is missing; run `make test-oldest` or `make test-newest`."
            )
        for suite in ElementTree.parse(path).iter("testsuite"):
            names = ("tests", "skipped", "failures", "errors")
            counts.update({name: int(suite.attrib[name]) for name in names})
    if counts["failures"] or counts["errors"]:
        sys.exit(f"Tests in {reports} have failed; nothing is recorded.")
    return {
        "passed": counts["tests"] - counts["skipped"],
        "skipped": counts["skipped"],
    }


def find_versions() -> dict[str, str]:
    """Python's, and those of the packages that pyproject.toml names for use or test."""
    versions = {"python": sys.version.split()[0]}
    for name in [*BENEATH, *find_packages()]:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # of an extra that was not installed
            continue
    return versions


def find_packages() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    chosen = [extras[extra] for extra in extras if extra not in TOOLS]
    for requirements in (project["dependencies"], *chosen):
        names = (Requirement(requirement).name for requirement in requirements)
        yield from (name for name in names if name != project["name"])


def render(results: dict[str, Any]) -> str:
    """A table in Markdown, a package in each row, an environment in each column."""
    records = results.values()
    recorded = {name for record in records for name in record["versions"]}
    packages = sorted(recorded & {*BENEATH, *find_packages()})
    first = ["python", "jax", "jaxlib", "optax"]
    ordered = [*first, *(name for name in packages if name not in first)]
    rows = [
        [name, *(record["versions"].get(name, "–") for record in records)]
        for name in ordered
    ]
    for outcome in ("passed", "skipped"):
        counts = (str(record["tests"][outcome]) for record in records)
        rows.append([f"tests {outcome}", *counts])
    return f"{render_rows(['', *results], rows)}\n\n{render_note(results)}"


def render_note(results: dict[str, Any]) -> str:
    made = "; ".join(
        f"{environment}: {record['date']}, commit {record['commit']}"
        for environment, record in results.items()
    )
    return (
        "Oldest are the oldest versions that `pyproject.toml` admits, newest the "
        "latest on the day; quick and slow tests together, each warning an error. "
        f"{made}. Made by `make test-oldest`, `make test-newest` and "
        "`python benchmarks/readme.py`."
    )


if __name__ == "__main__":
    main()
