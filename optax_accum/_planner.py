"""Planning: which candidates there are, which of them are compiled, what is chosen."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum._memory import Memory
from optax_accum._memory_limit import bytes_of_limit, render_bytes
from optax_accum._numerics import kind_of
from optax_accum._plan import Plan
from optax_accum._progress import progress_bar
from optax_accum._search import Search, bisect, most_trials, try_all
from optax_accum._split import count_rows, count_shards, equal_splits
from optax_accum._spread import Spread, count_sharers
from optax_accum._sums import Accumulator
from optax_accum._trials import Candidate, Trials, make_trials, try_candidate

# What makes each part of the memory smaller.
_CURES = {
    "params": "narrower ones, more devices to shard them over",
    "opt_state": "an optimizer with a smaller state, sharding it",
    "accumulator": "`in_place` or a narrower `accumulator_dtype`, sharding",
    "activations": "`jax.checkpoint` around the layers, sharding",
    "rest": "a smaller batch, and `donate=True` if it is not",
}


def make_plan(
    caller: str,
    build: Callable[[int], jax.stages.Wrapped],
    args: Sequence,
    extra: dict[str, Any],
    *,
    memory_limit: int | float | None,
    group_size: int,
    batch_axis: int,
    accumulator: Accumulator | None,
    spread: Spread,
    exhaustive: bool = False,
) -> Plan:
    """The plan for one call of a step.

    Args:
      caller: whose errors there are.
      build: makes the step for so many micro-batches.
      args: of the call: a `TrainState`, a batch, others; arrays or their types.
      extra: those passed by keyword.
      memory_limit: as `check_memory_limit` returned it.
      group_size: rows that stay together.
      batch_axis: the axis of the rows.
      accumulator: how a step of several micro-batches keeps sums; None for not at all.
      spread: over which devices the step itself spreads the rows.
      exhaustive: whether to compile all candidates.
    """
    _check_no_trace(caller, args, extra)
    rows = count_rows(caller, {"batch": args[1]}, batch_axis)
    devices, shards = count_sharers(caller, spread, rows), 1
    if devices == 1:
        shards = count_shards(args[1], batch_axis)
    limit = bytes_of_limit(f"{caller}(memory_limit=...)", memory_limit, args)
    candidates = [
        Candidate(n, rows // devices // n)
        for n in equal_splits(rows // devices, group_size, shards)
    ]
    trials = make_trials(
        build,
        args,
        extra,
        lambda n: None if n == 1 else accumulator,
        spread.axes if spread.gather == "call" else (),
    )
    search = try_all if exhaustive else bisect
    table, chosen = _search(search, candidates, trials, limit)
    if chosen is None:
        raise ValueError(_nothing_fits(caller, table, limit))
    return Plan(chosen.num_microbatches, table, limit, trials)


def _search(
    search: Search, candidates: Sequence[Candidate], trials: Trials, limit: int
) -> tuple[tuple[Candidate, ...], Candidate | None]:
    """All candidates, with what was learnt of them, and the one that is chosen."""
    tried: dict[int, Candidate] = {}
    with progress_bar(most_trials(search, len(candidates))) as begin:

        def need(i):
            tried[i] = try_candidate(candidates[i], trials, limit, begin)
            memory = tried[i].memory
            return math.inf if memory is None else memory.peak

        found = search(need, len(candidates), limit)
    table = tuple(tried.get(i, c) for i, c in enumerate(candidates))
    return table, None if found is None else table[found]


def _check_no_trace(caller: str, args: Sequence, extra: dict[str, Any]) -> None:
    leaves = jax.tree.leaves((args, extra))
    tracer = next((x for x in leaves if isinstance(x, jax.core.Tracer)), None)
    if tracer is not None:
        raise ValueError(
            f"`{caller}` must plan outside of `jit` and `scan`, got {kind_of(tracer)} "
            "of a trace; in there, the memory of one step says nothing of that of the "
            "whole program. Find N before, with `plan_microbatches`."
        )


def _nothing_fits(caller: str, candidates: Sequence[Candidate], limit: int) -> str:
    """The error that says what would have to become smaller."""
    compiled = [c for c in candidates if c.fits is not None]
    peaks = {c: c.memory for c in compiled if c.memory is not None}
    if not peaks:
        return (
            f"`{caller}(memory_limit=...)` must leave room for a micro-batch, got "
            f"{render_bytes(limit)}; the compiler refuses even "
            f"{compiled[-1].microbatch_size} rows: {compiled[-1].refusal}"
        )
    least, memory = min(peaks.items(), key=lambda item: item[1].peak)
    parts = ", ".join(f"{name} {render_bytes(x)}" for name, x in _by_size(memory))
    cures = "; ".join(f"{name}: {_CURES[name]}" for name, _ in _by_size(memory)[:2])
    others = len(candidates) - len(compiled)
    untried = f" (`exhaustive=True` compiles {others} more)" if others else ""
    return (
        f"`{caller}(memory_limit=...)` must be at least {memory.peak} bytes, "
        f"{render_bytes(memory.peak)}, the smallest peak of {len(compiled)} compiled"
        f"{untried}, got {render_bytes(limit)}. That is the peak of N = "
        f"{least.num_microbatches}, rows: {least.microbatch_size}. {parts}. "
        f"What would help; {cures}."
    )


def _by_size(memory: Memory) -> list[tuple[str, int]]:
    """The parts, the largest first."""
    return sorted(memory._asdict().items(), key=lambda part: -part[1])
