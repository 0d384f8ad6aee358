"""Training in plain JAX, as one writes it who has no library for accumulation."""

import contextlib

import jax
import jax.numpy as jnp


@contextlib.contextmanager
def lenient():
    """As JAX comes: frameworks broadcast and mix dtypes as they like."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def train_by_hand(
    loss_fn, params, batch, optimizer, *, steps, groups=1, key_of=None, model_state=None
):
    """Parameters and model state after some steps, each on a mean over groups.

    Args:
      loss_fn: takes ``(params, rows, key, model_state)``, returns loss and new state.
      groups: how many strided groups of rows go through the model one after the other.
      key_of: maps step and group to the key that the loss gets.
    """
    opt_state = optimizer.init(params)
    grad_fn = jax.jit(jax.grad(loss_fn, has_aux=True))
    for step in range(steps):
        grads = []
        for i in range(groups):
            rows = jax.tree.map(lambda x, i=i: x[i::groups], batch)
            key = None if key_of is None else key_of(step, i)
            grad, model_state = grad_fn(params, rows, key, model_state)
            grads.append(grad)
        mean = jax.tree.map(lambda *g: sum(g) / groups, *grads)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, model_state


def stateless(loss_fn):
    """``loss_fn(params, batch)`` with the arguments of a loss with key and state."""

    def fun(params, batch, key, model_state):
        del key
        return loss_fn(params, batch), model_state

    return fun


def folded(key):
    """The keys that the micro-batches of each step are promised."""
    return lambda step, i: jax.random.fold_in(jax.random.fold_in(key, step), i)
