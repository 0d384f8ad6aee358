"""One optimizer step in N micro-batches: this library beside its peers.

Every method does the same maths from the same start, a *window*: the gradients of N
micro-batches and one optimizer step with their mean. The micro-batches are small, so
that the optimizer and the sums count, not the model alone. In each round all methods
take turns; the ratios of turns of one round are what is compared, for they share its
noise.

``python benchmarks/peers.py`` measures, ``python benchmarks/readme.py`` publishes.

Letters: ``N`` micro-batches in a window, ``m`` rows in each; ``P`` is one
parameter-sized buffer.
"""

import argparse
import importlib.metadata
import json
import math
import operator
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from rich.console import Console
from rich.table import Table

import optax_accum

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
REFERENCES = ("limit", "hand-written scan", "MultiSteps")
OPTIMIZERS = {"AdamW": optax.adamw(1e-3), "Muon": optax.contrib.muon(1e-3)}


class Scenario(NamedTuple):
    """What is trained, and how long it is measured."""

    widths: tuple[int, ...]  # of a multilayer perceptron, input and output included
    num_microbatches: int  # N
    microbatch_size: int  # m
    rounds: int
    turn_seconds: float  # a turn repeats the window until it lasts about so long


FULL = Scenario((64, *14 * (384,), 16), 8, 4, rounds=20, turn_seconds=0.02)
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


class Promise(NamedTuple):
    """What a method may cost at most, as a multiple of a peer's costs."""

    method: str
    peer: str
    quantity: Literal["time", "temporaries"]
    optimizer: str
    at_most: float


PROMISES = (
    Promise("make_train_step", "hand-written scan", "time", "AdamW", 1.05),
    Promise("make_train_step", "hand-written scan", "time", "Muon", 1.05),
    Promise("make_train_step", "hand-written scan", "temporaries", "AdamW", 1.02),
    Promise("make_train_step", "hand-written scan", "temporaries", "Muon", 1.02),
    Promise("accumulate", "MultiSteps", "time", "AdamW", 0.95),
    Promise("accumulate", "MultiSteps", "time", "Muon", 0.25),
)


# # The measurement


def measure(
    scenario: Scenario, optimizers: dict[str, optax.GradientTransformation]
) -> dict[str, Any]:
    """Checks the methods, then measures them: all that goes into the file."""
    check_methods(make_problem(scenario, optax.sgd(1.0)))
    records = []
    for name, optimizer in optimizers.items():
        problem = make_problem(scenario, optimizer)
        methods = build_methods(problem)
        seconds = time_rounds(methods, scenario)
        records += make_records(name, methods, seconds, size_of(problem.params))
    return describe_run(scenario) | {"records": records}


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


def time_rounds(
    methods: dict[str, Method], scenario: Scenario
) -> dict[str, list[float]]:
    """Seconds that a window took, for each method and round."""
    carries, repeats = {}, {}
    for name, method in methods.items():
        carry, _ = take_turn(method, method.carry, 1)  # warms up
        carries[name], seconds = take_turn(method, carry, 1)
        repeats[name] = max(1, math.ceil(scenario.turn_seconds / seconds))
    seconds = {name: [] for name in methods}
    order, shuffle = list(methods), random.Random(0).shuffle
    for _ in range(scenario.rounds):
        shuffle(order)  # so that no method always follows the same one
        for name in order:
            carries[name], taken = take_turn(
                methods[name], carries[name], repeats[name]
            )
            seconds[name].append(taken)
    return seconds


def take_turn(method: Method, carry: Any, repeats: int) -> tuple[Any, float]:
    """The carry after so many windows, and the seconds that one of them took."""
    start = time.perf_counter()
    for _ in range(repeats):
        carry = method.window(carry)
    jax.block_until_ready(carry)
    return carry, (time.perf_counter() - start) / repeats


# # The methods


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
        return apply(problem.optimizer, *carry, mean), ()

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
        return apply(problem.optimizer, params, opt_state, mean), jnp.mean(losses)

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
        return apply(problem.optimizer, params, opt_state, mean), loss

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


# # The same maths


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


# # The records


def make_records(
    optimizer: str,
    methods: dict[str, Method],
    seconds: dict[str, list[float]],
    params_bytes: int,
) -> list[dict[str, Any]]:
    """What there is to say of each method; times are those of one window."""
    return [
        {
            "optimizer": optimizer,
            "method": name,
            "milliseconds": summarize(1000 * taken for taken in seconds[name]),
            "ratios": {
                reference: summarize(
                    map(operator.truediv, seconds[name], seconds[reference])
                )
                for reference in REFERENCES
            },
            "memory_in_p": memory_in_p(method, params_bytes),
            "programs": {key: p.costs for key, p in method.programs.items()},
        }
        for name, method in methods.items()
    ]


def summarize(figures: Iterable[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(figures, n=4, method="inclusive")
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper}


def memory_in_p(method: Method, params_bytes: int) -> dict[str, float]:
    """Arguments and temporaries of the program that needs most of both together."""
    needs = [
        (program.costs["argument_bytes"], program.costs["temporary_bytes"])
        for program in method.programs.values()
    ]
    arguments, temporaries = max(needs, key=sum)
    return {
        "arguments": arguments / params_bytes,
        "temporaries": temporaries / params_bytes,
    }


def size_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def describe_run(scenario: Scenario) -> dict[str, Any]:
    params = jax.eval_shape(lambda: make_problem(scenario, optax.identity()).params)
    packages = ("jax", "jaxlib", "optax", "optax_accum")
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": find_commit(),
        "hardware": {
            "platform": jax.devices()[0].platform,
            "device": jax.devices()[0].device_kind,
            "cpu_count": os.cpu_count(),
            "cpu_model": find_cpu_model(),
        },
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
        "scenario": scenario._asdict()
        | {
            "widths": list(scenario.widths),
            "shapes": [list(leaf.shape) for leaf in jax.tree.leaves(params)],
            "dtype": jax.tree.leaves(params)[0].dtype.name,
            "params_bytes": size_of(params),
        },
    }


def find_commit() -> str | None:
    """The commit, marked where files differ from it; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def find_cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return platform.processor()
    models = [line for line in lines if line.startswith("model name")]
    return models[0].partition(":")[2].strip() if models else platform.processor()


def measured(promise: Promise, records: list[dict[str, Any]]) -> float:
    """What the records say about a promise."""
    ours, theirs = (
        next(
            record
            for record in records
            if (record["optimizer"], record["method"]) == (promise.optimizer, method)
        )
        for method in (promise.method, promise.peer)
    )
    if promise.quantity == "time":
        return ours["ratios"][promise.peer]["median"]
    return ours["memory_in_p"]["temporaries"] / theirs["memory_in_p"]["temporaries"]


# # The terminal


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    scenario = QUICK if options.quick else FULL
    if options.rounds:
        scenario = scenario._replace(rounds=options.rounds)
    results = measure(scenario, OPTIMIZERS)
    print_results(results, Console())
    output = options.output or (None if options.quick else RESULTS)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        help="default: benchmarks/results/peers.json; of a quick run, nothing",
    )
    parser.add_argument("--rounds", type=int, help=f"default: {FULL.rounds}")
    parser.add_argument("--quick", action="store_true", help="small and meaningless")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"--rounds must be >= 2 to have quartiles, got {options.rounds}")
    return options


def print_results(results: dict[str, Any], console: Console) -> None:
    """A table for each optimizer, then what was promised."""
    records = results["records"]
    for optimizer in dict.fromkeys(record["optimizer"] for record in records):
        table = Table("method", "ms / window", title=optimizer)
        for reference in REFERENCES:
            table.add_column(f"/ {reference}", justify="right")
        table.add_column("arguments + temporaries, P", justify="right")
        table.add_column("compile, s", justify="right")
        for record in records:
            if record["optimizer"] == optimizer:
                table.add_row(*format_row(record))
        console.print(table)
    for promise in PROMISES:
        figure = measured(promise, records)
        verdict = "kept  " if figure <= promise.at_most else "MISSED"
        console.print(
            f"{verdict} {promise.method} / {promise.peer}, {promise.quantity} with "
            f"{promise.optimizer}: {figure:.3f}, promised at most {promise.at_most}",
            highlight=False,
        )


def format_row(record: dict[str, Any]) -> list[str]:
    memory = record["memory_in_p"]
    compiling = (p["compile_seconds"] for p in record["programs"].values())
    return [
        record["method"],
        f"{record['milliseconds']['median']:.1f}",
        *(format_ratio(record["ratios"][reference]) for reference in REFERENCES),
        f"{memory['arguments']:.2f} + {memory['temporaries']:.2f}",
        f"{sum(compiling):.1f}",
    ]


def format_ratio(ratio: dict[str, float]) -> str:
    lower, upper = ratio["lower_quartile"], ratio["upper_quartile"]
    return f"{ratio['median']:.2f} ({lower:.2f}-{upper:.2f})"


if __name__ == "__main__":
    main()
