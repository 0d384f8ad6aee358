"""Losses of Flax NNX modules: as `nnx.value_and_grad`, micro-batch by micro-batch."""

import doctest
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import auto_mesh, explicit_mesh, lay
from pages import DOCS, run_page

import optax_accum
import optax_accum.nnx

ROWS = 12


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 8, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


class Stateful(nnx.Module):
    """What changes when it is called: statistics, and the count of a stream."""

    def __init__(self, rngs, axis_name=None):
        self.hidden = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jnp.tanh(self.norm(self.hidden(x)))))


class Deep(nnx.Module):
    """Layers of one kind, scanned over."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(3, 3, rngs=rngs)

        self.layers = make(rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        @nnx.scan
        def forward(x, layer):
            return jnp.tanh(layer(x)), None

        return self.out(forward(x, self.layers)[0])


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(ROWS, 3)), jnp.float32)
    return {"x": x, "y": jnp.sum(x, axis=1, keepdims=True) ** 2}


def micro_batches(batch, n):
    return [jax.tree.map(lambda x, i=i: x[i::n], batch) for i in range(n)]


def assert_close(actual, desired):
    """Equal but for the order of 12 summands of size 1 in float32, some 1e-7 each."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
        else:
            assert jnp.all(a == b)


def one_by_one(model, batch, n):
    """A loop in plain Flax: the mean value and gradient; the model has its state."""
    results = [
        nnx.value_and_grad(loss_fn)(model, rows) for rows in micro_batches(batch, n)
    ]
    return jax.tree.map(lambda *leaves: sum(leaves) / n, *results)


# -- The gradient


deep = pytest.param(Deep, marks=pytest.mark.slow)


@pytest.mark.parametrize("make", [Plain, deep])
@pytest.mark.parametrize(
    "split", [{}, {"num_microbatches": 4}, {"microbatch_size": 5}], ids=str
)
def test_gradient_is_that_of_the_large_batch(make, split, batch):
    model = make(nnx.Rngs(0))
    value_and_grad = optax_accum.nnx.value_and_grad(loss_fn, wrt=nnx.Param, **split)
    actual = nnx.jit(value_and_grad)(model, batch)
    assert_close(actual, nnx.value_and_grad(loss_fn)(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize("transform", [nnx.jit, lambda fun: fun], ids=["jit", "eager"])
def test_state_goes_from_micro_batch_to_micro_batch(transform, batch):
    model, other = Stateful(nnx.Rngs(0)), Stateful(nnx.Rngs(0))
    value_and_grad = optax_accum.nnx.value_and_grad(loss_fn, num_microbatches=3)
    desired = one_by_one(other, batch, 3)
    assert_close(transform(value_and_grad)(model, batch), desired)
    assert_close(nnx.state(model), nnx.state(other))
    assert model.dropout.rngs.count[...] == 3
    model(batch["x"])  # no tracer was left in it


@pytest.mark.slow
def test_a_scan_over_the_module_itself_is_refused_by_flax(batch):
    model = Stateful(nnx.Rngs(0))
    value_and_grad = optax_accum.value_and_grad(
        lambda _, batch: loss_fn(model, batch), num_microbatches=3
    )
    with pytest.raises(Exception, match="trace level"):
        value_and_grad(1.0, batch)


@pytest.mark.slow
def test_terms_and_masks(batch):
    mask = jnp.arange(ROWS) < 5  # so that micro-batches have unequal shares

    def masked(mean):
        def loss_fn(model, batch, mask):
            losses = jnp.sum((model(batch["x"]) - batch["y"]) ** 2, axis=1)
            decay = jnp.sum(model.out.kernel[...] ** 2)
            return mean(losses, where=mask) + 0.1 * mean(losses) + 0.01 * decay

        return loss_fn

    model = Plain(nnx.Rngs(0))
    desired = nnx.value_and_grad(masked(jnp.mean))(model, batch, mask)

    def run(mean):
        return optax_accum.nnx.value_and_grad(
            masked(mean), batch_argnums=(1, 2), num_microbatches=4
        )(model, batch, mask)

    assert_close(run(optax_accum.mean), desired)
    with pytest.raises(AssertionError):
        assert_close(run(jnp.mean), desired)


@pytest.mark.slow
def test_counting_terms_does_not_change_the_state(batch):
    """The denominators are counted by a pass of their own, which leaves no trace."""

    def loss_fn(model, batch):
        losses = (model(batch["x"]) - batch["y"]) ** 2
        return optax_accum.mean(losses, where=losses > 1) + optax_accum.mean(losses)

    model = Stateful(nnx.Rngs(0))
    optax_accum.nnx.value_and_grad(loss_fn, num_microbatches=3)(model, batch)
    assert model.dropout.rngs.count[...] == 3


@pytest.mark.slow
def test_aux_and_keys(batch):
    def with_aux(model, batch, key):
        noise = jax.random.normal(key, batch["y"].shape)
        loss = jnp.mean((model(batch["x"]) - batch["y"] - noise) ** 2)
        return loss, optax_accum.Concat(noise[:, 0])

    model = Stateful(nnx.Rngs(0))
    value_and_grad = optax_accum.nnx.value_and_grad(
        with_aux, has_aux=True, rng_argnums=2, num_microbatches=3
    )
    key = jax.random.key(1)
    (loss, noise), grads = value_and_grad(model, batch, key)
    for i in range(3):
        drawn = jax.random.normal(jax.random.fold_in(key, i), (4, 1))
        np.testing.assert_array_equal(noise[i::3], drawn[:, 0])
    assert model.dropout.rngs.count[...] == 3 and loss.shape == ()
    assert type(grads) is nnx.State


def test_grad_is_the_gradient(batch):
    def with_aux(model, batch):
        return loss_fn(model, batch), optax_accum.Sum(jnp.ones(()))

    model = Plain(nnx.Rngs(0))
    desired = nnx.grad(loss_fn)(model, batch)
    assert_close(
        optax_accum.nnx.grad(loss_fn, num_microbatches=2)(model, batch), desired
    )
    grads, aux = optax_accum.nnx.grad(with_aux, has_aux=True, num_microbatches=2)(
        model, batch
    )
    assert_close(grads, desired)
    assert aux == 2


# -- What is differentiated, and what goes along


def test_wrt_chooses(batch):
    def is_out(path, variable):
        return "out" in path

    model = Plain(nnx.Rngs(0))
    argnums = nnx.DiffState(0, is_out)
    desired = nnx.grad(loss_fn, argnums=argnums)(model, batch)
    for options in ({"wrt": is_out}, {"argnums": argnums}):
        grads = optax_accum.nnx.grad(loss_fn, num_microbatches=2, **options)(
            model, batch
        )
        assert set(grads) == {"out"}
        assert_close(grads, desired)


def test_several_models(batch):
    def both(one, batch, other):
        return jnp.mean((one(batch["x"]) - other(batch["x"])) ** 2)

    one, other = Plain(nnx.Rngs(0)), Plain(nnx.Rngs(1))
    argnums = (0, nnx.DiffState(2, nnx.PathContains("out")))
    grads = optax_accum.nnx.grad(both, argnums=argnums, num_microbatches=2)(
        one, batch, other
    )
    assert isinstance(grads, tuple)
    assert_close(grads, nnx.grad(both, argnums=argnums)(one, batch, other))


@pytest.mark.slow
def test_other_modules_and_streams_are_carried(batch):
    """A teacher in training mode, and streams in an argument of their own."""

    def distil(model, batch, teacher, rngs):
        noise = jax.random.normal(rngs.noise(), batch["y"].shape)
        target = teacher["model"](batch["x"]) + noise
        return jnp.mean((model(batch["x"]) - target) ** 2)

    def make():
        teacher = {"model": Stateful(nnx.Rngs(1)), "name": "teacher"}
        return Plain(nnx.Rngs(0)), teacher, nnx.Rngs(noise=2)

    model, teacher, rngs = make()
    _, other_teacher, other_rngs = make()
    grads = optax_accum.nnx.grad(distil, num_microbatches=3)(
        model, batch, teacher, rngs=rngs
    )
    desired = [
        nnx.grad(distil)(model, rows, other_teacher, other_rngs)
        for rows in micro_batches(batch, 3)
    ]
    assert_close(grads, jax.tree.map(lambda *leaves: sum(leaves) / 3, *desired))
    assert_close(nnx.state(teacher["model"]), nnx.state(other_teacher["model"]))
    assert rngs.noise.count[...] == other_rngs.noise.count[...] == 3


def test_a_variable_that_two_arguments_share_stays_one(batch):
    def loss_fn(model, batch, counter):
        counter[...] += 1
        return jnp.mean(model(batch["x"]) ** 2) + 0.0 * model.calls[...]

    model = Plain(nnx.Rngs(0))
    model.calls = counter = nnx.Variable(jnp.zeros(()))
    optax_accum.nnx.grad(loss_fn, num_microbatches=3)(model, batch, counter)
    assert model.calls is counter and counter[...] == 3


def test_arguments_may_have_any_name_and_be_no_arrays(batch):
    def loss(model, batch, how, *, params, state=None, rows=1.0):
        assert how == "mean" and state is None
        return params * rows * loss_fn(model, batch)

    model = Plain(nnx.Rngs(0))
    grads = optax_accum.nnx.grad(loss, num_microbatches=2)(
        model, batch, "mean", params=jnp.float32(2.0)
    )
    desired = jax.tree.map(lambda g: 2 * g, nnx.grad(loss_fn)(model, batch))
    assert_close(grads, desired)


# -- Layers that Flax hands through programs of their own


class Handed(nnx.Module):
    """By ``nnx.remat``, by ``nnx.jit``, and by ``nnx.remat`` in ``nnx.scan``."""

    def __init__(self, rngs):
        self.plain, self.stateful = Plain(rngs), Stateful(rngs)
        self.deep = Deep(rngs)

    def __call__(self, x):
        @nnx.scan
        def forward(x, layer):
            return nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(layer, x), None

        y = nnx.remat(lambda model, x: model(x))(self.stateful, x)
        y = y + nnx.jit(lambda model, x: model(x))(self.plain, x)
        return y + self.deep.out(forward(x, self.deep.layers)[0])


@pytest.mark.slow
def test_what_is_handed_through_a_program_is_not_assigned(batch):
    model, other = Handed(nnx.Rngs(0)), Handed(nnx.Rngs(0))
    value_and_grad = optax_accum.nnx.value_and_grad(loss_fn, num_microbatches=3)
    desired = one_by_one(other, batch, 3)
    assert_close(nnx.jit(value_and_grad)(model, batch), desired)
    assert_close(nnx.state(model), nnx.state(other))


class Two(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))


def swap(model):
    model.a[...], model.b[...] = model.b[...], model.a[...]


def move(model):
    model.b[...] = model.b[...] + 1.0


def in_jit(model):
    nnx.jit(move)(model)


def in_remat_of_jit(model):
    nnx.remat(in_jit)(model)


def in_scan(model):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(model, x):
        model.b[...] = model.b[...] + x
        return model

    forward(model, jnp.ones(3))


def replace(model):
    model.b[...] = jnp.zeros(2)


@pytest.mark.parametrize(
    "change", [swap, move, in_jit, in_remat_of_jit, in_scan, replace]
)
def test_what_is_assigned_anywhere_is_an_error(change):
    def loss(model, x):
        change(model)
        return jnp.mean(x) * jnp.sum(model.a[...] * model.b[...])

    with pytest.raises(ValueError, match="assigns to .*'b'") as error:
        optax_accum.nnx.grad(loss)(Two(), jnp.ones(4))
    assert ("'a'" in str(error.value)) == (change is swap)


# -- The optimizer, and the doors


@pytest.mark.parametrize("n", [1, 2])
def test_optimizer_steps_at_the_boundary(n, batch):
    """Door 1, with the loss as it was and with micro-batches inside of each call."""
    model, other = Plain(nnx.Rngs(0)), Plain(nnx.Rngs(0))
    tx = optax_accum.accumulate(optax.sgd(0.1, momentum=0.9), every_k=3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    bare = nnx.Optimizer(other, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, batch):
        value_and_grad = optax_accum.nnx.value_and_grad(loss_fn, num_microbatches=n)
        loss, grads = value_and_grad(model, batch)
        optimizer.update(model, grads, value=loss, weight=len(batch["x"]))
        return loss

    for _ in range(2):
        bare.update(other, nnx.grad(loss_fn)(other, batch))
        before = nnx.state(model, nnx.Param)
        for i, rows in enumerate(micro_batches(batch, 3)):
            train_step(model, optimizer, rows)
            emitted = optax_accum.has_emitted(optimizer.opt_state)
            assert isinstance(emitted, jax.Array) and emitted == (i == 2)
            unchanged = jax.tree.map(
                jnp.array_equal, before, nnx.state(model, nnx.Param)
            )
            assert emitted or all(jax.tree.leaves(unchanged))
        assert_close(nnx.state(model), nnx.state(other))
    assert optimizer.opt_state.gradient_step[...] == 2


def make_functional(make, loss=loss_fn, **options):
    model = make(nnx.Rngs(0))
    return model, *optax_accum.nnx.functional(loss, model, wrt=nnx.Param, **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Plain, Stateful])
def test_doors_2_and_3(make, batch):
    tx = optax.sgd(0.1)
    reference, states = make(nnx.Rngs(0)), []
    optimizer = nnx.Optimizer(reference, tx, wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(reference, one_by_one(reference, batch, 3)[1])
        states.append(nnx.clone(reference))

    model, loss, params, model_state = make_functional(make)
    state = optax_accum.init_train_state(params, tx, model_state=model_state)
    train_step = optax_accum.make_train_step(loss, tx, num_microbatches=3)
    for expected in states:
        state, _ = train_step(state, batch)
        nnx.update(model, state.params, state.model_state)
        assert_close(nnx.state(model), nnx.state(expected))
    assert train_step._cache_size() == 1

    model, loss, params, model_state = make_functional(make)
    state = optax_accum.init_train_state(params, tx, model_state=model_state)
    add, apply = optax_accum.make_window_steps(loss, tx)
    window = None
    for rows in micro_batches(batch, 3):
        window = add(state, rows, window)
    state, metrics = apply(state, window)
    nnx.update(model, state.params, state.model_state)
    assert_close(nnx.state(model), nnx.state(states[0]))
    assert metrics["weight"] == ROWS


@pytest.mark.slow
def test_functional_has_aux_and_further_arguments(batch):
    def loss(model, batch, scale, *, key):
        noise = scale * jax.random.normal(key, batch["y"].shape)
        value = jnp.mean((model(batch["x"]) + noise - batch["y"]) ** 2)
        return value, {"rows": optax_accum.Sum(jnp.ones(()) * len(batch["y"]))}

    _, pure_loss, params, model_state = make_functional(Stateful, loss, has_aux=True)
    tx = optax.sgd(0.1)
    state = optax_accum.init_train_state(
        params, tx, key=jax.random.key(0), model_state=model_state
    )
    train_step = optax_accum.make_train_step(
        pure_loss, tx, num_microbatches=3, has_aux=True
    )
    state, metrics = train_step(state, batch, 0.1)
    assert metrics["aux"]["rows"] == ROWS
    assert state.model_state["dropout"]["rngs"]["count"][...] == 3


@pytest.mark.slow
def test_a_plan_needs_types_alone(batch):
    tx = optax.adam(1e-3)
    model = nnx.eval_shape(lambda: Stateful(nnx.Rngs(0)))
    loss, params, model_state = optax_accum.nnx.functional(loss_fn, model)
    state = jax.eval_shape(
        lambda p, s: optax_accum.init_train_state(p, tx, model_state=s),
        params,
        model_state,
    )
    plan = optax_accum.plan_microbatches(loss, tx, state, batch, memory_limit="1GiB")
    assert plan.num_microbatches == 1

    _, loss, params, model_state = make_functional(Stateful)
    state = optax_accum.init_train_state(params, tx, model_state=model_state)
    train_step = optax_accum.make_train_step(
        loss, tx, num_microbatches="auto", memory_limit="1GiB"
    )
    assert train_step.plan(state, batch).candidates == plan.candidates
    state, _ = train_step(state, batch)
    assert state.step == 1


def test_value_evaluates(batch):
    model, loss, params, model_state = make_functional(Plain)
    evaluate = optax_accum.value(loss, carry_argname="model_state", num_microbatches=3)
    value, _ = evaluate(params, batch, model_state=model_state)
    np.testing.assert_allclose(value, loss_fn(model, batch), rtol=1e-6)  # 12 summands


# -- Devices


@pytest.mark.slow
@pytest.mark.parametrize("door", ["value_and_grad", "make_train_step"])
def test_devices_share_statistics_and_have_dropout_of_their_own(door):
    """Every entry of the input is 1, so that a micro-batch tells what was dropped."""
    mesh = jax.make_mesh((4,), ("data",))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(
                16, axis_name="data", use_scale=False, rngs=rngs, momentum=0.0
            )
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            self.norm(x)
            return self.scale[...] * self.dropout(jnp.ones_like(x))

    def loss(model, x):
        y = model(x)
        return jnp.mean(y), optax_accum.Concat(y)

    model = Model(nnx.Rngs(0))
    x = jnp.arange(8.0)[:, None] * jnp.ones((8, 16))
    key = jax.random.key_data(model.dropout.rngs.key[...])
    options = dict(num_microbatches=2, reduce_axes="data", mesh=mesh)
    if door == "value_and_grad":
        value_and_grad = optax_accum.nnx.value_and_grad(loss, has_aux=True, **options)
        (_, y), grads = nnx.jit(value_and_grad)(model, x)
        np.testing.assert_allclose(grads["scale"][...], jnp.mean(y), rtol=1e-6)
    else:
        pure_loss, params, state = optax_accum.nnx.functional(
            loss, model, has_aux=True, reduce_axes="data"
        )
        tx = optax.sgd(0.1)
        train_step = optax_accum.make_train_step(pure_loss, tx, has_aux=True, **options)
        state = optax_accum.init_train_state(params, tx, model_state=state)
        state, metrics = train_step(state, x)
        nnx.update(model, state.params, state.model_state)
        y = metrics["aux"]
    dropped = {tuple(row) for row in np.asarray(y == 0)}
    assert len(dropped) == 8  # equal ones by chance: 28 pairs, 2**-16 each
    np.testing.assert_array_equal(jax.random.key_data(model.dropout.rngs.key[...]), key)
    assert model.dropout.rngs.count[...] == 2
    # The second micro-batches: each device has two neighbouring rows, 2i and 2i + 1.
    np.testing.assert_allclose(model.norm.mean[...], 4.0)


@pytest.mark.slow
def test_further_arguments_on_an_explicit_mesh(batch):
    def loss(model, batch, scale):
        return scale * loss_fn(model, batch)

    model = Plain(nnx.Rngs(0))
    desired = nnx.value_and_grad(loss)(model, batch, jnp.float32(2.0))
    mesh = explicit_mesh((4,), ("data",))
    with jax.set_mesh(mesh):
        nnx.update(model, lay(nnx.state(model), mesh, jax.P()))
        value_and_grad = optax_accum.nnx.value_and_grad(loss, reduce_axes="data")
        args = lay(batch, mesh, jax.P("data")), lay(jnp.float32(2.0), mesh, jax.P())
        assert_close(nnx.jit(value_and_grad)(model, *args), desired)


# -- Errors


def sow(model, batch):
    model.seen = nnx.Intermediate(jnp.ones(()))
    return loss_fn(model, batch)


def assign(model, batch):
    model.out.bias[...] = model.out.bias[...] + 1.0
    return loss_fn(model, batch)


def toggle(model, batch):
    model.eval()
    return loss_fn(model, batch)


@pytest.mark.parametrize(
    ("loss", "options", "error", "message"),
    [
        (sow, {}, ValueError, r"seen; .*`nnx\.capture`"),
        (assign, {}, ValueError, "does not assign to what is differentiated"),
        (toggle, {}, ValueError, "changes a static attribute"),
        (loss_fn, {"wrt": nnx.LoRAParam}, ValueError, "got .*LoRAParam.* chooses none"),
        (loss_fn, {"has_aux": True}, TypeError, r"returns \(loss, aux\), got float32"),
    ],
    ids=["sow", "assign", "toggle", "wrt", "aux"],
)
@pytest.mark.parametrize("door", ["value_and_grad", "functional"])
def test_errors(door, loss, options, error, message, batch):
    model = Stateful(nnx.Rngs(0))
    with pytest.raises(error, match=message):
        if door == "value_and_grad":
            optax_accum.nnx.value_and_grad(loss, **options)(model, batch)
        else:
            pure_loss, params, state = optax_accum.nnx.functional(
                loss, model, **options
            )
            pure_loss(params, batch, model_state=state)


def test_what_is_no_module_is_an_error(batch):
    with pytest.raises(TypeError, match="must be given an `nnx.Module`.*got dict"):
        optax_accum.nnx.value_and_grad(loss_fn)({"w": jnp.ones(3)}, batch)
    with pytest.raises(TypeError, match="must be given an `nnx.Module`.*got dict"):
        optax_accum.nnx.functional(loss_fn, {"w": jnp.ones(3)})


def test_streams_are_no_keys(batch):
    def loss(model, batch, rngs):
        return loss_fn(model, batch)

    with pytest.raises(TypeError, match="JAX's random keys, got Rngs at rngs"):
        optax_accum.nnx.grad(loss, rng_argnums=2)(
            Plain(nnx.Rngs(0)), batch, nnx.Rngs(noise=0)
        )


def test_a_loss_without_its_model_state_is_an_error(batch):
    _, loss, params, _ = make_functional(Stateful)
    tx = optax.sgd(0.1)
    state = optax_accum.init_train_state(params, tx)
    with pytest.raises(TypeError, match="must be given a `model_state`, got none"):
        optax_accum.make_train_step(loss, tx)(state, batch)


def test_devices_that_would_draw_the_same_are_an_error(batch):
    _, loss, params, state = make_functional(Stateful)
    with pytest.raises(ValueError, match="nnx.functional.reduce_axes.* got none"):
        jax.shard_map(
            lambda rows: loss(params, rows, model_state=state)[0],
            mesh=auto_mesh((4,), ("data",)),
            in_specs=jax.P("data"),
            out_specs=jax.P(),
        )(batch)


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="nnx.functional"):
        optax_accum.nnx.functional(Plain(nnx.Rngs(0)), loss_fn)


def test_options_are_checked_at_once():
    with pytest.raises(ValueError, match="num_microbatches"):
        optax_accum.nnx.value_and_grad(loss_fn, num_microbatches=0)
    with pytest.raises(TypeError, match="carry_argnum"):
        optax_accum.nnx.value_and_grad(loss_fn, carry_argnum=1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        optax_accum.nnx.grad(loss_fn, no_such_option=2)


def test_modules_given_to_doors_of_arrays_are_told_of_this_one(batch):
    with pytest.raises(TypeError, match=r"optax_accum\.nnx"):
        optax_accum.value_and_grad(loss_fn)(Stateful(nnx.Rngs(0)), batch)


# -- Documentation


@pytest.mark.parametrize("name", optax_accum.nnx.__all__)
def test_docstrings(name):
    function = getattr(optax_accum.nnx, name)
    doc = inspect.getdoc(function)
    arguments = doc.split("\nArgs:\n")[1].split("\nReturns:\n")[0]
    for parameter in inspect.signature(function).parameters:
        assert f"  {parameter}: " in arguments.replace("*", "")
    names = dict(jax=jax, jnp=jnp, nnx=nnx, optax=optax, optax_accum=optax_accum)
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name, globs=names)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        results = doctest.DocTestRunner().run(test)
    assert results.attempted and not results.failed


@pytest.mark.slow
def test_page():
    page = run_page(DOCS / "nnx.md")
    model, n = page["model"], page["plan"].num_microbatches
    assert n > 1
    # Ten steps of 4 micro-batches, 4 with aux, 4 calls, and a step of the plan's.
    assert model.dropout.rngs.count[...] == 10 * 4 + 4 + 4 + n
    np.testing.assert_array_equal(
        model.out.bias[...], page["state"].params["out"]["bias"]
    )
    assert page["metrics"]["emitted"]
