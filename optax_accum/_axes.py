"""Mesh axes over which devices share the rows, seen from inside a ``shard_map``."""

from typing import Any

import jax
from jax.typing import ArrayLike

from optax_accum._numerics import varying_axes


def check_axes(argument: str, axes: Any) -> tuple[str, ...]:
    """`axes` as a tuple of names, each once."""
    names = (axes,) if isinstance(axes, str) else axes
    is_names = isinstance(names, tuple | list) and all(
        isinstance(name, str) for name in names
    )
    if not is_names:
        raise TypeError(
            f"`{argument}` must be the name of a mesh axis or a tuple of such names, "
            f"got {axes!r}."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"`{argument}` must name each mesh axis once, got {axes!r}.")
    return tuple(names)


def manual_axes() -> frozenset[str]:
    """The axes of the ``shard_map`` around this, if there is one."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def count_devices(axes: tuple[str, ...]) -> int:
    """On how many devices this runs, along these axes."""
    return jax.lax.axis_size(axes)


def number_of_device(axes: tuple[str, ...]) -> ArrayLike:
    """Which of them this is: shape ``()``, int32."""
    return jax.lax.axis_index(axes)


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """`tree` as values of each device alone, where JAX knows them to be alike on all.

    Otherwise JAX sums the gradient over devices wherever it is taken. Without types of
    what varies (``check_vma=False``) it does not, and nothing is cast.
    """
    axes = tuple(axis for axis in axes if _has_types(axis))

    def cast(leaf):
        alike = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return jax.lax.pcast(leaf, alike, to="varying") if alike else leaf

    return jax.tree.map(cast, tree)


def varies(x: Any, axis: str) -> bool:
    """Whether devices may differ in `x` along `axis`.

    In a ``shard_map`` without types of that they always may.
    """
    return not _has_types(axis) or axis in varying_axes(x)


def _has_types(axis: str) -> bool:
    """Whether the ``shard_map`` around this has types of what varies."""
    return bool(varying_axes(jax.lax.axis_index(axis)))
