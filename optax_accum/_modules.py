"""Flax NNX modules taken apart into arrays, and put together around a call.

Flax refuses that a module changes inside a scan, and micro-batches are in one. What a
module is made of may go through it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from optax_accum._arguments import Place, Roles, find, find_others, values_at
from optax_accum._axes import manual_axes, number_of_device
from optax_accum._forwarded import find_changed
from optax_accum._numerics import kind_of
from optax_accum._split import fold_keys


class Apart(NamedTuple):
    """What of modules is no array, and how their arrays are told apart."""

    caller: str  # whose errors there are
    graphdef: nnx.GraphDef
    filters: tuple  # each of a part of what is trained
    axes: tuple[str, ...]  # over which devices share the rows


def take_apart(
    caller: str, nodes: tuple, chosen: Sequence[nnx.DiffState], axes: tuple[str, ...]
) -> tuple[Apart, tuple[nnx.State, ...], nnx.State]:
    """The arrays of `nodes`: of each of the first what is `chosen`, and all others."""
    for node in nodes[: len(chosen)]:
        check_module(f"{caller}(fun)", node)
    filters = tuple(_within(i, x.filter) for i, x in enumerate(chosen))
    graphdef, *parts, state = nnx.split(nodes, *filters, ...)
    for argument, part in zip(chosen, parts, strict=True):
        check_chosen(f"{caller}(fun)", argument.filter, part)
    params = tuple(part[i] for i, part in enumerate(parts))
    return Apart(caller, graphdef, filters, axes), params, state


def call_whole(
    call: Callable[[Any], Any], apart: Apart, trained: Sequence, state: nnx.State
) -> tuple[Any, nnx.State]:
    """What `call` returns of the whole modules, and the state that it leaves."""
    own = _fold_streams(state, apart.axes)

    def run(trained):
        # Copied, or variables would be those of `state`, and change with it.
        nodes = nnx.merge(apart.graphdef, *trained, own, copy=True)
        returned = call(nodes)
        graphdef, *after, new = nnx.split(nodes, *apart.filters, ...)
        _check_structure(apart, graphdef, new, state)
        return returned, after, new

    returned, after, new = run(trained)
    changed = find_changed(lambda params: run(params)[1], trained, after)
    _check_unchanged(apart.caller, changed)
    return returned, _keep_streams(state, new, apart.axes)


def _fold_streams(state: nnx.State, axes: tuple[str, ...]) -> nnx.State:
    """`state` with random streams of each device's own."""
    axes = tuple(axis for axis in axes if axis in manual_axes())
    if not axes:
        return state
    keys, others = nnx.split_state(state, nnx.RngKey, ...)
    return nnx.merge_state(fold_keys(keys, number_of_device(axes)), others)


def _keep_streams(old: nnx.State, new: nnx.State, axes: tuple[str, ...]) -> nnx.State:
    """`new`, with the keys that all devices have in common."""
    if not axes:
        return new
    keys, _ = nnx.split_state(old, nnx.RngKey, ...)
    _, others = nnx.split_state(new, nnx.RngKey, ...)
    return nnx.merge_state(keys, others)


def beside(caller: str, returned: Any, state: nnx.State, has_aux: bool) -> Any:
    """What a loss `returned`, with the state where a carried one belongs."""
    if not has_aux:
        return returned, state
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(
            f"`{caller}(has_aux=True)` expects a function that returns (loss, aux), "
            f"got {jax.tree.map(kind_of, returned)}."
        )
    loss, aux = returned
    return loss, (state, aux)


# -- Arguments


def diff_state(argnum: Any, wrt: Any) -> nnx.DiffState:
    return argnum if isinstance(argnum, nnx.DiffState) else nnx.DiffState(argnum, wrt)


def _within(number: int, chosen: Any) -> Callable[[tuple, Any], bool]:
    """The filter that chooses so of one argument of several."""
    matches = nnx.filterlib.to_predicate(chosen)
    return lambda path, x: path[0] == number and matches(path[1:], x)


def find_nodes(
    caller: str, roles: Roles, args: Sequence, kwargs: dict[str, Any]
) -> Roles:
    """The places of a call's arguments; carried are all others that hold modules."""
    places = find(caller, roles, args, kwargs)
    keys = values_at(places, args, kwargs).folded
    for place, key in zip(places.folded, keys, strict=True):
        _check_key(caller, place, key)
    others = find_others(places, args, kwargs)
    carried = tuple(place for place, value in others if _holds_nodes(value))
    return places._replace(carried=carried)


def _holds_nodes(tree: Any) -> bool:
    """Whether there is an object of NNX in it, which may change."""

    def is_node(x):
        return nnx.graph.is_graph_node(x)

    return any(map(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


# -- Errors


def check_module(call: str, model: Any) -> None:
    if not _holds_nodes(model):
        raise TypeError(
            f"`{call}` must be given an `nnx.Module` to differentiate, got "
            f"{type(model).__name__}; of arrays, take `optax_accum.value_and_grad`."
        )


def check_given(model_state: nnx.State | None) -> nnx.State:
    if model_state is None:
        raise TypeError(
            "The loss that `nnx.functional` made must be given a `model_state`, got "
            "none; write `init_train_state(params, optimizer, model_state=...)` with "
            "the one that `nnx.functional` returned."
        )
    return model_state


def check_chosen(call: str, wrt: Any, params: nnx.State) -> None:
    if not jax.tree.leaves(params):
        raise ValueError(
            f"`{call}` must be given a filter `wrt` that chooses variables of the "
            f"module, got {wrt!r}, which chooses none; `nnx.Param` is the usual one."
        )


def _check_structure(
    apart: Apart, graphdef: nnx.GraphDef, new: nnx.State, old: nnx.State
) -> None:
    if graphdef == apart.graphdef:
        return
    before, after = (set(nnx.to_flat_state(state).paths) for state in (old, new))
    changed = [".".join(map(str, path)) for path in sorted(after ^ before, key=str)]
    raise ValueError(
        f"`{apart.caller}` must be given a loss that leaves the structure of its "
        "modules as it is, got one that changes "
        f"{', '.join(changed) or 'a static attribute'}; "
        "return what was sown in aux, by `nnx.capture` or `nnx.pop`, and call "
        "`model.train()` or `model.eval()` outside."
    )


def _check_unchanged(caller: str, changed: list[str]) -> None:
    if changed:
        raise ValueError(
            f"`{caller}` must be given a loss that does not assign to what is "
            f"differentiated, got one that assigns to {', '.join(changed)}, as "
            "`nnx.WeightNorm` does to its layer's; every micro-batch sees the same "
            "parameters, so change them after the call."
        )


def _check_key(caller: str, place: Place, key: Any) -> None:
    if _holds_nodes(key):
        raise TypeError(
            f"`{caller}(rng_argnums=...)` must name JAX's random keys, got "
            f"{type(key).__name__} at {place.label}; streams of `nnx.Rngs` go from "
            "micro-batch to micro-batch without being named."
        )


def check_streams(state: nnx.State, axes: tuple[str, ...]) -> None:
    streams, _ = nnx.split_state(state, nnx.RngKey, ...)
    if manual_axes() and not axes and jax.tree.leaves(streams):
        raise ValueError(
            "`nnx.functional(reduce_axes=...)` must be that of the step, got none "
            f"inside of a `shard_map` over {sorted(manual_axes())}; without it all "
            "devices would draw the same."
        )
