"""What accumulation costs beside its gradients and its step. Nothing here is timed."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import (
    F32_ULP,
    assert_bits_equal,
    count_primitives,
    counter,
    temporary_bytes,
)
from losses import normal

import optax_accum

ROWS = 64


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def make_params(dtype=np.float32):
    return {
        "w1": normal(0, 64, 200, dtype=dtype),
        "w2": normal(1, 200, 64, dtype=dtype),
    }


def make_batch(rows=ROWS, dtype=np.float32):
    return {
        "x": normal(2, rows, 64, dtype=dtype),
        "y": normal(3, rows, 64, dtype=dtype),
    }


def make_state(optimizer):
    return optax_accum.init_train_state(make_params(), optimizer)


def size_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


# -- An optimizer wrapped by `accumulate` under door 2: parameters cross the branch


def user_step(optimizer):
    """What a user writes round an accumulating optimizer."""

    def step(carry, batch):
        params, opt_state = carry
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step, donate_argnums=0)


@pytest.mark.slow
@pytest.mark.parametrize("door", [1, 2])
def test_temporaries_are_at_most_those_of_multi_steps(door):
    optimizer, batch = optax.adamw(0.1), make_batch(4)
    peer = optax.MultiSteps(optimizer, 8)
    accumulated = optax_accum.accumulate(optimizer, 8)
    params = make_params()
    with jax.numpy_dtype_promotion("standard"):  # which MultiSteps needs
        limit = temporary_bytes(user_step(peer), (params, peer.init(params)), batch)
    if door == 1:
        carry = params, accumulated.init(params)
        assert temporary_bytes(user_step(accumulated), carry, batch) <= limit
        return
    step = optax_accum.make_train_step(loss_fn, accumulated)
    assert temporary_bytes(step, make_state(accumulated), batch) <= limit


@pytest.mark.parametrize("num_microbatches", [1, 8])
def test_a_window_over_calls_needs_one_gradient_of_room(num_microbatches):
    optimizer = optax_accum.accumulate(optax.adamw(0.1), 8)
    step = optax_accum.make_train_step(
        loss_fn, optimizer, num_microbatches=num_microbatches
    )
    state = make_state(optimizer)
    # 1 P, and beside it the gradient of the larger of two parameters while it is added.
    room = 1.6 * size_of(state.params)
    assert temporary_bytes(step, state, make_batch(8)) < room


def test_between_boundaries_nothing_is_touched():
    """Not even a subnormal, which an addition of zero may flush."""
    evaluations = []
    optimizer = optax_accum.accumulate(
        optax.chain(counter(evaluations), optax.adam(0.1)), 3
    )
    params = {"w": jnp.array([1e-40, -0.0, 1.0], jnp.float32)}
    step = optax_accum.make_train_step(
        lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), optimizer, donate=False
    )
    state = optax_accum.init_train_state(params, optimizer)
    for calls in range(1, 4):
        before, (state, metrics) = state, step(state, jnp.ones(4))
        jax.effects_barrier()
        assert len(evaluations) == calls // 3 and metrics["emitted"] == (calls == 3)
        if calls < 3:
            assert_bits_equal(state.params, before.params)
            inner = state.opt_state.inner_opt_state
            assert_bits_equal(inner, before.opt_state.inner_opt_state)
    assert not np.array_equal(state.params["w"], params["w"])


INNER = {
    # Not Adam's own epsilon: its steps are near 1 whatever the gradient.
    "adamw": optax.adamw(0.1, eps=1.0),
    "novograd": optax.novograd(0.1),  # refuses gradients wider than its state
    "a window of windows": optax_accum.accumulate(optax.sgd(0.1), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", INNER)
def test_the_branch_steps_as_updates_do(name, dtype):
    """Door 2 with `accumulate` against `update` and `apply_updates` by hand."""
    optimizer = optax_accum.accumulate(INNER[name], 2)
    params = make_params(dtype)
    step = optax_accum.make_train_step(loss_fn, optimizer, donate=False)
    state = optax_accum.init_train_state(params, optimizer)
    opt_state = optimizer.init(params)

    @jax.jit
    def update(params, opt_state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, weight=len(batch["x"])
        )
        return optax.apply_updates(params, updates), opt_state

    for i in range(4):
        batch = make_batch(3 if i % 2 else 4, dtype)
        state, metrics = step(state, batch)
        params, opt_state = update(params, opt_state, batch)
        assert metrics["emitted"] == optax_accum.has_emitted(opt_state)
    moved = [
        np.asarray(a, np.float64) - np.asarray(b, np.float64)
        for a, b in zip(
            jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True
        )
    ]
    # A few roundings of parameters near 1: in 16 bits updates are rounded at door 1,
    # and at door 2 they are not.
    ulp = 2 * F32_ULP if dtype == "float32" else 2.0**-7
    assert max(np.max(np.abs(m)) for m in moved) <= 8 * ulp


def test_what_is_skipped_is_skipped_in_the_branch():
    optimizer = optax_accum.accumulate(
        optax.sgd(1.0), 2, skip_fn=optax_accum.skip_nonfinite
    )
    step = optax_accum.make_train_step(lambda w, x: jnp.mean(w * x), optimizer)
    state = optax_accum.init_train_state(0.0, optimizer)
    for x in (jnp.array([jnp.nan]), jnp.array([3.0])):
        state, _ = step(state, x)
    assert state.params == -3.0 and state.opt_state.skipped == 1


# -- N = 1 is free, and N is free


def hand_written(optimizer):
    def step(state, batch):
        params, opt_state, count = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, count + 1), (loss, optax.tree.norm(grads))

    return step


def test_one_microbatch_is_the_plain_step():
    """Nothing in the jaxpr that works on parameters but what the plain step has."""
    optimizer, params, batch = optax.adam(0.1), make_params(), make_batch()
    plain_state = params, optimizer.init(params), jnp.int32(0)
    with jax.numpy_dtype_promotion("standard"):  # which Adam's counter needs
        plain = count_primitives(hand_written(optimizer), plain_state, batch)
    for options in ({}, {"num_microbatches": 1}, {"microbatch_size": ROWS}):
        step = optax_accum.make_train_step(loss_fn, optimizer, **options)
        ours = count_primitives(step, make_state(optimizer), batch)
        # Norm and counter are written otherwise: nothing of the size of a parameter.
        assert (ours - plain).keys() <= {"lt", "select_n", "add", "square", "abs"}
    value_and_grad = optax_accum.value_and_grad(loss_fn)
    ours = count_primitives(value_and_grad, params, batch)
    assert ours == count_primitives(jax.value_and_grad(loss_fn), params, batch)


def masked_loss(params, batch):
    losses = jnp.sum((batch["x"] @ params["w1"]) ** 2, axis=-1)
    return optax_accum.mean(losses, where=batch["mask"])


def test_one_microbatch_branches_only_where_its_weight_is_data():
    optimizer, batch = optax.adam(0.1), make_batch() | {"mask": jnp.ones(ROWS, bool)}
    params = {"w1": make_params()["w1"]}
    state = optax_accum.init_train_state(params, optimizer)
    step = optax_accum.make_train_step(masked_loss, optimizer)
    counts = count_primitives(step, state, batch)
    assert counts["cond"] == 1 and "scan" not in counts
    add, apply = optax_accum.make_window_steps(masked_loss, optimizer)
    assert not count_primitives(add, state, batch, None).keys() & {"cond", "scan"}
    window = jax.eval_shape(add, state, batch, None)
    assert count_primitives(apply, state, window)["cond"] == 1


def instructions(step, *args):
    text = step.lower(*args).compile().as_text()
    return sum(" = " in line for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_programs_do_not_grow_with_the_number_of_microbatches(wrapped):
    """Nor does the time to compile them."""
    optimizer = optax.adamw(0.1)
    if wrapped:
        optimizer = optax_accum.accumulate(optimizer, 2)
    state, sizes = make_state(optimizer), []
    for n in (4, 64):
        step = optax_accum.make_train_step(loss_fn, optimizer, num_microbatches=n)
        sizes.append(instructions(step, state, make_batch(2 * n)))
    assert sizes[0] == sizes[1]


# -- Importing


def test_importing_loads_nothing_that_jax_and_optax_do_not():
    """A few modules of the standard library, at most, that take no time."""
    code = (
        "import sys, jax, optax; before = set(sys.modules); import optax_accum;"
        "print(*(set(sys.modules) - before))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    foreign = {name.partition(".")[0] for name in printed} - {"optax_accum"}
    assert foreign <= sys.stdlib_module_names | {"jax"}
    assert len(foreign - {"jax"}) <= 3
