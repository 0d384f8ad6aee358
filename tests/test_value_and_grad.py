"""The scan against the unsplit gradient of `jax.value_and_grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    F32_ULP,
    assert_bits_equal,
    auto_mesh,
    sum_by_hand,
    temporary_bytes,
    types,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum

ROWS = 12


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


@pytest.fixture
def params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(keys[0], (5, 7)),
        "w2": jax.random.normal(keys[1], (7, 3)),
    }


@pytest.fixture
def batch():
    keys = jax.random.split(jax.random.key(1))
    return {
        "x": jax.random.normal(keys[0], (ROWS, 5)),
        "y": jax.random.normal(keys[1], (ROWS, 3)),
    }


def assert_close(actual, desired, terms=ROWS):
    """Equal up to the order in which `terms` summands of similar size were added."""

    def close(a, d):
        scale = float(jnp.max(jnp.abs(d), initial=0.0))
        tol = terms * F32_ULP * scale
        np.testing.assert_allclose(np.asarray(a), np.asarray(d), rtol=0, atol=tol)
        assert a.dtype == d.dtype

    jax.tree.map(close, actual, desired)


# -- The split


@pytest.mark.parametrize(
    "split",
    [{"num_microbatches": n} for n in (1, 2, 3, 4, 6, 12)]
    + [{"microbatch_size": m} for m in (1, 3, 5, 7, 11, 12, 50)],
    ids=str,
)
def test_value_and_gradient_are_those_of_the_whole_batch(params, batch, split):
    expected = jax.value_and_grad(loss_fn)(params, batch)
    actual = jax.jit(optax_accum.value_and_grad(loss_fn, **split))(params, batch)
    assert_close(actual, expected)


@pytest.mark.slow
def test_plain_averaging_of_a_ragged_batch_would_be_wrong(params, batch):
    """The twin: without weights by rows, 5 + 5 + 2 rows give another gradient."""
    parts = [slice(0, 5), slice(5, 10), slice(10, 12)]
    grads = [
        jax.grad(loss_fn)(params, jax.tree.map(lambda a, p=part: a[p], batch))
        for part in parts
    ]
    naive = jax.tree.map(lambda *g: sum(g[1:], g[0]) / 3, *grads)
    with pytest.raises(AssertionError):
        assert_close(naive, jax.grad(loss_fn)(params, batch))


@pytest.mark.slow
def test_microbatches_are_strided():
    """Micro-batch i takes rows i, i+N, ...; what is left over comes last."""

    def rows_of(**split):
        def loss_fn(w, x, seen):
            size = x.shape[0]
            start = seen["count"]
            places = start + jnp.arange(size)
            rows = seen["rows"].at[places].set(x)
            return jnp.mean(w * x), {"rows": rows, "count": start + size}

        value_and_grad = optax_accum.value_and_grad(loss_fn, carry_argnum=2, **split)
        seen = {"rows": jnp.zeros(7), "count": jnp.zeros((), jnp.int32)}
        return list(value_and_grad(1.0, jnp.arange(7.0), seen)[0][1]["rows"])

    assert rows_of(num_microbatches=7) == [0, 1, 2, 3, 4, 5, 6]
    assert rows_of(microbatch_size=3) == [0, 2, 4, 1, 3, 5, 6]
    assert rows_of(microbatch_size=2) == [0, 3, 1, 4, 2, 5, 6]
    assert rows_of(microbatch_size=5) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("axis", [1, -1])
def test_batch_axis(axis):
    x = jax.random.normal(jax.random.key(0), (3, 8))

    def loss_fn(w, x):
        return jnp.mean((w @ x) ** 2)

    w = jnp.array([1.0, -2.0, 0.5])
    expected = jax.grad(loss_fn)(w, x)
    for split in ({"num_microbatches": 4}, {"microbatch_size": 3}):
        grad_fn = optax_accum.grad(loss_fn, batch_axis=axis, **split)
        assert_close(grad_fn(w, x), expected, terms=8)


def test_scalars_none_and_keys_in_the_batch_pass_whole(params, batch):
    whole = {"t": 2.0, "n": None, "key": jax.random.key(0), "a": jnp.ones(())}

    def scaled(params, batch):
        assert batch["key"].shape == () and batch["n"] is None
        return loss_fn(params, batch) / batch["t"] * batch["a"]

    expected = jax.grad(scaled)(params, batch | whole)
    grad_fn = jax.jit(optax_accum.grad(scaled, num_microbatches=3))
    assert_close(grad_fn(params, batch | whole), expected)


def test_rows_of_keys_are_split(params, batch):
    keys = jax.random.split(jax.random.key(5), ROWS)

    def noisy(params, batch, keys):
        noise = jax.vmap(jax.random.normal)(keys)
        return jnp.mean((batch["x"] @ params["w1"] + noise[:, None]) ** 2)

    expected = jax.grad(noisy)(params, batch, keys)
    grad_fn = optax_accum.grad(noisy, num_microbatches=3, batch_argnums=(1, 2))
    assert_close(grad_fn(params, batch, keys), expected)


# -- Which arguments


def two_towers(a, x, b, *, y, scale=1.0):
    return jnp.mean((x * a - y * b) ** 2) * scale


@pytest.mark.parametrize(
    ("chosen", "reference"),
    [
        ({"argnums": 0}, 0),
        ({"argnums": (0, 2)}, (0, 2)),
        ({"argnums": [2, 0]}, (2, 0)),
        ({"argnums": -1}, 2),
        ({"argnames": "a"}, 0),
        ({"argnames": ("b",)}, (2,)),
        ({"argnums": 0, "argnames": "b"}, (0, 2)),
    ],
    ids=str,
)
def test_argnums_and_argnames(chosen, reference):
    x, y = jnp.arange(6.0), jnp.ones(6)
    expected = jax.value_and_grad(lambda a, x, b: two_towers(a, x, b, y=y), reference)
    value_and_grad = optax_accum.value_and_grad(
        two_towers, num_microbatches=2, batch_argnums=1, batch_argnames="y", **chosen
    )
    actual = value_and_grad(2.0, x, 3.0, y=y)
    assert jax.tree.structure(actual) == jax.tree.structure(expected(2.0, x, 3.0))
    np.testing.assert_allclose(
        jax.tree.leaves(actual),
        jax.tree.leaves(expected(2.0, x, 3.0)),
        rtol=8 * F32_ULP,
    )


def test_an_argument_is_found_however_it_is_passed():
    x, y = jnp.arange(6.0), jnp.ones(6)
    expected = jax.grad(two_towers)(2.0, x, 3.0, y=y)
    by_num = optax_accum.grad(
        two_towers, num_microbatches=2, batch_argnums=1, batch_argnames="y"
    )
    by_name = optax_accum.grad(
        two_towers, num_microbatches=2, argnames="a", batch_argnames=("x", "y")
    )
    for grad_fn in (by_num, by_name):
        np.testing.assert_allclose(
            grad_fn(2.0, x, 3.0, y=y), expected, rtol=8 * F32_ULP
        )
        np.testing.assert_allclose(
            grad_fn(a=2.0, x=x, b=3.0, y=y), expected, rtol=8 * F32_ULP
        )


def test_extra_arguments_pass_whole():
    """An argument as long as the batch is not split, if it is not named."""
    teacher = jnp.arange(4.0)

    def loss_fn(w, x, teacher):
        assert teacher.shape == (4,)
        return jnp.mean(x) * jnp.sum(w * teacher)

    actual = optax_accum.grad(loss_fn, num_microbatches=2)(
        jnp.ones(4), jnp.ones(4), teacher
    )
    np.testing.assert_array_equal(actual, teacher)


# -- Aux, keys, carried state


def test_aux_is_averaged_over_the_rows(batch):
    def loss_fn(w, batch):
        return jnp.mean(w * batch["x"]), {"mean": jnp.mean(batch["x"]), "one": 1.0}

    expected = jax.value_and_grad(loss_fn, has_aux=True)(1.0, batch)
    for split in ({"num_microbatches": 4}, {"microbatch_size": 5}):
        value_and_grad = optax_accum.value_and_grad(loss_fn, has_aux=True, **split)
        actual = value_and_grad(1.0, batch)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        np.testing.assert_allclose(
            jax.tree.leaves(actual), jax.tree.leaves(expected), atol=ROWS * F32_ULP
        )


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_keys_are_folded_with_the_number_of_the_microbatch(make, num_microbatches):
    key, x = make(7), jnp.arange(6.0)

    def loss_fn(w, x, keys):
        noise = [jax.random.normal(k) for k in (keys["a"], keys["b"][1])]
        return jnp.mean(w * x) * (noise[0] + 2 * noise[1])

    keys = {"a": key, "b": jnp.stack([key, key])}
    grad_fn = optax_accum.grad(
        loss_fn, num_microbatches=num_microbatches, rng_argnums=2
    )
    terms = []
    for i in range(num_microbatches):
        folded = jax.random.fold_in(key, i)
        part = x[i::num_microbatches]
        by_hand = {"a": folded, "b": jnp.stack([folded, folded])}
        terms.append(jax.grad(loss_fn)(1.0, part, by_hand) / num_microbatches)
    # Terms of either sign: roundings are relative to the largest of them.
    atol = 8 * F32_ULP * max(abs(float(term)) for term in terms)
    np.testing.assert_allclose(grad_fn(1.0, x, keys), sum(terms), atol=atol)


def test_no_key_where_none_is_wanted():
    def loss_fn(w, x, key=None):
        noise = 0.0 if key is None else jax.random.normal(key)
        return jnp.mean(w * x) + w * noise

    grad_fn = optax_accum.grad(loss_fn, num_microbatches=2, rng_argnums=2)
    assert grad_fn(1.0, jnp.ones(4)) == grad_fn(1.0, jnp.ones(4), None) == 1.0


def test_carried_state_and_aux_come_back_as_the_function_returns_them():
    def loss_fn(w, x, count):
        return jnp.mean(w * x), (count + 1, {"m": jnp.mean(x)})

    value_and_grad = optax_accum.value_and_grad(
        loss_fn, microbatch_size=4, has_aux=True, carry_argname="count"
    )
    (loss, (count, aux)), grads = value_and_grad(1.0, jnp.arange(6.0), count=0)
    assert (count, aux["m"]) == (2, 2.5)
    grads_again, (count, aux) = optax_accum.grad(
        loss_fn, num_microbatches=1, has_aux=True, carry_argnum=2
    )(1.0, jnp.arange(6.0), 0)
    assert (count, aux["m"], loss) == (1, 2.5, 2.5)
    np.testing.assert_allclose(grads, grads_again, rtol=4 * F32_ULP)


def test_a_carried_state_may_be_any_pytree():
    """A class that has no notion of equality, and containers that have too much."""

    @jax.tree_util.register_pytree_node_class
    class Statistics:
        def __init__(self, mean):
            self.mean = mean

        def tree_flatten(self):
            return (self.mean,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    def loss_fn(w, x, state):
        return jnp.mean(w * x), Statistics(state.mean + jnp.mean(x))

    value_and_grad = optax_accum.value_and_grad(
        loss_fn, num_microbatches=2, carry_argnum=2
    )
    (_, state), _ = value_and_grad(1.0, jnp.ones(4), Statistics(0.0))
    assert state.mean == 2.0

    def other_container(w, x, state):
        return jnp.mean(w * x), tuple(state)

    for n in (1, 2):
        grad_fn = optax_accum.grad(other_container, num_microbatches=n, carry_argnum=2)
        with pytest.raises(TypeError, match="PyTreeDef"):
            grad_fn(1.0, jnp.ones(4), [0.0])


def test_a_batch_argument_with_a_default_may_be_left_out():
    def loss_fn(w, x, mask=None):
        assert mask is None or mask.shape == x.shape
        return jnp.mean(w * x if mask is None else jnp.where(mask, w * x, 0.0))

    grad_fn = optax_accum.grad(loss_fn, num_microbatches=2, batch_argnums=(1, 2))
    x, mask = jnp.arange(4.0), jnp.arange(4) < 2
    assert grad_fn(1.0, x) == 1.5
    assert grad_fn(1.0, x, mask) == grad_fn(1.0, x, mask=mask) == 0.25


def test_a_key_with_a_default_may_be_left_out_in_whatever_place():
    def loss_fn(w, x, *, key=None):
        return jnp.mean(w * x) + (0.0 if key is None else jax.random.normal(key))

    grad_fn = optax_accum.grad(loss_fn, num_microbatches=2, rng_argnames="key")
    assert grad_fn(1.0, jnp.ones(4)) == grad_fn(1.0, jnp.ones(4), key=jax.random.key(0))


def test_a_list_is_a_pair_too():
    def loss_fn(w, x):
        return [jnp.mean(w * x), {"a": 1.0}]

    grads, aux = optax_accum.grad(loss_fn, num_microbatches=2, has_aux=True)(
        1.0, jnp.ones(4)
    )
    assert (grads, aux["a"]) == (1.0, 1.0)


# -- What it costs


def jaxpr_of(num_microbatches, params, batch, **options):
    fun = optax_accum.value_and_grad(
        loss_fn, num_microbatches=num_microbatches, **options
    )
    return jax.make_jaxpr(fun)(params, batch)


def test_one_microbatch_is_jax_value_and_grad(params, batch):
    """No loop, no sum: the very jaxpr."""
    ours = jaxpr_of(1, params, batch)
    assert str(ours) == str(jax.make_jaxpr(jax.value_and_grad(loss_fn))(params, batch))


def test_one_microbatch_of_16_bit_parameters_is_jax_value_and_grad(params, batch):
    """Nothing is widened where nothing is summed."""
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))

    def loss_in_float32(params, batch):
        return loss_fn(params, batch).astype(jnp.float32)

    ours = jax.make_jaxpr(optax_accum.value_and_grad(loss_in_float32))(params, batch)
    theirs = jax.make_jaxpr(jax.value_and_grad(loss_in_float32))(params, batch)
    assert str(ours) == str(theirs)


def test_no_more_rows_than_a_microbatch_meet_the_parameters(params, batch):
    """https://github.com/erfanzar/EasyDeL/issues/125"""
    scan = next(
        eqn for eqn in jaxpr_of(4, params, batch).eqns if eqn.primitive.name == "scan"
    )
    rows = [
        eqn.outvars[0].aval.shape[0]
        for eqn in scan.params["jaxpr"].jaxpr.eqns
        if eqn.primitive.name == "tanh"
    ]
    assert rows == [ROWS // 4]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_microbatches():
    """https://github.com/jax-ml/jax/issues/3186 : the twin differentiates the loop."""

    def deep(w, x):
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def through_the_loop(w, x, n):
        parts = x.reshape(n, -1, x.shape[1])
        losses = jax.lax.scan(lambda c, part: (c, deep(w, part)), 0, parts)[1]
        return jnp.mean(losses)

    def temporaries(fun, n):
        x = jax.ShapeDtypeStruct((8 * n, 32), jnp.float32)
        w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
        return temporary_bytes(jax.jit(fun), w, x)

    def ours(n):
        return temporaries(optax_accum.grad(deep, num_microbatches=n), n)

    def naive(n):
        fun = jax.grad(lambda w, x: through_the_loop(w, x, n))
        return temporaries(fun, n)

    microbatch = 8 * 32 * 4  # bytes of the rows, of which XLA may keep a copy or two
    assert ours(16) - ours(2) < 14 * 2 * microbatch
    assert naive(16) - naive(2) > 14 * 6 * microbatch  # the activations of each


def test_temporaries_are_those_of_the_hand_written_scan(batch):
    """https://github.com/borisdayma/dalle-mini/pull/122"""

    def by_hand(params, batch):
        losses, sums = sum_by_hand(loss_fn, params, batch, 4)
        return jnp.mean(losses), jax.tree.map(lambda s: s / 4, sums)

    wide = {"w1": jnp.zeros((5, 700)), "w2": jnp.zeros((700, 3))}
    ours = jax.jit(optax_accum.value_and_grad(loss_fn, num_microbatches=4))
    limit = 1.02 * temporary_bytes(jax.jit(by_hand), wide, batch)
    assert temporary_bytes(ours, wide, batch) <= limit


def test_compiled_size_does_not_grow_with_n(params):
    batch = {"x": jnp.ones((64, 5)), "y": jnp.ones((64, 3))}
    few, many = (str(jaxpr_of(n, params, batch)).count("\n") for n in (4, 64))
    assert few == many


def test_unroll_changes_the_loop_and_not_the_result(params, batch):
    assert "unroll=1\n" in str(jaxpr_of(4, params, batch))
    assert "unroll=4\n" in str(jaxpr_of(4, params, batch, unroll=4))
    rolled, unrolled = (
        jax.jit(optax_accum.value_and_grad(loss_fn, num_microbatches=4, unroll=n))
        for n in (1, 4)
    )
    assert_close(unrolled(params, batch), rolled(params, batch))


# -- dtypes


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_come_in_the_dtype_of_the_argument(
    params, batch, dtype, num_microbatches
):
    cast = jax.tree.map(lambda x: x.astype(dtype), (params, batch))
    expected = jax.eval_shape(jax.value_and_grad(loss_fn), *cast)
    fun = optax_accum.value_and_grad(loss_fn, num_microbatches=num_microbatches)
    assert types(fun(*cast)) == types(jax.tree.map(jnp.zeros_like, expected))


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_accumulator_dtype_is_that_of_the_gradients_returned(
    params, batch, num_microbatches
):
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
    grads = optax_accum.grad(
        loss_fn, num_microbatches=num_microbatches, accumulator_dtype=jnp.float32
    )(*cast)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_complex_parameters():
    def loss_fn(z, x):
        return jnp.mean(jnp.abs(z * x.astype(z.dtype) - (1 + 1j)) ** 2)

    z, x = jnp.array(0.5 - 2j, jnp.complex64), jnp.arange(1.0, 7.0)
    expected = jax.grad(loss_fn)(z, x)
    actual = optax_accum.grad(loss_fn, num_microbatches=3)(z, x)
    np.testing.assert_allclose(actual, expected, rtol=8 * F32_ULP)
    assert actual.dtype == jnp.complex64


def test_doubles(x64):
    w, x = jnp.float64(1.1), jnp.arange(12.0, dtype=jnp.float64)

    def loss_fn(w, x):
        return jnp.mean((w * x) ** 2)

    value, grad = optax_accum.value_and_grad(loss_fn, microbatch_size=5)(w, x)
    assert value.dtype == grad.dtype == jnp.float64
    np.testing.assert_allclose(grad, jax.grad(loss_fn)(w, x), rtol=1e-14)


# -- Devices


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_sharded_over_devices_stays_where_it_is(axis_type):
    """https://github.com/apple/axlearn/pull/993 : no gather, no exchange of rows."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    x = jax.device_put(
        jax.random.normal(jax.random.key(0), (32, 16)), NamedSharding(mesh, P("data"))
    )
    w = jax.device_put(jnp.ones(16), NamedSharding(mesh, P()))

    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    with jax.set_mesh(mesh):
        fun = jax.jit(optax_accum.value_and_grad(loss_fn, num_microbatches=4))
        compiled = fun.lower(w, x).compile()
        value, grad = compiled(w, x)
    assert "all-gather" not in compiled.as_text()
    assert "all-to-all" not in compiled.as_text()
    expected = jax.value_and_grad(loss_fn)(
        np.ones(16, np.float32), jnp.asarray(np.asarray(x))
    )
    np.testing.assert_allclose(value, expected[0], rtol=32 * F32_ULP)
    np.testing.assert_allclose(
        grad, expected[1], atol=32 * F32_ULP * float(jnp.max(jnp.abs(expected[1])))
    )


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({"num_microbatches": 8}, "2"), ({"microbatch_size": 6}, "6 and 4")],
)
def test_rows_that_an_explicit_mesh_cannot_lay_out(options, sizes):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(np.ones((16, 2), np.float32), NamedSharding(mesh, P("data")))
    grad = optax_accum.grad(lambda w, x: jnp.mean(w * x), **options)
    with pytest.raises(ValueError, match=f"4 devices .* of {sizes}; take fewer"):
        jax.jit(grad)(jnp.float32(1), x)


def test_inside_shard_map(batch, params):
    mesh = auto_mesh((4,), ("data",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def run(params, batch):
        local = jax.lax.pcast(params, "data", to="varying")
        grads = optax_accum.grad(loss_fn, num_microbatches=3)(local, batch)
        return jax.lax.pmean(grads, "data")

    assert_close(run(params, batch), jax.grad(loss_fn)(params, batch))


# -- Inside other transformations


@pytest.mark.slow
def test_under_vmap_over_parameters(params, batch):
    many = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    grad_fn = optax_accum.grad(loss_fn, num_microbatches=3)
    actual = jax.vmap(grad_fn, in_axes=(0, None))(many, batch)
    expected = jax.vmap(jax.grad(loss_fn), in_axes=(0, None))(many, batch)
    assert_close(actual, expected)


def test_differentiated_again():
    """A gradient penalty: the derivative of our gradient is that of JAX's."""
    x = jnp.arange(1.0, 7.0)

    def loss_fn(w, x):
        return jnp.mean(jnp.sin(w * x))

    ours = jax.grad(lambda w: optax_accum.grad(loss_fn, num_microbatches=3)(w, x) ** 2)
    theirs = jax.grad(lambda w: jax.grad(loss_fn)(w, x) ** 2)
    np.testing.assert_allclose(ours(0.3), theirs(0.3), rtol=1e-5)


@pytest.mark.slow
def test_under_remat_and_inner_scan(params, batch):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w)

    def loss_fn(w, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)

    w = jax.random.normal(jax.random.key(2), (3, 5, 5))
    expected = jax.grad(loss_fn)(w, batch["x"])
    assert_close(
        jax.jit(optax_accum.grad(loss_fn, num_microbatches=4))(w, batch["x"]), expected
    )


def test_frozen_parameters_are_bit_identical_when_masked_out(params, batch):
    tx = optax_accum.accumulate(
        optax.partition(
            {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
            {"w1": "freeze", "w2": "train"},
        ),
        2,
    )
    grads = optax_accum.grad(loss_fn, num_microbatches=2)(params, batch)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    assert_bits_equal(new["w1"], params["w1"])
    assert not jnp.array_equal(new["w2"], params["w2"])
