"""What a fresh process does for `distributed.py`: every method, on its forced devices.

The batch is sharded over the devices. Every method does the same maths from the same
start: the gradient of the mean over all unmasked tokens of the batch, accumulated over
N micro-batches, and one optimizer step.

Letters: ``N`` micro-batches in a batch, ``m`` rows in each; ``P`` is one
parameter-sized buffer.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checks import params_of, relative_error, relative_tolerance
from jax.sharding import PartitionSpec
from measuring import (
    Timing,
    describe_scenario,
    memory_in_p,
    summarize,
    summarize_ratios,
    time_rounds,
)
from methods import apply, stack
from models import Problem, Scenario, make_problem, normal
from origin import describe_origin
from programs import Method, Recipe, Source, compile_methods, size_of

import optax_accum

BOUND = "hand-written shard_map"
OURS, GATHER_ONCE = "reduce_axes", 'reduce_axes, gather="call"'
OPTIMIZER = "AdamW", optax.adamw(1e-3)
AXIS = "data"


class TokenModel(NamedTuple):
    """Layers of tanh over an embedding; cross-entropy of the tokens not masked."""

    vocabulary: int
    width: int
    layers: int
    tokens: int  # in a row, of which the first few count

    def init(self, rng):
        width = self.width
        return {
            "embedding": normal(rng, self.vocabulary, width),
            "layers": [normal(rng, width, width) for _ in range(self.layers)],
            "head": normal(rng, width, self.vocabulary),
        }

    def make_rows(self, rng, rows):
        shape = rows, self.tokens
        lengths = rng.integers(1, self.tokens + 1, (rows, 1))
        return {
            "ids": rng.integers(0, self.vocabulary, shape, np.int32),
            "targets": rng.integers(0, self.vocabulary, shape, np.int32),
            "mask": np.arange(self.tokens) < lengths,
        }

    def loss_fn(self, params, batch):
        return self.total(params, batch) / count_tokens(batch)

    def total(self, params, batch):
        return jnp.sum(self.losses(params, batch), where=batch["mask"])

    def mean(self, params, batch):
        """As this library wants it."""
        return optax_accum.mean(self.losses(params, batch), where=batch["mask"])

    def losses(self, params, batch):
        x = params["embedding"][batch["ids"]]
        for kernel in params["layers"]:
            x = x + jnp.tanh(x @ kernel)
        logits = x @ params["head"]
        targets = batch["targets"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    def roundings(self, rows):
        # There and back, and the last product sums over all tokens.
        there_and_back = 2 * (self.layers * self.width + self.width + self.vocabulary)
        return there_and_back + rows * self.tokens


def count_tokens(batch: Any) -> jax.Array:
    return jnp.sum(batch["mask"], dtype=jnp.float32)


class Run(NamedTuple):
    """What is trained, and how long it is measured."""

    model: TokenModel
    microbatch_size: int  # m, on all devices together
    num_microbatches: int  # N
    timing: Timing

    @property
    def scenario(self) -> Scenario:
        return Scenario("masked tokens", self.model, self.microbatch_size)


FULL = Run(
    TokenModel(2048, 256, layers=4, tokens=32),
    8,
    8,
    Timing(rounds=20, turn_seconds=0.2, most_seconds=60),
)
QUICK = Run(
    TokenModel(16, 8, layers=1, tokens=4), 8, 2, Timing(rounds=3, turn_seconds=0.001)
)
RUNS = {"full": FULL, "quick": QUICK}


class Case(NamedTuple):
    """What is trained, and on which devices."""

    model: TokenModel
    problem: Problem
    mesh: jax.sharding.Mesh

    def lay(self, tree: Any, spec: PartitionSpec) -> Any:
        """In buffers of their own, free to be donated."""
        # Not by `device_put`, which lets replicas be what is on their device already.
        copy = functools.partial(jax.tree.map, jnp.copy)
        sharding = jax.NamedSharding(self.mesh, spec)
        return jax.jit(copy, out_shardings=sharding)(tree)


def main(arguments: list[str]) -> None:
    """Prints what is measured, given which run, its most rounds, and jobs."""
    name, rounds, jobs = arguments
    run = RUNS[name]
    run = run._replace(timing=run.timing._replace(rounds=int(rounds)))
    print(json.dumps(measure(run, int(jobs))))


# -- The measurement


def measure(run: Run, jobs: int = 1) -> dict[str, Any]:
    """Checks the methods, then measures them, on all devices that there are."""
    check_methods(run, jobs)
    case = make_case(run, OPTIMIZER[1])
    methods = compile_methods(describe_methods(case), jobs)
    seconds = time_rounds(methods, run.timing)
    scenario = describe_scenario(run.scenario) | {
        "num_microbatches": run.num_microbatches,
        "optimizer": OPTIMIZER[0],
        "turn_seconds": run.timing.turn_seconds,
    }
    records = make_records(methods, seconds, case.problem.params)
    return describe_origin() | {"scenario": scenario, "records": records}


def make_case(run: Run, optimizer: optax.GradientTransformation) -> Case:
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(auto,))
    problem = make_problem(run.scenario, run.num_microbatches, optimizer)
    return Case(run.model, problem, mesh)


def make_records(
    methods: dict[str, Method], seconds: dict[str, list[float]], params: Any
) -> list[dict[str, Any]]:
    """What there is to say of each method; times are those of one step."""
    return [
        {
            "devices": jax.device_count(),
            "method": name,
            **describe_program(method.programs["step"].run),
            "memory_in_p": memory_in_p(method, size_of(params)),
            "milliseconds": summarize(1000 * taken for taken in seconds[name]),
            "ratios": summarize_ratios(seconds, name, [BOUND]),
            "rounds": len(seconds[name]),
        }
        for name, method in methods.items()
    ]


def describe_program(compiled: Any) -> dict[str, Any]:
    """What one device sends and computes in a step."""
    report = optax_accum.collective_report(compiled)
    large = report.parameter_sized_inside + report.parameter_sized_outside
    return {
        "parameter_sized_collectives": count(large),
        "collectives": count(report.collectives),
        "bytes_moved": report.bytes_moved,
        # As XLA counts them: what is in a loop once, however often it runs.
        "flops": compiled.cost_analysis()["flops"],
    }


def count(collectives: Iterable[Any]) -> int | None:
    """How often any of them runs; None where a loop does not tell."""
    trips = [c.trips for c in collectives]
    return None if None in trips else sum(trips)


def check_methods(run: Run, jobs: int = 1) -> None:
    """Asserts that a step of every method ends where the plain gradient leads.

    That of the whole batch on one device, with SGD: see `checks.check_methods`.
    """
    case = make_case(run, optax.sgd(1.0))
    problem = case.problem
    begin, mean = jax.device_get((problem.params, problem.mean))
    expected = jax.tree.map(np.subtract, begin, mean)
    allowed = relative_tolerance(problem)
    wrong = []
    for name, method in compile_methods(describe_methods(case), jobs).items():
        end = jax.device_get(params_of(method.window(method.carry)))
        error = relative_error(begin, end, expected)
        if not error <= allowed:  # so that NaN is wrong
            wrong.append(f"{error:.1e} by {name}")
    assert not wrong, (
        "a step of every method must change the parameters as the gradient of the "
        f"whole batch does, to {allowed:.1e} of the largest change in an array, got "
        f"{', '.join(wrong)}"
    )


# -- The methods


def describe_methods(case: Case) -> dict[str, Recipe]:
    return {
        "scan, contiguous": by_hand(case, lambda *args: scan(case, stack, *args)),
        "scan, strided": by_hand(case, lambda *args: scan(case, stride, *args)),
        "optax.microbatch": by_hand(case, lambda *args: optax_microbatch(case, *args)),
        "make_train_step": make_train_step(case),
        BOUND: by_hand(case, lambda *args: over_devices(case, *args)),
        OURS: make_train_step(case, reduce_axes=AXIS),
        'reduce_axes, gather="microbatch"': fully_sharded(case, "microbatch"),
        GATHER_ONCE: fully_sharded(case, "call"),
    }


Sums = tuple[jax.Array, Any]  # the total of the losses and its gradient


def by_hand(case: Case, sum_up: Callable[[Any, Any], Sums]) -> Recipe:
    """One step with what `sum_up` makes of parameters and batch, over their count."""
    optimizer = case.problem.optimizer

    def step(carry, batch):
        params, opt_state = carry
        tokens = count_tokens(batch)
        loss, mean = jax.tree.map(lambda x: x / tokens, sum_up(params, batch))
        metrics = loss, optax.tree.norm(mean)  # as make_train_step's
        return apply(optimizer, params, opt_state, mean), metrics

    params = case.lay(case.problem.params, PartitionSpec())
    carry = params, case.lay(optimizer.init(params), PartitionSpec())
    places = jax.tree.map(lambda x: x.sharding, carry)
    return one_call(
        case, jax.jit(step, donate_argnums=0, out_shardings=(places, None)), carry
    )


def scan(case: Case, split: Callable[[Any, int], Any], params: Any, batch: Any) -> Sums:
    """Sums over micro-batches, which the compiler places on the devices."""
    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return add_up(case, zeros, params, split(batch, case.problem.num_microbatches))


def add_up(case: Case, zeros: Sums, params: Any, microbatches: Any) -> Sums:
    def add(sums, microbatch):
        found = jax.value_and_grad(case.model.total)(params, microbatch)
        return jax.tree.map(jnp.add, sums, found), None

    return jax.lax.scan(add, zeros, microbatches)[0]


def stride(batch: Any, num_microbatches: int) -> Any:
    """Micro-batch i has the rows i, i + N, ..., which all devices have a share of."""

    def split(x):
        return x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, batch)


def optax_microbatch(case: Case, params: Any, batch: Any) -> Sums:
    (rows, *_) = jax.tree.leaves(case.problem.microbatches[0])
    return optax.microbatch(
        jax.value_and_grad(case.model.total), argnums=1, microbatch_size=len(rows)
    )(params, batch)


def over_devices(case: Case, params: Any, batch: Any) -> Sums:
    """Each device sums over the micro-batches of its own rows; then there is one psum.

    As it is written without a library, and the bound of what any method costs.
    """

    def local(params, batch):
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        # Outside of what is differentiated: inside, JAX would add up over devices.
        zeros, params = jax.lax.pcast((zeros, params), AXIS, to="varying")
        microbatches = stack(batch, case.problem.num_microbatches)
        return jax.lax.psum(add_up(case, zeros, params, microbatches), AXIS)

    specs = PartitionSpec(), PartitionSpec(AXIS)
    return jax.shard_map(
        local, mesh=case.mesh, in_specs=specs, out_specs=PartitionSpec()
    )(params, batch)


def fully_sharded(case: Case, gather: Literal["microbatch", "call"]) -> Recipe:
    """Parameters and optimizer state are divided over the devices too."""
    return make_train_step(
        case, reduce_axes=AXIS, param_specs=PartitionSpec(AXIS), gather=gather
    )


def make_train_step(case: Case, **options: Any) -> Recipe:
    problem = case.problem
    if "reduce_axes" in options:
        options["mesh"] = case.mesh
    train_step = optax_accum.make_train_step(
        case.model.mean,
        problem.optimizer,
        num_microbatches=problem.num_microbatches,
        **options,
    )
    params = case.lay(problem.params, options.get("param_specs", PartitionSpec()))
    state = optax_accum.init_train_state(params, problem.optimizer)
    return one_call(case, train_step, state)


def one_call(case: Case, step: Any, carry: Any) -> Recipe:
    batch = case.lay(case.problem.batch, PartitionSpec(AXIS))

    def window(run, carry):
        # One at a time: devices that share threads wait for each other in collectives.
        return jax.block_until_ready(run["step"](carry, batch)[0])

    return Recipe({"step": Source(step, (carry, batch))}, carry, window)


if __name__ == "__main__":
    main(sys.argv[1:])
