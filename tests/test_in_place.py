"""Sums to which the backward pass adds: the same gradient, and none beside them.

The oracle is `jax.grad` of all rows at once, or a loop by hand. A sum is lost without
an error where JAX takes one ref for another, so equal shapes abound here, and a twin
shows that such a test fails without our help.
"""

import functools
import operator
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import F32_ULP, assert_bits_equal, auto_mesh, types
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from losses import LOSSES, largest_relative_error, normal, unsplit

import optax_accum
from optax_accum import Concat, Last, Max, Mean, Stack, Sum, _in_place, _ref_traps, mean
from optax_accum._sums import Accumulator

try:
    _ref_traps.check_refs("grad")
except ValueError as cannot:
    pytest.skip(str(cannot), allow_module_level=True)

IS_TRAP = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="JAX needs no help, as it was found"
)


@pytest.fixture
def without_help(monkeypatch):
    """As JAX is: every leaf is a ref."""
    monkeypatch.setattr(_in_place, "misread_leaves", lambda backward: frozenset())


value_and_grad = functools.partial(optax_accum.value_and_grad, in_place=True)
grad = functools.partial(optax_accum.grad, in_place=True)


# Most of the time goes into compiling programs that run once.
fast_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def assert_close(actual, expected, limit):
    """Errors are relative to the largest entry of a leaf. What is zero stays zero."""

    def check(path, a, e):
        a, e = np.asarray(a), np.asarray(e)
        assert a.shape == e.shape and a.dtype == e.dtype
        largest = np.max(np.abs(e), initial=0)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, e, rtol=0, atol=limit * largest, err_msg=name)

    jax.tree_util.tree_map_with_path(check, actual, expected)


# -- The losses of the other tests


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language model", "image classifier", "regression"])
def test_losses_of_ragged_microbatches(name):
    """5e-6: some dozens of roundings of 6e-8 on the way, in either program."""
    loss_fn, params, batch = LOSSES[name][0](np.float32)
    expected = fast_jit(jax.value_and_grad(unsplit(loss_fn)))(params, batch)
    actual = fast_jit(value_and_grad(loss_fn, microbatch_size=5))(params, batch)
    assert largest_relative_error(actual, expected) <= 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_float64(name, x64):
    make, options = LOSSES[name]
    loss_fn, params, batch = make(np.float64)
    options = options | {"num_microbatches": 4}
    expected = fast_jit(jax.value_and_grad(unsplit(loss_fn)))(params, batch)
    actual = fast_jit(value_and_grad(loss_fn, **options))(params, batch)
    # Thousands of roundings of 1e-16.
    assert largest_relative_error(actual, expected) <= 1e-12
    if name != "language model":
        return
    by_value = fast_jit(optax_accum.value_and_grad(loss_fn, **options))(params, batch)
    np.testing.assert_array_equal(actual[0], by_value[0])
    # The same numbers are added up, in another order where two places use a parameter:
    # 8 additions for 4 micro-batches, each rounded by half an ulp, in either program.
    assert largest_relative_error(actual[1], by_value[1]) <= 2 * 8 * 2.0**-53


# -- Ways to use a parameter: (params, x) -> an entry for each row

PARAMS = {
    "w": normal(0, 4, 4, scale=0.5),
    "v": normal(1, 1, 4),
    "c": normal(2, 1, 4),
    "layers": normal(3, 3, 4, 4, scale=0.5),
    "scales": normal(4, 3, 1, 4),
    "shifts": normal(5, 3, 1, 4),
    "unused": normal(6, 2),
    "empty": jnp.zeros((0, 3)),
}
X = normal(7, 6, 4)
MODELS = {}


def model(fun):
    MODELS[fun.__name__] = fun
    return fun


def loss_of(fun):
    return lambda p, x: jnp.mean(jnp.sin(fun(p, x)))


def scan(body, init, xs, **options):
    return jax.lax.scan(lambda h, x: (body(h, x), None), init, xs, **options)[0]


def flag(p):
    """1, as the program cannot know, and the same for all rows."""
    return (jax.lax.stop_gradient(p["w"])[0, 0] < 9).astype(int)


@model
def layers_under_remat(p, x):
    @jax.checkpoint
    def layer(h, q):
        return jnp.tanh(h @ q["layers"]) * q["scales"] + p["c"]

    return scan(layer, x * p["v"], {k: p[k] for k in ("layers", "scales")})


@model
def policies(p, x):
    policy = jax.checkpoint_policies.dots_saveable

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(h, w):
        return jnp.tanh(h @ w) + p["c"]

    h = scan(layer, x @ p["w"], p["layers"], unroll=2)
    return jax.checkpoint(lambda v: h * jnp.cos(v))(p["v"])


@model
def recurrent_in_both_directions(p, x):
    """Weights are shared by all steps and by both scans, and used twice in each."""

    def step(h, s):
        return jnp.tanh(h @ p["w"] + s) @ p["w"] + p["c"]

    forward = scan(step, x, p["shifts"], unroll=True)
    return forward * scan(step, x * p["v"], p["shifts"], reverse=True)


@model
def nested_scans(p, x):
    def outer(h, q):
        inner = scan(lambda z, s: jnp.sin(z * s + p["c"]), h, p["scales"])
        return jnp.tanh(inner @ q[0]) * q[1] + p["v"]

    return scan(outer, x, (p["layers"], p["shifts"]))


@model
def nested_scans_of_what_is_carried(p, x):
    """The outer carry begins with data, whose tangent is a zero of no origin."""

    def layer(h, w):
        steps = jnp.arange(2)
        return scan(lambda g, _: jnp.tanh(g @ p["w"] + h @ w + p["c"]), h, steps)

    return scan(layer, x, p["layers"])


@model
def branches(p, x):
    """One of two, of which the first is a scan; then, in a scan, one of three."""

    def loop(v, c):
        return scan(lambda h, s: jnp.sin(h * s + c), v, p["scales"])

    def layer(h, q):
        i, shift = q
        arms = [lambda: h * p["c"], lambda: h + shift, lambda: h]
        return jnp.sin(jax.lax.switch(i, arms))

    chosen = jax.lax.cond(flag(p) > 0, loop, lambda v, c: v * c, p["v"], p["c"])
    return scan(layer, x * chosen, (jnp.arange(3), p["shifts"]))


@model
def jitted_pieces(p, x):
    @jax.jit
    def layer(h, w, s):
        return jax.jit(jnp.tanh)(h @ w) * s + p["c"]

    h = scan(lambda h, q: layer(h, *q), x, (p["layers"], p["scales"]))
    return layer(h, p["w"], p["v"])


@jax.custom_vjp
def sine(a, b):
    return jnp.sin(a) * b


sine.defvjp(
    lambda a, b: (sine(a, b), (a, b)),
    lambda ab, g: (jnp.cos(ab[0]) * ab[1] * g, jnp.sin(ab[0]) * g),
)


@jax.custom_jvp
def cube(a):
    return a**3


@cube.defjvp
def cube_jvp(a, t):
    return cube(a[0]), 3 * a[0] ** 2 * t[0]


@model
def custom_rules(p, x):
    """Of parameters as they are, and of jax.nn."""

    def layer(v, q):
        return sine(v, q[0]) + cube(q[1]) + jax.nn.silu(p["c"])

    v = scan(layer, cube(p["v"]), (p["scales"], p["shifts"]))
    return x * jax.nn.relu(v + 3) + sine(p["c"], p["v"])


@model
def slices(p, x):
    """Outside of a scan and inside, where a slice is of what was sliced already."""

    def layer(h, w):
        return jnp.tanh(h * w[:1]) + jnp.tile(w[1:3, :1], 2).reshape(1, 4)

    row = jax.lax.dynamic_index_in_dim(p["scales"], flag(p), keepdims=False)
    rest = p["shifts"][:2].sum(0) + p["v"][:, ::-1] * p["c"][:, :1]
    return scan(layer, x, p["layers"]) * row + rest


@model
def gathers(p, x):
    at = (x[:, 0] > 0).astype(int)
    columns = jnp.take(p["v"], jnp.array([3, 0, 3, 1]), axis=1)
    return (
        p["scales"][at, 0] * columns + p["w"].at[2 * at].get() + p["c"][0, at[:, None]]
    )


@model
def loops(p, x):
    """Of a known length, over rows, over pairs; and none at all, in a vmap."""
    h = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["layers"][i]), x)
    h += jax.lax.map(lambda s: jnp.sin(s * p["v"]), p["scales"]).sum(0)
    h *= jax.lax.associative_scan(jnp.multiply, p["shifts"])[-1]
    return h + jax.vmap(lambda row: jnp.tanh(p["w"] @ row) * p["c"][0])(x)


@model
def derivatives_inside(p, x):
    def energy(v):
        return jnp.sum(scan(lambda h, w: jnp.tanh(h @ w), v, p["layers"]))

    tangent = jax.jvp(lambda c: jnp.sin(c @ p["w"]), (p["c"],), (p["v"],))[1]
    return x * jax.grad(energy)(p["v"]) + tangent


@model
def refs_of_its_own(p, x):
    total = jax.new_ref(x + p["v"])

    def step(h, w):
        total[...] += h * p["c"]
        return jnp.tanh(h @ w)

    return scan(step, x, p["layers"]) + jax.freeze(total)


@model
def nothing_trained(p, x):
    return x


# -- One parameter at several places of one program


@jax.jit
def twist(a, b):
    return a * jnp.cos(b)


def closes_over(p):
    return jax.jit(lambda v: v * jnp.cos(p["v"]))(p["v"])


def scanned_twice(p, x):
    both = p["scales"], p["scales"]
    return scan(lambda h, q: jnp.sin(h * q[0]) + q[1] ** 2, x, both)


def scanned_and_closed_over(p, x):
    total = functools.partial(jnp.sum, axis=0)
    return scan(lambda h, s: jnp.sin(h * s) + total(p["scales"]), x, p["scales"])


def scanned_by_two_scans(p, x):
    def outer(h, s):
        return scan(lambda z, t: jnp.sin(z * t), h + s, p["shifts"])

    return scan(outer, x, p["shifts"])


TIED = {
    "jit": lambda p, x: x + twist(p["v"], p["v"]),
    "jit that closes over it": lambda p, x: x + closes_over(p),
    "jit of jax.numpy": lambda p, x: x + jnp.where(p["v"] > 0, p["v"], p["v"]),
    "cond": lambda p, x: x + jax.lax.cond(flag(p), twist, jnp.add, p["c"], p["c"]),
    "scanned twice": scanned_twice,
    "scanned and closed over": scanned_and_closed_over,
    "scanned by two scans": scanned_by_two_scans,
    "remat": lambda p, x: x + jax.checkpoint(twist)(p["v"], p["v"]),
    "custom": lambda p, x: x + sine(p["v"], p["v"]),
}


@functools.cache
def expected_of_models():
    """All in one program, which takes half the time."""
    losses = {name: loss_of(fun) for name, fun in (MODELS | TIED).items()}

    def each(p, x):
        return {name: jax.value_and_grad(loss)(p, x) for name, loss in losses.items()}

    return fast_jit(each)(PARAMS, X)


def check_model(name):
    loss_fn = loss_of((MODELS | TIED)[name])
    expected = expected_of_models()[name]
    assert not np.any(expected[1]["unused"])
    actual = fast_jit(value_and_grad(loss_fn, num_microbatches=2))(PARAMS, X)
    # Some dozens of roundings of 6e-8 on the way, in either program.
    assert_close(actual, expected, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    check_model(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIED)
def test_a_parameter_that_a_program_takes_twice(name):
    """Through two refs to one sum, JAX would write back one after the other."""
    check_model(name)


@pytest.mark.slow
@IS_TRAP
def test_twin_without_help_one_of_two_is_lost(without_help):
    with pytest.raises(AssertionError, match=r"Mismatched elements"):
        check_model("jit")


# -- Any order of what a scan takes

VECTORS, STACKS = ["c1", "c2", "h"], ["x1", "x2", "x3"]
FORMS = ["plain", "jit", "remat", "layer remat", "nested", "cond", "cond outside"]
FORMS += ["slice", "dicts", "nested, of the carry"]
MIXED = {
    name: normal(i, *((3, 4) if name in STACKS else (4,)))
    for i, name in enumerate(VECTORS + STACKS)
}
MIXED_ROWS = normal(9, 6, 3, 4)


def mixed_loss(form, computed, order, reverse):
    """A scan over `STACKS` that closes over c1 and c2 and carries h.

    All have the same shape, so that nothing but a gradient tells them apart.

    Args:
      form: what else there is.
      computed: which of them are no parameters but made of them.
      order: of all of them, in which they are used.
      reverse: as in ``lax.scan``.
    """
    stacks = [name for name in order if name in STACKS]

    def body(p, h, xs):
        data, scanned = xs
        scanned = (
            scanned if form == "dicts" else dict(zip(stacks, scanned, strict=True))
        )
        y = h
        for name in order:
            if name in STACKS:
                y = jnp.sin(y * scanned[name] + data)
            elif name != "h":
                y = y * p[name] + p[name] ** 2
        first, second, _ = stacks
        if form == "nested, of the carry":
            y = scan(
                lambda z, _: jnp.sin(z + h * scanned[first] + p["c1"]), y, jnp.arange(2)
            )
        if form == "nested":
            pair = jnp.stack([p["c1"], scanned[first]])
            y = scan(lambda z, c: jnp.sin(z * scanned[second] * c + p["c2"]), y, pair)
        if form == "cond":
            y = jax.lax.cond(
                jnp.sum(y) > 0, lambda: y * scanned[first], lambda: y + p["c1"]
            )
        return y, y * scanned[first]

    def scanned_loss(p, data):
        p = {k: jnp.tanh(v) if k in computed else v for k, v in p.items()}
        layer = functools.partial(body, p)
        layer = jax.checkpoint(layer) if form == "layer remat" else layer
        xs = {k: p[k] for k in stacks} if form == "dicts" else [p[k] for k in stacks]
        h = data[0] if form == "nested, of the carry" else p["h"]
        h, ys = jax.lax.scan(layer, h, (data, xs), reverse=reverse)
        loss = jnp.sum(h**2) + jnp.sum(jnp.cos(ys))
        if form == "slice":
            loss += jnp.sum(p["x1"][0] * p["c1"][:1]) + jnp.sum(p["x2"][1:])
        return loss

    def loss_fn(p, batch):
        data = jnp.mean(batch, axis=0)
        if form == "cond outside":
            arms = scanned_loss, lambda p, data: jnp.sum(p["x1"] * data)
            return jax.lax.cond(data[0, 0] < 5, *arms, p, data)
        wrap = {"jit": jax.jit, "remat": jax.checkpoint}.get(form, lambda f: f)
        return wrap(scanned_loss)(p, data)

    return loss_fn


def mixed_error(loss_fn):
    """Of two micro-batches that are alike, so that their mean is the whole."""
    rows = jnp.concatenate([MIXED_ROWS[::2]] * 2)
    rows = rows.reshape(2, 3, 3, 4).swapaxes(0, 1).reshape(6, 3, 4)
    expected = fast_jit(jax.grad(loss_fn))(MIXED, rows)
    actual = fast_jit(grad(loss_fn, num_microbatches=2))(MIXED, rows)
    return largest_relative_error(actual, expected)


# What is computed comes first, among what is closed over and among what is scanned.
WORST = {
    "form": "plain",
    "computed": {"c1", "x1"},
    "order": ["c1", "c2", "x1", "x2", "x3", "h"],
    "reverse": False,
}


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@example(**WORST)
@given(
    form=st.sampled_from(FORMS),
    computed=st.sets(st.sampled_from(VECTORS + STACKS), max_size=4),
    order=st.permutations(VECTORS + STACKS),
    reverse=st.booleans(),
)
@example(  # a gradient that is zero throughout
    form="nested, of the carry",
    computed=set(),
    order=["c1", "c2", "h", "x1", "x2", "x3"],
    reverse=False,
)
def test_any_order_of_what_a_scan_takes(**scan):
    # A chain of some 50 sines and products, and of sums that cancel to a tenth.
    assert mixed_error(mixed_loss(**scan)) <= 1e-4


@pytest.mark.slow
@IS_TRAP
def test_twin_without_help_it_is_wrong(without_help):
    assert mixed_error(mixed_loss(**WORST)) > 0.01


@pytest.mark.slow
def test_only_what_is_misread_is_added_by_value():
    """Nothing, where nothing is computed before the scan: memory depends on it."""

    def found(**scan):
        loss_fn = mixed_loss(**scan)
        numbers, _ = _in_place.find_by_value(
            "grad",
            lambda p: (loss_fn(p, MIXED_ROWS), ()),
            MIXED,
            Accumulator(in_place=True),
            sorted(MIXED),
        )
        return {sorted(MIXED)[i] for i in numbers}

    assert found(**WORST | {"computed": ()}) == set()
    if jax.__version_info__ < (0, 11):
        assert found(**WORST) == {"c2", "x2", "x3"}


# -- Flax


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, hidden):
        return hidden + jnp.tanh(self.linear(self.norm(hidden)))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Layer(rngs)

        self.layers = make(rngs)
        self.out = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(hidden, layer):
            return layer(hidden)

        return self.out(through(x, self.layers))


@pytest.mark.slow
def test_flax_nnx():
    definition, params = nnx.split(Stacked(nnx.Rngs(0)))
    loss_fn = loss_of(lambda params, x: nnx.merge(definition, params)(x))
    expected = fast_jit(jax.grad(loss_fn))(params, X)
    actual = fast_jit(grad(loss_fn, num_microbatches=2))(params, X)
    assert_close(actual, expected, 5e-6)  # as for the models above


# -- Dtypes


@pytest.mark.slow
@pytest.mark.parametrize("narrow", ["gain", "shift"])
def test_sums_of_16_bit_parameters_have_32(narrow):
    """Beside a float32 one in the same scan, before and after it."""
    params = {"gain": jnp.ones((3, 4)), "shift": jnp.zeros((3, 4))}
    params[narrow] = params[narrow].astype(jnp.bfloat16)

    def loss_fn(p, x):
        def layer(h, q):
            q = jax.tree.map(lambda leaf: leaf.astype(jnp.float32)[None], q)
            return h * q["gain"] + x * q["shift"]

        return jnp.mean(jnp.sum(scan(layer, x, p), axis=1))

    # Each micro-batch has a gradient that bfloat16 can say; their mean it cannot.
    x = jnp.array([[1.0], [1 + 2.0**-7]]) * jnp.ones((1, 4))
    grad_fn = grad(loss_fn, num_microbatches=2, accumulator_dtype=jnp.float32)
    for leaf in jax.tree.leaves(jax.jit(grad_fn)(params, x)):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, 1 + 2.0**-8)

    parts = [jax.grad(loss_fn)(params, row[None])[narrow] for row in x]
    assert parts[0].dtype == jnp.bfloat16
    assert np.all(np.float32(parts[0] + parts[1]) / 2 == 1)  # the twin

    by_default = grad(loss_fn, num_microbatches=2)(params, x)
    assert types(by_default) == types(params)


def test_a_ragged_16_bit_loss_is_weighed_in_16_bits():
    """As documented. Of 7 rows, the last two make a micro-batch of their own."""

    def loss_fn(w, x):
        return jnp.mean(w * x).astype(jnp.bfloat16)

    x = jnp.array([0.0] * 5 + [1.0] * 2)
    grad_fn = grad(loss_fn, microbatch_size=5)
    # One rounding to bfloat16, of the weight 2/5.
    np.testing.assert_allclose(grad_fn(jnp.float32(1), x), 2 / 7, rtol=2.0**-8)


def test_complex_parameters():
    z = jax.lax.complex(normal(0, 3, 4), normal(1, 3, 4))
    params = {"v": PARAMS["v"], "z": z[:, None]}

    def loss_fn(p, x):
        h = scan(lambda h, z: jnp.sin(h * z), x.astype(z.dtype), p["z"])
        return jnp.mean(jnp.abs(h * p["v"].astype(h.dtype)) ** 2)

    expected = fast_jit(jax.grad(loss_fn))(params, X)
    actual = fast_jit(grad(loss_fn, num_microbatches=2))(params, X)
    assert_close(actual, expected, 5e-6)  # as for the models above


# -- What a loss takes and gives beside


def noisy_loss(params, x, key, state):
    noise = jax.random.normal(key, x.shape)
    h = MODELS["layers_under_remat"](params, x + noise * state["scale"])
    aux = {
        "worst": Max(jnp.max(h)),
        "count": Sum(x.shape[0]),
        "rows": Concat(x[:, 0]),
        "key": Stack(noise[0, 0]),
        "last": Last(state["scale"]),
        "mean": mean(h, where=x > 0),
    }
    loss = mean(h**2, where=x > 0)
    return loss, ({"scale": state["scale"] * 0.5}, aux)


@pytest.mark.slow
def test_keys_state_and_aux():
    """Against a loop in Python, micro-batch by micro-batch."""
    key, state = jax.random.key(1), {"scale": jnp.float32(1.0)}
    options = {"rng_argnums": 2, "carry_argnum": 3, "has_aux": True}
    grad_fn = fast_jit(value_and_grad(noisy_loss, num_microbatches=3, **options))
    (loss, (last, aux)), grads = grad_fn(PARAMS, X, key, state)

    def total(params, x, key, state):
        loss, (state, aux) = noisy_loss(params, x, key, state)
        return loss.total, (loss.weight, state, aux)

    micro_grad = fast_jit(jax.value_and_grad(total, has_aux=True))
    outputs = []
    for i in range(3):
        micro_key = jax.random.fold_in(key, i)
        outputs.append(micro_grad(PARAMS, X[i::3], micro_key, state))
        state = outputs[-1][0][1][1]
    totals, weights = zip(*((out[0][0], out[0][1][0]) for out in outputs), strict=True)
    expected = jax.tree.map(lambda *g: sum(g) / sum(weights), *(o[1] for o in outputs))
    assert_close(grads, expected, 5e-6)  # as for the models above
    np.testing.assert_allclose(loss, sum(totals) / sum(weights), rtol=24 * F32_ULP)
    assert last == state

    auxes = [out[0][1][2] for out in outputs]
    # The same function of the same numbers, in another program.
    close = functools.partial(np.testing.assert_allclose, rtol=24 * F32_ULP)
    close(aux["worst"], max(a["worst"].x for a in auxes))
    close(aux["key"], [a["key"].x for a in auxes])
    means = [a["mean"] for a in auxes]
    weighed = sum(m.total for m in means) / sum(m.weight for m in means)
    close(aux["mean"], weighed, atol=24 * F32_ULP)
    assert aux["count"] == 6 and aux["last"] == 0.25
    np.testing.assert_array_equal(aux["rows"], X[:, 0])


# -- Where it is called


@pytest.mark.slow
def test_outside_of_jit():
    loss_fn = loss_of(MODELS["layers_under_remat"])
    actual = value_and_grad(loss_fn, num_microbatches=2)(PARAMS, X)
    # As for the models above.
    assert_close(actual, expected_of_models()["layers_under_remat"], 5e-6)


@pytest.mark.parametrize(
    "params", [{}, None, {"a": {}, "b": jnp.zeros((0, 3))}], ids=str
)
def test_nothing_to_train(params):
    actual = value_and_grad(lambda p, x: jnp.mean(x), num_microbatches=2)(params, X)
    np.testing.assert_allclose(actual[0], np.mean(X), atol=24 * F32_ULP)
    assert types(actual[1]) == types(params)


def test_several_arguments():
    def loss_fn(v, x, c):
        return jnp.mean(scan(lambda h, s: jnp.sin(h * s), x * v, c["s"]))

    args = PARAMS["v"], X, {"s": PARAMS["scales"]}
    expected = fast_jit(jax.grad(loss_fn, argnums=(0, 2)))(*args)
    actual = fast_jit(grad(loss_fn, num_microbatches=3, argnums=(0, 2)))(*args)
    assert_close(actual, expected, 5e-6)  # as for the models above


@pytest.mark.slow
def test_differentiated_again():
    """A gradient penalty."""
    loss_fn = loss_of(MODELS["layers_under_remat"])

    def penalty(grad_fn):
        return lambda p: optax.tree.norm(grad_fn(p, X), squared=True)

    ours = fast_jit(jax.grad(penalty(grad(loss_fn, num_microbatches=2))))
    theirs = fast_jit(jax.grad(penalty(jax.grad(loss_fn))))
    assert_close(ours(PARAMS), theirs(PARAMS), 1e-5)  # twice as many roundings


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_a_mesh(kind):
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    x = jnp.concatenate([X, X + 1])
    loss_fn = loss_of(MODELS["layers_under_remat"])
    expected = fast_jit(jax.grad(loss_fn))(PARAMS, x)
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        rows = jax.device_put(x, NamedSharding(mesh, P("data")))
        actual = fast_jit(grad(loss_fn, num_microbatches=3))(params, rows)
    assert_close(actual, expected, 5e-6)  # as for the models above


def masked_layers(p, batch):
    h = MODELS["layers_under_remat"](p, batch["x"])
    return mean(h**2, where=batch["mask"])


@pytest.mark.slow
@pytest.mark.parametrize("alike", [True, False])
def test_inside_shard_map(alike):
    """Parameters alike on all devices, whose gradient JAX sums, or each one's own.

    One device has nothing that counts in the first micro-batch, one nothing at all.
    """
    mesh, devices = auto_mesh((4,), ("data",)), 4
    x = normal(8, 4 * devices, 4)
    mask = jnp.arange(16)[:, None] % 7 < jnp.array([[4, 2, 1, 3]])
    mask = mask.at[:4].set(False).at[4:8:2].set(False)
    batch = {"x": x, "mask": mask}

    def of_all_devices(p, batch):
        loss = masked_layers(p, batch)
        return Mean(*jax.lax.psum((loss.total, loss.weight), "data"))

    @fast_jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def run(p, batch):
        if alike:
            return grad(of_all_devices, num_microbatches=2)(p, batch)
        own = jax.lax.pcast(p, "data", to="varying")
        return jax.lax.pmean(
            grad(masked_layers, num_microbatches=2)(own, batch), "data"
        )

    whole = fast_jit(jax.grad(unsplit(masked_layers)))
    if alike:
        expected = whole(PARAMS, batch)
    else:
        parts = [
            jax.tree.map(lambda a, i=i: a[4 * i : 4 * i + 4], batch) for i in range(4)
        ]
        grads = [whole(PARAMS, part) for part in parts]
        expected = jax.tree.map(lambda *g: sum(g) / devices, *grads)
    assert_close(run(PARAMS, batch), expected, 5e-6)  # as for the models above


# -- Whole steps


def train_by_hand(loss_fn, optimizer, calls):
    """The plain loop over large batches, with no library of ours."""
    params, opt_state = PARAMS, optimizer.init(PARAMS)

    @jax.jit
    def step(params, opt_state, x):
        grads = jax.grad(loss_fn)(params, x)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for x in calls:
        params, opt_state = step(params, opt_state, x)
    return params


@pytest.mark.slow
def test_five_train_steps():
    """Also: the second call compiles nothing, and the state takes its own memory."""
    loss_fn = loss_of(MODELS["nested_scans"])
    optimizer = optax.adamw(1e-2)
    train_step = optax_accum.make_train_step(
        loss_fn, optimizer, num_microbatches=3, in_place=True
    )
    state = optax_accum.init_train_state(jax.tree.map(jnp.copy, PARAMS), optimizer)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    memory = train_step.lower(state, X).compile().memory_analysis()
    assert memory.alias_size_in_bytes == size
    calls = [X + i for i in range(5)]
    for x in calls:
        state, _ = train_step(state, x)
    assert train_step._cache_size() == 1
    expected = train_by_hand(loss_fn, optimizer, calls)
    # Adam divides by the root of the second moment, so that each step is 0.01 at most,
    # and as exact as an entry of the gradient is: 1e-4 where it is small among others.
    atol = 5 * 1e-2 * 1e-4
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=0, atol=atol),
        state.params,
        expected,
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_windows(num_microbatches):
    """Of which the last micro-batch has fewer rows."""
    loss_fn = loss_of(MODELS["layers_under_remat"])
    add, apply = optax_accum.make_window_steps(
        loss_fn, optax.sgd(1.0), num_microbatches=num_microbatches, in_place=True
    )
    state = optax_accum.init_train_state(jax.tree.map(jnp.copy, PARAMS), optax.sgd(1.0))
    x, window = jnp.concatenate([X, X + 1])[:10], None
    for part in (x[:4], x[4:8], x[8:]):
        window = add(state, part, window)
    # The first of a window, one of the same rows, and one of fewer.
    assert add._cache_size() == 3
    state, metrics = apply(state, window)
    assert metrics["weight"] == 10
    expected = fast_jit(jax.grad(loss_fn))(PARAMS, x)
    # As for the models above, and a subtraction from parameters that are 4 at the most.
    moved = jax.tree.map(operator.sub, PARAMS, state.params)
    for m, e in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        atol = 5e-6 * np.max(np.abs(e), initial=0) + 4 * F32_ULP
        np.testing.assert_allclose(m, e, rtol=0, atol=atol)


# -- What does not count


def test_padding_adds_nothing_and_costs_no_backward_pass():
    """Its gradient would be NaN: it is centred by its tokens, of which it has none."""
    passes = []

    @jax.custom_vjp
    def noted(w):
        return w

    def backward(_, g):
        jax.debug.callback(lambda: passes.append(1))
        return (g,)

    noted.defvjp(lambda w: (w, None), backward)

    def loss_fn(w, batch):
        values = noted(w) * batch["x"]
        kept = batch["mask"].astype(jnp.float32)
        centre = jnp.sum(values * kept) / jnp.sum(kept)
        return mean((values - centre) ** 2, where=batch["mask"])

    x, padding = jnp.arange(1.0, 7.0), jnp.arange(6) % 3 == 1
    batch = {"x": x, "mask": ~padding}
    actual = jax.jit(grad(loss_fn, num_microbatches=3))(1.0, batch)
    jax.effects_barrier()
    # Of the others, rows 1 and 4, and 3 and 6: each is 1.5 from its centre.
    np.testing.assert_allclose(actual, 2 * 1.5**2, rtol=24 * F32_ULP)
    assert len(passes) == 2


# -- Memory


def plain_layers(width, layers):
    """Layers in a scan under remat, written in JAX alone."""
    params = {
        "embedding": normal(0, 11, width, scale=0.1),
        "up": normal(1, layers, width, 2 * width, scale=0.1),
        "down": normal(2, layers, 2 * width, width, scale=0.1),
    }

    def logits_fn(p, tokens):
        @jax.checkpoint
        def layer(h, q):
            return h + jnp.tanh(h @ q["up"]) @ q["down"]

        h = p["embedding"][tokens]
        return scan(layer, h, {k: p[k] for k in ("up", "down")}) @ p["embedding"].T

    return logits_fn, params


class Block(nn.Module):
    """Attention of one head, and a perceptron."""

    @nn.compact
    def __call__(self, hidden):
        width = hidden.shape[-1]
        q, k, v = jnp.split(nn.Dense(3 * width)(nn.RMSNorm()(hidden)), 3, axis=-1)
        hidden += nn.Dense(width)(jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v)
        return hidden + nn.Dense(width)(nn.gelu(nn.Dense(2 * width)(hidden))), None


class Transformer(nn.Module):
    """Tied embeddings; layers in a scan, each computed again on the way back."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, self.width)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        return embed.attend(layers()(embed(tokens))[0])


def flax_layers(width, layers):
    transformer = Transformer(width, layers)
    tokens = jnp.zeros((1, 2), jnp.int32)
    shapes = jax.eval_shape(transformer.init, jax.random.key(0), tokens)
    fill = lambda leaf: normal(leaf.size, *leaf.shape, scale=0.1)  # noqa: E731
    return transformer.apply, jax.tree.map(fill, shapes)


def language_rows(rows, length=6):
    rng = np.random.default_rng(0)
    return {
        "tokens": jnp.asarray(rng.integers(0, 11, (rows, length + 1)), jnp.int32),
        "mask": jnp.asarray(np.arange(length) < rng.integers(0, length, (rows, 1))),
    }


def language_loss(logits_fn, kind):
    def loss_fn(params, batch):
        logits = logits_fn(params, batch["tokens"][:, :-1])
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            logits, batch["tokens"][:, 1:]
        )
        if kind == "masked":
            return mean(losses, where=batch["mask"])
        return Sum(jnp.sum(losses))

    return loss_fn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "kind"), [(flax_layers, "sum"), (plain_layers, "masked")]
)
def test_no_gradient_stands_beside_the_sum(layers, kind):
    """As the compiler counts: temporaries in P, the bytes of the parameters.

    In place there are those of one micro-batch, whatever their number; by value, which
    is the twin, a gradient more.
    """
    logits_fn, params = layers(width=64, layers=8)
    loss_fn = language_loss(logits_fn, kind)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    batch = language_rows(16)

    def compiled(fun, batch):
        return jax.jit(fun).lower(params, batch).compile()

    def temporaries(program):
        return program.memory_analysis().temp_size_in_bytes / size

    def split(value_and_grad, count):
        return value_and_grad(loss_fn, num_microbatches=count)

    in_place = compiled(split(value_and_grad, 8), batch)
    one = compiled(jax.value_and_grad(unsplit(loss_fn)), language_rows(2))
    # The gradient of one layer of eight stands there while it is added. A mean is
    # divided after the loop, in the memory of the sums.
    assert temporaries(in_place) <= temporaries(one) + 0.15
    if kind == "masked":
        by_value = compiled(split(optax_accum.value_and_grad, 8), batch)
        assert temporaries(by_value) > 1
        many = language_rows(128)
        growth = temporaries(compiled(split(value_and_grad, 64), many)) - temporaries(
            in_place
        )
        # Nothing but the rows themselves, stacked.
        assert growth <= 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(many)) / size

    # By hand: what the program for one micro-batch makes of each, put together.
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i::8], batch) for i in range(8)]
    weights = [float(jnp.sum(part["mask"])) for part in parts]
    if kind == "masked":
        weights = [weight / sum(weights) for weight in weights]
    else:
        weights = [1.0] * 8
    grads = [one(params, part)[1] for part in parts]

    def average(*leaves):
        return sum(np.float64(g) * w for g, w in zip(leaves, weights, strict=True))

    expected = jax.tree.map(average, *grads)
    largest = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(expected))
    # Relative to all leaves, for a bias of keys has a gradient of mere rounding. Sums
    # of some hundred products, each of them rounded.
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * largest),
        in_place(params, batch)[1],
        expected,
    )


# -- Errors


def test_it_comes_without_compensation():
    with pytest.raises(
        ValueError, match="must come without `compensated`, got both; a"
    ):
        grad(jnp.mean, accumulator_dtype=jnp.bfloat16, compensated=True)


def test_sums_must_hold_what_is_trained():
    grad_fn = grad(
        lambda p, x: jnp.mean(x) * p["b"] * p["a"].astype(jnp.float32),
        num_microbatches=2,
        accumulator_dtype=jnp.bfloat16,
    )
    expected = (
        r"`value_and_grad\(in_place=True\)` must have sums that can hold what is "
        r"trained, got an `accumulator_dtype` of bfloat16 for p\['b'\] "
        r"\(float32\[\]\); leave it at its default, or sum by value\."
    )
    with pytest.raises(ValueError, match=expected):
        grad_fn({"a": jnp.bfloat16(1), "b": jnp.float32(1)}, X)


def test_sums_of_16_bits_for_parameters_of_16():
    """Exact: small integers."""
    params = {"a": jnp.ones(4, jnp.bfloat16)}
    x = jnp.arange(8.0, dtype=jnp.bfloat16).reshape(2, 4)
    grad_fn = grad(
        lambda p, x: jnp.mean(x @ p["a"]),
        num_microbatches=2,
        accumulator_dtype=jnp.bfloat16,
    )
    assert_bits_equal(grad_fn(params, x), {"a": jnp.arange(2, 6, dtype=jnp.bfloat16)})


@pytest.mark.slow
@IS_TRAP
@pytest.mark.parametrize(
    ("name", "version", "cure"),
    [
        ("_OLDEST", (99, 0), "upgrade it"),
        ("_CHANGED", (0, 10), "it goes wrong with " + ", ".join(_ref_traps._TRAPS)),
    ],
)
def test_a_jax_that_goes_wrong(monkeypatch, name, version, cure):
    """One too old; a newer one, on which everything is tried and found wrong."""
    monkeypatch.setattr(_ref_traps, name, version)
    expected = (
        "`value_and_grad(in_place=True)` must run on a JAX that adds gradients to refs "
        "rightly, which 0.10.2 does with our help, got "
        f"{jax.__version__}; {cure}, or leave `in_place` out."
    )
    grad_fn = grad(three_leaves, num_microbatches=2)
    with pytest.raises(ValueError, match=re.escape(expected)):
        jax.jit(grad_fn)(THREE, X)


NAMED = (
    r"`in_place=True` must be given a loss whose gradient JAX can add to a ref, got "
    r"one that cannot be for p\['b'\], float32\[1,4\]: .* Leave `in_place` out\."
)


def three_leaves(p, x):
    return jnp.mean(x[:, :2] * p["a"] + p["b"][:, :2] * p["c"][:, 2:])


THREE = {"a": jnp.float32(1.0), "b": PARAMS["v"], "c": PARAMS["c"]}


@IS_TRAP
def test_a_leaf_that_cannot_be_a_ref_is_named(without_help):
    """A slice has no gradient there."""
    with pytest.raises(TypeError, match=NAMED):
        grad(three_leaves, num_microbatches=2)(THREE, X)


def test_an_error_of_the_model_itself_is_left_alone():
    """It has nothing to do with refs, and no leaf is to blame."""

    @jax.custom_vjp
    def broken(v):
        return v

    def backward(_, g):
        raise TypeError("no gradient here")

    broken.defvjp(lambda v: (v, None), backward)

    def loss_fn(p, x):
        return jnp.mean(x * broken(p["b"])) * p["a"]

    with pytest.raises(TypeError, match=r"^no gradient here"):
        grad(loss_fn, num_microbatches=2)(THREE, X)


@pytest.mark.slow
def test_the_trial_of_a_newer_jax_tells_right_from_wrong(monkeypatch):
    """Within a trace, where it is made: refs can seem wrong there that are not."""
    right = {"nothing": lambda p: jnp.sum(jnp.sin(p["a"]) * p["b"])}
    monkeypatch.setattr(_ref_traps, "_TRAPS", _ref_traps._TRAPS | right)
    found = []

    def traced(x):
        found.extend(_ref_traps.find_traps())
        return x

    _ref_traps.find_traps.cache_clear()
    jax.eval_shape(traced, 1.0)
    _ref_traps.find_traps.cache_clear()
    assert "nothing" not in found
    if jax.__version_info__ < (0, 11):
        assert found == [name for name in _ref_traps._TRAPS if name != "nothing"]
