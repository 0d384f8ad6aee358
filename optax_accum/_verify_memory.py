"""Whether a step needs the memory that was predicted: one is run and looked at.

A device that tells its memory is asked in this process. Of a CPU, Linux tells what a
process has resident: there a fresh one runs the step, this module as a command, and
does nothing else.

Letters: ``N`` micro-batches in a batch.
"""

import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._plan import Plan
from optax_accum._plan_microbatches import plan_microbatches
from optax_accum._state import TrainState, init_train_state
from optax_accum._train_step import make_train_step
from optax_accum._verify_finding import Difference, Skip

# So large that parameters, and sums of their gradients, are more than a prediction may
# be off: one that forgets them fails.
LAYERS, WIDTH, ROWS = 8, 1024, 2048
NOWHERE_NEAR = 2**60  # bytes: a limit that does not limit
OPTIMIZER = optax.adamw(1e-3)
RELATIVE, ABSOLUTE = 0.05, 24_000_000  # the larger of both is allowed
STATUS = Path("/proc/self/status")

Usage = Callable[[], tuple[int, int]]  # bytes in use now, and at the highest so far


def check_memory(count: int) -> Difference | Skip:
    """Prediction and measurement, where there can be one."""
    measured = measure_peak(count)
    if isinstance(measured, str):
        return Skip(measured)
    predicted = predict_peak(count)
    return Difference(
        abs(predicted - measured) / 1e6,
        max(RELATIVE * measured, ABSOLUTE) / 1e6,
        " MB",
        f"{predicted / 1e6:.0f} MB predicted, {measured / 1e6:.0f} MB measured, ",
    )


def predict_peak(count: int) -> int:
    """What the plan says of the step with so many micro-batches."""
    memory = make_plan().trials.memory(count)
    if isinstance(memory, str):
        raise RuntimeError(f"the compiler refuses a step of N = {count}: {memory}")
    return memory.peak


@functools.cache
def make_plan() -> Plan:
    types = jax.eval_shape(lambda: make_arguments(ROWS))
    return plan_microbatches(loss_fn, OPTIMIZER, *types, memory_limit=NOWHERE_NEAR)


def measure_peak(count: int) -> int | str:
    """What that step needs, when it is run; or why it cannot be seen."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        peak = measure_growth(count, lambda: _ask(device))
    elif device.platform != "cpu":
        return f"{device.device_kind} does not tell its memory"
    elif not STATUS.exists():
        return f"without {STATUS} a process does not know its memory"
    else:
        peak = _measure_in_fresh_process(count)
    return "the process had needed more before" if peak is None else peak


# -- The step


def loss_fn(params: jax.Array, rows: jax.Array) -> jax.Array:
    def layer(x, kernel):
        return jnp.tanh(x @ kernel), None

    return jnp.mean((jax.lax.scan(layer, rows, params)[0] - rows) ** 2)


def make_arguments(rows: int) -> tuple[TrainState, jax.Array]:
    """A state and a batch. What is in them needs no memory elsewhere to be made."""
    params = jnp.full((LAYERS, WIDTH, WIDTH), 1 / WIDTH, jnp.float32)
    return init_train_state(params, OPTIMIZER), jnp.ones((rows, WIDTH), jnp.float32)


def _compile(count: int, rows: int) -> Callable:
    step = make_train_step(loss_fn, OPTIMIZER, num_microbatches=count)
    types = jax.eval_shape(lambda: make_arguments(rows))
    return step.lower(*types).compile()


# -- The measurement


def measure_growth(count: int, usage: Usage) -> int | None:
    """By how much the memory in use grows when the step runs, at its peak.

    What is counted are the arguments as well, but nothing that there was before them.

    Returns:
      Bytes; None where there was more in use before, and so the peak is not seen.
    """
    step, few = _compile(count, ROWS), ROWS // 16
    # At their first call, products load code and wake threads, which belong to the
    # process. A step of a few rows does; what grows with the rows it cannot hide.
    jax.block_until_ready(_compile(count, few)(*make_arguments(few)))
    before, _ = usage()
    arguments: Any = jax.block_until_ready(make_arguments(ROWS))
    _, highest = usage()
    jax.block_until_ready(step(*arguments))
    _, peak = usage()
    return peak - before if peak > highest else None


def _ask(device: jax.Device) -> tuple[int, int]:
    stats: Any = device.memory_stats()
    return stats["bytes_in_use"], stats["peak_bytes_in_use"]


def _read_resident() -> tuple[int, int]:
    """Of this process, when nothing is freed any more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # small blocks that were freed
    old, new = None, _read_status("VmRSS")
    while new != old:
        time.sleep(0.1)
        old, new = new, _read_status("VmRSS")
    return new, _read_status("VmHWM")


def _read_status(field: str) -> int:
    lines = STATUS.read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(size) * 1024


def _measure_in_fresh_process(count: int) -> int | None:
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        # Fixed, so that what is freed goes back to the system and is seen to. By
        # default it rises, and new arrays hide in memory that is kept.
        "MALLOC_MMAP_THRESHOLD_": str(2**16),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    done = subprocess.run(
        [sys.executable, "-m", "optax_accum._verify_memory", str(count)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise RuntimeError(f"the process that measures ended badly: {last}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(measure_growth(int(sys.argv[1]), _read_resident)))
