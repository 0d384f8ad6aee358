"""Sums of gradients: the dtype they are in, and what rounding leaves beside them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum._numerics import is_numeric, sum_dtype


class Compensated(NamedTuple):
    """A sum in a narrow dtype, and what rounding took from it.

    Twice as many bits: the sum of both is what was added up. Kahan, `Further remarks on
    reducing truncation errors <https://doi.org/10.1145/363707.363723>`_, 1965, with
    each addition in float32.
    """

    total: jax.Array
    error: jax.Array  # of the same shape and dtype


def zero_sums(
    tree: Any, requested: DTypeLike | None = None, compensated: bool = False
) -> Any:
    """Zeros in the dtype of the sum for each numeric leaf, None for any other.

    ``zeros_like`` rather than ``zeros``: it keeps a leaf's sharding, and inside
    ``shard_map`` the axes over which the leaf varies.
    """

    def zero(leaf):
        if not is_numeric(leaf):
            return None
        dtype = sum_dtype(jnp.result_type(leaf), requested)
        zeros = jnp.zeros_like(leaf, dtype)
        if compensated and not jnp.issubdtype(dtype, jnp.complexfloating):
            return Compensated(zeros, jnp.zeros_like(zeros))
        return zeros

    return jax.tree.map(zero, tree)


def add_to_sum(total: Any, term: ArrayLike) -> Any:
    """`total` with `term` added, of whichever kind the sum is."""
    term = jnp.asarray(term)
    if not isinstance(total, Compensated):
        return total + term.astype(total.dtype)
    dtype = total.total.dtype
    wide = sum_dtype(dtype)
    exact = total.total.astype(wide) + (total.error.astype(wide) + term.astype(wide))
    # Not a cast there and back, which a compiler may leave out: excess precision.
    bits = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(exact, bits.nexp, bits.nmant)
    error = jnp.where(jnp.isfinite(rounded), exact - rounded, jnp.zeros_like(exact))
    return Compensated(rounded.astype(dtype), error.astype(dtype))


def term_dtype(total: Any) -> jnp.dtype:
    """The dtype in which a term shall be added: what was rounded cannot be made up."""
    if isinstance(total, Compensated):
        return sum_dtype(total.total.dtype)
    return total.dtype


def read_sum(total: Any) -> jax.Array:
    """A sum as an array: what is compensated in at least float32."""
    if not isinstance(total, Compensated):
        return total
    wide = sum_dtype(total.total.dtype)
    return total.total.astype(wide) + total.error.astype(wide)


def read_sums(sums: Any) -> Any:
    """Every sum in a tree as an array."""
    return jax.tree.map(read_sum, sums, is_leaf=lambda x: isinstance(x, Compensated))
