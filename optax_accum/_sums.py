"""Sums of gradients: the dtype they are in, and what rounding leaves beside them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum._numerics import is_numeric, sum_dtype


class Accumulator(NamedTuple):
    """How gradients are added up."""

    dtype: DTypeLike | None = None  # of the sums of real leaves; None: see `sum_dtype`
    compensated: bool = False
    in_place: bool = False  # in the backward pass itself


def check_accumulator(
    caller: str,
    dtype: DTypeLike | None,
    compensated: bool = False,
    in_place: bool = False,
) -> Accumulator:
    """These options together."""
    if dtype is not None:
        _check_sum_dtype(f"{caller}(accumulator_dtype=...)", dtype)
    if compensated and (dtype is None or jnp.dtype(dtype).itemsize >= 4):
        got = "None" if dtype is None else jnp.dtype(dtype).name
        raise ValueError(
            f"`{caller}(compensated=True)` must come with an `accumulator_dtype` of 16 "
            f"bits, got {got}; sums in float32, the default, are as large as a "
            "compensated one of 16 bits and more exact."
        )
    if compensated and in_place:
        raise ValueError(
            f"`{caller}(in_place=True)` must come without `compensated`, got both; a "
            "backward pass adds, and keeps nothing of what rounding takes."
        )
    return Accumulator(dtype, compensated, in_place)


class Compensated(NamedTuple):
    """A sum in a narrow dtype, and what rounding took from it.

    Twice as many bits: the sum of both is what was added up. Kahan, `Further remarks on
    reducing truncation errors <https://doi.org/10.1145/363707.363723>`_, 1965, with
    each addition in float32.
    """

    total: jax.Array
    error: jax.Array  # of the same shape and dtype


def zero_sums(tree: Any, accumulator: Accumulator) -> Any:
    """Zeros in the dtype of the sum for each numeric leaf, None for any other.

    ``zeros_like`` rather than ``zeros``: it keeps a leaf's sharding, and inside
    ``shard_map`` the axes over which the leaf varies.
    """

    def zero(leaf):
        if not is_numeric(leaf):
            return None
        dtype = sum_dtype(jnp.result_type(leaf), accumulator.dtype)
        zeros = jnp.zeros_like(leaf, dtype)
        is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
        if accumulator.compensated and is_real:
            return Compensated(zeros, jnp.zeros_like(zeros))
        return zeros

    return jax.tree.map(zero, tree)


def first_sums(grads: Any, accumulator: Accumulator) -> Any:
    """Sums of one gradient, of the types that `zero_sums` has."""

    def first(grad, zero):
        if isinstance(zero, Compensated):
            return add_to_sum(zero, grad)
        return jnp.asarray(grad, zero.dtype)

    return jax.tree.map(first, grads, zero_sums(grads, accumulator))


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


def _check_sum_dtype(argument: str, dtype: DTypeLike) -> None:
    try:
        name, is_floating = jnp.dtype(dtype).name, jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # what is no dtype at all
        name, is_floating = repr(dtype), False
    if not is_floating:
        raise TypeError(
            f"`{argument}` must be a floating dtype or None, got {name}; complex "
            "leaves are summed in their own dtype."
        )
    if jnp.dtype(dtype).itemsize < 2:
        raise ValueError(
            f"`{argument}` must have at least 16 bits, got {name}; a sum in fewer soon "
            "ceases to grow."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(
            f"`{argument}` must be a dtype that JAX has at present, got {name}; enable "
            "it by `jax_enable_x64`."
        )
