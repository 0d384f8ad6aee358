"""What a narrow accumulator costs in accuracy, and what compensation brings back.

Sums K gradients of mean 0, already rounded to bfloat16, as the scan does it. The error
is relative to their sum in float64, in the Euclidean norm.

``python benchmarks/precision.py`` measures, ``python benchmarks/readme.py`` publishes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from origin import ROOT, describe_origin, render_origin
from tables import render_rows

import optax_accum

RESULTS = ROOT / "benchmarks" / "results" / "precision.json"
COUNTS = (4, 16, 64, 256)
ENTRIES = 20_000
SUMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"accumulator_dtype": jnp.bfloat16},
    "bfloat16, compensated": {"accumulator_dtype": jnp.bfloat16, "compensated": True},
    "float32 (default)": {},
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args(arguments).output
    results = measure()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n")


def measure() -> dict[str, Any]:
    records = [
        {"sum": name, "errors": {str(k): error_of(k, **options) for k in COUNTS}}
        for name, options in SUMS.items()
    ]
    return describe_origin() | {"entries": ENTRIES, "records": records}


def error_of(count: int, **options: Any) -> float:
    """Relative error of the mean of `count` gradients, as the optimizer gets it."""
    grads = make_gradients(count)
    # Keeps the last gradient it was given.
    optimizer = optax.trace(decay=0.0, accumulator_dtype=jnp.float32)
    step = optax_accum.make_train_step(
        lambda w, rows: jnp.mean(rows @ w),
        optimizer,
        num_microbatches=count,
        **options,
    )
    params = jnp.zeros(ENTRIES, jnp.bfloat16)
    state, _ = step(optax_accum.init_train_state(params, optimizer), grads)
    mean = np.asarray(state.opt_state.trace, np.float64)
    exact = np.asarray(grads, np.float64).mean(axis=0)
    return float(np.linalg.norm(mean - exact) / np.linalg.norm(exact))


def make_gradients(count: int) -> jax.Array:
    """Rows whose mean dot product with the parameters has them as its gradients."""
    shape = count, ENTRIES
    return jax.random.normal(jax.random.key(count), shape).astype(jnp.bfloat16)


def render(results: dict[str, Any]) -> str:
    """A table in Markdown, a kind of sum in each row."""
    records = results["records"]
    counts = list(records[0]["errors"])
    head = ["relative error of the sum of", *(f"{count} gradients" for count in counts)]
    rows = [
        [record["sum"], *(f"{error:.1e}" for error in record["errors"].values())]
        for record in records
    ]
    return (
        f"{render_rows(head, rows)}\n\n{results['entries']} entries of mean 0, in "
        "bfloat16 as they come; the error of the mean that the optimizer gets, against "
        f"one in float64. {render_origin(results)} Made by "
        "`python benchmarks/precision.py` and `python benchmarks/readme.py`."
    )


if __name__ == "__main__":
    main()
