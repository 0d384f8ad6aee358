"""What is trained: four scenarios, each with another thing that costs most.

Letters: ``N`` micro-batches in a window, ``m`` rows in each; ``P`` is one
parameter-sized buffer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs


class Model(Protocol):
    """A loss, where its training starts, and rows for it."""

    def init(self, rng: np.random.Generator) -> Any: ...

    def make_rows(self, rng: np.random.Generator, rows: int) -> dict[str, Any]: ...

    def loss_fn(self, params: Any, batch: Any) -> jax.Array:
        """The mean over the rows of `batch`."""

    def roundings(self, rows: int) -> int:
        """How often an entry of the gradient of so many rows is rounded, at most.

        It is the end of a chain of products of arrays, through the layers there and
        back. A product with sums of W terms rounds W times.
        """

    def _asdict(self) -> dict[str, Any]: ...


class Scenario(NamedTuple):
    """A model, and how small its micro-batches are."""

    name: str
    model: Model
    microbatch_size: int  # m


@dataclasses.dataclass(frozen=True)
class Problem:
    """Where every method starts, and the rows of one window."""

    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    batch: dict[str, jax.Array]  # N * m rows
    microbatches: list[dict[str, jax.Array]]  # the same rows, m in each
    optimizer: optax.GradientTransformation
    roundings: int

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatches)

    @functools.cached_property
    def mean(self) -> Any:
        """The plain gradient of the whole batch."""
        gradient = jax.grad(self.loss_fn)
        options = programs.COMPILER_OPTIONS
        return jax.jit(gradient, compiler_options=options)(self.params, self.batch)


def make_problem(
    scenario: Scenario, num_microbatches: int, optimizer: optax.GradientTransformation
) -> Problem:
    rng = np.random.default_rng(0)
    model, size = scenario.model, scenario.microbatch_size
    params = model.init(rng)
    batch = model.make_rows(rng, num_microbatches * size)

    def take(i):
        return {name: x[i * size : (i + 1) * size] for name, x in batch.items()}

    microbatches = [take(i) for i in range(num_microbatches)]
    params, batch, microbatches = jax.device_put((params, batch, microbatches))
    roundings = model.roundings(num_microbatches * size)
    return Problem(model.loss_fn, params, batch, microbatches, optimizer, roundings)


# -- The models. All of tanh: at the kink of a relu, rounding decides about a gradient.


class Perceptron(NamedTuple):
    """Layers of tanh, at every position of a row alike; mean squared error."""

    widths: tuple[int, ...]  # input and output included
    positions: int = 1

    def init(self, rng):
        shapes = zip(self.widths[:-1], self.widths[1:], strict=True)
        return [
            {"kernel": normal(rng, *shape), "bias": np.zeros(shape[1], np.float32)}
            for shape in shapes
        ]

    def make_rows(self, rng, rows):
        shape = (rows,) if self.positions == 1 else (rows, self.positions)
        return {
            "x": rng.standard_normal((*shape, self.widths[0]), np.float32),
            "y": rng.standard_normal((*shape, self.widths[-1]), np.float32),
        }

    def loss_fn(self, params, batch):
        *hidden, last = params
        x = batch["x"]
        for layer in hidden:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x @ last["kernel"] + last["bias"] - batch["y"]) ** 2)

    def roundings(self, rows):
        # There and back, and the last product sums over rows and positions.
        there_and_back = 2 * (len(self.widths) - 1) * max(self.widths)
        return there_and_back + rows * self.positions


class Transformer(NamedTuple):
    """A language model that scans over its layers; cross-entropy of the next token."""

    layers: int
    width: int
    heads: int
    tokens: int  # in a row
    vocabulary: int

    def init(self, rng):
        layers, width = self.layers, self.width
        return {
            "embedding": normal(rng, self.vocabulary, width),  # and the head
            "position": normal(rng, self.tokens, width),
            "layers": {
                "qkv": normal(rng, layers, width, 3 * width),
                "out": normal(rng, layers, width, width),
                "up": normal(rng, layers, width, 2 * width),
                "down": normal(rng, layers, 2 * width, width),
            },
        }

    def make_rows(self, rng, rows):
        shape = rows, self.tokens + 1
        return {"tokens": rng.integers(0, self.vocabulary, shape, np.int32)}

    def loss_fn(self, params, batch):
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x = params["embedding"][tokens] + params["position"]
        # Keeps what goes into a layer, and computes what is inside it once more.
        x, _ = jax.lax.scan(jax.checkpoint(self.layer), x, params["layers"])
        logits = normalize(x) @ params["embedding"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.mean(losses)

    def layer(self, x, layer):
        x = x + self.attend(normalize(x) @ layer["qkv"]) @ layer["out"]
        hidden = jnp.tanh(normalize(x) @ layer["up"])
        return x + hidden @ layer["down"], None

    def attend(self, qkv):
        """Causal attention: each position looks at itself and those before it."""
        rows = qkv.shape[0]
        split = qkv.reshape(rows, self.tokens, 3, self.heads, -1)
        query, key, value = (split[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return mixed.reshape(rows, self.tokens, self.width)

    def roundings(self, rows):
        # A layer: four products of weights, two of attention, two norms, no sum in them
        # longer than that of `down`. Beside it the head, and the sum over all tokens.
        in_layer = 8 * 2 * self.width
        head = self.width + self.vocabulary
        return 2 * (self.layers * in_layer + head) + rows * self.tokens


class Convolutional(NamedTuple):
    """Convolutions of stride 2, the mean over pixels, one product; cross-entropy."""

    channels: tuple[int, ...]  # of the image, then of every layer
    pixels: int  # on each side of the square image
    classes: int

    def init(self, rng):
        shapes = zip(self.channels[:-1], self.channels[1:], strict=True)
        return {
            "kernels": [
                normal(rng, 3, 3, *shape, fan=9 * shape[0]) for shape in shapes
            ],
            "head": normal(rng, self.channels[-1], self.classes),
        }

    def make_rows(self, rng, rows):
        shape = rows, self.pixels, self.pixels, self.channels[0]
        return {
            "image": rng.standard_normal(shape, np.float32),
            "label": rng.integers(0, self.classes, rows, np.int32),
        }

    def loss_fn(self, params, batch):
        x = batch["image"]
        for kernel in params["kernels"]:
            dimensions = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(
                x, kernel, (2, 2), "SAME", dimension_numbers=dimensions
            )
            x = jnp.tanh(x)
        logits = jnp.mean(x, axis=(1, 2)) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses)

    def roundings(self, rows):
        # There and back, and the last product sums over the pixels of all rows.
        in_layer = 9 * max(self.channels)
        return 2 * len(self.channels) * in_layer + rows * self.pixels**2


def normal(rng: np.random.Generator, *shape: int, fan: int | None = None) -> np.ndarray:
    """A matrix, or several, that keep the size of what they are multiplied with."""
    scale = np.float32(1 / math.sqrt(fan or shape[-2]))
    return scale * rng.standard_normal(shape, np.float32)


def normalize(x: jax.Array) -> jax.Array:
    """Rows of mean square 1."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


# -- The scenarios

OPTIMIZER_HEAVY = Scenario("optimizer-heavy", Perceptron((64, *14 * (384,), 16)), 4)
ACTIVATION_HEAVY = Scenario(
    "activation-heavy", Perceptron((8, *6 * (64,), 8), positions=256), 4
)
TRANSFORMER = Scenario(
    "transformer", Transformer(12, 128, heads=4, tokens=16, vocabulary=64), 4
)
CONVOLUTIONAL = Scenario("convolutional", Convolutional((3, 32, 64), 32, 10), 4)
FULL = (OPTIMIZER_HEAVY, ACTIVATION_HEAVY, TRANSFORMER, CONVOLUTIONAL)

# The same in little: for tests.
QUICK = (
    Scenario("optimizer-heavy", Perceptron((8, 16, 4)), 2),
    Scenario("activation-heavy", Perceptron((2, 4, 2), positions=8), 2),
    Scenario("transformer", Transformer(2, 8, heads=2, tokens=4, vocabulary=8), 2),
    Scenario("convolutional", Convolutional((1, 4), 4, 3), 2),
)
