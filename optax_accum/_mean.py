"""The mean of many entries, some of which may not count."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum._numerics import (
    is_numeric,
    is_real,
    kind_of,
    scale,
    weight_dtype,
    widen,
)
from optax_accum._terms import Mean, SizeHint


def mean(
    x: ArrayLike, where: ArrayLike | None = None, weights: ArrayLike | None = None
) -> Mean:
    r"""The mean over all entries of `x` in all micro-batches together.

    Write it where ``jnp.mean(x, where=mask)`` stood. That is a mean over the entries of
    one micro-batch, and the mean of such means differs from the mean over all entries,
    unless every micro-batch has equally many. This is :math:`\sum w x / \sum w` over
    all of them.

    Args:
      x: numbers of any shape; integers and booleans count as floats.
      where: which entries count. Booleans, broadcast to the shape of `x`.
      weights: what each entry counts for, real numbers >= 0 (a negative one is not
        refused: under ``jit`` it cannot be seen). A scalar, or an array with as many
        axes as `x`, each of the same size or of size 1. They are data: not
        differentiated. With float16 parameters, scale the weights to about 1, or
        gradients may overflow.

    Returns:
      A `Mean` of scalars, in float32, or float64 or complex where `x` is. Entries that
      do not count add exactly nothing to it, even where they are NaN. (Their gradient
      is 0 times that of what they were computed from, as in ``jnp.mean``: NaN if that
      is infinite.) If none counts, its value is 0.

    Raises:
      TypeError: `x` or `weights` are no numbers, or `where` no booleans.
      ValueError: `where` or `weights` do not fit the shape of `x`.

    Examples:
      >>> losses = jnp.array([[3.0, 7.0], [1.0, 1.0]])
      >>> loss = optax_accum.mean(losses, where=losses < 5)
      >>> print(loss.total, loss.weight, loss.value)
      5.0 3.0 1.6666666

    References:
      Hugging Face, `Fixing Gradient Accumulation
      <https://huggingface.co/blog/gradient_accumulation>`_, 2024.
    """
    if not is_numeric(x):
        raise TypeError(f"`mean(x)` must be given numbers, got {kind_of(x)}.")
    wide = jnp.asarray(widen(x))
    size, dtype = SizeHint(wide.size), weight_dtype(wide)
    if where is None and weights is None:
        return Mean(jnp.sum(wide), jnp.full((), wide.size, dtype), size=size)
    counts = jax.lax.stop_gradient(_entry_weights(wide, where, weights))
    # Left out, not multiplied alone: zero times NaN would be NaN.
    total = jnp.sum(wide * counts.astype(wide.dtype), where=counts != 0)
    repeats = wide.size // max(1, counts.size)
    return Mean(total, scale(jnp.sum(counts), repeats, dtype), size=size)


def _entry_weights(x: jax.Array, where: Any, weights: Any) -> jax.Array:
    """What each entry of `x` counts for, in a shape that broadcasts to that of `x`.

    Not broadcast to it: on an Explicit mesh a mask that is replicated may meet rows
    that are sharded, which ``sum(where=)`` allows.
    """
    counts = _with_axes_of(x, _check_weights(x, weights)).astype(weight_dtype(x))
    valid = _with_axes_of(x, _check_where(x, where))
    return jnp.where(valid, counts, jnp.zeros_like(counts))


def _with_axes_of(x: jax.Array, entries: Any) -> jax.Array:
    """`entries` with as many axes as `x`; the first ones are of size 1, if added."""
    added = (1,) * (x.ndim - jnp.ndim(entries))
    return jnp.reshape(jnp.asarray(entries), added + jnp.shape(entries))


# -- What it must be given


def _check_where(x: jax.Array, where: Any) -> Any:
    """Which entries count; all by default."""
    if where is None:
        return True
    if not is_numeric(where) or jnp.result_type(where) != jnp.bool_:
        raise TypeError(
            f"`mean(where=...)` must be booleans, got {kind_of(where)}; write "
            "`mask != 0`, or say `weights=`."
        )
    try:
        fits = jnp.broadcast_shapes(jnp.shape(where), x.shape) == x.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`mean(where=...)` must broadcast to the shape of `x`, {x.shape}, got "
            f"{jnp.shape(where)}; give the mask an axis, as in `mask[:, None]`."
        )
    return where


def _check_weights(x: jax.Array, weights: Any) -> Any:
    """What entries count for; 1 by default."""
    if weights is None:
        return 1
    if not is_real(weights):
        raise TypeError(
            f"`mean(weights=...)` must be real numbers, got {kind_of(weights)}."
        )
    shape = jnp.shape(weights)
    sizes = zip(shape, x.shape, strict=False)
    if shape and (len(shape) != x.ndim or any(n not in (1, m) for n, m in sizes)):
        raise ValueError(
            f"`mean(weights=...)` must have the axes of `x`, {x.shape}, each of the "
            f"same size or of size 1, got {shape}; write `weights[:, None]` for a "
            "weight of each row."
        )
    return weights
