"""All methods do the same maths: asserted before anything is measured."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import methods
import optax
from models import Problem, Scenario, make_problem
from programs import compile_methods

import optax_accum


def check_methods(scenario: Scenario, num_microbatches: int, jobs: int = 1) -> None:
    """Asserts that a window of every method ends at the parameters of the limit.

    Those come from the plain gradient of the whole batch. The optimizer is SGD, whose
    step is linear in the gradient: the first step of Adam is little but its sign, in
    which rounding may decide everything.
    """
    # An accelerator may round the factors of a product to fewer bits by default.
    with jax.default_matmul_precision("highest"):
        problem = make_problem(scenario, num_microbatches, optax.sgd(1.0))
        compiled = compile_methods(methods.describe_methods(problem), jobs)
        ends = {
            name: params_of(method.window(method.carry))
            for name, method in compiled.items()
        }
    allowed = relative_tolerance(problem)
    wrong = []
    for name, end in ends.items():
        error = relative_error(problem.params, end, ends["limit"])
        if not error <= allowed:  # so that NaN is wrong
            wrong.append(f"{error:.1e} by {name}")
    assert not wrong, (
        f"a window of every method must change the parameters ({scenario.name}) as the "
        f"gradient of the whole batch does, to {allowed:.1e} of the largest change in "
        f"an array, got {', '.join(wrong)}"
    )


def relative_tolerance(problem: Problem) -> float:
    """What rounding may change, relative to the largest entry of a gradient.

    An entry is the end of so many roundings as the model says, and of a mean over N,
    for which MultiSteps rounds three times a term. Each is of at most eps/2, and they
    have random signs and add up like their square root. Ten times that, for terms that
    are larger than their sum. A micro-batch left out would change about 1/N.
    """
    roundings = problem.roundings + 3 * problem.num_microbatches
    return 10 * math.sqrt(roundings) * float(jnp.finfo(jnp.float32).eps) / 2


def relative_error(begin: Any, end: Any, expected: Any) -> float:
    """The largest difference of an array's changes over the largest change in it."""

    def error(begin, end, expected):
        # The change was rounded to the precision of a parameter when it was stored.
        stored = jnp.finfo(end.dtype).eps * jnp.max(jnp.abs(expected))
        difference = jnp.max(jnp.abs(end - expected)) - stored
        return difference / jnp.max(jnp.abs(expected - begin))

    errors = jax.tree.leaves(jax.tree.map(error, begin, end, expected))
    return float(jnp.max(jnp.stack(errors)))  # NaN where there is one


def params_of(carry: Any) -> Any:
    return carry.params if isinstance(carry, optax_accum.TrainState) else carry[0]
