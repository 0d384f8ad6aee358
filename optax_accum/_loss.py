r"""What of a loss each micro-batch differentiates, and by what the sum is divided.

With totals :math:`t_{ij}` of micro-batch :math:`i` and term :math:`j`, and denominators
:math:`D_j = \sum_i w_{ij}`, the loss of all micro-batches is
:math:`\sum_j \sum_i t_{ij} / D_j`. Each micro-batch differentiates
:math:`\sum_j f_j t_{ij}`; after the loop the sum of gradients is divided by one number.
Of a loss of one term, :math:`f` is a constant, and :math:`D` need not be known before
the end. Of several, :math:`f_j = N / D_j`: the denominators are known beforehand.

A scalar :math:`x_i` is a mean over rows, :math:`t_i = B_i x_i` and :math:`w_i = B_i`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum._numerics import (
    divide,
    ratio,
    scale,
    sum_dtype,
    varying_axes,
    weight_dtype,
    widen,
)
from optax_accum._split import Split
from optax_accum._terms import Mean, Sum, Term, terms_of


class Measure(NamedTuple):
    """What totals are measured in while they are summed: :math:`f_j = n / d_j`."""

    divisors: tuple[ArrayLike, ...]  # d_j, one for each term
    parts: int = 1  # n

    def factors(self, count: int) -> tuple[Any, ...]:
        """``count * f_j`` for each term; 0 where the divisor is."""
        return tuple(
            _quotient(count * self.parts, divisor) for divisor in self.divisors
        )


def must_count(loss: Any) -> bool:
    """Whether denominators must be known before anything is differentiated."""
    terms = terms_of(loss)
    return len(terms) > 1 and any(isinstance(term, Mean) for term in terms)


def needs_denominators(loss: Any) -> bool:
    """Whether terms are divided by what only all calls of a window together know."""
    terms = terms_of(loss)
    return len(terms) > 1 and not all(isinstance(term, Sum) for term in terms)


def weights_of(loss: Any) -> tuple[Sum, ...]:
    """What a micro-batch adds to the denominators: the weight of every `Mean`."""
    means = (term for term in terms_of(loss) if isinstance(term, Mean))
    return tuple(Sum(term.widened().weight) for term in means)


def measure_of(loss: Any, counted: tuple[jax.Array, ...], split: Split) -> Measure:
    """What the totals of all micro-batches are measured in.

    Args:
      loss: what the function returns, or the types of that.
      counted: the denominator of every `Mean`, where they must be counted.
      split: how the rows are split.
    """
    terms = terms_of(loss)
    if len(terms) == 1:
        return Measure((unit_of(loss, split),))
    denominators = iter(counted)

    def denominator(term):
        if isinstance(term, Mean):
            return next(denominators)
        return 1 if isinstance(term, Sum) else split.total_rows

    # N parts: each gradient is then as large as the mean one, which matters where it
    # has 16 bits.
    return Measure(tuple(map(denominator, terms)), split.total_microbatches)


def unit_of(loss: Any, split: Split) -> float:
    """What the sums of a loss of one term are measured in.

    The rows of a micro-batch; of a `Mean` a power of two, which every dtype says
    exactly, near the number of its entries, masked ones among them.
    """
    if isinstance(loss, Mean):
        return 2.0 ** round(math.log2(max(1, loss.size.size or split.microbatch_size)))
    return 1 if isinstance(loss, Term) else split.microbatch_size


def share_of_call(
    loss: Any, denominators: tuple[jax.Array, ...], split: Split
) -> jax.Array:
    """About the share that a micro-batch has in known denominators, 1 at most.

    Gradients are divided by it, so that they are as large as the mean one, which
    matters where they have 16 bits; and their sum is multiplied.
    """
    units = [unit_of(term, split) for term in terms_of(loss)]
    shares = [
        ratio(jnp.full_like(d, unit), d)
        for d, unit in zip(denominators, units, strict=True)
    ]
    # Of a term that counts nowhere, the share is 0.
    known = [jnp.where(share == 0, jnp.ones_like(share), share) for share in shares]
    return functools.reduce(jnp.minimum, known, jnp.ones_like(known[0]))


def objective(loss: Any, measure: Measure, rows: int) -> jax.Array:
    r""":math:`\sum_j f_j t_{ij}`, which a micro-batch differentiates.

    Args:
      loss: what the function returned for it.
      measure: :math:`f_j`.
      rows: how many it has.
    """
    if _is_narrow(loss):
        return loss  # its gradient is scaled, by `weigh_gradients`

    def total(term):
        if isinstance(term, Mean):
            return term.widened().total
        return term.value if isinstance(term, Sum) else term

    def factor(term, once, for_rows):
        return once if isinstance(term, Term) else for_rows

    terms = terms_of(loss)
    totals = list(map(total, terms))
    factors = map(factor, terms, measure.factors(1), measure.factors(rows))
    dtype = weight_dtype(totals)
    products = [scale(t, f, dtype) for t, f in zip(totals, factors, strict=True)]
    return functools.reduce(jnp.add, products)


def widened(loss: Any) -> Any:
    """`loss` in a dtype that says its weight: a scalar of 16 bits does not."""
    return loss if isinstance(loss, Term) else widen(loss)


def weigh_gradients(grads: Any, loss: Any, measure: Measure, rows: int) -> Any:
    """The gradient of `objective`, with the weight that is not in there."""
    if isinstance(loss, Term):
        return select_gradients(grads, loss)
    (factor,) = measure.factors(rows) if _is_narrow(loss) else (1,)

    def scaled(grad):
        return scale(grad, factor, sum_dtype(jnp.result_type(grad)))

    return jax.tree.map(scaled, grads)


def divide_gradients(sums: Any, loss: Any, whole: Any, split: Split) -> Any:
    """The gradient of the loss of all micro-batches, of the sum of those of each.

    Args:
      sums: pytree of sums.
      loss: what the function returns, or the types of that.
      whole: the loss as a marker of all micro-batches together.
      split: how the rows were split.
    """
    if isinstance(loss, Mean):
        check_varies_alike(sums, whole.weight)
        weight = jnp.where(whole.weight == 0, jnp.ones_like(whole.weight), whole.weight)
        divisor = divide(weight, unit_of(loss, split))
    elif isinstance(loss, Term):
        divisor = 1 if isinstance(loss, Sum) else split.total_microbatches
    else:
        divisor = split.shares
    return jax.tree.map(lambda total: divide(total, divisor), sums)


def select_gradients(grads: Any, loss: Any) -> Any:
    """The gradients, or zeros where nothing in `loss` counts.

    Selected, not multiplied: of rows that are all padding, gradients may be NaN.
    """
    counts = anything_counts(loss)
    if counts is True:
        return grads

    def select(grad):
        # A gradient that JAX has summed over devices is none of this device alone.
        if varying_axes(counts) - varying_axes(grad):
            return grad
        return jnp.where(counts, grad, jnp.zeros_like(grad))

    return jax.tree.map(select, grads)


def weight_of(loss: Any, whole: Any, rows: int) -> ArrayLike:
    """What all micro-batches weigh in a mean with others.

    Its total weight, for a `Mean`; rows, for a plain scalar; 1 otherwise, if anything
    in it counted.
    """
    if isinstance(loss, Mean):
        return whole.widened().weight
    if not isinstance(loss, Term):
        return rows
    counts = anything_counts(whole)
    return 1 if isinstance(counts, bool) else jnp.asarray(counts, jnp.float32)


def anything_counts(loss: Any) -> bool | jax.Array:
    """Whether anything in a loss counts. A bool where it is known while tracing."""
    terms = terms_of(loss)
    if not all(isinstance(term, Mean) for term in terms):
        return True
    counts = [term.widened().weight != 0 for term in terms]
    return functools.reduce(jnp.logical_or, counts)


def check_varies_alike(sums: Any, weight: jax.Array) -> None:
    """Inside a ``shard_map``, a sum over devices is divided by a weight of all of them.

    JAX sums the gradient with respect to what is the same on all devices.
    """
    for total in jax.tree.leaves(sums):
        axes = varying_axes(weight) - varying_axes(total)
        if axes:
            raise ValueError(
                "a loss inside `shard_map` must have a weight of all devices where its "
                f"gradient is summed over them, got one that varies over {sorted(axes)}"
                f"; say `reduce_axes={tuple(sorted(axes))}`, or give parameters that "
                "vary, `jax.lax.pcast(params, axes, to='varying')`."
            )


def _is_narrow(loss: Any) -> bool:
    """A plain scalar of 16 bits, in which a weight cannot be said exactly."""
    return not isinstance(loss, Term) and sum_dtype(loss.dtype) != loss.dtype


def _quotient(numerator: int, divisor: ArrayLike) -> Any:
    """Known while tracing where both are; else an array, and 0 where `divisor` is."""
    if isinstance(divisor, int | float):
        return numerator / divisor
    return ratio(jnp.full_like(divisor, numerator), divisor)
