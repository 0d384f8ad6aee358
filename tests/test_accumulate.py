"""Door 1, behaviour by behaviour; expected values are worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    F32_ULP,
    assert_bits_equal,
    auto_mesh,
    counter,
    feed,
    recorder,
    run_bare,
    types,
)
from jax.sharding import PartitionSpec as P

import optax_accum


def sgd(**options):
    every_k = options.pop("every_k", 2)
    return optax_accum.accumulate(optax.sgd(1.0), every_k, **options)


# -- The mean, the zeros between


def test_updates_between_boundaries_leave_parameters_bit_identical():
    values = jnp.array([0.0, -0.0, 1.5, np.inf])
    params = {"real": values, "complex": jax.lax.complex(values, -values)}
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = feed(sgd(), [grads], params)
    assert_bits_equal(optax.apply_updates(params, updates[0]), params)


def test_inner_state_between_boundaries_is_bit_identical():
    tx = optax_accum.accumulate(optax.adam(0.1), 3)
    state = tx.init(jnp.ones(3))
    for _ in range(2):
        _, new = tx.update(jnp.full(3, 2.0), state, jnp.ones(3))
        assert_bits_equal(new.inner_opt_state, state.inner_opt_state)
        state = new


@pytest.mark.parametrize("mode", ["eager", "jit", "scan"])
def test_inner_is_evaluated_only_at_boundaries(mode):
    evaluations = []
    inner = optax.chain(counter(evaluations), optax.adam(0.1))
    tx = optax_accum.accumulate(inner, every_k=4)
    params = jnp.ones(3)
    update = jax.jit(tx.update) if mode == "jit" else tx.update
    state = tx.init(params)
    if mode == "scan":
        jax.lax.scan(
            lambda s, g: tx.update(g, s, params)[::-1], state, jnp.ones((8, 3))
        )
    else:
        for _ in range(8):
            _, state = update(jnp.ones(3), state, params)
    jax.effects_barrier()
    assert len(evaluations) == 2  # MultiSteps: 8


def test_reduction_sum_hands_over_the_weighted_sum():
    updates, _ = feed(sgd(reduction="sum"), [1.0, 3.0], weight=[2.0, 0.5])
    np.testing.assert_array_equal(updates, [-0.0, -3.5])


def test_reduction_sum_of_a_sole_call_is_scaled_by_its_weight():
    updates, _ = feed(sgd(every_k=1, reduction="sum"), [1.5], weight=[2.0])
    assert updates[0] == -3.0


# -- Weights


def test_weights_make_a_weighted_mean():
    updates, state = feed(sgd(), [1.0, 5.0], weight=[3.0, 1.0])
    np.testing.assert_array_equal(updates, [-0.0, -2.0])  # (3*1 + 1*5) / 4
    assert state.acc_weight == 0.0


@pytest.mark.parametrize("weight", [0, jnp.zeros(()), np.float32(0.0)])
def test_weight_zero_adds_nothing_whatever_the_gradient(weight):
    updates, _ = feed(sgd(), [np.nan, 5.0], weight=[weight, jnp.ones(())])
    np.testing.assert_array_equal(updates, [-0.0, -5.0])


def test_window_of_weight_zero_is_no_step():
    tx = optax_accum.accumulate(optax.adam(0.1), 2)
    state = tx.init(jnp.ones(()))
    before = state.inner_opt_state
    for _ in range(2):
        update, state = tx.update(jnp.ones(()), state, weight=jnp.zeros(()))
    assert_bits_equal(update, -jnp.zeros(()))
    assert_bits_equal(state.inner_opt_state, before)
    assert (state.gradient_step, state.mini_step) == (0, 0)
    assert not state.emitted


def test_a_static_weight_needs_no_select():
    """A weight that Python knows costs a product, and nothing beside."""
    tx = sgd()
    state = tx.init(jnp.ones(3))

    def selects(weight, traced=None):
        def update(grads, state, traced):
            return tx.update(grads, state, weight=weight if traced is None else traced)

        return str(jax.make_jaxpr(update)(jnp.ones(3), state, traced)).count("select_n")

    assert selects(8) == selects(jnp.asarray(8.0)) == selects(1)
    assert selects(1, traced=jnp.asarray(8.0)) > selects(1)


# -- value, grad and other extra arguments


def test_value_reaches_inner_as_the_weighted_mean_of_the_window():
    tx = optax_accum.accumulate(recorder(["value"]), 2)
    _, state = feed(tx, [1.0, 1.0], value=[4.0, 8.0], weight=[3.0, 1.0])
    assert state.inner_opt_state["value"] == 5.0  # (3*4 + 1*8) / 4


def test_value_of_a_call_of_weight_zero_does_not_count():
    tx = optax_accum.accumulate(recorder(["value"]), 2)
    _, state = feed(tx, [1.0, 1.0], value=[np.nan, 8.0], weight=[0, 1])
    assert state.inner_opt_state["value"] == 8.0


def test_grad_reaches_inner_as_the_mean_gradient():
    tx = optax_accum.accumulate(recorder(["grad"]), 2)
    _, state = feed(tx, [1.0, 3.0], grad=[1.0, 3.0])
    assert state.inner_opt_state["grad"] == 2.0


@pytest.mark.parametrize("every_k", [1, 2])
def test_other_extra_args_come_from_the_call_that_closes(every_k):
    tx = optax_accum.accumulate(recorder(["other"]), every_k)
    _, state = feed(tx, [1.0, 3.0], other=[5.0, 7.0])
    assert state.inner_opt_state["other"] == 7.0


def test_inner_receives_no_value_that_was_not_given():
    seen = []

    def update_fn(updates, state, params=None, **extra_args):
        seen.append(sorted(extra_args))
        return updates, state

    init_fn = optax.identity().init
    inner = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    feed(optax_accum.accumulate(inner, 2), [1.0, 1.0])
    assert seen and all(names == [] for names in seen)


@pytest.mark.slow
def test_reduce_on_plateau_sees_window_means():
    """The window means never improve; the last value of each window always does."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    inner = optax.chain(optax.sgd(1.0), plateau)
    means, values = [3.0] * 4, [1.0, 5.0, 2.0, 4.0, 3.0, 3.0, 4.0, 2.0]
    _, bare = run_bare(inner, [1.0] * 4, 0.0, value=means)
    _, state = feed(optax_accum.accumulate(inner, 2), [1.0] * 8, value=values)
    assert optax.tree.get(state, "scale") == optax.tree.get(bare, "scale") < 1.0


# -- emit


def test_emit_closes_a_partial_window_with_the_mean_of_what_was_seen():
    updates, state = feed(sgd(every_k=4), [1.0, 3.0], emit=[False, True])
    np.testing.assert_array_equal(updates, [-0.0, -2.0])
    assert (state.mini_step, state.gradient_step) == (0, 1)


def test_emit_closes_on_a_skipped_call():
    tx = sgd(every_k=4, skip_fn=optax_accum.skip_nonfinite, on_skip="ignore")
    updates, _ = feed(tx, [1.0, np.nan], emit=[False, True])
    np.testing.assert_array_equal(updates, [-0.0, -1.0])


def test_emit_false_and_none_change_nothing():
    without, _ = feed(sgd(), [1.0, 3.0])
    for emit in (False, None, jnp.array(False)):
        given, _ = feed(sgd(), [1.0, 3.0], emit=[emit, emit])
        assert_bits_equal(given, without)


# -- Skipping


@pytest.mark.parametrize(
    ("on_skip", "expected"),
    [
        ("microbatch", [0, -1, 0, -2.5, 0, -4.5]),
        ("window", [0, 0, 0, -2.5, 0, -4.5]),
        ("ignore", [0, 0, -1.5, 0, -3.5, 0]),
    ],
)
def test_on_skip(on_skip, expected):
    tx = sgd(skip_fn=optax_accum.skip_nonfinite, on_skip=on_skip)
    updates, state = feed(tx, [np.nan, 1.0, 2.0, 3.0, 4.0, 5.0])
    np.testing.assert_array_equal(updates, expected)
    assert state.skipped == 1


def test_dropped_tells_of_the_open_window_only():
    tx = sgd(skip_fn=optax_accum.skip_nonfinite, on_skip="window")
    assert feed(tx, [np.nan])[1].dropped
    assert not feed(tx, [np.nan, 1.0])[1].dropped


def test_skip_fn_sees_gradients_and_parameters():
    def skip_fn(grads, params):
        return grads["w"] > params["limit"]

    tx = optax_accum.accumulate(optax.sgd(1.0), 2, skip_fn=skip_fn)
    params = {"w": 0.0, "limit": 2.0}
    grads = [{"w": 3.0, "limit": 0.0}, {"w": 1.0, "limit": 0.0}]
    updates, _ = feed(tx, grads, params)
    assert updates[1]["w"] == -1.0


def test_skip_nonfinite_looks_at_every_leaf():
    good = {"a": jnp.ones(3), "b": jnp.ones((2, 2), jnp.bfloat16), "c": None}
    assert not optax_accum.skip_nonfinite(good)
    for leaf in ("a", "b"):
        bad = good | {leaf: good[leaf].at[0].set(jnp.inf)}
        assert optax_accum.skip_nonfinite(bad)


@pytest.mark.parametrize(
    ("grad", "skipped"), [(4.9, False), (5.1, True), (np.nan, True), (np.inf, True)]
)
def test_skip_norm_above(grad, skipped):
    assert optax_accum.skip_norm_above(5.0)({"w": jnp.array([grad])}, None) == skipped


def test_skip_norm_above_does_not_overflow_in_float16():
    """300**2 overflows float16; the norm is taken in float32."""
    grads = jnp.array([300.0, 400.0], jnp.float16)
    assert not optax_accum.skip_norm_above(500.5)(grads, None)
    assert optax_accum.skip_norm_above(499.5)(grads, None)


# -- every_k


def test_schedule_counts_gradient_steps():
    tx = sgd(every_k=lambda step: jnp.where(step < 1, 1, 3))
    updates, _ = feed(tx, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    np.testing.assert_array_equal(updates, [-1, 0, 0, -3, 0, 0, -6])


@pytest.mark.parametrize("every_k", [2, np.int64(2), np.int8(2), jnp.asarray(2)])
def test_every_k_takes_whatever_is_an_integer(every_k):
    updates, _ = feed(sgd(every_k=every_k), [1.0, 3.0])
    np.testing.assert_array_equal(updates, [-0.0, -2.0])


def test_every_k_1_is_the_bare_optimizer():
    tx, bare = optax_accum.accumulate(optax.adamw(0.1), 1), optax.adamw(0.1)
    params = {"w": jnp.array([1.0, 2.0])}
    state = tx.init(params)
    assert state.acc_grads == ()
    jaxpr = str(jax.make_jaxpr(tx.update)(params, state, params))
    assert "cond" not in jaxpr
    updates, state = tx.update(params, state, params)
    expected, inner = run_bare(bare, [params], params)
    assert_bits_equal(updates, expected[0])
    assert_bits_equal(state.inner_opt_state, inner)
    assert state.emitted and state.gradient_step == 1


def test_every_k_1_branches_only_for_what_is_not_static():
    tx = sgd(every_k=1)
    state = tx.init(jnp.ones(3))

    def has_branch(**extra):
        return "cond" in str(jax.make_jaxpr(tx.update)(jnp.ones(3), state, **extra))

    assert not has_branch()
    assert (
        not jax.make_jaxpr(lambda g, s: tx.update(g, s, weight=8))(jnp.ones(3), state)
        .jaxpr.pretty_print()
        .count("cond[")
    )
    assert has_branch(weight=jnp.ones(()))


@pytest.mark.parametrize("weight", [1.0, 3.0, jnp.asarray(3.0)])
def test_every_k_1_mean_is_the_gradient_to_the_bit(weight):
    grad = jnp.array([0.1, 0.7], jnp.float32)
    updates, _ = feed(
        optax_accum.accumulate(optax.identity(), 1), [grad], grad, weight=[weight]
    )
    assert_bits_equal(updates[0], grad)


def test_every_k_1_with_weight_zero_is_no_step():
    updates, state = feed(sgd(every_k=1), [3.0, 5.0], weight=[jnp.zeros(()), 1])
    np.testing.assert_array_equal(updates, [-0.0, -5.0])
    assert state.gradient_step == 1


@pytest.mark.parametrize("on_skip", ["microbatch", "window", "ignore"])
def test_every_k_1_skips(on_skip):
    tx = sgd(every_k=1, skip_fn=optax_accum.skip_nonfinite, on_skip=on_skip)
    updates, state = feed(tx, [np.nan, 5.0])
    np.testing.assert_array_equal(updates, [-0.0, -5.0])
    assert (state.gradient_step, state.skipped) == (1, 1)


# -- dtypes


@pytest.mark.parametrize(
    ("dtype", "summed"),
    [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "float32"),
        ("complex64", "complex64"),
        ("int32", "float32"),
    ],
)
def test_sums_are_in_float32_or_wider(dtype, summed):
    tx = optax_accum.accumulate(optax.identity(), 2)
    state = tx.init(jnp.zeros(3, dtype))
    assert state.acc_grads.dtype == summed
    assert state.acc_weight.dtype == "float32"


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_doubles_stay_doubles(dtype, x64):
    tx = optax_accum.accumulate(optax.identity(), 2)
    state = tx.init({"a": jnp.zeros(3, dtype), "b": jnp.zeros(3, "float32")})
    assert state.acc_grads["a"].dtype == dtype
    assert state.acc_grads["b"].dtype == "float32"
    assert state.acc_weight.dtype == state.acc_value.dtype == "float64"


def test_the_mean_reaches_inner_in_the_dtype_of_the_sum():
    """1 and 1 + 2**-7 average to 1 + 2**-8, which bfloat16 cannot hold."""
    tx = optax_accum.accumulate(recorder(), 2)
    grads = jnp.array([1.0, 1.0 + 2.0**-7], jnp.bfloat16)
    updates, state = feed(tx, list(grads), jnp.zeros((), jnp.bfloat16))
    assert state.inner_opt_state["grads"] == 1.0 + 2.0**-8
    assert updates[1].dtype == jnp.bfloat16  # as the bare inner optimizer


def test_float8_gradients_accumulate():
    grads = jnp.array([1.0, 1.25], jnp.float8_e4m3fn)
    tx = optax_accum.accumulate(recorder(), 2)
    _, state = feed(tx, list(grads), jnp.zeros((), jnp.float8_e4m3fn))
    assert state.inner_opt_state["grads"] == 1.125


def test_accumulator_dtype_is_obeyed_and_complex_kept():
    tx = optax_accum.accumulate(optax.identity(), 2, accumulator_dtype=jnp.bfloat16)
    state = tx.init({"r": jnp.zeros(2), "c": jnp.zeros(2, jnp.complex64)})
    assert state.acc_grads["r"].dtype == jnp.bfloat16
    assert state.acc_grads["c"].dtype == jnp.complex64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adafactor", "lion"])
def test_updates_have_the_dtype_that_the_bare_optimizer_gives(name, dtype, grad_dtype):
    inner = getattr(optax, name)(1e-2)
    params, grads = jnp.ones((4, 4), dtype), jnp.ones((4, 4), grad_dtype)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes by itself here
        expected = jax.eval_shape(
            lambda: inner.update(grads, inner.init(params), params)
        )[0]
        tx = optax_accum.accumulate(inner, 2)
        updates, state = feed(tx, [grads, grads], params)
    assert [update.dtype for update in updates] == [expected.dtype] * 2
    assert types(state) == types(tx.init(params))


# -- What the bare inner optimizer accepts


def test_leaves_that_are_no_arrays_pass():
    """CASES I54: https://github.com/patrick-kidger/equinox/issues/590"""
    params = {"w": jnp.ones(2), "act": jax.nn.relu, "name": "layer"}
    grads = {"w": jnp.ones(2), "act": None, "name": None}
    tx = optax_accum.accumulate(optax.sgd(1.0), 2)
    state = tx.init(params)

    @jax.jit
    def update(grads, state, w):
        return tx.update(grads, state, params | {"w": w})

    for _ in range(2):
        updates, state = update(grads, state, params["w"])
    np.testing.assert_array_equal(updates["w"], [-1.0, -1.0])
    assert updates["act"] is None and updates["name"] is None


@pytest.mark.parametrize("inner", [optax.sgd(1.0), optax.sgd(1.0, momentum=0.9)])
def test_none_gradients_pass_and_the_state_keeps_its_structure(inner):
    params = {"w": jnp.ones(2), "frozen": jnp.ones(3)}
    tx = optax_accum.accumulate(inner, 2)
    updates, state = feed(tx, [{"w": jnp.ones(2), "frozen": None}] * 4, params)
    assert updates[-1]["frozen"] is None
    assert types(state) == types(tx.init(params))
    alone = {"w": jnp.ones(2)}
    bare, _ = run_bare(inner, [alone, alone], alone)
    assert_bits_equal(updates[-1]["w"], bare[-1]["w"])


def test_none_may_stand_for_a_whole_subtree():
    params = {"w": jnp.ones(2), "frozen": {"a": jnp.ones(3), "b": jnp.ones(1)}}
    tx = sgd()
    updates, state = feed(tx, [{"w": jnp.ones(2), "frozen": None}] * 4, params)
    assert updates[-1]["frozen"] is None
    np.testing.assert_array_equal(updates[-1]["w"], [-1.0, -1.0])
    assert types(state) == types(tx.init(params))


def test_integer_bool_and_key_leaves_in_the_inner_state_pass():
    def init_fn(params):
        return {
            "count": jnp.zeros((), jnp.uint8),
            "flag": jnp.zeros((), bool),
            "key": jax.random.key(0),
            "raw": jax.random.PRNGKey(1),
            "python": 3,
            "static": "text",
        }

    def update_fn(updates, state, params=None):
        key = jax.random.split(state["key"])[0]
        new = {"count": state["count"] + jnp.uint8(1), "flag": ~state["flag"]}
        return updates, state | new | {"key": key, "python": state["python"] + 1}

    tx = optax_accum.accumulate(optax.GradientTransformation(init_fn, update_fn), 2)
    state = tx.init(jnp.ones(2))
    inner = state.inner_opt_state
    arrays = {name: leaf for name, leaf in inner.items() if name != "static"}

    @jax.jit
    def update(grads, arrays):
        whole = state._replace(inner_opt_state=arrays | {"static": "text"})
        whole = whole._replace(mini_step=jnp.ones((), jnp.int32))
        new = tx.update(grads, whole)[1].inner_opt_state
        assert new.pop("static") == "text"
        return new

    new = update(jnp.ones(2), arrays)
    assert types(new) == types(arrays)
    assert (new["count"], new["flag"], new["python"]) == (1, True, 4)
    assert not jnp.array_equal(
        jax.random.key_data(new["key"]), jax.random.key_data(arrays["key"])
    )


def test_masked_nodes_pass():
    mask = {"a": True, "b": False}
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    grads = {"a": jnp.full(2, 2.0), "b": jnp.full(3, 5.0)}
    inside = optax_accum.accumulate(optax.masked(optax.sgd(1.0), mask), 2)
    updates, state = feed(inside, [grads, grads], params)
    np.testing.assert_array_equal(updates[1]["a"], [-2.0, -2.0])
    np.testing.assert_array_equal(updates[1]["b"], [5.0, 5.0, 5.0])  # as masked does
    around = optax.masked(optax_accum.accumulate(optax.sgd(1.0), 2), mask)
    updates, state = feed(around, [grads, grads], params)
    np.testing.assert_array_equal(updates[1]["a"], [-2.0, -2.0])
    assert len(jax.tree.leaves(state.inner_state.acc_grads)) == 1


@pytest.mark.parametrize("every_k", [1, 2])
def test_a_state_that_changes_its_kind_is_refused_and_not_cut_off(every_k):
    """None that becomes an array, an integer that becomes a fraction."""

    def grows(init, update):
        def update_fn(updates, state, params=None):
            return updates, {"m": update(state["m"])}

        tx = optax.GradientTransformation(lambda params: {"m": init}, update_fn)
        return feed(optax_accum.accumulate(tx, every_k), [1.0] * 2)

    with pytest.raises(TypeError, match=r"float32\[\] at \['m'\], where None was"):
        grows(None, lambda m: jnp.ones(()))
    with pytest.raises(TypeError, match=r"float32\[\] at \['m'\], where int32\[\] was"):
        grows(0, lambda m: jnp.float32(m) + 0.5)
    _, state = grows(0.0, lambda m: m + 0.5)
    assert state.inner_opt_state["m"] == 0.5 * (2 // every_k)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "inner",
    [optax.novograd(0.1), optax.apply_if_finite(optax.adam(0.1), 3)],
    ids=["novograd", "apply_if_finite"],
)
def test_optimizers_that_refuse_a_wider_gradient_get_it_rounded(inner, dtype):
    """Their own branches differ in dtype when a float32 mean meets 16-bit moments."""
    params, grads = jnp.ones(3, dtype), jnp.full(3, 0.5, dtype)
    bare, bare_state = run_bare(inner, [grads], params)
    tx = optax_accum.accumulate(inner, 2)
    updates, state = feed(tx, [grads, grads], params)
    assert updates[-1].dtype == bare[-1].dtype
    np.testing.assert_allclose(
        np.asarray(updates[-1], float), np.asarray(bare[-1], float), rtol=2**-7
    )
    assert types(state.inner_opt_state) == types(tx.init(params).inner_opt_state)


def test_nested_windows_weigh_by_their_calls():
    tx = optax_accum.accumulate(sgd(), 2)
    updates, _ = feed(tx, [1.0, 1.0, 5.0, 5.0], weight=[1.0, 1.0, 3.0, 3.0])
    np.testing.assert_array_equal(updates, [0, 0, 0, -4])  # (2*1 + 6*5) / 8


@pytest.mark.slow
def test_lbfgs_with_its_line_search():
    """It hands whatever it is given to value_fn, and raises for what that lacks."""
    inner = optax.lbfgs()

    def value_fn(w):
        return jnp.sum((w - 3.0) ** 2)

    def run(tx, calls):
        w = jnp.zeros(2)
        state = tx.init(w)
        for _ in range(calls):
            value, grad = jax.value_and_grad(value_fn)(w)
            updates, state = tx.update(
                grad, state, w, value=value, grad=grad, value_fn=value_fn
            )
            w = optax.apply_updates(w, updates)
        return w

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        bare = run(inner, 2)
        np.testing.assert_array_equal(run(optax_accum.accumulate(inner, 1), 2), bare)
        # The mean of two equal gradients is that gradient, to the bit.
        np.testing.assert_array_equal(run(optax_accum.accumulate(inner, 2), 4), bare)


def test_python_numbers_are_gradients_too():
    tx = sgd(every_k=1, skip_fn=optax_accum.skip_nonfinite)
    updates, _ = tx.update(3.0, tx.init(0.0), weight=jnp.array(2.0))
    assert updates == -3.0


def test_values_given_in_some_windows_only_do_not_leak_into_others():
    tx = optax_accum.accumulate(optax.sgd(1.0), 2)
    _, state = feed(tx, [1.0, 1.0], value=[7.0, 7.0])
    _, state = tx.update(jnp.ones(()), state)
    _, state = tx.update(jnp.ones(()), state, value=3.0)
    assert state.acc_value == 3.0


# -- Where it must work


def on_means_of_pairs(inner, grads, params):
    """The bare optimizer on the mean of each pair of gradients, zeros between."""
    pairs = zip(grads[::2], grads[1::2], strict=True)
    means = [jax.tree.map(lambda a, b: (a + b) / 2, *pair) for pair in pairs]
    updates, _ = run_bare(inner, means, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return [update for step in updates for update in (zeros, step)]


COMPOSITIONS = {
    "inside chain": lambda inner: optax.chain(optax_accum.accumulate(inner, 2)),
    "around chain": lambda inner: optax_accum.accumulate(optax.chain(inner), 2),
    "around inject_hyperparams": lambda inner: optax_accum.accumulate(
        optax.chain(inner, optax.inject_hyperparams(optax.scale)(step_size=1.0)), 2
    ),
    "inside inject_hyperparams": lambda inner: optax.inject_hyperparams(
        lambda scale: optax.chain(optax_accum.accumulate(inner, 2), optax.scale(scale))
    )(scale=1.0),
    "inside partition": lambda inner: optax.partition(
        {"x": optax_accum.accumulate(inner, 2), "y": optax_accum.accumulate(inner, 2)},
        {"a": "x", "b": "y"},
    ),
    "around partition": lambda inner: optax_accum.accumulate(
        optax.partition({"x": inner, "y": inner}, {"a": "x", "b": "y"}), 2
    ),
    "inside masked": lambda inner: optax.masked(
        optax_accum.accumulate(inner, 2), {"a": True, "b": True}
    ),
    "link before a stateless one": lambda inner: optax.chain(
        optax_accum.accumulate(optax.identity(), 2), optax.scale(-1.0)
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("jit", [False, True])
def test_composes(name, jit):
    inner = optax.sgd(1.0) if name.startswith("link") else optax.adam(0.1)
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    keys = jax.random.split(jax.random.key(0), 6)
    grads = [
        {"a": jax.random.normal(key, (2,)), "b": jax.random.normal(key, (3,))}
        for key in keys
    ]
    tx = COMPOSITIONS[name](inner)
    state, update = tx.init(params), jax.jit(tx.update) if jit else tx.update
    steps = on_means_of_pairs(inner, grads, params)
    for grad, expected in zip(grads, steps, strict=True):
        updates, state = update(grad, state, params)
        # The same operations on the same mean; compiled, XLA may contract a product
        # and a sum: a few roundings of values near 0.1.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=8 * F32_ULP, atol=0),
            updates,
            expected,
        )


def test_vmap_over_states_with_boundaries_at_different_calls():
    tx = sgd(every_k=3)
    state = jax.vmap(tx.init)(jnp.zeros(2))
    state = state._replace(mini_step=jnp.array([0, 1], jnp.int32))
    updates = []
    for grad in (1.0, 2.0, 3.0):
        update, state = jax.vmap(tx.update)(jnp.full(2, grad), state)
        updates.append(update)
    # The second lane was one call ahead, with nothing added in it.
    np.testing.assert_array_equal(updates, [[0, 0], [0, -1.5], [-2, 0]])


def test_shard_map_with_reduced_gradients():
    """CASES I48: https://github.com/jax-ml/jax/issues/23693"""
    mesh = auto_mesh((4,), ("data",))
    tx = optax_accum.accumulate(optax.adam(0.1), 2)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    def step(params, state, batch):
        grads = jax.lax.pmean(batch.sum(), "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = jnp.ones(()), tx.init(jnp.ones(()))
    for _ in range(2):
        params, state = step(params, state, jnp.ones(4))
    # Adam's first step is lr * sign(g). One rounding of 1 - b2 = 0.001, which is near
    # one before the subtraction, weighs F32_ULP / 0.001 in it, half that as a root.
    np.testing.assert_allclose(params, 0.9, atol=0.1 * F32_ULP / 0.001)


def test_shard_map_over_local_gradients_of_local_parameters():
    """A model for each device: its window is its own, with no word to the others."""
    mesh = auto_mesh((4,), ("data",))
    tx = sgd()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    def run(params, grads):
        state = tx.init(params)
        updates = []
        for grad in (grads[:, 0], grads[:, 1]):
            update, state = tx.update(grad, state, params)
            updates.append(update)
        return jnp.stack(updates, axis=1)

    out = run(jnp.zeros(4), jnp.arange(8.0).reshape(4, 2))
    np.testing.assert_array_equal(out, [[0, -0.5], [0, -2.5], [0, -4.5], [0, -6.5]])


def test_nothing_of_the_last_window_stays_though_its_sum_stands_there():
    """A NaN in the sum of a closed window, and no write that clears it."""
    _, state = feed(sgd(), [np.nan, 1.0])
    assert np.isnan(state.acc_grads) and state.acc_weight == 0
    for weight, expected in ((0.0, -3.0), (1.0, -2.0)):
        _, later = sgd().update(jnp.array(1.0), state, weight=jnp.array(weight))
        assert later.acc_grads == weight
        update, _ = sgd().update(jnp.array(3.0), later)
        assert update == expected


def test_temporaries_are_one_buffer_for_the_updates():
    """The sum is added to in place, and the inner state is passed in place."""
    tx = optax_accum.accumulate(optax.adam(0.1), 2)
    params = jnp.ones(100_000)
    state = tx.init(params)

    def temporaries(transformation, state):
        def step(params, state, grads):
            updates, state = transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        jitted = jax.jit(step, donate_argnums=(0, 1))
        with jax.numpy_dtype_promotion("standard"):  # MultiSteps does not trace else
            compiled = jitted.lower(params, state, params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(tx, state) < 1.01 * params.nbytes
    multi_steps = optax.MultiSteps(optax.adam(0.1), 2)
    assert temporaries(tx, state) <= temporaries(multi_steps, multi_steps.init(params))


def test_donation_of_the_state_is_used():
    tx = optax_accum.accumulate(optax.adam(0.1), 2)
    params = jnp.ones(1000)
    state = tx.init(params)
    compiled = jax.jit(tx.update, donate_argnums=1).lower(params, state).compile()
    # `emitted` and `dropped` are written without being read, so jit passes neither in.
    unread = state.emitted.nbytes + state.dropped.nbytes
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - unread
    assert compiled.memory_analysis().alias_size_in_bytes == size
    for _ in range(3):
        _, state = compiled(params, state)
    assert state.gradient_step == 1


def test_second_call_compiles_nothing():
    tx = optax_accum.accumulate(optax.adamw(0.1), 2)
    params = {"w": jnp.ones(3), "s": 1.0}  # a weakly typed leaf
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(4):
        _, state = update(jax.tree.map(jnp.ones_like, params), state, params)
    assert update._cache_size() == 1


def test_optax_tree_finds_our_counters():
    _, state = feed(optax_accum.accumulate(optax.adam(0.1), 2), [1.0, 1.0, 1.0])
    assert optax.tree.get(state, "gradient_step") == 1
    assert optax.tree.get(state, "mini_step") == 1
    assert optax.tree.get(state, "count") == 1


# -- has_emitted


def test_has_emitted_only_after_a_real_step():
    tx = sgd(skip_fn=optax_accum.skip_nonfinite, on_skip="window")
    state = tx.init(jnp.zeros(()))
    assert not optax_accum.has_emitted(state)
    seen = []
    for grad in (1.0, 1.0, np.nan, 1.0):
        _, state = tx.update(jnp.asarray(grad), state)
        seen.append(bool(optax_accum.has_emitted(state)))
    assert seen == [False, True, False, False]


def test_has_emitted_finds_the_state_anywhere():
    tx = optax.chain(
        optax.clip(1.0),
        optax.partition(
            {"x": optax_accum.accumulate(optax.sgd(1.0), 2), "y": optax.sgd(1.0)},
            {"a": "x", "b": "y"},
        ),
    )
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    _, state = feed(tx, [params, params], params)
    assert optax_accum.has_emitted(state)


# -- Resume


def test_restored_under_a_smaller_every_k_closes_at_the_next_call():
    _, state = feed(sgd(every_k=4), [1.0, 2.0, 3.0])
    update, state = sgd(every_k=2).update(jnp.array(4.0), state)
    assert update == -2.5 and state.mini_step == 0


def test_an_ignored_call_does_not_close_an_overfull_window():
    """As if it had never been made: the next call that counts closes."""
    options = {"skip_fn": optax_accum.skip_nonfinite, "on_skip": "ignore"}
    _, state = feed(sgd(every_k=4, **options), [1.0, 2.0, 3.0])
    tx = sgd(every_k=2, **options)
    update, state = tx.update(jnp.array(np.nan), state)
    assert update == 0.0 and state.mini_step == 3
    update, state = tx.update(jnp.array(4.0), state)
    assert update == -2.5


def test_restored_under_a_larger_every_k_goes_on_filling():
    _, state = feed(sgd(every_k=2), [1.0])
    tx = sgd(every_k=3)
    update, state = tx.update(jnp.array(2.0), state)
    assert update == 0.0
    update, state = tx.update(jnp.array(6.0), state)
    assert update == -3.0


def test_saved_and_restored_mid_window_goes_on_bit_for_bit(tmp_path):
    """Every field off its default when it is saved, through NumPy's own format."""
    tx = optax_accum.accumulate(
        optax.adam(0.1), 3, skip_fn=optax_accum.skip_nonfinite, on_skip="window"
    )
    params = {"w": jnp.ones(2)}
    grads = [
        {"w": jnp.array([g, g / 3])} for g in (1.0, 2.0, 4.0, np.nan, 3.0, 5.0, 7.0)
    ]
    _, state = feed(tx, grads[:5], params, value=[1.0] * 5)
    leaves, treedef = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *leaves)
    loaded = np.load(tmp_path / "state.npz")
    restored = jax.tree.unflatten(
        treedef, [jnp.asarray(loaded[k]) for k in loaded.files]
    )
    assert state.mini_step == 2 and state.gradient_step == 1 and state.dropped
    assert state.skipped == 1 and state.acc_weight == 1.0 and state.acc_value == 1.0
    for grad in grads[5:]:
        update, state = tx.update(grad, state, params, value=2.0)
        again, restored = tx.update(grad, restored, params, value=2.0)
        assert_bits_equal(again, update)
        assert_bits_equal(restored, state)
