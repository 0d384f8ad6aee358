"""Models of different kinds, whose memory is predicted and then measured.

Of the whole batch their memory is mostly activations.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Convolutional, Perceptron, Transformer, normal, normalize


class Trained(Protocol):
    """What the measurement has to know about a model; see `models.Model`."""

    def init(self, rng: np.random.Generator) -> Any: ...

    def make_rows(self, rng: np.random.Generator, rows: int) -> dict[str, Any]: ...

    def loss_fn(self, params: Any, batch: Any) -> jax.Array: ...

    def _asdict(self) -> dict[str, Any]: ...


class Shape(NamedTuple):
    """A model, and the rows of its batch."""

    name: str
    model: Trained
    rows: int


class UnrolledTransformer(NamedTuple):
    """`models.Transformer` with its layers one after another, not scanned."""

    layers: int
    width: int
    heads: int
    tokens: int  # in a row
    vocabulary: int
    remat: bool  # keeps what goes into a layer, computes what is inside once more

    def init(self, rng):
        return self.scanned.init(rng)

    def make_rows(self, rng, rows):
        return self.scanned.make_rows(rng, rows)

    @property
    def scanned(self) -> Transformer:
        """The same model, scanned."""
        return Transformer(*self[:-1])

    def loss_fn(self, params, batch):
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        layer = self.scanned.layer
        if self.remat:
            layer = jax.checkpoint(layer)
        x = params["embedding"][tokens] + params["position"]
        for i in range(self.layers):
            x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
        logits = normalize(x) @ params["embedding"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.mean(losses)


class ResidualConvolutional(NamedTuple):
    """Convolutions added one after another to the image; cross-entropy.

    They are many and narrow for a reason. XLA's convolutions on a CPU pack their
    operands in memory of their own, which is not in the plan of the compiler, and give
    it back after each. Of many layers the activations are kept, but only one packs.
    """

    layers: int
    channels: int
    pixels: int  # on each side of the square image
    classes: int

    def init(self, rng):
        wide = self.channels
        return {
            "stem": normal(rng, 3, 3, 3, wide, fan=27),
            "layers": [
                normal(rng, 3, 3, wide, wide, fan=9 * wide) for _ in range(self.layers)
            ],
            "head": normal(rng, wide, self.classes),
        }

    def make_rows(self, rng, rows):
        shape = rows, self.pixels, self.pixels, 3
        return {
            "image": rng.standard_normal(shape, np.float32),
            "label": rng.integers(0, self.classes, rows, np.int32),
        }

    def loss_fn(self, params, batch):
        x = convolve(batch["image"], params["stem"])
        for kernel in params["layers"]:
            x = x + convolve(jnp.tanh(normalize(x)), kernel)
        logits = jnp.mean(normalize(x), axis=(1, 2)) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses)


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=dimensions
    )


class Recurrent(NamedTuple):
    """A gated state that scans over time, predicts what is next; squared error."""

    width: int
    steps: int  # in a row
    features: int

    def init(self, rng):
        return {
            "in": normal(rng, self.features, self.width),
            "gate": normal(rng, self.width, self.width),
            "candidate": normal(rng, self.width, self.width),
            "out": normal(rng, self.width, self.features),
        }

    def make_rows(self, rng, rows):
        shape = rows, self.steps + 1, self.features
        return {"x": rng.standard_normal(shape, np.float32)}

    def loss_fn(self, params, batch):
        def cell(state, x):
            put = x @ params["in"]
            gate = jax.nn.sigmoid(put + state @ params["gate"])
            candidate = jnp.tanh(put + state @ params["candidate"])
            state = gate * state + (1 - gate) * candidate
            return state, state @ params["out"]

        x = jnp.swapaxes(batch["x"], 0, 1)
        start = jnp.zeros((x.shape[1], self.width), x.dtype)
        _, predicted = jax.lax.scan(cell, start, x[:-1])
        return jnp.mean((predicted - x[1:]) ** 2)


# -- The shapes

MLP = Shape("MLP", Perceptron((64, *4 * (1024,), 16), positions=256), 64)
CONVOLUTIONAL = Shape("convolutional", ResidualConvolutional(16, 8, 32, 10), 128)
TRANSFORMER = Shape(
    "transformer",
    UnrolledTransformer(4, 384, heads=6, tokens=64, vocabulary=1024, remat=False),
    64,
)
REMAT = Shape(
    "transformer, remat",
    UnrolledTransformer(6, 256, heads=4, tokens=64, vocabulary=1024, remat=True),
    64,
)
SCAN = Shape(
    "transformer, scan of layers",
    Transformer(6, 256, heads=4, tokens=64, vocabulary=2048),
    128,
)
RECURRENT = Shape("recurrent", Recurrent(768, 64, 64), 256)
FULL = (MLP, CONVOLUTIONAL, TRANSFORMER, REMAT, SCAN, RECURRENT)

# Of few and wide convolutions what is packed is as large as what is kept: shown, so
# that nobody believes otherwise, and not promised.
BEYOND = (Shape("convolutional, wide", Convolutional((3, 32, 64, 128), 64, 10), 128),)

# In little: for tests.
QUICK = (Shape("small MLP", Perceptron((16, 64, 64, 4), positions=64), 64),)
