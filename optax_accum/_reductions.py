"""How outputs of micro-batches are put together: markers around arrays.

A marker is a pytree, so that it passes through every transformation of JAX. It holds
one array or a whole pytree of them.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_accum._numerics import (
    filled_like,
    is_array,
    is_inexact,
    is_numeric,
    is_real,
    kind_of,
    widen,
)

_Class = TypeVar("_Class")

_ACCEPTED: dict[str, Callable[[Any], bool]] = {
    "arrays": is_array,
    "numbers": is_numeric,
    "real numbers": is_real,
}


@dataclass_transform(frozen_default=True, eq_default=False)
def register(cls: type[_Class]) -> type[_Class]:
    """A frozen dataclass that is a pytree; fields marked static are no leaves."""
    dataclasses.dataclass(frozen=True, eq=False)(cls)
    return jax.tree_util.register_dataclass(cls)


class Marker(abc.ABC):
    """What all of them are."""

    @abc.abstractmethod
    def widened(self) -> Self:
        """The same in the dtypes in which many of them are put together."""

    @property
    @abc.abstractmethod
    def value(self) -> Any:
        """What is reported of it, without the marker."""

    @abc.abstractmethod
    def check(self, label: str) -> None:
        """Raises a TypeError that names `label` if it holds what it cannot."""


class Mergeable(Marker):
    """A marker that needs no more room for many micro-batches than for one."""

    def neutral(self) -> Self:
        """What changes nothing when it is merged with others, of these widened types.

        See `filled_like`.
        """
        return jax.tree.map(lambda x: filled_like(x, 0), self)

    def merge(self, later: Self) -> Self:
        """This and the `later` one, put together.

        Raises:
          TypeError: they are of different kinds.
        """
        if type(self) is not type(later):
            raise TypeError(
                f"a `{type(self).__name__}` must be merged with one of its kind, got "
                f"`{type(later).__name__}`; merge what has the same meaning."
            )
        return self.merged(later)

    @abc.abstractmethod
    def merged(self, later: Self) -> Self:
        """`merge`, of the same kind."""

    @abc.abstractmethod
    def over_devices(self, axes: tuple[str, ...]) -> Self:
        """Those of all devices along these axes of a ``shard_map``, put together."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Leafwise(Marker):
    """One rule for every array in it."""

    x: Any

    accepts: ClassVar[str] = "arrays"

    def widened(self) -> Self:
        return self

    @property
    def value(self) -> Any:
        return self.widened().x

    def check(self, label: str) -> None:
        check_leaves(label, self, self.x, self.accepts)


class _Extreme(_Leafwise, Mergeable):
    """The largest or the smallest, entry by entry."""

    accepts = "real numbers"
    start: ClassVar[str]

    @abc.abstractmethod
    def choose(self, x: ArrayLike, y: ArrayLike) -> jax.Array:
        """One of two, entry by entry."""

    @abc.abstractmethod
    def choose_device(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """One of those that devices have, entry by entry."""

    def widened(self) -> Self:
        return type(self)(jax.tree.map(_comparable, self.x))

    def neutral(self) -> Self:
        return type(self)(jax.tree.map(lambda x: _extreme(x, self.start), self.x))

    def merged(self, later: Self) -> Self:
        return type(self)(jax.tree.map(self.choose, self.value, later.value))

    def over_devices(self, axes: tuple[str, ...]) -> Self:
        def over(x):
            chosen = self.choose_device(x, axes)
            if not is_inexact(x):
                return chosen
            # XLA's collectives of a CPU take a number rather than a NaN.
            nans = jax.lax.psum(jnp.isnan(x).astype(jnp.int32), axes)
            return jnp.where(nans == 0, chosen, jnp.full_like(chosen, jnp.nan))

        return type(self)(jax.tree.map(over, self.value))


@register
class Max(_Extreme):
    """The largest over all micro-batches, entry by entry; NaN where one is.

    To find the largest of all rows, reduce them first: ``Max(jnp.max(losses))``.

    Attributes:
      x: real numbers of any shape, or a pytree of them.

    Examples:
      >>> print(optax_accum.Max(3.0).merge(optax_accum.Max(4.0)).value)
      4.0
    """

    start = "min"

    def choose(self, x: ArrayLike, y: ArrayLike) -> jax.Array:
        return jnp.maximum(x, y)

    def choose_device(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jax.lax.pmax(x, axes)


@register
class Min(_Extreme):
    """The smallest over all micro-batches, entry by entry; NaN where one is.

    To find the smallest of all rows, reduce them first: ``Min(jnp.min(losses))``.

    Attributes:
      x: real numbers of any shape, or a pytree of them.

    Examples:
      >>> print(optax_accum.Min(3.0).merge(optax_accum.Min(4.0)).value)
      3.0
    """

    start = "max"

    def choose(self, x: ArrayLike, y: ArrayLike) -> jax.Array:
        return jnp.minimum(x, y)

    def choose_device(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jax.lax.pmin(x, axes)


@register
class Last(_Leafwise, Mergeable):
    """What the last micro-batch has. Under ``reduce_axes`` equal on all devices.

    Attributes:
      x: any arrays, or a pytree of them.

    Examples:
      >>> print(optax_accum.Last(3.0).merge(optax_accum.Last(4.0)).value)
      4.0
    """

    def merged(self, later: Self) -> Self:
        return later

    def over_devices(self, axes: tuple[str, ...]) -> Self:
        return self


@register
class Stack(_Leafwise):
    """All micro-batches' arrays along a new leading axis, in the order of their run.

    Memory grows with the number of micro-batches. A last, smaller micro-batch is one
    more entry. Under ``reduce_axes`` there are those of one device after those of
    another.

    Attributes:
      x: any arrays, or a pytree of them.

    Examples:
      >>> def loss_fn(w, x):
      ...     return jnp.mean(w * x), optax_accum.Stack(jnp.max(x))
      >>> value_fn = optax_accum.value(loss_fn, num_microbatches=2, has_aux=True)
      >>> print(value_fn(1.0, jnp.arange(4.0))[1])  # of rows 0 and 2, of rows 1 and 3
      [2. 3.]
    """


@register
class Concat(_Leafwise):
    """An entry for each row of the batch, in their original order under every split.

    Memory grows with the number of rows.

    Attributes:
      x: arrays whose first axis are the rows of the micro-batch, or a pytree of them.

    Examples:
      >>> def loss_fn(w, x):
      ...     return jnp.mean(w * x), optax_accum.Concat(w * x)
      >>> value_fn = optax_accum.value(loss_fn, num_microbatches=2, has_aux=True)
      >>> print(value_fn(1.0, jnp.arange(4.0))[1])
      [0. 1. 2. 3.]
    """


def is_marker(x: Any) -> bool:
    return isinstance(x, Marker)


def map_markers(fun: Callable, tree: Any, *rest: Any) -> Any:
    """``jax.tree.map`` over the markers of a tree and its leaves that have none."""
    return jax.tree.map(fun, tree, *rest, is_leaf=is_marker)


def check_leaves(label: str, marker: Marker, tree: Any, accepted: str) -> None:
    """Every leaf must be one of what is `accepted`; that which is none is named."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_marker)
    wrong = [
        f"{kind_of(leaf)} at {jax.tree_util.keystr(path) or 'the top'}"
        for path, leaf in leaves
        if is_marker(leaf) or not _ACCEPTED[accepted](leaf)
    ]
    if wrong:
        raise TypeError(
            f"`{label}`, a `{type(marker).__name__}`, must hold {accepted}, got "
            f"{', '.join(wrong)}; give it arrays, or a pytree of them, and no marker."
        )


def _comparable(x: ArrayLike) -> jax.Array:
    return widen(x) if is_inexact(x) else jnp.asarray(x)


def _extreme(x: jax.Array, which: str) -> jax.Array:
    """An array like `x` of the least or the largest there is in its dtype."""
    if x.dtype == jnp.bool_:
        fill = which == "max"
    elif jnp.issubdtype(x.dtype, jnp.integer):
        fill = getattr(jnp.iinfo(x.dtype), which)
    else:
        fill = jnp.inf if which == "max" else -jnp.inf
    return filled_like(x, fill)
