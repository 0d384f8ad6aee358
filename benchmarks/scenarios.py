"""A window over N, in four scenarios: what it costs to accumulate more.

The micro-batch stays as it is and N grows, so that the batch grows with it. The claim:
N micro-batches cost N micro-batches and one optimizer step, and the memory of one
micro-batch and one gradient. So everything is compared with one plain gradient of one
micro-batch, measured in the same rounds.

``python benchmarks/scenarios.py`` measures, ``python benchmarks/figures.py`` draws,
``python benchmarks/readme.py`` publishes.

Letters: ``N`` micro-batches in a window, ``m`` rows in each; ``P`` is one
parameter-sized buffer.
"""

import statistics
import sys
from collections.abc import Iterable, Sequence
from operator import truediv
from typing import Any

import models
import optax
from checks import check_methods
from measuring import (
    Timing,
    describe_scenario,
    extra_bytes,
    memory_in_p,
    parse,
    render_verdict,
    time_rounds,
    write,
)
from methods import IN_PLACE, describe_methods, one_gradient
from models import Scenario, make_problem
from origin import ROOT, describe_origin
from programs import Method, Program, compile_methods, size_of
from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results" / "scenarios.json"
COUNTS = (1, 4, 16, 64)  # N
CHECKED = 4  # the N at which all methods are compared, entry by entry
OPTIMIZER = "AdamW", optax.adamw(1e-3)
FULL = Timing(rounds=5, turn_seconds=0.05, most_seconds=10)
QUICK = Timing(rounds=2, turn_seconds=0.001)
GRADIENT = "one gradient"  # not a method: one call for one micro-batch
REFERENCES = ("limit", "gradients and a step", "hand-written scan", "MultiSteps")

COMPILES_AT_MOST = 1.15  # times as long for 64 micro-batches as for 4
IN_PLACE_AT_MOST = 0.15  # P more than one gradient, where the model scans


# -- The measurement


def measure(
    scenarios: Iterable[Scenario],
    counts: Sequence[int],
    timing: Timing,
    optimizer: tuple[str, optax.GradientTransformation] = OPTIMIZER,
    jobs: int = 1,
) -> dict[str, Any]:
    """Checks the methods, then measures them: all that goes into the file."""
    described, records = [], []
    for scenario in scenarios:
        check_methods(scenario, CHECKED, jobs)
        shared: dict[str, Program] = {}  # do not depend on N
        for count in track(counts, scenario.name):
            records += measure_count(
                scenario, count, timing, optimizer[1], jobs, shared
            )
        described.append(describe_scenario(scenario))
    return describe_origin() | {
        "optimizer": optimizer[0],
        "counts": list(counts),
        "rounds": timing.rounds,
        "jobs": jobs,
        "scenarios": described,
        "records": records,
    }


def measure_count(
    scenario: Scenario,
    count: int,
    timing: Timing,
    optimizer: optax.GradientTransformation,
    jobs: int,
    shared: dict[str, Program],
) -> list[dict[str, Any]]:
    """A record of each method and of one gradient, for windows of one length."""
    problem = make_problem(scenario, count, optimizer)
    recipes = describe_methods(problem) | {GRADIENT: one_gradient(problem)}
    methods = compile_methods(recipes, jobs, shared)
    seconds = time_rounds(methods, timing)
    params_bytes = size_of(problem.params)
    return [
        {"scenario": scenario.name, "num_microbatches": count, "method": name}
        | describe_times(seconds, name, 1 if name == GRADIENT else count)
        | describe_costs(method, params_bytes)
        for name, method in methods.items()
    ]


def describe_times(
    seconds: dict[str, list[float]], name: str, calls: int
) -> dict[str, Any]:
    """Medians of one method, that takes so many micro-batches in a window."""

    def ratio(reference):
        return statistics.median(map(truediv, seconds[name], seconds[reference]))

    return {
        "rounds": len(seconds[name]),
        "milliseconds": rounded(1000 * statistics.median(seconds[name])),
        # Of a micro-batch, as a multiple of one plain gradient.
        "gradients": rounded(ratio(GRADIENT) / calls),
        "ratios": {reference: rounded(ratio(reference)) for reference in REFERENCES},
    }


def describe_costs(method: Method, params_bytes: int) -> dict[str, Any]:
    """What the compiler says about one method."""
    programs = {
        name: {cost: rounded(figure) for cost, figure in program.costs.items()}
        for name, program in method.programs.items()
    }
    memory = memory_in_p(method, params_bytes)

    def total(cost):
        return rounded(sum(costs[cost] for costs in programs.values()))

    return {
        "memory_in_p": {name: rounded(figure) for name, figure in memory.items()},
        "extra_bytes": extra_bytes(method),
        "trace_seconds": total("trace_seconds"),
        "compile_seconds": total("compile_seconds"),
        "programs": programs,
    }


def rounded(figure: float) -> float:
    """To the digits that a measurement has; bytes stay whole."""
    return figure if isinstance(figure, int) else float(f"{figure:.4g}")


# -- What was promised


def find(results: dict[str, Any], scenario: str, count: int, method: str) -> Any:
    wanted = scenario, count, method
    for record in results["records"]:
        key = record["scenario"], record["num_microbatches"], record["method"]
        if key == wanted:
            return record
    raise LookupError(f"the results hold no record of {wanted}.")


def judge(results: dict[str, Any]) -> list[str]:
    """A line for each promise."""
    compiling = "make_train_step compiles as fast for N = 64 as for N = 4"
    if results["jobs"] == 1:
        ratio = compile_seconds(results, 64) / compile_seconds(results, 4)
        lines = [render_verdict(compiling, ratio, COMPILES_AT_MOST)]
    else:
        lines = [f"unknown {compiling}: measure with --jobs 1"]
    if any(record["method"] == IN_PLACE for record in results["records"]):
        text = f"{IN_PLACE}, of the transformer: P beyond one gradient"
        excess = beyond_gradient(results)
        lines.append(render_verdict(text, excess, IN_PLACE_AT_MOST))
    return lines


def compile_seconds(results: dict[str, Any], count: int) -> float:
    """Of all scenarios together: one compilation alone is noisy."""
    return sum(
        find(results, scenario["name"], count, "make_train_step")["compile_seconds"]
        for scenario in results["scenarios"]
    )


def beyond_gradient(results: dict[str, Any]) -> float:
    """Temporaries that the sum in place needs more than one gradient does, in P.

    A gradient is the result of its own program, and a temporary of the whole window.
    Of one micro-batch there is no sum.
    """
    (described,) = (s for s in results["scenarios"] if s["name"] == "transformer")

    def excess(count):
        gradient = find(results, "transformer", count, GRADIENT)
        ours = find(results, "transformer", count, IN_PLACE)
        return ours["extra_bytes"] - gradient["extra_bytes"]

    summed = [count for count in results["counts"] if count > 1]
    return max(map(excess, summed)) / described["params_bytes"]


# -- The terminal


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments, __doc__.splitlines()[0], RESULTS, FULL.rounds)
    scenarios, timing = models.FULL, FULL
    if options.quick:
        scenarios, timing = models.QUICK, QUICK
    if options.rounds:
        timing = timing._replace(rounds=options.rounds)
    results = measure(scenarios, COUNTS, timing, jobs=options.jobs)
    # A file has no width of its own; a table of twelve columns needs more than 80.
    print_results(results, Console(width=None if sys.stdout.isatty() else 160))
    if options.output:
        write(results, options.output)


def print_results(results: dict[str, Any], console: Console) -> None:
    """A table for each scenario, then what was promised."""
    for scenario in results["scenarios"]:
        console.print(make_table(results, scenario))
    console.print(
        "time of a micro-batch: as a multiple of one plain gradient; memory: beyond "
        "parameters, optimizer state and rows"
    )
    for line in judge(results):
        console.print(line, highlight=False)


def make_table(results: dict[str, Any], scenario: dict[str, Any]) -> Table:
    name, counts = scenario["name"], results["counts"]
    size = scenario["params_bytes"] / 1e6
    table = Table(title=f"{name}, {results['optimizer']}, P = {size:.2g} MB")
    table.add_column("method", no_wrap=True)
    for heading in ("time", "MB", "compile, s"):
        for count in counts:
            table.add_column(f"{heading}\nN = {count}", justify="right")
    mine = [record for record in results["records"] if record["scenario"] == name]
    for method in dict.fromkeys(record["method"] for record in mine):
        records = [find(results, name, count, method) for count in counts]
        table.add_row(
            method,
            *(f"{record['gradients']:.2f}" for record in records),
            *(f"{record['extra_bytes'] / 1e6:.2f}" for record in records),
            *(f"{record['compile_seconds']:.2f}" for record in records),
        )
    return table


if __name__ == "__main__":
    main()
