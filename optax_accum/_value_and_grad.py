"""JAX's own `value_and_grad` and `grad`, in micro-batches."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.typing import DTypeLike

from optax_accum._arguments import (
    Argument,
    Roles,
    find,
    name_arguments,
    values_at,
)
from optax_accum._loop import make_loop
from optax_accum._numerics import cast_as, widen
from optax_accum._over_devices import Call
from optax_accum._placement import Gather
from optax_accum._spread import Mesh
from optax_accum._value import name_roles, value_of


def value_and_grad(
    fun: Callable,
    *,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    group_size: int = 1,
    argnums: int | Sequence[int] | None = None,
    argnames: str | Sequence[str] | None = None,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] | None = None,
    batch_argnames: str | Sequence[str] | None = None,
    batch_axis: int = 0,
    rng_argnums: int | Sequence[int] | None = None,
    rng_argnames: str | Sequence[str] | None = None,
    carry_argnum: int | None = None,
    carry_argname: str | None = None,
    accumulator_dtype: DTypeLike | None = None,
    compensated: bool = False,
    in_place: bool = False,
    unroll: int | bool = 1,
    reduce_axes: str | Sequence[str] = (),
    param_specs: Any = None,
    gather: Gather | None = None,
    mesh: Mesh | None = None,
) -> Callable:
    r"""``jax.value_and_grad`` in micro-batches: same result, memory of one of them.

    Call it under ``jax.jit``: outside, the loop is compiled anew at every call.

    The loss is one of four:

    * A scalar is the mean over the rows that `fun` was given. With :math:`B_i` rows in
      micro-batch :math:`i`, the value is :math:`\sum_i B_i f_i / \sum_i B_i`.
    * `mean` of entries, with ``where`` or ``weights``, since a mean over unmasked
      tokens is no mean over rows. It is that over all micro-batches,
      :math:`\sum_i t_i / \sum_i w_i`, whatever each one's share of the mask.
    * `Sum` of a scalar is added up.
    * Several of these, added: each term keeps its own denominator.

    All come to what `fun` gives for all rows at once, and to its gradient, provided
    that what it computes for a row depends on no other row; BatchNorm and contrastive
    losses break this. Each micro-batch is differentiated inside the loop, so that its
    activations are freed before the next one; beside them stands one sum of gradients,
    as large as the parameters, for any number of terms.

    The denominators of several terms are counted before the gradients, by a pass over
    the micro-batches with the same keys and state. Where weights come from the batch
    alone, the compiler removes the model from that pass, and it is free. Weights that
    come from parameters or states cost what it takes to compute them. A callback with
    side effects, such as ``jax.debug.print``, runs twice in each micro-batch, and what
    it reads is computed twice. With one term there is no such pass.

    A term of total weight 0 is 0, and a micro-batch in which no term counts adds
    nothing, even if its gradient is NaN. If another term counts there, a NaN stays:
    write no 0 / 0 into the loss.

    The arrays in the batch arguments are split by rows: micro-batch :math:`i` takes
    rows :math:`i, i+N, i+2N, \dots` Scalars, None and what is no array in them pass
    whole, as do all arguments that are not named: of a loss of ``(params, x, y)`` with
    rows in both, say ``batch_argnums=(1, 2)``. With N = 1 this is
    ``jax.value_and_grad``: no loop, no sum.

    The only error is that of rounding: of N additions in `accumulator_dtype`, and of
    the scaling by weights.

    Args:
      fun: returns the loss; with `has_aux` a pair of that and aux, any pytree. Floating
        scalars in aux are averaged over the rows. Everything else says how it is put
        together: `Mean`, `Sum`, `Max`, `Min`, `Last`, `Stack`, `Concat`. See
        `carry_argnum` for model state.
      num_microbatches: N, an integer >= 1 that divides the rows. Default 1.
      microbatch_size: rows in a micro-batch, instead of N. It need not divide the rows:
        what is left over is one more, smaller micro-batch, weighted by its rows. If
        larger than the batch, the batch is not split.
      group_size: how many neighbouring rows stay together, such as the two of a pair.
        Micro-batches then take every Nth group, and the rows are whole groups.
      argnums: which positional arguments to differentiate. Default 0, if `argnames` is
        not given. Pytrees of floating or complex arrays.
      argnames: the same by keyword.
      has_aux: whether `fun` returns a pair, the loss first.
      batch_argnums: which arguments hold rows. Default 1, if `batch_argnames` is not
        given. All arrays in them have the same number of rows.
      batch_argnames: the same by keyword.
      batch_axis: the axis of the rows, in every array of the batch arguments.
      rng_argnums: arguments whose keys, typed or raw, are folded with the number of the
        micro-batch, 0 for the first, also where N = 1. Other keys are shared.
      rng_argnames: the same by keyword.
      carry_argnum: an argument that is threaded through the micro-batches in order,
        such as the statistics of BatchNorm. `fun` then returns ``(loss, new)``, with
        `has_aux` ``(loss, (new, aux))``, where ``new`` has the types of the argument.
        Statistics of the batch are then those of each micro-batch: ghost batch
        normalization, not that of the large batch. Averaging them, by returning a
        `Mean` of them in aux, does not make them those of the large batch either.
      carry_argname: the same by keyword.
      accumulator_dtype: dtype of the sums and of the gradients returned. By default
        sums are in a leaf's own dtype where that is float32 or wider, else in float32,
        and gradients are returned in the dtype of the argument.
      compensated: whether a sum of fewer than 32 bits keeps beside it what rounding
        took, in as many bits again (Kahan). For where sums must be narrow: it is as
        large as one in float32, and less exact.
      in_place: whether the backward pass itself adds to the sums, so that no gradient
        stands beside them. It saves up to 1 P where a model scans over its layers, and
        next to nothing where it does not. The results are the same but for the order
        in which what a parameter gets from several places is added. Needs JAX 0.10.2.
        Beside the sum stand, all the same, the gradients of parameters of fewer bits
        than their sum; of what is inside a ``jax.checkpoint``, while that runs; and,
        with JAX 0.10, of parameters of which the model takes a slice, that it gives to
        an inner program twice, or to a scan together with what was computed from
        others. JAX cannot map it by ``vmap``. Where nothing in a micro-batch counts,
        its backward pass is skipped; so a masked loss cannot be differentiated again.
        (Inside a ``shard_map`` in which devices differ in that, and with `reduce_axes`,
        it is not skipped, and a NaN stays.) A loss of 16 bits is weighed in 16 bits:
        return it in float32 if micro-batches differ in their rows.
      unroll: how many micro-batches to put into one iteration, as in ``jax.lax.scan``.
        Those of an iteration may stand in memory together.
      reduce_axes: the mesh axes over which devices share the rows, a name or several.
        Each device takes its own rows through its own micro-batches, and the sums of
        gradients are added up over devices once, after the last. (By default the
        compiler decides, and as a rule devices exchange a whole gradient for every
        micro-batch.) Rows, N, `microbatch_size` and `Stack` are then those of a device.
        What `fun` returns for a micro-batch is put together over devices just as over
        micro-batches, so that it need not reduce anything itself; it may, over these
        axes, as a BatchNorm with ``axis_name`` does; but a `Sum` counts on each device.
        A carried state and `Last` must be the same on all, which JAX's types have to
        show, in one more trace. Keys are folded with the number of the device too.
        Arguments that are not named are given whole to every device. All other axes of
        the mesh are left to the compiler, tensor parallelism in `fun` among them.
        Inside a ``shard_map`` over these axes, `fun` gets what the device has, and
        results are those of all; with ``check_vma=False`` there, nothing shows that a
        state is the same.
      param_specs: how the differentiated arguments are sharded over `reduce_axes`
        themselves (FSDP): a ``PartitionSpec`` or a sharding for every leaf, or for a
        subtree; of other axes nothing is read. `fun` sees whole parameters, gradients
        are returned so sharded. None: every device has them all. On Explicit axes this
        is checked. On Auto ones it cannot be seen under ``jit``: what is sharded and
        not said to be is gathered for the call, and what is said to be and is not
        stays whole in memory.
      gather: for sharded parameters, ``"microbatch"`` (the default), to gather them and
        to reduce and scatter their gradients in every micro-batch, which takes the
        least memory; or ``"call"``, to gather once, sum whole gradients and reduce and
        scatter once, which takes the least traffic. Over those of `reduce_axes` on
        which a parameter is not sharded (HSDP) it is reduced once in any case. All
        parameters are gathered at once: for layer by layer leave that axis to the
        compiler.
      mesh: the mesh of `reduce_axes`, by default that of ``jax.set_mesh``.

    Returns:
      A function with the arguments of `fun` that returns what ``jax.value_and_grad``
      would: ``(value, gradient)``, where the value is all that `fun` returns, with the
      value of each term and marker in its place.

    Raises:
      TypeError: an argument of the wrong kind; when called, a loss that is none of the
        four, an aux leaf that is neither a float scalar nor marked, parameters that are
        no floats, a carried state of other types, or one of which JAX's types do not
        tell whether devices differ in it.
      ValueError: both `num_microbatches` and `microbatch_size`, a differentiated
        argument that is split, or `compensated` sums of 32 bits; when called, rows that
        N, `group_size` or the devices do not divide or that differ, `reduce_axes` that
        the mesh lacks, `param_specs` that do not fit, a carried state or a `Last` in
        which devices differ.

    Examples:
      >>> def loss_fn(w, batch):
      ...     losses = (batch["x"] * w - batch["y"]) ** 2
      ...     return optax_accum.mean(losses, where=batch["mask"]) + 0.5 * w**2
      >>> x = jnp.arange(4.0)
      >>> batch = {"x": x, "y": jnp.ones(4), "mask": x > 0}
      >>> value_and_grad = optax_accum.value_and_grad(loss_fn, num_microbatches=2)
      >>> value, grad = value_and_grad(1.0, batch)
      >>> print(round(float(value), 3), round(float(grad), 3))
      2.167 6.333

    References:
      Ott et al., `Scaling Neural Machine Translation
      <https://arxiv.org/abs/1806.00187>`_, 2018, section 3.2 (delayed updates).
    """
    differentiated, is_single = _choose(fun, argnums, argnames)
    roles = name_roles(
        "value_and_grad",
        fun,
        differentiated,
        (batch_argnums, batch_argnames),
        (rng_argnums, rng_argnames),
        (carry_argnum, carry_argname),
    )
    loop = make_loop(
        "value_and_grad",
        fun,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        group_size=group_size,
        has_aux=has_aux,
        batch_axis=batch_axis,
        unroll=unroll,
        accumulator_dtype=accumulator_dtype,
        compensated=compensated,
        in_place=in_place,
        reduce_axes=reduce_axes,
        param_specs=param_specs,
        gather=gather,
        mesh=mesh,
        is_single=is_single,
    )

    @functools.wraps(fun)
    def value_and_grad_fn(*args, **kwargs):
        whole, returned = loop.accumulate(roles, (args, kwargs))
        grads = _in_dtypes(whole.grads, accumulator_dtype, roles, (args, kwargs))
        return value_of(whole, returned, has_aux), grads[0] if is_single else grads

    return value_and_grad_fn


def _choose(
    fun: Callable, argnums: Any, argnames: Any
) -> tuple[tuple[Argument, ...], bool]:
    """What to differentiate, and whether it is one argument alone."""
    if argnums is None and argnames is None:
        argnums = 0
    chosen = [which for which in (argnums, argnames) if which is not None]
    is_single = len(chosen) == 1 and not isinstance(chosen[0], tuple | list)
    return name_arguments(fun, "argnums", argnums, argnames), is_single


def _in_dtypes(
    grads: tuple, dtype: DTypeLike | None, roles: Roles, call: Call
) -> tuple[Any, ...]:
    """The gradients in `dtype`, by default in those of the arguments of the call."""
    if dtype is not None:
        return widen(grads, dtype)
    places = find("value_and_grad", roles, *call)
    return cast_as(grads, values_at(places, *call).differentiated)


def grad(fun: Callable, **options: Any) -> Callable:
    """``jax.grad`` in micro-batches: `value_and_grad` without the value.

    Args:
      fun: as for `value_and_grad`.
      **options: those of `value_and_grad`.

    Returns:
      A function with the arguments of `fun` that returns the gradient, or a pair of
      that and what `fun` returns beside the loss: aux, the new state, or both.

    Raises:
      TypeError: as `value_and_grad`.
      ValueError: as `value_and_grad`.

    Examples:
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w * x) ** 2)
      >>> print(optax_accum.grad(loss_fn, num_microbatches=4)(1.0, jnp.arange(8.0)))
      35.0
    """
    value_and_grad_fn = value_and_grad(fun, **options)

    @functools.wraps(fun)
    def grad_fn(*args, **kwargs):
        value, grads = value_and_grad_fn(*args, **kwargs)
        return (grads, value[1]) if isinstance(value, tuple) else grads

    return grad_fn
