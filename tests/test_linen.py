"""Flax Linen: a `TrainState` in the user's loop, BatchNorm, dropout, scanned layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from helpers import (
    F32_ULP,
    assert_every_microbatch_has_dropout_of_its_own,
)
from losses import largest_relative_error, normal
from pages import DOCS, run_page
from plain_loops import folded, lenient, stateless, train_by_hand

import optax_accum

# float32, against the largest entry of a leaf: two steps of 64 rows, added in another
# order, are 64 roundings each.
TWO_STEPS = 128 * F32_ULP


@pytest.fixture(scope="module")
def page():
    return run_page(DOCS / "linen.md")


@pytest.fixture
def lenient_jax():
    with lenient():
        yield


def fresh_normalized(page):
    """The page's variables before they were trained, which the train step consumed."""
    x = page["batch"]["x"]
    return page["normalized"].init(page["params_key"], x, train=False)


def normalized_by_hand(page, groups, key_of):
    with lenient():
        variables = fresh_normalized(page)
        return train_by_hand(
            page["normalized_loss"],
            variables["params"],
            page["batch"],
            page["optimizer"],
            steps=2,
            groups=groups,
            key_of=key_of,
            model_state=variables["batch_stats"],
        )


@pytest.fixture(scope="module")
def ghost(page):
    """After two steps on four ghost batches each, with the keys that are promised."""
    return normalized_by_hand(page, 4, folded(page["dropout_key"]))


# -- A `TrainState`


def test_a_train_state_steps_at_boundaries():
    state = TrainState.create(
        apply_fn=None,
        params={"w": jnp.zeros(())},
        tx=optax_accum.accumulate(optax.sgd(1.0), every_k=2),
    )
    seen = []
    for grad in (1.0, 3.0, 5.0, 9.0):
        state = state.apply_gradients(grads={"w": jnp.asarray(grad)})
        steps = int(state.step), int(state.opt_state.gradient_step)
        has_emitted = bool(optax_accum.has_emitted(state.opt_state))
        seen.append((float(state.params["w"]), *steps, has_emitted))
    assert seen[:2] == [(0, 1, 0, False), (-2, 2, 1, True)]
    assert seen[2:] == [(-2, 3, 1, False), (-9, 4, 2, True)]


@pytest.mark.slow
def test_the_page_trains_a_train_state_as_the_large_batch_does(page, lenient_jax):
    expected, _ = train_by_hand(
        stateless(page["loss_fn"]),
        page["params"],
        page["batch"],
        page["optimizer"],
        steps=2,
    )
    accumulated, large = page["train_state"], page["large_state"]
    assert largest_relative_error(accumulated.params, expected) <= TWO_STEPS
    assert largest_relative_error(large.params, expected) <= TWO_STEPS
    assert page["is_boundary"] and accumulated.opt_state.gradient_step == 2
    assert accumulated.step == 8 and large.step == 2


@pytest.mark.slow
def test_batch_stats_pass_through_apply_gradients(page, ghost, lenient_jax):
    """They move at every mini step, and the parameters at the boundary."""

    class StateWithStatistics(TrainState):
        batch_stats: dict

    variables = fresh_normalized(page)
    state = StateWithStatistics.create(
        apply_fn=None,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax_accum.accumulate(page["optimizer"], every_k=4),
    )
    key_of = folded(page["dropout_key"])

    @jax.jit
    def update(state, rows, key):
        grad_fn = jax.grad(page["normalized_loss"], has_aux=True)
        grads, new = grad_fn(state.params, rows, key, state.batch_stats)
        return state.apply_gradients(grads=grads, batch_stats=new)

    for i in range(8):
        rows = jax.tree.map(lambda x, i=i: x[i % 4 :: 4], page["batch"])
        state = update(state, rows, key_of(i // 4, i % 4))
    actual = state.params, state.batch_stats
    assert largest_relative_error(actual, ghost) <= TWO_STEPS


# -- BatchNorm and dropout


@pytest.mark.slow
def test_the_page_trains_on_ghost_batches(page, ghost):
    """The twins: BatchNorm of all rows, and one dropout key for all micro-batches."""
    state, key = page["state"], page["dropout_key"]
    actual = state.params, state.model_state
    assert largest_relative_error(actual, ghost) <= TWO_STEPS
    large, _ = normalized_by_hand(page, 1, folded(key))
    assert largest_relative_error(state.params, large) > 0.01
    one_key, _ = normalized_by_hand(page, 4, lambda step, i: folded(key)(step, 0))
    assert largest_relative_error(state.params, one_key) > 0.01
    assert page["logits"].shape == (64, 3)


def test_dropout_differs_between_microbatches_and_repeats():
    """All rows are alike: what differs is the mask."""
    dropout = nn.Dropout(0.5, deterministic=False)

    def loss_fn(params, x, key):
        hidden = dropout.apply({}, x, rngs={"dropout": key})
        loss = jnp.mean((hidden @ params["w"]) ** 2)
        return loss, optax_accum.Stack(loss)

    assert_every_microbatch_has_dropout_of_its_own(loss_fn)


# -- Scanned layers


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + jnp.tanh(nn.Dense(x.shape[-1])(x)), None


@pytest.mark.slow
def test_scanned_layers_with_remat():
    layers = nn.scan(
        nn.remat(Layer),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
    )()
    x, y = normal(0, 16, 8), normal(1, 16, 8)
    params = layers.init(jax.random.key(2), x, None)["params"]

    def loss_fn(params, batch):
        x, y = batch
        hidden, _ = layers.apply({"params": params}, x, None)
        return jnp.mean((hidden - y) ** 2)

    value_and_grad = optax_accum.value_and_grad(loss_fn, num_microbatches=4)
    actual = jax.jit(value_and_grad)(params, (x, y))
    expected = jax.jit(jax.value_and_grad(loss_fn))(params, (x, y))
    # Sums over 16 rows of 8 entries in another order.
    assert largest_relative_error(actual, expected) <= 128 * F32_ULP
