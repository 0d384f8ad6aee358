"""Door 2 against a loop that a user would write by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    F32_ULP,
    assert_bits_equal,
    recorder,
    sum_by_hand,
    temporary_bytes,
    types,
)

import optax_accum

ROWS = 12


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(keys[0], (5, 7), dtype),
        "w2": jax.random.normal(keys[1], (7, 3), dtype),
    }


def make_batches(number, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1))
    return {
        "x": jax.random.normal(keys[0], (number, ROWS, 5), dtype),
        "y": jax.random.normal(keys[1], (number, ROWS, 3), dtype),
    }


def pick(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def run(optimizer, batches, params=None, **options):
    """The state and the metrics after one call for each batch."""
    params = make_params() if params is None else params
    state = optax_accum.init_train_state(params, optimizer)
    train_step = optax_accum.make_train_step(loss_fn, optimizer, **options)
    metrics = []
    for i in range(len(batches["x"])):
        state, last = train_step(state, pick(batches, i))
        metrics.append(last)
    assert train_step._cache_size() == 1
    return state, metrics


@jax.jit
def large_batch_losses(params, batches):
    return jax.vmap(loss_fn, in_axes=(None, 0))(params, batches)


def by_hand(optimizer, batches, params=None):
    """The plain loop over large batches, with no library of ours."""
    params = make_params() if params is None else params

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, grads

    opt_state, losses, norms = optimizer.init(params), [], []
    for i in range(len(batches["x"])):
        params, opt_state, loss, grads = step(params, opt_state, pick(batches, i))
        losses.append(loss)
        norms.append(np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads))))
    return params, losses, norms


def assert_params_close(actual, desired, rtol=1e-5):
    """Five steps of a sum in another order; each step keeps some roundings."""
    jax.tree.map(
        lambda a, d: np.testing.assert_allclose(a, d, rtol=rtol, atol=rtol),
        actual,
        desired,
    )


@pytest.mark.parametrize(
    "split", [{}, {"num_microbatches": 3}, {"microbatch_size": 5}], ids=str
)
def test_trains_as_on_the_large_batch(split):
    batches, optimizer = make_batches(5), optax.sgd(0.1)
    state, metrics = run(optimizer, batches, **split)
    params, losses, norms = by_hand(optimizer, batches)
    assert_params_close(state.params, params)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], norms, rtol=1e-5)
    assert [m["weight"] for m in metrics] == [ROWS] * 5
    assert all(m["emitted"] for m in metrics)
    assert state.step == 5


@pytest.mark.slow
def test_the_state_is_a_scan_carry():
    batches, optimizer = make_batches(4), optax.adam(0.1)
    train_step = optax_accum.make_train_step(loss_fn, optimizer, num_microbatches=3)
    state = optax_accum.init_train_state(make_params(), optimizer)
    last, metrics = jax.lax.scan(train_step, state, batches)
    assert types(last) == types(optax_accum.init_train_state(make_params(), optimizer))
    looped, _ = run(optimizer, batches, num_microbatches=3)
    assert_params_close(last.params, looped.params)
    assert metrics["loss"].shape == (4,)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_the_state_is_a_scan_carry_with_16_bit_parameters(dtype, num_microbatches):
    batches, optimizer = make_batches(3, dtype), optax.adamw(1e-2)
    train_step = optax_accum.make_train_step(
        loss_fn, optimizer, num_microbatches=num_microbatches
    )
    state = optax_accum.init_train_state(make_params(dtype), optimizer)
    expected = types(state)
    last, metrics = jax.lax.scan(train_step, state, batches)
    assert types(last) == expected
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32


def test_the_mean_reaches_the_optimizer_in_the_dtype_of_the_sum():
    optimizer = recorder()
    state = optax_accum.init_train_state(jnp.bfloat16(0.0), optimizer)
    train_step = optax_accum.make_train_step(
        lambda w, x: jnp.mean(w * x), optimizer, num_microbatches=2
    )
    x = jnp.array([1.0, 1.0 + 2.0**-7], jnp.bfloat16)
    state, _ = train_step(state, x)
    assert state.opt_state["grads"] == 1.0 + 2.0**-8


# -- The literal loop of the field


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_scan_with_accumulate_inside_gives_the_same_parameters(name):
    """Micro-batches scanned, zeros applied until the Nth, as people write it."""
    inner, batches = getattr(optax, name)(0.1), make_batches(3)
    tx = optax_accum.accumulate(inner, every_k=4)

    def body(carry, microbatch):
        params, opt_state = carry
        grads = jax.grad(loss_fn)(params, microbatch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def split(x):  # strided, as door 2 splits
        return x.reshape(3, ROWS // 4, 4, -1).swapaxes(1, 2).reshape(12, 3, -1)

    carry = make_params(), tx.init(make_params())
    (params, _), _ = jax.jit(lambda c, xs: jax.lax.scan(body, c, xs))(
        carry, jax.tree.map(split, batches)
    )
    state, _ = run(inner, batches, num_microbatches=4)
    assert_params_close(params, state.params)


@pytest.mark.slow
def test_doors_compose_to_calls_times_microbatches():
    """4 calls of 3 micro-batches are one batch of all their rows."""
    batches = make_batches(4)
    tx = optax_accum.accumulate(optax.sgd(0.1), every_k=4)
    state, metrics = run(tx, batches, num_microbatches=3)
    assert [bool(m["emitted"]) for m in metrics] == [False, False, False, True]
    whole = jax.tree.map(lambda x: x.reshape(1, 4 * ROWS, -1), batches)
    params, _, _ = by_hand(optax.sgd(0.1), whole)
    assert_params_close(state.params, params)
    assert state.opt_state.gradient_step == 1 and state.step == 4


@pytest.mark.slow
def test_calls_of_unequal_rows_weigh_by_their_rows():
    batches = make_batches(1)
    tx = optax_accum.accumulate(optax.sgd(0.1), every_k=2)
    train_step = optax_accum.make_train_step(loss_fn, tx, microbatch_size=3)
    state = optax_accum.init_train_state(make_params(), tx)
    whole = pick(batches, 0)
    for rows in (slice(0, 8), slice(8, 12)):
        part = jax.tree.map(lambda x, rows=rows: x[rows], whole)
        state, _ = train_step(state, part)
    params, _, _ = by_hand(optax.sgd(0.1), batches)
    assert_params_close(state.params, params)


@pytest.mark.slow
def test_emit_closes_the_window_of_an_accumulated_optimizer():
    batches = make_batches(2)
    tx = optax_accum.accumulate(optax.sgd(0.1), every_k=4)
    train_step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=3)
    state = optax_accum.init_train_state(make_params(), tx)
    for i, emit in enumerate((False, True)):
        state, metrics = train_step(state, pick(batches, i), emit=emit)
        assert metrics["emitted"] == emit
    whole = jax.tree.map(lambda x: x.reshape(1, 2 * ROWS, -1), batches)
    assert_params_close(state.params, by_hand(optax.sgd(0.1), whole)[0])


# -- Arguments of the loss and of the optimizer


def test_extra_arguments_reach_loss_and_optimizer():
    def scaled_loss(params, batch, scale):
        assert scale.shape == (ROWS,)  # as long as the batch, and yet whole
        return loss_fn(params, batch) * scale[0]

    optimizer = recorder(["value", "weight", "other"])
    state = optax_accum.init_train_state(make_params(), optimizer)
    train_step = optax_accum.make_train_step(scaled_loss, optimizer, num_microbatches=3)
    batch = pick(make_batches(1), 0)
    state, metrics = train_step(state, batch, jnp.full(ROWS, 2.0), other=5.0)
    seen = state.opt_state
    assert (seen["weight"], seen["other"]) == (ROWS, 5.0)
    assert seen["value"] == metrics["loss"]
    expected = 2 * loss_fn(make_params(), batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=8 * F32_ULP)


def test_aux_is_reported():
    def with_aux(params, batch):
        return loss_fn(params, batch), {"x": jnp.mean(batch["x"])}

    optimizer, batch = optax.sgd(0.1), pick(make_batches(1), 0)
    state = optax_accum.init_train_state(make_params(), optimizer)
    train_step = optax_accum.make_train_step(
        with_aux, optimizer, num_microbatches=4, has_aux=True
    )
    _, metrics = train_step(state, batch)
    np.testing.assert_allclose(
        metrics["aux"]["x"], jnp.mean(batch["x"]), atol=ROWS * F32_ULP
    )


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_key_and_model_state(make):
    """The key of micro-batch i in call s is fold_in(fold_in(key, s), i)."""

    def stateful_loss(w, x, key, model_state):
        noise = jax.random.normal(key)
        return jnp.mean(w * x), {
            "noises": jnp.roll(model_state["noises"], -1).at[-1].set(noise),
            "count": model_state["count"] + 1,
        }

    key = make(5)
    model_state = {"noises": jnp.zeros(4), "count": jnp.zeros((), jnp.int32)}
    optimizer = optax.sgd(0.1)
    state = optax_accum.init_train_state(
        1.0, optimizer, key=key, model_state=model_state
    )
    train_step = optax_accum.make_train_step(
        stateful_loss, optimizer, num_microbatches=2
    )
    for _ in range(2):
        state, _ = train_step(state, jnp.ones(6))
    expected = [
        jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, step), i))
        for step in range(2)
        for i in range(2)
    ]
    np.testing.assert_array_equal(state.model_state["noises"], expected)
    assert len(set(np.asarray(expected).tolist())) == 4
    assert state.model_state["count"] == 4
    assert_bits_equal(
        jax.random.key_data(state.key), jax.random.key_data(key)
    )  # which was not consumed


# -- Ownership


def test_the_step_consumes_its_state_and_uses_every_byte():
    optimizer = optax.adam(0.1)
    state = optax_accum.init_train_state(make_params(), optimizer)
    train_step = optax_accum.make_train_step(loss_fn, optimizer, num_microbatches=3)
    batch = pick(make_batches(1), 0)
    compiled = train_step.lower(state, batch).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    new, _ = train_step(state, batch)
    assert state.params["w1"].is_deleted() and not new.params["w1"].is_deleted()


def test_donate_false_keeps_the_state():
    optimizer = optax.adam(0.1)
    params = make_params()
    state = optax_accum.init_train_state(params, optimizer)
    train_step = optax_accum.make_train_step(loss_fn, optimizer, donate=False)
    first, _ = train_step(state, pick(make_batches(1), 0))
    again, _ = train_step(state, pick(make_batches(1), 0))
    assert_bits_equal(again, first)
    assert not params["w1"].is_deleted()


def test_arrays_that_occur_twice_are_copied():
    """Tied weights, and an optimizer that keeps the initial parameters."""
    shared = jnp.ones((3, 3))
    params = {"encoder": shared, "decoder": shared}
    optimizer = optax.contrib.schedule_free_sgd(0.1)
    state = optax_accum.init_train_state(params, optimizer)
    train_step = optax_accum.make_train_step(
        lambda p, x: jnp.mean((x @ p["encoder"] @ p["decoder"]) ** 2), optimizer
    )
    state, _ = train_step(state, jnp.ones((2, 3)))
    assert state.step == 1


def test_one_array_under_two_objects_is_copied():
    x = jnp.ones(2)
    view = jax.device_put(x, x.devices().pop())
    assert view is not x
    optimizer = optax.sgd(0.1)
    state = optax_accum.init_train_state({"a": x, "b": view}, optimizer)
    train_step = optax_accum.make_train_step(
        lambda p, x: jnp.mean(x) * jnp.sum(p["a"] * p["b"]), optimizer
    )
    assert train_step(state, jnp.ones(2))[0].step == 1


def test_a_key_that_an_optimizer_was_made_with_is_not_consumed():
    key = jax.random.key(0)
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, key=key), optax.sgd(0.1))
    train_step = optax_accum.make_train_step(lambda w, x: jnp.mean(w * x), optimizer)
    for _ in range(2):  # two runs with one optimizer
        state = optax_accum.init_train_state(1.0, optimizer)
        with jax.numpy_dtype_promotion("standard"):
            train_step(state, jnp.ones(2))
    assert not key.is_deleted()


def test_weakly_typed_and_numpy_parameters_compile_once():
    params = {"a": 1.0, "b": np.ones(3, np.float32), "c": jnp.asarray(2.0)}
    optimizer = optax.adam(0.1)
    state = optax_accum.init_train_state(params, optimizer)
    train_step = optax_accum.make_train_step(
        lambda p, x: jnp.mean(p["a"] * x * p["c"]) + jnp.sum(p["b"]), optimizer
    )
    for _ in range(3):
        state, _ = train_step(state, jnp.ones(4))
    assert train_step._cache_size() == 1


def test_init_train_state_under_eval_shape():
    optimizer = optax_accum.accumulate(optax.adam(0.1), 2)
    abstract = jax.eval_shape(
        lambda p: optax_accum.init_train_state(p, optimizer), make_params()
    )
    state = optax_accum.init_train_state(make_params(), optimizer)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)


def test_the_state_owns_its_memory():
    """A NumPy array may be viewed and not copied; who holds it may write into it."""
    mine = np.ones(4096, np.float32)
    state = optax_accum.init_train_state(
        {"w": mine}, optax.sgd(0.1), model_state={"m": mine}
    )
    mine[:] = 7.0
    assert jnp.all(state.params["w"] == 1.0) and jnp.all(state.model_state["m"] == 1.0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_parameters_of_8_bits(dtype):
    params, x = jnp.ones(2, dtype), jnp.ones(4)
    optimizer = optax.sgd(0.5)
    train_step = optax_accum.make_train_step(
        lambda w, x: jnp.mean(x) * jnp.sum(w.astype(x.dtype)),
        optimizer,
        num_microbatches=2,
    )
    state, _ = train_step(optax_accum.init_train_state(params, optimizer), x)
    np.testing.assert_array_equal(state.params.astype(jnp.float32), [0.5, 0.5])
    assert state.params.dtype == dtype


@pytest.mark.slow
def test_an_optimizer_that_refuses_a_wider_gradient():
    optimizer = optax.apply_if_finite(optax.adam(0.1), 3)
    batches = make_batches(2, jnp.bfloat16)
    state, _ = run(optimizer, batches, make_params(jnp.bfloat16), num_microbatches=3)
    assert state.step == 2


# -- What it costs


def test_one_microbatch_has_no_loop_and_no_branch():
    for optimizer in (optax.adam(0.1), optax_accum.accumulate(optax.adam(0.1), 1)):
        train_step = optax_accum.make_train_step(loss_fn, optimizer)
        state = optax_accum.init_train_state(make_params(), optimizer)
        jaxpr = str(jax.make_jaxpr(train_step)(state, pick(make_batches(1), 0)))
        assert "scan" not in jaxpr and "cond[" not in jaxpr


def test_temporaries_are_those_of_the_hand_written_scan():
    """https://github.com/borisdayma/dalle-mini/pull/122"""
    optimizer = optax.adam(0.1)
    params = {"w1": jnp.ones((5, 700)), "w2": jnp.ones((700, 3))}
    batch = pick(make_batches(1), 0)

    def hand_written(state, batch):
        params, opt_state = state
        losses, sums = sum_by_hand(loss_fn, params, batch, 4)
        grads = jax.tree.map(lambda s: s / 4, sums)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jnp.mean(losses)

    ours = optax_accum.make_train_step(loss_fn, optimizer, num_microbatches=4)
    theirs = jax.jit(hand_written, donate_argnums=0)
    state = optax_accum.init_train_state(params, optimizer)
    limit = 1.02 * temporary_bytes(theirs, (params, optimizer.init(params)), batch)
    assert temporary_bytes(ours, state, batch) <= limit


@pytest.mark.parametrize("wrapped", [False, True])
def test_lowers_for_accelerators_without_one(wrapped):
    optimizer = optax.adam(0.1)
    if wrapped:
        optimizer = optax_accum.accumulate(optimizer, 2)
    train_step = optax_accum.make_train_step(loss_fn, optimizer, num_microbatches=3)
    state = optax_accum.init_train_state(make_params(), optimizer)
    exported = jax.export.export(train_step, platforms=["cuda", "tpu", "cpu"])(
        state, pick(make_batches(1), 0)
    )
    assert exported.platforms == ("cuda", "tpu", "cpu")
    assert "stablehlo.while" in exported.mlir_module()


def test_learning_on_real_rows_goes_down():
    """Not only equal: the thing trains."""
    batches = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (30, *x.shape[1:])), make_batches(1)
    )
    _, metrics = run(optax.adam(0.05), batches, num_microbatches=4)
    assert metrics[-1]["loss"] < 0.3 * metrics[0]["loss"]
