"""A window over several calls is one batch, whatever the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F32_ULP, feed
from losses import LOSSES, ROWS, largest_relative_error, normal, regression, unsplit

import optax_accum
from optax_accum import Mean, Sum, mean

SGD = optax.sgd(1.0)


def masked_loss(w, batch):
    return mean((w * batch["x"]) ** 2, where=batch["mask"])


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    counts = np.array([6, 0, 1, 2, 0, 0, 5, 6, 1, 1, 3, 4])
    return {
        "x": jnp.asarray(rng.standard_normal((12, 6)), jnp.float32),
        "mask": jnp.asarray(np.arange(6) < counts[:, None]),
    }


def train(loss_fn, optimizer, params, calls, extras=None, **split):
    """Parameters, optimizer state and metrics after a step for each of `calls`."""
    step = optax_accum.make_train_step(loss_fn, optimizer, donate=False, **split)
    state, metrics = optax_accum.init_train_state(params, optimizer), []
    for i, call in enumerate(calls):
        state, report = step(state, call, **(extras[i] if extras else {}))
        metrics.append(report)
    return state.params, state.opt_state, metrics


def cut(batch, *ends):
    """Consecutive rows, up to each of `ends`."""
    starts = (0, *ends[:-1])
    rows = [slice(*pair) for pair in zip(starts, ends, strict=True)]
    return [jax.tree.map(lambda x, r=r: x[r], batch) for r in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["image classifier", "regression", "siamese"])
def test_four_calls_of_three_microbatches_are_one_batch(name):
    make, options = LOSSES[name]
    loss_fn, params, batch = make(np.float32)
    grads = jax.jit(jax.grad(unsplit(loss_fn)))(params, batch)
    rows = jax.tree.leaves(batch)[0].shape[0]
    calls = cut(batch, *(rows * i // 4 for i in range(1, 5)))
    tx = optax_accum.accumulate(SGD, 4)
    trained, _, metrics = train(
        loss_fn, tx, params, calls, num_microbatches=3, **options
    )
    moved = jax.tree.map(jnp.subtract, params, trained)
    # A dozen of sums in another order, and the subtraction of parameters of size 1.
    assert largest_relative_error(moved, grads) <= 2e-5
    assert [bool(report["emitted"]) for report in metrics] == [False] * 3 + [True]


def test_masked_tokens_in_four_calls_of_three_microbatches(batch):
    expected = jax.grad(unsplit(masked_loss))(2.0, batch)
    tx = optax_accum.accumulate(SGD, 4)
    calls = cut(batch, 3, 6, 9, 12)
    trained, _, _ = train(masked_loss, tx, 2.0, calls, num_microbatches=3)
    np.testing.assert_allclose(2.0 - trained, expected, rtol=36 * F32_ULP)


def test_a_decay_inside_the_mean(batch):
    """What the error of several terms advises."""

    def outside(w, batch):
        return masked_loss(w, batch) + 0.1 * w**2

    def inside(w, batch):
        losses = (w * batch["x"]) ** 2 + 0.1 * w**2
        return mean(losses, where=batch["mask"])

    expected = jax.grad(unsplit(outside))(2.0, batch)
    tx = optax_accum.accumulate(SGD, 2)
    trained, _, _ = train(inside, tx, 2.0, cut(batch, 4, 12), num_microbatches=2)
    np.testing.assert_allclose(2.0 - trained, expected, rtol=36 * F32_ULP)


@pytest.mark.slow
def test_calls_of_unequal_tokens_are_one_batch(batch):
    expected = jax.value_and_grad(unsplit(masked_loss))(2.0, batch)
    tx = optax_accum.accumulate(SGD, 4)
    calls = cut(batch, 2, 3, 8, 12)
    trained, _, metrics = train(masked_loss, tx, 2.0, calls, microbatch_size=2)
    np.testing.assert_allclose(2.0 - trained, expected[1], rtol=36 * F32_ULP)
    counts = [float(jnp.sum(call["mask"])) for call in calls]
    assert [report["weight"] for report in metrics] == counts
    assert counts[1] == 1 and counts[2] == 13

    # The window's loss: what each call reports, by its weight.
    losses = [report["loss"] for report in metrics]
    np.testing.assert_allclose(
        np.average(losses, weights=counts), expected[0], rtol=36 * F32_ULP
    )


@pytest.mark.slow
def test_twin_calls_that_weigh_alike_are_another_batch(batch):
    """What happens if the step does not hand over what a call weighs."""
    expected = jax.grad(unsplit(masked_loss))(2.0, batch)
    tx = optax_accum.accumulate(SGD, 4)
    calls = cut(batch, 2, 3, 8, 12)
    alike = [{"weight": 1.0}] * 4
    trained, _, _ = train(masked_loss, tx, 2.0, calls, alike, microbatch_size=2)
    assert abs((2.0 - trained) / expected - 1) > 0.01


def test_a_call_of_padding_counts_as_a_call_and_weighs_nothing(batch):
    nothing = batch | {"mask": jnp.zeros_like(batch["mask"])}
    tx = optax_accum.accumulate(SGD, 2)
    expected = jax.grad(unsplit(masked_loss))(2.0, batch)
    for calls in ([batch, nothing], [nothing, batch]):
        trained, state, metrics = train(masked_loss, tx, 2.0, calls, num_microbatches=3)
        np.testing.assert_allclose(2.0 - trained, expected, rtol=36 * F32_ULP)
        assert (state.mini_step, state.gradient_step) == (0, 1)
    trained, state, metrics = train(
        masked_loss, tx, 2.0, [nothing, nothing], num_microbatches=3
    )
    assert (trained, state.mini_step, state.gradient_step) == (2.0, 0, 0)
    assert not metrics[-1]["emitted"]


@pytest.mark.parametrize("split", [{}, {"num_microbatches": 3}])
@pytest.mark.parametrize("terms", [1, 2])
def test_a_batch_of_padding_is_no_step(batch, split, terms):
    """Neither momentum nor decay moves; the twin, with one token, steps."""

    def loss_fn(w, batch):
        loss = masked_loss(w, batch)
        return loss if terms == 1 else loss + 2 * masked_loss(w, batch)

    optimizer = optax.adamw(0.1, weight_decay=0.5)
    nothing = batch | {"mask": jnp.zeros_like(batch["mask"])}
    one = batch | {"mask": nothing["mask"].at[0, 0].set(True)}
    trained, state, metrics = train(loss_fn, optimizer, 2.0, [nothing], **split)
    assert trained == 2.0 and not metrics[0]["emitted"]
    assert (metrics[0]["loss"], metrics[0]["grad_norm"]) == (0, 0)
    assert optax.tree.get(state, "count") == 0
    trained, state, metrics = train(loss_fn, optimizer, 2.0, [one], **split)
    assert trained != 2.0 and metrics[0]["emitted"]
    assert optax.tree.get(state, "count") == 1


def test_a_plain_loss_has_no_branch():
    """Rows are known while tracing; what a mask weighs is not."""
    state = optax_accum.init_train_state(2.0, optax.adamw(0.1))

    def branches(loss_fn):
        step = optax_accum.make_train_step(loss_fn, optax.adamw(0.1))
        batch = {"x": jnp.ones((4, 6)), "mask": jnp.ones((4, 6), bool)}
        return str(jax.make_jaxpr(step)(state, batch)).count("cond[")

    assert branches(lambda w, batch: jnp.mean(w * batch["x"])) == 0
    assert branches(masked_loss) == 1


@pytest.mark.slow
def test_a_partial_window_of_unequal_tokens(batch):
    """https://github.com/huggingface/transformers/pull/39659"""
    calls = cut(batch, 3, 8)
    seen = jax.tree.map(lambda x: x[:8], batch)
    expected = jax.grad(unsplit(masked_loss))(2.0, seen)
    tx = optax_accum.accumulate(SGD, 4)
    trained, state, _ = train(
        masked_loss,
        tx,
        2.0,
        calls,
        [{"emit": False}, {"emit": True}],
        microbatch_size=2,
    )
    np.testing.assert_allclose(2.0 - trained, expected, rtol=24 * F32_ULP)
    assert (state.mini_step, state.gradient_step) == (0, 1)


@pytest.mark.slow
def test_a_loop_of_ones_own_hands_over_the_weight(batch):
    """Door 1: the value is differentiated, the weight goes with the gradient."""
    expected = jax.value_and_grad(unsplit(masked_loss))(2.0, batch)

    @jax.value_and_grad
    def grad_fn(w, part):
        return masked_loss(w, part).value

    calls = cut(batch, 2, 3, 8, 12)
    values, grads = zip(*(grad_fn(2.0, call) for call in calls), strict=True)
    weights = [masked_loss(2.0, call).weight for call in calls]
    tx = optax_accum.accumulate(SGD, 4)
    updates, _ = feed(tx, grads, 2.0, weight=weights, value=values)
    np.testing.assert_allclose(-updates[-1], expected[1], rtol=36 * F32_ULP)


@pytest.mark.slow
def test_sums_over_calls(batch):
    """Each call weighs 1: their mean, or their sum where that is what is asked."""

    def loss_fn(w, batch):
        return Sum(w * jnp.sum(batch["x"]))

    def in_two(w, batch):
        return 0.25 * loss_fn(w, batch) + 0.75 * loss_fn(w, batch)

    calls, total = cut(batch, 5, 12), float(jnp.sum(batch["x"]))
    for reduction, expected in (("sum", total), ("mean", total / 2)):
        tx = optax_accum.accumulate(SGD, 2, reduction=reduction)
        for loss in (loss_fn, in_two):
            trained, _, metrics = train(loss, tx, 0.0, calls, microbatch_size=4)
            # 72 summands of size 1, which cancel
            np.testing.assert_allclose(-trained, expected, atol=72 * F32_ULP)
            assert metrics[0]["weight"] == 1


# -- Several terms


def two_terms(w, batch):
    return masked_loss(w, batch) + mean(w * batch["x"])


def test_several_terms_over_several_calls_are_refused(batch):
    tx = optax_accum.accumulate(SGD, 2)
    for optimizer in (tx, optax.chain(optax.clip(1.0), tx)):
        with pytest.raises(ValueError, match="one term .* got 2"):
            train(two_terms, optimizer, 2.0, [batch], num_microbatches=3)
    train(masked_loss, tx, 2.0, [batch], num_microbatches=3)


@pytest.mark.slow
def test_several_terms_in_windows_of_one_call(batch):
    """Every call is a window: nothing crosses it."""
    bare = train(two_terms, SGD, 2.0, [batch], num_microbatches=3)
    wrapped = train(
        two_terms, optax_accum.accumulate(SGD, 1), 2.0, [batch], num_microbatches=3
    )
    # The same sums, fused in another way.
    np.testing.assert_allclose(bare[0], wrapped[0], rtol=4 * F32_ULP)
    assert bare[2][0]["weight"] == wrapped[2][0]["weight"] == 1
    nothing = jax.tree.map(jnp.zeros_like, batch)

    def masked_twice(w, batch):
        return masked_loss(w, batch) + masked_loss(3 * w, batch)

    _, state, metrics = train(
        masked_twice, optax_accum.accumulate(SGD, 1), 2.0, [nothing], num_microbatches=3
    )
    assert state.gradient_step == 0 and not metrics[0]["emitted"]


# -- Keys


def test_keys_differ_between_the_calls_of_a_window():
    """Every micro-batch of every call has its own, known beforehand."""
    key, batch = jax.random.key(5), normal(0, 6)

    def loss_fn(w, batch, key):
        noise = jax.random.normal(key)
        return Mean(w * noise, 1.0), optax_accum.Stack(noise)

    tx = optax_accum.accumulate(SGD, 2)
    step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=3, has_aux=True)
    state, seen = optax_accum.init_train_state(0.0, tx, key=key), []
    for _ in range(2):
        state, metrics = step(state, batch)
        seen.extend(np.asarray(metrics["aux"]).tolist())
    expected = [
        float(jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, call), i)))
        for call in range(2)
        for i in range(3)
    ]
    assert seen == expected and len(set(seen)) == 6
    np.testing.assert_allclose(-state.params, np.mean(seen), rtol=24 * F32_ULP)


# -- As a loop


@pytest.mark.slow
def test_the_step_is_a_scan_body_with_16_bit_parameters():
    loss_fn, params, batch = regression(np.float32)
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
    for tx in (optax.adam(0.1), optax_accum.accumulate(optax.adam(0.1), 2)):
        step = optax_accum.make_train_step(loss_fn, tx, num_microbatches=3)
        state = optax_accum.init_train_state(params, tx)
        batches = jax.tree.map(lambda x: jnp.stack([x] * 4), batch)
        last, metrics = jax.lax.scan(step, state, batches)
        assert last.step == 4 and metrics["loss"].dtype == jnp.float32
        assert metrics["loss"][-1] < metrics["loss"][0]


def test_compiles_once(batch):
    for tx in (SGD, optax_accum.accumulate(SGD, 2)):
        step = optax_accum.make_train_step(masked_loss, tx, num_microbatches=ROWS)
        state = optax_accum.init_train_state(2.0, tx)
        for _ in range(3):
            state, _ = step(state, batch)
        assert step._cache_size() == 1
