"""What every door shares: the dtype of a sum, the types of a state, a norm."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

_NUMBERS = (bool, int, float, complex)


def is_none(leaf: Any) -> bool:
    return leaf is None


def is_array(leaf: Any) -> bool:
    """True for arrays (keys and tracers among them) and for Python numbers."""
    if isinstance(leaf, _NUMBERS):
        return True
    # NumPy holds strings, objects and dates too, which are no arrays to JAX.
    is_foreign = getattr(getattr(leaf, "dtype", None), "kind", "") in tuple("OSUMm")
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_foreign


def is_numeric(leaf: Any) -> bool:
    """True for what can be summed: an array that holds numbers, not keys."""
    return is_array(leaf) and not jnp.issubdtype(
        jnp.result_type(leaf), jax.dtypes.extended
    )


def is_inexact(leaf: Any) -> bool:
    """True for what has a gradient: a floating or complex array or number."""
    return is_numeric(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def is_real(leaf: Any) -> bool:
    """True for what can be compared: numbers that are not complex."""
    return is_numeric(leaf) and not jnp.issubdtype(
        jnp.result_type(leaf), jnp.complexfloating
    )


def varying_axes(x: Any) -> frozenset[str]:
    """The axes of a ``shard_map`` over which `x`, or what has such a type, varies."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    if kind is not None:
        return kind.varying
    return getattr(aval, "vma", None) or frozenset()  # its name until JAX 0.10


def filled_like(x: Any, fill: ArrayLike) -> jax.Array:
    """An array of one number in the place of `x`, or of what will have that type.

    It has its shape, its dtype, its sharding on Explicit axes, and the axes of a
    ``shard_map`` over which it varies.
    """
    if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is not None:
        return jnp.full_like(x, fill)
    # JAX fails where such a type varies, and other axes are the compiler's.
    full, axes = jnp.full(x.shape, fill, x.dtype), tuple(varying_axes(x))
    return jax.lax.pcast(full, axes, to="varying") if axes else full


def kind_of(leaf: Any) -> str:
    """A leaf as an error shall call it: ``float32[3,4]``, or the name of its type."""
    if not is_array(leaf):
        return "None" if leaf is None else type(leaf).__name__
    return f"{jnp.result_type(leaf).name}{list(jnp.shape(leaf))}".replace(" ", "")


def find_difference(tree: Any, expected: Any, name: str = "") -> str | None:
    """What `tree` has where it differs in structure, shape or dtype; None if nowhere.

    Compared leaf by leaf and not by ``==``, which containers may define as they like.

    Args:
      tree: what there is.
      expected: what there should be.
      name: what the answer shall call it.
    """
    kinds, expected_kinds = _kinds(tree), _kinds(expected)
    for path in expected_kinds | kinds:
        if kinds.get(path) != expected_kinds.get(path):
            got, wanted = (
                kinds.get(path, "nothing"),
                expected_kinds.get(path, "nothing"),
            )
            place = f"{name}{path}" or "the top"
            return f"{got} at {place}, where {wanted} is expected"
    structure, wanted = jax.tree.structure(tree), jax.tree.structure(expected)
    return None if structure == wanted else f"{structure}, where {wanted} is expected"


def _kinds(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): kind_of(leaf) for path, leaf in leaves}


def sum_dtype(dtype: DTypeLike, requested: DTypeLike | None = None) -> jnp.dtype:
    """The dtype in which values of `dtype` are summed.

    By kind and size, not by ``promote_types``, which refuses float8. A requested
    dtype counts for real leaves; a complex one keeps its own, or its imaginary
    part would be lost.
    """
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    if requested is not None:
        return jnp.dtype(requested)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4:
        return dtype
    return jnp.dtype(jnp.float32)


def weight_dtype(tree: Any, requested: DTypeLike | None = None) -> jnp.dtype:
    """The dtype of weights and values: float64 where any sum of `tree` is."""
    sums = [
        sum_dtype(jnp.result_type(leaf), requested)
        for leaf in jax.tree.leaves(tree)
        if is_numeric(leaf)
    ]
    double = any(jnp.finfo(dtype).bits == 64 for dtype in sums)
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def widen(tree: Any, requested: DTypeLike | None = None) -> Any:
    """`tree` in the dtypes of its sums."""

    def wide(leaf):
        return jnp.asarray(leaf, sum_dtype(jnp.result_type(leaf), requested))

    return jax.tree.map(wide, tree)


def add(total: jax.Array, term: ArrayLike) -> jax.Array:
    return total + jnp.asarray(term).astype(total.dtype)


def scale(x: ArrayLike, factor: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """``x * factor`` in at least float32, stored as `dtype`."""
    if _is_one(factor):
        return jnp.asarray(x).astype(dtype)
    # NumPy's rule, which is the same for these, also where JAX promotes nothing.
    wide = np.promote_types(sum_dtype(jnp.result_type(x)), sum_dtype(dtype))
    return (jnp.asarray(x, wide) * jnp.asarray(factor, wide)).astype(dtype)


def divide(total: ArrayLike, divisor: ArrayLike) -> Any:
    """``total / divisor`` in at least float32, stored in the dtype of `total`.

    A division, not a product with the reciprocal: three ones have the mean one.
    """
    if _is_one(divisor):
        return total
    total = jnp.asarray(total)
    wide = sum_dtype(total.dtype)
    return (total.astype(wide) / jnp.asarray(divisor, wide)).astype(total.dtype)


def ratio(total: ArrayLike, weight: ArrayLike) -> jax.Array:
    """``total / weight``, and 0 where the weight is 0, whatever the total."""
    total, weight = jnp.asarray(total), jnp.asarray(weight)
    weighs = weight != 0
    quotient = divide(total, jnp.where(weighs, weight, jnp.ones_like(weight)))
    return jnp.where(weighs, quotient, jnp.zeros_like(quotient))


def _is_one(factor: ArrayLike) -> bool:
    """Known while tracing to be 1, so that nothing need be computed."""
    return isinstance(factor, (int, float)) and factor == 1


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm over all numeric leaves, squared and summed in `sum_dtype`."""
    dtype = weight_dtype(tree)
    numbers = [leaf for leaf in jax.tree.leaves(tree) if is_numeric(leaf)]
    squares = [jnp.sum(jnp.square(jnp.abs(leaf))) for leaf in widen(numbers)]
    return jnp.sqrt(sum((s.astype(dtype) for s in squares), jnp.zeros((), dtype)))


def settle(tree: Any) -> Any:
    """`tree` with every number a JAX array of a definite dtype.

    A weakly typed leaf changes its type at the first update, which costs a second
    compilation and is no ``lax.scan`` carry.
    """

    def settled(leaf):
        if not is_numeric(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        dtype = jnp.result_type(leaf)
        # Of a NumPy array, asarray may be a view: its owner could write into it.
        is_foreign = isinstance(leaf, np.ndarray)
        return jnp.array(leaf, dtype) if is_foreign else jnp.asarray(leaf, dtype)

    return jax.tree.map(settled, tree)


def cast_as(tree: Any, like: Any) -> Any:
    """`tree` with the dtypes of `like`, leaf by leaf; None stays."""

    def cast(leaf, like_leaf):
        return None if leaf is None else jnp.asarray(leaf, jnp.result_type(like_leaf))

    return jax.tree.map(cast, tree, like, is_leaf=is_none)


def keep_types(new: Any, old: Any) -> Any:
    """A state `new` with the structure and the dtypes of the `old` one.

    Optimizers leave None where they were given a None gradient, and moments in the
    gradient's dtype where it is wider than the parameter's; a state that changes so
    from call to call is neither a ``lax.scan`` carry nor a branch of ``lax.cond``.

    Raises:
      TypeError: a leaf came where there was None, or no longer fits its kind of number.
    """

    def keep(path, new_leaf, old_leaf):
        if new_leaf is None or (old_leaf is not None and not is_array(old_leaf)):
            return old_leaf
        if old_leaf is None or _rank(new_leaf) > _rank(old_leaf):
            raise TypeError(
                "an optimizer must keep the types of its state from `init` on, got "
                f"{kind_of(new_leaf)} at {jax.tree_util.keystr(path)}, where "
                f"{kind_of(old_leaf)} was; give that leaf its final dtype in `init`."
            )
        if not is_numeric(old_leaf):
            return new_leaf
        return jnp.asarray(new_leaf, jnp.result_type(old_leaf))

    return jax.tree_util.tree_map_with_path(keep, new, old, is_leaf=is_none)


def _rank(leaf: Any) -> int:
    """Bool, integer, real, complex, key: a number fits its own kind and later ones."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    dtype = jnp.result_type(leaf)
    fits = [jnp.issubdtype(dtype, kind) for kind in kinds]
    return fits.index(True) if True in fits else len(kinds)
