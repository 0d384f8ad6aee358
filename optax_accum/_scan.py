"""The scan over micro-batches: gradient and outputs of a large batch.

Letters: ``B`` rows in the batch, ``N`` micro-batches, ``P`` a parameter-sized buffer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum._arguments import Place, Roles, find, replace, values_at
from optax_accum._checks import check_callable, check_index, check_unroll
from optax_accum._fold import (
    check_last,
    fold,
    gather,
    start,
    values_of,
    values_of_whole,
)
from optax_accum._loss import (
    anything_counts,
    divide_gradients,
    factors_of,
    must_count,
    objective,
    select_gradients,
    weigh_gradients,
    weight_of,
    weights_of,
)
from optax_accum._numerics import is_inexact, kind_of, settle, widen
from optax_accum._outputs import Output, as_markers, read_output
from optax_accum._split import (
    Split,
    check_split,
    count_rows,
    fold_keys,
    split_rows,
    stack_microbatches,
    take_microbatch,
    take_remainder,
)
from optax_accum._sums import add_to_sum, read_sums, zero_sums


class Job(NamedTuple):
    """One call of a function, ready to be taken through its micro-batches."""

    caller: str  # whose errors there are
    # (trained, microbatch, index, carry, rows) -> Output
    call: Callable[[tuple, tuple, ArrayLike, tuple, int], Output]
    trained: tuple[Any, ...]  # the differentiated arguments
    batch: tuple[Any, ...]
    carry: tuple[Any, ...]  # the carried argument, if any
    split: Split
    axis: int
    unroll: int | bool


class Accumulated(NamedTuple):
    """What the micro-batches of one call come to."""

    loss: jax.Array  # in the dtype of its sum
    aux: Any  # values, in the dtypes of their sums
    returned: tuple[Any, Any]  # loss and aux as the function returned them, or types
    grads: tuple[Any, ...]  # one for each of `Job.trained`; in the dtypes of the sums
    carry: tuple[Any, ...]  # the carried argument after the last micro-batch, if any
    weight: ArrayLike  # what the call weighs in a mean with others
    counts: bool | jax.Array  # whether anything in it counted


def prepare(
    caller: str,
    fun: Callable,
    *,
    num_microbatches: int | None,
    microbatch_size: int | None,
    group_size: int,
    has_aux: bool,
    batch_axis: int,
    unroll: int | bool,
) -> Callable[[Roles, Sequence, dict[str, Any]], Job]:
    """What makes a `Job` of every call of `fun`, with these options checked."""
    options = check_split(caller, num_microbatches, microbatch_size, group_size)
    axis = check_index(f"{caller}(batch_axis=...)", batch_axis)
    unroll = check_unroll(caller, unroll)
    check_callable(f"the first argument of {caller}", fun)

    def job(roles, args, kwargs):
        places = find(caller, roles, args, kwargs)
        trained, batch, rng, carry = values_at(places, args, kwargs)
        check_floats(caller, _labelled(places.differentiated, trained))
        rows = count_rows(caller, _labelled(places.split, batch), axis)

        def call(trained, microbatch, index, carry, rows):
            keys = fold_keys(rng, index) if rng else rng
            values = Roles(trained, microbatch, keys, carry)
            micro_args, micro_kwargs = replace(args, kwargs, places, values)
            returned = fun(*micro_args, **micro_kwargs)
            old = _labelled(places.carried, carry)
            return read_output(caller, returned, old, has_aux, rows)

        split = split_rows(rows, *options)
        return Job(caller, call, trained, batch, settle(carry), split, axis, unroll)

    return job


def accumulate_gradients(
    job: Job, accumulator_dtype: DTypeLike | None, compensated: bool
) -> Accumulated:
    """The gradient and the outputs of the whole batch."""
    if job.split.is_whole:
        return _differentiate_whole(job, None if compensated else accumulator_dtype)
    form = _form_of(job)
    loss, split = form.output.loss, job.split
    denominators = _count(job, form) if must_count(loss) else ()
    factors = factors_of(loss, denominators, split)

    def visit(microbatch, index, carry, rows):
        share = rows / split.microbatch_size

        def micro_objective(trained):
            output = job.call(trained, microbatch, index, carry, rows)
            return objective(output.loss, factors, share), output

        grads, output = jax.grad(micro_objective, has_aux=True)(job.trained)
        grads = weigh_gradients(grads, output.loss, share)
        return grads, as_markers(output, *split.weights(rows)), output.carry

    zeros = zero_sums(job.trained, accumulator_dtype, compensated)
    sums, whole, carry = _scan(job, visit, zeros, form.markers)
    grads = divide_gradients(read_sums(sums), loss, whole["loss"], split)
    return _result(job, form.output, whole, values_of(whole), grads, carry)


def evaluate(job: Job) -> Accumulated:
    """The outputs of the whole batch, without a gradient."""
    if job.split.is_whole:
        output = job.call(job.trained, job.batch, 0, job.carry, job.split.rows)
        return _result_of_whole(job, output, ())
    form, split = _form_of(job), job.split

    def visit(microbatch, index, carry, rows):
        output = job.call(job.trained, microbatch, index, carry, rows)
        return (), as_markers(output, *split.weights(rows)), output.carry

    _, whole, carry = _scan(job, visit, (), form.markers)
    return _result(job, form.output, whole, values_of(whole), (), carry)


def _differentiate_whole(job: Job, accumulator_dtype: DTypeLike | None) -> Accumulated:
    """All rows at once: no loop, no sum, nothing to compensate."""

    def whole_objective(trained):
        output = job.call(trained, job.batch, 0, job.carry, job.split.rows)
        return values_of_whole(output.loss), output

    grads, output = jax.grad(whole_objective, has_aux=True)(job.trained)
    grads = select_gradients(grads, output.loss)
    if accumulator_dtype is not None:
        grads = widen(grads, accumulator_dtype)
    return _result_of_whole(job, output, grads)


# -- The loop


class Form(NamedTuple):
    """The types of what one micro-batch comes to, known before any of them runs."""

    output: Output
    markers: dict[str, Any]  # of the loss and of aux
    weights: tuple[Any, ...]


def _form_of(job: Job) -> Form:
    split = job.split

    def first():
        stacked = stack_microbatches(job.batch, split, job.axis)
        microbatch = take_microbatch(stacked, 0, split, job.axis)
        rows = split.microbatch_size
        output = job.call(job.trained, microbatch, 0, job.carry, rows)
        markers = as_markers(output, *split.weights(rows))
        return Form(output, markers, weights_of(output.loss))

    return jax.eval_shape(first)


def _count(job: Job, form: Form) -> tuple[jax.Array, ...]:
    """The denominators of all terms, from a pass of which nothing else is used.

    The compiler removes what no weight depends on; where weights come from the batch
    alone, that is the whole model.
    """

    def visit(microbatch, index, carry, rows):
        output = job.call(job.trained, microbatch, index, carry, rows)
        return (), weights_of(output.loss), output.carry

    _, weights, _ = _scan(job, visit, (), form.weights)
    return values_of(weights)


def _scan(job: Job, visit: Callable, zeros: Any, form: Any) -> tuple[Any, Any, tuple]:
    """Visits every micro-batch in order.

    Args:
      job: what to visit.
      visit: ``(microbatch, index, carry, rows) -> (grads, markers, carry)``.
      zeros: where the sums of the gradients begin.
      form: the types of the markers.

    Returns:
      The sums of the gradients, the markers of all micro-batches together, the carry.
    """
    split, axis = job.split, job.axis
    stacked = stack_microbatches(job.batch, split, axis)

    def add_gradients(sums, grads):
        # No division and no norm before the sum: they are of the mean, and a reduction
        # over devices could not leave the loop.
        return jax.tree.map(lambda grad, total: add_to_sum(total, grad), grads, sums)

    def body(state, index):
        sums, merged, carry = state
        microbatch = take_microbatch(stacked, index, split, axis)
        grads, markers, carry = visit(microbatch, index, carry, split.microbatch_size)
        merged, kept = fold(merged, markers)
        return (add_gradients(sums, grads), merged, carry), kept

    state = zeros, start(form), job.carry
    indices = jnp.arange(split.num_microbatches)
    state, kept = jax.lax.scan(body, state, indices, unroll=job.unroll)
    sums, merged, carry = state
    rest = None
    if split.remainder:
        last, rows = take_remainder(job.batch, split, axis), split.remainder
        grads, rest, carry = visit(last, split.num_microbatches, carry, rows)
        check_last(job.caller, rest, form)
        sums = add_gradients(sums, grads)
    return sums, gather(merged, kept, rest, form, split), carry


# -- What comes of it


def _result(job, output, whole, values, grads, carry) -> Accumulated:
    """Of the types of one output, and the markers and values of all together."""
    return Accumulated(
        loss=values["loss"],
        aux=values["aux"],
        returned=(output.loss, output.aux),
        grads=grads,
        carry=carry,
        weight=weight_of(output.loss, whole["loss"], job.split.rows),
        counts=anything_counts(whole["loss"]),
    )


def _result_of_whole(job, output, grads) -> Accumulated:
    whole = {"loss": output.loss, "aux": output.aux}
    return _result(job, output, whole, values_of_whole(whole), grads, output.carry)


# -- What may be differentiated


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


def _labelled(places: tuple[Place, ...], values: tuple) -> dict[str, Any]:
    labels = [place.label for place in places]
    return dict(zip(labels, values, strict=True))
