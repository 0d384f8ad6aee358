"""Statistics of a model: carried, averaged, and never those of the large batch.

BatchNorm couples the rows of a forward pass. Under accumulation it is ghost batch
normalization, of which the groups are the micro-batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_ULP
from losses import largest_relative_error, normal

import optax_accum
from optax_accum import Last, Mean

ROWS, FEATURES, N, MOMENTUM = 12, 4, 3, 0.9


def normalize(x):
    """BatchNorm of these rows, and their statistics."""
    mean, var = jnp.mean(x, axis=0, keepdims=True), jnp.var(x, axis=0, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5), (mean[0], var[0])


def move(statistics, observed):
    return jax.tree.map(
        lambda old, new: MOMENTUM * old + (1 - MOMENTUM) * new, statistics, observed
    )


def loss_fn(params, x, statistics):
    hidden, observed = normalize(x @ params["w"])
    loss = jnp.mean((hidden * params["scale"][None] - x) ** 2)
    rows = x.shape[0]
    weighted = jax.tree.map(lambda s: rows * s, observed)
    return loss, (move(statistics, observed), Mean(weighted, rows))


@pytest.fixture
def params():
    shapes = {"w": (FEATURES, FEATURES), "scale": (FEATURES,)}
    return {
        name: normal(i, *shape, dtype=np.float64)
        for i, (name, shape) in enumerate(shapes.items())
    }


@pytest.fixture
def x():
    return normal(7, ROWS, FEATURES, dtype=np.float64)


@pytest.fixture
def start():
    return jnp.zeros(FEATURES), jnp.ones(FEATURES)


def full_batch(params, x, groups):
    """One forward pass over all rows, normalized in strided groups."""
    hidden = x @ params["w"]
    parts = [normalize(hidden[i::groups])[0] for i in range(groups)]
    hidden = jnp.stack(parts, axis=1).reshape(x.shape)  # back in the order of the rows
    return jnp.mean((hidden * params["scale"][None] - x) ** 2)


@pytest.mark.slow
def test_the_gradient_is_that_of_ghost_batch_norm(x64, params, x, start):
    """float64: a few hundred roundings of 1e-16. The twin is full-batch BatchNorm."""
    value_and_grad = optax_accum.value_and_grad(
        loss_fn, num_microbatches=N, has_aux=True, carry_argnum=2
    )
    (loss, _), grads = value_and_grad(params, x, start)
    ghost = jax.value_and_grad(full_batch)(params, x, N)
    assert largest_relative_error((loss, grads), ghost) <= 1e-12
    full = jax.grad(full_batch)(params, x, 1)
    assert largest_relative_error(grads, full) > 0.01


def test_statistics_are_carried_in_order(x64, params, x, start):
    value = optax_accum.value(loss_fn, num_microbatches=N, has_aux=True, carry_argnum=2)
    _, (statistics, _) = value(params, x, start)
    expected = start
    for i in range(N):
        hidden = np.asarray(x[i::N] @ params["w"])
        expected = move(expected, (hidden.mean(0), hidden.var(0)))
    assert largest_relative_error(statistics, expected) <= 1e-12


@pytest.mark.parametrize("split", [{"num_microbatches": N}, {"microbatch_size": 5}])
def test_averaged_statistics(x64, params, x, start, split):
    """The mean is that of the large batch; the variance lacks what lies between."""
    value = optax_accum.value(loss_fn, has_aux=True, carry_argnum=2, **split)
    _, (_, (mean, var)) = value(params, x, start)
    hidden = np.asarray(x @ params["w"])
    assert largest_relative_error(mean, hidden.mean(0)) <= 1e-12
    assert np.all(var < 0.99 * hidden.var(0))


def test_statistics_of_four_numbers():
    """https://github.com/andreped/GradientAccumulator/issues/6 : worked out by hand."""
    rows = jnp.array([0.0, 4.0, 2.0, 10.0])  # micro-batches (0, 2) and (4, 10)

    def loss_fn(w, x, statistics):
        observed = jnp.mean(x), jnp.var(x)
        aux = {"average": Mean(observed, 1.0), "last": Last(observed)}
        return jnp.mean(w * x), (move(statistics, observed), aux)

    def run(n):
        value = optax_accum.value(
            loss_fn, num_microbatches=n, has_aux=True, carry_argnum=2
        )
        _, (statistics, aux) = value(1.0, rows, (0.0, 1.0))
        return *statistics, *aux["average"], *aux["last"]

    tolerance = {"rtol": 8 * F32_ULP}
    np.testing.assert_allclose(run(1), [0.4, 2.3, 4, 14, 4, 14], **tolerance)
    np.testing.assert_allclose(run(2), [0.79, 1.8, 4, 5, 7, 9], **tolerance)


def test_the_average_of_new_statistics():
    """https://github.com/keras-team/keras/pull/18948 : 0.25, and 0.9049 in sequence."""

    def loss_fn(w, x, mean, start):
        def new(old):
            return MOMENTUM * old + (1 - MOMENTUM) * jnp.mean(x)

        return jnp.mean(w * x), (new(mean), Mean(new(start), 1.0))

    value = optax_accum.value(loss_fn, num_microbatches=4, has_aux=True, carry_argnum=2)
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    _, (in_sequence, averaged) = value(1.0, x, 0.0, 0.0)
    np.testing.assert_allclose(in_sequence, 0.9049, rtol=8 * F32_ULP)
    np.testing.assert_allclose(averaged, 0.25, rtol=8 * F32_ULP)


# -- Keys


def test_one_microbatch_folds_as_by_hand():
    key, x = jax.random.key(1), normal(0, 8)

    def loss_fn(w, x, key):
        return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), w * x, 0.0))

    grad = optax_accum.grad(loss_fn, rng_argnums=2)(1.0, x, key)
    assert grad == jax.grad(loss_fn)(1.0, x, jax.random.fold_in(key, 0))


def test_the_remainder_has_a_key_of_its_own():
    def loss_fn(w, x, key):
        return jnp.mean(w * x), optax_accum.Stack(jax.random.normal(key))

    value = optax_accum.value(loss_fn, microbatch_size=3, has_aux=True, rng_argnums=2)
    _, drawn = value(1.0, jnp.ones(8), jax.random.key(1))
    keys = [jax.random.fold_in(jax.random.key(1), i) for i in range(3)]
    np.testing.assert_array_equal(drawn, [jax.random.normal(key) for key in keys])
