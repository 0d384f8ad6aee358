"""A window that Python keeps open: what is in it, and how it lies on devices.

Where devices share the rows, each keeps what its own have come to, along a first axis
of the devices. They put it together when the window closes, and not before.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._arguments import Roles
from optax_accum._fold import over_devices
from optax_accum._job import label_leaves
from optax_accum._loop import Loop
from optax_accum._numerics import find_difference, kind_of
from optax_accum._over_devices import (
    Call,
    Parts,
    call_specs,
    holds_last,
    spread_out,
)
from optax_accum._placement import Placement
from optax_accum._spread import Mesh, Spread, find_mesh
from optax_accum._state import TrainState
from optax_accum._sums import read_sums, zero_sums
from optax_accum._terms import Mean, Sum


class WindowState(NamedTuple):
    """An open window: what its micro-batches have come to. Arrays only.

    Under ``reduce_axes``, `acc_grads`, `loss`, `aux` and `counts` have one more axis,
    the first: one entry for each device, of its own rows.

    Attributes:
      mini_step: micro-batches in it; under ``reduce_axes`` those of one device.
      acc_grads: sum of their gradients, each times its weight over `unit`. Shapes of
        the parameters, dtypes of sums.
      unit: what weights are measured in: the rows of the first micro-batch, or about
        the entries of its `Mean`; so that gradients of 16 bits stay in range.
      loss: a `Mean` of the loss so far, with its `value` and its `weight`: rows, or
        what a `Mean` weighs. A `Sum` of it where the loss is one, or has several terms.
      aux: what is reported beside it so far, as markers. None without.
      counts: whether anything in it counts. None where everything does.
      denominators: those that the window was opened with, if any.
      model_state: as the last micro-batch left it. None without.

    Examples:
      >>> optimizer = optax.sgd(0.5)
      >>> add, _ = optax_accum.make_window_steps(
      ...     lambda w, x: jnp.mean(w * x), optimizer)
      >>> state = optax_accum.init_train_state(1.0, optimizer)
      >>> window = add(state, jnp.array([1.0, 3.0]), None)
      >>> print(window.mini_step, window.loss.value, window.loss.weight)
      1 2.0 2.0
    """

    mini_step: jax.Array  # shape=(), dtype=int32
    acc_grads: Any
    unit: jax.Array  # shape=(), float32, or float64 beside such sums
    loss: Mean | Sum
    aux: Any
    counts: jax.Array | None  # shape=(), dtype=bool
    denominators: tuple[jax.Array, ...]  # as unit
    model_state: Any


# (call, window, denominators) -> window
Add = Callable[[Call, WindowState | None, Any], WindowState]


def add_on_devices(
    loop: Loop,
    roles: Roles,
    call: Call,
    window: WindowState | None,
    denominators: Any,
    add: Add,
) -> WindowState:
    """``add(call, window, denominators)``, on all devices if they share the rows."""
    caller, spread = loop.caller, loop.spread
    mesh = find_mesh(caller, spread)
    if mesh is None:
        return add(call, window, denominators)
    specs, placement = call_specs(caller, spread, mesh, roles, call, loop.batch_axis)
    (params, *_), _ = call
    layout = _layout(placement, params)

    def body(inputs):
        call, window, denominators = inputs
        window = None if window is None else _part_of_device(window)
        return _take_apart(add(call, window, denominators))

    parts = spread_out(
        caller,
        spread,
        mesh,
        body,
        (call, window, denominators),
        (specs, None if window is None else layout, PartitionSpec()),
        layout.acc_grads,
    )
    return _put_together(parts)


def close_on_devices(loop: Loop, params: Any, window: WindowState) -> WindowState:
    """`window` as one device would have it that had seen all rows."""
    caller, spread = loop.caller, loop.spread
    placement = _place(caller, spread, params)

    def close(window):
        counts = window.counts
        if counts is not None and placement.axes:
            counts = jax.lax.pmax(counts, placement.axes)
        loss, aux = over_devices((window.loss, window.aux), placement.axes)
        sums = placement.close_call(read_sums(window.acc_grads))
        return window._replace(acc_grads=sums, loss=loss, aux=aux, counts=counts)

    mesh = find_mesh(caller, spread)
    if mesh is None:
        return close(window)

    def body(window):
        closed = close(_part_of_device(window))
        return Parts(closed.acc_grads, (), closed._replace(acc_grads=()))

    specs = jax.tree.unflatten(jax.tree.structure(params), placement.specs())
    layout = _layout(placement, params)
    parts = spread_out(caller, spread, mesh, body, window, layout, specs)
    return parts.equal._replace(acc_grads=parts.sums)


def _layout(placement: Placement, params: Any) -> Any:
    """A spec for every part of a window."""
    leaves = zip(placement.local_axes(), placement.sum_specs(), strict=True)
    sums = [PartitionSpec(local, *spec) for local, spec in leaves]
    each: Any = PartitionSpec(placement.axes)
    same: Any = PartitionSpec()
    return WindowState(
        mini_step=same,
        acc_grads=jax.tree.unflatten(jax.tree.structure(params), sums),
        unit=same,
        loss=each,
        aux=each,
        counts=each,
        denominators=same,
        model_state=same,
    )


def _part_of_device(window: WindowState) -> WindowState:
    """Without the axis of the devices."""
    acc_grads, loss, aux, counts = jax.tree.map(
        lambda x: jnp.squeeze(x, 0),
        (window.acc_grads, window.loss, window.aux, window.counts),
    )
    return window._replace(acc_grads=acc_grads, loss=loss, aux=aux, counts=counts)


def _take_apart(window: WindowState) -> Parts:
    """With that axis, and by how it lies on devices."""
    sums, stacked = jax.tree.map(
        lambda x: jnp.expand_dims(x, 0),
        (window.acc_grads, (window.loss, window.aux, window.counts)),
    )
    equal = (
        window.mini_step,
        window.unit,
        window.denominators,
        window.model_state,
    )
    must_agree = window.model_state is not None or holds_last(window.aux)
    return Parts(sums, stacked, equal, must_agree)


def _put_together(parts: Parts) -> WindowState:
    """What `_take_apart` has taken apart."""
    loss, aux, counts = parts.stacked
    mini_step, unit, denominators, model_state = parts.equal
    return WindowState(
        mini_step=mini_step,
        acc_grads=parts.sums,
        unit=unit,
        loss=loss,
        aux=aux,
        counts=counts,
        denominators=denominators,
        model_state=model_state,
    )


def _place(caller: str, spread: Spread, params: Any) -> Placement:
    labels = tuple(label for label, _ in label_leaves({"params": params}))
    return spread.place(caller, (params,), labels)


# -- What it must be


def check_window(call: str, window: Any, state: TrainState, loop: Loop) -> None:
    """A window that `add` made with this state."""
    if not isinstance(window, WindowState):
        raise TypeError(
            f"`{call}` must be given a window that `add` returned, got "
            f"{kind_of(window)}; `add(state, batch, None)` opens one."
        )
    sums = jax.eval_shape(lambda: zero_sums(state.params, loop.accumulator))
    mesh = find_mesh(loop.caller, loop.spread)
    if mesh is not None:
        placement = _place(loop.caller, loop.spread, state.params)
        sums = _on_devices(sums, state.params, mesh, placement)
    difference = find_difference(window.acc_grads, sums, "acc_grads")
    difference = difference or find_difference(
        window.model_state, state.model_state, "model_state"
    )
    if difference:
        raise ValueError(
            f"`{call}` must be given a window that was opened with this state, got "
            f"{difference}; make `add` and `apply` together, and open a new window "
            "with None."
        )


def _on_devices(sums: Any, params: Any, mesh: Mesh, placement: Placement) -> Any:
    """The types of `sums` with the axis of the devices."""
    copies = [
        math.prod(mesh.shape[axis] for axis in axes) for axes in placement.local_axes()
    ]

    def with_axis(count, leaf):
        def prepend(x):
            return jax.ShapeDtypeStruct((count, *x.shape), x.dtype)

        return jax.tree.map(prepend, leaf)

    structure = jax.tree.structure(params)
    return jax.tree.map(with_axis, jax.tree.unflatten(structure, copies), sums)
