"""What a fresh process does for `prediction.py`: it plans a step, or measures one.

Memory is what Linux says that this process has resident, at its peak.

Letters: ``N`` micro-batches in a batch.
"""

import ctypes
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import shapes
from shapes import Shape

import optax_accum

OPTIMIZER = "AdamW", optax.adamw(1e-3)
STEPS = 2  # that are measured: the second one takes what the first has returned
NOWHERE_NEAR = 2**60  # bytes: a limit that does not limit


def main(arguments: list[str]) -> None:
    """Prints what the job of that name returns, for its model and numbers."""
    job, name, *counts = arguments
    (shape,) = (
        s for s in (*shapes.FULL, *shapes.BEYOND, *shapes.QUICK) if s.name == name
    )
    print(json.dumps(JOBS[job](shape, *map(int, counts))))


# -- The plan


def plan_between(shape: Shape, larger: int, chosen: int, *counts: int) -> dict:
    """Plans with a limit in the middle between two candidates, and predicts others.

    Args:
      shape: what is trained.
      larger: N of the candidate that shall not fit.
      chosen: N of the one that shall.
      *counts: N of which the peak is asked for.
    """
    unlimited = make_plan(shape, NOWHERE_NEAR)

    def peak(count):
        memory = unlimited.trials.memory(count)
        assert not isinstance(memory, str), memory  # refused
        return memory.peak

    limit = (peak(larger) + peak(chosen)) // 2
    plan = make_plan(shape, limit)
    others = [c for c in plan.candidates if c.num_microbatches < plan.num_microbatches]
    return {
        "memory_limit": limit,
        "num_microbatches": plan.num_microbatches,
        "next_larger": others[-1].num_microbatches if others else None,
        "peaks": {str(count): peak(count) for count in counts},
    }


def make_plan(shape: Shape, limit: int) -> optax_accum.Plan:
    return optax_accum.plan_microbatches(
        shape.model.loss_fn,
        OPTIMIZER[1],
        *types_of(shape, shape.rows),
        memory_limit=limit,
    )


def types_of(shape: Shape, rows: int) -> Any:
    """Types of the state and of the batch."""
    return jax.eval_shape(lambda: make_arguments(shape, rows))


def make_arguments(shape: Shape, rows: int) -> tuple[Any, Any]:
    """A state and a batch, in buffers of their own that JAX has allocated."""
    rng = np.random.default_rng(0)
    given = shape.model.init(rng), shape.model.make_rows(rng, rows)
    params, batch = jax.device_put(given, may_alias=False)
    return optax_accum.init_train_state(params, OPTIMIZER[1]), batch


# -- The measurement


def measure_step(shape: Shape, count: int) -> dict[str, int]:
    """By how much the resident memory grows when a step runs, at its peak.

    What is counted are the arguments as well, but nothing that there was before them:
    the compiler and its program, the threads and the code that a step wakes.
    """
    step = compile_step(shape, count, shape.rows)
    # Kernels of matrix products are made at their first call, and code is loaded then:
    # about 10 MB that belong to the process. A step of a few rows makes most of them;
    # what grows with the rows it cannot hide from the measurement.
    few = min(count, 2)
    run_steps(compile_step(shape, few, 2 * few), *make_arguments(shape, 2 * few))
    before = settle()
    state, batch = make_arguments(shape, shape.rows)
    jax.block_until_ready((state, batch))
    arguments = settle() - before  # without the arrays of NumPy, which are freed
    peak = find_peak(lambda: run_steps(step, state, batch)) - before
    return {"measured_bytes": peak, "argument_bytes": arguments}


def compile_step(shape: Shape, count: int, rows: int) -> Callable:
    step = optax_accum.make_train_step(
        shape.model.loss_fn, OPTIMIZER[1], num_microbatches=count
    )
    return step.lower(*types_of(shape, rows)).compile()


def run_steps(step: Callable, state: Any, batch: Any) -> None:
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        # The results are ready before the temporaries are unmapped. Without waiting,
        # the next step begins to fill its own beside what is left of these.
        settle()


def settle() -> int:
    """The resident memory, when nothing is freed any more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # small blocks that were freed
    old, new = -1, read_status("VmRSS")
    while new != old:
        time.sleep(0.1)
        old, new = new, read_status("VmRSS")
    return new


def find_peak(run: Callable[[], None]) -> int:
    """The most resident memory while `run` runs."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:  # not permitted in some containers
        return sample_peak(run)
    run()
    return read_status("VmHWM")


def sample_peak(run: Callable[[], None]) -> int:
    """The same, looking again and again: a short peak may be missed."""
    seen, done = [], threading.Event()

    def look():
        while not done.wait(0.001):
            seen.append(read_status("VmRSS"))

    thread = threading.Thread(target=look)
    thread.start()
    run()
    done.set()
    thread.join()
    return max(seen)


def read_status(field: str) -> int:
    """Bytes, as Linux tells them of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(size) * 1024


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "plan": plan_between,
    "measure": measure_step,
}


if __name__ == "__main__":
    main(sys.argv[1:])
