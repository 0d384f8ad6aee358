"""What a step sends, computes and keeps on several devices that share the rows.

For each number of devices a fresh process forces so many on the CPU, and takes one step
in every way there is: see `sharded.py`. What is sent, computed and kept is what the
compiler has planned for each device. The time is that of one machine, whose cores all
devices share.

``python benchmarks/distributed.py`` measures, ``python benchmarks/readme.py``
publishes.

Letters: ``N`` micro-batches in a batch; ``P`` is one parameter-sized buffer.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import sharded
from measuring import parse, render_verdict, write
from origin import ROOT, render_origin
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sharded import BOUND, GATHER_ONCE, OURS
from tables import render_rows

RESULTS = ROOT / "benchmarks" / "results" / "distributed.json"
COUNTS = (4, 8)  # devices
QUICK_COUNTS = (2,)


class Promise(NamedTuple):
    """What a method may cost at most, as a multiple of the bound's costs."""

    method: str
    quantity: Literal["collectives", "bytes moved", "temporaries", "time"]
    at_most: float


PROMISES = (
    Promise(OURS, "collectives", 1.0),
    Promise(OURS, "bytes moved", 1.0),
    Promise(OURS, "temporaries", 1.02),
    Promise(OURS, "time", 1.1),
    Promise(GATHER_ONCE, "bytes moved", 1.0),
)


# -- The measurement


def measure(
    counts: Sequence[int], run: str, rounds: int, jobs: int = 1
) -> dict[str, Any]:
    """Measures on each number of devices: all that goes into the file."""
    console = Console(stderr=True)
    parts = [
        in_fresh_process(count, run, rounds, jobs)
        for count in track(counts, "measuring", console=console)
    ]
    records = [record for part in parts for record in part.pop("records")]
    return parts[0] | {"devices": list(counts), "records": records}


def in_fresh_process(count: int, run: str, rounds: int, jobs: int) -> dict[str, Any]:
    """What `sharded` finds on so many devices of the CPU."""
    flags = f"--xla_force_host_platform_device_count={count}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, sharded.__file__, run, str(rounds), str(jobs)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


# -- What was promised


def judge(results: dict[str, Any]) -> list[str]:
    """A line for each promise and number of devices."""
    return [
        render_verdict(
            f"{promise.method} / {BOUND}, {promise.quantity} on {count} devices",
            measured(promise, results, count),
            promise.at_most,
        )
        for promise in PROMISES
        for count in results["devices"]
    ]


def measured(promise: Promise, results: dict[str, Any], count: int) -> float:
    """What the records say about a promise."""
    ours, theirs = (find(results, count, name) for name in (promise.method, BOUND))
    if promise.quantity == "time":
        return ours["ratios"][BOUND]["median"]
    if promise.quantity == "temporaries":
        return ours["memory_in_p"]["temporaries"] / theirs["memory_in_p"]["temporaries"]
    key = {
        "collectives": "parameter_sized_collectives",
        "bytes moved": "bytes_moved",
    }[promise.quantity]
    return ours[key] / theirs[key]


def find(results: dict[str, Any], count: int, method: str) -> dict[str, Any]:
    return next(
        record
        for record in results["records"]
        if (record["devices"], record["method"]) == (count, method)
    )


# -- The terminal


def main(arguments: list[str] | None = None) -> None:
    summary = __doc__.splitlines()[0]
    options = parse(arguments, summary, RESULTS, sharded.FULL.timing.rounds)
    name, counts = ("quick", QUICK_COUNTS) if options.quick else ("full", COUNTS)
    rounds = options.rounds or sharded.RUNS[name].timing.rounds
    results = measure(counts, name, rounds, options.jobs)
    print_results(results, Console(width=None if sys.stdout.isatty() else 160))
    if options.output:
        write(results, options.output)


def print_results(results: dict[str, Any], console: Console) -> None:
    """The table of the README, then what was promised."""
    head, rows = make_table(results)
    table = Table(title=f"one step, {results['scenario']['optimizer']}")
    for i, heading in enumerate(head):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in judge(results):
        console.print(line, highlight=False)


# -- The README


def render(results: dict[str, Any]) -> str:
    """A table in Markdown, and what it was made of and by."""
    return f"{render_rows(*make_table(results))}\n\n{render_note(results)}"


def make_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Its head, and a row for each method; in a cell are all numbers of devices."""
    counts = results["devices"]
    head = [
        f"on {join(counts)} devices",
        "collectives",
        "moved, MB",
        f"FLOPs / {BOUND}",
        "temporaries, P",
        *(f"time / {BOUND}, {count} devices" for count in counts),
    ]
    methods = dict.fromkeys(record["method"] for record in results["records"])
    return head, [make_row(results, method) for method in methods]


def make_row(results: dict[str, Any], method: str) -> list[str]:
    counts = results["devices"]
    mine = [find(results, count, method) for count in counts]
    flops = (r["flops"] / find(results, r["devices"], BOUND)["flops"] for r in mine)
    collectives = (r["parameter_sized_collectives"] for r in mine)
    moved = (r["bytes_moved"] for r in mine)
    return [
        method,
        join("?" if n is None else n for n in collectives),
        join("?" if size is None else f"{size / 1e6:.1f}" for size in moved),
        join(f"{ratio:.2f}" for ratio in flops),
        join(f"{r['memory_in_p']['temporaries']:.2f}" for r in mine),
        *(render_ratio(record) for record in mine),
    ]


def join(cells: Iterable[Any]) -> str:
    return " / ".join(map(str, cells))


def render_ratio(record: dict[str, Any]) -> str:
    if record["method"] == BOUND:
        return "1"
    ratio = record["ratios"][BOUND]
    lower, upper = ratio["lower_quartile"], ratio["upper_quartile"]
    return f"{ratio['median']:.2f} ({lower:.2f}–{upper:.2f})"


def render_note(results: dict[str, Any]) -> str:
    """What the figures are of, and where they come from, in one paragraph."""
    scenario = results["scenario"]
    rounds = min(record["rounds"] for record in results["records"])
    return (
        f"One step with {scenario['optimizer']}, of {scenario['num_microbatches']} "
        f"micro-batches with {scenario['microbatch_size']} rows each on all devices "
        "together, whose loss is a mean over tokens that are not masked. Contiguous "
        "micro-batches are blocks of neighbouring rows, strided ones have every Nth; "
        f"what stands above the {BOUND} is left to the compiler. Collectives: "
        "how often in a step one runs that is as large as a parameter; all-reduces at "
        "one place are combined into one, gathers and scatters are not. Moved: what "
        "one device sends in all of a step's collectives, in rings. FLOPs: of one "
        "device, the body of a loop counted once; every method has one loop, over the "
        "micro-batches. Temporaries: on one device, in P, the "
        f"{scenario['params_bytes'] / 1e6:.1f} MB of {scenario['dtype']} parameters, "
        "which with `gather` are sharded, as is the optimizer's state. Time: the "
        "median of its ratios to the other method's in the same round, and their "
        f"quartiles, over {rounds} rounds or more. It says little of what a network "
        "would take: the devices are made up by one process and share the cores and "
        f"the memory of one machine. {render_origin(results)} Made by "
        "`python benchmarks/distributed.py` and `python benchmarks/readme.py`."
    )


if __name__ == "__main__":
    main()
