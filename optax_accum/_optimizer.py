"""Stepping an optimizer that is inside ours: its types kept, a branch where needed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._numerics import (
    cast_as,
    find_difference,
    is_array,
    keep_types,
    widen,
)

Flag = bool | jax.Array  # a bool where it is known while tracing


def negate(flag: Flag) -> Flag:
    return not flag if isinstance(flag, bool) else jnp.logical_not(flag)


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


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """``optax.apply_updates``, but of the types of `params`.

    A narrow parameter and a wide update are added wide, and rounded once.
    """
    with jax.numpy_dtype_promotion("standard"):
        return cast_as(optax.apply_updates(widen(params), updates), params)


def step_if(
    steps: Flag,
    step: Callable[[], tuple[Any, optax.OptState]],
    stand: Callable[[], Any],
    state: optax.OptState,
) -> tuple[Any, optax.OptState]:
    """``step()`` where `steps`, else ``stand()`` and the old state.

    What goes in and comes out may be in the same memory: parameters cross a branch for
    nothing, where their updates need room.

    Args:
      steps: shape ``()``.
      step: returns something and the new state of the optimizer.
      stand: returns the same thing of a call without a step, of the same types.
      state: what is kept without a step. Its leaves that are no arrays are kept anyway:
        they cannot pass a branch of ``lax.cond``.
    """

    def arrays(tree):
        return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)

    def true_fn():
        result, new_state = step()
        return result, arrays(new_state)

    def false_fn():
        return stand(), arrays(state)

    result, new_arrays = cond(steps, true_fn, false_fn)
    return result, keep_types(new_arrays, state)


def cond(pred: Flag, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """``lax.cond``, except that what is known is decided now.

    Outside a trace ``lax.cond`` would compile both branches anew at every call.
    """
    if isinstance(pred, jax.core.Tracer):
        return jax.lax.cond(pred, true_fn, false_fn)
    return true_fn() if pred else false_fn()
