"""What a loss and aux may not be: cases for `test_errors`."""

import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import (
    Concat,
    Last,
    Max,
    Mean,
    Min,
    Stack,
    Sum,
    accumulate,
    grad,
    init_train_state,
    make_train_step,
    mean,
    value,
    value_and_grad,
)

X = jnp.arange(6.0)
SGD = optax.sgd(1.0)
HALF = {"num_microbatches": 2}


def gradient(loss_fn, **options):
    return grad(loss_fn, **(HALF | options))(1.0, X)


def report(aux_fn, **options):
    def loss_fn(w, x):
        return jnp.mean(w * x), {"m": aux_fn(x)}

    return value(loss_fn, has_aux=True, **(HALF | options))(1.0, X)


def step(loss_fn, optimizer):
    train_step = make_train_step(loss_fn, optimizer, **HALF)
    return train_step(init_train_state(1.0, optimizer), X)


def carried(new):
    def loss_fn(w, x, state):
        return jnp.mean(w * x), new

    old = {"mean": jnp.zeros(3), "count": jnp.int32(0)}
    return value_and_grad(loss_fn, carry_argnum=2, **HALF)(1.0, X, old)


def two_terms(w, x):
    return mean(w * x, where=x > 1) + mean(w * x)


# name: (error, parts of the message, what fails, what passes)
CASES = {
    # The loss.
    "a loss of a pytree": (
        TypeError,
        ["real floating scalar", "`Mean`", r"{'a': 'float32\[\]'}", "has_aux=True"],
        lambda: gradient(lambda w, x: {"a": jnp.mean(w * x)}),
        lambda: gradient(lambda w, x: mean(w * x)),
    ),
    "a loss of two in a tuple": (
        TypeError,
        ["real floating scalar", r"Mean", "has_aux=True"],
        lambda: gradient(lambda w, x: (mean(w * x), mean(x))),
        lambda: gradient(lambda w, x: mean(w * x) + mean(x)),
    ),
    "a loss that is a marker of aux": (
        TypeError,
        ["real floating scalar", "Max"],
        lambda: gradient(lambda w, x: Max(jnp.max(w * x))),
        lambda: gradient(lambda w, x: jnp.max(w * x)),
    ),
    "a mean with a total for each row": (
        TypeError,
        ["real floating scalar", r"float32\[3\]", "optax_accum.mean"],
        lambda: gradient(lambda w, x: Mean(w * x, 3.0)),
        lambda: gradient(lambda w, x: Mean(jnp.sum(w * x), 3)),
    ),
    "a mean with a weight for each row": (
        TypeError,
        ["value_and_grad", "`Mean` whose weight", "weight is a real scalar", "sum it"],
        lambda: gradient(lambda w, x: Mean(jnp.sum(w * x), x)),
        lambda: gradient(lambda w, x: Mean(jnp.sum(w * x), jnp.sum(x))),
    ),
    "a mean among several with a weight for each row": (
        TypeError,
        [r"value_and_grad\(loss_fn\)\.terms\[1\]", r"float32\[3\]"],
        lambda: gradient(lambda w, x: mean(w * x) + Mean(jnp.sum(w * x), x)),
        lambda: gradient(lambda w, x: mean(w * x) + Mean(jnp.sum(w * x), 3)),
    ),
    "a sum of integers": (
        TypeError,
        ["real floating scalar", r"int32\[\]"],
        lambda: gradient(lambda w, x: Sum(jnp.sum(w > x))),
        lambda: gradient(lambda w, x: Sum(jnp.sum(w * x))),
    ),
    "several terms in a window of calls": (
        ValueError,
        ["train_step", "one term", "got 2", "inside the mean"],
        lambda: step(two_terms, accumulate(SGD, 2)),
        lambda: step(two_terms, SGD),
    ),
    # Aux.
    "a plain aux for each row": (
        TypeError,
        [r"aux\['m'\] \(float32\[3\]\)", "`Concat`", "`Stack`"],
        lambda: report(lambda x: x),
        lambda: report(Concat),
    ),
    "a plain aux of an integer": (
        TypeError,
        [r"aux\['m'\] \(int32\[\]\)", "`Sum`", "`Max`"],
        lambda: report(lambda x: jnp.sum(x > 1)),
        lambda: report(lambda x: Sum(jnp.sum(x > 1))),
    ),
    "an aux mean with a weight for each row": (
        TypeError,
        [r"aux\['m'\]", "weight is a real scalar", r"float32\[3\]", "sum it"],
        lambda: report(lambda x: Mean(x, x)),
        lambda: report(lambda x: Mean(x, jnp.sum(x))),
    ),
    "a maximum of complex numbers": (
        TypeError,
        [r"aux\['m'\]", "`Max`", "real numbers", "complex64"],
        lambda: report(lambda x: Max({"a": x[0], "b": jnp.complex64(1j)})),
        lambda: report(lambda x: Last({"a": x[0], "b": jnp.complex64(1j)})),
    ),
    "a marker in a marker": (
        TypeError,
        [r"aux\['m'\]", "`Last`", "must hold arrays", r"Max at \['a'\]"],
        lambda: report(lambda x: Last({"a": Max(x[0])})),
        lambda: report(lambda x: {"a": Max(x[0])}),
    ),
    "text in a marker": (
        TypeError,
        [r"aux\['m'\]", "`Last`", "str at the top"],
        lambda: report(lambda x: Last("text")),
        lambda: report(lambda x: Last(np.float32(1))),
    ),
    "a row too few for Concat": (
        TypeError,
        [r"aux\['m'\]\['a'\]", "`Concat`", "3 rows", r"float32\[2\]", "`Stack`"],
        lambda: report(lambda x: Concat({"a": x[1:]})),
        lambda: report(lambda x: Stack({"a": x[1:]})),
    ),
    "a scalar for Concat": (
        TypeError,
        [r"aux\['m'\]", "`Concat`", r"float32\[\]"],
        lambda: report(lambda x: Concat(x[0])),
        lambda: report(lambda x: Stack(x[0])),
    ),
    "a last micro-batch of another shape": (
        TypeError,
        ["last, smaller", r"float32\[2\] at \['aux'\]\['m'\].x", r"\[4\] is exp"],
        lambda: report(Sum, num_microbatches=None, microbatch_size=4),
        lambda: report(Concat, num_microbatches=None, microbatch_size=4),
    ),
    "a last micro-batch of one row": (
        TypeError,
        ["last, smaller", r"float32\[1\]", "num_microbatches"],
        lambda: report(Stack, num_microbatches=None, microbatch_size=5),
        lambda: report(Last, num_microbatches=None, microbatch_size=5),
    ),
    "a last micro-batch of another loss": (
        TypeError,
        ["last, smaller", r"\['loss'\]"],
        lambda: gradient(
            lambda w, x: mean(w * x) if x.shape[0] == 4 else jnp.mean(w * x),
            num_microbatches=None,
            microbatch_size=4,
        ),
        lambda: gradient(
            lambda w, x: mean(w * x), num_microbatches=None, microbatch_size=4
        ),
    ),
    # Carried state.
    "a carried state of another dtype": (
        TypeError,
        ["carried state", r"float32\[\] at state\['count'\]", r"int32\[\] is exp"],
        lambda: carried({"mean": jnp.zeros(3), "count": jnp.float32(1)}),
        lambda: carried({"mean": jnp.zeros(3), "count": jnp.int32(1)}),
    ),
    "a carried state that lacks a leaf": (
        TypeError,
        ["carried state", r"nothing at state\['count'\]"],
        lambda: carried({"mean": jnp.zeros(3)}),
        lambda: carried({"count": jnp.int32(1), "mean": jnp.zeros(3)}),
    ),
    # Groups.
    "a batch of half a group": (
        ValueError,
        ["group_size", "got 4 for 6 rows"],
        lambda: gradient(lambda w, x: jnp.mean(w * x), group_size=4),
        lambda: gradient(lambda w, x: jnp.mean(w * x), group_size=3),
    ),
    "groups that N does not divide": (
        ValueError,
        ["num_microbatches", "got 2 for 3 groups of 2 rows", r"\[1, 3\]"],
        lambda: gradient(lambda w, x: jnp.mean(w * x), group_size=2),
        lambda: gradient(
            lambda w, x: jnp.mean(w * x), group_size=2, num_microbatches=3
        ),
    ),
    "a micro-batch of half a group": (
        ValueError,
        ["microbatch_size", "multiple of `group_size`", "got 3 for groups of 2"],
        lambda: grad(two_terms, microbatch_size=3, group_size=2),
        lambda: grad(two_terms, microbatch_size=4, group_size=2),
    ),
    "no group": (
        ValueError,
        ["group_size", "integer >= 1", "got 0"],
        lambda: grad(two_terms, group_size=0),
        lambda: grad(two_terms, group_size=1),
    ),
    # `mean` and the arithmetic of terms.
    "a mean of text": (
        TypeError,
        ["mean", "numbers", "got str"],
        lambda: mean("text"),
        lambda: mean(True),
    ),
    "a mask of integers": (
        TypeError,
        ["where", "booleans", r"int32\[6\]", "mask != 0"],
        lambda: mean(X, where=jnp.ones(6, jnp.int32)),
        lambda: mean(X, where=jnp.ones(6, jnp.int32) != 0),
    ),
    "a mask of another shape": (
        ValueError,
        ["where", r"\(6,\)", r"got \(5,\)"],
        lambda: mean(X, where=jnp.ones(5, bool)),
        lambda: mean(X, where=jnp.ones(1, bool)),
    ),
    "a mask larger than what it masks": (
        ValueError,
        ["where", r"\(2, 1\)", r"got \(2, 3\)"],
        lambda: mean(jnp.ones((2, 1)), where=jnp.ones((2, 3), bool)),
        lambda: mean(jnp.ones((2, 3)), where=jnp.ones((2, 1), bool)),
    ),
    "weights of another shape": (
        ValueError,
        ["weights", "axes of `x`", r"\(2, 3\)", r"got \(2,\)", r"weights\[:, None\]"],
        lambda: mean(jnp.ones((2, 3)), weights=jnp.ones(2)),
        lambda: mean(jnp.ones((2, 3)), weights=jnp.ones((2, 1))),
    ),
    "complex weights": (
        TypeError,
        ["weights", "real numbers", r"complex64\[6\]"],
        lambda: mean(X, weights=X.astype(jnp.complex64)),
        lambda: mean(X.astype(jnp.complex64), weights=X),
    ),
    "a product of means": (
        TypeError,
        ["`Mean`", "multiplied or divided by a real scalar", "got Mean", r"\.value"],
        lambda: mean(X) * mean(X),
        lambda: mean(X) * mean(X).value,
    ),
    "a mean times an array": (
        TypeError,
        ["`Mean`", "multiplied or divided by a real scalar", r"float32\[6\]"],
        lambda: X * mean(X),
        lambda: X[0] * mean(X),
    ),
    "the weight of several terms": (
        AttributeError,
        ["2 terms", "no `weight` together", "inside the mean"],
        lambda: (mean(X) + mean(X)).weight,
        lambda: mean(X).weight,
    ),
    "a scalar over a mean": (
        TypeError,
        ["unsupported operand"],
        lambda: 1 / mean(X),
        lambda: mean(X) / 2,
    ),
    "a mean and an array": (
        TypeError,
        ["to a `Mean` must be added", r"float32\[6\]", "optax_accum.mean"],
        lambda: mean(X) + X,
        lambda: mean(X) + jnp.mean(X),
    ),
    "a maximum and a minimum": (
        TypeError,
        ["`Max`", "merged with one of its kind", "got `Min`"],
        lambda: Max(1.0).merge(Min(1.0)),
        lambda: Max(1.0).merge(Max(1.0)),
    ),
    "a sum and a maximum": (
        TypeError,
        ["to a `Sum` must be added", "got Max"],
        lambda: Sum(1.0) + Max(1.0),
        lambda: Sum(1.0) + Mean(1.0, 1.0),
    ),
    # Sums.
    "compensated sums in float32": (
        ValueError,
        ["compensated", "of 16 bits", "got None"],
        lambda: grad(two_terms, compensated=True),
        lambda: grad(two_terms, accumulator_dtype="bfloat16", compensated=True),
    ),
    "sums in 8 bits": (
        ValueError,
        ["accumulator_dtype", "at least 16 bits", "got float8_e5m2"],
        lambda: accumulate(SGD, 2, accumulator_dtype="float8_e5m2"),
        lambda: accumulate(SGD, 2, accumulator_dtype="bfloat16"),
    ),
    "compensated sums in no dtype": (
        TypeError,
        ["accumulator_dtype", "floating dtype or None", "got 'spam'"],
        lambda: accumulate(SGD, 2, accumulator_dtype="spam", compensated=True),
        lambda: accumulate(SGD, 2, accumulator_dtype="bfloat16", compensated=True),
    ),
    "compensated sums in float32 at door 1": (
        ValueError,
        ["compensated", "of 16 bits", "got float32"],
        lambda: accumulate(SGD, 2, accumulator_dtype="float32", compensated=True),
        lambda: accumulate(SGD, 2, accumulator_dtype="float16", compensated=True),
    ),
}
