"""The demo: one training, four ways, with what each costs.

A small classifier learns handwritten digits from the full batch, through
`accumulate`, through `make_train_step` and with ``optax.MultiSteps``, from the same
start and on the same rows.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import ArrayLike
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

import optax_accum

BATCH_SIZE = 512
NUM_MICROBATCHES = 16
MICROBATCH_SIZE = BATCH_SIZE // NUM_MICROBATCHES
TEST_SIZE = 360  # of 1797 images
OPTIMIZERS = {"SGD": optax.sgd(0.05), "AdamW": optax.adamw(3e-3)}
# Each line is drawn over the one before, and leaves it visible on both sides.
LINES: dict[str, dict[str, Any]] = {
    "full batch": {"color": "#c8ccd0", "linewidth": 9},
    "accumulate": {"color": "#0072b2", "linewidth": 5},
    "make_train_step": {"color": "#f0b429", "linewidth": 2.4},
    "optax.MultiSteps": {"color": "#111111", "linewidth": 1.2, "linestyle": ":"},
}

Rows = dict[str, np.ndarray]  # "image": [B, 8, 8, 1] float32, "label": [B] int32


class State(NamedTuple):
    """What a training loop of one's own carries."""

    params: optax.Params
    opt_state: optax.OptState


@dataclasses.dataclass
class Method:
    """One way to take optimizer steps, and the log of those it has taken."""

    name: str
    step: Callable  # compiled: (state, rows) -> (state, {"loss": ...})
    state: Any
    calls: int  # of `step`, for one optimizer step
    temp_bytes: int
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


class Result(NamedTuple):
    """A row of the table."""

    name: str
    losses: list[float]  # one for each optimizer step
    accuracy: float  # on the test images
    difference: float  # of parameters from those of the full batch, the largest
    temp_bytes: int  # of one compiled call
    state_bytes: int  # parameters and optimizer state, kept between calls
    seconds: float  # for one optimizer step, the median


Results = dict[str, list[Result]]  # by optimizer; the full batch first


def run_demo(output: Path, *, steps: int = 60) -> Results:
    """Trains four ways under each optimizer; prints a table and draws `output`.

    Args:
      output: where the figure goes, a PNG.
      steps: optimizer steps in each training.

    Returns:
      What the table shows.
    """
    console = Console()
    train_rows, test_rows = load_rows()
    batches = draw_batches(train_rows, steps)
    params = jax.jit(Classifier().init)(jax.random.key(0), batches[0]["image"])
    results = {}
    with Progress(console=console, transient=True) as progress:
        for name, optimizer in OPTIMIZERS.items():
            ways = make_methods(optimizer, params, batches[0])
            ways = progress.track(ways, len(LINES), description=f"{name}: compiling")
            methods = list(ways)
            train(methods, progress.track(batches, description=f"{name}: training"))
            results[name] = evaluate(methods, test_rows)
    console.print(make_table(results))
    for sentence in summarize(results, params):
        console.print(sentence, highlight=False)
    draw(results).savefig(output, format="png", dpi=200)
    console.print(f"Drawn in {output}", highlight=False, markup=False, soft_wrap=True)
    return results


# -- The problem


class Classifier(nn.Module):
    """A small convolutional network, smooth throughout.

    Smooth, so that a rounding error stays one: at the kink of a ``relu`` it would
    switch a gradient on or off. Normalized within each image, so that the rows do not
    depend on one another.
    """

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.silu(nn.GroupNorm(4)(nn.Dense(32)(gather_neighbours(image))))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.silu(nn.GroupNorm(4)(nn.Dense(32)(gather_neighbours(x))))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def gather_neighbours(x: jax.Array) -> jax.Array:
    """The 3 x 3 neighbours of every pixel, ``[B, H, W, C] -> [B, H, W, 9 C]``.

    A ``Dense`` on them is the convolution. Not ``nn.Conv``, for on CPUs XLA runs that
    many times slower inside a loop: https://github.com/jax-ml/jax/issues/12868
    """
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [
        padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)
    ]
    return jnp.concatenate(shifted, axis=-1)


def predict(params: Any, image: ArrayLike) -> Any:
    """Logits, ``[B, 10]``."""
    return Classifier().apply(params, image)


def loss_fn(params: optax.Params, rows: Rows) -> jax.Array:
    logits = predict(params, rows["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
    return jnp.mean(losses)


def load_rows() -> tuple[Rows, Rows]:
    """Handwritten digits to train on and to test on, shuffled once."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = np.reshape(pixels[order], (-1, 8, 8, 1)).astype(np.float32) / 16
    rows = {"image": images, "label": labels[order].astype(np.int32)}
    test = {name: array[:TEST_SIZE] for name, array in rows.items()}
    return {name: array[TEST_SIZE:] for name, array in rows.items()}, test


def draw_batches(rows: Rows, steps: int) -> list[Rows]:
    rng = np.random.default_rng(1)
    chosen = [
        rng.choice(len(rows["label"]), BATCH_SIZE, replace=False) for _ in range(steps)
    ]
    return [{name: array[which] for name, array in rows.items()} for which in chosen]


# -- The four ways


def make_methods(
    optimizer: optax.GradientTransformation, params: optax.Params, batch: Rows
) -> Iterator[Method]:
    """The four ways, compiled, each with its own copy of the parameters."""
    accumulated = optax_accum.accumulate(optimizer, every_k=NUM_MICROBATCHES)
    multi_steps = optax.MultiSteps(optimizer, NUM_MICROBATCHES)
    multi_steps = multi_steps.gradient_transformation()
    scan_step = optax_accum.make_train_step(
        loss_fn, optimizer, num_microbatches=NUM_MICROBATCHES
    )

    def init(optimizer):
        return State(jax.tree.map(jnp.copy, params), optimizer.init(params))

    def compiled(name, step, state, calls):
        step = step.lower(state, split(batch, calls)[0]).compile()
        return Method(
            name, step, state, calls, step.memory_analysis().temp_size_in_bytes
        )

    yield compiled("full batch", make_step(optimizer), init(optimizer), 1)
    yield compiled(
        "accumulate", make_step(accumulated), init(accumulated), NUM_MICROBATCHES
    )
    # The first step consumes what the state was made of, so that too is a copy.
    own_params = jax.tree.map(jnp.copy, params)
    scan_state = optax_accum.init_train_state(own_params, optimizer)
    yield compiled("make_train_step", scan_step, scan_state, 1)
    yield compiled(
        "optax.MultiSteps", make_step(multi_steps), init(multi_steps), NUM_MICROBATCHES
    )


def make_step(optimizer: optax.GradientTransformation) -> Callable:
    """A step as one writes it without us: accumulation is in the optimizer, or not."""

    def step(state, rows):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, rows)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state), {"loss": loss}

    return jax.jit(step, donate_argnums=0)


def split(batch: Rows, calls: int) -> list[Rows]:
    """The rows of each call, in their order."""
    parts = {name: np.split(array, calls) for name, array in batch.items()}
    return [{name: parts[name][i] for name in parts} for i in range(calls)]


# -- Training


def train(methods: list[Method], batches: Iterable[Rows]) -> None:
    # Side by side, not one after the other: what slows the machine slows all alike.
    for batch in batches:
        for method in methods:
            take_optimizer_step(method, batch)


def take_optimizer_step(method: Method, batch: Rows) -> None:
    microbatches = jax.block_until_ready(jax.device_put(split(batch, method.calls)))
    losses = []
    start = time.perf_counter()
    for rows in microbatches:
        method.state, metrics = method.step(method.state, rows)
        losses.append(metrics["loss"])
    jax.block_until_ready((method.state, losses))
    method.seconds.append(time.perf_counter() - start)
    method.losses.append(float(np.mean(jax.device_get(losses))))


def evaluate(methods: list[Method], test_rows: Rows) -> list[Result]:
    full_batch = methods[0].state.params
    return [
        Result(
            name=method.name,
            losses=method.losses,
            accuracy=measure_accuracy(method.state.params, test_rows),
            difference=largest_difference(method.state.params, full_batch),
            temp_bytes=method.temp_bytes,
            state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(method.state)),
            # The first quarter warms up.
            seconds=statistics.median(method.seconds[len(method.seconds) // 4 :]),
        )
        for method in methods
    ]


def measure_accuracy(params: optax.Params, rows: Rows) -> float:
    logits = jax.jit(predict)(params, rows["image"])
    return float(np.mean(np.argmax(logits, axis=-1) == rows["label"]))


def largest_difference(params: optax.Params, reference: optax.Params) -> float:
    def largest(x, y):
        return np.max(np.abs(np.asarray(x) - np.asarray(y)))

    return float(max(jax.tree.leaves(jax.tree.map(largest, params, reference))))


# -- What is shown


def make_table(results: Results) -> Table:
    table = Table(
        title=f"A batch of {BATCH_SIZE} in {NUM_MICROBATCHES} micro-batches of "
        f"{MICROBATCH_SIZE}",
        caption="diff.: of a parameter from the full batch's; memory: temporary, of "
        "one compiled call; state: kept between calls; time: of an optimizer step",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for heading in (
        "final\nloss",
        "test\naccur.",
        "largest\ndiff.",
        "memory\n(MiB)",
        "of full\nbatch",
        "state\n(MiB)",
        "time\n(ms)",
    ):
        table.add_column(heading, justify="right")
    for optimizer, rows in results.items():
        table.add_row(f"[bold]{optimizer}")
        for row in rows:
            table.add_row(
                f"  {row.name}",
                f"{row.losses[-1]:.4f}",
                f"{row.accuracy:.3f}",
                "-" if row is rows[0] else f"{row.difference:.1e}",
                f"{row.temp_bytes / 2**20:.2f}",
                f"{row.temp_bytes / rows[0].temp_bytes:.1%}",
                f"{row.state_bytes / 2**20:.2f}",
                f"{1e3 * row.seconds:.1f}",
            )
        table.add_section()
    return table


def summarize(results: Results, params: optax.Params) -> Iterator[str]:
    """What one sees, in sentences made of the numbers."""
    steps = len(results["SGD"][0].losses)
    sgd, adamw = (
        max(row.difference for row in results[name]) for name in ("SGD", "AdamW")
    )
    yield (
        f"After {steps} steps of SGD parameters differ from those of the full batch by "
        f"up to {sgd:.1e}; float32 resolves {np.finfo(np.float32).eps:.1e} near 1. "
        f"With AdamW it is {adamw:.1e}: Adam divides each gradient by its own size, "
        "which can magnify the rounding of a tiny one."
    )
    pairs = [(row, rows[0]) for rows in results.values() for row in rows[1:]]
    memory = [row.temp_bytes / full.temp_bytes for row, full in pairs]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    yield (
        f"Micro-batches need {min(memory):.1%} to {max(memory):.1%} of the temporary "
        "memory. Beside it, accumulate and MultiSteps keep the gradients of the open "
        "window in their state, as large as the parameters: "
        f"{size / 2**20:.2f} MiB."
    )
    times = [row.seconds / full.seconds for row, full in pairs]
    yield (
        f"On this machine a step in micro-batches takes {min(times):.2f} to "
        f"{max(times):.2f} times as long as one with the full batch."
    )


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(9, 4.2))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1, wspace=0.06)
    curves, bars = figure.subplots(1, 2, width_ratios=(1.15, 1))
    draw_losses(curves, results)
    draw_memory(bars, results["AdamW"])
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)

    pairs = [(row, rows[0]) for rows in results.values() for row in rows[1:]]
    apart = max(np.ptp([row.losses, full.losses], axis=0).max() for row, full in pairs)
    memory = max(row.temp_bytes / full.temp_bytes for row, full in pairs)
    figure.suptitle(
        f"Micro-batches: {memory:.0%} of the temporary memory, "
        f"losses within {apart:.0e} of the full batch's",
        size=13,
        weight="bold",
    )
    return figure


def draw_losses(axes: Axes, results: Results) -> None:
    for optimizer, rows in results.items():
        for row in rows:
            steps = range(1, len(row.losses) + 1)
            axes.plot(steps, row.losses, **LINES[row.name], solid_capstyle="round")
        axes.annotate(
            optimizer,
            (len(row.losses), row.losses[-1]),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            weight="bold",
        )
    axes.set(xlabel="optimizer step", ylabel="training loss (nats)", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("Four ways to train, drawn on top of each other", size="medium")


def draw_memory(axes: Axes, rows: list[Result]) -> None:
    sizes = [row.temp_bytes / 2**20 for row in rows]
    colors = [LINES[row.name]["color"] for row in rows]
    bars = axes.barh([row.name for row in rows], sizes, color=colors, height=0.6)
    axes.bar_label(bars, [f"{size:.1f} MiB" for size in sizes], padding=5)
    axes.margins(x=0.2)  # room for the longest bar's label
    axes.invert_yaxis()
    axes.set(xlabel="temporary memory of one compiled call (MiB)")
    title = f"{BATCH_SIZE} rows at once, or {MICROBATCH_SIZE} at a time"
    axes.set_title(title, size="medium")
