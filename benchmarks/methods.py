"""The methods that are compared: every way to take one window.

Each does the same maths from the same start, and `checks.py` asserts it.

Letters: ``N`` micro-batches in a window, ``m`` rows in each; ``P`` is one
parameter-sized buffer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from models import Problem
from programs import Recipe, Source, size_of

import optax_accum

IN_PLACE = "make_train_step, in place"
OLD_JAX = jax.__version_info__ < (0, 10, 2)  # has no sums in place


def describe_methods(problem: Problem) -> dict[str, Recipe]:
    """Every method, with a carry of its own."""
    tx, num_microbatches = problem.optimizer, problem.num_microbatches
    accumulate = optax_accum.accumulate(tx, every_k=num_microbatches)
    multi_steps = optax.MultiSteps(tx, every_k_schedule=num_microbatches)
    described = {
        "limit": limit(problem),
        "gradients and a step": gradients_and_step(problem),
        "whole batch": whole_batch(problem),
        "hand-written scan": hand_written_scan(problem),
        "make_train_step": make_train_step(problem),
        IN_PLACE: None if OLD_JAX else make_train_step(problem, in_place=True),
        "make_window_steps": make_window_steps(problem),
        "make_train_step + accumulate": train_step_by_call(problem, accumulate),
        "accumulate": call_by_call(problem, accumulate),
        "accumulate in scan": in_scan(problem, accumulate),
        "MultiSteps": call_by_call(problem, multi_steps),
        "MultiSteps in scan": in_scan(problem, multi_steps),
        "optax.microbatch": optax_microbatch(problem),
    }
    return {name: recipe for name, recipe in described.items() if recipe is not None}


# -- What nothing can do without


def limit(problem: Problem) -> Recipe:
    """The work that no method is spared: N gradients and one step, nothing summed.

    The step takes a gradient that is given. Each micro-gradient is written over the one
    before it, as in a loop: so the calls follow each other, and none allocates memory,
    which can take as long as the gradient.
    """

    def gradient(written_over, inputs):
        loss, grads = jax.value_and_grad(problem.loss_fn)(*inputs)
        return grads, loss

    carry = start(problem, problem.optimizer)
    grads = jax.tree.map(jnp.zeros_like, problem.params)
    args = grads, (problem.params, problem.microbatches[0])
    sources = {
        "gradient": Source(
            donating(gradient), args, size_of(grads), shared="gradient written over"
        ),
        "step": step_alone(problem),
    }

    def window(run, carry):
        params, opt_state, grads = carry
        for microbatch in problem.microbatches:
            grads, _ = run["gradient"](grads, (params, microbatch))
        # Consumes the parameters, so that it waits for the gradients that read them.
        params, opt_state = run["step"]((params, opt_state), problem.mean)
        return params, opt_state, grads

    return Recipe(sources, (*carry, grads), window)


def gradients_and_step(problem: Problem) -> Recipe:
    """The same as plain programs: every gradient allocates its result."""
    sources = {"gradient": plain_gradient(problem), "step": step_alone(problem)}

    def window(run, carry):
        for microbatch in problem.microbatches:
            run["gradient"](carry[0], microbatch)
        return run["step"](carry, problem.mean)

    return Recipe(sources, start(problem, problem.optimizer), window)


def one_gradient(problem: Problem) -> Recipe:
    """No window: what one micro-batch costs, and one call of a plain program."""

    def window(run, carry):
        return run["gradient"](problem.params, problem.microbatches[0])

    return Recipe({"gradient": plain_gradient(problem)}, (), window)


def plain_gradient(problem: Problem) -> Source:
    gradient = jax.jit(jax.value_and_grad(problem.loss_fn))
    args = problem.params, problem.microbatches[0]
    return Source(gradient, args, shared="gradient")


def step_alone(problem: Problem) -> Source:
    def step(carry, mean):
        params, opt_state = carry
        return apply(problem.optimizer, params, opt_state, mean)

    carry = problem.params, problem.optimizer.init(problem.params)
    size = size_of(problem.params)
    return Source(donating(step), (carry, problem.mean), size, shared="step")


def whole_batch(problem: Problem) -> Recipe:
    """No accumulation: all rows at once."""

    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(problem.loss_fn)(params, batch)
        metrics = loss, optax.tree.norm(grads)  # as make_train_step's
        return apply(problem.optimizer, params, opt_state, grads), metrics

    return one_call(problem, donating(step), start(problem, problem.optimizer))


# -- Inside one call


def hand_written_scan(problem: Problem) -> Recipe:
    """What one writes without a library: sums in a scan, one division, one step."""

    def step(carry, batch):
        params, opt_state = carry

        def add(total, microbatch):
            loss, grads = jax.value_and_grad(problem.loss_fn)(params, microbatch)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        microbatches = stack(batch, problem.num_microbatches)
        total, losses = jax.lax.scan(add, zeros, microbatches)
        mean = jax.tree.map(lambda x: x / problem.num_microbatches, total)
        metrics = jnp.mean(losses), optax.tree.norm(mean)
        return apply(problem.optimizer, params, opt_state, mean), metrics

    return one_call(problem, donating(step), start(problem, problem.optimizer))


def make_train_step(problem: Problem, **options: Any) -> Recipe:
    """Door 2."""
    train_step = optax_accum.make_train_step(
        problem.loss_fn,
        problem.optimizer,
        num_microbatches=problem.num_microbatches,
        **options,
    )
    return one_call(problem, train_step, start_train_state(problem, problem.optimizer))


def in_scan(problem: Problem, accumulating: Any) -> Recipe:
    """An accumulating optimizer in the body of the user's own scan."""

    def window(carry, batch):
        microbatches = stack(batch, problem.num_microbatches)
        return jax.lax.scan(micro_step(problem, accumulating), carry, microbatches)

    return one_call(problem, donating(window), start(problem, accumulating))


def optax_microbatch(problem: Problem) -> Recipe:
    """Optax's transformation of a function, here of the gradient, and one step."""
    (rows, *_) = jax.tree.leaves(problem.microbatches[0])
    value_and_grad = optax.microbatch(
        jax.value_and_grad(problem.loss_fn),
        argnums=1,
        microbatch_size=len(rows),
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )

    def step(carry, batch):
        params, opt_state = carry
        loss, mean = value_and_grad(params, batch)
        metrics = loss, optax.tree.norm(mean)
        return apply(problem.optimizer, params, opt_state, mean), metrics

    return one_call(problem, donating(step), start(problem, problem.optimizer))


def one_call(problem: Problem, step: Any, carry: Any) -> Recipe:
    batch = problem.batch
    source = Source(step, (carry, batch), beside(problem, carry))

    def window(run, carry):
        return run["window"](carry, batch)[0]

    return Recipe({"window": source}, carry, window)


# -- Call by call


def call_by_call(problem: Problem, accumulating: Any) -> Recipe:
    """The same step as `in_scan`'s, called by Python for each micro-batch."""
    step = donating(micro_step(problem, accumulating))
    return many_calls(problem, step, start(problem, accumulating))


def train_step_by_call(problem: Problem, accumulating: Any) -> Recipe:
    """Door 2 with door 1 inside it: a call takes one micro-batch."""
    train_step = optax_accum.make_train_step(problem.loss_fn, accumulating)
    return many_calls(problem, train_step, start_train_state(problem, accumulating))


def many_calls(problem: Problem, step: Any, carry: Any) -> Recipe:
    args = carry, problem.microbatches[0]

    def window(run, carry):
        for microbatch in problem.microbatches:
            carry, _ = run["step"](carry, microbatch)
        return carry

    return Recipe({"step": Source(step, args, beside(problem, carry))}, carry, window)


def make_window_steps(problem: Problem) -> Recipe:
    """Door 3: one program adds a micro-batch, another one closes the window."""
    add, close = optax_accum.make_window_steps(problem.loss_fn, problem.optimizer)
    state = start_train_state(problem, problem.optimizer)
    first, *others = problem.microbatches
    opened = jax.eval_shape(add, state, first, None)
    size = size_of(opened)
    sources = {
        "first": Source(add, (state, first, None), shared="window: first"),
        "apply": Source(close, (state, opened), size, shared="window: apply"),
    }
    if others:
        args = state, first, opened
        sources["add"] = Source(add, args, size, shared="window: add")

    def window(run, state):
        opened = run["first"](state, first, None)
        for microbatch in others:
            opened = run["add"](state, microbatch, opened)
        return run["apply"](state, opened)[0]

    return Recipe(sources, state, window)


# -- What they are made of


def micro_step(problem: Problem, accumulating: Any) -> Callable:
    """What a user writes round an accumulating optimizer."""

    def step(carry, microbatch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(problem.loss_fn)(params, microbatch)
        return apply(accumulating, params, opt_state, grads), loss

    return step


def apply(optimizer: Any, params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def start(problem: Problem, optimizer: Any) -> tuple[Any, Any]:
    """Parameters and optimizer state in buffers of their own, free to be donated."""
    params = problem.params
    return jax.device_put((params, optimizer.init(params)), may_alias=False)


def start_train_state(problem: Problem, optimizer: Any) -> optax_accum.TrainState:
    params = jax.device_put(problem.params, may_alias=False)
    return optax_accum.init_train_state(params, optimizer)


def beside(problem: Problem, carry: Any) -> int:
    """Bytes that a carry holds beyond parameters and the optimizer's own state."""
    params = problem.params
    return size_of(carry) - size_of((params, problem.optimizer.init(params)))


def stack(batch: Any, num_microbatches: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)


def donating(step: Callable) -> Any:
    # keep_unused: the limit passes in what is not read, only written over.
    return jax.jit(step, donate_argnums=0, keep_unused=True)
