"""The scan over micro-batches: gradient and outputs of a large batch.

Letters: ``B`` rows in the batch, ``N`` micro-batches, ``P`` a parameter-sized buffer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum._fold import (
    check_last,
    fold,
    gather,
    over_devices,
    stack_whole,
    start,
    values_of,
    values_of_whole,
)
from optax_accum._in_place import (
    add_in_place,
    find_by_value,
    freeze_refs,
    new_refs,
    write_over,
)
from optax_accum._job import Job
from optax_accum._loss import (
    Measure,
    anything_counts,
    divide_gradients,
    measure_of,
    must_count,
    objective,
    select_gradients,
    weigh_gradients,
    weight_of,
    weights_of,
    widened,
)
from optax_accum._numerics import widen
from optax_accum._outputs import Output, as_markers
from optax_accum._split import (
    stack_microbatches,
    take_microbatch,
    take_remainder,
)
from optax_accum._sums import (
    Accumulator,
    add_to_sum,
    first_sums,
    read_sums,
    zero_sums,
)
from optax_accum._terms import terms_of


class Form(NamedTuple):
    """The types of what one micro-batch comes to, known before any of them runs."""

    output: Output
    markers: dict[str, Any]  # of the loss and of aux
    weights: tuple[Any, ...]
    by_value: frozenset[int]  # leaves whose gradient is added by value, if in place


class Accumulated(NamedTuple):
    """What micro-batches come to, all together."""

    loss: jax.Array  # in the dtype of its sum
    aux: Any  # values, in the dtypes of their sums
    grads: tuple[Any, ...]  # one for each of `Job.trained`; in the dtypes of the sums
    carry: tuple[Any, ...]  # the carried argument after the last micro-batch, if any
    weight: ArrayLike  # what they weigh in a mean with others
    counts: bool | jax.Array  # whether anything in them counted


# Loss and aux as the function returned them, or the types of that.
Returned = tuple[Any, Any]


def accumulate_gradients(
    job: Job, accumulator: Accumulator
) -> tuple[Accumulated, Returned]:
    """The gradient and the outputs of the whole batch."""
    if job.is_whole:
        return _differentiate_whole(job, accumulator)
    form = form_of(job, accumulator)
    loss = form.output.loss
    counted = _count(job, form) if must_count(loss) else ()
    measure = measure_of(loss, counted, job.split)
    sums, whole, carry = sum_gradients(job, form, measure, accumulator)
    sums = job.placement.close_call(read_sums(sums))
    whole = over_devices(whole, job.axes)

    def divide(sums):
        return divide_gradients(sums, loss, whole["loss"], job.split)

    grads = write_over(divide, sums) if accumulator.in_place else divide(sums)
    return _result(job, form.output, whole, values_of(whole), grads, carry)


def sum_gradients(
    job: Job,
    form: Form,
    measure: Measure,
    accumulator: Accumulator,
    earlier: Any = None,
) -> tuple[Any, Any, tuple]:
    """Sums of the gradients of all micro-batches: where devices share them, its own.

    Args:
      job: the micro-batches.
      form: what one of them comes to.
      measure: what the sums are measured in.
      accumulator: how they are kept.
      earlier: sums to which these are added. None: there are none, and the gradient of
        a single micro-batch is its own sum.

    Returns:
      The sums, the markers of all micro-batches together, the carry.
    """

    def visit(microbatch, index, carry, rows):
        def micro_objective(trained):
            output = job.call(trained, microbatch, index, carry, rows)
            return objective(output.loss, measure, rows), output

        trained = job.placement.open_microbatch(job.trained, index)
        grads, output = jax.grad(micro_objective, has_aux=True)(trained)
        grads = weigh_gradients(grads, output.loss, measure, rows)
        grads = job.placement.close_microbatch(grads, accumulator)
        return grads, as_markers(output, *job.split.weights(rows)), output.carry

    if earlier is None and job.split.is_whole:
        grads, markers, carry = _visit_whole(job, visit)
        return first_sums(grads, accumulator), markers, carry
    if earlier is None:
        earlier = zero_sums(job.trained, accumulator)
    if accumulator.in_place:
        return _sum_in_place(job, form, measure, earlier)
    return _scan(job, visit, earlier, form.markers)


def _sum_in_place(
    job: Job, form: Form, measure: Measure, earlier: Any
) -> tuple[Any, Any, tuple]:
    """The same, each gradient added while it is made: none stands beside the sums."""
    refs = new_refs(earlier)

    def visit(microbatch, index, carry, rows):
        def micro_objective(trained):
            output = job.call(trained, microbatch, index, carry, rows)
            return objective(widened(output.loss), measure, rows), output

        output = add_in_place(
            refs,
            micro_objective,
            job.trained,
            by_value=form.by_value,
            # Of devices that share the rows each would have a branch of its own.
            counts_of=lambda output: bool(job.axes) or anything_counts(output.loss),
            labels=job.labels,
        )
        return (), as_markers(output, *job.split.weights(rows)), output.carry

    _, whole, carry = _scan(job, visit, (), form.markers)
    return freeze_refs(refs), whole, carry


def evaluate(job: Job) -> tuple[Accumulated, Returned]:
    """The outputs of the whole batch, without a gradient."""
    if job.is_whole:
        output = job.call(job.trained, job.batch, 0, job.carry, job.split.rows)
        return _result_of_whole(job, output, ())
    form, split = form_of(job), job.split

    def visit(microbatch, index, carry, rows):
        trained = job.placement.open_microbatch(job.trained, index)
        output = job.call(trained, microbatch, index, carry, rows)
        return (), as_markers(output, *split.weights(rows)), output.carry

    _, whole, carry = _scan(job, visit, (), form.markers)
    whole = over_devices(whole, job.axes)
    return _result(job, form.output, whole, values_of(whole), (), carry)


def _differentiate_whole(
    job: Job, accumulator: Accumulator
) -> tuple[Accumulated, Returned]:
    """All rows at once: no loop, no sum, nothing to compensate or to do in place."""

    def whole_objective(trained):
        output = job.call(trained, job.batch, job.first, job.carry, job.split.rows)
        return values_of_whole(output.loss), output

    grads, output = jax.grad(whole_objective, has_aux=True)(job.trained)
    grads = select_gradients(grads, output.loss)
    if accumulator.dtype is not None and not accumulator.compensated:
        grads = widen(grads, accumulator.dtype)
    return _result_of_whole(job, output, grads)


# -- The loop


def form_of(job: Job, accumulator: Accumulator | None = None) -> Form:
    """What a micro-batch of `job` comes to, and how it can be differentiated."""
    split, rows = job.split, job.split.microbatch_size
    by_value = frozenset()

    def first():
        nonlocal by_value
        stacked = stack_microbatches(job.batch, split, job.axis)
        microbatch = take_microbatch(stacked, 0, split, job.axis)
        trained = job.placement.open_microbatch(job.trained, job.first)

        def call(trained):
            return job.call(trained, microbatch, job.first, job.carry, rows)

        def call_objective(trained):
            output = call(trained)
            divisors = (1,) * len(terms_of(output.loss))
            return objective(widened(output.loss), Measure(divisors), rows), output

        if accumulator is not None and accumulator.in_place:
            by_value, output = find_by_value(
                job.caller, call_objective, trained, accumulator, job.labels
            )
        else:
            output = call(trained)
        markers = as_markers(output, *split.weights(rows))
        return output, markers, weights_of(output.loss)

    output, markers, weights = jax.eval_shape(first)
    return Form(output, markers, weights, by_value)


def _count(job: Job, form: Form) -> tuple[jax.Array, ...]:
    """The denominators of all terms, from a pass of which nothing else is used.

    The compiler removes what no weight depends on; where weights come from the batch
    alone, that is the whole model.
    """

    def visit(microbatch, index, carry, rows):
        trained = job.placement.open_microbatch(job.trained, index)
        output = job.call(trained, microbatch, index, carry, rows)
        return (), weights_of(output.loss), output.carry

    _, weights, _ = _scan(job, visit, (), form.weights)
    return values_of(over_devices(weights, job.axes))


def _visit_whole(job: Job, visit: Callable) -> tuple[Any, Any, tuple]:
    """A batch that is its own and only micro-batch."""
    grads, markers, carry = visit(job.batch, job.first, job.carry, job.split.rows)
    return grads, stack_whole(markers), carry


def _scan(job: Job, visit: Callable, sums: Any, form: Any) -> tuple[Any, Any, tuple]:
    """Visits every micro-batch in order.

    Args:
      job: what to visit.
      visit: ``(microbatch, index, carry, rows) -> (grads, markers, carry)``.
      sums: where the sums of the gradients begin.
      form: the types of the markers.

    Returns:
      The sums of the gradients, the markers of all micro-batches together, the carry.
    """
    split, axis = job.split, job.axis

    def add_gradients(sums, grads):
        # No division and no norm before the sum: they are of the mean, and a reduction
        # over devices could not leave the loop.
        return jax.tree.map(lambda grad, total: add_to_sum(total, grad), grads, sums)

    if split.is_whole:
        grads, markers, carry = _visit_whole(job, visit)
        return add_gradients(sums, grads), markers, carry
    stacked = stack_microbatches(job.batch, split, axis)

    def body(state, i):
        sums, merged, carry = state
        microbatch = take_microbatch(stacked, i, split, axis)
        rows = split.microbatch_size
        grads, markers, carry = visit(microbatch, job.first + i, carry, rows)
        merged, kept = fold(merged, markers)
        return (add_gradients(sums, grads), merged, carry), kept

    state = sums, start(form), job.carry
    indices = jnp.arange(split.num_microbatches, dtype=jnp.int32)
    state, kept = jax.lax.scan(body, state, indices, unroll=job.unroll)
    sums, merged, carry = state
    rest = None
    if split.remainder:
        last, rows = take_remainder(job.batch, split, axis), split.remainder
        index = job.first + split.num_microbatches
        grads, rest, carry = visit(last, index, carry, rows)
        check_last(job.caller, rest, form)
        sums = add_gradients(sums, grads)
    return sums, gather(merged, kept, rest, form, split), carry


# -- What comes of it


def _result(job, output, whole, values, grads, carry) -> tuple[Accumulated, Returned]:
    """Of the types of one output, and the markers and values of all together."""
    result = Accumulated(
        loss=values["loss"],
        aux=values["aux"],
        grads=grads,
        carry=carry,
        weight=weight_of(output.loss, whole["loss"], job.split.total_rows),
        counts=anything_counts(whole["loss"]),
    )
    return result, (output.loss, output.aux)


def _result_of_whole(job, output, grads) -> tuple[Accumulated, Returned]:
    whole = {"loss": output.loss, "aux": output.aux}
    return _result(job, output, whole, values_of_whole(whole), grads, output.carry)
