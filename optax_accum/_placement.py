"""How parameters lie on the devices that share the rows, and how gradients meet there.

Each device sums the gradients of its own rows. Of parameters that all devices have,
the sums are added up over the devices once, when the last micro-batch is done. Of those
that are sharded over the same devices (FSDP), each device holds a part: they are
gathered before they are used, and a device keeps the part of the sum that is its own.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from optax_accum._axes import vary
from optax_accum._checks import check_choice
from optax_accum._numerics import settle, widen
from optax_accum._sums import Accumulator

Gather = Literal["microbatch", "call"]

# The dimensions of an array that are divided over devices, each with its mesh axes.
Shards = tuple[tuple[int, tuple[str, ...]], ...]


class Placement(NamedTuple):
    """Where parameters lie, and when they are put together.

    Attributes:
      axes: the mesh axes over which devices share the rows.
      shards: of each leaf of what is trained, what is divided over some of `axes`.
      gather: whether sharded parameters are put together, and their gradients reduced,
        for every micro-batch (least memory) or once a call (least traffic).
    """

    axes: tuple[str, ...] = ()
    shards: tuple[Shards, ...] = ()
    gather: Gather = "microbatch"

    @property
    def is_sharded(self) -> bool:
        return any(self.shards)

    @property
    def gathers_each(self) -> bool:
        """There is something to put together for every micro-batch."""
        return self.is_sharded and self.gather == "microbatch"

    def open_call(self, trained: Any) -> Any:
        """What is trained, as the loop gets it."""
        if not self.axes:
            return trained
        # Outside of what is differentiated: inside, JAX would sum over devices there.
        trained = vary(settle(trained), self.axes)
        return trained if self.gathers_each else self._map(_gather, trained)

    def open_microbatch(self, trained: Any, index: ArrayLike) -> Any:
        """What is trained, whole, as a micro-batch gets it."""
        if not self.gathers_each:
            return trained
        # Or the compiler may gather once, before the loop, and keep it all.
        trained, _ = jax.lax.optimization_barrier((trained, jnp.asarray(index)))
        return self._map(_gather, trained)

    def close_microbatch(self, grads: Any, accumulator: Accumulator) -> Any:
        """The gradient of a micro-batch, as it is added to the sums."""
        if not self.gathers_each:
            return grads
        # A sum over devices is a sum like any other, and in the same dtype.
        dtype = None if accumulator.compensated else accumulator.dtype
        return self._map(_scatter, widen(grads, dtype))

    def close_call(self, sums: Any) -> Any:
        """The sums of all devices. This is the one reduction."""
        if not self.axes:
            return sums
        if not self.gathers_each:
            sums = self._map(_scatter, sums)
        leaves, structure = jax.tree.flatten(sums)
        return jax.tree.unflatten(structure, _add_up(leaves, self.shards, self.axes))

    def local_axes(self) -> Iterator[tuple[str, ...]]:
        """Of each leaf of the sums, the axes over which it is not added up as yet."""
        for shards in self.shards:
            yield _without(self.axes, shards) if self.gathers_each else self.axes

    def specs(self) -> tuple[PartitionSpec, ...]:
        """Of each leaf, how it is sharded over `axes`."""
        return tuple(map(_spec_of, self.shards))

    def sum_specs(self) -> tuple[PartitionSpec, ...]:
        """Of each leaf of the sums in the loop, the same."""
        if self.gathers_each:
            return self.specs()
        return (PartitionSpec(),) * len(self.shards)

    def _map(self, fun: Callable[[jax.Array, Shards], jax.Array], tree: Any) -> Any:
        if not self.is_sharded:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, map(fun, leaves, self.shards))


def check_gather(caller: str, gather: Any, param_specs: Any, in_place: bool) -> Gather:
    """When to gather; where nothing is sharded there is nothing to choose."""
    is_given, gather = gather is not None, gather or "microbatch"
    check_choice(f"{caller}(gather=...)", gather, get_args(Gather))
    if in_place and param_specs is not None and gather == "microbatch":
        raise ValueError(
            f"`{caller}(in_place=True, param_specs=...)` must come with "
            "`gather='call'`, got 'microbatch', the default; the backward pass adds to "
            "whole sums, of which a device then has but a part."
        )
    if is_given and param_specs is None:
        raise ValueError(
            f"`{caller}(gather=...)` must come with `param_specs`, got {gather!r} "
            "without; parameters that every device has need not be gathered."
        )
    return gather


def place(
    caller: str,
    axes: tuple[str, ...],
    mesh_axes: tuple[str, ...],
    param_specs: Any,
    gather: Gather,
    trained: tuple,
    labels: tuple[str, ...],
) -> Placement:
    """The placement that `param_specs` tell.

    Args:
      caller: whose errors there are.
      axes: over which devices share the rows.
      mesh_axes: all that there are.
      param_specs: a ``PartitionSpec`` or a sharding for each leaf of `trained`, or for
        a subtree; None for replicated. Of other axes than `axes` nothing is read.
      gather: when to gather.
      trained: what is trained.
      labels: what an error shall call its leaves.
    """
    # None is no leaf of what is trained.
    given = jax.tree.map(_as_spec, param_specs, is_leaf=_is_spec)
    try:
        specs = jax.tree.leaves(jax.tree.broadcast(given, trained))
    except ValueError as error:
        raise ValueError(
            f"`{caller}(param_specs=...)` must have the structure of what is trained, "
            f"{jax.tree.structure(trained)}, or of the top of it, got "
            f"{jax.tree.structure(param_specs, is_leaf=_is_spec)}; None is for "
            "parameters that every device has."
        ) from error
    leaves = jax.tree.leaves(trained)
    shards = tuple(
        _shards_of(caller, spec, jnp.ndim(leaf), axes, mesh_axes, label)
        for spec, leaf, label in zip(specs, leaves, labels, strict=True)
    )
    return Placement(axes, shards, gather)


def read_spec(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that each dimension is divided over."""
    return tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in spec)


def _shards_of(
    caller: str,
    spec: Any,
    ndim: int,
    axes: tuple[str, ...],
    mesh_axes: tuple[str, ...],
    label: str,
) -> Shards:
    """What a spec says of `axes`."""
    is_spec = isinstance(spec, PartitionSpec)
    if not is_spec or not all(isinstance(e, str | tuple | None) for e in spec):
        raise TypeError(
            f"`{caller}(param_specs=...)` must hold a `PartitionSpec` of names, a "
            f"`NamedSharding` or None for each parameter, got {spec!r} for {label}."
        )
    named = read_spec(spec)
    if len(named) > ndim:
        raise ValueError(
            f"`{caller}(param_specs=...)` must have at most as many entries as the "
            f"parameter has axes, got {spec} for {label}, which has {ndim}."
        )
    unknown = {axis for names in named for axis in names} - set(mesh_axes)
    if unknown:
        raise ValueError(
            f"`{caller}(param_specs=...)` must name axes of the mesh, {mesh_axes}, got "
            f"{sorted(unknown)} for {label}."
        )
    kept = [tuple(axis for axis in names if axis in axes) for names in named]
    for names, ours in zip(named, kept, strict=True):
        if ours and ours != names:
            raise ValueError(
                f"`{caller}(param_specs=...)` must not divide one axis of a parameter "
                f"over axes inside and outside of `reduce_axes`, {axes}, got {names} "
                f"for {label}; name all of them in `reduce_axes`, or none."
            )
    return tuple((dim, names) for dim, names in enumerate(kept) if names)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | jax.sharding.Sharding)


def _as_spec(x: Any) -> Any:
    """What a sharding says, without its mesh; None says that nothing is divided."""
    return PartitionSpec() if x is None else getattr(x, "spec", x)


def _spec_of(shards: Shards) -> PartitionSpec:
    divided = dict(shards)
    return PartitionSpec(*(divided.get(i) for i in range(max(divided, default=-1) + 1)))


def _without(axes: tuple[str, ...], shards: Shards) -> tuple[str, ...]:
    taken = {axis for _, names in shards for axis in names}
    return tuple(axis for axis in axes if axis not in taken)


# -- Collectives


def _gather(x: jax.Array, shards: Shards) -> jax.Array:
    for dim, axes in shards:
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _scatter(x: jax.Array, shards: Shards) -> jax.Array:
    for dim, axes in shards:
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return x


def _add_up(
    leaves: list, shards: tuple[Shards, ...], axes: tuple[str, ...]
) -> list[jax.Array]:
    """Each leaf added up over the axes over which its shards are not: once for all
    leaves that have these in common."""
    rests = [_without(axes, own) for own in shards]
    added = list(leaves)
    for rest in dict.fromkeys(rests):
        chosen = [i for i, other in enumerate(rests) if other == rest]
        if rest:
            sums = jax.lax.psum([leaves[i] for i in chosen], rest)
            for i, total in zip(chosen, sums, strict=True):
                added[i] = total
    return added
