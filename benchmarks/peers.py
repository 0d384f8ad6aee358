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

import sys
from typing import Any, Literal, NamedTuple

import models
import optax
import optax.contrib
from checks import check_methods
from measuring import (
    Timing,
    describe_scenario,
    memory_in_p,
    parse,
    render_verdict,
    summarize,
    summarize_ratios,
    time_rounds,
    write,
)
from methods import describe_methods
from models import Scenario, make_problem
from origin import ROOT, describe_origin
from programs import Method, compile_methods, size_of
from rich.console import Console
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
REFERENCES = ("limit", "gradients and a step", "hand-written scan", "MultiSteps")
OPTIMIZERS = {"AdamW": optax.adamw(1e-3), "Muon": optax.contrib.muon(1e-3)}


class Run(NamedTuple):
    """What is trained, and how long it is measured."""

    scenario: Scenario
    num_microbatches: int  # N
    timing: Timing


FULL = Run(models.OPTIMIZER_HEAVY, 8, Timing(rounds=20, turn_seconds=0.2))
QUICK = Run(models.QUICK[0], 4, Timing(rounds=3, turn_seconds=0.001))


class Promise(NamedTuple):
    """What a method may cost at most, as a multiple of a peer's costs."""

    method: str
    peer: str
    quantity: Literal["time", "temporaries"]
    optimizer: str
    at_most: float


PROMISES = (
    Promise("make_train_step", "hand-written scan", "time", "AdamW", 1.02),
    Promise("make_train_step", "hand-written scan", "time", "Muon", 1.02),
    Promise("make_train_step", "gradients and a step", "time", "AdamW", 1.05),
    Promise("make_window_steps", "gradients and a step", "time", "AdamW", 1.0),
    Promise("make_window_steps", "MultiSteps", "time", "AdamW", 0.42),
    Promise("make_train_step + accumulate", "MultiSteps", "time", "AdamW", 0.65),
    Promise("accumulate", "MultiSteps", "time", "AdamW", 0.9),
    Promise("accumulate", "MultiSteps", "time", "Muon", 0.2),
    Promise("make_train_step", "hand-written scan", "temporaries", "AdamW", 1.0),
    Promise("make_train_step", "hand-written scan", "temporaries", "Muon", 1.0),
    Promise("accumulate", "MultiSteps", "temporaries", "AdamW", 1.0),
    Promise("make_train_step + accumulate", "MultiSteps", "temporaries", "AdamW", 1.0),
)


# -- The measurement


def measure(
    run: Run, optimizers: dict[str, optax.GradientTransformation], jobs: int = 1
) -> dict[str, Any]:
    """Checks the methods, then measures them: all that goes into the file."""
    scenario, num_microbatches, timing = run
    check_methods(scenario, num_microbatches, jobs)
    records = []
    for name, optimizer in optimizers.items():
        problem = make_problem(scenario, num_microbatches, optimizer)
        methods = compile_methods(describe_methods(problem), jobs)
        seconds = time_rounds(methods, timing)
        records += make_records(name, methods, seconds, size_of(problem.params))
    described = describe_scenario(scenario) | {
        "num_microbatches": num_microbatches,
        "rounds": timing.rounds,
        "turn_seconds": timing.turn_seconds,
        "jobs": jobs,
    }
    return describe_origin() | {"scenario": described, "records": records}


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
            "ratios": summarize_ratios(seconds, name, REFERENCES),
            "memory_in_p": memory_in_p(method, params_bytes),
            "programs": {key: p.costs for key, p in method.programs.items()},
        }
        for name, method in methods.items()
    ]


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
    summary = __doc__.splitlines()[0]
    options = parse(arguments, summary, RESULTS, FULL.timing.rounds)
    run = QUICK if options.quick else FULL
    if options.rounds:
        run = run._replace(timing=run.timing._replace(rounds=options.rounds))
    results = measure(run, OPTIMIZERS, options.jobs)
    # A file has no width of its own; a table of eight columns needs more than 80.
    print_results(results, Console(width=None if sys.stdout.isatty() else 160))
    if options.output:
        write(results, options.output)


def print_results(results: dict[str, Any], console: Console) -> None:
    """A table for each optimizer, then what was promised."""
    records = results["records"]
    for optimizer in dict.fromkeys(record["optimizer"] for record in records):
        table = Table(title=optimizer)
        table.add_column("method", no_wrap=True)
        table.add_column("ms / window", justify="right")
        for reference in REFERENCES:
            table.add_column(f"/ {reference}", justify="right")
        table.add_column("arguments + temporaries, P", justify="right")
        table.add_column("compile, s", justify="right")
        for record in records:
            if record["optimizer"] == optimizer:
                table.add_row(*format_row(record))
        console.print(table)
    for promise in PROMISES:
        text = (
            f"{promise.method} / {promise.peer}, {promise.quantity} with "
            f"{promise.optimizer}"
        )
        verdict = render_verdict(text, measured(promise, records), promise.at_most)
        console.print(verdict, highlight=False)


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
