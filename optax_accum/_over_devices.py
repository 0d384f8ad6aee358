"""Work spread over devices that share the rows: one ``shard_map`` around all of it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from optax_accum._arguments import Roles, find, replace, values_at
from optax_accum._job import label_leaves, labelled
from optax_accum._layout import check_parameter, check_rows, lay_out
from optax_accum._outputs import Disagreement
from optax_accum._placement import Placement
from optax_accum._reductions import Last, is_marker
from optax_accum._split import count_rows, has_rows
from optax_accum._spread import Mesh, Spread, count_sharers

# The arguments of a function: by position, by keyword.
Call = tuple[Sequence[Any], dict[str, Any]]


class Parts(NamedTuple):
    """What devices come to, by how it is put together."""

    sums: Any  # of what is trained, laid out as the caller says
    stacked: Any  # those of all devices along the first axis
    equal: Any  # the same on all of them
    must_agree: bool = False  # whether JAX's types shall show that


def holds_last(aux: Any) -> bool:
    markers = jax.tree.leaves(aux, is_leaf=is_marker)
    return any(isinstance(marker, Last) for marker in markers)


def call_specs(
    caller: str,
    spread: Spread,
    mesh: Mesh,
    roles: Roles,
    call: Call,
    batch_axis: int,
) -> tuple[Any, Placement]:
    """How the arguments of a call are spread: a tree of specs; and the placement."""
    args, kwargs = call
    places = find(caller, roles, args, kwargs)
    trained, batch, *_ = values_at(places, args, kwargs)
    rows = count_rows(caller, labelled(places.split, batch), batch_axis)
    count_sharers(caller, spread, rows)
    named = label_leaves(labelled(places.differentiated, trained))
    placement = spread.place(caller, trained, tuple(label for label, _ in named))
    for (label, leaf), spec in zip(named, placement.specs(), strict=True):
        check_parameter(caller, spread.axes, mesh, label, leaf, spec)

    def rows_of(leaf):
        if not has_rows(leaf):
            return PartitionSpec()
        before = (None,) * (batch_axis % np.ndim(leaf))
        return PartitionSpec(*before, spread.axes)

    for label, leaf in label_leaves(labelled(places.split, batch)):
        check_rows(caller, spread.axes, mesh, label, leaf, rows_of(leaf))
    specs = Roles(
        jax.tree.unflatten(jax.tree.structure(trained), placement.specs()),
        jax.tree.map(rows_of, batch),
        (PartitionSpec(),) * len(places.folded),
        (PartitionSpec(),) * len(places.carried),
    )
    same = (PartitionSpec(),) * len(args), dict.fromkeys(kwargs, PartitionSpec())
    arg_specs, kwarg_specs = replace(*same, places, specs)
    return (tuple(arg_specs), kwarg_specs), placement


def spread_out(
    caller: str,
    spread: Spread,
    mesh: Mesh,
    body: Callable[[Any], Parts],
    inputs: Any,
    in_specs: Any,
    sum_specs: Any,
) -> Parts:
    """``body(inputs)`` on every device, with its own part of the inputs.

    Not all of the models there are have the types that tell what varies over devices: a
    scan that begins with zeros has not. So the work is done without these types, and
    where something must be shown to be equal on all devices, it is traced once more
    with them.

    Args:
      caller: whose errors there are.
      spread: over which axes; others are left to the compiler.
      mesh: of which devices.
      body: what each of them does.
      inputs: any pytree.
      in_specs: a spec for every leaf of `inputs` or for a subtree.
      sum_specs: the same for ``Parts.sums``.
    """
    leaves, structure = jax.tree.flatten(inputs)
    specs = jax.tree.leaves(jax.tree.broadcast(in_specs, inputs))
    passed = [i for i, leaf in enumerate(leaves) if _is_passed(leaf)]
    known: Any = None  # of the result: all but its arrays

    def local(arrays):
        nonlocal known
        filled = list(leaves)
        for i, array in zip(passed, arrays, strict=True):
            filled[i] = array
        parts = body(jax.tree.unflatten(structure, filled))
        equal, equal_structure = jax.tree.flatten(parts.equal)
        stacked, stacked_structure = jax.tree.flatten(parts.stacked)
        known = (
            parts.must_agree,
            stacked_structure,
            equal_structure,
            [None if _is_passed(x) else x for x in equal],
        )
        return parts.sums, stacked, [x for x in equal if _is_passed(x)]

    def mapped(check_vma):
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=([specs[i] for i in passed],),
            out_specs=(sum_specs, PartitionSpec(spread.axes), PartitionSpec()),
            axis_names=set(spread.axes),
            check_vma=check_vma,
        )

    arrays = [lay_out(leaves[i], specs[i], mesh, spread.axes) for i in passed]
    work = mapped(False)
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        # Outside of `jit`, JAX maps over all axes of a mesh or none.
        work = jax.jit(work)
    sums, stacked, equal = work(arrays)
    must_agree, stacked_structure, equal_structure, kept = known
    if must_agree:
        _show_agreement(caller, spread, mapped(True), arrays)
    found = iter(equal)
    return Parts(
        sums,
        jax.tree.unflatten(stacked_structure, stacked),
        jax.tree.unflatten(
            equal_structure, [next(found) if x is None else x for x in kept]
        ),
    )


def _show_agreement(caller: str, spread: Spread, typed: Callable, arrays: list) -> None:
    """Traces the same with JAX's types of what varies over devices."""
    try:
        jax.eval_shape(typed, arrays)
    except Disagreement:
        raise
    except Exception as error:  # of the model, which may be right without types
        raise TypeError(
            f"`{caller}(reduce_axes=...)` must be given a function that JAX can show "
            "to return the same carried state, and the same `Last`, on all devices, "
            "got one whose types do not tell; begin a scan over what differs with "
            f"`jax.lax.pcast(zeros, {spread.axes}, to='varying')`, say: "
            f"{type(error).__name__}: {error}"
        ) from error


def _is_passed(leaf: Any) -> bool:
    """An array. Python's numbers and other objects are the same everywhere."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
