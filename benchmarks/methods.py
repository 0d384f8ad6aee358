"""The programs that are compared: every way to take one window, compiled.

Each does the same maths from the same start, and `check_methods` asserts it.

Letters: ``N`` micro-batches in a window, ``m`` rows in each; ``P`` is one
parameter-sized buffer.
"""

import math
import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_accum


class Scenario(NamedTuple):
    """What is trained, and how long it is measured."""

    widths: tuple[int, ...]  # of a multilayer perceptron, input and output included
    num_microbatches: int  # N
    microbatch_size: int  # m
    rounds: int
    turn_seconds: float  # a turn repeats the window until it lasts about so long


FULL = Scenario((64, *14 * (384,), 16), 8, 4, rounds=20, turn_seconds=0.2)
QUICK = Scenario((8, 16, 4), 4, 2, rounds=3, turn_seconds=0.001)


class Problem(NamedTuple):
    """Where every method starts, and the rows of one window."""

    params: Any
    batch: dict[str, jax.Array]  # N * m rows
    microbatches: list[dict[str, jax.Array]]  # the same rows, m in each
    optimizer: optax.GradientTransformation

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatches)


class Program(NamedTuple):
    """A compiled function, and what the compiler says about it."""

    run: Callable  # (carry, x) -> (carry, y); consumes the carry
    costs: dict[str, float]  # seconds to make it, bytes to run it


class Method(NamedTuple):
    """One way to take a window."""

    programs: dict[str, Program]
    carry: Any  # at the start: parameters, optimizer state
    window: Callable[[Any], Any]  # from carry to carry; consumes its buffers


# -- The problem


def make_problem(
    scenario: Scenario, optimizer: optax.GradientTransformation
) -> Problem:
    widths, num_microbatches = scenario.widths, scenario.num_microbatches
    key_x, key_y, *keys = jax.random.split(jax.random.key(0), len(widths) + 1)
    rows = num_microbatches * scenario.microbatch_size
    batch = {
        "x": jax.random.normal(key_x, (rows, widths[0]), jnp.float32),
        "y": jax.random.normal(key_y, (rows, widths[-1]), jnp.float32),
    }
    params = []
    for key, *shape in zip(keys, widths[:-1], widths[1:], strict=True):
        kernel = jax.random.normal(key, shape, jnp.float32) / math.sqrt(shape[0])
        params.append({"kernel": kernel, "bias": jnp.zeros(shape[1], jnp.float32)})
    stacked = stack(batch, num_microbatches)
    microbatches = [
        jax.tree.map(operator.itemgetter(i), stacked) for i in range(num_microbatches)
    ]
    return Problem(params, batch, microbatches, optimizer)


def loss_fn(params, batch):
    """Mean squared error of a multilayer perceptron.

    Of tanh: at the kink of a relu, rounding decides about a whole gradient.
    """
    *hidden, last = params
    x = batch["x"]
    for layer in hidden:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean((x @ last["kernel"] + last["bias"] - batch["y"]) ** 2)


# -- The methods


def build_methods(problem: Problem) -> dict[str, Method]:
    """Every method, compiled, with a carry of its own."""
    tx, num_microbatches = problem.optimizer, problem.num_microbatches
    accumulate = optax_accum.accumulate(tx, every_k=num_microbatches)
    multi_steps = optax.MultiSteps(tx, every_k_schedule=num_microbatches)
    return {
        "limit": limit(problem),
        "hand-written scan": hand_written_scan(problem),
        "make_train_step": make_train_step(problem),
        "accumulate": call_by_call(problem, accumulate),
        "accumulate in scan": in_scan(problem, accumulate),
        "MultiSteps": call_by_call(problem, multi_steps),
        "MultiSteps in scan": in_scan(problem, multi_steps),
        "optax.microbatch": optax_microbatch(problem),
    }


def limit(problem: Problem) -> Method:
    """The work that no method is spared: N gradients and one step, nothing summed.

    The step takes a gradient that is given. Each micro-gradient is written over the one
    before it, as in a loop: so the calls follow each other, and none allocates memory,
    which can take as long as the gradient.
    """
    mean = jax.jit(jax.grad(loss_fn))(problem.params, problem.batch)

    def gradient(written_over, inputs):
        loss, grads = jax.value_and_grad(loss_fn)(*inputs)
        return grads, loss

    def step(carry, mean):
        params, opt_state = carry
        return apply(problem.optimizer, params, opt_state, mean), ()

    params, opt_state = start(problem, problem.optimizer)
    grads = jax.tree.map(jnp.zeros_like, mean)
    inputs = (params, problem.microbatches[0])
    programs = {
        "gradient": compile_cold(donating(gradient), grads, inputs),
        "step": compile_cold(donating(step), (params, opt_state), mean),
    }

    def window(carry):
        params, opt_state, grads = carry
        for microbatch in problem.microbatches:
            grads, _ = programs["gradient"].run(grads, (params, microbatch))
        # Consumes the parameters, so that it waits for the gradients that read them.
        (params, opt_state), _ = programs["step"].run((params, opt_state), mean)
        return params, opt_state, grads

    return Method(programs, (params, opt_state, grads), window)


def hand_written_scan(problem: Problem) -> Method:
    """What one writes without a library: sums in a scan, one division, one step."""

    def step(carry, batch):
        params, opt_state = carry

        def add(total, microbatch):
            loss, grads = jax.value_and_grad(loss_fn)(params, microbatch)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        microbatches = stack(batch, problem.num_microbatches)
        total, losses = jax.lax.scan(add, zeros, microbatches)
        mean = jax.tree.map(lambda x: x / problem.num_microbatches, total)
        metrics = jnp.mean(losses), optax.tree.norm(mean)  # as make_train_step's
        return apply(problem.optimizer, params, opt_state, mean), metrics

    carry = start(problem, problem.optimizer)
    return one_call(donating(step), carry, problem.batch)


def make_train_step(problem: Problem) -> Method:
    """Door 2."""
    params, _ = start(problem, problem.optimizer)
    state = optax_accum.init_train_state(params, problem.optimizer)
    train_step = optax_accum.make_train_step(
        loss_fn, problem.optimizer, num_microbatches=problem.num_microbatches
    )
    return one_call(train_step, state, problem.batch)


def call_by_call(problem: Problem, accumulating: Any) -> Method:
    """An accumulating optimizer in a step that Python calls for each micro-batch."""
    carry, step = start(problem, accumulating), donating(micro_step(accumulating))
    program = compile_cold(step, carry, problem.microbatches[0])

    def window(carry):
        for microbatch in problem.microbatches:
            carry, _ = program.run(carry, microbatch)
        return carry

    return Method({"step": program}, carry, window)


def in_scan(problem: Problem, accumulating: Any) -> Method:
    """The same step as the body of the user's own scan."""

    def window(carry, batch):
        microbatches = stack(batch, problem.num_microbatches)
        return jax.lax.scan(micro_step(accumulating), carry, microbatches)

    return one_call(donating(window), start(problem, accumulating), problem.batch)


def optax_microbatch(problem: Problem) -> Method:
    """Optax's transformation of a function, here of the gradient, and one step."""
    rows = len(problem.batch["x"])
    value_and_grad = optax.microbatch(
        jax.value_and_grad(loss_fn),
        argnums=1,
        microbatch_size=rows // problem.num_microbatches,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )

    def step(carry, batch):
        params, opt_state = carry
        loss, mean = value_and_grad(params, batch)
        metrics = loss, optax.tree.norm(mean)
        return apply(problem.optimizer, params, opt_state, mean), metrics

    carry = start(problem, problem.optimizer)
    return one_call(donating(step), carry, problem.batch)


def micro_step(accumulating: Any) -> Callable:
    """What a user writes round an accumulating optimizer."""

    def step(carry, microbatch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, microbatch)
        return apply(accumulating, params, opt_state, grads), loss

    return step


def apply(optimizer: Any, params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def start(problem: Problem, optimizer: Any) -> tuple[Any, Any]:
    """Parameters and optimizer state in buffers of their own, free to be donated."""
    params = problem.params
    return jax.device_put((params, optimizer.init(params)), may_alias=False)


def stack(batch: Any, num_microbatches: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)


def one_call(step: Any, carry: Any, batch: Any) -> Method:
    program = compile_cold(step, carry, batch)

    def window(carry):
        return program.run(carry, batch)[0]

    return Method({"window": program}, carry, window)


def donating(step: Callable) -> Any:
    # keep_unused: the limit passes in what is not read, only written over.
    return jax.jit(step, donate_argnums=0, keep_unused=True)


def compile_cold(step: Any, carry: Any, x: Any) -> Program:
    """Compiles `step` with no trace and no program cached in this process."""
    jax.clear_caches()
    begin = time.perf_counter()
    lowered = step.lower(carry, x)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    costs = {
        "trace_seconds": traced - begin,
        "compile_seconds": done - traced,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        # Of the arguments, those whose buffers the results take over.
        "alias_bytes": memory.alias_size_in_bytes,
    }
    return Program(compiled, costs)


# -- The same maths


def check_methods(problem: Problem) -> None:
    """Asserts that a window of every method ends at the parameters of the limit.

    Those come from the plain gradient of the whole batch. The optimizer is SGD, whose
    step is linear in the gradient: the first step of Adam is little but its sign, in
    which rounding may decide everything.
    """
    # An accelerator may round the factors of a product to fewer bits by default.
    with jax.default_matmul_precision("highest"):
        ends = {
            name: params_of(method.window(method.carry))
            for name, method in build_methods(problem).items()
        }
    allowed = relative_tolerance(problem)
    wrong = []
    for name, end in ends.items():
        error = relative_error(problem.params, end, ends["limit"])
        if not error <= allowed:  # so that NaN is wrong
            wrong.append(f"{error:.1e} by {name}")
    assert not wrong, (
        "a window of every method must change the parameters as the gradient of the "
        f"whole batch does, to {allowed:.1e} of the largest change in an array, got "
        f"{', '.join(wrong)}"
    )


def relative_tolerance(problem: Problem) -> float:
    """What rounding may change, relative to the largest entry of a gradient.

    An entry is the end of at most 2L products of matrices (L layers, there and back)
    with sums of at most W terms (W the widest layer), and of a mean over N, for which
    MultiSteps rounds three times a term. These 2LW + 3N roundings, each of at most
    eps/2, have random signs and add up like their square root. Ten times that, for
    terms that are larger than their sum. A micro-batch left out would change about 1/N.
    """
    widest = max(max(layer["kernel"].shape) for layer in problem.params)
    roundings = 2 * len(problem.params) * widest + 3 * problem.num_microbatches
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
