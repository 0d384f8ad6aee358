"""What a compiled step needs at its peak, and what that is made up of."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._call import accumulate_states
from optax_accum._sums import Accumulator, zero_sums


class Memory(NamedTuple):
    """Bytes on each device at the peak of a step.

    Attributes:
      params: the parameters.
      opt_state: the optimizer state, without the sums of an open window.
      accumulator: sums of gradients, of the step and of an open window.
      activations: the other temporaries. They are activations as a rule; the gradient
        of a micro-batch and what the optimizer needs meanwhile are among them.
      rest: the batch, keys, model state, further arguments, arrays that the loss closes
        over, the program itself, and results that are not written over an argument, in
        whose place the compiler may keep temporaries before.
    """

    params: int
    opt_state: int
    accumulator: int
    activations: int
    rest: int

    @property
    def peak(self) -> int:
        """All of it together."""
        return sum(self)


def memory_of(
    traced: jax.stages.Traced,
    compiled: jax.stages.Compiled,
    args: Sequence,
    extra: dict[str, Any],
    accumulator: Accumulator | None,
    whole_over: tuple[str, ...] = (),
) -> Memory:
    """What a step needs that takes a `TrainState` first.

    ``arguments + outputs - aliases + temporaries``, as the compiler has planned it, and
    what it leaves out: arguments that the program does not use, which stay where they
    are all the same, and arrays that the loss closes over.

    Args:
      traced: the step, for these arguments.
      compiled: the same, compiled.
      args: arrays or their types, a `TrainState` first.
      extra: those passed by keyword.
      accumulator: how the step keeps sums; None where it keeps none.
      whole_over: mesh axes over which parameters are sharded, and sums are not.
    """
    planned: Any = compiled.memory_analysis()
    shardings, extra_shardings = compiled.input_shardings
    state, placed = args[0], shardings[0]
    given = bytes_of((tuple(args), extra), (shardings, extra_shardings))
    # Of an accelerator's layout the compiler knows more: there may be padding.
    arguments = max(given, planned.argument_size_in_bytes)
    closed_over = sum(_bytes_of_leaf(x, None) for x in _captured(traced.jaxpr).values())
    fresh = planned.output_size_in_bytes - planned.alias_size_in_bytes
    params = bytes_of(state.params, placed.params)
    opt_state = bytes_of(state.opt_state, placed.opt_state)
    window = bytes_of(_window_sums(state.opt_state), _window_sums(placed.opt_state))
    temporary = planned.temp_size_in_bytes
    summed = jax.tree.map(lambda s: _whole(s, whole_over), placed.params)
    sums = min(temporary, _bytes_of_sums(state.params, summed, accumulator))
    beside = arguments - params - opt_state + closed_over + fresh
    return Memory(
        params=params,
        opt_state=opt_state - window,
        accumulator=window + sums,
        activations=temporary - sums,
        rest=beside + planned.generated_code_size_in_bytes,
    )


def bytes_of(tree: Any, shardings: Any) -> int:
    """What the leaves of `tree` take on one device.

    Args:
      tree: arrays or their types.
      shardings: the same tree, of shardings; None where the program knows none, since
        it does not use that leaf.
    """
    sizes = jax.tree.map(_bytes_of_leaf, tree, shardings)
    return sum(jax.tree.leaves(sizes))


def _bytes_of_leaf(leaf: Any, sharding: jax.sharding.Sharding | None) -> int:
    sharding = sharding or getattr(leaf, "sharding", None)
    if _is_on_host(sharding):
        return 0
    entries = math.prod(shard_shape(leaf, sharding))
    return math.ceil(entries * _bits_of(jnp.result_type(leaf)) / 8)


def _bits_of(dtype: jnp.dtype) -> int:
    """Of one entry, in memory: there are some that share a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * dtype.itemsize


def shard_shape(
    leaf: Any, sharding: jax.sharding.Sharding | None = None
) -> tuple[int, ...]:
    """The part of `leaf` on one device; by default as it lies."""
    sharding = sharding or getattr(leaf, "sharding", None)
    shape = np.shape(leaf)
    return sharding.shard_shape(shape) if sharding else shape


def _is_on_host(sharding: jax.sharding.Sharding | None) -> bool:
    """Offloaded. (The memory of a CPU device is its own default, whatever its name.)"""
    return getattr(sharding, "memory_kind", None) == "pinned_host"


def _bytes_of_sums(params: Any, placed: Any, accumulator: Accumulator | None) -> int:
    if accumulator is None:
        return 0

    def shard(leaf, sharding):
        shape = shard_shape(leaf, sharding)
        return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))

    shards = jax.tree.map(shard, params, placed)
    sums = jax.eval_shape(lambda tree: zero_sums(tree, accumulator), shards)
    return sum(_bytes_of_leaf(x, None) for x in jax.tree.leaves(sums))


def _whole(sharding: Any, axes: tuple[str, ...]) -> Any:
    """`sharding`, but not over these axes."""
    if not axes or not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding

    def kept(entry):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(name for name in names if name not in axes)

    return sharding.update(spec=jax.sharding.PartitionSpec(*map(kept, sharding.spec)))


def _window_sums(opt_state: Any) -> list[Any]:
    """The sums that lie in the optimizer state between calls; or their shardings."""
    return [state.acc_grads for state in accumulate_states(opt_state)]


def _captured(program: Any) -> dict[int, Any]:
    """Arrays that a program and those inside it close over, by identity: each once."""
    captured = {id(x): x for x in getattr(program, "consts", ())}
    for eqn in program.eqns:
        for param in jax.tree.leaves(eqn.params):
            if hasattr(param, "eqns"):
                captured |= _captured(param)
    return captured
