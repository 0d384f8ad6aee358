"""What people ran into with accumulation elsewhere: each report, and the right value.

Each test has the address of the report. Fed are gradients, with sgd(1.0) and parameters
0 unless said otherwise, so that the update is minus the mean.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F32_ULP, assert_bits_equal, counter, feed, recorder, run_bare, types

import optax_accum


def inverse(count):
    return 1.0 / (1.0 + count.astype(jnp.float32))


def emitted(grads, every_k, inner=None, params=0.0, **each):
    inner = optax.sgd(1.0) if inner is None else inner
    return feed(optax_accum.accumulate(inner, every_k), grads, params, **each)[0]


# -- Optimizer semantics inside the window


def test_clip_sees_the_mean_and_not_the_microbatch():
    """https://github.com/jenkspt/gpt-jax/issues/2"""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    grads = [jnp.array([3.0, 4.0]), jnp.array([0.6, 0.8])]
    updates = emitted(grads, 2, clipped, jnp.zeros(2))
    np.testing.assert_allclose(updates[1], [-0.6, -0.8], rtol=4 * F32_ULP)
    naive = optax.chain(clipped, optax.apply_every(2))
    wrong, _ = run_bare(naive, grads, jnp.zeros(2))
    np.testing.assert_allclose(wrong[1], [-1.2, -1.6], rtol=4 * F32_ULP)


def test_adam_steps_once_on_the_mean():
    """https://github.com/jenkspt/gpt-jax/issues/2"""
    right = emitted([1.0, 3.0], 2, optax.adam(0.1))[1]
    np.testing.assert_allclose(right, -0.1, rtol=1e-5)  # 1 - b2 rounds: see above
    for naive, wrong in (
        (optax.chain(optax.adam(0.1), optax.apply_every(2)), -0.1918),
        (optax.chain(optax.apply_every(2), optax.adam(0.1)), -0.0744),
    ):
        updates, _ = run_bare(naive, [1.0, 3.0], 0.0)
        np.testing.assert_allclose(updates[1], wrong, atol=5e-5)


@pytest.mark.parametrize("every_k", [0, -1, 2.5, True])
def test_counts_that_make_no_sense_are_refused(every_k):
    """https://github.com/huggingface/transformers/issues/20855"""
    with pytest.raises((TypeError, ValueError), match="every_k.*integer >= 1, got"):
        optax_accum.accumulate(optax.sgd(1.0), every_k)


def test_weight_decay_once_a_window():
    """https://github.com/keras-team/keras/issues/19990 : 0.857375 with one a call"""
    decay = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    tx, w = optax_accum.accumulate(decay, 3), jnp.ones(())
    state = tx.init(w)
    for _ in range(3):
        updates, state = tx.update(jnp.zeros(()), state, w)
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(w, 0.95, rtol=F32_ULP)


def test_clipping_the_window_and_not_its_parts():
    """https://github.com/google/praxis/pull/6"""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    grads = [jnp.array([3.0, 4.0]), jnp.zeros(2)]
    updates = emitted(grads, 2, clipped, jnp.zeros(2))
    np.testing.assert_allclose(updates[1], [-0.6, -0.8], rtol=4 * F32_ULP)
    outside = optax.chain(
        optax.clip_by_global_norm(1.0), optax_accum.accumulate(optax.sgd(1.0), 2)
    )
    wrong, _ = feed(outside, grads, jnp.zeros(2))
    np.testing.assert_allclose(wrong[1], [-0.3, -0.4], rtol=4 * F32_ULP)


@pytest.mark.slow
def test_adafactor_in_bfloat16():
    """https://github.com/google-deepmind/optax/issues/377"""
    params = jnp.ones((4, 4), jnp.bfloat16)
    bare, _ = run_bare(optax.adafactor(0.1), [params], params)
    updates = emitted([params, params], 2, optax.adafactor(0.1), params)
    assert updates[1].dtype == bare[0].dtype == jnp.bfloat16
    # The mean is the gradient exactly; bfloat16 state and float32 state round apart.
    np.testing.assert_allclose(
        np.asarray(updates[1], float), np.asarray(bare[0], float), rtol=2**-7
    )


def test_schedule_free_under_mixed_precision_is_a_scan_carry():
    """https://github.com/google-deepmind/optax/issues/1038"""
    inner = optax.contrib.schedule_free_adamw(0.1)
    params = jnp.ones(3, jnp.bfloat16)
    tx = optax_accum.accumulate(inner, 2)
    state = tx.init(params)
    with jax.numpy_dtype_promotion("standard"):
        last, updates = jax.lax.scan(
            lambda s, g: tx.update(g, s, params)[::-1], state, jnp.ones((4, 3))
        )
        bare = jax.eval_shape(
            lambda: inner.update(jnp.ones(3), inner.init(params), params)
        )
    assert types(last) == types(state)
    assert updates.dtype == bare[0].dtype


def test_mean_in_float32_over_many_bfloat16_calls():
    """https://github.com/google-deepmind/optax/issues/1552"""
    grads = jnp.array([1 + 2.0**-7 * (i % 2) for i in range(256)], jnp.bfloat16)
    tx = optax_accum.accumulate(recorder(), 256)
    state = tx.init(jnp.zeros((), jnp.bfloat16))
    state, _ = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, grads)
    assert state.inner_opt_state["grads"] == 1.00390625


# -- Counting, schedules, logging


def test_schedules_count_gradient_steps():
    """https://github.com/AI-Hypercomputer/maxtext/pull/3452"""
    inner = optax.sgd(inverse)
    updates = emitted([1.0] * 6, 2, inner)
    expected = [0, -1, 0, -1 / 2, 0, -1 / 3]
    np.testing.assert_allclose(updates, expected, rtol=F32_ULP)


def test_the_first_window_is_as_long_as_the_others():
    """https://github.com/huggingface/transformers/pull/12675"""
    updates = emitted([1.0] * 8, 4)
    assert [i + 1 for i, update in enumerate(updates) if update] == [4, 8]


def test_the_effective_batch_is_calls_times_rows():
    """https://github.com/young-geng/EasyLM/issues/108"""
    tx = optax_accum.accumulate(optax.sgd(1.0), 2)
    train_step = optax_accum.make_train_step(lambda w, x: jnp.mean(w * x), tx)
    state = optax_accum.init_train_state(0.0, tx)
    rows, records = 0.0, 0
    for _ in range(2):
        state, metrics = train_step(state, jnp.ones(2))
        rows, records = rows + metrics["weight"], records + int(metrics["emitted"])
    assert (rows, records) == (4, 1)


def test_the_logged_learning_rate_is_the_applied_one():
    """https://github.com/google-deepmind/optax/issues/415"""
    inner = optax.inject_hyperparams(optax.sgd)(inverse)
    tx = optax_accum.accumulate(inner, 2)
    state, logged, applied = tx.init(jnp.zeros(())), [], []
    for _ in range(6):
        update, state = tx.update(jnp.ones(()), state)
        logged.append(optax.tree.get(state, "hyperparams")["learning_rate"])
        applied.append(-update)
    # Two calls of a window share a rate; the rate at a boundary is the one applied.
    np.testing.assert_allclose(logged, [1, 1, 1, 1 / 2, 1 / 2, 1 / 3], rtol=F32_ULP)
    np.testing.assert_allclose(applied[1::2], logged[1::2], rtol=F32_ULP)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_the_loss_does_not_depend_on_the_number_of_microbatches(num_microbatches):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/2569"""
    train_step = optax_accum.make_train_step(
        lambda w, x: jnp.mean(x) + 0.0 * w,
        optax.sgd(1.0),
        num_microbatches=num_microbatches,
    )
    state = optax_accum.init_train_state(0.0, optax.sgd(1.0))
    assert train_step(state, jnp.full(8, 4.0))[1]["loss"] == 4.0


# -- Pytrees and extra arguments


def test_parameters_reach_the_wrapped_optimizer():
    """https://github.com/google-deepmind/optax/issues/145"""
    inner = optax.adamw(0.1, weight_decay=0.5)
    updates = emitted([0.0, 0.0], 2, inner, params=1.0)
    np.testing.assert_allclose(1.0 + updates[1], 0.95, rtol=F32_ULP)


def test_missing_parameters_raise_the_error_of_the_wrapped_optimizer():
    """https://github.com/google-deepmind/optax/issues/145"""
    tx = optax_accum.accumulate(optax.adamw(0.1), 2)
    with pytest.raises(ValueError, match="params"):
        tx.update(jnp.ones(()), tx.init(jnp.ones(())))


def test_extra_arguments_pass_through_a_chain():
    """https://github.com/google-deepmind/optax/issues/1131"""
    tx = optax.chain(optax_accum.accumulate(recorder(["value"]), 2), optax.identity())
    _, state = feed(tx, [1.0, 1.0], value=[3.0, 3.0])
    assert optax.tree.get(state, "value") == 3.0


# -- Batch arithmetic, partial windows, resume


def test_rows_that_n_does_not_divide_name_both_and_the_divisors():
    """https://github.com/marin-community/levanter/pull/1261"""

    def loss_fn(w, x):
        return jnp.mean(w * x)

    for message in ("4", "6 rows", r"\[1, 2, 3, 6\]"):
        with pytest.raises(ValueError, match=message):
            optax_accum.grad(loss_fn, num_microbatches=4)(1.0, jnp.ones(6))
    whole = optax_accum.grad(loss_fn, microbatch_size=8)
    assert "scan" not in str(jax.make_jaxpr(whole)(1.0, jnp.ones(6)))


def test_the_last_partial_window_is_divided_by_what_was_seen():
    """https://github.com/Lightning-AI/pytorch-lightning/issues/19987"""
    updates = emitted([1.0] * 6, 4, emit=[False] * 5 + [True])
    np.testing.assert_array_equal(updates, [0, 0, 0, -1, 0, -1])


RESUME = """
import sys, jax, jax.numpy as jnp, numpy as np, optax, optax_accum
tx = optax_accum.accumulate(optax.sgd(1.0), 4)
state = tx.init(jnp.zeros(()))
leaves, treedef = jax.tree.flatten(state)
saved = np.load(sys.argv[1])
state = jax.tree.unflatten(treedef, [jnp.asarray(saved[k]) for k in saved.files])
for grad in (5.0, 7.0):
    update, state = tx.update(jnp.asarray(grad), state)
np.savez(sys.argv[2], update, *jax.tree.leaves(state))
"""


@pytest.mark.slow
def test_resumed_mid_window_in_a_new_process(tmp_path):
    """https://github.com/huggingface/transformers/issues/22143"""
    tx = optax_accum.accumulate(optax.sgd(1.0), 4)
    _, state = feed(tx, [1.0, 3.0])
    np.savez(tmp_path / "saved.npz", *jax.tree.leaves(state))
    command = [sys.executable, "-c", RESUME, "saved.npz", "resumed.npz"]
    subprocess.run(command, cwd=tmp_path, check=True)
    resumed = np.load(tmp_path / "resumed.npz")
    straight, state = feed(tx, [1.0, 3.0, 5.0, 7.0])
    update, *leaves = (resumed[name] for name in resumed.files)
    assert update == straight[-1] == -4.0
    assert_bits_equal([jnp.asarray(leaf) for leaf in leaves], jax.tree.leaves(state))


def test_checkpoints_are_labelled_with_gradient_steps():
    """https://github.com/AI-Hypercomputer/maxdiffusion/pull/484"""
    _, state = feed(optax_accum.accumulate(optax.sgd(1.0), 3), [1.0] * 7)
    assert (state.gradient_step, state.mini_step) == (2, 1)


def test_windows_cross_epochs():
    """https://github.com/google-deepmind/jax_privacy/pull/372"""
    _, state = feed(optax_accum.accumulate(optax.sgd(1.0), 2), [1.0] * 7 * 3)
    assert (state.gradient_step, state.mini_step) == (10, 1)


# -- Precision and lost micro-batches


@pytest.mark.parametrize(
    ("grads", "mean"),
    [([1.0] * 512, 1.0), ([1.0] + [2.0**-9] * 1023, 0.00292778)],
)
@pytest.mark.parametrize("door", [1, 2])
def test_bfloat16_gradients_are_summed_in_float32(door, grads, mean):
    """https://github.com/deepspeedai/DeepSpeed/issues/1800"""
    grads = jnp.array(grads, jnp.bfloat16)
    if door == 1:
        tx = optax_accum.accumulate(recorder(), len(grads))
        state = tx.init(jnp.zeros((), jnp.bfloat16))
        state, _ = jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], state, grads)
        actual = state.inner_opt_state["grads"]
    else:
        actual = optax_accum.grad(
            lambda w, x: jnp.mean(w * x),
            microbatch_size=1,
            accumulator_dtype=jnp.float32,
        )(jnp.bfloat16(1.0), grads)
    # 2**-9 steps from 1 are exact in float32, the mean is given to eight places.
    np.testing.assert_allclose(actual, mean, atol=5e-9)
    naive = jax.lax.scan(lambda s, g: (s + g, 0), jnp.bfloat16(0), grads)[0]
    assert abs(float(naive) / len(grads) - mean) > 0.3 * mean  # 256 or 1 of the sum


def test_every_microbatch_counts_once():
    """https://github.com/AMD-AGI/Primus/pull/1046"""
    updates = emitted([2.0**i for i in range(8)], 4)
    np.testing.assert_array_equal(updates, [0, 0, 0, -3.75, 0, 0, 0, -60])


# -- What is split


def test_only_batch_arguments_are_split():
    """https://github.com/marin-community/marin/pull/9045"""
    w = jax.random.normal(jax.random.key(0), (4, 3))
    batch = {
        "x": jax.random.normal(jax.random.key(1), (4, 3)),
        "temperature": 2.0,
        "text": "text",
        "nothing": None,
    }

    def loss_fn(w, batch):
        assert w.shape == (4, 3) and batch["text"] == "text"
        return jnp.mean(jnp.sum(w * w) * batch["x"] / batch["temperature"])

    expected = jax.grad(loss_fn)(w, batch)
    actual = optax_accum.grad(loss_fn, num_microbatches=2)(w, batch)
    np.testing.assert_allclose(actual, expected, rtol=4 * F32_ULP)


@pytest.mark.slow
def test_dropout_masks_differ_between_microbatches_and_repeat():
    """https://github.com/google-research/vision_transformer/issues/286"""
    key, x = jax.random.key(3), jnp.ones((4, 64))

    def loss_fn(w, x, key):
        mask = jax.random.bernoulli(key, 0.5, x.shape[1:])
        return jnp.mean(x * jnp.where(mask, w, 0.0)[None])

    grad_fn = optax_accum.grad(loss_fn, num_microbatches=4, rng_argnums=2)
    masks = jax.vmap(
        lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (64,))
    )(jnp.arange(4))
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == 4
    # A big batch whose row i uses fold_in(key, i).
    expected = jax.grad(lambda w: jnp.mean(jnp.where(masks, x * w[None], 0.0)))(
        jnp.ones(64)
    )
    actual = grad_fn(jnp.ones(64), x, key)
    np.testing.assert_allclose(actual, expected, rtol=4 * F32_ULP)
    np.testing.assert_array_equal(actual, grad_fn(jnp.ones(64), x, key))
    shared = optax_accum.grad(loss_fn, num_microbatches=4)(jnp.ones(64), x, key)
    assert set(np.unique(shared)) == {0.0, np.float32(1 / 64)}  # one mask for all


def test_statistics_carried_in_order():
    """https://github.com/keras-team/keras/pull/18948"""

    def loss_fn(w, x, mean):
        return jnp.mean(w * x), 0.9 * mean + 0.1 * jnp.mean(x)

    value_and_grad = optax_accum.value_and_grad(
        loss_fn, num_microbatches=4, carry_argnum=2
    )
    (_, mean), _ = value_and_grad(1.0, jnp.array([1.0, 2.0, 3.0, 4.0]), 0.0)
    np.testing.assert_allclose(mean, 0.9049, rtol=4 * F32_ULP)


# -- Found by running optax 0.2.8


NAN_FED = [np.nan, 1.0, 1.0, 1.0, 3.0, 5.0]


def test_a_nan_reaches_its_own_window_only():
    """optax.MultiSteps is NaN at every boundary from then on: its reset multiplies."""
    updates = emitted(NAN_FED, 2)
    np.testing.assert_array_equal(updates, [0, np.nan, 0, -1, 0, -4])
    multi_steps = optax.MultiSteps(optax.sgd(1.0), 2)
    poisoned, _ = run_bare(multi_steps, NAN_FED, 0.0)
    assert np.all(np.isnan(poisoned[1::2]))


@pytest.mark.parametrize(
    ("on_skip", "expected"),
    [("window", [0, 0, 0, -1, 0, -4]), ("microbatch", [0, -1, 0, -1, 0, -4])],
)
def test_a_nan_skipped(on_skip, expected):
    tx = optax_accum.accumulate(
        optax.sgd(1.0), 2, skip_fn=optax_accum.skip_nonfinite, on_skip=on_skip
    )
    np.testing.assert_array_equal(feed(tx, NAN_FED)[0], expected)


def test_complex_parameters_keep_their_imaginary_part():
    grads = [jnp.array(g, jnp.complex64) for g in (1 + 2j, 3 - 1j)]
    updates = emitted([grads[0]] * 2 + [grads[1]] * 2, 2, params=grads[0])
    np.testing.assert_allclose(updates, [0, -(1 + 2j), 0, -(3 - 1j)], rtol=4 * F32_ULP)


def test_doubles_are_summed_in_doubles(x64):
    grads = [jnp.array(g, jnp.float64) for g in (1.0, 1 + 4e-10, 1.0, 1 + 4e-10)]
    updates = emitted(grads, 4, params=np.zeros((), np.float64))
    np.testing.assert_allclose(updates[3], -(1 + 2e-10), atol=1e-15)


def test_a_mean_loss_has_the_gradient_of_the_batch():
    """`optax.microbatch` sums by default: 140."""
    actual = optax_accum.grad(lambda w, x: jnp.mean((w * x) ** 2), num_microbatches=4)(
        1.0, jnp.arange(8.0)
    )
    assert actual == 35.0


def test_skipped_calls_shift_the_window_only_where_asked():
    fed = [np.nan, 1.0, 2.0, 3.0, 4.0, 5.0]
    for on_skip, expected in (
        ("ignore", [0, 0, -1.5, 0, -3.5, 0]),
        ("microbatch", [0, -1, 0, -2.5, 0, -4.5]),
    ):
        tx = optax_accum.accumulate(
            optax.sgd(1.0), 2, skip_fn=optax_accum.skip_nonfinite, on_skip=on_skip
        )
        np.testing.assert_array_equal(feed(tx, fed)[0], expected)


def test_the_wrapped_optimizer_cannot_leak_between_boundaries():
    """g / |g| is NaN for g = 0; nothing of it may show before the boundary."""
    normalize = optax.stateless(lambda g, _: jax.tree.map(lambda x: x / jnp.abs(x), g))
    updates = emitted([0.0, 1.0], 2, normalize)
    np.testing.assert_array_equal(updates, [0.0, 1.0])
    evaluations = []
    tx = optax_accum.accumulate(counter(evaluations), 4)
    jax.lax.scan(
        lambda s, g: tx.update(g, s)[::-1], tx.init(jnp.zeros(())), jnp.ones(8)
    )
    jax.effects_barrier()
    assert len(evaluations) == 2
