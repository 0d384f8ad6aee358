"""Exactly the large batch's loss and gradient, whatever the loss returns.

The oracle is `jax.grad` of the unsplit loss. Twins, in which micro-batches are averaged
plainly, must fail.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_ULP, auto_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from losses import LOSSES, ROWS, largest_relative_error, normal, unsplit

import optax_accum
from optax_accum import Mean, Sum, mean

COUNTS = [1, 2, 3, 4, ROWS]


def slices(batch, count):
    """Contiguous micro-batches: any split has the same mean."""
    return [jax.tree.map(lambda x, i=i: x[i::count], batch) for i in range(count)]


def plain_average(loss_fn, params, batch, count):
    """What everybody writes: the mean over micro-batches of each one's own mean."""
    grad_fn = jax.jit(jax.grad(unsplit(loss_fn)))
    grads = [grad_fn(params, part) for part in slices(batch, count)]
    return jax.tree.map(lambda *g: sum(g) / count, *grads)


# -- The grid


def check_grid(name, count, dtype, limit):
    make, options = LOSSES[name]
    loss_fn, params, batch = make(dtype)
    expected = jax.jit(jax.value_and_grad(unsplit(loss_fn)))(params, batch)
    split = options | {"num_microbatches": count}
    actual = jax.jit(optax_accum.value_and_grad(loss_fn, **split))(params, batch)
    assert largest_relative_error(actual, expected) <= limit
    value = jax.jit(optax_accum.value(loss_fn, **split))(params, batch)
    assert largest_relative_error(value, expected[0]) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", LOSSES)
def test_grid_in_float32(name, count):
    """5e-6: some dozens of roundings of 6e-8 on the way, in either program."""
    check_grid(name, count, np.float32, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", LOSSES)
def test_grid_in_float64(name, count, x64):
    """1e-12: thousands of roundings of 1e-16."""
    check_grid(name, count, np.float64, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language model", "regression"])
def test_twin_plain_averaging_is_wrong(name):
    loss_fn, params, batch = LOSSES[name][0](np.float32)
    expected = jax.jit(jax.grad(unsplit(loss_fn)))(params, batch)
    naive = plain_average(loss_fn, params, batch, 4)
    assert largest_relative_error(naive, expected) > 0.01


@pytest.mark.slow
def test_twin_pairs_torn_apart_are_wrong():
    loss_fn, params, batch = LOSSES["siamese"][0](np.float32)
    expected = jax.grad(unsplit(loss_fn))(params, batch)
    torn = optax_accum.grad(loss_fn, num_microbatches=4)(params, batch)
    assert largest_relative_error(torn, expected) > 0.01


def test_twin_unequal_rows_averaged_plainly_are_wrong():
    loss_fn, params, batch = LOSSES["image classifier"][0](np.float32)
    grad_fn = jax.jit(jax.grad(loss_fn))
    expected = grad_fn(params, batch)
    parts = [jax.tree.map(lambda x, s=s: x[s], batch) for s in (slice(9), slice(9, 12))]
    grads = [grad_fn(params, part) for part in parts]
    naive = jax.tree.map(lambda *g: sum(g) / 2, *grads)
    assert largest_relative_error(naive, expected) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5, 7, 11, 50])
@pytest.mark.parametrize("name", LOSSES)
def test_ragged(name, size):
    make, options = LOSSES[name]
    loss_fn, params, batch = make(np.float32)
    size *= options.get("group_size", 1)
    expected = jax.jit(jax.value_and_grad(unsplit(loss_fn)))(params, batch)
    split = options | {"microbatch_size": size}
    actual = jax.jit(optax_accum.value_and_grad(loss_fn, **split))(params, batch)
    assert largest_relative_error(actual, expected) <= 5e-6  # as in the grid


def test_a_ragged_16_bit_loss_is_weighted_exactly():
    """2 of 5 rows weigh 0.4, which 8 bits cannot say: so the gradient is scaled."""

    def loss_fn(w, x):
        return jnp.mean(w * x).astype(jnp.bfloat16)

    x = jnp.array([0.0] * 5 + [1.0] * 2)
    grad_fn = optax_accum.grad(loss_fn, microbatch_size=5)
    # Rounded once, to bfloat16, in the cotangent of each micro-batch's own mean.
    np.testing.assert_allclose(grad_fn(jnp.float32(1), x), 2 / 7, rtol=4 * F32_ULP)


# -- One number, worked out by hand


def token_loss(w, batch):
    """Means of the gradients: the total over the tokens that count."""
    return Mean(w * jnp.sum(batch["total"]), jnp.sum(batch["weight"]))


def rows(totals, weights):
    return {"total": jnp.array(totals), "weight": jnp.array(weights)}


@pytest.mark.parametrize(
    ("totals", "weights", "right", "mean_of_means"),
    [
        # https://github.com/marin-community/levanter/pull/842
        ([10.0, 0.0], [1.0, 9.0], 1.0, 5.0),
        # https://github.com/google/tunix/pull/1744
        ([1.0, 3.0], [0.5, 1.5], 2.0, 2.0),
        # https://huggingface.co/blog/gradient_accumulation
        ([3.0, 9.0], [1.0, 9.0], 1.2, 2.0),
        # A micro-batch in which nothing counts.
        ([0.0, 8.0], [0.0, 4.0], 2.0, None),
    ],
)
def test_token_weighted_means(totals, weights, right, mean_of_means):
    batch = rows(totals, weights)
    loss, grad = optax_accum.value_and_grad(token_loss, num_microbatches=2)(1.0, batch)
    np.testing.assert_allclose([loss, grad], right, rtol=2 * F32_ULP)
    if mean_of_means is not None:
        naive = plain_average(token_loss, jnp.float32(1), batch, 2)
        np.testing.assert_allclose(naive, mean_of_means, rtol=2 * F32_ULP)


@pytest.mark.parametrize("split", [{}, {"num_microbatches": 2}])
def test_tokens_are_counted_over_devices_too(split):
    """https://github.com/huggingface/transformers/issues/37474 : 1, and not the mean
    over devices of the mean over their own tokens, which is 2.
    """
    batch = rows([8.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 5.0])
    mesh = auto_mesh((2,), ("data",))
    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    value_and_grad = jax.jit(optax_accum.value_and_grad(token_loss, **split))
    assert value_and_grad(1.0, sharded) == (1.0, 1.0)

    halves = [jax.tree.map(lambda x, s=s: x[s], batch) for s in (slice(2), slice(2, 4))]
    alone = [jax.grad(unsplit(token_loss))(1.0, half) for half in halves]
    assert sum(alone) / 2 == 2.0


def test_the_error_of_mean_of_means_is_a_covariance():
    """L' - L = -Cov_k(n_k, l_k) / mean(n_k), l_k the mean loss of micro-batch k."""
    losses, mask = normal(0, 12, 6), np.random.default_rng(1).random((12, 6)) < 0.4
    counts = [mask[i::3].sum() for i in range(3)]
    means = [np.asarray(losses)[i::3][mask[i::3]].mean() for i in range(3)]

    def loss_fn(w, batch):
        return w * mean(batch["losses"], where=batch["mask"])

    batch = {"losses": losses, "mask": jnp.asarray(mask)}
    right = optax_accum.value(loss_fn, num_microbatches=3)(1.0, batch)
    error = -np.cov(counts, means, bias=True)[0, 1] / np.mean(counts)
    assert abs(error) > 0.01
    # Sums of 72 terms of size 1 in float32.
    np.testing.assert_allclose(np.mean(means) - right, error, atol=72 * F32_ULP)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_who_divides(count):
    """https://github.com/AI-Hypercomputer/maxtext/pull/3040 : nobody but the class."""
    batch = rows(list(map(float, range(1, 9))), [1.0] * 8)
    actual = optax_accum.value_and_grad(token_loss, num_microbatches=count)(1.0, batch)
    assert actual == (4.5, 4.5)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_auxiliary_term_keeps_its_strength(count):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3359 : N times too strong, and
    https://github.com/huggingface/trl/pull/6083 : N times too weak.
    """

    def loss_fn(w, batch):
        router = mean(0.5 * w * jnp.ones(batch["total"].shape))
        return token_loss(w, batch) + router

    batch = rows([3.0, 1.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0])
    actual = optax_accum.value_and_grad(loss_fn, num_microbatches=count)(1.0, batch)
    assert actual == (1.5, 1.5)


def test_a_sum_is_added_up():
    """A loss that already divides by what it knows of the whole batch."""

    def loss_fn(w, batch, count):
        return Sum(jnp.sum(w * batch["total"]) / count)

    batch = rows([3.0, 1.0, 3.0, 1.0], [2.0] * 4)
    for split in ({"num_microbatches": n} for n in (1, 2, 4)):
        assert optax_accum.grad(loss_fn, **split)(1.0, batch, 8.0) == 1.0
    assert optax_accum.grad(loss_fn, microbatch_size=3)(1.0, batch, 8.0) == 1.0


# -- What weighs nothing


@pytest.mark.slow
def test_rows_of_padding_and_nan():
    """Neither what is masked nor a micro-batch without weight leaves a trace."""

    def loss_fn(w, batch):
        return mean((w * batch["x"]) ** 2, where=batch["mask"])

    x = jnp.array([[1.0, jnp.nan], [jnp.nan, jnp.inf], [2.0, 3.0], [jnp.nan, 4.0]])
    mask = jnp.array([[True, False], [False, False], [True, True], [False, True]])
    batch = {"x": x, "mask": mask}

    # In NumPy, of what counts alone: x of masked entries is replaced, for the gradient
    # of a NaN that is not selected is NaN in jnp.mean too.
    clean = batch | {"x": jnp.where(mask, x, 0.0)}
    expected = (1 + 4 + 9 + 16) / 4
    for split in ({"num_microbatches": 4}, {"num_microbatches": 2}, {}):
        loss, grad = optax_accum.value_and_grad(loss_fn, **split)(1.0, clean)
        assert (loss, grad) == (expected, 2 * expected)
        assert optax_accum.value(loss_fn, **split)(1.0, batch) == expected


@pytest.mark.parametrize("split", [{}, {"num_microbatches": 2}, {"microbatch_size": 3}])
def test_a_window_in_which_nothing_counts(split):
    batch = rows([jnp.nan, 1.0, 2.0, 3.0], [0.0] * 4)
    loss, grad = optax_accum.value_and_grad(token_loss, **split)(1.0, batch)
    assert (loss, grad) == (0.0, 0.0)


@pytest.mark.parametrize("split", [{}, {"num_microbatches": 2}, {"microbatch_size": 3}])
def test_a_term_in_which_nothing_counts(split):
    def loss_fn(w, batch):
        return token_loss(w, batch) + mean(w * batch["total"]) + 3 * w

    batch = rows([1.0, 1.0, 2.0, 4.0], [0.0] * 4)
    loss, grad = optax_accum.value_and_grad(loss_fn, **split)(1.0, batch)
    assert (loss, grad) == (5.0, 5.0)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("split", [{"num_microbatches": 2}, {"microbatch_size": 4}])
def test_a_microbatch_of_padding_whose_gradient_is_nan(split, terms):
    """Centred by its own tokens, of which there are none: 0 / 0 on the way."""

    def loss_fn(w, batch):
        values = w * batch["x"]
        kept = batch["mask"].astype(jnp.float32)
        centre = jnp.sum(values * kept) / jnp.sum(kept)
        loss = mean((values - centre) ** 2, where=batch["mask"])
        return sum([loss] * terms)

    x, rows = jnp.arange(1.0, 7.0), jnp.arange(6)
    padding = rows % 2 == 0 if "num_microbatches" in split else rows > 3
    grad = optax_accum.grad(loss_fn, **split)(1.0, {"x": x, "mask": ~padding})
    # All that counts is in the other micro-batch.
    expected = terms * 2 * np.var(np.asarray(x)[~np.asarray(padding)])
    np.testing.assert_allclose(grad, expected, rtol=24 * F32_ULP)


def test_a_nan_stays_where_another_term_counts():
    """As documented: of one backward pass, no term can be taken out."""

    def loss_fn(w, batch):
        kept = batch["mask"].astype(jnp.float32)
        centre = jnp.sum(w * batch["x"] * kept) / jnp.sum(kept)
        squares = (w * batch["x"] - centre) ** 2
        return mean(squares, where=batch["mask"]) + mean(w * batch["x"])

    batch = {"x": jnp.arange(1.0, 7.0), "mask": jnp.arange(6) % 2 == 0}
    loss, grad = optax_accum.value_and_grad(loss_fn, num_microbatches=2)(1.0, batch)
    assert np.isfinite(loss) and np.isnan(grad)


# -- Weights are data


def test_weights_are_not_differentiated():
    """A weight that depends on the parameter, a total that does not."""

    def loss_fn(w, x):
        return mean(x, weights=jnp.exp(w) * jnp.ones_like(x))

    for count in (1, 2):
        assert optax_accum.grad(loss_fn, num_microbatches=count)(1.0, normal(0, 4)) == 0

    def by_hand(w, x):
        return Mean(w * jnp.sum(x), w * x.shape[0])

    x = jnp.arange(4.0)
    for count in (1, 2):
        # d/dw of (w sum x) / stop_gradient(w n), at w = 2
        assert optax_accum.grad(by_hand, num_microbatches=count)(2.0, x) == 6 / 8


@pytest.mark.slow
def test_weights_from_parameters_keys_and_state():
    """One term, two terms: counted with the same parameters, keys and state."""

    def loss_fn(w, x, key, state, second):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        weights = jnp.exp(w * x) * (1 + state) * kept.astype(x.dtype)
        loss = mean((w - x) ** 2, weights=weights)
        if second:
            loss = loss + 0.5 * mean(w * x, where=kept)
        return loss, state + 1

    x, key, count = normal(1, 12, dtype=np.float32), jax.random.key(3), 3
    w = jnp.float32(0.3)

    def whole(w, second):
        """All micro-batches in one expression, with the weights each had."""
        sums = [jnp.zeros(2), jnp.zeros(2)]
        for i in range(count):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (4,))
            part = x[i::count]
            kept = kept.astype(part.dtype)
            weights = jax.lax.stop_gradient(jnp.exp(w * part) * (1 + i) * kept)
            first = [jnp.sum(weights * (w - part) ** 2), jnp.sum(weights)]
            balance = [jnp.sum(w * part * kept), jnp.sum(kept)]
            sums = [
                s + jnp.stack(v) for s, v in zip(sums, (first, balance), strict=True)
            ]
        (a, b), (c, d) = sums
        return a / b + (0.5 * c / d if second else 0)

    for second in (False, True):
        value_and_grad = optax_accum.value_and_grad(
            loss_fn, num_microbatches=count, rng_argnums=2, carry_argnum=3
        )
        (loss, state), grad = jax.jit(value_and_grad, static_argnums=4)(
            w, x, key, 0.0, second
        )
        expected = jax.value_and_grad(whole)(w, second)
        np.testing.assert_allclose([loss, grad], expected, rtol=24 * F32_ULP)
        assert state == count


def test_coefficients_that_are_learned():
    def loss_fn(params, batch):
        loss = mean(params["w"] * batch["x"], where=batch["mask"])
        return params["t"] * loss + mean(batch["x"] ** 2) / (2 * params["t"])

    params = {"w": jnp.float32(2.0), "t": jnp.float32(3.0)}
    batch = {"x": normal(2, 8, dtype=np.float32), "mask": jnp.arange(8) < 3}
    expected = jax.grad(unsplit(loss_fn))(params, batch)
    actual = optax_accum.grad(loss_fn, num_microbatches=4)(params, batch)
    assert largest_relative_error(actual, expected) <= 5e-6  # as in the grid


# -- Properties


def two_masks(w, batch, factor):
    first = mean(w * batch["losses"], where=batch["mask"])
    return first + factor * mean(w * batch["others"], where=~batch["mask"])


TWO_MASKS = {
    size: jax.jit(optax_accum.grad(two_masks, microbatch_size=size))
    for size in (1, 2, 3, 5)
}


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    size=st.sampled_from(list(TWO_MASKS)),
    seed=st.integers(0, 2**16),
    factor=st.floats(-2, 2, width=32),
)
def test_any_mask_and_any_split(counts, size, seed, factor):
    """Five rows of six tokens, of which the first few count in one term."""
    losses, others = normal(seed, 2, 5, 6)
    mask = np.arange(6) < np.array(counts)[:, None]
    batch = {"losses": losses, "others": others, "mask": jnp.array(mask)}
    actual = TWO_MASKS[size](1.0, batch, factor)
    m = np.asarray(mask, np.float64)
    total = [np.sum(losses * m), factor * np.sum(others * (1 - m))]
    weight = [np.sum(m), np.sum(1 - m)]
    terms = [t / w if w else 0.0 for t, w in zip(total, weight, strict=True)]
    # 30 roundings of terms that may cancel: relative to their size, not their sum.
    size = max(1.0, abs(factor)) * float(np.max(np.abs([losses, others])))
    np.testing.assert_allclose(actual, sum(terms), atol=30 * F32_ULP * size)


@pytest.mark.slow
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_shuffled_tokens_have_the_same_gradient(order, x64):
    """https://github.com/huggingface/transformers/pull/34191"""
    x = normal(5, 3, 4, dtype=np.float64)
    mask = jnp.array(np.arange(4) < np.array([[1], [4], [2]]))
    order = jnp.array(order)

    def loss_fn(w, batch):
        return mean(jnp.sin(w * batch["x"]), where=batch["mask"])

    grad_fn = optax_accum.grad(loss_fn, num_microbatches=3)
    expected = grad_fn(jnp.float64(1), {"x": x, "mask": mask})
    shuffled = grad_fn(jnp.float64(1), {"x": x[order], "mask": mask[order]})
    np.testing.assert_allclose(shuffled, expected, rtol=1e-12)


# -- What the user is told


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_does_not_depend_on_n(name):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/2569"""
    make, options = LOSSES[name]
    loss_fn, params, batch = make(np.float32)
    values = []
    for n in (1, 2, 4):
        split = options | {"num_microbatches": n}
        value_and_grad = jax.jit(optax_accum.value_and_grad(loss_fn, **split))
        values.append(float(value_and_grad(params, batch)[0]))
    np.testing.assert_allclose(values, values[0], rtol=5e-6)  # as in the grid
