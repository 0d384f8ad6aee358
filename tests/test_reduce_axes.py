"""`reduce_axes`: devices share the rows, and gradients meet once a step.

The oracle is the gradient of all rows on one device, which knows of no mesh.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    F32_ULP,
    auto_mesh,
    count_primitives,
    explicit_mesh,
    lay,
    recorder,
)
from jax.sharding import PartitionSpec as P
from losses import LOSSES, largest_relative_error, unsplit

import optax_accum

# Asked for. Sums of float32 in another order differ by a few roundings of the largest
# term: some 1e-6 here.
RTOL = 1e-5

MESHES = {
    "auto": auto_mesh((4,), ("data",)),
    "explicit": explicit_mesh((4,), ("data",)),
    "auto, with a model axis": auto_mesh((4, 2), ("data", "model")),
    "explicit, with a model axis": explicit_mesh((4, 2), ("data", "model")),
}
MESH = MESHES["auto"]
HYBRID = auto_mesh((2, 4), ("replica", "shard"))

# How the parameters of a model of tokens are sharded for tensor parallelism.
TENSOR_PARALLEL = {
    "embedding": P(),
    "layers": P(None, None, "model"),
    "gate": P(),
}


@functools.cache
def make_case(name):
    """A loss, what it takes, and the gradient of all rows at once."""
    make, options = LOSSES[name]
    loss_fn, params, batch = make(jnp.float32)
    value, grads = jax.jit(jax.value_and_grad(unsplit(loss_fn)))(params, batch)
    return loss_fn, jax.device_get((params, batch, value, grads)), options


def tokens(rows=8, length=6, vocabulary=16, seed=0):
    """Ids, targets and a mask that is empty on a quarter of the devices."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, rows)
    lengths[: rows // 4] = 0
    lengths[-1] = length
    return {
        "ids": rng.integers(0, vocabulary, (rows, length)).astype(np.int32),
        "targets": rng.integers(0, vocabulary, (rows, length)).astype(np.int32),
        "mask": np.arange(length) < lengths[:, None],
    }


def table(vocabulary=16, width=8, seed=1):
    rng = np.random.default_rng(seed)
    return {
        "embedding": rng.normal(size=(vocabulary, width)).astype(np.float32),
        "hidden": rng.normal(size=(width, width)).astype(np.float32),
        "bias": rng.normal(size=(width,)).astype(np.float32),
    }


def token_losses(params, batch):
    """An embedding that is tied to the head."""
    hidden = jnp.tanh(params["embedding"][batch["ids"]] @ params["hidden"])
    logits = (hidden + params["bias"][None, None]) @ params["embedding"].T
    log_probabilities = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probabilities, batch["targets"][..., None], -1)
    return -picked[..., 0]


def token_loss(params, batch):
    return optax_accum.mean(token_losses(params, batch), where=batch["mask"])


@functools.cache
def token_oracle(rows=8):
    """Loss and gradient of all rows, by JAX alone."""

    def loss(params, batch):
        losses, mask = token_losses(params, batch), batch["mask"]
        return jnp.sum(losses, where=mask) / jnp.sum(mask).astype(jnp.float32)

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(table(), tokens(rows)))


def in_doors(loss_fn, params, batch, n, **options):
    """Loss and gradient of one step at doors 2 and 3, the batch in two calls there."""
    optimizer = recorder()
    state = optax_accum.init_train_state(params, optimizer)
    step = optax_accum.make_train_step(
        loss_fn, optimizer, num_microbatches=n, donate=False, **options
    )
    after, metrics = step(state, batch)
    yield metrics["loss"], after.opt_state["grads"]
    add, apply = optax_accum.make_window_steps(
        loss_fn, optimizer, num_microbatches=n, donate=False, **options
    )
    window = add(state, batch, None)
    after, metrics = apply(state, add(state, batch, window))
    yield metrics["loss"], after.opt_state["grads"]


# -- The gradient of the large batch


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(m, marks=[] if m == "auto" else pytest.mark.slow) for m in MESHES],
)
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_of_every_model_on_every_mesh(name, mesh):
    loss_fn, (params, batch, expected_value, expected), options = make_case(name)
    mesh = MESHES[mesh]
    specs = P()
    if name == "language model" and "model" in mesh.shape and mesh is not MESH:
        is_auto = mesh.axis_types[0] == jax.sharding.AxisType.Auto
        # On Explicit axes, tensor parallelism has to be written into the model.
        specs = TENSOR_PARALLEL if is_auto else P()
    value_and_grad = optax_accum.value_and_grad(
        loss_fn, num_microbatches=3, reduce_axes="data", mesh=mesh, **options
    )
    value, grads = jax.jit(value_and_grad)(
        lay(params, mesh, specs), lay(batch, mesh, P("data"))
    )
    assert largest_relative_error(grads, expected) < RTOL
    assert largest_relative_error(value, expected_value) < RTOL


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mesh", ["auto", "explicit, with a model axis"])
@pytest.mark.parametrize("name", ["image classifier", "regression", "siamese"])
def test_every_door(name, mesh, n):
    loss_fn, (params, batch, expected_value, expected), options = make_case(name)
    mesh = MESHES[mesh]
    params, batch = lay(params, mesh, P()), lay(batch, mesh, P("data"))
    with jax.set_mesh(mesh):
        for value, grads in in_doors(
            loss_fn, params, batch, n, reduce_axes="data", **options
        ):
            assert largest_relative_error(grads, expected) < RTOL
            assert largest_relative_error(value, expected_value) < RTOL


@pytest.mark.slow
def test_the_mean_of_devices_means_is_not_it():
    """The twin: with these weights the naive way is far off."""
    batch, params = tokens(), table()

    def loss(params, batch):
        weight = jnp.sum(batch["mask"]).astype(jnp.float32)
        losses = token_losses(params, batch)
        return jnp.sum(losses, where=batch["mask"]) / jnp.maximum(weight, 1)

    parts = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], batch) for i in range(4)]
    grads = [jax.grad(loss)(params, part) for part in parts]
    naive = jax.tree.map(lambda *g: sum(g) / 4, *grads)
    assert largest_relative_error(naive, token_oracle()[1]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_a_device_of_which_all_rows_are_padding(n):
    """There even a NaN counts for nothing."""
    batch = tokens()
    expected_value, expected = token_oracle()

    def loss_fn(params, batch):
        is_empty = jnp.logical_not(jnp.any(batch["mask"]))
        factor = jnp.where(is_empty, jnp.float32(jnp.nan), jnp.float32(1))
        losses = token_losses(jax.tree.map(lambda p: p * factor, params), batch)
        return optax_accum.mean(losses, where=batch["mask"])

    for specs, gather in ((None, None), (P("data"), "microbatch"), (P("data"), "call")):
        value, grads = jax.jit(
            optax_accum.value_and_grad(
                loss_fn,
                num_microbatches=n,
                reduce_axes="data",
                mesh=MESH,
                param_specs=specs,
                gather=gather,
            )
        )(lay(table(), MESH, specs or P()), batch)
        assert largest_relative_error(grads, expected) < RTOL
        assert largest_relative_error(value, expected_value) < RTOL


def test_nothing_counts_anywhere():
    batch = tokens() | {"mask": np.zeros((8, 6), bool)}
    state = optax_accum.init_train_state(lay(table(), MESH, P()), optax.adam(1e-3))
    step = optax_accum.make_train_step(
        token_loss,
        optax.adam(1e-3),
        num_microbatches=2,
        reduce_axes="data",
        mesh=MESH,
        donate=False,
    )
    after, metrics = step(state, batch)
    chex.assert_trees_all_equal(after.params, state.params)
    assert metrics["loss"] == 0 and not metrics["emitted"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_loss",
    [
        lambda losses, mask: jnp.mean(losses),
        lambda losses, mask: jax.lax.pmean(jnp.mean(losses), "data"),
        lambda losses, mask: optax_accum.Mean(
            jnp.sum(losses), jnp.float32(losses.size)
        ),
        lambda losses, mask: optax_accum.Mean(
            jax.lax.psum(jnp.sum(losses), "data"),
            jax.lax.psum(jnp.float32(losses.size), "data"),
        ),
        lambda losses, mask: optax_accum.Sum(jnp.sum(losses) / 48),
        lambda losses, mask: jnp.mean(losses) + 0.0 * optax_accum.mean(losses),
    ],
)
def test_a_mean_over_rows_however_it_is_said(make_loss):
    """Whether devices differ in it or not: a loss that reduces by itself, too."""

    def oracle(params, batch):
        return jnp.mean(token_losses(params, batch))

    def loss_fn(params, batch):
        return make_loss(token_losses(params, batch), batch["mask"])

    expected = jax.value_and_grad(oracle)(table(), tokens())
    value_and_grad = optax_accum.value_and_grad(
        loss_fn, num_microbatches=2, reduce_axes="data", mesh=MESH
    )
    value, grads = jax.jit(value_and_grad)(table(), tokens())
    assert largest_relative_error((value, grads), expected) < RTOL


@pytest.mark.slow
def test_terms_keep_their_denominators():
    def terms(params, batch):
        losses = token_losses(params, batch)
        return losses, losses**2, jnp.sum(params["hidden"] ** 2)

    def oracle(params, batch):
        losses, squares, decay = terms(params, batch)
        odd = batch["ids"] % 2 == 1
        masked = jnp.sum(losses, where=batch["mask"]) / np.sum(batch["mask"])
        return masked + 0.3 * jnp.mean(squares, where=odd) + 0.1 * decay

    def loss_fn(params, batch):
        losses, squares, decay = terms(params, batch)
        odd = batch["ids"] % 2 == 1
        masked = optax_accum.mean(losses, where=batch["mask"])
        return masked + 0.3 * optax_accum.mean(squares, where=odd) + 0.1 * decay

    with jax.numpy_dtype_promotion("standard"):
        expected = jax.value_and_grad(oracle)(table(), tokens())
    for n in (1, 2):
        value_and_grad = optax_accum.value_and_grad(
            loss_fn, num_microbatches=n, reduce_axes="data", mesh=MESH
        )
        value, grads = jax.jit(value_and_grad)(table(), tokens())
        assert largest_relative_error((value, grads), expected) < RTOL


@pytest.mark.slow
def test_known_denominators_of_a_window():
    def loss_fn(params, batch):
        losses = token_losses(params, batch)
        return optax_accum.mean(losses, where=batch["mask"]) + jnp.mean(losses)

    def oracle(params, batch):
        losses, mask = token_losses(params, batch), batch["mask"]
        return jnp.sum(losses, where=mask) / np.float32(np.sum(mask)) + jnp.mean(losses)

    batch = tokens(16)
    expected = jax.value_and_grad(oracle)(table(), batch)
    optimizer = recorder()
    state = optax_accum.init_train_state(lay(table(), MESH, P()), optimizer)
    add, apply = optax_accum.make_window_steps(
        loss_fn, optimizer, reduce_axes="data", mesh=MESH
    )
    first, second = (jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2))
    window = add(state, first, None, denominators=(np.sum(batch["mask"]), 16))
    state, metrics = apply(state, add(state, second, window))
    got = metrics["loss"], state.opt_state["grads"]
    assert largest_relative_error(got, expected) < RTOL


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"accumulator_dtype": jnp.bfloat16, "compensated": True},
        {"unroll": True},
        {"batch_axis": 1},
        {"in_place": True},
        {"in_place": True, "param_specs": P("data"), "gather": "call"},
    ],
    ids=str,
)
def test_options_of_a_step(options):
    if options.get("in_place") and jax.__version_info__ < (0, 10, 2):
        pytest.skip("needs JAX 0.10.2")
    batch, (value, grads) = tokens(), token_oracle()
    loss_fn = token_loss
    if "batch_axis" in options:
        batch = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), batch)
        loss_fn = lambda params, batch: token_loss(  # noqa: E731
            params, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batch)
        )
    # Kahan in two bfloat16: 16 bits of the sum, and float32 afterwards.
    rtol = 2.0**-14 if "compensated" in options else RTOL
    params = lay(table(), MESH, options.get("param_specs", P()))
    options = options | {"reduce_axes": "data", "mesh": MESH}
    for got in in_doors(loss_fn, params, batch, 2, **options):
        assert largest_relative_error(got, (value, grads)) < rtol


@pytest.mark.slow
def test_a_last_smaller_microbatch():
    value_and_grad = optax_accum.value_and_grad(
        token_loss, microbatch_size=2, reduce_axes="data", mesh=MESH
    )
    got = jax.jit(value_and_grad)(table(), tokens(12))
    assert largest_relative_error(got, token_oracle(12)) < RTOL


def test_scalars_none_and_what_is_no_array_in_a_call():
    def loss_fn(params, batch, power, name, scale):
        assert power == 2 and name == "x" and batch["none"] is None
        return jnp.mean((batch["x"] * params - scale) ** power) * batch["factor"]

    batch = {"x": jnp.arange(8.0), "none": None, "factor": jnp.float32(3)}
    grad = optax_accum.grad(loss_fn, num_microbatches=2, reduce_axes="data", mesh=MESH)(
        2.0, batch, 2, "x", np.float32(0.5)
    )
    # d/dw of 3 mean((x w - 1/2)^2) at 2: 6 mean(2 x^2 - x / 2).
    expected = 6 * np.mean(2 * np.arange(8) ** 2 - np.arange(8) / 2)
    assert abs(grad / expected - 1) < 4 * F32_ULP


@pytest.mark.slow
@pytest.mark.parametrize("specs", [None, {"w": P("data"), "b": None}, P()])
def test_parameters_with_none_among_them(specs):
    """As an optional bias, or what `equinox.partition` has left of a model."""

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    params = {"w": np.arange(4.0, dtype=np.float32), "b": None}
    for value, grads in in_doors(
        loss_fn, params, x, 2, reduce_axes="data", mesh=MESH, param_specs=specs
    ):
        expected = jax.value_and_grad(loss_fn)(params, x)
        assert grads["b"] is None
        assert largest_relative_error((value, grads), expected) < RTOL


@pytest.mark.slow
def test_outside_of_jit_on_a_mesh_with_other_axes():
    grad = optax_accum.grad(
        token_loss,
        num_microbatches=2,
        reduce_axes="data",
        mesh=MESHES["auto, with a model axis"],
    )
    assert largest_relative_error(grad(table(), tokens()), token_oracle()[1]) < RTOL


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_with_a_shard_map_of_its_own(n):
    """Over another axis; with a state, so that its types are followed, too."""
    mesh = MESHES["auto, with a model axis"]

    def multiply(w, x):
        spread = jax.shard_map(
            lambda w, x: jax.lax.psum(x @ w, "model"),
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(P("model"), P(None, "model")),
            out_specs=P(),
            axis_names={"model"},
        )
        return spread(w, x)

    def loss_fn(w, x, count):
        return jnp.mean(jnp.tanh(multiply(w, x)) ** 2), count + 1

    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=s).astype(np.float32) for s in ((4, 4), (8, 4)))
    grad = optax_accum.grad(
        loss_fn, num_microbatches=n, carry_argnum=2, reduce_axes="data", mesh=mesh
    )
    grads, count = jax.jit(grad)(w, x, np.int32(0))
    expected = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    assert largest_relative_error(grads, expected) < RTOL and count == n


def test_a_model_that_begins_its_scan_with_zeros():
    """JAX's types of what varies over devices would refuse it."""

    def loss_fn(w, x):
        def cell(hidden, x):
            return jnp.tanh(hidden + x * w), None

        hidden, _ = jax.lax.scan(cell, jnp.zeros(x.shape[0]), x.T)
        return jnp.mean(hidden**2)

    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    grad = optax_accum.grad(loss_fn, num_microbatches=2, reduce_axes="data", mesh=MESH)
    expected = jax.grad(loss_fn)(0.7, x)
    assert largest_relative_error(jax.jit(grad)(0.7, x), expected) < RTOL


def test_embeddings_are_added_up_exactly():
    """openxla/xla#49143: ids that repeat across micro-batches and devices; integers."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, (32, 7))
    upstream = rng.integers(-8, 9, (32, 7, 4)).astype(np.float32) / 16
    expected = np.zeros((16, 4), np.float32)
    np.add.at(expected, ids, upstream)

    def loss_fn(table, batch):
        return optax_accum.Sum(jnp.sum(table[batch["ids"]] * batch["upstream"]))

    batch = {"ids": ids.astype(np.int32), "upstream": upstream}
    mesh = auto_mesh((4, 2), ("data", "model"))
    embedding = lay(np.ones((16, 4), np.float32), mesh, P("model"))
    grad = optax_accum.grad(loss_fn, num_microbatches=4, reduce_axes="data", mesh=mesh)
    np.testing.assert_array_equal(jax.jit(grad)(embedding, batch), expected)


def test_devices_whose_gradients_differ():
    """FunASR#3472: gradients 4 and 7 of two ranks; 5.5 is right, on both."""
    x = np.array([2.0, 6.0, 6.0, 8.0], np.float32)  # of two micro-batches, two devices
    grad = optax_accum.grad(
        lambda w, x: jnp.mean(w * x),
        num_microbatches=2,
        reduce_axes="data",
        mesh=auto_mesh((2,), ("data",)),
    )
    result = jax.jit(grad)(1.0, x)
    assert [shard.data.item() for shard in result.addressable_shards] == [5.5, 5.5]


# -- What is reported


def report(params, batch):
    losses = token_losses(params, batch)
    aux = {
        "loss": jnp.mean(losses),
        "masked": optax_accum.mean(losses, where=batch["mask"]),
        "tokens": optax_accum.Sum(jnp.sum(batch["mask"])),
        "rows": optax_accum.Sum(batch["ids"].shape[0]),
        "most": optax_accum.Max(jnp.max(batch["ids"])),
        "least": optax_accum.Min(losses.min()),
        "any": optax_accum.Max(jnp.any(batch["mask"])),
        "row": optax_accum.Concat({"ids": batch["ids"]}),
        "stack": optax_accum.Stack(batch["ids"][:, 0]),
        "last": optax_accum.Last(jnp.sum(params["bias"] * 0 + 3)),
    }
    return token_loss(params, batch), aux


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("evaluates", [False, True])
def test_what_is_reported_is_put_together(n, evaluates):
    batch, params = tokens(16), table()
    losses = np.asarray(token_losses(params, batch))
    options = dict(num_microbatches=n, has_aux=True, reduce_axes="data", mesh=MESH)

    def loss_fn(params, batch):
        loss, aux = report(params, batch)
        # Of parameters, which devices have for themselves, so made the same again.
        last = jax.lax.pmean(aux["last"].x, "data")
        return loss, aux | {"last": optax_accum.Last(last)}

    if evaluates:
        _, aux = jax.jit(optax_accum.value(loss_fn, **options))(params, batch)
    else:
        value_and_grad = optax_accum.value_and_grad(loss_fn, **options)
        (_, aux), _ = jax.jit(value_and_grad)(params, batch)
    masked = np.mean(losses, where=batch["mask"])
    np.testing.assert_allclose(aux["loss"], np.mean(losses), rtol=RTOL)
    np.testing.assert_allclose(aux["masked"], masked, rtol=RTOL)
    np.testing.assert_allclose(aux["least"], losses.min(), rtol=RTOL)
    assert aux["tokens"] == np.sum(batch["mask"]) and aux["rows"] == 16
    assert aux["most"] == batch["ids"].max() and aux["any"].dtype == bool
    assert bool(aux["any"]) and aux["last"] == 24
    np.testing.assert_array_equal(aux["row"]["ids"], batch["ids"])
    # Device after device, of each its micro-batches in their order.
    each = batch["ids"][:, 0].reshape(4, 4 // n, n).swapaxes(1, 2).reshape(4 * n, -1)
    np.testing.assert_array_equal(aux["stack"], each)


def test_a_nan_on_one_device_is_the_largest():
    x = np.arange(8.0, dtype=np.float32)
    x[5] = np.nan

    def loss_fn(w, x):
        largest, least = optax_accum.Max(jnp.max(x)), optax_accum.Min(jnp.min(x))
        return jnp.mean(w * x), (largest, least)

    value = optax_accum.value(loss_fn, has_aux=True, reduce_axes="data", mesh=MESH)
    _, (largest, least) = jax.jit(value)(1.0, x)
    assert jnp.isnan(largest) and jnp.isnan(least)


@pytest.mark.slow
def test_a_window_keeps_what_each_device_has():
    optimizer = recorder()
    state = optax_accum.init_train_state(lay(table(), MESH, P()), optimizer)

    def loss_fn(params, batch):
        return token_loss(params, batch), optax_accum.Sum(jnp.sum(batch["mask"]))

    add, apply = optax_accum.make_window_steps(
        loss_fn, optimizer, has_aux=True, reduce_axes="data", mesh=MESH, donate=False
    )
    batch = tokens()
    window = add(state, batch, None)
    each = np.sum(batch["mask"].reshape(4, -1), axis=1)
    assert window.mini_step == 1
    np.testing.assert_array_equal(window.aux.value, each)
    np.testing.assert_array_equal(window.loss.weight, each)
    assert window.acc_grads["embedding"].shape == (4, 16, 8)
    assert window.acc_grads["embedding"].sharding.spec == P("data")
    restored = jax.tree.map(lambda x, w: jax.device_put(x, w.sharding), *[window] * 2)
    _, metrics = apply(state, add(state, batch, restored))
    assert float(metrics["aux"]) == float(metrics["weight"]) == 2 * each.sum()


# -- Keys, model state, what must be the same on all devices


def test_keys_differ_from_device_to_device():
    def loss_fn(w, x, key):
        return jnp.mean(w * x), optax_accum.Stack(jax.random.uniform(key))

    keys = []
    for n in (1, 2):
        value = optax_accum.value(
            loss_fn,
            num_microbatches=n,
            has_aux=True,
            rng_argnums=2,
            reduce_axes="data",
            mesh=MESH,
        )
        _, drawn = jax.jit(value)(1.0, np.ones(8, np.float32), jax.random.key(0))
        assert len(set(drawn.tolist())) == 4 * n
        folded = [
            jax.random.fold_in(jax.random.fold_in(jax.random.key(0), i), device)
            for device in range(4)
            for i in range(n)
        ]
        np.testing.assert_array_equal(drawn, [jax.random.uniform(k) for k in folded])
        keys.append(drawn)


def normalize(x, statistics, axis_name=None):
    """A BatchNorm that shows its statistics: of a device, or of all of them."""
    mean, square = jnp.mean(x, axis=0), jnp.mean(x**2, axis=0)
    if axis_name is not None:
        mean, square = jax.lax.pmean((mean, square), axis_name)
    new = {"mean": 0.9 * statistics["mean"] + 0.1 * mean}
    variance = square - mean**2
    return (x - mean[None]) / jnp.sqrt(variance + 1e-3)[None], new


STATISTICS = {"mean": np.zeros(3, np.float32)}
FEATURES = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32) ** 2


def normalized_loss(axis_name):
    def loss_fn(params, batch, model_state):
        normal, new = normalize(batch * params[None], model_state, axis_name)
        return jnp.mean(jnp.tanh(normal) ** 2 * params[None]), new

    return loss_fn


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_batchnorm_over_devices_is_that_of_their_rows(kind):
    """With N = 1 that is the whole batch, and with N micro-batches ghosts of them."""
    mesh, params = MESHES[kind], np.array([1.0, 2.0, 0.5], np.float32)
    (expected, statistics), expected_grads = jax.value_and_grad(
        normalized_loss(None), has_aux=True
    )(params, FEATURES, STATISTICS)
    optimizer = recorder()
    state = optax_accum.init_train_state(
        lay(params, mesh, P()), optimizer, model_state=lay(STATISTICS, mesh, P())
    )
    step = optax_accum.make_train_step(
        normalized_loss("data"), optimizer, reduce_axes="data", mesh=mesh
    )
    state, metrics = step(state, lay(FEATURES, mesh, P("data")))
    got = metrics["loss"], state.model_state, state.opt_state["grads"]
    # The variance is a difference of squares here, so that its rounding counts more.
    wanted = expected, statistics, expected_grads
    assert largest_relative_error(got, wanted) < 10 * RTOL


def test_state_in_which_devices_differ_is_refused():
    optimizer = optax.sgd(0.1)
    state = optax_accum.init_train_state(jnp.ones(3), optimizer, model_state=STATISTICS)
    options = dict(reduce_axes="data", mesh=MESH, donate=False)
    loss_fn = normalized_loss(None)
    step = optax_accum.make_train_step(loss_fn, optimizer, **options)
    add, _ = optax_accum.make_window_steps(loss_fn, optimizer, **options)
    for call in (lambda: step(state, FEATURES), lambda: add(state, FEATURES, None)):
        with pytest.raises(
            ValueError, match=r"got float32\[3\] at the state\['mean'\]"
        ):
            call()


def test_a_last_in_which_devices_differ_is_refused():
    def loss_fn(w, x):
        return jnp.mean(w * x), {"last": optax_accum.Last(jnp.max(x))}

    value = optax_accum.value(loss_fn, has_aux=True, reduce_axes="data", mesh=MESH)
    with pytest.raises(ValueError, match="report it as a `Mean`, `Stack` or `Concat`"):
        jax.jit(value)(1.0, np.arange(8.0, dtype=np.float32))


def test_state_of_which_types_do_not_tell_is_refused():
    def loss_fn(w, x, state):
        total, _ = jax.lax.scan(lambda t, x: (t + x, None), jnp.zeros(()), x * w)
        return total / 2, jax.lax.pmean(state + total, "data")

    value = optax_accum.value(loss_fn, carry_argnum=2, reduce_axes="data", mesh=MESH)
    with pytest.raises(TypeError, match="do not tell; begin .* say: TypeError: scan"):
        jax.jit(value)(1.0, np.arange(8.0, dtype=np.float32), np.float32(0))


@pytest.mark.slow
def test_a_model_that_types_refuse_is_told_so():
    """A rule that returns a constant: right, and of no type that JAX accepts."""

    @jax.custom_vjp
    def forward(w):
        return w

    forward.defvjp(lambda w: (w, None), lambda _, g: (jnp.ones(()),))

    def loss_fn(w, x):
        return forward(w) * jnp.mean(x), optax_accum.Last(jnp.ones(()))

    grad = optax_accum.grad(loss_fn, has_aux=True, reduce_axes="data", mesh=MESH)
    with pytest.raises(
        TypeError, match="do not tell; begin .* say: ValueError: Custom"
    ):
        jax.jit(grad)(np.float32(1), np.ones(8, np.float32))


# -- Parameters that are sharded over the same devices


SHARDED = {
    "replicated": (P(), None),
    "rows": ({"embedding": P("shard"), "hidden": P("shard"), "bias": P("shard")}, None),
    "columns": (
        {"embedding": P(None, "shard"), "hidden": P(None, "shard"), "bias": P()},
        None,
    ),
    "both": (
        {"embedding": P("shard", "replica"), "hidden": P("replica"), "bias": P()},
        None,
    ),
    "one axis over two": (
        {"embedding": P(("replica", "shard")), "hidden": P(), "bias": P("shard")},
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["microbatch", "call"])
@pytest.mark.parametrize("kind", [auto_mesh, explicit_mesh])
@pytest.mark.parametrize("specs", SHARDED)
def test_sharded_parameters(specs, kind, gather):
    mesh = kind((2, 4), ("replica", "shard"))
    specs = jax.tree.broadcast(SHARDED[specs][0], table())
    params = lay(table(), mesh, specs)
    batch = lay(tokens(16), mesh, P(("replica", "shard")))
    options = dict(
        reduce_axes=("replica", "shard"), mesh=mesh, param_specs=specs, gather=gather
    )
    value_and_grad = optax_accum.value_and_grad(
        token_loss, num_microbatches=2, **options
    )
    value, grads = jax.jit(value_and_grad)(params, batch)
    assert largest_relative_error((value, grads), token_oracle(16)) < RTOL
    for leaf, param in zip(*map(jax.tree.leaves, (grads, params)), strict=True):
        assert leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim)
    for got in in_doors(token_loss, params, batch, 2, **options):
        assert largest_relative_error(got, token_oracle(16)) < RTOL


@pytest.mark.slow
def test_specs_may_be_a_prefix_shardings_or_name_other_axes():
    mesh = auto_mesh((4, 2), ("data", "model"))
    whole = {"embedding": P("data", "model"), "hidden": P("model"), "bias": P()}
    params = lay(table(), mesh, whole)
    for specs in (
        whole,
        jax.tree.map(lambda x: x.sharding, params),
        {"embedding": P("data"), "hidden": None, "bias": None},
    ):
        value_and_grad = optax_accum.value_and_grad(
            token_loss,
            num_microbatches=2,
            reduce_axes="data",
            param_specs=specs,
            mesh=mesh,
        )
        value, grads = jax.jit(value_and_grad)(params, tokens())
        assert largest_relative_error((value, grads), token_oracle()) < RTOL
        assert grads["embedding"].sharding.spec[0] == "data"


def test_gradients_meet_in_the_dtype_of_their_sums():
    """In bfloat16, 256 + 1 is 256; also over devices, for every micro-batch."""
    x = np.ones((8, 4), np.float32)
    x[:2] = 256

    def loss_fn(w, x):
        return optax_accum.Sum(jnp.sum(x @ w))

    grad = optax_accum.grad(
        loss_fn,
        num_microbatches=2,
        accumulator_dtype=jnp.float32,
        reduce_axes="data",
        mesh=MESH,
        param_specs=P("data"),
    )
    w = lay(jnp.ones(4, jnp.bfloat16), MESH, P("data"))
    grads = jax.jit(grad)(w, jnp.asarray(x, jnp.bfloat16))
    np.testing.assert_array_equal(grads, np.sum(x, axis=0))


@pytest.mark.slow
def test_specs_of_several_arguments():
    def loss_fn(params, batch, bias):
        return token_loss(params | {"bias": bias}, batch)

    params = table()
    bias = params.pop("bias")
    grad = optax_accum.grad(
        loss_fn,
        argnums=(0, 2),
        num_microbatches=2,
        reduce_axes="data",
        param_specs=(None, P("data")),
        mesh=MESH,
    )
    grads, bias_grad = jax.jit(grad)(params, tokens(), lay(bias, MESH, P("data")))
    got = grads | {"bias": bias_grad}
    assert largest_relative_error(got, token_oracle()[1]) < RTOL
    assert bias_grad.sharding.spec == P("data")


# -- What devices send to each other


def compile_step(mesh, specs=None, batch_spec=None, loss_fn=token_loss, **options):
    optimizer = optax.adam(1e-3)
    params = lay(table(), mesh, P() if specs is None else specs)
    state = optax_accum.init_train_state(params, optimizer)
    if "reduce_axes" in options:
        options["mesh"] = mesh
    step = optax_accum.make_train_step(
        loss_fn, optimizer, num_microbatches=2, **options
    )
    batch = lay(tokens(16), mesh, batch_spec or P(mesh.axis_names))
    return step.lower(state, batch).compile()


def counts(collectives):
    """How often each kind is run that is as large as a parameter."""
    found = {}
    for one in collectives:
        found[one.kind] = found.get(one.kind, 0) + len(one.entries) * one.trips
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["auto", "explicit"])
def test_one_reduction_after_the_loop(mesh):
    compiled = compile_step(MESHES[mesh], reduce_axes="data")
    optax_accum.assert_one_reduction(compiled)
    report = optax_accum.collective_report(compiled)
    assert not report.inside


def test_without_it_every_microbatch_reduces():
    """The twin: what the compiler makes of the same step, and the report must see."""
    compiled = compile_step(MESH)
    with pytest.raises(AssertionError, match="in a loop"):
        optax_accum.assert_one_reduction(compiled)
    report = optax_accum.collective_report(compiled)
    # Three parameters, two micro-batches; of the tied embedding there are two parts.
    assert counts(report.parameter_sized_inside)["all-reduce"] >= 2 * 3


def test_parameters_that_are_alike_are_reduced_inside():
    """The twin of the cast: equal numbers, and a reduction for every micro-batch."""

    def local(params, batch, casts):
        if casts:
            params = jax.lax.pcast(params, "data", to="varying")
        microbatches = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)

        def body(sums, microbatch):
            total = lambda p: token_loss(p, microbatch).total  # noqa: E731
            return jax.tree.map(jnp.add, sums, jax.grad(total)(params)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(body, zeros, microbatches)
        return jax.lax.psum(sums, "data") if casts else sums

    specs = dict(mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    results = []
    for casts in (True, False):
        fun = functools.partial(local, casts=casts)
        step = jax.jit(jax.shard_map(fun, **specs))
        compiled = step.lower(table(), tokens(16)).compile()
        results.append(step(table(), tokens(16)))
        if casts:
            optax_accum.assert_one_reduction(compiled)
            continue
        with pytest.raises(AssertionError, match="in a loop"):
            optax_accum.assert_one_reduction(compiled)
    assert largest_relative_error(*results) < RTOL


@pytest.mark.slow
def test_a_window_reduces_when_it_closes():
    optimizer = optax.adam(1e-3)
    state = optax_accum.init_train_state(lay(table(), MESH, P()), optimizer)
    batch = lay(tokens(16), MESH, P("data"))
    add, apply = optax_accum.make_window_steps(
        token_loss, optimizer, num_microbatches=2, reduce_axes="data", mesh=MESH
    )
    compiled = add.lower(state, batch, None).compile()
    window = add(state, batch, None)
    again = add.lower(state, batch, window).compile()
    for program in (compiled, again):
        assert optax_accum.collective_report(program).collectives == ()
    optax_accum.assert_one_reduction(apply.lower(state, window).compile())


FULLY_SHARDED = {
    "embedding": P("shard"),
    "hidden": P(None, "shard"),
    "bias": P(),
}


@pytest.mark.parametrize("kind", [auto_mesh, explicit_mesh])
@pytest.mark.parametrize(
    ("gather", "inside", "outside"),
    [
        # Of two parameters, in two micro-batches; over `replica` all three once.
        ("microbatch", {"all-gather": 4, "reduce-scatter": 4}, {"all-reduce": 3}),
        ("call", {}, {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 3}),
    ],
)
def test_when_sharded_parameters_are_gathered(gather, inside, outside, kind):
    mesh = kind((2, 4), ("replica", "shard"))
    compiled = compile_step(
        mesh,
        FULLY_SHARDED,
        reduce_axes=("replica", "shard"),
        param_specs=FULLY_SHARDED,
        gather=gather,
    )
    report = optax_accum.collective_report(compiled)
    assert counts(report.parameter_sized_inside) == inside
    # One all-reduce has scalars among its operands, as the compiler puts them together.
    sizes = {16 * 8 // 4, 8 * 8 // 4, 8}
    found = report.parameter_sized_outside
    reduced = [n for c in found if c.kind == "all-reduce" for n in c.entries]
    assert len([n for n in reduced if n in sizes]) == outside["all-reduce"]
    gathers = counts(c for c in found if c.kind != "all-reduce")
    assert gathers == {k: v for k, v in outside.items() if k != "all-reduce"}


@pytest.mark.slow
def test_tensor_parallelism_stays_with_the_compiler():
    mesh = MESHES["auto, with a model axis"]
    specs = {"embedding": P("model"), "hidden": P(None, "model"), "bias": P()}
    compiled = compile_step(mesh, specs, P("data"), reduce_axes="data")
    report = optax_accum.collective_report(compiled)
    # In the loop, only what is exchanged between the two parts of a layer.
    assert {c.group_size for c in report.inside} == {2}
    reduced = [c for c in report.parameter_sized_outside if c.kind != "all-gather"]
    assert reduced and all(c.group_size == 4 for c in reduced)


# -- One step, compiled once; state where the parameters are


@pytest.mark.slow
@pytest.mark.parametrize("door", [2, 3])
def test_what_the_compiler_would_lay_out_otherwise_stays(door):
    """A scale that all have, used where a layer is in parts; and its moments."""
    mesh = MESHES["auto, with a model axis"]
    specs = {"embedding": P(None, "model"), "hidden": P("model"), "bias": P()}

    def loss_fn(params, batch):
        hidden = params["embedding"][batch["ids"]] * params["bias"][None, None]
        out = jnp.tanh(hidden @ params["hidden"])
        return optax_accum.mean(jnp.sum(out**2, axis=-1), where=batch["mask"])

    optimizer = optax.adam(1e-3)
    state = optax_accum.init_train_state(lay(table(), mesh, specs), optimizer)
    batch = lay(tokens(), mesh, P("data"))
    options = dict(reduce_axes="data", mesh=mesh, donate=False)
    if door == 2:
        step = optax_accum.make_train_step(loss_fn, optimizer, **options)
        after, _ = step(state, batch)
    else:
        add, apply = optax_accum.make_window_steps(loss_fn, optimizer, **options)
        after, _ = apply(state, add(state, batch, None))
    for old, new in zip(*map(jax.tree.leaves, (state, after)), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [auto_mesh, explicit_mesh])
@pytest.mark.parametrize("num_microbatches", [2, "auto"])
def test_one_compilation_and_shardings_that_stay(kind, num_microbatches, caplog):
    mesh = kind((4, 2), ("data", "model"))
    specs = {"embedding": P("data"), "hidden": P(None, "data"), "bias": P()}
    optimizer = optax_accum.accumulate(optax.adam(1e-3), every_k=2)
    state = optax_accum.init_train_state(
        lay(table(), mesh, specs), optimizer, key=jax.random.key(0)
    )
    before = jax.tree.map(lambda x: x.sharding, state)
    assert all(
        isinstance(x, jax.NamedSharding) and len(x.device_set) == 8
        for x in jax.tree.leaves(before)
    )
    sums = state.opt_state.acc_grads["embedding"].addressable_shards
    assert {shard.data.shape for shard in sums} == {(4, 8)}
    is_auto = num_microbatches == "auto"
    limit = {"memory_limit": "1GiB"} if is_auto else {}
    # The planner compiles N = 1, which fits, and that very program is run.
    compiled = 1
    step = optax_accum.make_train_step(
        lambda params, batch, key: token_loss(params, batch),
        optimizer,
        num_microbatches=num_microbatches,
        reduce_axes="data",
        param_specs=specs,
        mesh=mesh,
        **limit,
    )
    batch = lay(tokens(), mesh, P("data"))
    with jax.log_compiles():
        for _ in range(3):
            state, _ = step(state, batch)
    # Not `_cache_size`: of a typed key JAX keeps one program under several entries.
    assert caplog.text.count("Finished XLA compilation of jit(train_step)") == compiled
    after = jax.tree.map(lambda x: x.sharding, state)
    ranks = jax.tree.map(jnp.ndim, state)
    chex.assert_trees_all_equal(
        jax.tree.map(lambda a, b, n: a.is_equivalent_to(b, n), after, before, ranks),
        jax.tree.map(lambda _: True, before),
    )


def test_init_outside_jit_copies_nothing_to_one_device():
    params = lay(table(), HYBRID, P(("replica", "shard")))
    params["bias"] = jax.device_put(params["bias"], jax.NamedSharding(HYBRID, P()))
    state = optax_accum.accumulate(optax.adam(1e-3), every_k=2).init(params)
    for leaf in jax.tree.leaves(state):
        assert len(leaf.sharding.device_set) == 8
    moments, sums = state.inner_opt_state[0].mu, state.acc_grads
    for tree in (moments, sums):
        chex.assert_trees_all_equal(
            jax.tree.map(lambda x: x.sharding, tree),
            jax.tree.map(lambda x: x.sharding, params),
        )


@pytest.mark.slow
def test_a_step_is_the_body_of_a_scan():
    optimizer = optax.sgd(0.1)
    step = optax_accum.make_train_step(
        token_loss, optimizer, num_microbatches=2, reduce_axes="data"
    )
    state = optax_accum.init_train_state(lay(table(), MESH, P()), optimizer)
    batches = jax.tree.map(lambda x: np.stack([x] * 3), tokens())
    batches = lay(batches, MESH, P(None, "data"))
    with jax.set_mesh(MESH):
        state, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, batches)
    params, expected = table(), []
    for _ in range(3):
        loss, grads = jax.value_and_grad(lambda p, b: token_loss(p, b).value)(
            params, tokens()
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        expected.append(loss)
    assert largest_relative_error(metrics["loss"], np.array(expected)) < RTOL
    assert largest_relative_error(state.params, params) < RTOL


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_inside_a_shard_map_of_ones_own(check_vma, n):
    value_and_grad = optax_accum.value_and_grad(
        token_loss, num_microbatches=n, reduce_axes="data"
    )
    mapped = jax.shard_map(
        value_and_grad,
        mesh=MESH,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    got = jax.jit(mapped)(table(), tokens())
    assert largest_relative_error(got, token_oracle()) < RTOL


@pytest.mark.slow
def test_a_loss_that_reduces_inside_a_typed_shard_map():
    """The same on all devices, and yet a share of each: counted as one mean."""

    def loss_fn(params, batch):
        losses = token_losses(params, batch)
        aux = optax_accum.Sum(batch["ids"].shape[0]), optax_accum.Max(jnp.float32(2))
        return jax.lax.pmean(jnp.mean(losses), "data"), aux

    fun = optax_accum.value_and_grad(
        loss_fn, num_microbatches=2, has_aux=True, reduce_axes="data"
    )
    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    (value, aux), grads = jax.jit(jax.shard_map(fun, mesh=MESH, **specs))(
        table(), tokens()
    )
    expected = jax.value_and_grad(lambda p, b: jnp.mean(token_losses(p, b)))(
        table(), tokens()
    )
    assert largest_relative_error((value, grads), expected) < RTOL
    assert [int(x) for x in aux] == [8, 2]


@pytest.mark.slow
def test_a_window_inside_a_shard_map_of_ones_own():
    optimizer = recorder()
    state = optax_accum.init_train_state(table(), optimizer)
    add, apply = optax_accum.make_window_steps(
        token_loss, optimizer, reduce_axes="data"
    )

    @jax.shard_map(mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    def step(state, batch):
        window = add(state, batch, None)
        state, metrics = apply(state, add(state, batch, window))
        return metrics["loss"], state.opt_state["grads"]

    got = jax.jit(step)(state, tokens())
    assert largest_relative_error(got, token_oracle()) < RTOL


@pytest.mark.slow
def test_the_plan_of_a_step_that_shares_rows():
    optimizer = optax.adam(1e-3)
    state = optax_accum.init_train_state(lay(table(), MESH, P()), optimizer)
    batch = lay(tokens(48), MESH, P("data"))
    options = dict(reduce_axes="data", mesh=MESH)
    plan = optax_accum.plan_microbatches(
        token_loss, optimizer, state, batch, memory_limit="1GB", exhaustive=True,
        **options,
    )  # fmt: skip
    assert [c.num_microbatches for c in plan.candidates] == [1, 2, 3, 4, 6, 12]
    assert [c.microbatch_size for c in plan.candidates] == [12, 6, 4, 3, 2, 1]
    # One all-reduce in a ring of four, whatever N is; the scalars of the loss with it.
    gradients = 4 * (16 * 8 + 8 * 8 + 8)
    moved = {c.bytes_moved for c in plan.candidates}
    assert len(moved) == 1 and 0 <= moved.pop() - 2 * 3 * gradients // 4 < 64
    assert "moved, KiB" in str(plan)
    step = optax_accum.make_train_step(
        token_loss, optimizer, num_microbatches=12, **options
    )
    analysis = step.lower(state, batch).compile().memory_analysis()
    temporary = analysis.temp_size_in_bytes
    memory = plan.candidates[-1].memory
    assert memory.accumulator + memory.activations == temporary


@pytest.mark.slow
def test_the_plan_knows_where_sums_are_whole():
    optimizer = optax.adam(1e-3)
    specs = {"embedding": P("data"), "hidden": P("data"), "bias": P("data")}
    state = optax_accum.init_train_state(lay(table(), MESH, specs), optimizer)
    batch = lay(tokens(16), MESH, P("data"))
    whole, sums = 4 * (16 * 8 + 8 * 8 + 8), {}
    for gather in ("microbatch", "call"):
        plan = optax_accum.plan_microbatches(
            token_loss,
            optimizer,
            state,
            batch,
            memory_limit="1GB",
            exhaustive=True,
            reduce_axes="data",
            mesh=MESH,
            param_specs=specs,
            gather=gather,
        )
        sums[gather] = plan.candidates[-1].memory.accumulator
    assert sums == {"microbatch": whole // 4, "call": whole}


@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="needs JAX 0.10.2")
def test_in_place_has_no_branch_of_one_device():
    """In which a collective of the loss would wait for ever."""
    step = optax_accum.value_and_grad(
        token_loss, num_microbatches=2, in_place=True, reduce_axes="data", mesh=MESH
    )
    # One, which is always taken, keeps the result in the memory of the sums.
    assert count_primitives(step, table(), tokens())["cond"] == 1
    alone = optax_accum.value_and_grad(token_loss, num_microbatches=2, in_place=True)
    assert count_primitives(alone, table(), tokens())["cond"] == 2


# -- What it must be given


def call(loss_fn=token_loss, params=None, batch=None, **options):
    value_and_grad = optax_accum.value_and_grad(loss_fn, **options)
    params = table() if params is None else params
    return jax.jit(value_and_grad)(params, tokens() if batch is None else batch)


FSDP = {"embedding": P("data"), "hidden": P(), "bias": P()}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"reduce_axes": 3}, TypeError, "name of a mesh axis or a tuple of such"),
        ({"reduce_axes": ("data", "data")}, ValueError, "each mesh axis once"),
        ({"reduce_axes": "data"}, ValueError, "for no mesh; write `with jax.set_mesh"),
        ({"reduce_axes": "rows", "mesh": MESH}, ValueError, r"for \('data',\)"),
        ({"reduce_axes": "data", "mesh": 8}, TypeError, "must be a mesh, got int"),
        ({"mesh": MESH}, ValueError, r"\(mesh=...\)` must come with `reduce_axes`"),
        ({"param_specs": P("data")}, ValueError, "must come with `reduce_axes`"),
        (
            {"reduce_axes": "data", "mesh": MESH, "gather": "call"},
            ValueError,
            "must come with `param_specs`",
        ),
        (
            {
                "reduce_axes": "data",
                "mesh": MESH,
                "gather": "often",
                "param_specs": P("data"),
            },
            ValueError,
            "one of microbatch, call, got 'often'",
        ),
        (
            {"reduce_axes": "data", "mesh": MESH, "num_microbatches": 4},
            ValueError,
            r"got 4 for 2 rows on each of 4 devices, which \[1, 2\] divide",
        ),
        (
            {"reduce_axes": "data", "mesh": MESH, "param_specs": {"other": P()}},
            ValueError,
            "structure of what is trained",
        ),
        (
            {"reduce_axes": "data", "mesh": MESH, "param_specs": "data"},
            TypeError,
            "`PartitionSpec` of names, a `NamedSharding` or None .*, got 'data'",
        ),
        (
            {
                "reduce_axes": "data",
                "mesh": MESH,
                "param_specs": FSDP | {"bias": P(None, "data")},
            },
            ValueError,
            r"at most as many entries .* for params\['bias'\], which has 1",
        ),
        (
            {
                "reduce_axes": "shard",
                "mesh": HYBRID,
                "param_specs": {
                    "embedding": P("shard"),
                    "hidden": P(("replica", "shard")),
                    "bias": None,
                },
            },
            ValueError,
            r"must not divide one axis .* got \('replica', 'shard'\) for params",
        ),
        (
            {
                "reduce_axes": "data",
                "mesh": MESH,
                "param_specs": FSDP,
                "in_place": True,
                "num_microbatches": 2,
            },
            ValueError,
            r"must come with `gather='call'`, got 'microbatch', the default",
        ),
    ],
)
def test_what_it_must_be_given(options, kind, message):
    with pytest.raises(kind, match=message):
        call(**options)


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        (P("fsdp"), ValueError, r"axes of the mesh, \('data',\), got \['fsdp'\] for"),
        (P(P.UNCONSTRAINED), TypeError, "a `PartitionSpec` of names"),
        (
            P(None, "data"),
            ValueError,
            r"got \('data',\), of 4 devices, for float32\[8,6\] at params\['w'\]",
        ),
    ],
)
def test_specs_that_do_not_fit(spec, kind, message):
    with pytest.raises(kind, match=message):
        call(
            lambda params, x: jnp.mean(x @ params["w"]),
            {"w": np.ones((8, 6), np.float32)},
            np.ones((8, 8), np.float32),
            reduce_axes="data",
            mesh=MESH,
            param_specs={"w": spec},
        )


@pytest.mark.slow
@pytest.mark.parametrize("spec", [None, P()])
def test_rows_that_are_everywhere_are_taken(spec):
    """On Explicit axes, too, where JAX itself would refuse them."""
    mesh = MESHES["explicit"]
    batch = tokens() if spec is None else lay(tokens(), mesh, spec)
    with jax.set_mesh(mesh):
        got = call(batch=batch, reduce_axes="data", num_microbatches=2)
    assert largest_relative_error(got, token_oracle()) < RTOL


def test_rows_that_lie_along_another_axis():
    mesh = MESHES["explicit"]
    batch = {"x": lay(np.ones((8, 4), np.float32), mesh, P(None, "data"))}
    with pytest.raises(ValueError, match=r"sharded by its rows.*at batch\['x'\]; put"):
        call(
            lambda params, batch: jnp.mean(batch["x"]) * jnp.sum(params["bias"]),
            batch=batch,
            reduce_axes="data",
            mesh=mesh,
        )


def test_sums_that_jax_cannot_scatter():
    mesh = MESHES["explicit, with a model axis"]
    params = {"w": lay(np.ones((8, 8), np.float32), mesh, P("data", "model"))}
    with pytest.raises(ValueError, match=r"no other Explicit axis.*\['model'\] Auto"):
        call(
            lambda params, x: jnp.mean(params["w"]) * jnp.mean(x),
            params,
            np.ones((8, 8), np.float32),
            reduce_axes="data",
            mesh=mesh,
            param_specs=P("data"),
        )


def test_another_mesh_than_that_of_the_context():
    with jax.set_mesh(HYBRID), pytest.raises(ValueError, match="`jax.set_mesh` where"):
        call(reduce_axes="data", mesh=MESH)


@pytest.mark.slow
def test_a_mesh_inside_a_shard_map_over_another_axis():
    mapped = jax.shard_map(
        optax_accum.grad(token_loss, reduce_axes="shard", mesh=HYBRID),
        mesh=HYBRID,
        in_specs=(P(), P()),
        out_specs=P(),
        axis_names={"replica"},
        check_vma=False,
    )
    grads = jax.jit(mapped)(table(), tokens())
    assert largest_relative_error(grads, token_oracle()[1]) < RTOL


def test_rows_that_devices_cannot_share():
    for rows in (6, 9):
        with pytest.raises(ValueError, match=f"share equally, got {rows} rows; pad it"):
            call(batch=tokens(rows), reduce_axes="data", mesh=MESH)


@pytest.mark.parametrize(
    ("specs", "said"),
    [(P("data"), None), (P(), P("data")), (P("data"), P(None, "data"))],
)
def test_parameters_that_lie_otherwise_on_explicit_axes(specs, said):
    mesh = MESHES["explicit"]
    params = {"w": lay(np.ones((8, 4), np.float32), mesh, specs)}
    with pytest.raises(ValueError, match=r"must be how .* sharded .*params\['w'\]"):
        call(
            lambda params, x: jnp.mean(x @ params["w"]),
            params,
            np.ones((8, 8), np.float32),
            reduce_axes="data",
            mesh=mesh,
            param_specs=said,
        )


def test_some_of_the_axes_are_manual_already():
    mapped = jax.shard_map(
        lambda p, b: optax_accum.grad(token_loss, reduce_axes=("replica", "shard"))(
            p, b
        ),
        mesh=HYBRID,
        in_specs=(P(), P("shard")),
        out_specs=P(),
        axis_names={"shard"},
    )
    with pytest.raises(ValueError, match="all or none"):
        jax.jit(mapped)(table(), tokens())


def test_a_window_of_other_devices():
    optimizer = recorder()
    state = optax_accum.init_train_state(lay(table(), MESH, P()), optimizer)
    add, _ = optax_accum.make_window_steps(
        token_loss, optimizer, reduce_axes="data", mesh=MESH
    )
    alone, _ = optax_accum.make_window_steps(token_loss, optimizer)
    window = alone(state, tokens(), None)
    pattern = re.escape("float32[8] at acc_grads['bias']") + r".*float32\[4,8\]"
    with pytest.raises(ValueError, match=pattern):
        add(state, tokens(), window)
