"""The window: how many calls it has, how a call is added, what they come to."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_accum._checks import check_count
from optax_accum._numerics import add, divide, is_none, kind_of, scale, sum_dtype
from optax_accum._sums import add_to_sum, read_sum, term_dtype

Reduction = Literal["mean", "sum"]


def check_every_k(every_k: Any) -> int | Callable:
    if isinstance(every_k, optax.GradientTransformation):
        raise TypeError(
            "`accumulate(every_k=...)` must be an integer or a schedule, got a "
            "gradient transformation; the optimizer comes first: "
            "`accumulate(optimizer, every_k)`."
        )
    if callable(every_k):
        return every_k
    return check_count("accumulate(every_k=...)", every_k)


def window_length(every_k: int | Callable, gradient_step: jax.Array) -> ArrayLike:
    if not callable(every_k):
        return every_k
    length = jnp.asarray(every_k(gradient_step))
    if length.shape != () or not jnp.issubdtype(length.dtype, jnp.integer):
        raise TypeError(
            "`accumulate(every_k=schedule)` must return an integer scalar, got "
            f"{kind_of(length)}; round an optax schedule: "
            "`lambda step: jnp.rint(schedule(step)).astype(jnp.int32)`."
        )
    return length.astype(jnp.int32)


class Window(NamedTuple):
    """What calls have added up; or one call, or the means of them, in the same form."""

    grads: Any
    weight: float | jax.Array  # a float where it is known while tracing
    value: Any  # a scalar, or None where there is none


def add_call(sums: Window, call: Window, weight: ArrayLike) -> Window:
    """`sums` with `call` added, or the first of a window where nothing counts as yet.

    Selected, not multiplied: a call of weight 0 adds nothing even if it is NaN, and
    nothing of the last window stays.

    Args:
      sums: the window.
      call: on this device.
      weight: of the call, on all devices that share it.
    """
    counts, is_open = call.weight != 0, sums.weight != 0

    def stood(total):
        return jnp.where(is_open, total, jnp.zeros_like(total))

    def add_weighted(term, total):
        total = jax.tree.map(stood, total)
        if term is None:  # and then `total` may be a tree
            return total
        _check_shape(term, total)
        added = add_to_sum(total, scale(term, call.weight, term_dtype(total)))
        if counts is True:
            return added
        return jax.tree.map(lambda a, t: jnp.where(counts, a, t), added, total)

    _check_structure(call.grads, sums.grads)
    return Window(
        grads=jax.tree.map(add_weighted, call.grads, sums.grads, is_leaf=is_none),
        weight=add(jnp.asarray(sums.weight), weight),
        value=add_weighted(call.value, sums.value),
    )


def reduce_window(window: Window, call: Window, reduction: Reduction) -> Window:
    """What the wrapped optimizer receives when `call` closes `window`.

    None where the call has no gradient. The value is averaged in any case.
    """

    def reduced(grad, total):
        if grad is None:
            return None
        total = read_sum(total)
        return divide(total, window.weight) if reduction == "mean" else total

    return Window(
        grads=jax.tree.map(reduced, call.grads, window.grads, is_leaf=is_none),
        weight=window.weight,
        value=None if call.value is None else divide(window.value, window.weight),
    )


def reduce_call(call: Window, reduction: Reduction) -> Window:
    """The same for a window of one call: its mean is the call, to the last bit."""

    def scaled(grad):
        return scale(grad, call.weight, sum_dtype(jnp.result_type(grad)))

    if reduction == "mean":
        return call
    return call._replace(grads=jax.tree.map(scaled, call.grads))


def _check_shape(term: Any, total: Any) -> None:
    seen = None if total is None else read_sum(total)
    # Of a node, such as a pair of parameters with one gradient, None.
    if getattr(seen, "shape", None) != jnp.shape(term):
        raise ValueError(
            "`accumulate(...).update(updates, state)` must be given gradients of the "
            f"shapes that `init` saw, {kind_of(seen)}, got {kind_of(term)}; make the "
            "state with `init(params)` of these parameters."
        )


def _check_structure(grads: Any, sums: Any) -> None:
    try:
        jax.tree.map(lambda *_: None, grads, sums, is_leaf=is_none)
    except ValueError as error:
        raise ValueError(
            "`accumulate(...).update(updates, state)` must be given gradients of the "
            f"structure that `init` saw, {jax.tree.structure(sums)}, got "
            f"{jax.tree.structure(grads)}; make the state with `init(params)` of these "
            "parameters."
        ) from error
