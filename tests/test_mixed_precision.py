"""docs/mixed_precision.md: 16 bits in the loss, and loss scales that change."""

import types

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import F32_ULP, feed, model_updates, recorder
from losses import largest_relative_error, normal
from pages import DOCS, run_page

import optax_accum
from optax_accum import accumulate, skip_nonfinite

ROWS, CALLS, FIRST_SCALE = 8, 12, 2.0**11
# A rounding to nearest, relative: bfloat16 has 8 significant bits, float16 has 11.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# From parameters to gradient, each of terms no larger than those whose mean is taken:
# the casts of x, w1 and w2; two products, tanh and its slope forwards; the error and
# four products backwards. Once more, for what they do to each other.
ROUNDINGS = 24

FUNCTIONS = {"flax": "update", "jmp": "update_jmp"}


@pytest.fixture(scope="module")
def page():
    return run_page(DOCS / "mixed_precision.md")


@pytest.fixture(autouse=True)
def standard_promotion():
    """The page's functions mix dtypes, as jmp and Flax do inside."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def float32_loss(params, batch):
    """The page's, in plain JAX and in float32."""
    predictions = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]
    return jnp.mean((predictions - batch["y"]) ** 2)


large_gradient = jax.jit(jax.grad(float32_loss))


@jax.jit
def gradients_of_rows(params, batch):
    def gradient_of_row(row):
        return jax.grad(float32_loss)(params, jax.tree.map(lambda a: a[None], row))

    return jax.vmap(gradient_of_row)(batch)


def make_micro_batches(page, bad=()):
    """Those of the page, of which the `bad` ones overflow, more and more easily."""
    factors = {i: 64.0 * 4.0**n for n, i in enumerate(bad)}
    return [
        {"x": m["x"][:ROWS], "y": m["y"][:ROWS] * factors.get(i, 1.0)}
        for i, m in enumerate(page["micro_batches"][:CALLS])
    ]


def concatenate(batches):
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *batches)


def assert_near_float32(grads, params, batch, compute):
    """Each entry within the roundings of what it is the mean of."""

    of_rows = gradients_of_rows(params, batch)
    expected = large_gradient(params, batch)
    for name in expected:
        size = np.max(np.mean(np.abs(of_rows[name]), axis=0))
        tolerance = ROUNDINGS * ROUNDING[compute] * size
        np.testing.assert_allclose(grads[name], expected[name], rtol=0, atol=tolerance)
        assert tolerance < np.max(np.abs(expected[name])) / 2  # it can fail


# -- bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("door", [1, 2, 3])
def test_bfloat16_compute_has_the_gradient_of_the_large_batch(page, door):
    params, loss_fn = page["init_params"](), page["bfloat16_loss"]
    optimizer = accumulate(recorder(), 4) if door == 1 else recorder()
    micro_batches = make_micro_batches(page)[:4]
    batch = concatenate(micro_batches)
    state = optax_accum.init_train_state(page["init_params"](), optimizer)
    if door == 1:
        grad, update = jax.jit(jax.grad(loss_fn)), jax.jit(optimizer.update)
        opt_state = state.opt_state
        for micro_batch in micro_batches:
            grads = grad(params, micro_batch)
            assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
            _, opt_state = update(grads, opt_state, params)
        seen = opt_state.inner_opt_state
    elif door == 2:
        step = optax_accum.make_train_step(loss_fn, optimizer, num_microbatches=4)
        seen = step(state, batch)[0].opt_state
    else:
        add, apply = optax_accum.make_window_steps(loss_fn, optimizer)
        window = None
        for micro_batch in micro_batches:
            window = add(state, micro_batch, window)
        seen = apply(state, window)[0].opt_state
    assert_near_float32(seen["grads"], params, batch, "bfloat16")


@pytest.mark.slow
def test_page_trains(page):
    """What it leaves behind, by `update_jmp` and by door 2 with loss scales."""
    first = float32_loss(page["init_params"](), page["batch"])
    for params in (page["params"], page["state"].params):
        assert float32_loss(params, page["batch"]) < first


@pytest.mark.parametrize("door", [1, 2])
def test_mean_of_bfloat16_gradients_reaches_the_optimizer_in_float32(door):
    """Of 1, 1 and 1 + 2**-6 it has 16 bits more than bfloat16 can hold."""
    gradients = np.array([1, 1, 1 + 2.0**-6], np.float32)
    w, rows = jnp.zeros((), jnp.bfloat16), jnp.asarray(gradients, jnp.bfloat16)
    optimizer = accumulate(recorder(), 3) if door == 1 else recorder()
    if door == 1:
        _, opt_state = feed(optimizer, list(rows), w)
        seen, sums = opt_state.inner_opt_state["grads"], opt_state.acc_grads
        assert sums.dtype == jnp.float32
    else:
        step = optax_accum.make_train_step(
            lambda w, row: jnp.mean(w * row), optimizer, num_microbatches=3
        )
        state, _ = step(optax_accum.init_train_state(w, optimizer), rows)
        assert state.params.dtype == jnp.bfloat16
        seen = state.opt_state["grads"]
    expected = np.mean(gradients, dtype=np.float64)
    # The sum is exact, and a mean of three is rounded twice at most.
    assert abs(float(seen) - expected) <= 2 * F32_ULP * expected
    rounded = float(jnp.asarray(expected, jnp.bfloat16))
    assert abs(rounded - expected) > 1e3 * F32_ULP * expected


# -- Door 1: loss scales


def with_optimizer(function, tx):
    """A jitted function of the page, with another `tx`."""
    plain = function.__wrapped__
    names = plain.__globals__ | {"tx": tx}
    return jax.jit(types.FunctionType(plain.__code__, names))


def make_scale(kind, scale):
    if kind == "flax":
        return DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(scale))
    return jmp.DynamicLossScale(jnp.float32(scale))


def number(scale):
    return float(scale.scale if isinstance(scale, DynamicScale) else scale.loss_scale)


def run_door_1(page, kind, tx, micro_batches, scale):
    """What `tx`, which never moves the parameters, emits, and scales after each call.

    Its innermost state is a `recorder`'s.
    """
    update = with_optimizer(page[FUNCTIONS[kind]], tx)
    params, scale = page["init_params"](), make_scale(kind, scale)
    opt_state, emitted, scales = tx.init(params), [], []
    for micro_batch in micro_batches:
        params, opt_state, scale = update(params, opt_state, scale, micro_batch)
        seen = optax.tree.get(opt_state, "grads")
        emitted.append(seen["w1"] if optax_accum.has_emitted(opt_state) else None)
        scales.append(number(scale))
    return emitted, scales, opt_state


@pytest.fixture(scope="module")
def plain_gradient(page):
    """Of the page's float16 loss times a scale, in plain JAX."""

    def scaled_loss(params, micro_batch, scale):
        return scale * page["float16_loss"](params, micro_batch)

    return jax.jit(jax.grad(scaled_loss))


def plain_calls(plain_gradient, params, micro_batches, scale):
    """Calls for `model_updates`, and scales: each gradient unscaled at once."""
    calls, scales = [], []
    for micro_batch in micro_batches:
        grads = plain_gradient(params, micro_batch, jnp.float32(scale))
        is_bad = not all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))
        gradient = np.asarray(grads["w1"], np.float64) / scale
        calls.append((gradient, 1.0, is_bad, False))
        scale = scale / 2 if is_bad else scale
        scales.append(scale)
    return calls, scales


def frozen():
    return optax.chain(recorder(), optax.set_to_zero())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "on_skip"),
    [
        ("flax", "microbatch"),
        ("flax", "window"),
        ("flax", "ignore"),
        ("jmp", "microbatch"),
    ],
)
def test_scales_that_change_within_a_window(page, plain_gradient, kind, on_skip):
    micro_batches = make_micro_batches(page, bad=(2, 6, 7))
    tx = accumulate(frozen(), 4, skip_fn=skip_nonfinite, on_skip=on_skip)
    emitted, scales, opt_state = run_door_1(page, kind, tx, micro_batches, FIRST_SCALE)
    calls, expected_scales = plain_calls(
        plain_gradient, page["init_params"](), micro_batches, FIRST_SCALE
    )
    assert scales == expected_scales
    skips = [skip for _, _, skip, _ in calls]
    # The first leaves finite ones at both scales in its window.
    assert [i for i, skip in enumerate(skips) if skip] == [2, 6, 7]
    assert int(opt_state.skipped) == sum(skips)
    expected = model_updates(calls, lambda step: 4, on_skip)
    for actual, update in zip(emitted, expected, strict=True):
        assert (actual is None) == np.all(update == 0)
        if actual is not None:
            # Four additions and a division, in float32, relative to the largest term.
            size = max(np.max(np.abs(g)) for g, _, skip, _ in calls if not skip)
            np.testing.assert_allclose(actual, -update, rtol=0, atol=5 * F32_ULP * size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flax", "jmp"])
def test_window_with_two_scales_is_the_large_batch_of_what_was_finite(page, kind):
    micro_batches = make_micro_batches(page, bad=(2,))[:4]
    traces, tx = [], accumulate(frozen(), 4, skip_fn=skip_nonfinite)

    def update(*args):
        traces.append(1)
        return tx.update(*args)

    counted = optax.GradientTransformation(tx.init, update)
    _, scales, opt_state = run_door_1(page, kind, counted, micro_batches, FIRST_SCALE)
    assert scales == [FIRST_SCALE, FIRST_SCALE, FIRST_SCALE / 2, FIRST_SCALE / 2]
    assert len(traces) == 1
    seen = optax.tree.get(opt_state, "grads")
    finite = concatenate([m for i, m in enumerate(micro_batches) if i != 2])
    assert_near_float32(seen, page["init_params"](), finite, "float16")


@pytest.mark.slow
def test_unscaling_after_accumulating_should_fail(page, plain_gradient):
    """The last scale is half of what the one finite gradient was scaled with."""
    good, bad = make_micro_batches(page, bad=(1,))[:2]
    params = page["init_params"]()
    tx = accumulate(optax.identity(), 2, skip_fn=skip_nonfinite)
    scale, state = jmp.DynamicLossScale(jnp.float32(FIRST_SCALE)), tx.init(params)
    for micro_batch in (good, bad):
        grads = plain_gradient(params, micro_batch, scale.loss_scale)
        scale = scale.adjust(jmp.all_finite(grads))
        updates, state = tx.update(grads, state, params)
    assert optax_accum.has_emitted(state)
    naive = scale.unscale(updates)["w1"]
    (right, _), _ = plain_calls(plain_gradient, params, [good, bad], FIRST_SCALE)
    # All factors are powers of two.
    np.testing.assert_array_equal(naive, 2 * right[0])


# -- Doors 2 and 3


@pytest.mark.slow
def test_scaled_loss_is_seen_unscaled_at_doors_2_and_3(page):
    params, optimizer = page["init_params"](), recorder()
    micro_batches = make_micro_batches(page)[:4]
    scales = [2.0**10, 2.0**12, 2.0**9, 2.0**11]
    add, apply = optax_accum.make_window_steps(page["scaled_loss"], optimizer)
    state, window = optax_accum.init_train_state(page["init_params"](), optimizer), None
    for micro_batch, scale in zip(micro_batches, scales, strict=True):
        window = add(state, micro_batch, window, jnp.float32(scale))
    state, metrics = apply(state, window)
    batch = concatenate(micro_batches)
    assert_near_float32(state.opt_state["grads"], params, batch, "float16")
    loss, square = float32_loss(params, batch), jnp.mean(batch["y"] ** 2)
    # The same, of an error that is smaller than prediction and target together.
    tolerance = ROUNDINGS * ROUNDING["float16"] * (loss + square)
    assert abs(metrics["loss"] - loss) <= tolerance

    step = optax_accum.make_train_step(
        page["scaled_loss"], optimizer, num_microbatches=4
    )
    state = optax_accum.init_train_state(page["init_params"](), optimizer)
    state, metrics = step(state, batch, jnp.float32(2.0**12))
    assert_near_float32(state.opt_state["grads"], params, batch, "float16")
    assert abs(metrics["loss"] - loss) <= tolerance


@pytest.fixture(scope="module")
def small_rows(page):
    """Parameters and a micro-batch of tiny errors, for float16 ends at 2**-24."""
    params, batch = page["init_params"](), make_micro_batches(page)[0]
    small = {"w1": params["w1"], "w2": params["w2"] * 2.0**-12}
    return small, batch | {"y": batch["y"] * 2.0**-12}


def assert_survives(params, batch, gradient_at):
    """Scaled, that is."""
    expected = jax.grad(float32_loss)(params, batch)["w1"]
    tolerance = ROUNDINGS * ROUNDING["float16"]
    assert largest_relative_error(gradient_at(2.0**14), expected) < tolerance
    assert largest_relative_error(gradient_at(1.0), expected) > tolerance


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flax", "jmp"])
def test_small_gradients_survive_at_door_1(page, small_rows, kind):
    params, batch = small_rows
    tx = accumulate(frozen(), 1)
    update = with_optimizer(page[FUNCTIONS[kind]], tx)

    def gradient_at(scale):
        _, state, _ = update(params, tx.init(params), make_scale(kind, scale), batch)
        return optax.tree.get(state, "grads")["w1"]

    assert_survives(params, batch, gradient_at)


@pytest.mark.slow
def test_small_gradients_survive_where_the_library_differentiates(page, small_rows):
    params, batch = small_rows
    grad = jax.jit(optax_accum.grad(page["scaled_loss"], num_microbatches=2))
    assert_survives(
        params, batch, lambda scale: grad(params, batch, jnp.float32(scale))["w1"]
    )


@pytest.mark.slow
def test_scaled_loss_of_an_unequal_mean(page):
    """A `Mean` passes through `scale_grad`; `jmp` would leave it unscaled."""
    scale_grad = page["scale_grad"]
    w = normal(0, 5)
    batch = {"x": normal(1, 12, 5), "mask": jnp.arange(12) % 5 == 0}

    def loss_fn(w, batch):
        return optax_accum.mean((batch["x"] @ w) ** 2, where=batch["mask"])

    def scaled_loss(w, batch, scale):
        return scale_grad(loss_fn(scale_grad(w, 1 / scale), batch), scale)

    grads = optax_accum.grad(scaled_loss, num_microbatches=4)(w, batch, jnp.float32(64))
    expected = jax.grad(lambda w: loss_fn(w, batch).value)(w)
    # Five products and three sums, of squares: nothing cancels but within x @ w.
    np.testing.assert_allclose(grads, expected, rtol=0, atol=2e-6 * np.max(expected))

    scale = jmp.DynamicLossScale(jnp.float32(64))
    assert scale.scale(loss_fn(w, batch)).value == loss_fn(w, batch).value


@pytest.mark.slow
def test_overflow_at_door_2_costs_the_step_and_halves_the_scale(page):
    step, guarded, scale = page["train_step"], page["guarded"], jnp.float32(2.0**40)
    state = optax_accum.init_train_state(page["init_params"](), guarded)
    state, metrics = step(state, page["batch"], scale)
    assert not metrics["emitted"] and state.opt_state.skipped == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, page["init_params"]())
    assert float(page["scale"].loss_scale) < 2.0**19
    assert page["metrics"]["emitted"] and page["state"].opt_state.skipped > 0
