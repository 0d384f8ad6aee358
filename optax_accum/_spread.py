"""Over which devices rows are shared: what users say of it, and the mesh it means."""

import math
from typing import Any, NamedTuple

import jax

from optax_accum._axes import check_axes, manual_axes
from optax_accum._placement import Gather, Placement, check_gather, place

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


class Spread(NamedTuple):
    """Over which devices rows are shared, and how parameters lie on them."""

    axes: tuple[str, ...] = ()
    param_specs: Any = None  # of the tuple of what is trained; None: replicated
    gather: Gather = "microbatch"
    mesh: Mesh | None = None

    def place(self, caller: str, trained: tuple, labels: tuple[str, ...]) -> Placement:
        """The placement of what is trained."""
        if not self.axes:
            return Placement()
        mesh = self.mesh or jax.sharding.get_abstract_mesh()
        return place(
            caller,
            self.axes,
            mesh.axis_names,
            self.param_specs,
            self.gather,
            trained,
            labels,
        )


def check_spread(
    caller: str,
    axes: Any,
    param_specs: Any,
    gather: Any,
    mesh: Any,
    *,
    in_place: bool = False,
    is_single: bool = True,
) -> Spread:
    """These options together.

    Args:
      caller: whose options they are.
      axes: ``reduce_axes``.
      param_specs: the option of that name.
      gather: the option of that name.
      mesh: the option of that name.
      in_place: whether the backward pass adds to the sums.
      is_single: whether `param_specs` is of one argument, not of a tuple of them.
    """
    axes = check_axes(f"{caller}(reduce_axes=...)", axes)
    gather = check_gather(caller, gather, param_specs, in_place)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"`{caller}(mesh=...)` must be a mesh, got {type(mesh).__name__}; make one "
            "with `jax.make_mesh`."
        )
    given = {"param_specs": param_specs, "mesh": mesh}
    useless = [name for name, value in given.items() if value is not None]
    if useless and not axes:
        raise ValueError(
            f"`{caller}({useless[0]}=...)` must come with `reduce_axes`, got none; "
            "without, the compiler alone decides what devices exchange."
        )
    if is_single and param_specs is not None:
        param_specs = (param_specs,)
    return Spread(axes, param_specs, gather, mesh)


def count_sharers(caller: str, spread: Spread, rows: int) -> int:
    """How many devices share the rows of a batch, if they can do so equally."""
    mesh = find_mesh(caller, spread)
    if mesh is None:
        return 1
    devices = math.prod(mesh.shape[name] for name in spread.axes)
    if rows % devices:
        raise ValueError(
            f"`{caller}(reduce_axes=...)` must be given a batch whose rows the "
            f"{devices} devices along {spread.axes} can share equally, got {rows} "
            "rows; pad it, and leave the padding out by `mean(losses, where=...)`."
        )
    return devices


def _choose_mesh(caller: str, given: Mesh | None) -> Mesh:
    """That of an outer ``shard_map``, the one given, or that of ``jax.set_mesh``."""
    context = jax.sharding.get_abstract_mesh()
    if given is None or context.manual_axes:
        return context
    if not context.empty and given.abstract_mesh != context:
        raise ValueError(
            f"`{caller}(mesh=...)` must be the mesh of `jax.set_mesh` where there is "
            f"one, got {given.abstract_mesh} inside {context}; leave `mesh` out."
        )
    return given


def find_mesh(caller: str, spread: Spread) -> Mesh | None:
    """The mesh to spread over.

    None: there is nothing to spread, or this is inside a ``shard_map`` over the axes.
    """
    axes, manual = spread.axes, manual_axes()
    if set(axes) <= manual:
        return None
    if set(axes) & manual:
        raise ValueError(
            f"`{caller}(reduce_axes=...)` must be axes of the `shard_map` around it, "
            f"all or none, got {axes} inside one over {sorted(manual)}."
        )
    mesh = _choose_mesh(caller, spread.mesh)
    if not set(axes) <= set(mesh.axis_names):
        raise ValueError(
            f"`{caller}(reduce_axes=...)` must be axes of the mesh, got {axes} for "
            f"{mesh.axis_names or 'no mesh'}; write `with jax.set_mesh(mesh):` around "
            "the call, or say `mesh=`."
        )
    return mesh
