"""Candidates: ways to split a batch, compiled and looked at, but not run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._collectives import add_bytes, read_collectives
from optax_accum._memory import Memory, memory_of
from optax_accum._sums import Accumulator


class Candidate(NamedTuple):
    """One way to split the batch, and what is known about it.

    Attributes:
      num_microbatches: N.
      microbatch_size: rows that go through the model at once: on all devices together,
        or under ``reduce_axes`` on each, as the option of that name has it.
      memory: bytes on each device at the peak, and of what; None where it was not
        compiled or was refused.
      refusal: what the compiler said where it refused, as that of a TPU does when it
        sees that the device has less memory; else None.
      fits: whether that is within the limit; None where it was not compiled.
      bytes_moved: what each device sends in a step, in rings; None on one device, and
        where a loop does not tell how often it runs.
      seconds: of one step, where it was timed.
    """

    num_microbatches: int
    microbatch_size: int
    memory: Memory | None = None
    refusal: str | None = None
    fits: bool | None = None
    bytes_moved: int | None = None
    seconds: float | None = None


class Trials(NamedTuple):
    """The steps for so many micro-batches, each made and compiled once, when asked for.

    Attributes:
      args: types of the arguments: a `TrainState`, a batch, others.
      extra: types of those passed by keyword.
      step: ``N -> step``, a ``jax.jit`` function.
      memory: ``N ->`` what it needs, or what the compiler says that refuses it.
      bytes_moved: ``N ->`` what a device sends, if there are several.
    """

    args: tuple[Any, ...]
    extra: dict[str, Any]
    step: Callable[[int], jax.stages.Wrapped]
    memory: Callable[[int], Memory | str]
    bytes_moved: Callable[[int], int | None]


def make_trials(
    build: Callable[[int], jax.stages.Wrapped],
    args: Sequence,
    extra: dict[str, Any],
    accumulator_for: Callable[[int], Accumulator | None],
    whole_over: tuple[str, ...] = (),
) -> Trials:
    """What tries steps on the types of a call.

    Args:
      build: makes the step for so many micro-batches.
      args: arrays or their types, of which nothing is kept but the types.
      extra: those passed by keyword.
      accumulator_for: how that step keeps sums; None where it keeps none.
      whole_over: mesh axes over which parameters are sharded, and sums are not.
    """
    args, extra = types_of((tuple(args), extra))
    step = functools.cache(build)

    @functools.cache
    def look(num_microbatches):
        traced = step(num_microbatches).trace(*args, **extra)
        try:
            compiled = traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                return str(error).partition("\n")[0], None
            raise
        accumulator = accumulator_for(num_microbatches)
        memory = memory_of(traced, compiled, args, extra, accumulator, whole_over)
        return memory, _bytes_moved(compiled)

    return Trials(args, extra, step, lambda n: look(n)[0], lambda n: look(n)[1])


def _bytes_moved(compiled: jax.stages.Compiled) -> int | None:
    shardings = jax.tree.leaves(compiled.input_shardings)
    if not any(len(sharding.device_set) > 1 for sharding in shardings):
        return None
    return add_bytes(read_collectives(compiled.as_text() or "", frozenset()))


def types_of(tree: Any) -> Any:
    """`tree` with a type in place of each array: what ``jit`` tells programs apart by.

    With its sharding, where the array is bound to it: JAX may place others as it likes.
    """

    def type_of(leaf):
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        if not is_array or isinstance(leaf, jax.core.Tracer):
            return leaf
        sharding = None
        if isinstance(leaf, jax.Array) and leaf.committed:
            sharding = leaf.sharding
        return jax.ShapeDtypeStruct(
            jnp.shape(leaf),
            jnp.result_type(leaf),
            sharding=sharding,
            weak_type=getattr(leaf, "weak_type", False),
        )

    return jax.tree.map(type_of, tree)


def try_candidate(
    candidate: Candidate,
    trials: Trials,
    memory_limit: int,
    begin: Callable[[str], None],
) -> Candidate:
    """`candidate` with what its compiled step needs; `begin` is told of it before."""
    begin(f"compiling N = {candidate.num_microbatches}")
    memory = trials.memory(candidate.num_microbatches)
    if isinstance(memory, str):
        return candidate._replace(refusal=memory, fits=False)
    return candidate._replace(
        memory=memory,
        fits=memory.peak <= memory_limit,
        bytes_moved=trials.bytes_moved(candidate.num_microbatches),
    )
