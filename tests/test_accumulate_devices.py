"""Door 1 inside a ``shard_map``: `accumulate(..., reduce_axes=)` on local gradients.

The oracle is a loop in NumPy over calls and devices.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F32_ULP, auto_mesh, count_primitives, recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import optax_accum

DEVICES = 4
MESH = auto_mesh((DEVICES,), ("data",))


def run(tx, grads, weights=None, emit=None, value=None, check_vma=True):
    """The updates of all calls, and the state after the last of them.

    Args:
      tx: the transformation.
      grads: shape ``(calls, devices)``; each is a gradient of one entry.
      weights: the same, or None.
      emit: shape ``(calls,)``, or None.
      value: as `weights`.
      check_vma: whether the `shard_map` has types of what varies.
    """
    each = {"weight": weights, "value": value}
    given = {name: jnp.asarray(x) for name, x in each.items() if x is not None}

    def local(grads, given):
        params = {"w": jnp.zeros(1), "b": jnp.zeros(())}
        state, updates = tx.init(params), []
        for i in range(grads.shape[0]):
            extra = {name: x[i, 0] for name, x in given.items()}
            if emit is not None:
                extra["emit"] = jnp.asarray(bool(emit[i]))
            grad = {"w": grads[i], "b": grads[i, 0]}
            update, state = tx.update(grad, state, params, **extra)
            updates.append(update)
        # The sums differ from device to device: they stay inside.
        return updates, state._replace(acc_grads=(), acc_value=())

    mapped = jax.shard_map(
        local,
        mesh=MESH,
        in_specs=(P(None, "data"), P(None, "data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    updates, state = jax.jit(mapped)(jnp.asarray(grads, jnp.float32), given)
    for update in updates:
        np.testing.assert_array_equal(update["b"], update["w"][0])
    return np.array([update["w"][0] for update in updates]), state


def expect(grads, weights, every_k, skips=None, on_skip="microbatch", emit=None):
    """What `accumulate(sgd(1.0))` must emit at each call, and how many it skipped."""
    skips = np.zeros(np.shape(grads), bool) if skips is None else skips
    total = weight = 0.0
    calls, dropped, updates = 0, False, []
    for i, (row, row_weights, row_skips) in enumerate(
        zip(grads, weights, skips, strict=True)
    ):
        for g, w, skip in zip(row, row_weights, row_skips, strict=True):
            if w > 0 and not skip:
                total, weight = total + w * g, weight + w
        dropped |= on_skip == "window" and bool(np.any(row_skips))
        counted = not (on_skip == "ignore" and np.all(row_skips))
        calls += counted
        closes = (counted and calls >= every_k) or (emit is not None and emit[i])
        updates.append(-total / weight if closes and weight and not dropped else 0.0)
        if closes:
            total, weight, calls, dropped = 0.0, 0.0, 0, False
    return np.array(updates)


# A few roundings of sums of integers in float32 and of one quotient.
RTOL = 8 * F32_ULP


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("every_k", [1, 2, lambda step: 2])
def test_unequal_weights_and_a_device_of_padding_alone(every_k, check_vma):
    grads = [[1, np.nan, 3, 5], [np.nan, 2, 4, np.inf], [1, 2, 3, 4], [4, 3, 2, 1]]
    weights = [[1, 0, 2, 3], [0, 7, 1, 0], [0, 0, 0, 5], [2, 2, 2, 2]]
    tx = optax_accum.accumulate(optax.sgd(1.0), every_k, reduce_axes="data")
    weights = np.array(weights, np.float32)
    updates, state = run(tx, grads, weights, check_vma=check_vma)
    calls = every_k if isinstance(every_k, int) else 2
    np.testing.assert_allclose(updates, expect(grads, weights, calls), rtol=RTOL)
    assert state.gradient_step == 4 // calls and state.skipped == 0


def test_a_mean_of_means_is_not_it():
    """The twin: a mean over devices inside the wrapped optimizer gives -1 for -2/3."""
    grads, weights = np.array([[0.0, 2.0]] * 2), np.array([[2.0, 1.0]] * 2, np.float32)

    def mean_over_devices():
        def update_fn(updates, state, params=None):
            return jax.lax.pmean(updates, "data"), state

        return optax.GradientTransformation(lambda _: optax.EmptyState(), update_fn)

    naive = optax_accum.accumulate(optax.chain(mean_over_devices(), optax.sgd(1.0)), 2)

    def local(tx, grads, weights):
        params = jnp.zeros(1)
        state = tx.init(params)
        if not weights.shape[0] == 2:
            raise AssertionError
        for i in range(2):
            update, state = tx.update(grads[i], state, params, weight=weights[i, 0])
        return update

    mesh = auto_mesh((2,), ("data",))
    specs = dict(in_specs=(P(None, "data"), P(None, "data")), out_specs=P())
    results = [
        jax.jit(
            jax.shard_map(
                lambda g, w, tx=tx: local(tx, g, w), mesh=mesh, check_vma=False, **specs
            )
        )(jnp.asarray(grads, jnp.float32), weights)
        for tx in (
            naive,
            optax_accum.accumulate(optax.sgd(1.0), 2, reduce_axes="data"),
        )
    ]
    np.testing.assert_allclose(np.squeeze(results), [-1, -2 / 3], rtol=RTOL)


@pytest.mark.slow
@pytest.mark.parametrize("on_skip", ["microbatch", "window", "ignore"])
def test_a_local_nan(on_skip):
    """A device whose gradient is skipped weighs nothing; all take the same branch."""
    nan = np.nan
    grads = [[1, 2, 4, 8], [4, 3, 2, 1], [1, nan, 3, 5], [1, 2, 4, 8], [nan] * 4]
    grads += [[4, 3, 2, 1], [4, 3, nan, 7]]
    tx = optax_accum.accumulate(
        optax.sgd(1.0),
        2,
        skip_fn=optax_accum.skip_nonfinite,
        on_skip=on_skip,
        reduce_axes="data",
    )
    skips = np.isnan(grads)
    updates, state = run(tx, grads)
    expected = expect(grads, np.ones((7, 4)), 2, skips, on_skip)
    np.testing.assert_allclose(updates, expected, rtol=RTOL)
    assert state.skipped == skips.sum() and np.count_nonzero(expected) > 0


def test_emit_closes_a_window_everywhere():
    grads, emit = np.arange(12.0).reshape(3, 4), [False, True, False]
    tx = optax_accum.accumulate(optax.sgd(1.0), 3, reduce_axes="data")
    updates, state = run(tx, grads, emit=emit)
    expected = expect(grads, np.ones((3, 4)), 3, emit=emit)
    np.testing.assert_allclose(updates, expected, rtol=RTOL)
    assert state.mini_step == 1 and not state.emitted


def test_the_wrapped_optimizer_gets_the_mean_value():
    tx = optax_accum.accumulate(recorder(["value"]), 2, reduce_axes="data")
    weights = np.array([[1, 0, 2, 3], [4, 0, 1, 0]], np.float32)
    values = np.array([[1, np.nan, 2, 3], [4, 5, 6, np.nan]], np.float32)
    _, state = run(tx, np.ones((2, 4)), weights, value=values)
    expected = np.sum(np.where(weights > 0, values * weights, 0)) / weights.sum()
    np.testing.assert_allclose(state.inner_opt_state["value"], expected, rtol=RTOL)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_weights_skips_and_windows(data):
    calls, every_k = 5, data.draw(st.integers(1, 3))
    cells = st.lists(st.integers(0, 4), min_size=4, max_size=4)
    rows = st.lists(cells, min_size=calls, max_size=calls)
    weights = np.array(data.draw(rows), np.float32)
    grads = np.array(data.draw(rows), np.float32) - 2
    grads = np.where(data.draw(st.booleans()) & (grads == 2), np.nan, grads)
    on_skip = data.draw(st.sampled_from(["microbatch", "window", "ignore"]))
    tx = optax_accum.accumulate(
        optax.sgd(1.0),
        every_k,
        skip_fn=optax_accum.skip_nonfinite,
        on_skip=on_skip,
        reduce_axes="data",
    )
    updates, state = run(tx, grads, weights)
    skips = np.isnan(grads)
    expected = expect(grads, weights, every_k, skips, on_skip)
    np.testing.assert_allclose(updates, expected, rtol=RTOL, atol=0)
    assert state.skipped == skips.sum()


def test_the_loop_that_the_docstring_describes():
    """Windows inside; the optimizer's own state passes from one to the next."""
    tx = optax_accum.accumulate(optax.adam(0.1), 2, reduce_axes="data")
    loss_fn = lambda w, x: jnp.mean((w - x) ** 2)  # noqa: E731  beside its data
    x = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)

    @jax.jit
    @jax.shard_map(mesh=MESH, in_specs=(P(), P(), P(None, "data")), out_specs=P())
    def window(params, inner, x):
        state = tx.init(params)._replace(inner_opt_state=inner)
        local = jax.lax.pcast(params, "data", to="varying")
        for i in range(2):
            grads = jax.grad(loss_fn)(local, x[i])
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state.inner_opt_state

    params, inner = jnp.float32(0), optax.adam(0.1).init(jnp.float32(0))
    bare, bare_state = params, inner
    for batch in x:
        params, inner = window(params, inner, batch)
        grad = jax.grad(loss_fn)(bare, batch.reshape(-1))
        with jax.numpy_dtype_promotion("standard"):
            update, bare_state = optax.adam(0.1).update(grad, bare_state, bare)
        bare = optax.apply_updates(bare, update)
    # Adam divides by the root of a square: an error of the gradient stays as it is.
    np.testing.assert_allclose(params, bare, rtol=4 * RTOL)
    chex.assert_trees_all_close(inner, bare_state, rtol=4 * RTOL)


def test_the_state_is_a_scan_carry():
    """With types of what varies: they are from `init` on what they will be."""
    tx = optax_accum.accumulate(optax.sgd(1.0), 2, reduce_axes="data")

    @jax.shard_map(mesh=MESH, in_specs=P(None, "data"), out_specs=P())
    def local(grads):
        def body(state, grad):
            update, state = tx.update(grad, state, value=jnp.sum(grad))
            return state, update

        # Of parameters that all devices have.
        return jax.lax.scan(body, tx.init(jnp.zeros(1)), grads)[1]

    grads = jnp.arange(16.0).reshape(4, 4)
    expected = expect(grads, np.ones((4, 4)), 2)
    np.testing.assert_allclose(jax.jit(local)(grads)[:, 0], expected, rtol=RTOL)


@pytest.mark.parametrize(
    ("inner", "needs_value"),
    [
        (lambda: optax.apply_if_finite(optax.adam(0.1), 3), False),
        (lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), True),
        (lambda: optax_accum.accumulate(optax.adam(0.1), 1), False),
    ],
)
@pytest.mark.parametrize("every_k", [1, 2])
def test_optimizers_with_branches(inner, needs_value, every_k):
    """Whose types of what varies must be those of the mean."""
    grads = np.arange(1.0, 9.0).reshape(2, 4)
    value = grads if needs_value else None
    tx = optax_accum.accumulate(inner(), every_k, reduce_axes="data")
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = run(tx, grads, value=value)
        bare, params, expected = inner(), {"w": jnp.zeros(1), "b": jnp.zeros(())}, []
        state = bare.init(params)
        for mean in grads.reshape(-1, 4 * every_k).mean(axis=1).astype(np.float32):
            extra = {"value": mean} if needs_value else {}
            grad = {"w": mean[None], "b": mean}
            update, state = optax.with_extra_args_support(bare).update(
                grad, state, params, **extra
            )
            expected += [0.0] * (every_k - 1) + [update["w"][0]]
    # Adam divides by the root of a square: an error of the gradient stays as it is.
    np.testing.assert_allclose(updates, expected, rtol=4 * RTOL)


def test_one_scalar_reduction_a_call_and_the_rest_in_the_branch():
    tx = optax_accum.accumulate(
        optax.sgd(1.0), 2, skip_fn=optax_accum.skip_nonfinite, reduce_axes="data"
    )

    def local(grads):
        update, _ = tx.update(grads, tx.init(grads), weight=jnp.sum(grads))
        return update

    mapped = jax.shard_map(
        local, mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    grads = np.zeros(64, np.float32)
    jaxpr = jax.make_jaxpr(mapped)(grads).jaxpr
    (inner,) = [eqn.params["jaxpr"] for eqn in jaxpr.eqns]
    sums = [eqn for eqn in inner.eqns if eqn.primitive.name == "psum"]
    assert [eqn.outvars[0].aval.shape for eqn in sums] == [(3,)]
    assert count_primitives(mapped, grads)["psum"] == 2


# -- What it must be given


def test_outside_of_a_shard_map():
    tx = optax_accum.accumulate(optax.sgd(1.0), 2, reduce_axes="data")
    with pytest.raises(ValueError, match="must be used inside a `shard_map` over"):
        tx.init(jnp.zeros(2))
    step = optax_accum.make_train_step(lambda w, x: jnp.mean(w * x), tx)
    state = optax_accum.init_train_state(jnp.float32(1), optax.sgd(1.0))
    with pytest.raises(
        ValueError, match="`make_train_step` takes `reduce_axes` itself"
    ):
        step(state, jnp.ones(4))


def test_gradients_that_jax_has_summed():
    tx = optax_accum.accumulate(optax.sgd(1.0), 2, reduce_axes="data")

    @jax.shard_map(mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    def local(params, x):
        grads = jax.grad(lambda w, x: jnp.sum(w["a"] * x))(params, x)
        return tx.update(grads, tx.init(params), params)[0]

    with pytest.raises(ValueError, match=r"got float32\[\] at \['a'\].*pcast"):
        local({"a": jnp.float32(1)}, jnp.ones(4))
