"""Planning before anything runs: what users call."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.typing import DTypeLike

from optax_accum._checks import (
    check_callable,
    check_optimizer,
    shown,
)
from optax_accum._loop import make_loop
from optax_accum._memory_limit import check_memory_limit
from optax_accum._numerics import kind_of
from optax_accum._placement import Gather
from optax_accum._plan import Plan
from optax_accum._planner import make_plan
from optax_accum._spread import Mesh
from optax_accum._state import check_made_by
from optax_accum._train_step import make_train_step


def plan_microbatches(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    state: Any,
    batch: Any,
    *args: Any,
    memory_limit: int | float | str | None = None,
    exhaustive: bool = False,
    factory: bool = False,
    extra_args: Mapping[str, Any] | None = None,
    group_size: int = 1,
    has_aux: bool = False,
    batch_axis: int = 0,
    accumulator_dtype: DTypeLike | None = None,
    compensated: bool = False,
    in_place: bool = False,
    unroll: int | bool = 1,
    reduce_axes: str | Sequence[str] = (),
    param_specs: Any = None,
    gather: Gather | None = None,
    mesh: Mesh | None = None,
    donate: bool = True,
) -> Plan:
    """Finds the largest micro-batch with which a train step fits, without running it.

    For several N the very step that `make_train_step` makes is compiled, and its peak
    on each device read from what the compiler has planned::

      peak = arguments + outputs - aliases + temporaries

    and what that leaves out: arguments that the step does not use and arrays that
    `loss_fn` closes over. No array is allocated, and no out-of-memory error is
    provoked. (On a GPU, to compile is to run single operations, by which XLA chooses
    algorithms; ``XLA_FLAGS=--xla_gpu_autotune_level=0`` would stop it.)

    Candidates are the N that divide the rows, or groups of rows, so that every device
    gets as many in each micro-batch. N = 1 is tried first, since it needs no sum of
    gradients, then the others are bisected, for memory falls with N from 2 on, as a
    rule. Of C candidates ``ceil(log2(C)) + 2`` are compiled at most, among them the
    chosen one and the next larger, which does not fit. Only where none of these fits
    and memory is seen to grow with N, as it does where the loss reports a `Stack`, all
    are compiled.

    The same arguments give the same plan in every process of a job, as far as the
    compiler does: there the limit has to be given in bytes.

    What else is on the devices is not known: other models, the next batch, what a
    library holds. Leave room for it. On CPUs convolutions pack their operands in memory
    that XLA does not plan, which may be as much again where they are few and wide, and
    a step may begin before the system has taken back what the last one needed.

    Args:
      loss_fn: as for `make_train_step`. With `factory` a function ``N -> loss_fn``.
      optimizer: the one that made the state.
      state: a `TrainState`, of arrays or of ``jax.ShapeDtypeStruct``, as
        ``jax.eval_shape(lambda: init_train_state(params, optimizer))`` returns. Arrays
        that will be sharded must say so, by a sharding of their own: on a mesh with
        Auto axes ``jax.eval_shape`` forgets it, and the compiler lays out as it likes
        what has none.
      batch: the batch of one call, also of either. Rows that are sharded over devices
        stay where they are.
      *args: further arguments of the train step, of either.
      memory_limit: bytes on each device: an integer, or a string such as ``"12GiB"`` or
        ``"800 MB"``. A fraction in (0, 1] is that of the memory which the device says
        that JAX may have, the least of those that are used; None is all of it. A CPU
        does not tell.
      exhaustive: whether to compile all candidates. Where memory does not fall with N
        a larger micro-batch may fit than the bisection finds.
      factory: for losses that split the batch themselves, such as contrastive ones: the
        step is then not split, and the loss is ``loss_fn(N)``.
      extra_args: keywords of the train step, which the optimizer receives.
      group_size: this and all that follow are those of `make_train_step`.
      has_aux: see there.
      batch_axis: see there.
      accumulator_dtype: see there.
      compensated: see there.
      in_place: see there.
      unroll: see there.
      reduce_axes: see there. N and the rows of a micro-batch are then those of each
        device.
      param_specs: see there.
      gather: see there.
      mesh: see there.
      donate: see there.

    Returns:
      A `Plan`, which prints as a table, has the ``num_microbatches`` to choose, and for
      each candidate that was compiled the peak and what it consists of.

    Raises:
      TypeError: as `make_train_step`; a limit of another kind.
      ValueError: as `make_train_step`; a limit that cannot be read, or is missing where
        the device tells none; a loss that cannot be traced; if nothing fits, with the
        smallest peak and what would make it smaller.

    Examples:
      >>> def loss_fn(params, batch):
      ...     return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)
      >>> optimizer = optax.adamw(1e-3)
      >>> params = {"w": jax.ShapeDtypeStruct((256, 4096), jnp.float32)}
      >>> state = jax.eval_shape(
      ...     lambda params: optax_accum.init_train_state(params, optimizer), params)
      >>> batch = jax.ShapeDtypeStruct((8192, 256), jnp.float32)
      >>> plan = optax_accum.plan_microbatches(
      ...     loss_fn, optimizer, state, batch, memory_limit="100 MiB")
      >>> plan.num_microbatches, plan.microbatch_size
      (4, 2048)
    """
    call = "plan_microbatches(loss_fn, optimizer, state, batch)"
    optimizer = check_optimizer(call, optimizer)
    check_made_by(call, optimizer, state)
    options = dict(
        group_size=group_size,
        has_aux=has_aux,
        batch_axis=batch_axis,
        accumulator_dtype=accumulator_dtype,
        compensated=compensated,
        in_place=in_place,
        unroll=unroll,
        reduce_axes=reduce_axes,
        param_specs=param_specs,
        gather=gather,
        mesh=mesh,
    )
    loop = make_loop("plan_microbatches", loss_fn, **options)
    return make_plan(
        "plan_microbatches",
        _builder(loss_fn, optimizer, factory, options | {"donate": donate}),
        (state, batch, *args),
        _check_extra(extra_args),
        memory_limit=check_memory_limit(
            "plan_microbatches(memory_limit=...)", memory_limit
        ),
        group_size=group_size,
        batch_axis=batch_axis,
        accumulator=None if factory else loop.accumulator,
        spread=loop.spread,
        exhaustive=exhaustive,
    )


def _builder(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    factory: bool,
    options: dict[str, Any],
) -> Callable[[int], jax.stages.Wrapped]:
    """What makes the step for so many micro-batches."""

    def build(num_microbatches):
        loss, count = loss_fn, num_microbatches
        if factory:
            loss, count = loss_fn(num_microbatches), 1
            check_callable("loss_fn(N) of plan_microbatches(factory=True)", loss)
        loss = _explained(loss)
        return make_train_step(loss, optimizer, num_microbatches=count, **options)

    return build


def _check_extra(extra_args: Any) -> dict[str, Any]:
    if extra_args is None:
        return {}
    if isinstance(extra_args, Mapping) and not {"state", "batch"} & set(extra_args):
        return dict(extra_args)
    got = list(extra_args) if isinstance(extra_args, Mapping) else extra_args
    raise TypeError(
        "`plan_microbatches(extra_args=...)` must be a dict of what the optimizer gets "
        f"by keyword, got {shown(got)}; `state` and `batch` are arguments of their own."
    )


def _explained(loss_fn: Callable) -> Callable:
    """`loss_fn`, whose errors say that it is the loss which could not be traced."""

    @functools.wraps(loss_fn)
    def explained(params, batch, *args, **kwargs):
        try:
            return loss_fn(params, batch, *args, **kwargs)
        except Exception as error:
            shapes = ", ".join(map(kind_of, jax.tree.leaves(batch)))
            raise ValueError(
                "`plan_microbatches(loss_fn, ...)` must be given a loss that JAX can "
                f"trace with each micro-batch, got {type(error).__name__} for one of "
                f"{shapes}: {error}; try it with `jax.eval_shape`. (A loss gets `key` "
                "and `model_state` where the state has them.)"
            ) from error

    return explained
