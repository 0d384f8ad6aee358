"""A call of door 1 that devices make together, each with gradients of its own rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._axes import count_devices, manual_axes, varies
from optax_accum._numerics import kind_of
from optax_accum._optimizer import Flag, negate


class Shared(NamedTuple):
    """What all devices must know of a call, so that they take the same branch."""

    weight: float | jax.Array
    skips: int | jax.Array  # how many devices skip it
    skipped: Flag  # whether one does
    counted: Flag  # whether one does not
    emit: Flag


def share(
    axes: tuple[str, ...],
    weight: float | jax.Array,
    skip: Flag,
    emit: Flag,
    dtype: jnp.dtype,
) -> Shared:
    """Weight and decisions of all devices, by one reduction of three scalars."""
    if not axes:
        return Shared(weight, skip, skip, negate(skip), emit)
    is_known = not any(isinstance(x, jax.core.Tracer) for x in (weight, emit))
    if is_known and skip is False:
        return Shared(count_devices(axes) * weight, 0, False, True, emit)
    own = jnp.stack([jnp.asarray(x).astype(dtype) for x in (weight, skip, emit)])
    weight, skips, emits = jax.lax.psum(own, axes)
    is_counted = skips != count_devices(axes)
    return Shared(weight, skips, skips != 0, is_counted, emits != 0)


# -- What it must be given


def check_inside(call: str, axes: tuple[str, ...]) -> None:
    if not set(axes) <= manual_axes():
        raise ValueError(
            f"`accumulate(reduce_axes={axes})` must be used inside a `shard_map` over "
            f"these axes, got `{call}` inside one over {sorted(manual_axes())}; a step "
            "of `make_train_step` takes `reduce_axes` itself."
        )


def check_local(grads: Any, axes: tuple[str, ...]) -> None:
    """Gradients that JAX has summed over devices would be summed twice."""
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        summed = [axis for axis in axes if not varies(grad, axis)]
        if summed:
            raise ValueError(
                f"`accumulate(reduce_axes={axes}).update` must be given the gradients "
                f"of each device's own rows, got {kind_of(grad)} at "
                f"{jax.tree_util.keystr(path) or 'the top'}, which is the same on all "
                f"along {summed}: JAX has summed it; differentiate at "
                "`jax.lax.pcast(params, reduce_axes, to='varying')`."
            )
