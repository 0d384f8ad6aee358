"""How arrays lie on the axes of a mesh, and how they must for devices to share rows.

On Explicit axes types tell, and what does not lie as it should is refused or laid out.
On Auto axes nobody knows inside ``jit``, and the compiler moves what it must.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_accum._numerics import kind_of
from optax_accum._placement import read_spec
from optax_accum._spread import Mesh


def check_rows(
    caller: str,
    axes: tuple[str, ...],
    mesh: Mesh,
    label: str,
    leaf: Any,
    spec: PartitionSpec,
) -> None:
    """On Explicit axes, rows are where they are wanted, or everywhere."""
    ours = _explicit(mesh) & set(axes)
    lies = _seen(_spec_of_type(leaf), ours)
    if lies and lies != _seen(spec, ours):
        raise ValueError(
            f"`{caller}(reduce_axes=...)` must be given a batch that is sharded by its "
            f"rows, {spec}, got {_spec_of_type(leaf)} at {label}; put it there by "
            "`jax.device_put` before."
        )


def check_parameter(
    caller: str,
    axes: tuple[str, ...],
    mesh: Mesh,
    label: str,
    leaf: Any,
    spec: PartitionSpec,
) -> None:
    """A parameter must lie as is said, as far as that can be seen.

    Or it would be gathered in silence. Of Auto axes a trace knows nothing.
    """
    for size, names in zip(np.shape(leaf), read_spec(spec), strict=False):
        devices = math.prod(mesh.shape[name] for name in names)
        if size % devices:
            raise ValueError(
                f"`{caller}(param_specs=...)` must divide axes of parameters equally, "
                f"got {names}, of {devices} devices, for {kind_of(leaf)} at {label}; "
                "replicate it, or pad it."
            )
    lies, explicit = _spec_of_type(leaf), _explicit(mesh)
    ours, others = explicit & set(axes), explicit - set(axes)
    if _seen(lies, ours) != _seen(spec, ours):
        raise ValueError(
            f"`{caller}(param_specs=...)` must be how the parameters are sharded over "
            f"{axes}, got {spec} for {label}, which has {lies}; say "
            "`param_specs=jax.tree.map(lambda p: p.sharding.spec, params)`, or put "
            "the parameters where they shall be by `jax.device_put`."
        )
    if _seen(lies, others) and any(read_spec(spec)):
        raise ValueError(
            f"`{caller}(param_specs=...)` must be of parameters that are sharded over "
            f"no other Explicit axis, got {lies} for {label}, of which JAX cannot "
            f"scatter a sum; make the axes {sorted(others)} Auto."
        )


# -- Explicit axes, which types tell of


def _explicit(mesh: Mesh) -> set[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Explicit}


def _spec_of_type(leaf: Any) -> PartitionSpec:
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    return PartitionSpec() if sharding is None else sharding.spec


def _seen(spec: PartitionSpec, axes: set[str]) -> dict[int, tuple[str, ...]]:
    """What a spec says of some axes."""
    kept = (tuple(n for n in names if n in axes) for names in read_spec(spec))
    return {dim: names for dim, names in enumerate(kept) if names}


def lay_out(leaf: Any, spec: PartitionSpec, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """`leaf` sharded over Explicit ones of `axes` as `spec` says, and as it is else."""
    explicit = _explicit(mesh)
    if not explicit & set(axes):
        return leaf
    lies, wanted = _spec_of_type(leaf), _seen(spec, set(axes))
    others = _seen(lies, explicit - set(axes))
    if _seen(lies, explicit & set(axes)) == wanted:
        return leaf
    names = [(*wanted.get(i, ()), *others.get(i, ())) for i in range(np.ndim(leaf))]
    return jax.reshard(leaf, NamedSharding(mesh, PartitionSpec(*names)))
