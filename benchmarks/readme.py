"""Publishes what `peers.py` measured: fills the table of figures in README.md.

``python benchmarks/readme.py`` writes it; with ``--check`` it only tells whether that
would change anything.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    figures = render(json.loads(options.results.read_text()))
    old = options.readme.read_text()
    new = fill(old, figures)
    if not options.check:
        options.readme.write_text(new)
    elif new != old:
        sys.exit(
            f"{options.readme.name} is not up to date with {options.results.name}; run "
            "`python benchmarks/readme.py`."
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if not up to date"
    )
    return parser.parse_args(arguments)


def fill(readme: str, figures: str) -> str:
    """`readme` with `figures` between the markers."""
    begins, ends = readme.count(BEGIN), readme.count(END)
    if (begins, ends) != (1, 1) or readme.index(BEGIN) > readme.index(END):
        raise ValueError(
            f"README.md must hold the lines `{BEGIN}` and `{END}` once each, in this "
            f"order, got {begins} and {ends} of them; put both where the figures go."
        )
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def render(results: dict[str, Any]) -> str:
    """A table in Markdown for each optimizer, and what they were made of and by."""
    records = results["records"]
    optimizers = dict.fromkeys(record["optimizer"] for record in records)
    tables = [
        render_table([r for r in records if r["optimizer"] == optimizer])
        for optimizer in optimizers
    ]
    return "\n\n".join([*tables, render_origin(results)])


def render_table(records: list[dict[str, Any]]) -> str:
    """The records of one optimizer, a method in each row."""
    references = list(records[0]["ratios"])
    head = [records[0]["optimizer"], *(f"time / {name}" for name in references)]
    table = [[*head, "memory, P"], ["---", *["---:"] * (len(references) + 1)]]
    for record in records:
        ratios = [render_ratio(record, reference) for reference in references]
        table.append([record["method"], *ratios, render_memory(record)])
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def render_ratio(record: dict[str, Any], reference: str) -> str:
    if record["method"] == reference:
        return "1"
    ratio = record["ratios"][reference]
    lower, upper = ratio["lower_quartile"], ratio["upper_quartile"]
    return f"{ratio['median']:.2f} ({lower:.2f}–{upper:.2f})"


def render_memory(record: dict[str, Any]) -> str:
    memory = record["memory_in_p"]
    return f"{memory['arguments']:.2f} + {memory['temporaries']:.2f}"


def render_origin(results: dict[str, Any]) -> str:
    """What the figures are of, and where they come from, in one paragraph."""
    scenario, hardware = results["scenario"], results["hardware"]
    machine = hardware["device"]
    if hardware["platform"] == "cpu":
        machine = f"{hardware['cpu_count']} cores of {hardware['cpu_model']}"
    versions = ", ".join(f"{name} {v}" for name, v in results["versions"].items())
    commit = f", commit {results['commit']}" if results["commit"] else ""
    return (
        "Time of one window: the median of its ratios to the other method's in the "
        f"same round, and their quartiles, over {scenario['rounds']} rounds. Memory: "
        "arguments + temporaries of the largest program, in P, the "
        f"{scenario['params_bytes'] / 1e6:.1f} MB of {scenario['dtype']} parameters. "
        f"A window is {scenario['num_microbatches']} micro-batches of "
        f"{scenario['microbatch_size']} rows. {versions}; {machine}; "
        f"{results['date']}{commit}. Made by `python benchmarks/peers.py` and "
        "`python benchmarks/readme.py`."
    )


if __name__ == "__main__":
    main()
