"""The scan: value and gradient of a large batch in the memory of a micro-batch.

Letters: ``B`` rows in the batch, ``N`` micro-batches, ``P`` a parameter-sized buffer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_accum._arguments import (
    Roles,
    check_disjoint,
    find,
    name_arguments,
    replace,
    values_at,
)
from optax_accum._checks import (
    check_accumulator_dtype,
    check_callable,
    check_index,
    check_unroll,
)
from optax_accum._numerics import (
    add,
    cast_as,
    divide,
    find_difference,
    is_inexact,
    kind_of,
    scale,
    settle,
    widen,
    zero_sums,
)
from optax_accum._split import (
    check_split,
    count_rows,
    fold_keys,
    split_rows,
    stack_microbatches,
    take_microbatch,
    take_remainder,
)


class Accumulated(NamedTuple):
    """What the micro-batches of one call come to: means over the rows."""

    stats: tuple[jax.Array, Any]  # loss and aux, in the dtypes of their sums
    dtypes: tuple[jnp.dtype, Any]  # those in which the function returned them
    trained: tuple[Any, ...]  # the differentiated arguments
    grads: tuple[Any, ...]  # one for each of them, in the dtypes of their sums
    carry: tuple[Any, ...]  # the carried argument after the last micro-batch, if any
    rows: int


def value_and_grad(
    fun: Callable,
    *,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
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
    unroll: int | bool = 1,
) -> Callable:
    r"""``jax.value_and_grad`` in micro-batches: same result, memory of one of them.

    `fun` is a mean over the rows it is given. With :math:`B_i` rows in micro-batch
    :math:`i` of :math:`N`, the value is :math:`\sum_i B_i f_i / \sum_i B_i`, which is
    that of all rows at once, and the gradient is its gradient. A mean over unmasked
    tokens is no mean over rows: write ``mean(losses * mask) / share``, and pass the
    share of the whole batch, ``mean(mask)``, in an argument of its own. Each
    micro-batch is differentiated inside the loop, so that its activations are freed
    before the next one; beside them stands one sum of gradients, 1 P.

    The arrays in the batch arguments are split by rows: micro-batch :math:`i` takes
    rows :math:`i, i+N, i+2N, \dots` Scalars, None and what is no array in them pass
    whole, as do all arguments that are not named: of a loss of ``(params, x, y)`` with
    rows in both, say ``batch_argnums=(1, 2)``. With N = 1 this is
    ``jax.value_and_grad``: no loop, no sum. Call it under ``jax.jit``: outside, the
    loop is compiled anew at every call.

    Sums are exact to rounding: N additions in `accumulator_dtype`, one division.

    Args:
      fun: returns a real scalar, the mean over the rows of its batch arguments.
        With `has_aux` a pair of that and a pytree of float scalars, which are averaged
        over the rows like the loss. See `carry_argnum` for model state.
      num_microbatches: N, an integer >= 1 that divides the rows. Default 1.
      microbatch_size: rows in a micro-batch, instead of N. It need not divide the rows:
        what is left over is one more, smaller micro-batch, weighted by its rows. Larger
        than the batch means not split.
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
        normalization, not that of the large batch.
      carry_argname: the same by keyword.
      accumulator_dtype: dtype of the sums and of the gradients returned. By default
        sums are in a leaf's own dtype where that is float32 or wider, else in float32,
        and gradients are returned in the dtype of the argument.
      unroll: how many micro-batches to put into one iteration, as in ``jax.lax.scan``.
        Those of an iteration may stand in memory together.

    Returns:
      A function with the arguments of `fun` that returns what ``jax.value_and_grad``
      would: ``(value, gradient)``, where the value is all that `fun` returns.

    Raises:
      TypeError: an argument of the wrong kind; when called, a loss that is no real
        scalar, an aux leaf that is no float scalar, parameters that are no floats.
      ValueError: both `num_microbatches` and `microbatch_size`, or a differentiated
        argument that is split; when called, rows that N does not divide or that differ.

    Examples:
      >>> def loss_fn(w, batch):
      ...     return jnp.mean((batch["x"] * w - batch["y"]) ** 2)
      >>> batch = {"x": jnp.arange(4.0), "y": jnp.ones(4)}
      >>> value_and_grad = optax_accum.value_and_grad(loss_fn, num_microbatches=2)
      >>> value, grad = value_and_grad(1.0, batch)
      >>> print(value, grad)
      1.5 4.0

    References:
      Ott et al., `Scaling Neural Machine Translation
      <https://arxiv.org/abs/1806.00187>`_, 2018, section 3.2 (delayed updates).
    """
    if argnums is None and argnames is None:
        argnums = 0
    if batch_argnums is None and batch_argnames is None:
        batch_argnums = 1
    roles = Roles(
        differentiated=name_arguments(fun, "argnums", argnums, argnames),
        split=name_arguments(fun, "batch_argnums", batch_argnums, batch_argnames),
        folded=name_arguments(fun, "rng_argnums", rng_argnums, rng_argnames),
        carried=name_arguments(fun, "carry_argnum", carry_argnum, carry_argname),
    )
    check_disjoint("value_and_grad", roles)
    accumulated = accumulate_gradients(
        "value_and_grad",
        fun,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        has_aux=has_aux,
        batch_axis=batch_axis,
        accumulator_dtype=accumulator_dtype,
        unroll=unroll,
    )
    chosen = [which for which in (argnums, argnames) if which is not None]
    is_single = len(chosen) == 1 and not isinstance(chosen[0], tuple | list)

    @functools.wraps(fun)
    def value_and_grad_fn(*args, **kwargs):
        stats, dtypes, trained, grads, carry, _ = accumulated(roles, args, kwargs)
        loss, aux = jax.tree.map(jnp.astype, stats, dtypes)
        beside = (*carry, aux) if has_aux else carry
        value = (loss, beside[0] if len(beside) == 1 else beside) if beside else loss
        if accumulator_dtype is None:
            grads = cast_as(grads, trained)
        return value, grads[0] if is_single else grads

    return value_and_grad_fn


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


def accumulate_gradients(
    caller: str,
    fun: Callable,
    *,
    num_microbatches: int | None,
    microbatch_size: int | None,
    has_aux: bool,
    batch_axis: int,
    accumulator_dtype: DTypeLike | None,
    unroll: int | bool,
) -> Callable[[Roles, Sequence, dict[str, Any]], Accumulated]:
    """What stands under every door that splits: means in the dtypes of their sums."""
    split_options = check_split(caller, num_microbatches, microbatch_size)
    check_accumulator_dtype(caller, accumulator_dtype)
    batch_axis = check_index(f"{caller}(batch_axis=...)", batch_axis)
    unroll = check_unroll(caller, unroll)
    check_callable(f"the first argument of {caller}", fun)

    def accumulated(roles, args, kwargs):
        places = find(caller, roles, args, kwargs)
        diff, batch, rng, carry = values_at(places, args, kwargs)
        labels = [place.label for place in places.differentiated]
        check_floats(caller, dict(zip(labels, diff, strict=True)))
        labels = [place.label for place in places.split]
        rows = count_rows(caller, dict(zip(labels, batch, strict=True)), batch_axis)
        split = split_rows(rows, *split_options)

        def microbatch_loss(diff, batch, index, carry):
            values = Roles(diff, batch, fold_keys(rng, index) if rng else rng, carry)
            micro_args, micro_kwargs = replace(args, kwargs, places, values)
            output = fun(*micro_args, **micro_kwargs)
            loss, carry, aux = _check_output(caller, output, carry, has_aux)
            return loss, (aux, carry)

        def differentiate(batch, index, carry):
            grad_fn = jax.value_and_grad(microbatch_loss, has_aux=True)
            (loss, (aux, carry)), grads = grad_fn(diff, batch, index, carry)
            return (loss, aux), grads, carry

        if split.is_whole:
            stats, grads, carry = differentiate(batch, 0, settle(carry))
            dtypes, stats = _dtypes(stats), widen(stats)
            if accumulator_dtype is not None:
                grads = widen(grads, accumulator_dtype)
        else:
            zeros = zero_sums(diff, accumulator_dtype)
            (stats, grads), dtypes, carry = _loop(
                differentiate, batch, zeros, settle(carry), split, batch_axis, unroll
            )
        return Accumulated(stats, dtypes, diff, grads, carry, rows)

    return accumulated


def _loop(differentiate, batch, zeros, carry, split, axis, unroll):
    """Means over the micro-batches, each differentiated inside the loop."""
    stacked = stack_microbatches(batch, split, axis)

    def body(state, index):
        sums, carry = state
        microbatch = take_microbatch(stacked, index, axis)
        stats, grads, carry = differentiate(microbatch, index, carry)
        # Nothing but an add between gradient and sum: a division or a norm here would
        # keep a reduction over devices inside the loop.
        return (jax.tree.map(add, sums, grads), carry), stats

    indices = jnp.arange(split.num_microbatches)
    (sums, carry), stats = jax.lax.scan(body, (zeros, carry), indices, unroll=unroll)
    totals = jax.tree.map(jnp.sum, widen(stats)), sums
    if not split.remainder:
        means = jax.tree.map(lambda x: divide(x, split.num_microbatches), totals)
        return means, _dtypes(stats), carry

    rest = take_remainder(batch, split, axis)
    *last, carry = differentiate(rest, split.num_microbatches, carry)

    def mean(total, last):
        rows = scale(total, split.microbatch_size, total.dtype)
        return divide(add(rows, scale(last, split.remainder, total.dtype)), split.rows)

    return jax.tree.map(mean, totals, tuple(last)), _dtypes(stats), carry


def _dtypes(tree: Any) -> Any:
    return jax.tree.map(jnp.result_type, tree)


# -- What the function may be given and may return


def check_floats(caller: str, arguments: dict[str, Any]) -> None:
    """Only floats have a gradient; every leaf that is none is named."""
    wrong = [
        f"{name}{jax.tree_util.keystr(path)} ({kind_of(leaf)})"
        for name, argument in arguments.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument)
        if not is_inexact(leaf)
    ]
    if wrong:
        raise TypeError(
            f"`{caller}` must be given floating or complex arrays to train, got "
            f"{', '.join(wrong)}; pass what is not trained in an argument of its own."
        )


def _check_output(
    caller: str, output: Any, carry: tuple, has_aux: bool
) -> tuple[jax.Array, tuple, Any]:
    """The loss, the new carry and the aux in what a function returned."""

    def pair(x, form):
        if not isinstance(x, tuple | list) or len(x) != 2:
            raise TypeError(
                f"`{caller}` expects a function that returns {form}, got {_form(x)}; "
                "`has_aux=True` and a carried argument each put something beside the "
                "loss."
            )
        return x

    loss, new, aux = output, (), None
    if carry and has_aux:
        loss, beside = pair(output, "(loss, (state, aux))")
        *new, aux = pair(beside, "(loss, (state, aux))")
    elif carry:
        loss, *new = pair(output, "(loss, state)")
    elif has_aux:
        loss, aux = pair(output, "(loss, aux)")
    _check_loss(caller, loss)
    _check_aux(caller, aux)
    return jnp.asarray(loss), _check_carry(caller, tuple(new), carry), settle(aux)


def _check_loss(caller: str, loss: Any) -> None:
    is_real = is_inexact(loss) and jnp.isrealobj(loss)
    if not is_real or jnp.shape(loss) != ():
        raise TypeError(
            f"`{caller}` expects a loss that is a real floating scalar, got "
            f"{_form(loss)}; reduce it with `jnp.mean`, and say `has_aux=True` if the "
            "function returns something beside it."
        )


def _check_aux(caller: str, aux: Any) -> None:
    wrong = [
        f"aux{jax.tree_util.keystr(path)} ({kind_of(leaf)})"
        for path, leaf in jax.tree_util.tree_leaves_with_path(aux)
        if not is_inexact(leaf) or jnp.shape(leaf) != ()
    ]
    if wrong:
        raise TypeError(
            f"`{caller}(has_aux=True)` must be given floating scalars in aux, which "
            f"are averaged over the rows, got {', '.join(wrong)}; return a mean over "
            "rows."
        )


def _check_carry(caller: str, new: tuple, old: tuple) -> tuple:
    """`new`, if its structure, shapes and dtypes are those of `old`."""
    difference = find_difference(new, old)
    if difference:
        raise TypeError(
            f"`{caller}` expects a function that returns the carried state with the "
            f"types that it was given, got another one: {difference}."
        )
    return settle(new)


def _form(output: Any) -> str:
    return str(jax.tree.map(kind_of, output))
