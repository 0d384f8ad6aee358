"""Ready-made decisions to leave a micro-batch out: `accumulate(..., skip_fn=...)`."""

from typing import Protocol

import jax
import jax.numpy as jnp
import optax

from optax_accum._checks import check_scalar
from optax_accum._numerics import global_norm, is_numeric, widen


class SkipFn(Protocol):
    """Decides whether a micro-batch is left out of its window.

    Examples:
      >>> def skip_zeros(grads, params):
      ...     return jnp.all(jax.flatten_util.ravel_pytree(grads)[0] == 0)
      >>> tx = optax_accum.accumulate(optax.sgd(1.0), 2, skip_fn=skip_zeros)
      >>> grads = {"w": jnp.zeros(3)}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(state.skipped)
      1
    """

    def __call__(
        self, grads: optax.Updates, params: optax.Params | None, /
    ) -> jax.Array:
        """Called at every call of `update`, traced, before the gradients are added.

        Args:
          grads: the gradients of this micro-batch, in the dtypes they came in.
          params: what `update` was given, or None.

        Returns:
          True to skip, a scalar of dtype bool.
        """
        ...


def skip_nonfinite(
    grads: optax.Updates, params: optax.Params | None = None
) -> jax.Array:
    """Skips a micro-batch whose gradient holds a NaN or an infinity.

    Args:
      grads: the gradients of one micro-batch, any pytree.
      params: not looked at.

    Returns:
      True if any entry of any leaf is not finite. Shape ``()``, bool.

    Examples:
      >>> bool(optax_accum.skip_nonfinite({"w": jnp.array([1.0, jnp.nan])}))
      True
      >>> bool(optax_accum.skip_nonfinite({"w": jnp.array([1.0, 2.0])}))
      False
    """
    del params
    numbers = [leaf for leaf in jax.tree.leaves(grads) if is_numeric(leaf)]
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in widen(numbers)]
    return jnp.logical_not(jnp.all(jnp.array(finite, bool)))


def skip_norm_above(max_norm: float) -> SkipFn:
    """Skips a micro-batch whose gradient is longer than `max_norm`.

    The norm is over all leaves together, summed in at least float32. A norm that is
    NaN is not known to be within bounds, so that micro-batch is skipped too.

    Args:
      max_norm: the largest norm that still counts, positive.

    Returns:
      A `skip_fn` for `accumulate`.

    Raises:
      TypeError: `max_norm` is no real scalar.
      ValueError: `max_norm` is not positive.

    Examples:
      >>> skip_fn = optax_accum.skip_norm_above(4.0)
      >>> bool(skip_fn(jnp.array([3.0, 4.0]), None))
      True
    """
    check_scalar("skip_norm_above(max_norm)", max_norm, "a real number")
    if not max_norm > 0:
        raise ValueError(
            f"`skip_norm_above(max_norm=...)` must be positive, got {max_norm!r}; a "
            "bound of zero would skip every micro-batch."
        )

    def skip_fn(grads, params=None):
        del params
        norm = global_norm(grads)
        return jnp.logical_not(norm <= jnp.asarray(max_norm, norm.dtype))

    return skip_fn
