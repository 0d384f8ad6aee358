"""What a window may not be, nor be given: cases for `test_errors`."""

import re

import jax
import jax.numpy as jnp
import optax

from optax_accum import (
    Stack,
    Sum,
    accumulate,
    init_train_state,
    make_window_steps,
    mean,
    value_and_grad,
)

X = jnp.arange(6.0)
SGD = optax.sgd(1.0)


def loss_fn(w, x):
    return jnp.mean(w * x)


def two_terms(w, x):
    return mean(w * x, where=x > 1) + mean(w * x)


def make(loss=loss_fn, optimizer=SGD, params=1.0, **options):
    add, apply = make_window_steps(loss, optimizer, donate=False, **options)
    return add, apply, init_train_state(params, optimizer)


def opened(loss=loss_fn, optimizer=SGD, params=1.0, **given):
    add, _, state = make(loss, optimizer, params)
    return add(state, X, None, **given)


def add_to(window, loss=loss_fn, optimizer=SGD, **given):
    add, _, state = make(loss, optimizer)
    return add(state, X, window, **given)


def apply_to(window, optimizer=SGD, **extra):
    _, apply, state = make(optimizer=optimizer)
    return apply(state, window, **extra)


def report(aux):
    def with_aux(w, x):
        return jnp.mean(w * x), {"x": aux(x)}

    add, _, state = make(with_aux, has_aux=True)
    return add(state, X, None)


def stateful(window):
    def loss_fn(w, x, model_state):
        return jnp.mean(w * x), model_state

    add, _ = make_window_steps(loss_fn, SGD, donate=False)
    return add(init_train_state(1.0, SGD, model_state=1.0), X, window)


# name: (error, parts of the message, what fails, what passes)
CASES = {
    "apply of no window": (
        TypeError,
        ["apply(state, window)", "that `add` returned", "got None", "opens one"],
        lambda: apply_to(None),
        lambda: apply_to(opened()),
    ),
    "add to no window but a gradient": (
        TypeError,
        ["add(state, batch, window)", "that `add` returned", "got float32[]"],
        lambda: add_to(jnp.zeros(())),
        lambda: add_to(None),
    ),
    "a window of other parameters": (
        ValueError,
        [
            "add(state, batch, window)",
            "got float32[6] at acc_grads",
            "opened with this state",
        ],
        lambda: add_to(opened(params=X)),
        lambda: add_to(opened()),
    ),
    "a window of other parameters is applied": (
        ValueError,
        [
            "apply(state, window)",
            "got float32[6] at acc_grads",
            "opened with this state",
        ],
        lambda: apply_to(opened(params=X)),
        lambda: apply_to(opened()),
    ),
    "a window of sums in another dtype": (
        ValueError,
        ["got float32[] at acc_grads", "bfloat16[] is", "together"],
        lambda: make(accumulator_dtype=jnp.bfloat16)[1](make()[2], opened()),
        lambda: make()[1](make()[2], opened()),
    ),
    "a window without model state": (
        ValueError,
        ["opened with this state", "float32[] is expected", "model_state"],
        lambda: stateful(opened()),
        lambda: stateful(None),
    ),
    "a window of another loss": (
        TypeError,
        ["of the same loss", "(loss, aux)", "open a new one"],
        lambda: add_to(opened(two_terms, denominators=(4, 6))),
        lambda: add_to(opened(lambda w, x: jnp.mean(w * x**2))),
    ),
    "a state of another optimizer, at door 3": (
        ValueError,
        ["add(state, batch, window)", "opt_state", "another one"],
        lambda: make()[0](init_train_state(1.0, optax.adam(1.0)), X, None),
        lambda: make()[0](init_train_state(1.0, SGD), X, None),
    ),
    "parameters instead of a state": (
        TypeError,
        ["apply(state, window)", "`TrainState`", "got dict", "init_train_state"],
        lambda: make()[1]({"w": 1.0}, opened()),
        lambda: make()[1](init_train_state(1.0, SGD), opened()),
    ),
    "several terms of unknown denominators": (
        ValueError,
        ["denominators", "several terms", "got None for 2 terms", "inside the mean"],
        lambda: opened(two_terms),
        lambda: opened(two_terms, denominators=(4, 6)),
    ),
    "denominators for one term": (
        ValueError,
        ["denominators", "left out", "got (int32[],)", "adds up"],
        lambda: opened(denominators=(6,)),
        lambda: opened(denominators=None),
    ),
    "denominators for sums": (
        ValueError,
        ["denominators", "left out", "got (int32[], int32[])"],
        lambda: opened(lambda w, x: Sum(w) + Sum(w), denominators=(1, 1)),
        lambda: opened(lambda w, x: Sum(w) + Sum(w)),
    ),
    "denominators in mid-window": (
        ValueError,
        ["denominators", "when the window opens", "got an open window"],
        lambda: add_to(
            opened(two_terms, denominators=(4, 6)), two_terms, denominators=(4, 6)
        ),
        lambda: add_to(opened(two_terms, denominators=(4, 6)), two_terms),
    ),
    "too few denominators": (
        TypeError,
        ["denominators", "a real scalar for each term", "got (int32[],) for 2"],
        lambda: opened(two_terms, denominators=(6,)),
        lambda: opened(two_terms, denominators=[4, 6]),
    ),
    "denominators that are no scalars": (
        TypeError,
        ["denominators", "a real scalar for each term", "float32[6]"],
        lambda: opened(two_terms, denominators=(4, X)),
        lambda: opened(two_terms, denominators=(4, X[-1])),
    ),
    "several terms over calls of a window": (
        ValueError,
        ["add(state, batch, window)", "one term", "got 2", "inside the mean"],
        lambda: opened(two_terms, accumulate(SGD, 2), denominators=(4, 6)),
        lambda: opened(two_terms, accumulate(SGD, 1), denominators=(4, 6)),
    ),
    "a stack in a window": (
        TypeError,
        ["does not grow", "`Stack` at aux['x']", "`Last`"],
        lambda: report(Stack),
        lambda: report(Sum),
    ),
    "emit without accumulate": (
        ValueError,
        ["apply(state, window, emit=...)", "accumulate"],
        lambda: apply_to(opened(), emit=True),
        lambda: apply_to(
            opened(optimizer=accumulate(SGD, 2)), accumulate(SGD, 2), emit=True
        ),
    ),
    "rows that do not divide": (
        ValueError,
        ["num_microbatches", "got 4 for 6 rows"],
        lambda: make(num_microbatches=4)[0](make()[2], X, None),
        lambda: make(num_microbatches=3)[0](make()[2], X, None),
    ),
    "compensated in place": (
        ValueError,
        ["in_place=True", "without `compensated`", "got both"],
        lambda: value_and_grad(
            loss_fn, in_place=True, accumulator_dtype=jnp.bfloat16, compensated=True
        ),
        lambda: value_and_grad(
            loss_fn, accumulator_dtype=jnp.bfloat16, compensated=True
        ),
    ),
}
if jax.__version_info__ >= (0, 10, 2):
    CASES["sums in place that are too narrow"] = (
        ValueError,
        ["in_place=True", "bfloat16", "w (float32[])", "default"],
        lambda: value_and_grad(
            loss_fn,
            num_microbatches=2,
            in_place=True,
            accumulator_dtype=jnp.bfloat16,
        )(1.0, X),
        lambda: value_and_grad(loss_fn, num_microbatches=2, in_place=True)(1.0, X),
    )
else:
    CASES["in place on an old JAX"] = (
        ValueError,
        ["in_place=True", "0.10.2", f"got {jax.__version__}; upgrade it", "leave"],
        lambda: value_and_grad(loss_fn, num_microbatches=2, in_place=True)(1.0, X),
        lambda: value_and_grad(loss_fn, num_microbatches=2)(1.0, X),
    )

# Shapes and calls are full of what a pattern means otherwise.
CASES = {
    name: (error, [re.escape(part) for part in parts], fails, passes)
    for name, (error, parts, fails, passes) in CASES.items()
}
