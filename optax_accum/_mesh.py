"""State where the parameters are, from the beginning and from step to step."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.shard_alike import shard_alike
from jax.sharding import NamedSharding, PartitionSpec

from optax_accum._numerics import is_numeric


def on_mesh_of(params: Any, tree: Any) -> Any:
    """`tree` with what lies on a single device replicated on the mesh of `params`.

    A step returns its whole state on that mesh. Counters that began on one device would
    make the second call another program than the first, compiled once more.

    Args:
      params: arrays. Nothing is moved if they lie on one device, or in a trace.
      tree: arrays, of which those that are sharded stay as they are.
    """
    meshes = (leaf.sharding.mesh for leaf in jax.tree.leaves(params) if _is_laid(leaf))
    mesh = next((mesh for mesh in meshes if mesh.size > 1), None)
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def move(leaf):
        is_there = _is_laid(leaf) or not _is_concrete(leaf)
        return leaf if is_there else jax.device_put(leaf, everywhere)

    return jax.tree.map(move, tree)


def lie_as(old: Any, new: Any) -> Any:
    """A state `new` that lies on the devices of a mesh as the `old` one does.

    On Auto axes the compiler may choose otherwise, as for a scale that every device has
    and that it reduces in parts. The next step would be another program then.
    """

    def keep(before, after):
        is_placed = is_numeric(after) and jnp.ndim(after) > 0
        return shard_alike(before, after)[1] if is_placed else after

    return jax.tree.map(keep, old, new)


def _is_laid(leaf: Any) -> bool:
    return _is_concrete(leaf) and isinstance(leaf.sharding, NamedSharding)


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
