"""Publishes what the benchmarks measured: fills the pages with figures and tables.

``python benchmarks/readme.py`` writes them; with ``--check`` it only tells whether that
would change anything.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed
import memory_table
import precision
import prediction
import versions
from origin import ROOT, render_origin
from tables import render_rows

RESULTS = ROOT / "benchmarks" / "results"

# The peers' times that a method's is divided by; the file of results has more.
PEERS = ("gradients and a step", "hand-written scan", "MultiSteps")

# Of the scenarios, at one N: the quantities and the methods in the table.
COUNT = 16
SHOWN = (
    ("time / limit", "make_train_step"),
    ("time / limit", "make_window_steps"),
    ("time / limit", "accumulate"),
    ("time / limit", "MultiSteps"),
    ("time / hand-written scan", "make_train_step"),
    ("time / hand-written scan", "make_train_step, in place"),
    ("temporaries, P", "whole batch"),
    ("temporaries, P", "hand-written scan"),
    ("temporaries, P", "make_train_step"),
    ("temporaries, P", "make_train_step, in place"),
)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    paths = [options.root / "README.md", *sorted(options.root.glob("docs/*.md"))]
    pages = {path: path.read_text() for path in paths}
    for name, render_results in RENDERERS.items():
        results = json.loads((options.results / f"{name}.json").read_text())
        path = find_page(pages, name)
        figures = from_folder(render_results(results), path.parent, options.root)
        pages[path] = fill(pages[path], name, figures)
    for path, page in pages.items():
        if not options.check:
            path.write_text(page)
        elif page != path.read_text():
            sys.exit(
                f"{path.name} is not up to date with {options.results.name}; run "
                "`python benchmarks/readme.py`."
            )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="of README.md and docs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if not up to date"
    )
    return parser.parse_args(arguments)


def find_page(pages: dict[Path, str], name: str) -> Path:
    """The page with the markers of that name."""
    found = [path for path, page in pages.items() if f"<!-- {name}: " in page]
    if len(found) != 1:
        raise ValueError(
            f"One page must hold the lines `<!-- {name}: begin -->` and "
            f"`<!-- {name}: end -->`, got {[path.name for path in found]}; put both "
            "where the figures go."
        )
    return found[0]


def from_folder(figures: str, folder: Path, root: Path) -> str:
    """`figures` with links that lead from this folder where they led from `root`."""
    up = "../" * len(folder.relative_to(root).parts)
    return figures.replace("](benchmarks/", f"]({up}benchmarks/")


def fill(page: str, name: str, figures: str) -> str:
    """`page` with `figures` between the markers of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    begins, ends = page.count(begin), page.count(end)
    if (begins, ends) != (1, 1) or page.index(begin) > page.index(end):
        raise ValueError(
            f"The page must hold the lines `{begin}` and `{end}` once each, in this "
            f"order, got {begins} and {ends} of them; put both where the figures go."
        )
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n{figures}\n{end}{after}"


# -- Peers


def render(results: dict[str, Any]) -> str:
    """A table in Markdown for each optimizer, and what they were made of and by."""
    records = results["records"]
    optimizers = dict.fromkeys(record["optimizer"] for record in records)
    tables = [
        render_table([r for r in records if r["optimizer"] == optimizer])
        for optimizer in optimizers
    ]
    return "\n\n".join([*tables, render_note(results)])


def render_table(records: list[dict[str, Any]]) -> str:
    """The records of one optimizer, a method in each row."""
    head = [records[0]["optimizer"], *(f"time / {name}" for name in PEERS), "memory, P"]
    rows = [
        [
            record["method"],
            *(render_ratio(record, peer) for peer in PEERS),
            render_memory(record),
        ]
        for record in records
    ]
    return render_rows(head, rows)


def render_ratio(record: dict[str, Any], reference: str) -> str:
    if record["method"] == reference:
        return "1"
    ratio = record["ratios"][reference]
    lower, upper = ratio["lower_quartile"], ratio["upper_quartile"]
    return f"{ratio['median']:.2f} ({lower:.2f}–{upper:.2f})"


def render_memory(record: dict[str, Any]) -> str:
    memory = record["memory_in_p"]
    return f"{memory['arguments']:.2f} + {memory['temporaries']:.2f}"


def render_note(results: dict[str, Any]) -> str:
    """What the figures are of, and where they come from, in one paragraph."""
    scenario = results["scenario"]
    return (
        "Time of one window: the median of its ratios to the other method's in the "
        f"same round, and their quartiles, over {scenario['rounds']} rounds. Memory: "
        "arguments + temporaries of the largest program, in P, the "
        f"{scenario['params_bytes'] / 1e6:.1f} MB of {scenario['dtype']} parameters. "
        f"A window is {scenario['num_microbatches']} micro-batches of "
        f"{scenario['microbatch_size']} rows. {render_origin(results)} Made by "
        "`python benchmarks/peers.py` and `python benchmarks/readme.py`."
    )


# -- Scenarios


def render_scenarios(results: dict[str, Any]) -> str:
    """The two figures, a table, and what they were made of and by."""
    figures = [
        f"![{quantity} over N, in four scenarios]"
        f"(benchmarks/results/scenarios_{quantity.lower()}.png)"
        for quantity in ("Time", "Memory")
    ]
    names = [scenario["name"] for scenario in results["scenarios"]]
    records = {
        (record["scenario"], record["method"]): record
        for record in results["records"]
        if record["num_microbatches"] == COUNT
    }
    rows = [
        [
            f"{quantity}: {method}",
            *(render_quantity(records[name, method], quantity) for name in names),
        ]
        for quantity, method in SHOWN
    ]
    table = render_rows([f"N = {COUNT}", *names], rows)
    return "\n\n".join([*figures, table, render_scenarios_note(results)])


def render_quantity(record: dict[str, Any], quantity: str) -> str:
    if quantity == "temporaries, P":
        return f"{record['memory_in_p']['temporaries']:.2f}"
    return f"{record['ratios'][quantity.removeprefix('time / ')]:.2f}"


def render_scenarios_note(results: dict[str, Any]) -> str:
    scenarios = results["scenarios"]
    sizes = ", ".join(f"{s['params_bytes'] / 1e6:.2g}" for s in scenarios)
    rows = ", ".join(dict.fromkeys(str(s["microbatch_size"]) for s in scenarios))
    return (
        "The limit of time is N gradients, each written over the one before, and one "
        "optimizer step. P is one buffer of the size of the parameters. One plain "
        "gradient is a call of `jax.jit(jax.value_and_grad(loss_fn))` with one "
        f"micro-batch, of {rows} rows. Times are medians over at most "
        f"{results['rounds']} rounds, of ratios within a round, with "
        f"{results['optimizer']}. P is {sizes} MB. {render_origin(results)} Made by "
        "`python benchmarks/scenarios.py`, `python benchmarks/figures.py` and "
        "`python benchmarks/readme.py`."
    )


# What each file of results becomes.
RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "peers": render,
    "scenarios": render_scenarios,
    "precision": precision.render,
    "prediction": prediction.render,
    "memory_table": memory_table.render,
    "distributed": distributed.render,
    "versions": versions.render,
}

if __name__ == "__main__":
    main()
