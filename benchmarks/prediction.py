"""How well the peak of a train step is predicted, and whether a plan keeps its limit.

For each model `plan_microbatches` says what the step needs with several numbers of
micro-batches. A fresh process then runs each of these steps and measures how much its
resident memory grows. The claim: both differ by at most 5 % or 24 MB, and with a limit
between two candidates the chosen one stays below and the next larger one does not.

``python benchmarks/prediction.py`` measures, on Linux; ``python benchmarks/readme.py``
publishes.

Letters: ``N`` micro-batches in a batch.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import resident
import shapes
from measuring import render_verdict, write
from origin import ROOT, describe_origin, render_origin
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from shapes import Shape
from tables import render_rows

RESULTS = ROOT / "benchmarks" / "results" / "prediction.json"
COUNTS = (1, 4, 8, 32)  # N
NEIGHBOURS = (4, 8)  # the limit lies between these two candidates
QUICK_COUNTS = QUICK_NEIGHBOURS = (1, 2)
RELATIVE, ABSOLUTE = 0.05, 24_000_000  # the larger of both is allowed

# A fixed threshold: what is freed goes back to the system and can be seen to do so. By
# default it rises with what was freed, and new arrays hide in memory that is kept.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}


# -- The measurement


def measure(
    measured: Sequence[Shape], counts: Sequence[int], neighbours: tuple[int, int]
) -> dict[str, Any]:
    """Predicts, plans and measures: all that goes into the file."""
    plans, records = [], []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(measured) * (1 + len(counts)))
        for shape in measured:
            progress.update(task, description=f"{shape.name}: planning")
            plan = in_fresh_process("plan", shape, *neighbours, *counts)
            progress.advance(task)
            for count in counts:
                progress.update(task, description=f"{shape.name}: N = {count}")
                records.append(make_record(shape, count, plan["peaks"][str(count)]))
                progress.advance(task)
            plans.append({"model": shape.name} | plan)
    return describe_origin() | {
        "optimizer": resident.OPTIMIZER[0],
        "counts": list(counts),
        "models": [describe(shape) for shape in measured],
        "plans": plans,
        "records": records,
    }


def describe(shape: Shape) -> dict[str, Any]:
    # As JSON has them: lists.
    sizes = json.loads(json.dumps(shape.model._asdict()))
    return {"name": shape.name, "sizes": sizes, "rows": shape.rows}


def make_record(shape: Shape, count: int, predicted: int) -> dict[str, Any]:
    """What was predicted of one step, beside what is measured now."""
    return {
        "model": shape.name,
        "num_microbatches": count,
        "microbatch_size": shape.rows // count,
        "predicted_bytes": predicted,
    } | in_fresh_process("measure", shape, count)


def in_fresh_process(job: str, shape: Shape, *counts: int) -> dict[str, Any]:
    """What that job of `resident` returns in a process that has done nothing else."""
    # One device, whatever this process asks for: the tests ask for eight.
    environment = ALLOCATOR | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, resident.__file__, job, shape.name, *map(str, counts)],
        env=os.environ | environment | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


# -- What was promised


def judge(results: dict[str, Any]) -> list[str]:
    """A line for each promise and model of which there is one."""
    lines = []
    beyond = {shape.name for shape in shapes.BEYOND}
    for plan in results["plans"]:
        name, limit = plan["model"], plan["memory_limit"]
        if name in beyond:
            continue
        mine = [r for r in results["records"] if r["model"] == name]
        measured = {r["num_microbatches"]: r["measured_bytes"] for r in mine}
        chosen = measured.get(plan["num_microbatches"], math.inf)
        larger = measured.get(plan["next_larger"], 0)
        text = f"{name}: predicted peak, parts of what it may be off"
        lines += [
            render_verdict(text, max(map(deviation, mine)), 1),
            render_verdict(f"{name}: peak / limit, as planned", chosen / limit, 1),
            render_verdict(
                f"{name}: limit / peak, next larger micro-batch",
                limit / larger if larger else math.inf,
                1,
            ),
        ]
    return lines


def deviation(record: dict[str, Any]) -> float:
    """How far prediction and measurement are apart; 1 is as much as is allowed."""
    measured = record["measured_bytes"]
    allowed = max(RELATIVE * measured, ABSOLUTE)
    return abs(record["predicted_bytes"] - measured) / allowed


# -- The terminal


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    given = (*shapes.FULL, *shapes.BEYOND), COUNTS, NEIGHBOURS
    if options.quick:
        given = shapes.QUICK, QUICK_COUNTS, QUICK_NEIGHBOURS
    results = measure(*given)
    print_results(results, Console(width=None if sys.stdout.isatty() else 120))
    if options.output:
        write(results, options.output)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, help=f"default: {RESULTS.name}; of a quick run, none"
    )
    parser.add_argument("--quick", action="store_true", help="small and meaningless")
    options = parser.parse_args(arguments)
    if options.output is None and not options.quick:
        options.output = RESULTS
    return options


HEAD = ("model", "N", "predicted, MB", "measured, MB", "difference")


def print_results(results: dict[str, Any], console: Console) -> None:
    table = Table(title=f"peak of a train step, {results['optimizer']}")
    for i, heading in enumerate(HEAD):
        table.add_column(heading, justify="right" if i else "left")
    for record in results["records"]:
        table.add_row(*render_record(record))
    console.print(table)
    for line in judge(results):
        console.print(line, highlight=False)


def render_record(record: dict[str, Any]) -> list[str]:
    predicted, measured = record["predicted_bytes"], record["measured_bytes"]
    return [
        record["model"],
        str(record["num_microbatches"]),
        f"{predicted / 1e6:.0f}",
        f"{measured / 1e6:.0f}",
        f"{(predicted - measured) / 1e6:+.1f} MB ({predicted / measured - 1:+.1%})",
    ]


def render(results: dict[str, Any]) -> str:
    """A table in Markdown, a step in each row."""
    table = render_rows(HEAD, map(render_record, results["records"]))
    return (
        f"{table}\n\nThe peak of a train step with {results['optimizer']}, arguments "
        "included: as `plan_microbatches` predicts it, and as the resident memory of a "
        "fresh process grows. The compiler's plan, and so the prediction, lacks what "
        "convolutions on a CPU pack beside it: little where layers are many and "
        "narrow, as much again where they are few and wide. "
        f"{render_origin(results)} Made by "
        "`python benchmarks/prediction.py` and `python benchmarks/readme.py`."
    )


if __name__ == "__main__":
    main()
