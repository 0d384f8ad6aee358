"""What makes no sense is refused: by name, with what it got, and with the cure.

Each failing case stands beside a passing one, so that the check cannot refuse it all.
"""

import re

import errors_of_losses
import errors_of_plans
import errors_of_windows
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from optax_accum import (
    accumulate,
    grad,
    init_train_state,
    make_train_step,
    value_and_grad,
)

X = jnp.arange(6.0)


def loss_fn(w, x):
    return jnp.mean(w * x)


def update(tx, grads=1.0, state=None, **extra):
    state = tx.init(jnp.zeros(())) if state is None else state
    return tx.update(jnp.asarray(grads), state, **extra)


SGD = optax.sgd(1.0)
PAIR = {"x": X, "y": X}

# name: (error, parts of the message, what fails, what passes)
CASES = {
    # The factory of door 1.
    "every_k is 0": (
        ValueError,
        ["every_k", "integer >= 1", "got 0"],
        lambda: accumulate(SGD, 0),
        lambda: accumulate(SGD, 1),
    ),
    "every_k is negative": (
        ValueError,
        ["every_k", "integer >= 1", "got -1"],
        lambda: accumulate(SGD, every_k=-1),
        lambda: accumulate(SGD, every_k=1),
    ),
    "every_k is a float": (
        TypeError,
        ["every_k", "integer >= 1", "got 2.5"],
        lambda: accumulate(SGD, 2.5),
        lambda: accumulate(SGD, np.int64(2)),
    ),
    "every_k is a bool": (
        TypeError,
        ["every_k", "integer >= 1", "got True"],
        lambda: accumulate(SGD, True),
        lambda: accumulate(SGD, 1),
    ),
    "every_k is missing": (
        TypeError,
        ["every_k", "integer >= 1", "got None"],
        lambda: accumulate(SGD),
        lambda: accumulate(SGD, 4),
    ),
    "only a number": (
        TypeError,
        [
            "first, got 4",
            r"accumulate\(optax.adam\(1e-3\), every_k=4\)",
            "moments",
        ],
        lambda: accumulate(4),
        lambda: accumulate(optax.identity(), every_k=4),
    ),
    "the number first": (
        TypeError,
        ["first, got 4", r"optax.identity\(\), every_k=4"],
        lambda: accumulate(4, optax.adam(1e-3)),
        lambda: accumulate(optax.adam(1e-3), 4),
    ),
    "an optimizer that accumulates already": (
        TypeError,
        ["optimizer itself", "optax.MultiSteps", "unwrap"],
        lambda: accumulate(optax.MultiSteps(SGD, 2), 2),
        lambda: accumulate(SGD, 2),
    ),
    "two optimizers": (
        TypeError,
        ["every_k", "gradient transformation", "comes first"],
        lambda: accumulate(SGD, SGD),
        lambda: accumulate(SGD, 2),
    ),
    "unknown reduction": (
        ValueError,
        ["reduction", "mean, sum", "got 'max'"],
        lambda: accumulate(SGD, 2, reduction="max"),
        lambda: accumulate(SGD, 2, reduction="sum"),
    ),
    "unknown on_skip": (
        ValueError,
        ["on_skip", "microbatch, window, ignore", "got 'step'"],
        lambda: accumulate(SGD, 2, on_skip="step"),
        lambda: accumulate(SGD, 2, on_skip="window"),
    ),
    "integer accumulator": (
        TypeError,
        ["accumulator_dtype", "floating", "got int32"],
        lambda: accumulate(SGD, 2, accumulator_dtype=jnp.int32),
        lambda: accumulate(SGD, 2, accumulator_dtype=jnp.bfloat16),
    ),
    "norm bound of zero": (
        ValueError,
        ["max_norm", "positive", "got 0.0"],
        lambda: optax_accum.skip_norm_above(0.0),
        lambda: optax_accum.skip_norm_above(0.1),
    ),
    "norm bound of text": (
        TypeError,
        ["max_norm", "a real number", "got str"],
        lambda: optax_accum.skip_norm_above("1"),
        lambda: optax_accum.skip_norm_above(1),
    ),
    "skip_fn is a number": (
        TypeError,
        ["skip_fn", "a function", "got 3"],
        lambda: accumulate(SGD, 2, skip_fn=3),
        lambda: accumulate(SGD, 2, skip_fn=lambda grads, params: False),
    ),
    "every_k is an array of a float": (
        TypeError,
        ["every_k", "integer >= 1", "got Array"],
        lambda: accumulate(SGD, jnp.array(2.5)),
        lambda: accumulate(SGD, jnp.array(2)),
    ),
    "accumulator_dtype is no dtype": (
        TypeError,
        ["accumulator_dtype", "floating", "got 'garbage'"],
        lambda: accumulate(SGD, 2, accumulator_dtype="garbage"),
        lambda: accumulate(SGD, 2, accumulator_dtype="float16"),
    ),
    "accumulator_dtype is not enabled": (
        ValueError,
        ["accumulator_dtype", "got float64", "jax_enable_x64"],
        lambda: accumulate(SGD, 2, accumulator_dtype="float64"),
        lambda: accumulate(SGD, 2, accumulator_dtype="float32"),
    ),
    # The update of door 1.
    "negative weight": (
        ValueError,
        ["weight", ">= 0", "got -1"],
        lambda: update(accumulate(SGD, 2), weight=-1),
        lambda: update(accumulate(SGD, 2), weight=0),
    ),
    "weight is NaN": (
        ValueError,
        ["weight", ">= 0", "got nan"],
        lambda: update(accumulate(SGD, 2), weight=np.nan),
        lambda: update(accumulate(SGD, 2), weight=0.5),
    ),
    "weight of an array is negative": (
        ValueError,
        ["weight", ">= 0 and finite", "got -1.0"],
        lambda: update(accumulate(SGD, 2), weight=jnp.array(-1.0)),
        lambda: update(accumulate(SGD, 2), weight=jnp.array(0.0)),
    ),
    "weight is infinite": (
        ValueError,
        ["weight", ">= 0 and finite", "got inf"],
        lambda: update(accumulate(SGD, 2), weight=np.inf),
        lambda: update(accumulate(SGD, 2), weight=1e30),
    ),
    "weight is None": (
        TypeError,
        ["weight", "a real number", "got None"],
        lambda: update(accumulate(SGD, 2), weight=None),
        lambda: update(accumulate(SGD, 2), weight=True),
    ),
    "value is text": (
        TypeError,
        ["value", "a real number", "got str"],
        lambda: update(accumulate(SGD, 2), value="1"),
        lambda: update(accumulate(SGD, 2), value=None),
    ),
    "weight for each row": (
        TypeError,
        ["weight", "real number, a scalar", r"float32\[6\]"],
        lambda: update(accumulate(SGD, 2), weight=X),
        lambda: update(accumulate(SGD, 2), weight=jnp.sum(X)),
    ),
    "value for each row": (
        TypeError,
        ["value", "real number, a scalar", r"float32\[6\]"],
        lambda: update(accumulate(SGD, 2), value=X),
        lambda: update(accumulate(SGD, 2), value=1),
    ),
    "emit is a number": (
        TypeError,
        ["emit", "a bool, a scalar", "int32"],
        lambda: update(accumulate(SGD, 2), emit=1),
        lambda: update(accumulate(SGD, 2), emit=np.bool_(True)),
    ),
    "skip_fn for each row": (
        TypeError,
        ["skip_fn", "a bool, a scalar", r"bool\[6\]"],
        lambda: update(accumulate(SGD, 2, skip_fn=lambda g, p: X > g)),
        lambda: update(accumulate(SGD, 2, skip_fn=lambda g, p: g > 0)),
    ),
    "float schedule": (
        TypeError,
        ["every_k=schedule", "integer", "float32", "rint"],
        lambda: update(accumulate(SGD, optax.constant_schedule(2.0))),
        lambda: update(accumulate(SGD, optax.constant_schedule(2))),
    ),
    "gradients of other shapes": (
        ValueError,
        ["updates", r"float32\[\]", r"got float32\[6\]", "init"],
        lambda: update(accumulate(SGD, 2), X),
        lambda: update(accumulate(SGD, 2), 1.0),
    ),
    "gradients of another structure": (
        ValueError,
        ["updates", "structure that `init` saw", r"got PyTreeDef\(\{'a'", "init"],
        lambda: accumulate(SGD, 2).update(
            {"a": X}, accumulate(SGD, 2).init({"b": X}), None
        ),
        lambda: accumulate(SGD, 2).update(
            {"a": X}, accumulate(SGD, 2).init({"a": X}), None
        ),
    ),
    "state of another transformation": (
        TypeError,
        ["AccumulateState", "got tuple", "init"],
        lambda: update(accumulate(SGD, 2), state=SGD.init(X)),
        lambda: update(accumulate(SGD, 2), state=accumulate(SGD, 3).init(0.0)),
    ),
    "state with an accumulator for every_k=1": (
        ValueError,
        ["every_k=1", "filled `acc_grads`", "schedule"],
        lambda: update(accumulate(SGD, 1), state=accumulate(SGD, 2).init(0.0)),
        lambda: update(
            accumulate(SGD, lambda _: 1), state=accumulate(SGD, 2).init(0.0)
        ),
    ),
    "state without accumulator for every_k=2": (
        ValueError,
        ["every_k=1", "empty `acc_grads`", "schedule"],
        lambda: update(accumulate(SGD, 2), state=accumulate(SGD, 1).init(0.0)),
        lambda: update(accumulate(SGD, 1), state=accumulate(SGD, 1).init(0.0)),
    ),
    "has_emitted of a bare state": (
        ValueError,
        ["AccumulateState", "got", "optax_accum.accumulate"],
        lambda: optax_accum.has_emitted(optax.adam(1.0).init(X)),
        lambda: optax_accum.has_emitted(accumulate(SGD, 2).init(X)),
    ),
    # The split.
    "rows that N does not divide": (
        ValueError,
        ["num_microbatches", "got 4 for 6 rows", r"\[1, 2, 3, 6\]", "microbatch_size"],
        lambda: grad(loss_fn, num_microbatches=4)(1.0, X),
        lambda: grad(loss_fn, num_microbatches=3)(1.0, X),
    ),
    "both ways to split": (
        ValueError,
        ["num_microbatches", "microbatch_size", "both, 2 and 3"],
        lambda: grad(loss_fn, num_microbatches=2, microbatch_size=3),
        lambda: grad(loss_fn, num_microbatches=2, microbatch_size=None),
    ),
    "no microbatches": (
        ValueError,
        ["num_microbatches", "integer >= 1", "got 0"],
        lambda: grad(loss_fn, num_microbatches=0),
        lambda: grad(loss_fn, num_microbatches=np.int32(2)),
    ),
    "microbatches of no rows": (
        ValueError,
        ["microbatch_size", "integer >= 1", "got 0"],
        lambda: grad(loss_fn, microbatch_size=0),
        lambda: grad(loss_fn, microbatch_size=1),
    ),
    "unequal rows": (
        ValueError,
        [r"b\['x'\]: 6", r"b\['y'\]: 5", "argument of its own"],
        lambda: grad(lambda w, b: w)(1.0, PAIR | {"y": X[:5]}),
        lambda: grad(lambda w, b: w)(1.0, PAIR),
    ),
    "no rows": (
        ValueError,
        ["with rows", "got 0 in x"],
        lambda: grad(loss_fn)(1.0, X[:0]),
        lambda: grad(loss_fn)(1.0, X[:1]),
    ),
    "nothing to split": (
        ValueError,
        ["grad", "array to split", "got none in x"],
        lambda: grad(loss_fn)(1.0, 2.0),
        lambda: grad(loss_fn)(1.0, X),
    ),
    "batch_axis out of range": (
        ValueError,
        ["batch_axis", "got 1", r"x of shape \(6,\)"],
        lambda: grad(loss_fn, batch_axis=1)(1.0, X),
        lambda: grad(loss_fn, batch_axis=-1)(1.0, X),
    ),
    "batch_axis is a float": (
        TypeError,
        ["batch_axis", "integer", "got 0.0"],
        lambda: grad(loss_fn, batch_axis=0.0),
        lambda: grad(loss_fn, batch_axis=0),
    ),
    # The arguments.
    "a split argument differentiated": (
        ValueError,
        ["`x`", "as differentiated and as split"],
        lambda: grad(loss_fn, argnums=1),
        lambda: grad(loss_fn, argnums=0),
    ),
    "a split argument differentiated by another name": (
        ValueError,
        ["`x`", "as differentiated and as split"],
        lambda: grad(loss_fn, argnames="x", batch_argnums=1),
        lambda: grad(loss_fn, argnames="w", batch_argnums=1),
    ),
    "a split argument differentiated from behind": (
        ValueError,
        ["`x`", "as differentiated and as split"],
        lambda: grad(loss_fn, argnums=-1)(1.0, X),
        lambda: grad(loss_fn, argnums=-2)(1.0, X),
    ),
    "a differentiated argument left out": (
        ValueError,
        ["argument `v`", "2 positional arguments"],
        lambda: grad(lambda w, x, v=1.0: jnp.mean(w * x * v), argnums=2)(1.0, X),
        lambda: grad(lambda w, x, v=1.0: jnp.mean(w * x * v), argnums=2)(1.0, X, 2.0),
    ),
    "an argument named twice": (
        ValueError,
        ["`w`", "one role, once"],
        lambda: grad(loss_fn, argnums=(0, 0)),
        lambda: grad(loss_fn, argnums=(0,)),
    ),
    "an argument that the call lacks": (
        ValueError,
        ["argument `y`", r"keywords \[\]", "argnames"],
        lambda: grad(loss_fn, batch_argnames="y")(1.0, X),
        lambda: grad(loss_fn, batch_argnames="x")(1.0, X),
    ),
    "argnames is a number": (
        TypeError,
        ["batch_argnames", "string", "got 1", "batch_argnums"],
        lambda: grad(loss_fn, batch_argnames=1),
        lambda: grad(loss_fn, batch_argnames=["x"]),
    ),
    "no key to fold": (
        TypeError,
        ["rng_argnums", "random keys", r"got int32\[\]", r"jax.random.key\(0\)"],
        lambda: grad(lambda w, x, k: jnp.mean(w * x), rng_argnums=2)(1.0, X, 0),
        lambda: grad(lambda w, x, k: jnp.mean(w * x), rng_argnums=2)(
            1.0, X, jax.random.key(0)
        ),
    ),
    "no unroll": (
        ValueError,
        ["unroll", "integer >= 1", "got 0"],
        lambda: grad(loss_fn, unroll=0),
        lambda: grad(loss_fn, unroll=True),
    ),
    "argnums is a float": (
        TypeError,
        ["argnums", "integer", "got 0.5"],
        lambda: grad(loss_fn, argnums=0.5),
        lambda: grad(loss_fn, argnums=np.int64(0)),
    ),
    "no function": (
        TypeError,
        ["first argument of value_and_grad", "a function", "got 3"],
        lambda: grad(3),
        lambda: grad(loss_fn),
    ),
    "integer parameters": (
        TypeError,
        ["floating or complex", r"p\['n'\] \(int32\[\]\)", "its own"],
        lambda: grad(lambda p, x: p["w"] * jnp.mean(x))({"w": 1.0, "n": 3}, X),
        lambda: grad(lambda p, x: p["w"] * jnp.mean(x))({"w": 1.0, "n": 3.0}, X),
    ),
    # What the function returns.
    "a loss for each row": (
        TypeError,
        ["real floating scalar", r"float32\[6\]", "jnp.mean"],
        lambda: grad(lambda w, x: w * x)(1.0, X),
        lambda: grad(lambda w, x: jnp.mean(w * x))(1.0, X),
    ),
    "an integer loss": (
        TypeError,
        ["real floating scalar", r"int32\[\]"],
        lambda: grad(lambda w, x: jnp.argmax(w * x))(1.0, X),
        lambda: grad(lambda w, x: jnp.max(w * x))(1.0, X),
    ),
    "a complex loss": (
        TypeError,
        ["real floating scalar", r"complex64\[\]"],
        lambda: grad(lambda w, x: jax.lax.complex(jnp.mean(w * x), 0.0))(1.0, X),
        lambda: grad(lambda w, x: jnp.mean(w * x))(1.0, X),
    ),
    "has_aux forgotten": (
        TypeError,
        ["real floating scalar", "has_aux=True"],
        lambda: grad(lambda w, x: (w * jnp.mean(x), {}))(1.0, X),
        lambda: grad(lambda w, x: (w * jnp.mean(x), {}), has_aux=True)(1.0, X),
    ),
    "has_aux superfluous": (
        TypeError,
        [r"returns \(loss, aux\)", r"got float32\[\]", "has_aux=True"],
        lambda: grad(loss_fn, has_aux=True)(1.0, X),
        lambda: grad(loss_fn)(1.0, X),
    ),
    "an aux for each row": (
        TypeError,
        ["floating scalars in aux", r"aux\['x'\] \(float32\[6\]\)", "averaged"],
        lambda: grad(lambda w, x: (w, {"x": x}), has_aux=True)(1.0, X),
        lambda: grad(lambda w, x: (w, {"x": x[0]}), has_aux=True)(1.0, X),
    ),
    "an integer aux": (
        TypeError,
        ["floating scalars in aux", r"aux\['n'\] \(int32\[\]\)"],
        lambda: grad(lambda w, x: (w, {"n": x.size}), has_aux=True)(1.0, X),
        lambda: grad(lambda w, x: (w, {"n": 6.0}), has_aux=True)(1.0, X),
    ),
    "a carried state forgotten": (
        TypeError,
        [r"returns \(loss, state\)", r"got float32\[\]"],
        lambda: grad(lambda w, x, s: w, carry_argnum=2)(1.0, X, 0.0),
        lambda: grad(lambda w, x, s: (w, s), carry_argnum=2)(1.0, X, 0.0),
    ),
    "a carried state of another type": (
        TypeError,
        ["carried state", r"float32\[\] at s\['n'\], where int32\[\] is"],
        lambda: grad(lambda w, x, s: (w, {"n": 0.5}), carry_argnum=2)(1.0, X, {"n": 0}),
        lambda: grad(lambda w, x, s: (w, {"n": 5}), carry_argnum=2)(1.0, X, {"n": 0}),
    ),
    # The train step.
    "no optimizer": (
        TypeError,
        ["make_train_step", "gradient transformation", "got 0.1"],
        lambda: make_train_step(loss_fn, 0.1),
        lambda: make_train_step(loss_fn, optax.sgd(0.1)),
    ),
    "no rows in the train step": (
        ValueError,
        ["make_train_step", "array to split", "got none in batch"],
        lambda: make_train_step(loss_fn, SGD)(
            optax_accum.init_train_state(1.0, SGD), [1.0, 2.0]
        ),
        lambda: make_train_step(lambda w, b: loss_fn(w, b[0]), SGD)(
            optax_accum.init_train_state(1.0, SGD), [X, 2.0]
        ),
    ),
    "the optimizer first": (
        TypeError,
        ["optimizer", r"make_train_step\(loss_fn, optimizer\)", "got <function"],
        lambda: make_train_step(SGD, loss_fn),
        lambda: make_train_step(loss_fn, SGD),
    ),
    "integer parameters to train": (
        TypeError,
        ["init_train_state", r"params\['n'\] \(int32\[\]\)"],
        lambda: optax_accum.init_train_state({"n": 1}, SGD),
        lambda: optax_accum.init_train_state({"n": 1.0}, SGD),
    ),
    "a seed for a key": (
        TypeError,
        ["key", r"got int32\[\]", r"jax.random.key\(0\)"],
        lambda: optax_accum.init_train_state(1.0, SGD, key=0),
        lambda: optax_accum.init_train_state(1.0, SGD, key=jax.random.key(0)),
    ),
    "several keys": (
        TypeError,
        ["key", r"got key<fry>\[3\]"],
        lambda: optax_accum.init_train_state(
            1.0, SGD, key=jax.random.split(jax.random.key(0), 3)
        ),
        lambda: optax_accum.init_train_state(1.0, SGD, key=jax.random.PRNGKey(0)),
    ),
    "emit without a window": (
        ValueError,
        ["emit", "steps at every call", "optax_accum.accumulate"],
        lambda: make_train_step(loss_fn, SGD)(
            optax_accum.init_train_state(1.0, SGD), X, emit=True
        ),
        lambda: make_train_step(loss_fn, accumulate(SGD, 2))(
            optax_accum.init_train_state(1.0, accumulate(SGD, 2)), X, emit=True
        ),
    ),
    "a state without leaves of another optimizer": (
        ValueError,
        ["optimizer made", "PyTreeDef", "init_train_state"],
        lambda: make_train_step(loss_fn, optax.chain(SGD, SGD))(
            optax_accum.init_train_state(1.0, SGD), X
        ),
        lambda: make_train_step(loss_fn, optax.chain(SGD, SGD))(
            optax_accum.init_train_state(1.0, optax.chain(SGD, SGD)), X
        ),
    ),
    "a state of another optimizer": (
        ValueError,
        ["optimizer made", r"nothing at \[0\].count, where int32\[\]", "init_train_st"],
        lambda: make_train_step(loss_fn, optax.adam(0.1))(
            optax_accum.init_train_state(1.0, SGD), X
        ),
        lambda: make_train_step(loss_fn, optax.adam(0.1))(
            optax_accum.init_train_state(1.0, optax.adam(0.2)), X
        ),
    ),
    "parameters for a state": (
        TypeError,
        ["TrainState", "got dict", "init_train_state"],
        lambda: make_train_step(loss_fn, SGD)({"w": 1.0}, X),
        lambda: make_train_step(loss_fn, SGD)(
            optax_accum.init_train_state(1.0, SGD), X
        ),
    ),
    "rows in the train step": (
        ValueError,
        ["num_microbatches", "got 4 for 6 rows"],
        lambda: make_train_step(loss_fn, SGD, num_microbatches=4)(
            optax_accum.init_train_state(1.0, SGD), X
        ),
        lambda: make_train_step(loss_fn, SGD, num_microbatches=2)(
            optax_accum.init_train_state(1.0, SGD), X
        ),
    ),
}


for others in (errors_of_losses.CASES, errors_of_plans.CASES, errors_of_windows.CASES):
    assert not CASES.keys() & others.keys()
    CASES |= others


@pytest.mark.parametrize("name", CASES)
def test_refused_should_fail(name):
    error, parts, fails, _ = CASES[name]
    for part in parts:
        with pytest.raises(error, match=part):
            fails()


@pytest.mark.parametrize("name", CASES)
def test_its_neighbour_should_pass(name):
    assert CASES[name][3]() is not None


def test_every_wrong_leaf_is_named():
    def loss(params, x):
        return params["w"] * jnp.mean(x)

    with pytest.raises(TypeError, match=r"\['a'\].*\['b'\]"):
        value_and_grad(loss)({"w": 1.0, "a": 1, "b": jnp.array(True)}, X)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_rows_that_were_not_split_are_named_where_that_fails(as_keyword):
    def loss(w, x, y, table):
        return jnp.mean((w * x - y) ** 2) + 0 * jnp.sum(table)

    def run(**options):
        given = ((), {"y": X}) if as_keyword else ((X,), {})
        gradient = grad(loss, **options)
        return gradient(1.0, X, *given[0], **given[1], table=jnp.ones((2, 6)))

    name = "y" if as_keyword else r"args\[2\]"
    with pytest.raises((TypeError, ValueError), match="shape") as error:
        run(num_microbatches=2)
    assert re.fullmatch(
        f"`value_and_grad` has passed {name} whole, .*", error.value.__notes__[0]
    )
    assert run(num_microbatches=1) == run(num_microbatches=2, batch_argnames=("x", "y"))


@pytest.mark.parametrize("as_what", ["params", "model_state"])
def test_arrays_that_a_step_has_consumed_are_told_so(as_what):
    array = jnp.ones(2)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    given = {"params": {"w": jnp.ones(2)}, as_what: {"w": array}}
    with pytest.raises(ValueError, match=rf"init_train_state\({as_what}\).*given away"):
        init_train_state(given.pop("params"), optax.sgd(0.1), **given)
