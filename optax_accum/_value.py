"""A loss in micro-batches, without its gradient."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from optax_accum._arguments import Roles, check_disjoint, name_arguments
from optax_accum._loop import make_loop
from optax_accum._outputs import as_returned
from optax_accum._scan import Accumulated, Returned
from optax_accum._spread import Mesh


def value(
    fun: Callable,
    *,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    group_size: int = 1,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] | None = None,
    batch_argnames: str | Sequence[str] | None = None,
    batch_axis: int = 0,
    rng_argnums: int | Sequence[int] | None = None,
    rng_argnames: str | Sequence[str] | None = None,
    carry_argnum: int | None = None,
    carry_argname: str | None = None,
    unroll: int | bool = 1,
    reduce_axes: str | Sequence[str] = (),
    mesh: Mesh | None = None,
) -> Callable:
    """A loss in micro-batches, without its gradient: for evaluation.

    The value that `value_and_grad` gives, in the memory of one forward pass of one
    micro-batch. Nothing is counted beforehand, whatever the loss consists of. Call it
    under ``jax.jit``: outside, the loop is compiled anew at every call. Its derivative
    is right, but keeps what all micro-batches leave for it: take `value_and_grad`.

    Args:
      fun: as for `value_and_grad`.
      num_microbatches: as for `value_and_grad`, as are all others.
      microbatch_size: rows in a micro-batch, instead of N.
      group_size: rows that stay together.
      has_aux: whether `fun` returns a pair, the loss first.
      batch_argnums: which arguments hold rows. Default 1, if `batch_argnames` is not
        given.
      batch_argnames: the same by keyword.
      batch_axis: the axis of the rows.
      rng_argnums: arguments whose keys are folded.
      rng_argnames: the same by keyword.
      carry_argnum: an argument that is threaded through the micro-batches.
      carry_argname: the same by keyword.
      unroll: how many micro-batches to put into one iteration.
      reduce_axes: the mesh axes over which devices share the rows. Parameters that are
        sharded over them are gathered for the call.
      mesh: the mesh of `reduce_axes`.

    Returns:
      A function with the arguments of `fun` that returns the value, the loss, with aux
      and the carried state beside it where `fun` returns those.

    Raises:
      TypeError: as `value_and_grad`.
      ValueError: as `value_and_grad`.

    Examples:
      >>> def loss_fn(w, batch):
      ...     losses = (batch["x"] * w - batch["y"]) ** 2
      ...     return optax_accum.mean(losses, where=batch["mask"])
      >>> x = jnp.arange(4.0)
      >>> batch = {"x": x, "y": jnp.ones(4), "mask": x > 0}
      >>> print(optax_accum.value(loss_fn, num_microbatches=2)(1.0, batch))
      1.6666666
    """
    roles = name_roles(
        "value",
        fun,
        (),
        (batch_argnums, batch_argnames),
        (rng_argnums, rng_argnames),
        (carry_argnum, carry_argname),
    )
    loop = make_loop(
        "value",
        fun,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        group_size=group_size,
        has_aux=has_aux,
        batch_axis=batch_axis,
        unroll=unroll,
        reduce_axes=reduce_axes,
        mesh=mesh,
    )

    @functools.wraps(fun)
    def value_fn(*args, **kwargs):
        return value_of(*loop.evaluate(roles, (args, kwargs)), has_aux)

    return value_fn


def name_roles(caller, fun, differentiated, batch, rng, carry) -> Roles:
    """Which arguments are what, given for each role the positions and the keywords."""
    batch_nums, batch_names = batch
    if batch_nums is None and batch_names is None:
        batch_nums = 1
    roles = Roles(
        differentiated=differentiated,
        split=name_arguments(fun, "batch_argnums", batch_nums, batch_names),
        folded=name_arguments(fun, "rng_argnums", *rng),
        carried=name_arguments(fun, "carry_argnum", *carry),
    )
    check_disjoint(caller, roles)
    return roles


def value_of(whole: Accumulated, returned: Returned, has_aux: bool) -> Any:
    """All that the function returns, put together as it does."""
    loss, aux = as_returned((whole.loss, whole.aux), returned)
    beside = (*whole.carry, aux) if has_aux else whole.carry
    if not beside:
        return loss
    return (loss, beside[0] if len(beside) == 1 else beside)
