"""How long candidate steps take, each beside the others."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np


def time_steps(
    steps: Mapping[int, Callable],
    state: Any,
    args: tuple,
    extra: dict[str, Any],
    rounds: Iterable[Any],
) -> dict[int, float]:
    """Median seconds of each step, which take turns in every round.

    Args:
      steps: each returns a state and something else.
      state: the first one's first argument; every step then takes the last one's.
      args: further arguments.
      extra: those passed by keyword.
      rounds: an item for each.
    """
    seconds: dict[int, list[float]] = {name: [] for name in steps}
    # The first call of a program may do more than run it; and the first of all may move
    # the state to where the batch is, for which the others are compiled anew.
    for step in [*steps.values(), *steps.values()]:
        state, _ = step(state, *args, **extra)
    jax.block_until_ready(state)
    for _ in rounds:
        for name, step in steps.items():
            start = time.perf_counter()
            state, metrics = step(state, *args, **extra)
            jax.block_until_ready((state, metrics))
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(each)) for name, each in seconds.items()}
