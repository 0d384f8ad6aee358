"""Haiku: transformed functions with state and random keys, and stacked layers."""

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from helpers import (
    F32_ULP,
    assert_every_microbatch_has_dropout_of_its_own,
)
from losses import largest_relative_error, normal
from pages import DOCS, run_page
from plain_loops import folded, lenient, train_by_hand

import optax_accum

# float32, against the largest entry of a leaf: two steps of 64 rows, added in another
# order, are 64 roundings each.
TWO_STEPS = 128 * F32_ULP


@pytest.fixture(scope="module")
def page():
    return run_page(DOCS / "haiku.md")


@pytest.fixture
def lenient_jax():
    with lenient():
        yield


def by_hand(page, groups, key_of):
    with lenient():
        # Not the page's own, which the train step consumed.
        params, bn_state = page["model"].init(
            page["init_key"], page["batch"]["x"], is_training=True
        )
        return train_by_hand(
            page["loss_fn"],
            params,
            page["batch"],
            page["optimizer"],
            steps=2,
            groups=groups,
            key_of=key_of,
            model_state=bn_state,
        )


# -- BatchNorm and dropout


@pytest.mark.slow
def test_the_page_trains_in_the_loop_of_a_user(page):
    def key_of(step, i):  # the loop's own, one for each call
        return jax.random.fold_in(page["dropout_key"], 4 * step + i)

    actual = page["accumulated"], page["new_state"]
    assert largest_relative_error(actual, by_hand(page, 4, key_of)) <= TWO_STEPS
    assert page["opt_state"].gradient_step == 2
    assert optax_accum.has_emitted(page["opt_state"])


@pytest.mark.slow
def test_the_page_trains_on_ghost_batches(page):
    """The twins: BatchNorm of all rows, and one dropout key for all micro-batches."""
    state, key = page["state"], page["dropout_key"]
    actual = state.params, state.model_state
    ghost = by_hand(page, 4, folded(key))
    assert largest_relative_error(actual, ghost) <= TWO_STEPS
    large, _ = by_hand(page, 1, folded(key))
    assert largest_relative_error(state.params, large) > 0.01
    one_key, _ = by_hand(page, 4, lambda step, i: folded(key)(step, 0))
    assert largest_relative_error(state.params, one_key) > 0.01
    assert page["logits"].shape == (64, 3)


def test_dropout_differs_between_microbatches_and_repeats(lenient_jax):
    """All rows are alike: what differs is the mask."""
    model = hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x))

    def loss_fn(params, x, key):
        loss = jnp.mean((model.apply({}, key, x) @ params["w"]) ** 2)
        return loss, optax_accum.Stack(loss)

    assert_every_microbatch_has_dropout_of_its_own(loss_fn)


# -- Stacked layers


@pytest.mark.slow
def test_stacked_layers():
    def forward(x):
        def layer(x):
            return x + jnp.tanh(hk.Linear(8)(x))

        return hk.experimental.layer_stack(3)(layer)(x)

    model = hk.without_apply_rng(hk.transform(forward))
    x, y = normal(0, 16, 8), normal(1, 16, 8)
    params = model.init(jax.random.key(2), x)

    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((model.apply(params, x) - y) ** 2)

    value_and_grad = optax_accum.value_and_grad(loss_fn, num_microbatches=4)
    actual = jax.jit(value_and_grad)(params, (x, y))
    expected = jax.jit(jax.value_and_grad(loss_fn))(params, (x, y))
    # Sums over 16 rows of 8 entries in another order.
    assert largest_relative_error(actual, expected) <= 128 * F32_ULP
