"""Markers: what is reported of all micro-batches together, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F32_ULP, assert_bits_equal, auto_mesh, temporary_bytes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from losses import normal

import optax_accum
from optax_accum import Concat, Last, Max, Mean, Min, Stack, Sum, mean

X = np.arange(12.0, dtype=np.float32) ** 2 - 20
SPLITS = [
    {},
    {"num_microbatches": 3},
    {"num_microbatches": 12},
    {"microbatch_size": 5},
    {"microbatch_size": 12},
    {"num_microbatches": 3, "group_size": 2},
    {"microbatch_size": 8, "group_size": 4},
]

every_split = pytest.mark.parametrize("split", SPLITS, ids=str)


def parts_of(split):
    """The rows of each micro-batch, in NumPy."""
    group, rows = split.get("group_size", 1), np.arange(len(X))
    size = split.get("microbatch_size", len(X) // split.get("num_microbatches", 1))
    count = len(X) // size
    groups = rows[: count * size].reshape(-1, group)
    parts = [groups[i::count].reshape(-1) for i in range(count)]
    rest = rows[count * size :]
    return [*parts, rest] if len(rest) else parts


def report(split, aux_fn, x=X):
    """What comes back of ``aux_fn(micro_batch)``, by either door."""

    def loss_fn(w, x):
        return jnp.mean(w * x), aux_fn(x)

    x = jnp.asarray(x)
    (_, aux), _ = optax_accum.value_and_grad(loss_fn, has_aux=True, **split)(1.0, x)
    _, again = optax_accum.value(loss_fn, has_aux=True, **split)(1.0, x)
    jax.tree.map(assert_bits_equal, aux, again)
    return aux


# -- Each marker


@every_split
def test_extremes_and_last(split):
    aux = report(
        split,
        lambda x: {"max": Max(jnp.max(x)), "min": Min(x.min()), "last": Last(x[-1])},
    )
    last = X[parts_of(split)[-1][-1]]
    assert aux == {"max": X.max(), "min": X.min(), "last": last}


@every_split
def test_sums_keep_integers(split):
    aux = report(
        split,
        lambda x: {
            "sum": Sum(jnp.sum(x)),
            "count": Sum(jnp.sum(x > 0)),
            "any": Sum(jnp.any(x > 0)),
            "bytes": Sum(jnp.uint8(200)),
        },
    )
    parts = parts_of(split)
    assert aux["sum"] == X.sum()  # integers, exact in float32
    assert aux["count"] == (X > 0).sum() and aux["count"].dtype == jnp.int32
    assert aux["any"] == sum((X[part] > 0).any() for part in parts)
    assert aux["bytes"] == 200 * len(parts)  # and no uint8 any more


@every_split
def test_means_by_their_weights(split):
    where = X > 0
    aux = report(
        split,
        lambda x: {
            "plain": jnp.mean(x),
            "where": mean(x, where=x > 0),
            "accuracy": mean(x > 0),
            "none": mean(x, where=x > 1e9),
            "by hand": Mean({"a": jnp.array([jnp.sum(x), 1.0])}, x.shape[0]),
            "sum of two": mean(x) + 2 * mean(x, where=x > 0) + jnp.mean(x),
        },
    )
    means = X.mean(), X[where].mean()
    by_hand = [means[0], len(parts_of(split)) / len(X)]
    tolerance = {"rtol": 24 * F32_ULP}  # two sums of 12 terms
    np.testing.assert_allclose(aux["plain"], means[0], **tolerance)
    np.testing.assert_allclose(aux["where"], means[1], **tolerance)
    np.testing.assert_allclose(aux["accuracy"], where.mean(), **tolerance)
    np.testing.assert_allclose(aux["by hand"]["a"], by_hand, **tolerance)
    expected = 2 * means[0] + 2 * means[1]
    np.testing.assert_allclose(aux["sum of two"], expected, **tolerance)
    assert aux["none"] == 0


def test_twin_a_plain_mean_of_what_is_masked_is_another():
    """https://github.com/google/tunix/pull/1744"""
    aux = report({"num_microbatches": 3}, lambda x: jnp.mean(x, where=x < -10))
    assert abs(aux / X[X < -10].mean() - 1) > 0.01


@every_split
def test_stack_has_an_entry_for_each_microbatch(split):
    aux = report(split, lambda x: Stack({"first": x[0], "n": jnp.int32(x.shape[0])}))
    parts = parts_of(split)
    np.testing.assert_array_equal(aux["first"], [X[part[0]] for part in parts])
    np.testing.assert_array_equal(aux["n"], [len(part) for part in parts])


@every_split
def test_concat_is_in_the_order_of_the_rows(split):
    aux = report(split, lambda x: Concat({"x": x, "pair": jnp.stack([x, -x], axis=1)}))
    np.testing.assert_array_equal(aux["x"], X)
    np.testing.assert_array_equal(aux["pair"], np.stack([X, -X], axis=1))


@pytest.mark.parametrize("repeats", [1, 4])
def test_an_aux_loss_is_logged_once(repeats):
    """https://github.com/AI-Hypercomputer/maxtext/issues/1483"""
    aux = report(
        {"num_microbatches": repeats},
        lambda x: {"plain": jnp.float32(0.3), "sum": Sum(jnp.float32(0.3))},
    )
    np.testing.assert_allclose(aux["plain"], 0.3, rtol=4 * F32_ULP)
    np.testing.assert_allclose(aux["sum"], 0.3 * repeats, rtol=4 * F32_ULP)


@pytest.mark.parametrize("split", [{}, {"num_microbatches": 2}])
def test_dtypes_of_what_is_reported(split):
    aux = report(
        split,
        lambda x: {
            "plain": jnp.mean(x).astype(jnp.bfloat16),
            "max": Max(jnp.max(x).astype(jnp.bfloat16)),
            "integer": Max(jnp.max(x).astype(jnp.int8)),
            "true": Max(jnp.any(x > 0)),
            "last": Last(x[0].astype(jnp.float16)),
            "complex": Mean(jax.lax.complex(x[0], x[1]), x.shape[0]),
        },
    )
    dtypes = {name: value.dtype for name, value in aux.items()}
    assert dtypes == {
        "plain": jnp.bfloat16,  # as the function returned it
        "max": jnp.float32,
        "integer": jnp.int8,
        "true": jnp.bool_,
        "last": jnp.float16,
        "complex": jnp.complex64,
    }


def test_extremes_of_infinities_and_nan():
    x = np.full(12, -np.inf, np.float32)
    aux = report({"num_microbatches": 3}, lambda x: (Max(x.max()), Min(-x.max())), x)
    assert aux == (-np.inf, np.inf)
    x[5] = np.nan
    aux = report({"num_microbatches": 3}, lambda x: (Max(x.max()), Min(x.min())), x)
    assert np.isnan(aux).all()


def test_keys_are_arrays_too():
    def loss_fn(w, x):
        key = jax.random.fold_in(jax.random.key(0), x[0].astype(jnp.int32))
        return jnp.mean(w * x), (Last(key), Stack(key))

    value = optax_accum.value(loss_fn, num_microbatches=3, has_aux=True)
    _, (last, stacked) = value(1.0, jnp.arange(6.0))
    keys = [
        jax.random.key_data(jax.random.fold_in(jax.random.key(0), i)) for i in (0, 1, 2)
    ]
    np.testing.assert_array_equal(jax.random.key_data(last), keys[-1])
    np.testing.assert_array_equal(jax.random.key_data(stacked), keys)


def test_nothing_to_report():
    assert report({"num_microbatches": 3}, lambda x: None) is None
    assert report({"num_microbatches": 3}, lambda x: {"a": ()}) == {"a": ()}


def test_a_train_step_reports_the_same():
    def loss_fn(params, x):
        aux = {"max": Max(jnp.max(x)), "rows": Concat(x), "plain": jnp.mean(x)}
        return mean(params * x, where=x > 0), aux

    optimizer = optax.sgd(0.1)
    for n in (1, 3):
        step = optax_accum.make_train_step(
            loss_fn, optimizer, num_microbatches=n, has_aux=True
        )
        state = optax_accum.init_train_state(1.0, optimizer)
        _, metrics = step(state, jnp.asarray(X))
        assert metrics["aux"]["max"] == X.max()
        np.testing.assert_array_equal(metrics["aux"]["rows"], X)
        np.testing.assert_allclose(metrics["aux"]["plain"], X.mean(), rtol=1e-6)
        np.testing.assert_allclose(metrics["loss"], X[X > 0].mean(), rtol=1e-6)
        assert float(metrics["weight"]) == (X > 0).sum()


# -- What it costs


@pytest.mark.slow
@pytest.mark.parametrize("marker", [Sum, Max, Last, lambda x: Mean(x, 1.0)])
def test_memory_of_what_is_reported_does_not_grow_with_n(marker):
    """The twin, a stack, has an array for each micro-batch."""

    def bytes_of(marker, n):
        def loss_fn(w, x):
            return jnp.mean(w * x), marker(jnp.outer(x[:, 0], jnp.ones(1000)) * w)

        value = optax_accum.value(loss_fn, num_microbatches=n, has_aux=True)
        x = jax.ShapeDtypeStruct((2 * n, 3), jnp.float32)
        compiled = jax.jit(value).lower(1.0, x).compile().memory_analysis()
        return compiled.temp_size_in_bytes + compiled.output_size_in_bytes

    array = 2 * 1000 * 4
    assert bytes_of(marker, 32) - bytes_of(marker, 4) < array / 2
    assert bytes_of(Stack, 32) - bytes_of(Stack, 4) >= 28 * array


def test_aux_adds_no_buffer_of_the_parameters():
    """A marker in aux must not keep the gradients from being summed in place."""
    w, x = jnp.zeros((64, 1000)), jnp.zeros((8, 64))

    def plain(w, x):
        return jnp.mean((x @ w) ** 2)

    def with_aux(w, x):
        return plain(w, x), {"max": Max(jnp.max(x)), "mean": mean(x, where=x > 0)}

    bare = jax.jit(optax_accum.grad(plain, num_microbatches=4))
    reported = jax.jit(optax_accum.grad(with_aux, num_microbatches=4, has_aux=True))
    assert temporary_bytes(reported, w, x) <= 1.02 * temporary_bytes(bare, w, x)


# -- Sharded


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("group_size", [1, 2])
def test_over_a_sharded_batch(axis_type, group_size):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    x = normal(0, 16, 3)

    def loss_fn(w, x):
        aux = {"rows": Concat(x[:, 0]), "max": Max(jnp.max(x, axis=0)), "last": Last(x)}
        return mean(w * x, where=x > 0) + 0.1 * mean(w * x), aux

    value_and_grad = jax.jit(
        optax_accum.value_and_grad(
            loss_fn, num_microbatches=2, group_size=group_size, has_aux=True
        )
    )
    expected = value_and_grad(1.0, x)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
        actual = value_and_grad(1.0, sharded)
    # The same sums in another order: 48 terms.
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=48 * F32_ULP),
        jax.device_get(actual),
        jax.device_get(expected),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mask_spec", [P("data"), P()])
@pytest.mark.parametrize("row_spec", [P("data"), P()])
@pytest.mark.parametrize("spec", [P("data"), P()])
def test_what_is_replicated_meets_what_is_sharded(spec, mask_spec, row_spec):
    """On an Explicit mesh, where a select wants both sides alike."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    x, rows = normal(0, 8, 3), jnp.abs(normal(1, 8, 1))
    mask, columns = x > 0, jnp.array([[True, False, True]])
    expected = [
        mean(x, where=mask, weights=rows).value,
        mean(x, where=columns, weights=2.0).value,
        mean(x, weights=rows).value,
    ]
    with jax.set_mesh(mesh):
        x, mask, rows = (
            jax.device_put(array, NamedSharding(mesh, where))
            for array, where in ((x, spec), (mask, mask_spec), (rows, row_spec))
        )

        def means(x, mask, rows):
            both = mean(x, where=mask, weights=rows)
            few = mean(x, where=columns, weights=2.0)
            return both.value, few.value, mean(x, weights=rows).value

        outcomes = [
            means(x, mask, rows),
            jax.jit(means)(x, mask, rows),
            jax.jit(lambda: means(x, mask, rows))(),  # as constants
        ]
    np.testing.assert_allclose(outcomes, [expected] * 3, rtol=24 * F32_ULP)


@pytest.mark.parametrize("split", [{}, {"num_microbatches": 2}])
@pytest.mark.parametrize("terms", [1, 2])
def test_masks_that_differ_between_devices(split, terms):
    """Parameters that are alike on all: JAX sums their gradient over the devices.

    So a device that is all padding must not select zeros for the others; and of one
    term, each device's weight would have to be divided by before the sum.
    """
    mesh, x = auto_mesh((2,), ("data",)), normal(0, 8, 3)
    mask = jnp.array(np.arange(8) % 4 > 1)[:, None] & (x > 0).at[:4].set(False)

    def loss_fn(w, batch):
        loss = mean((w * batch[0]) ** 2, where=batch[1])
        return loss if terms == 1 else loss + mean(w * batch[0], where=batch[1])

    def local(grad_fn):
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.jit(jax.shard_map(grad_fn, mesh=mesh, **specs))

    grad_fn = local(optax_accum.grad(loss_fn, **split))
    if terms == 1 and split:
        with pytest.raises(ValueError, match=r"weight of all devices .*\['data'\]"):
            grad_fn(1.0, (x, mask))
        return
    expected = local(jax.grad(lambda w, batch: loss_fn(w, batch).value))
    np.testing.assert_allclose(
        grad_fn(1.0, (x, mask)), expected(1.0, (x, mask)), rtol=48 * F32_ULP
    )


def test_inside_shard_map():
    """What varies over an axis keeps varying: the types of the loop are the same."""
    mesh, x = auto_mesh((2,), ("data",)), normal(0, 16, 3)

    def loss_fn(w, x):
        aux = {"max": Max(jnp.max(x)), "last": Last(x[0]), "n": Sum(jnp.sum(x > 0))}
        return mean(w * x, where=x > 0) + mean(w * x), aux

    def local(w, x):
        value = optax_accum.value(loss_fn, num_microbatches=2, has_aux=True)
        loss, aux = value(w, x)
        return jax.lax.psum(loss, "data"), jax.lax.pmax(aux["max"], "data")

    fun = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    loss, largest = jax.jit(fun)(1.0, x)
    halves = np.split(np.asarray(x), 2)
    expected = sum(half[half > 0].mean() + half.mean() for half in halves)
    np.testing.assert_allclose(loss, expected, rtol=48 * F32_ULP)
    assert largest == np.max(x)


# -- `mean` and the arithmetic of terms


def test_mean_is_that_of_numpy():
    x, w = normal(0, 3, 4), jnp.abs(normal(1, 3, 4))
    where = jnp.array([[True, False, True, True]])
    tolerance = {"rtol": 24 * F32_ULP}
    np.testing.assert_allclose(mean(x).value, np.mean(x), **tolerance)
    np.testing.assert_allclose(
        mean(x, where=where).value, np.mean(x, where=np.asarray(where)), **tolerance
    )
    np.testing.assert_allclose(
        mean(x, weights=w).value, np.average(x, weights=w), **tolerance
    )
    np.testing.assert_allclose(
        mean(x, weights=w[:, :1]).value,
        np.average(x, weights=np.broadcast_to(w[:, :1], x.shape)),
        **tolerance,
    )
    both = mean(x, where=where, weights=w)
    np.testing.assert_allclose(
        both.value, np.average(x, weights=np.where(where, w, 0)), **tolerance
    )
    assert both.size.size == 12


def test_what_does_not_count_adds_nothing():
    x = jnp.array([jnp.nan, 2.0, jnp.inf])
    only = jnp.array([False, True, False])
    loss = mean(x, where=only, weights=x)
    assert (loss.total, loss.weight) == (4, 2)
    grad = jax.grad(lambda x: mean(x, where=only, weights=x).value)(x)
    np.testing.assert_array_equal(grad, [0, 1, 0])
    assert mean(x, where=jnp.array([False, True, False])).value == 2
    assert mean(x, weights=jnp.array([0.0, 3.0, 0.0])).value == 2
    assert mean(x, where=jnp.zeros(3, bool)).value == 0
    assert mean(jnp.zeros((0, 3))).value == 0
    assert Mean(jnp.nan, 0.0).value == 0
    assert Mean(jnp.nan, 0.0).merge(Mean(4.0, 2.0)).value == 2
    assert jax.grad(lambda t: Mean(t, 0.0).value)(1.0) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool"])
def test_means_are_summed_in_float32(dtype):
    """4096 ones: a sum in bfloat16 ends at 256, one of booleans at True."""
    ones = mean(jnp.ones(4096, dtype), where=jnp.ones(4096, bool))
    assert (ones.total, ones.weight, ones.value) == (4096, 4096, 1)
    assert ones.total.dtype == ones.weight.dtype == jnp.float32


def test_arithmetic_of_terms():
    a, b = Mean(6.0, 2.0), Mean(4.0, 4.0)  # 3 and 1
    assert (2 * a).value == (a * jnp.float32(2)).value == 6
    assert (np.float32(2) * a).value == (jnp.float32(2) * a).value == 6
    assert (a / 2).value == 1.5 and (-a).value == -3
    assert (b / jnp.bfloat16(3)).value == jnp.float32(1) / 3  # rounded once, at the end
    assert (a + b).value == 4 and (a - b).value == 2
    assert (1 - a).value == (1.0 + -a).value == -2 and (a - 1).value == 2
    assert sum([a, b, Sum(5.0)]).value == 9
    assert (0.5 * (a + b + Sum(2.0) + 2.0)).value == 4
    assert (a + 0).total == 6 and isinstance(a + 0, Mean)
    assert isinstance(jax.jit(lambda x: x + b)(a).terms[0], Mean)


def test_terms_pass_through_transformations():
    """As the sum of chunks in a scan, under remat, in a branch, in a map."""
    x, mask = normal(0, 4, 6), jnp.array(np.random.default_rng(1).random((4, 6)) < 0.5)
    expected = np.asarray(x)[np.asarray(mask)].mean()

    def add_chunk(total, chunk):
        return total.merge(jax.checkpoint(mean)(*chunk)), None

    scanned, _ = jax.lax.scan(add_chunk, Mean(0.0, 0.0), (x, mask))
    chunks = jax.lax.map(lambda chunk: mean(*chunk), (x, mask))
    mapped = jax.tree.map(jnp.sum, chunks)
    chosen = jax.lax.cond(True, mean, lambda *_: Mean(0.0, 0.0), x, mask)
    for term in (scanned, mapped, chosen):
        np.testing.assert_allclose(term.value, expected, rtol=24 * F32_ULP)
