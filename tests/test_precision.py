"""In what the sums are kept, and what it costs if they are narrow."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import feed, types
from losses import normal

import optax_accum
from optax_accum import Sum, accumulate, mean

ENTRIES = 20_000


def microgradients(count):
    """Entries of mean 0, already rounded to bfloat16."""
    rng = np.random.default_rng(2)
    grads = rng.standard_normal((count, ENTRIES)).astype(np.float32)
    return jnp.asarray(grads.astype(ml_dtypes.bfloat16))


def sum_error(grads, **options):
    """Relative error of the sum, in the Euclidean norm, as the scan makes it."""

    def loss_fn(w, rows):
        return jnp.mean(rows @ w)

    w = jnp.zeros(ENTRIES, jnp.bfloat16)
    grad_fn = optax_accum.grad(loss_fn, num_microbatches=len(grads), **options)
    total = np.asarray(jax.jit(grad_fn)(w, grads), np.float64) * len(grads)
    exact = np.asarray(grads, np.float64).sum(0)
    return np.linalg.norm(total - exact) / np.linalg.norm(exact)


# Relative errors of the sum of K gradients: in bfloat16, and in float32 that is rounded
# to bfloat16 at the end.
PLAIN = {4: 2.7e-3, 16: 5.1e-3, 64: 9.6e-3, 256: 1.9e-2}
ROUNDED = 1.7e-3


@pytest.mark.slow
@pytest.mark.parametrize("count", PLAIN)
def test_why_sums_are_in_float32(count):
    """The error of a bfloat16 sum grows with the square root of K."""
    grads = microgradients(count)
    plain = sum_error(grads, accumulator_dtype=jnp.bfloat16)
    np.testing.assert_allclose(plain, PLAIN[count], rtol=0.2)  # of another sample

    # By default the one rounding is that of the gradient returned; without it, a
    # random walk of K roundings of 2^-24.
    np.testing.assert_allclose(sum_error(grads), ROUNDED, rtol=0.2)
    assert sum_error(grads, accumulator_dtype=jnp.float32) <= count**0.5 * 2.0**-24


@pytest.mark.slow
@pytest.mark.parametrize("count", PLAIN)
def test_compensated_sums_end_at_one_rounding(count):
    """Beside the plain ones: 16 bits and the 16 that were rounded off."""
    grads = microgradients(count)
    options = {"accumulator_dtype": jnp.bfloat16, "compensated": True}
    np.testing.assert_allclose(sum_error(grads, **options), ROUNDED, rtol=0.2)
    assert sum_error(grads, **options) < 0.7 * PLAIN[count]

    # As the optimizer gets it, not rounded to bfloat16: each of K additions rounds the
    # 8 bits of an error that is itself 2^-9 of the sum.
    state = accumulate(optax.identity(), count, **options).init(grads[0])
    update = jax.jit(accumulate(optax.identity(), count, **options).update)
    update_of_window = None
    for grad in grads:
        update_of_window, state = update(grad.astype(jnp.float32), state)
    exact = np.asarray(grads, np.float64).mean(0)
    error = np.linalg.norm(update_of_window - exact) / np.linalg.norm(exact)
    assert error <= count**0.5 * 2.0**-17


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compensation_is_there_in_the_compiled_program(dtype):
    """A cast there and back may be left out, a rounding that is asked for may not."""

    def loss_fn(w, x):
        return jnp.mean(w * x)

    grad_fn = optax_accum.grad(
        loss_fn, num_microbatches=64, accumulator_dtype=dtype, compensated=True
    )
    w, x = jnp.zeros((), dtype), jnp.array([1.0] + [2.0**-12] * 63, dtype)
    text = jax.jit(grad_fn).lower(w, x).compile().as_text()
    assert "reduce-precision(" in text
    tx = accumulate(optax.identity(), 2, accumulator_dtype=dtype, compensated=True)
    update = jax.jit(tx.update).lower(w, tx.init(w)).compile()
    assert "reduce-precision(" in update.as_text()

    # Of 1 and 63 times 2^-12, which a narrow sum loses one by one.
    exact = (1 + 63 * 2.0**-12) / 64
    ulp = float(jnp.finfo(dtype).eps)
    assert abs(float(jax.jit(grad_fn)(w, x)) / exact - 1) <= ulp / 2
    plain = optax_accum.grad(loss_fn, num_microbatches=64, accumulator_dtype=dtype)
    assert float(jax.jit(plain)(w, x)) == 1 / 64


def test_compensated_state_is_twice_16_bits_and_stable():
    tx = accumulate(
        optax.adam(0.1), 3, accumulator_dtype=jnp.bfloat16, compensated=True
    )
    params = {"w": jnp.ones((5, 4), jnp.bfloat16), "z": jnp.ones(3, jnp.complex64)}
    state = tx.init(params)
    leaves = jax.tree.leaves(state.acc_grads["w"])
    assert [leaf.dtype for leaf in leaves] == [jnp.bfloat16] * 2
    assert state.acc_grads["z"].dtype == jnp.complex64
    grads = jax.tree.map(lambda p: p * 0.5, params)

    def body(state, _):
        return tx.update(grads, state, params)[1], None

    last, _ = jax.lax.scan(body, state, None, length=7)
    assert types(last) == types(state)
    assert (last.mini_step, last.gradient_step) == (1, 2)


def test_a_compensated_window_keeps_nothing_of_the_last():
    tx = accumulate(optax.sgd(1.0), 2, accumulator_dtype=jnp.bfloat16, compensated=True)
    grads = [jnp.float32(g) for g in (1.0, 2.0**-10, 3.0, 5.0, jnp.nan, 7.0)]
    weights = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    updates, _ = feed(tx, grads, jnp.float32(0), weight=weights)
    assert updates == [0, -(1 + 2.0**-10) / 2, 0, -4, 0, -7]


# -- dtypes

DTYPES = ["float32", "float64", "bfloat16", "float16", "complex64", "complex128"]


def sum_dtype_of(dtype):
    """DESIGN: a leaf's own if it has 32 bits or is complex, else float32."""
    return "float32" if jnp.dtype(dtype).itemsize < 4 else dtype


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_the_scan(dtype, x64):
    w = normal(0, 3, dtype=np.float64).astype(dtype)
    x = normal(1, 8, 3, dtype=np.float64)

    def loss_fn(w, x):
        squares = jnp.abs(w[None]) ** 2
        products = squares * x.astype(squares.dtype)
        return mean(products, where=x > 0)

    expected = jax.grad(lambda w: loss_fn(w, x).value)(w)
    real = jnp.finfo(sum_dtype_of(dtype)).dtype
    for n in (1, 4):
        options = {"num_microbatches": n}
        loss, grads = optax_accum.value_and_grad(loss_fn, **options)(w, x)
        assert (grads.dtype, loss.dtype) == (jnp.dtype(dtype), real)
        # The entries have the roundings of the function's own dtype.
        tolerance = 32 * float(jnp.finfo(dtype).eps) * np.max(np.abs(expected))
        np.testing.assert_allclose(
            np.asarray(grads, np.complex128),
            np.asarray(expected, np.complex128),
            atol=tolerance,
        )
        wide = optax_accum.grad(loss_fn, accumulator_dtype="float64", **options)(w, x)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        assert wide.dtype == (jnp.dtype(dtype) if is_complex else jnp.float64)


REAL = ["float32", "float64", "bfloat16", "float16"]
PAIRS = [*itertools.product(REAL, REAL), *itertools.product(DTYPES[4:], DTYPES[4:])]


@pytest.mark.slow
@pytest.mark.parametrize(("param", "grad"), PAIRS)
def test_dtypes_of_the_transformation(param, grad, x64):
    """Parameters x gradients: sums follow the parameters, updates the gradients."""
    params = jnp.ones(3, param)
    grads = [jnp.full(3, g, grad) for g in (1.0, 2.0, 6.0)]
    tx = accumulate(optax.identity(), 3)
    state = tx.init(params)
    assert state.acc_grads.dtype == sum_dtype_of(param)
    updates, last = feed(tx, grads, params)
    assert all(update.dtype == jnp.dtype(grad) for update in updates)
    assert types(last) == types(state)
    np.testing.assert_array_equal(updates[-1], jnp.full(3, 3.0, grad))


@pytest.mark.slow
def test_fractional_weights_in_float64(x64):
    """Exact to 1e-12: ten thousand roundings of 1e-16."""
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal(50), rng.random(50)

    def loss_fn(w, batch):
        return mean(w * batch["x"], weights=batch["weights"])

    batch = {"x": jnp.asarray(x), "weights": jnp.asarray(weights)}
    expected = np.average(x, weights=weights)
    for split in ({}, {"num_microbatches": 50}, {"microbatch_size": 7}):
        grad = optax_accum.grad(loss_fn, **split)(jnp.float64(1), batch)
        np.testing.assert_allclose(grad, expected, rtol=1e-12)
    updates, _ = feed(
        accumulate(optax.sgd(1.0), 50), list(x), jnp.float64(0), weight=list(weights)
    )
    np.testing.assert_allclose(updates[-1], -expected, rtol=1e-12)


@pytest.mark.parametrize("terms", [1, 2])
def test_gradients_of_16_bits_stay_in_range(terms):
    """Of many tokens in float16: cotangents are as small as in a plain mean.

    Not divided before the end, 4096 times 32 would be infinite.
    """

    def loss_fn(w, x):
        total = mean((w * x).astype(jnp.float32), where=x > 0)
        return sum([total] * terms)

    w, x = jnp.ones((), jnp.float16), jnp.full((8, 4096), 32, jnp.float16)
    for n in (1, 8):
        grad = jax.jit(optax_accum.grad(loss_fn, num_microbatches=n))(w, x)
        # One rounding to float16, after sums whose roundings are all relative.
        rtol = 8 * float(jnp.finfo("float16").eps)
        np.testing.assert_allclose(grad, 32 * terms, rtol=rtol)


def test_one_microbatch_is_not_rounded_by_compensated_sums():
    """There is nothing to sum: the optimizer gets the gradient as it is."""
    optimizer = optax.sgd(1.0)

    def loss_fn(w, x):
        return jnp.mean(w * x)

    for n in (1, 2):
        step = optax_accum.make_train_step(
            loss_fn,
            optimizer,
            num_microbatches=n,
            accumulator_dtype="bfloat16",
            compensated=True,
        )
        state = optax_accum.init_train_state(0.0, optimizer)
        state, _ = step(state, jnp.full(4, 1.2345678))
        # 16 bits of the sum and of what was rounded off
        np.testing.assert_allclose(-state.params, 1.2345678, rtol=2.0**-16)


@pytest.mark.parametrize("compensated", [False, True])
def test_what_is_infinite_stays_infinite(compensated):
    tx = accumulate(
        optax.sgd(1.0), 3, accumulator_dtype="bfloat16", compensated=compensated
    )
    updates, _ = feed(tx, [1.0, np.inf, 2.0], jnp.float32(0))
    assert updates[-1] == -np.inf


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_python_numbers_follow_the_dtype_of_a_term(n, x64):
    """As in ``jnp.mean(x) + 0.5``, also where JAX has doubles."""
    x = normal(0, 8)
    losses = [
        lambda w, x: mean(w * x) + 0.5,
        lambda w, x: 1 - mean(w * x),
        lambda w, x: mean(w * x) + True + 0.5 * Sum(jnp.sum(x)),
        lambda w, x: mean(w * x) + mean((w * x).astype(jnp.float64)),
    ]
    dtypes = [
        optax_accum.value(loss_fn, num_microbatches=n)(jnp.float32(1), x).dtype
        for loss_fn in losses
    ]
    assert dtypes == [jnp.float32, jnp.float32, jnp.float32, jnp.float64]
    for loss_fn in losses:
        grad = optax_accum.grad(loss_fn, num_microbatches=n)(jnp.float32(1), x)
        expected = jax.grad(lambda w, f=loss_fn: f(w, x).value)(jnp.float32(1))
        np.testing.assert_allclose(grad, expected, rtol=1e-5)  # 8 terms that cancel
