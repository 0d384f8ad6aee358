"""Equinox: models with functions among their leaves, and `eqx.nn.State`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import F32_ULP
from losses import largest_relative_error
from pages import DOCS, run_page
from plain_loops import folded, lenient, stateless, train_by_hand

import optax_accum

# float32, against the largest entry of a leaf: two steps of 64 rows, added in another
# order, are 64 roundings each.
TWO_STEPS = 128 * F32_ULP


@pytest.fixture(scope="module")
def page():
    return run_page(DOCS / "equinox.md")


@pytest.fixture
def lenient_jax():
    with lenient():
        yield


def arrays(model):
    return eqx.filter(model, eqx.is_inexact_array)


def fresh_normalized(page):
    """The page's model before it was trained, which the train step consumed."""
    model, norm_state = eqx.nn.make_with_state(page["Normalized"])(page["model_key"])
    return arrays(model), norm_state


def normalized_by_hand(page, groups, key_of):
    with lenient():
        params, norm_state = fresh_normalized(page)
        return train_by_hand(
            page["normalized_loss"],
            params,
            page["batch"],
            page["optimizer"],
            steps=2,
            groups=groups,
            key_of=key_of,
            model_state=norm_state,
        )


@pytest.fixture(scope="module")
def ghost(page):
    """After two steps on four ghost batches each, with the keys that are promised."""
    return normalized_by_hand(page, 4, folded(page["dropout_key"]))


# -- Leaves that are no arrays


def update_twice(tx):
    """An optimizer for two calls, its parameters with a function among the leaves."""
    params = {"w": jnp.ones(2), "act": jax.nn.relu}
    grads = {"w": jnp.ones(2), "act": None}
    state = tx.init(arrays(params))
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params = eqx.apply_updates(params, updates)
    return params


def test_functions_among_the_parameters():
    """https://github.com/patrick-kidger/equinox/issues/590 : a cond of all leaves."""
    updated = update_twice(optax_accum.accumulate(optax.sgd(1.0), every_k=2))
    assert updated["act"] is jax.nn.relu
    assert updated["w"].tolist() == [0, 0]
    with pytest.raises(TypeError, match="not a valid JAX type"):
        update_twice(optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2))


def test_a_model_that_is_not_partitioned_is_refused():
    model = eqx.nn.Lambda(jnp.tanh)
    value_and_grad = optax_accum.value_and_grad(lambda model, x: jnp.mean(model(x)))
    with pytest.raises(TypeError, match=r"got model\.fn \("):
        value_and_grad(model, jnp.ones(2))
    with pytest.raises(TypeError, match=r"got params\.fn \("):
        optax_accum.init_train_state(model, optax.sgd(1.0))


@pytest.mark.slow
def test_the_page_trains_as_the_large_batch_does(page, lenient_jax):
    fresh = eqx.nn.MLP(8, 3, 32, 1, activation=jnp.tanh, key=page["model_key"])
    expected, _ = train_by_hand(
        stateless(page["params_loss"]),
        arrays(fresh),
        page["batch"],
        page["optimizer"],
        steps=2,
    )
    accumulated, trained = page["accumulated"], page["trained"]
    assert largest_relative_error(arrays(accumulated), expected) <= TWO_STEPS
    assert largest_relative_error(arrays(trained), expected) <= TWO_STEPS
    assert page["is_boundary"] and page["opt_state"].gradient_step == 2
    assert accumulated.activation is trained.activation is fresh.activation


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


@pytest.mark.slow
def test_windows_carry_the_state_of_a_partitioned_model(page, ghost, lenient_jax):
    params, norm_state = fresh_normalized(page)
    optimizer = page["optimizer"]
    add, apply = optax_accum.make_window_steps(page["normalized_loss"], optimizer)
    state = optax_accum.init_train_state(
        params, optimizer, key=page["dropout_key"], model_state=norm_state
    )
    for _ in range(2):
        window = None
        for i in range(4):
            rows = jax.tree.map(lambda x, i=i: x[i::4], page["batch"])
            window = add(state, rows, window)
        state, _ = apply(state, window)
    actual = state.params, state.model_state
    assert largest_relative_error(actual, ghost) <= TWO_STEPS
