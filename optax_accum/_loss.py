r"""What of a loss each micro-batch differentiates, and by what the sum is divided.

With totals :math:`t_{ij}` of micro-batch :math:`i` and term :math:`j`, and denominators
:math:`D_j = \sum_i w_{ij}`, the loss of all micro-batches is
:math:`\sum_j \sum_i t_{ij} / D_j`. Each micro-batch differentiates
:math:`\sum_j f_j t_{ij}`; after the loop the sum of gradients is divided by one number.
Of a loss of one term, :math:`f` is a constant, and :math:`D` need not be known before
the end. Of several, :math:`f_j = N / D_j`: the denominators are counted first.
"""

import functools
import math
from typing import Any

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
)
from optax_accum._split import Split
from optax_accum._terms import Mean, Sum, Term, terms_of


def must_count(loss: Any) -> bool:
    """Whether denominators must be known before anything is differentiated."""
    terms = terms_of(loss)
    return len(terms) > 1 and any(isinstance(term, Mean) for term in terms)


def weights_of(loss: Any) -> tuple[Sum, ...]:
    """What a micro-batch adds to the denominators: the weight of every `Mean`."""
    means = (term for term in terms_of(loss) if isinstance(term, Mean))
    return tuple(Sum(term.widened().weight) for term in means)


def factors_of(loss: Any, denominators: tuple[jax.Array, ...], split: Split) -> tuple:
    """:math:`f_j` for each term.

    Args:
      loss: what the function returns, or the types of that.
      denominators: of every `Mean`, where they must be counted.
      split: how the rows are split.
    """
    terms = terms_of(loss)
    if len(terms) == 1:
        return (1 / _unit(loss, split),)
    # N times the share in the whole: each gradient is then as large as the mean one,
    # which matters where it has 16 bits.
    n, counted = split.num_microbatches, iter(denominators)

    def factor(term):
        if isinstance(term, Mean):
            denominator = next(counted)
            return ratio(jnp.full_like(denominator, n), denominator)
        return n if isinstance(term, Sum) else n / split.shares

    return tuple(map(factor, terms))


def objective(loss: Any, factors: tuple, share: float) -> jax.Array:
    r""":math:`\sum_j f_j t_{ij}`, which a micro-batch differentiates.

    Args:
      loss: what the function returned for it.
      factors: :math:`f_j`.
      share: its rows, as a share of those in a micro-batch of the common size.
    """
    if not isinstance(loss, Term):
        return loss  # its gradient is scaled, by `weigh_gradients`

    def total(term):
        if isinstance(term, Mean):
            return term.widened().total
        if isinstance(term, Sum):
            return term.value
        return scale(term, share, sum_dtype(jnp.result_type(term)))

    totals = [total(term) for term in terms_of(loss)]
    dtype = weight_dtype(totals)
    products = [scale(t, f, dtype) for t, f in zip(totals, factors, strict=True)]
    return functools.reduce(jnp.add, products)


def weigh_gradients(grads: Any, loss: Any, share: float) -> Any:
    """The gradient of `objective`, with the weight that is not in there.

    A plain scalar may have 16 bits, in which a share cannot be said exactly; so the
    gradient is scaled, in the dtype of its sum.
    """

    def scaled(grad):
        return scale(grad, share, sum_dtype(jnp.result_type(grad)))

    if isinstance(loss, Term):
        return select_gradients(grads, loss)
    return grads if share == 1 else jax.tree.map(scaled, grads)


def divide_gradients(sums: Any, loss: Any, whole: Any, split: Split) -> Any:
    """The gradient of the loss of all micro-batches, of the sum of those of each.

    Args:
      sums: pytree of sums.
      loss: what the function returns, or the types of that.
      whole: the loss as a marker of all micro-batches together.
      split: how the rows were split.
    """
    if isinstance(loss, Mean):
        _check_varies_alike(sums, whole.weight)
        weight = jnp.where(whole.weight == 0, jnp.ones_like(whole.weight), whole.weight)
        divisor = divide(weight, _unit(loss, split))
    elif isinstance(loss, Term):
        divisor = 1 if isinstance(loss, Sum) else split.num_microbatches
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
    return 1 if counts is True else counts


def anything_counts(loss: Any) -> bool | jax.Array:
    """Whether anything in a loss counts. A bool where it is known while tracing."""
    terms = terms_of(loss)
    if not all(isinstance(term, Mean) for term in terms):
        return True
    counts = [term.widened().weight != 0 for term in terms]
    return functools.reduce(jnp.logical_or, counts)


def _check_varies_alike(sums: Any, weight: jax.Array) -> None:
    """Inside a ``shard_map``, a sum over devices is divided by a weight of all of them.

    JAX sums the gradient with respect to what is the same on all devices.
    """
    for total in jax.tree.leaves(sums):
        axes = varying_axes(weight) - varying_axes(total)
        if axes:
            raise ValueError(
                "a loss inside `shard_map` must have a weight of all devices where its "
                f"gradient is summed over them, got one that varies over {sorted(axes)}"
                "; sum total and weight in the loss, `jax.lax.psum`, or give "
                "parameters that vary, `jax.lax.pcast(params, axes, to='varying')`."
            )


def _unit(loss: Any, split: Split) -> float:
    """A power of two near the entries of a micro-batch: exact in every dtype."""
    if not isinstance(loss, Mean):
        return 1
    return 2.0 ** round(math.log2(max(1, loss.size.size or split.microbatch_size)))
