"""Door 3: whatever is added is one batch, and costs no more than its gradients."""

import io
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    F32_ULP,
    assert_bits_equal,
    auto_mesh,
    count_primitives,
    recorder,
    temporary_bytes,
    types,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import LOSSES, ROWS, largest_relative_error, normal, unsplit

import optax_accum
from optax_accum import Concat, Last, Max, Mean, Min, Stack, Sum, mean

SGD = optax.sgd(1.0)
WAYS = [{}, {"in_place": True}, {"microbatch_size": 2}]
if jax.__version_info__ < (0, 10, 2):
    WAYS.remove({"in_place": True})


def cut(batch, *ends):
    """Consecutive rows, up to each of `ends`."""
    starts = (0, *ends[:-1])
    rows = [slice(*pair) for pair in zip(starts, ends, strict=True)]
    return [jax.tree.map(lambda x, r=r: x[r], batch) for r in rows]


def rows_of(batch):
    return len(jax.tree.leaves(batch)[0])


def close(loss_fn, params, calls, optimizer=SGD, denominators=None, **options):
    """State and metrics after one window of `calls`."""
    add, apply = optax_accum.make_window_steps(
        loss_fn, optimizer, donate=False, **options
    )
    state, window = optax_accum.init_train_state(params, optimizer), None
    for call in calls:
        first = {} if window is not None else {"denominators": denominators}
        window = add(state, call, window, **first)
    return apply(state, window)


def gradient_of(state, params):
    """What `SGD` was given."""
    return jax.tree.map(operator.sub, params, state.params)


def count_denominators(loss_fn, params, batch):
    """By hand: total weights of means, rows of scalars, 1 of sums."""

    def denominator(term):
        if isinstance(term, Mean):
            return float(term.weight)
        return 1 if isinstance(term, Sum) else rows_of(batch)

    return [denominator(term) for term in loss_fn(params, batch).terms]


# -- The same as one batch


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", ["regression", "siamese"])
def test_a_window_is_one_batch(name, way):
    """Calls of unequal rows, which unequal parts of the mask fall on."""
    make, options = LOSSES[name]
    loss_fn, params, batch = make(np.float32)
    loss, grads = jax.jit(jax.value_and_grad(unsplit(loss_fn)))(params, batch)
    rows = rows_of(batch)
    calls = cut(batch, rows // 3, rows // 2, rows)
    state, metrics = close(loss_fn, params, calls, **options, **way)
    # A dozen of sums in another order, and the subtraction of parameters of size 1.
    assert largest_relative_error(gradient_of(state, params), grads) < 1e-5
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    norm = optax.tree.norm(grads)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_a_window_of_several_terms_is_one_batch(way):
    """Masks that fall unequally on the calls, a second one, and a decay."""
    loss_fn, params, batch = LOSSES["language model"][0](np.float32)
    loss, grads = jax.jit(jax.value_and_grad(unsplit(loss_fn)))(params, batch)
    told = count_denominators(loss_fn, params, batch)
    calls = cut(batch, ROWS // 3, ROWS)
    state, metrics = close(loss_fn, params, calls, denominators=told, **way)
    # As above.
    assert largest_relative_error(gradient_of(state, params), grads) < 1e-5
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


@pytest.mark.slow
def test_the_mean_of_calls_is_another_gradient():
    """The twin: what a loop gives that averages the calls."""
    loss_fn, params, batch = LOSSES["regression"][0](np.float32)
    grads = jax.grad(unsplit(loss_fn))(params, batch)
    parts = [jax.grad(unsplit(loss_fn))(params, c) for c in cut(batch, 3, ROWS)]
    naive = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    assert largest_relative_error(naive, grads) > 0.01


@pytest.mark.slow
def test_doubles(x64):
    make, _ = LOSSES["regression"]
    loss_fn, params, batch = make(np.float64)
    grads = jax.grad(unsplit(loss_fn))(params, batch)
    state, metrics = close(loss_fn, params, cut(batch, 3, 4, ROWS))
    # Some dozen roundings in float64, whose ulp is 2e-16, of parameters of size 1.
    assert largest_relative_error(gradient_of(state, params), grads) < 1e-13
    assert metrics["loss"].dtype == metrics["weight"].dtype == jnp.float64


@pytest.mark.slow
def test_doubles_are_numbered_in_32_bits(x64):
    def loss_fn(w, x, key):
        return jnp.mean(w * x * jax.random.normal(key, dtype=x.dtype))

    key = jax.random.key(0)
    add, apply = optax_accum.make_window_steps(loss_fn, SGD, num_microbatches=2)
    state = optax_accum.init_train_state(jnp.zeros((), np.float64), SGD, key=key)
    window = add(state, jnp.ones(4), add(state, jnp.ones(4), None))
    state, _ = apply(state, window)
    keys = [jax.random.fold_in(jax.random.fold_in(key, 0), i) for i in range(4)]
    noises = [float(jax.random.normal(key, dtype=np.float64)) for key in keys]
    # Four roundings in float64.
    assert -state.params == pytest.approx(np.mean(noises), rel=1e-15)


@pytest.mark.slow
def test_trains_as_door_2_does():
    """Several windows, with an optimizer that remembers."""
    loss_fn, params, batch = LOSSES["image classifier"][0](np.float32)
    optimizer = optax.adamw(1e-2)
    add, apply = optax_accum.make_window_steps(loss_fn, optimizer)
    train_step = optax_accum.make_train_step(loss_fn, optimizer, num_microbatches=3)
    ours, theirs = (
        optax_accum.init_train_state(jax.tree.map(jnp.copy, params), optimizer)
        for _ in range(2)
    )
    for _ in range(4):
        window = None
        for i in range(3):
            micro_batch = jax.tree.map(lambda x, i=i: x[i::3], batch)
            window = add(ours, micro_batch, window)
        ours, metrics = apply(ours, window)
        theirs, expected = train_step(theirs, batch)
    assert types(ours) == types(theirs) and types(metrics) == types(expected)
    assert ours.step == 4
    # The mean is one rounding apart, and Adam's steps are near 1 whatever the gradient.
    assert largest_relative_error(ours.params, theirs.params) < 1e-4


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 100),
    masked=st.booleans(),
)
def test_any_partition_gives_the_mean_over_what_was_added(rows, seed, masked):
    """The oracle is NumPy's."""
    rng = np.random.default_rng(seed)
    total = sum(rows)
    x = rng.standard_normal((total, 3)).astype(np.float32)
    mask = rng.random((total, 3)) < 0.5 if masked else np.ones((total, 3), bool)

    def loss_fn(w, batch):
        products = batch["x"] * w[None]
        return mean(products, where=batch["mask"]) if masked else jnp.mean(products)

    batch = {"x": jnp.asarray(x), "mask": jnp.asarray(mask)}
    params = jnp.zeros(3)
    state, metrics = close(loss_fn, params, cut(batch, *np.cumsum(rows)))
    counted = mask.sum()
    expected = (x * mask).sum(0, dtype=np.float64) / max(counted, 1)
    # Sums of at most 60 entries near 1, in another order.
    np.testing.assert_allclose(-state.params, expected, atol=60 * F32_ULP)
    assert float(metrics["weight"]) == (counted if masked else total)
    assert bool(metrics["emitted"]) == (counted > 0)


def test_a_loss_of_sums_is_added_up():
    x = jnp.arange(1.0, 7.0)
    state, metrics = close(lambda w, x: Sum(jnp.sum(w * x) / 6), 0.0, cut(x, 2, 6))
    assert (-state.params, metrics["loss"], metrics["weight"]) == (3.5, 0.0, 1)

    def loss_fn(w, x):
        return Sum(jnp.sum(w * x) / 6) + Sum(w * len(x))

    state, metrics = close(loss_fn, 2.0, cut(x, 2, 6))
    assert 2.0 - state.params == 3.5 + 6
    assert (metrics["loss"], metrics["weight"]) == (19.0, 1)


def test_denominators_are_those_of_the_window():
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3359: 1.5, and not 2.0."""

    def loss_fn(w, batch):
        return mean(w * batch["ce"]) + jnp.mean(w * batch["aux"])

    batch = {"ce": jnp.repeat(jnp.array([1.5, 0.5]), 4), "aux": jnp.full(8, 0.5)}
    state, metrics = close(loss_fn, 0.0, cut(batch, 4, 8), denominators=(8, 8))
    assert -state.params == 1.5
    assert metrics["weight"] == 1


def test_gradients_of_16_bits_stay_in_range_whatever_the_window():
    """One of 64 micro-batches adds less than the least float16."""

    def loss_fn(w, x):
        losses = jnp.astype(x * w, jnp.float32) * 1e-6
        return mean(losses) + mean(losses, weights=jnp.ones(x.shape))

    x = jnp.ones((64, 8), jnp.float16)
    calls = cut(x, *range(1, 65))
    told = (x.size, x.size)
    state, metrics = close(
        loss_fn, jnp.float16(0.0), calls, recorder(), denominators=told
    )
    # Of two terms, each 1e-6, which float16 holds in steps of 6e-8.
    assert state.opt_state["grads"] == pytest.approx(2e-6, rel=0.1)
    assert metrics["loss"] == 0


def test_a_partial_window_is_the_mean_of_what_it_has():
    x = jnp.array([1.0, 3.0, 8.0])
    for end, expected in ((1, 1.0), (2, 2.0), (3, 4.0)):
        calls = [x[i : i + 1] for i in range(end)]
        state, metrics = close(lambda w, x: jnp.mean(w * x), 0.0, calls)
        assert (-state.params, metrics["weight"]) == (expected, end)


def test_ragged_windows_in_16_bits():
    """The loss itself has 16 bits, in which 5/3 cannot be said."""
    x = jnp.asarray(np.random.default_rng(0).integers(-8, 8, 8), jnp.bfloat16)
    optimizer, zero = recorder(), jnp.bfloat16(0.0)

    def loss_fn(w, x):
        return jnp.mean(w * x)

    state, _ = close(loss_fn, zero, cut(x, 3, 8), optimizer)
    parts = [np.float32(jax.grad(loss_fn)(zero, call)) for call in (x[:3], x[3:])]
    expected = (3 * parts[0] + 5 * parts[1]) / 8
    assert state.opt_state["grads"].dtype == jnp.float32
    np.testing.assert_allclose(state.opt_state["grads"], expected, rtol=8 * F32_ULP)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_parameters_are_summed_in_float32(dtype):
    optimizer = recorder()
    x = jnp.array([1.0, 1.0 + 2.0**-7], dtype)
    state, _ = close(
        lambda w, x: jnp.mean(w * x), jnp.zeros((), dtype), cut(x, 1, 2), optimizer
    )
    assert state.opt_state["grads"] == 1.0 + 2.0**-8


def test_compensated_sums():
    x = jnp.ones(300, jnp.bfloat16)
    calls = [x[i : i + 1] for i in range(300)]
    options = {"accumulator_dtype": jnp.bfloat16, "compensated": True}
    loss = operator.mul, lambda w, x: jnp.mean(w * x)
    state, _ = close(loss[1], jnp.bfloat16(0.0), calls, recorder(), **options)
    assert state.opt_state["grads"] == 1.0
    del options["compensated"]
    state, _ = close(loss[1], jnp.bfloat16(0.0), calls, recorder(), **options)
    assert state.opt_state["grads"] == pytest.approx(256 / 300, rel=2.0**-8)


# -- What counts


@pytest.mark.slow
def test_padding_adds_nothing_even_if_it_is_nan():
    def loss_fn(w, batch):
        x = batch["x"] / jnp.sum(
            batch["mask"], dtype=jnp.float32
        )  # 0 / 0 where there is nothing
        return mean(w * x, where=batch["mask"])

    batch = {
        "x": jnp.array([2.0, 4.0, 0.0, 0.0, 6.0]),
        "mask": jnp.array([True, True, False, False, True]),
    }
    for way in WAYS:
        state, metrics = close(loss_fn, 0.0, cut(batch, 2, 4, 5), **way)
        # (2 / 2 + 4 / 2 + 6 / 1) / 3
        assert (-state.params, metrics["weight"]) == (3.0, 3.0), way
        # And where padding comes last: (2 / 2 + 4 / 2) / 2
        state, metrics = close(loss_fn, 0.0, cut(batch, 2, 4), **way)
        assert (-state.params, metrics["weight"]) == (1.5, 2.0), way
        assert metrics["emitted"], way


@pytest.mark.parametrize("told", [None, (0.0, 0.0)])
def test_a_window_in_which_nothing_counts_is_no_step(told):
    def loss_fn(w, batch):
        loss = mean(w * batch["x"], where=batch["mask"])
        return loss if told is None else loss + mean(w * batch["x"], weights=0.0)

    batch = {"x": jnp.arange(4.0), "mask": jnp.zeros(4, bool)}
    optimizer = optax.adamw(0.1)  # which would decay the parameters
    state, metrics = close(loss_fn, 2.0, cut(batch, 1, 4), optimizer, denominators=told)
    assert state.params == 2.0 and state.step == 1
    assert not metrics["emitted"] and metrics["weight"] == 0 and metrics["loss"] == 0
    assert optax.tree.get(state.opt_state, "count") == 0


def test_nan_reaches_its_own_window_only():
    loss_fn = lambda w, x: jnp.mean(w * x)  # noqa: E731  read beside what it is fed
    add, apply = optax_accum.make_window_steps(loss_fn, SGD)
    state = optax_accum.init_train_state(0.0, SGD)
    bad = add(state, jnp.array([jnp.nan]), None)
    assert jnp.isnan(bad.acc_grads)
    state, _ = apply(state, add(state, jnp.array([5.0]), None))
    assert -state.params == 5.0


# -- Composition


@pytest.mark.slow
def test_under_accumulate_each_apply_is_a_call():
    """Windows of 3 and 5 rows make one of 8."""
    loss_fn, params, batch = LOSSES["regression"][0](np.float32)
    grads = jax.grad(unsplit(loss_fn))(params, batch)
    tx = optax_accum.accumulate(SGD, 2)
    add, apply = optax_accum.make_window_steps(loss_fn, tx, donate=False)
    state, emitted = optax_accum.init_train_state(params, tx), []
    for part in cut(batch, 5, ROWS):
        window = None
        for call in cut(part, 2, rows_of(part)):
            window = add(state, call, window)
        state, metrics = apply(state, window)
        emitted.append(bool(metrics["emitted"]))
    assert emitted == [False, True]
    assert largest_relative_error(gradient_of(state, params), grads) < 1e-5


def test_emit_and_other_arguments_reach_the_optimizer():
    optimizer = optax_accum.accumulate(recorder(["value", "other"]), 4)
    add, apply = optax_accum.make_window_steps(lambda w, x: jnp.mean(w * x), optimizer)
    state = optax_accum.init_train_state(2.0, optimizer)
    window = add(state, jnp.array([1.0, 5.0]), None)
    state, metrics = apply(state, window, emit=True, other=7.0)
    assert metrics["emitted"]
    seen = state.opt_state.inner_opt_state
    assert (seen["value"], seen["other"], seen["grads"]) == (6.0, 7.0, 3.0)


def test_further_arguments_reach_the_loss_whole():
    def loss_fn(w, x, scale, label):
        assert scale.shape == (3,) and label is None
        return jnp.mean(w * x) * scale[0]

    add, apply = optax_accum.make_window_steps(loss_fn, SGD)
    state = optax_accum.init_train_state(0.0, SGD)
    window = add(state, jnp.arange(3.0), None, jnp.full(3, 2.0), None)
    assert apply(state, window)[0].params == -2.0


@pytest.mark.slow
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("split", [(1, 1, 1, 1), (2, 2), (1, 3)])
def test_keys_and_model_state_run_through_the_window(make, split):
    """As through the micro-batches of door 2: the number is that in the window."""

    def loss_fn(w, x, key, model_state):
        noises = jnp.roll(model_state["noises"], -1).at[-1].set(jax.random.normal(key))
        new = {"noises": noises, "count": model_state["count"] + 1}
        return jnp.mean(w * x), new

    key = make(5)
    add, apply = optax_accum.make_window_steps(loss_fn, SGD, microbatch_size=1)
    state = optax_accum.init_train_state(
        1.0,
        SGD,
        key=key,
        model_state={"noises": jnp.zeros(8), "count": jnp.int32(0)},
    )
    for _ in range(2):
        window = None
        for rows in split:
            window = add(state, jnp.ones(rows), window)
        assert window.mini_step == 4
        state, _ = apply(state, window)
    expected = [
        jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, step), i))
        for step in range(2)
        for i in range(4)
    ]
    np.testing.assert_array_equal(state.model_state["noises"], expected)
    assert state.model_state["count"] == 8


@pytest.mark.slow
def test_aux_is_that_of_the_window():
    def loss_fn(w, x):
        return jnp.mean(w * x), {
            "scalar": jnp.mean(x),
            "mean": mean(x, where=x > 1),
            "sum": Sum(len(x)),
            "max": Max(jnp.max(x)),
            "min": Min({"x": jnp.min(x)}),
            "last": Last(x[-1]),
        }

    x = jnp.array([1.0, 2.0, 6.0, 0.0, 3.0])
    for way in WAYS:
        _, metrics = close(loss_fn, 1.0, cut(x, 1, 3, 5), has_aux=True, **way)
        aux = jax.tree.map(float, metrics["aux"])
        assert aux["scalar"] == pytest.approx(12 / 5, rel=4 * F32_ULP)
        assert aux["mean"] == pytest.approx(11 / 3, rel=4 * F32_ULP)
        assert (aux["sum"], aux["max"], aux["min"]) == (5, 6, {"x": 0})
        assert aux["last"] == 3
        assert metrics["loss"] == pytest.approx(12 / 5, rel=4 * F32_ULP)


def test_nothing_is_consumed_that_the_user_holds():
    """A window may have come to hold arguments as they were."""

    def loss_fn(w, batch, model_state):
        loss = mean(w * batch["x"]) + jnp.mean(w * batch["x"])
        return loss, (model_state, Last(batch["name"]))

    add, apply = optax_accum.make_window_steps(loss_fn, SGD, has_aux=True)
    held = {"x": jnp.ones(2), "name": jnp.arange(2)}, jnp.float32(4.0)
    batch, told = held
    state = optax_accum.init_train_state(1.0, SGD, model_state={"m": jnp.ones(3)})
    for _ in range(2):
        window = add(state, batch, None, denominators=(told, told))
        window = add(state, batch, window)
        assert not any(x.is_deleted() for x in jax.tree.leaves((held, state)))
        state, metrics = apply(state, window)
    assert metrics["aux"][1] == 1 and state.model_state["m"][0] == 1
    assert state.params == 1.0 - 2 * 2


@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    x = normal(0, 16, 3)
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P("data"))
        whole = jax.NamedSharding(mesh, jax.P())
        params = jax.device_put(jnp.zeros(3), whole)
        calls = [jax.device_put(c, rows) for c in cut(x, 8, 16)]
        state, _ = close(lambda w, x: jnp.mean(x @ w), params, calls)
    expected = np.mean(np.asarray(x, np.float64), axis=0)
    np.testing.assert_allclose(-state.params, expected, atol=16 * F32_ULP)


def test_inside_shard_map():
    """A window opens and closes inside, with masks that differ between devices."""
    mesh = auto_mesh((4,), ("data",))
    x, mask = normal(0, 16, 3), jnp.arange(48).reshape(16, 3) % 5 < 2

    def loss_fn(w, batch):
        term = mean(batch["x"] * w[None], where=batch["mask"])
        total, weight = jax.lax.psum((term.total, term.weight), "data")
        return Mean(total, weight)

    add, apply = optax_accum.make_window_steps(loss_fn, SGD, donate=False)
    state = optax_accum.init_train_state(jnp.zeros(3), SGD)

    def window_step(state, batch):
        window = None
        for i in range(2):
            half = jax.tree.map(lambda x, i=i: x[i::2], batch)
            window = add(state, half, window)
        return apply(state, window)[0].params

    sharded = jax.shard_map(
        window_step, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P()
    )
    params = jax.jit(sharded)(state, {"x": x, "mask": mask})
    expected = np.sum(np.where(mask, x, 0), 0) / float(np.sum(mask))
    np.testing.assert_allclose(-params, expected, atol=16 * F32_ULP)


# -- The window is a pytree


def save(tree):
    """Into a file and back, with NumPy alone."""
    file = io.BytesIO()
    leaves, structure = jax.tree.flatten(tree)
    np.savez(file, *leaves)
    file.seek(0)
    loaded = np.load(file)
    return jax.tree.unflatten(structure, [jnp.asarray(loaded[k]) for k in loaded.files])


@pytest.mark.slow
def test_restored_in_mid_window_training_goes_on_bit_for_bit():
    def loss_fn(w, batch, model_state):
        loss = mean((batch["x"] @ w) ** 2, weights=batch["weight"])
        new = model_state + jnp.sum(batch["x"])
        return loss, (new, {"worst": Max(jnp.max(batch["x"])), "mean": jnp.mean(w)})

    batch = {"x": normal(0, 12, 3), "weight": jnp.abs(normal(1, 12))}
    calls, optimizer = cut(batch, 2, 5, 7, 12), optax.adam(0.1)
    add, apply = optax_accum.make_window_steps(
        loss_fn, optimizer, has_aux=True, donate=False
    )

    def run(interrupted):
        state = optax_accum.init_train_state(
            jnp.ones(3), optimizer, model_state=jnp.zeros(())
        )
        for _ in range(2):
            window = None
            for i, call in enumerate(calls):
                window = add(state, call, window)
                if interrupted and i == 1:
                    state, window = save(state), save(window)
            state, metrics = apply(state, window)
        return state, metrics

    assert_bits_equal(run(True), run(False))


def test_the_types_of_a_window_never_change():
    def loss_fn(w, batch):
        return mean(w * batch) + 0.5 * jnp.mean(batch), {"x": Sum(3)}

    add, _ = optax_accum.make_window_steps(
        loss_fn, SGD, has_aux=True, donate=False, microbatch_size=2
    )
    state = optax_accum.init_train_state(1.0, SGD)
    first = add(state, jnp.arange(3.0), None, denominators=(9, 9.0))
    second = add(state, jnp.arange(2.0), first)
    third = add(state, jnp.arange(5.0), second)
    assert types(first) == types(second) == types(third)
    assert third.mini_step == 2 + 1 + 3


# -- What it costs


def make_params():
    return {"w1": normal(0, 64, 200), "w2": normal(1, 200, 64)}


def make_batch():
    return {"x": normal(2, 4, 64), "y": normal(3, 4, 64)}


def perceptron(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_three_programs_and_every_byte_is_reused(way):
    """https://github.com/AI-Hypercomputer/maxtext/pull/5060"""
    optimizer = optax.adam(0.1)
    add, apply = optax_accum.make_window_steps(perceptron, optimizer, **way)
    state = optax_accum.init_train_state(make_params(), optimizer)
    for _ in range(2):
        window = None
        for _ in range(3):
            before, window = window, add(state, make_batch(), window)
            if before is not None:
                assert before.acc_grads["w1"].is_deleted()
        state, _ = apply(state, window)
    assert (add._cache_size(), apply._cache_size()) == (2, 1)
    state = optax_accum.init_train_state(make_params(), optimizer)
    window = add(state, make_batch(), None)
    for program, consumed in (
        (add.lower(state, make_batch(), window), window),
        (apply.lower(state, window), state),
    ):
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(consumed))
        assert program.compile().memory_analysis().alias_size_in_bytes == size


def test_donate_false_keeps_window_and_state():
    add, apply = optax_accum.make_window_steps(perceptron, SGD, donate=False)
    state = optax_accum.init_train_state(make_params(), SGD)
    window = add(state, make_batch(), None)
    twice = [add(state, make_batch(), window) for _ in range(2)]
    assert_bits_equal(*twice)
    assert_bits_equal(apply(state, twice[0]), apply(state, twice[1]))


def test_the_first_gradient_is_adopted():
    """The jaxpr has no loop, no branch, and one sum less than the later ones."""
    add, _ = optax_accum.make_window_steps(perceptron, SGD)
    state = optax_accum.init_train_state(make_params(), SGD)
    plain = count_primitives(jax.value_and_grad(perceptron), state.params, make_batch())
    first = count_primitives(add, state, make_batch(), None)
    window = jax.eval_shape(add, state, make_batch(), None)
    later = count_primitives(add, state, make_batch(), window)
    assert not (first | later).keys() & {"scan", "while", "cond"}
    # The loss times its rows, and two constants: unit and rows.
    assert first - plain == {"mul": 1, "broadcast_in_dim": 2}
    assert later["add_any"] == first["add_any"]
    # Two parameters; the totals and the weights of the losses; the mini step.
    assert (later - first)["add"] == 2 + 2 + 1


def test_apply_has_no_branch_where_the_weight_is_static():
    add, apply = optax_accum.make_window_steps(perceptron, SGD)
    state = optax_accum.init_train_state(make_params(), SGD)
    window = jax.eval_shape(add, state, make_batch(), None)
    assert not count_primitives(apply, state, window).keys() & {"scan", "cond"}


def test_temporaries():
    """`apply` stores no mean; `add` needs what a hand-written sum needs."""
    optimizer = optax.adam(0.1)
    add, apply = optax_accum.make_window_steps(perceptron, optimizer)
    state = optax_accum.init_train_state(make_params(), optimizer)
    window = jax.eval_shape(add, state, make_batch(), None)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    if jax.__version_info__ >= (0, 10):  # whose compiler repeats a product
        assert temporary_bytes(apply, state, window) < 0.05 * size

    def by_hand(params, batch, sums):
        loss, grads = jax.value_and_grad(perceptron)(params, batch)
        return jax.tree.map(jnp.add, sums, grads), loss

    theirs = jax.jit(by_hand, donate_argnums=2)
    limit = temporary_bytes(theirs, state.params, make_batch(), make_params())
    # A few scalars more: losses and weights.
    assert temporary_bytes(add, state, make_batch(), window) <= limit + 256


@pytest.mark.parametrize("which", ["first", "add", "apply"])
def test_lowers_for_accelerators_without_one(which):
    optimizer = optax.adam(0.1)
    add, apply = optax_accum.make_window_steps(perceptron, optimizer)
    state = optax_accum.init_train_state(make_params(), optimizer)
    window = jax.eval_shape(add, state, make_batch(), None)
    steps = {
        "first": (add, (state, make_batch(), None)),
        "add": (add, (state, make_batch(), window)),
        "apply": (apply, (state, window)),
    }
    step, args = steps[which]
    platforms = ("cuda", "tpu", "cpu")
    exported = jax.export.export(step, platforms=platforms)(*args)
    assert exported.platforms == platforms


@pytest.mark.parametrize("marker", [Stack, Concat])
def test_what_grows_is_refused(marker):
    def loss_fn(w, x):
        return jnp.mean(w * x), {"rows": marker(x)}

    with pytest.raises(TypeError, match=f"`{marker.__name__}` at aux.'rows'"):
        close(loss_fn, 1.0, [jnp.ones(2)], has_aux=True)
