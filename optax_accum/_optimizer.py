"""Stepping an optimizer that is inside ours: its types kept, a branch where needed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._numerics import cast_as, find_difference, is_array, keep_types

Flag = bool | jax.Array  # a bool where it is known while tracing


def update_inner(
    inner: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    incoming: Any,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """``inner.update`` with gradients that may be wider than the incoming ones.

    A mean in float32 meets bfloat16 moments and parameters in there: a mix that the
    user did not write, so that strict promotion must not refuse it. Some optimizers do
    refuse it, for their own branches then differ in dtype (``optax.novograd``,
    ``optax.apply_if_finite``); they receive the mean rounded to what is incoming.

    Args:
      inner: the optimizer.
      grads: the gradients.
      incoming: a tree that has the dtypes in which `inner` alone would receive them.
      state: its state, whose types are kept.
      params: the parameters, if there are any.
      extra_args: what else `inner` receives.

    Returns:
      Updates and state.
    """

    def update(grads):
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(grads, state, params, **extra_args)

    rounded = cast_as(grads, incoming)
    if find_difference(rounded, grads):
        try:
            jax.eval_shape(lambda: update(grads)[0])
        except TypeError:
            grads = rounded
    updates, new_state = update(grads)
    return updates, keep_types(new_state, state)


def step_if(
    steps: Flag,
    step: Callable[[], tuple[optax.Updates, optax.OptState]],
    grads: optax.Updates,
    outgoing: optax.Updates,
    state: optax.OptState,
) -> tuple[optax.Updates, optax.OptState]:
    """``step()`` where `steps`, else updates of -0.0 and the old state.

    Minus zero is the neutral element of addition, so that parameters keep their bits.

    Args:
      steps: shape ``()``.
      step: returns updates and state.
      grads: what the updates answer to; they say where zeros live.
      outgoing: the dtypes of the updates.
      state: what is kept without a step. Its leaves that are no arrays are kept anyway:
        they cannot pass a branch of ``lax.cond``.
    """

    def arrays(tree):
        return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)

    def true_fn():
        updates, new_state = step()
        return cast_as(updates, outgoing), arrays(new_state)

    def false_fn():
        # zeros_like: the sharding of a gradient, and the axes over which it varies.
        zeros = jax.tree.map(lambda x, g: -jnp.zeros_like(g, x.dtype), outgoing, grads)
        return zeros, arrays(state)

    updates, new_arrays = cond(steps, true_fn, false_fn)
    return updates, keep_types(new_arrays, state)


def cond(pred: Flag, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """``lax.cond``, except that what is known is decided now.

    Outside a trace ``lax.cond`` would compile both branches anew at every call.
    """
    if isinstance(pred, jax.core.Tracer):
        return jax.lax.cond(pred, true_fn, false_fn)
    return true_fn() if pred else false_fn()
