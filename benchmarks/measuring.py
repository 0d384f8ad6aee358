"""What a benchmark measures of methods, and how it says it."""

import argparse
import json
import math
import operator
import random
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from models import Scenario
from programs import Method, size_of


class Timing(NamedTuple):
    """How long to measure."""

    rounds: int
    turn_seconds: float  # a turn repeats the window until it lasts about so long
    most_seconds: float = math.inf  # all rounds together: there are fewer, but 3


def time_rounds(methods: dict[str, Method], timing: Timing) -> dict[str, list[float]]:
    """Seconds that a window took, for each method and round.

    In each round all methods take turns, so that the ratios of its turns share its
    noise.
    """
    carries, repeats, planned = {}, {}, 0.0
    for name, method in methods.items():
        carry, seconds = take_turn(method, method.carry, 1)
        if seconds < timing.turn_seconds:  # else it is long enough to warm up itself
            carry, seconds = take_turn(method, carry, 1)
        carries[name] = carry
        repeats[name] = max(1, math.ceil(timing.turn_seconds / seconds))
        planned += repeats[name] * seconds
    affordable = max(3, int(min(timing.most_seconds / planned, timing.rounds)))
    seconds = {name: [] for name in methods}
    order, shuffle = list(methods), random.Random(0).shuffle
    for _ in range(min(affordable, timing.rounds)):
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


def summarize_ratios(
    seconds: dict[str, list[float]], name: str, references: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Of one method, to each reference in the same round."""
    return {
        reference: summarize(map(operator.truediv, seconds[name], seconds[reference]))
        for reference in references
    }


def summarize(figures: Iterable[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(figures, n=4, method="inclusive")
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper}


# -- Memory


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


def extra_bytes(method: Method) -> int:
    """What a method needs beyond parameters, optimizer state and rows, at its peak.

    Temporaries, results that are not written over an argument, and the sums that it
    keeps between its calls.
    """

    def extra(costs):
        fresh = costs["output_bytes"] - costs["alias_bytes"]
        return costs["temporary_bytes"] + fresh + costs["beside_bytes"]

    return max(int(extra(program.costs)) for program in method.programs.values())


# -- The record of a scenario


def describe_scenario(scenario: Scenario) -> dict[str, Any]:
    """What is trained, and how large it is."""
    rng = np.random.default_rng(0)
    params = scenario.model.init(rng)
    row = scenario.model.make_rows(rng, 1)
    return {
        "name": scenario.name,
        # As JSON has them: lists.
        "sizes": json.loads(json.dumps(scenario.model._asdict())),
        "microbatch_size": scenario.microbatch_size,
        "dtype": jax.tree.leaves(params)[0].dtype.name,
        "params_bytes": size_of(params),
        "row_bytes": size_of(row),
    }


# -- The terminal


def parse(
    arguments: list[str] | None, summary: str, results: Path, rounds: int
) -> argparse.Namespace:
    """What the user asks for, given the defaults of a full run."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument(
        "--output",
        type=Path,
        help=f"default: {results.name} in {results.parent.name}; of a quick run, none",
    )
    parser.add_argument("--rounds", type=int, help=f"default: {rounds}")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="programs compiled at a time; above 1, their seconds say little",
    )
    parser.add_argument("--quick", action="store_true", help="small and meaningless")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"--rounds must be >= 2 to have quartiles, got {options.rounds}")
    if options.jobs < 1:
        parser.error(f"--jobs must be >= 1, got {options.jobs}")
    if options.output is None and not options.quick:
        options.output = results
    return options


def render_verdict(text: str, figure: float, at_most: float) -> str:
    """A line about a promise; it is judged by the digits that are shown."""
    verdict = "kept  " if round(figure, 3) <= at_most else "MISSED"
    return f"{verdict} {text}: {figure:.3f}, promised at most {at_most}"


def write(results: dict[str, Any], output: Path) -> None:
    """JSON with one record in each line."""
    head = json.dumps(results | {"records": []}, indent=1)
    records = ",\n".join(f"  {json.dumps(record)}" for record in results["records"])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        head.replace('"records": []', f'"records": [\n{records}\n ]') + "\n"
    )
