"""How much memory a train step takes, by the batch and the number of micro-batches.

Of well-known models at their real sizes, whose steps are compiled and not run: peaks as
`optax_accum.plan_microbatches` finds them, and of what they consist.

``python benchmarks/memory_table.py`` compiles, for some minutes,
``python benchmarks/figures.py`` draws, ``python benchmarks/readme.py`` publishes.

``N`` is the number of micro-batches.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from measuring import write
from origin import ROOT, describe_origin, render_origin
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tables import render_rows

from optax_accum import init_train_state, make_train_step
from optax_accum._examples import EXAMPLES, Example
from optax_accum._sums import Accumulator
from optax_accum._trials import make_trials

RESULTS = ROOT / "benchmarks" / "results" / "memory_table.json"
GB = 1e9
FLOOR = "parameters, optimizer state and the sum of gradients"


class Extent(NamedTuple):
    """What is compiled: every model with every batch size and every N."""

    models: Mapping[str, Callable[[int], Example]]  # of the batch size
    batch_sizes: Sequence[int]
    counts: Sequence[int]  # N


def tiny(batch_size: int) -> Example:
    """One layer, which compiles in no time."""

    def loss_fn(params, batch):
        return jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2)

    optimizer = optax.adam(1e-3)
    params = {"w": jax.ShapeDtypeStruct((8, 64), jnp.float32)}
    state = jax.eval_shape(lambda tree: init_train_state(tree, optimizer), params)
    batch = {"x": jax.ShapeDtypeStruct((batch_size, 8), jnp.float32)}
    return Example(loss_fn, optimizer, state, batch)


FULL = Extent(EXAMPLES, (32, 64, 128), (1, 2, 4, 8, 16, 32))
QUICK = Extent({"tiny": tiny}, (64, 256), (1, 2))


# -- The measurement


def measure(extent: Extent) -> dict[str, Any]:
    """All that goes into the file: a record for each model, batch size and N."""
    records = (
        record
        for model, make in extent.models.items()
        for batch_size in extent.batch_sizes
        for record in compile_steps(model, make, batch_size, extent.counts)
    )
    total = len(extent.models) * len(extent.batch_sizes) * len(extent.counts)
    records = list(track(records, "compiling", total=total))
    return describe_origin() | {"records": records}


def compile_steps(
    model: str,
    make: Callable[[int], Example],
    batch_size: int,
    counts: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """A record for each N, of one model and one batch."""
    loss_fn, optimizer, *args = make(batch_size)
    # As the planner does it, which compiles every N or as few as it can, not these.
    trials = make_trials(
        lambda count: make_train_step(loss_fn, optimizer, num_microbatches=count),
        args,
        {},
        lambda count: Accumulator() if count > 1 else None,
    )
    for count in counts:
        start = time.perf_counter()
        memory = trials.memory(count)
        seconds = time.perf_counter() - start
        if isinstance(memory, str):
            raise RuntimeError(
                f"the device must have room for {model} with a batch of {batch_size} "
                f"in {count}, got {memory}; set JAX_PLATFORMS=cpu."
            )
        yield {
            "model": model,
            "batch_size": batch_size,
            "num_microbatches": count,
            "microbatch_size": batch_size // count,
            **{f"{part}_bytes": size for part, size in memory._asdict().items()},
            # What no number of micro-batches takes away.
            "floor_bytes": memory.params + memory.opt_state + memory.accumulator,
            "peak_bytes": memory.peak,
            "compile_seconds": round(seconds, 2),  # tracing included
        }


# -- The tables


def by_model(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The records of each model."""
    models = dict.fromkeys(record["model"] for record in results["records"])
    return {
        model: [record for record in results["records"] if record["model"] == model]
        for model in models
    }


def make_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    """Of one model: the headings, then a row of peaks for each batch size."""
    counts = dict.fromkeys(record["num_microbatches"] for record in records)
    rows: dict[int, list[str]] = {}
    for record in records:
        rows.setdefault(record["batch_size"], []).append(
            render_size(record["peak_bytes"])
        )
    head = ["batch size", *(f"N = {count}" for count in counts)]
    return [head, *([str(size), *peaks] for size, peaks in rows.items())]


def render_size(size: float) -> str:
    return f"{size / GB:.2f}"


def render_floor(records: list[dict[str, Any]]) -> str:
    """What of the peaks of one model stays for every N."""
    # With N = 1 there is no sum.
    return f"{render_size(max(record['floor_bytes'] for record in records))} GB"


def render(results: dict[str, Any]) -> str:
    """The figure, a table in Markdown for each model, and what they were made by."""
    tables = []
    for model, records in by_model(results).items():
        head, *rows = make_rows(records)
        head[0] = f"{model}, batch size"
        tables.append(render_rows(head, rows))
    figure = (
        "![Memory of a train step over N, of two models]"
        "(benchmarks/results/memory_table.png)"
    )
    return "\n\n".join([figure, *tables, render_note(results)])


def render_note(results: dict[str, Any]) -> str:
    floors = ", ".join(
        f"{render_floor(records)} of {model}"
        for model, records in by_model(results).items()
    )
    platform = results["hardware"]["platform"].upper()
    return (
        "Peak of one train step in GB, with N micro-batches, as XLA plans it for a "
        f"{platform}; nothing was run. The floor is {FLOOR}: {floors}. "
        f"{render_origin(results)} Made by "
        "`python benchmarks/memory_table.py`, `python benchmarks/figures.py` and "
        "`python benchmarks/readme.py`."
    )


# -- The terminal


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    results = measure(QUICK if options.quick else FULL)
    print_results(results, Console())
    if options.output:
        write(results, options.output)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        help=f"default: {RESULTS.name} in {RESULTS.parent.name}; of a quick run, none",
    )
    parser.add_argument("--quick", action="store_true", help="small and meaningless")
    options = parser.parse_args(arguments)
    if options.output is None and not options.quick:
        options.output = RESULTS
    return options


def print_results(results: dict[str, Any], console: Console) -> None:
    """A table for each model."""
    for model, records in by_model(results).items():
        head, *rows = make_rows(records)
        table = Table(
            title=f"{model}: peak of a train step in GB",
            caption=f"{FLOOR}: {render_floor(records)}",
        )
        for heading in head:
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
