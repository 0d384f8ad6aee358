"""One optimizer step in N micro-batches: this library beside its peers.

Every method does the same maths from the same start, a *window*: the gradients of N
micro-batches and one optimizer step with their mean. The micro-batches are small, so
that the optimizer and the sums count, not the model alone. In each round all methods
take turns; the ratios of turns of one round are what is compared, for they share its
noise.

``python benchmarks/peers.py`` measures, ``python benchmarks/readme.py`` publishes.

Letters: ``N`` micro-batches in a window, ``m`` rows in each; ``P`` is one
parameter-sized buffer.
"""

import argparse
import json
import math
import operator
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import optax
import optax.contrib
from methods import (
    FULL,
    QUICK,
    Method,
    Scenario,
    build_methods,
    check_methods,
    make_problem,
)
from origin import ROOT, describe_origin
from rich.console import Console
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
REFERENCES = ("limit", "hand-written scan", "MultiSteps")
OPTIMIZERS = {"AdamW": optax.adamw(1e-3), "Muon": optax.contrib.muon(1e-3)}


class Promise(NamedTuple):
    """What a method may cost at most, as a multiple of a peer's costs."""

    method: str
    peer: str
    quantity: Literal["time", "temporaries"]
    optimizer: str
    at_most: float


PROMISES = (
    Promise("make_train_step", "hand-written scan", "time", "AdamW", 1.05),
    Promise("make_train_step", "hand-written scan", "time", "Muon", 1.05),
    Promise("make_train_step", "hand-written scan", "temporaries", "AdamW", 1.02),
    Promise("make_train_step", "hand-written scan", "temporaries", "Muon", 1.02),
    Promise("accumulate", "MultiSteps", "time", "AdamW", 0.95),
    Promise("accumulate", "MultiSteps", "time", "Muon", 0.25),
)


# -- The measurement


def measure(
    scenario: Scenario, optimizers: dict[str, optax.GradientTransformation]
) -> dict[str, Any]:
    """Checks the methods, then measures them: all that goes into the file."""
    check_methods(make_problem(scenario, optax.sgd(1.0)))
    records = []
    for name, optimizer in optimizers.items():
        problem = make_problem(scenario, optimizer)
        methods = build_methods(problem)
        seconds = time_rounds(methods, scenario)
        records += make_records(name, methods, seconds, size_of(problem.params))
    return describe_run(scenario) | {"records": records}


def time_rounds(
    methods: dict[str, Method], scenario: Scenario
) -> dict[str, list[float]]:
    """Seconds that a window took, for each method and round."""
    carries, repeats = {}, {}
    for name, method in methods.items():
        carry, _ = take_turn(method, method.carry, 1)  # warms up
        carries[name], seconds = take_turn(method, carry, 1)
        repeats[name] = max(1, math.ceil(scenario.turn_seconds / seconds))
    seconds = {name: [] for name in methods}
    order, shuffle = list(methods), random.Random(0).shuffle
    for _ in range(scenario.rounds):
        shuffle(order)  # so that no method always follows the same one
        for name in order:
            carries[name], taken = take_turn(
                methods[name], carries[name], repeats[name]
            )
            seconds[name].append(taken)
    return seconds


def take_turn(method: Method, carry: Any, repeats: int) -> tuple[Any, float]:
    """The carry after so many windows, and the seconds that one of them took."""
    start = time.perf_counter()
    for _ in range(repeats):
        carry = method.window(carry)
    jax.block_until_ready(carry)
    return carry, (time.perf_counter() - start) / repeats


# -- The records


def make_records(
    optimizer: str,
    methods: dict[str, Method],
    seconds: dict[str, list[float]],
    params_bytes: int,
) -> list[dict[str, Any]]:
    """What there is to say of each method; times are those of one window."""
    return [
        {
            "optimizer": optimizer,
            "method": name,
            "milliseconds": summarize(1000 * taken for taken in seconds[name]),
            "ratios": {
                reference: summarize(
                    map(operator.truediv, seconds[name], seconds[reference])
                )
                for reference in REFERENCES
            },
            "memory_in_p": memory_in_p(method, params_bytes),
            "programs": {key: p.costs for key, p in method.programs.items()},
        }
        for name, method in methods.items()
    ]


def summarize(figures: Iterable[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(figures, n=4, method="inclusive")
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper}


def memory_in_p(method: Method, params_bytes: int) -> dict[str, float]:
    """Arguments and temporaries of the program that needs most of both together."""
    needs = [
        (program.costs["argument_bytes"], program.costs["temporary_bytes"])
        for program in method.programs.values()
    ]
    arguments, temporaries = max(needs, key=sum)
    return {
        "arguments": arguments / params_bytes,
        "temporaries": temporaries / params_bytes,
    }


def size_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def describe_run(scenario: Scenario) -> dict[str, Any]:
    params = jax.eval_shape(lambda: make_problem(scenario, optax.identity()).params)
    return describe_origin() | {
        "scenario": scenario._asdict()
        | {
            "widths": list(scenario.widths),
            "shapes": [list(leaf.shape) for leaf in jax.tree.leaves(params)],
            "dtype": jax.tree.leaves(params)[0].dtype.name,
            "params_bytes": size_of(params),
        },
    }


def measured(promise: Promise, records: list[dict[str, Any]]) -> float:
    """What the records say about a promise."""
    ours, theirs = (
        next(
            record
            for record in records
            if (record["optimizer"], record["method"]) == (promise.optimizer, method)
        )
        for method in (promise.method, promise.peer)
    )
    if promise.quantity == "time":
        return ours["ratios"][promise.peer]["median"]
    return ours["memory_in_p"]["temporaries"] / theirs["memory_in_p"]["temporaries"]


# -- The terminal


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    scenario = QUICK if options.quick else FULL
    if options.rounds:
        scenario = scenario._replace(rounds=options.rounds)
    results = measure(scenario, OPTIMIZERS)
    # A file has no width of its own; a table of eight columns needs more than 80.
    print_results(results, Console(width=None if sys.stdout.isatty() else 140))
    output = options.output or (None if options.quick else RESULTS)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        help="default: benchmarks/results/peers.json; of a quick run, nothing",
    )
    parser.add_argument("--rounds", type=int, help=f"default: {FULL.rounds}")
    parser.add_argument("--quick", action="store_true", help="small and meaningless")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"--rounds must be >= 2 to have quartiles, got {options.rounds}")
    return options


def print_results(results: dict[str, Any], console: Console) -> None:
    """A table for each optimizer, then what was promised."""
    records = results["records"]
    for optimizer in dict.fromkeys(record["optimizer"] for record in records):
        table = Table("method", "ms / window", title=optimizer)
        for reference in REFERENCES:
            table.add_column(f"/ {reference}", justify="right")
        table.add_column("arguments + temporaries, P", justify="right")
        table.add_column("compile, s", justify="right")
        for record in records:
            if record["optimizer"] == optimizer:
                table.add_row(*format_row(record))
        console.print(table)
    for promise in PROMISES:
        figure = measured(promise, records)
        verdict = "kept  " if figure <= promise.at_most else "MISSED"
        console.print(
            f"{verdict} {promise.method} / {promise.peer}, {promise.quantity} with "
            f"{promise.optimizer}: {figure:.3f}, promised at most {promise.at_most}",
            highlight=False,
        )


def format_row(record: dict[str, Any]) -> list[str]:
    memory = record["memory_in_p"]
    compiling = (p["compile_seconds"] for p in record["programs"].values())
    return [
        record["method"],
        f"{record['milliseconds']['median']:.1f}",
        *(format_ratio(record["ratios"][reference]) for reference in REFERENCES),
        f"{memory['arguments']:.2f} + {memory['temporaries']:.2f}",
        f"{sum(compiling):.1f}",
    ]


def format_ratio(ratio: dict[str, float]) -> str:
    lower, upper = ratio["lower_quartile"], ratio["upper_quartile"]
    return f"{ratio['median']:.2f} ({lower:.2f}-{upper:.2f})"


if __name__ == "__main__":
    main()
