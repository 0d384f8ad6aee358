"""Door 1 as a matrix: configurations x ways to run x dtypes x trees, and at random.

Whatever the configuration: the updates are those of the bare optimizer on the means
that a NumPy loop works out, and the types of state and updates never change.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F32_ULP, model_updates, run_bare, types
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_accum

CALLS = 6
GRADIENTS = [1.0, 3.0, -2.0, 0.5, 4.0, -1.0]  # exact in every dtype of the matrix
WEIGHTS = [1.0, 3.0, 0.5, 0.0, 2.0, 1.5]


def ones(length):
    return lambda step: length


CONFIGURATIONS = {
    "every call": (dict(every_k=1), ones(1), {}),
    "plain": (dict(every_k=2), ones(2), {}),
    "weighted": (dict(every_k=2), ones(2), {"weight": jnp.array(WEIGHTS)}),
    "schedule": (
        dict(every_k=lambda step: jnp.where(step < 1, 1, 2)),
        lambda step: 1 if step < 1 else 2,
        {},
    ),
    "emit": (dict(every_k=4), ones(4), {"emit": jnp.arange(CALLS) % 3 == 2}),
    "skip": (
        dict(every_k=2, skip_fn=optax_accum.skip_norm_above(1e3)),
        ones(2),
        {},
    ),
}

TREES = {
    "scalar": lambda dtype: jnp.ones((), dtype),
    "nested": lambda dtype: {
        "a": [jnp.ones((2, 3), dtype)],
        "b": {"c": jnp.ones(2, dtype)},
    },
    "empty": lambda dtype: {},
    "none and zero-size": lambda dtype: {
        "w": jnp.ones(2, dtype),
        "none": None,
        "z": jnp.ones((0, 3), dtype),
    },
}


def run_eager(tx, params, grads, extra):
    state, updates = tx.init(params), []
    for i in range(CALLS):
        update, state = tx.update(
            pick(grads, i), state, params, **{k: v[i] for k, v in extra.items()}
        )
        updates.append(update)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *updates), state


def run_jit(tx, params, grads, extra, donate=()):
    update_fn = jax.jit(
        lambda g, s, p, e: tx.update(g, s, p, **e), donate_argnums=donate
    )
    state, updates = jax.jit(tx.init)(params), []
    for i in range(CALLS):
        update, state = update_fn(pick(grads, i), state, params, pick(extra, i))
        updates.append(update)
    assert update_fn._cache_size() == 1
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *updates), state


def run_scan(tx, params, grads, extra):
    def body(state, call):
        update, state = tx.update(call[0], state, params, **call[1])
        return state, update

    state, updates = jax.lax.scan(body, tx.init(params), (grads, extra), length=CALLS)
    return updates, state


MODES = {
    "eager": run_eager,
    "jit": run_jit,
    "scan": run_scan,
    "donated": functools.partial(run_jit, donate=1),
}


def pick(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def emitted(name):
    """The updates of sgd(1.0), from the NumPy model."""
    _, every_k, extra = CONFIGURATIONS[name]
    weights = np.asarray(extra.get("weight", np.ones(CALLS)))
    emits = np.asarray(extra.get("emit", np.zeros(CALLS, bool)))
    calls = list(zip(GRADIENTS, weights, [False] * CALLS, emits, strict=True))
    return np.array(model_updates(calls, every_k))


@pytest.mark.filterwarnings(
    # An unread flag of the state cannot be reused; the CPU backend says so.
    "ignore:Some donated buffers were not usable:UserWarning"
)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_contract(name, mode, dtype, tree):
    options, _, extra = CONFIGURATIONS[name]
    tx = optax_accum.accumulate(optax.sgd(1.0), **options)
    params = TREES[tree](dtype)
    values = jnp.array(GRADIENTS, dtype)
    grads = jax.tree.map(
        lambda p: jnp.broadcast_to(
            values.reshape((CALLS,) + (1,) * p.ndim), (CALLS, *p.shape)
        ),
        params,
    )
    updates, state = MODES[mode](tx, params, grads, extra)
    expected = emitted(name)
    # The sums are exact; one division in float32, one rounding to the dtype.
    rtol = max(F32_ULP, float(jnp.finfo(dtype).eps))
    for update, param in zip(
        jax.tree.leaves(updates), jax.tree.leaves(params), strict=True
    ):
        assert update.dtype == dtype
        shape = (CALLS,) + (1,) * param.ndim
        desired = np.broadcast_to(expected.reshape(shape), update.shape)
        np.testing.assert_allclose(np.asarray(update, float), desired, rtol=rtol)
    assert types(state) == types(tx.init(params))
    assert state.gradient_step == np.count_nonzero(expected)


OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "rmsprop": optax.rmsprop(0.1),
    "lamb": optax.lamb(0.1),
    "schedule": optax.sgd(optax.linear_schedule(1.0, 0.0, 5)),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "muon": optax.contrib.muon(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_as_on_the_mean(name):
    inner = OPTIMIZERS[name]
    params = {"w": jax.random.normal(jax.random.key(0), (4, 3)), "b": jnp.ones(3)}
    grads = [
        jax.tree.map(lambda p, i=i: jnp.cos(p * i) * 0.1, params) for i in range(6)
    ]
    means = [
        jax.tree.map(lambda *g: sum(g[1:], g[0]) / 3, *grads[i : i + 3]) for i in (0, 3)
    ]
    bare, _ = run_bare(inner, means, params)
    tx = optax_accum.accumulate(inner, 3)
    update_fn, state, stepped = jax.jit(tx.update), tx.init(params), []
    for grad in grads:
        updates, state = update_fn(grad, state, params)
        if optax_accum.has_emitted(state):
            stepped.append(updates)
    # Compiled against eager: contractions and reordered norms, some roundings each;
    # the root of a small second moment magnifies them.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e3 * F32_ULP, atol=1e-7),
        stepped,
        bare,
    )


@functools.partial(jax.jit, static_argnames="on_skip")
def run_random(grads, weights, emits, lengths, on_skip):
    """All windows of a run in one scan; a NaN gradient stands for a skipped call."""
    tx = optax_accum.accumulate(
        optax.sgd(1.0),
        lambda step: lengths[step],
        skip_fn=optax_accum.skip_nonfinite,
        on_skip=on_skip,
    )

    def body(state, call):
        grad, weight, emit = call
        updates, state = tx.update(grad, state, weight=weight, emit=emit)
        return state, (updates, state.emitted)

    return jax.lax.scan(body, tx.init(jnp.zeros(())), (grads, weights, emits))


LENGTH = 24


def lists(elements):
    return st.lists(elements, min_size=LENGTH, max_size=LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("on_skip", ["microbatch", "window", "ignore"])
@given(
    grads=lists(st.integers(-64, 64)),
    quarters=lists(st.integers(0, 12)),
    skips=lists(st.sampled_from([False, False, False, True])),
    emits=lists(st.sampled_from([False, False, False, False, True])),
    lengths=lists(st.integers(1, 6)),
)
@settings(max_examples=150, deadline=None)
def test_random_windows_weights_and_schedules(
    on_skip, grads, quarters, skips, emits, lengths
):
    weights = [quarter / 4 for quarter in quarters]
    _, (updates, stepped) = run_random(
        jnp.array([np.nan if s else g for s, g in zip(skips, grads, strict=True)]),
        jnp.array(weights),
        jnp.array(emits),
        jnp.array(lengths + [1]),
        on_skip,
    )
    calls = list(zip(grads, weights, skips, emits, strict=True))
    expected = model_updates(calls, (lengths + [1]).__getitem__, on_skip)
    # Sums of quarters below 2**24 are exact in float32; one division rounds.
    np.testing.assert_allclose(updates, expected, rtol=F32_ULP)
    steps = np.asarray(stepped)
    assert not np.any(np.asarray(updates)[~steps])
