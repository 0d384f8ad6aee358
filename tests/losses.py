"""Losses of four kinds that users train, small, and batches whose rows weigh unequally.

Each is ``(loss_fn, params, batch)``; `loss_fn` returns what `optax_accum` takes, and
`unsplit` makes of it a function for ``jax.grad``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import optax_accum

ROWS = 12


def unsplit(loss_fn):
    """The oracle: all rows at once, the denominators those of all rows."""

    def fun(params, batch, *args):
        loss = loss_fn(params, batch, *args)
        return loss if isinstance(loss, jax.Array) else loss.value

    return fun


def normal(seed, *shape, dtype=np.float32, scale=1.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(scale * rng.standard_normal(shape), dtype)


def language_model(dtype):
    """Masked, tied embedding, a balance term over another mask, and a decay."""
    vocabulary, width, length = 11, 6, 5
    params = {
        "embedding": normal(0, vocabulary, width, dtype=dtype),
        "layers": normal(1, 2, width, width, dtype=dtype, scale=0.5),
        "gate": normal(2, width, 3, dtype=dtype),
    }
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, length + 1, ROWS)  # some rows are all padding
    lengths[:2] = 0, length
    batch = {
        "tokens": jnp.asarray(rng.integers(0, vocabulary, (ROWS, length)), jnp.int32),
        "labels": jnp.asarray(rng.integers(0, vocabulary, (ROWS, length)), jnp.int32),
        "mask": jnp.asarray(np.arange(length) < lengths[:, None]),
        "routed": jnp.asarray(rng.random((ROWS, length)) < 0.5),
    }

    def loss_fn(params, batch):
        def layer(hidden, weights):
            return hidden + jnp.tanh(hidden @ weights), None

        hidden = params["embedding"][batch["tokens"]]
        hidden, _ = jax.lax.scan(jax.checkpoint(layer), hidden, params["layers"])
        logits = hidden @ params["embedding"].T
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["labels"][..., None], axis=-1
        )
        balance = jnp.sum(jax.nn.softmax(hidden @ params["gate"]) ** 2, axis=-1)
        decay = jnp.sum(params["layers"] ** 2)
        return (
            optax_accum.mean(-picked[..., 0], where=batch["mask"])
            + 0.3 * optax_accum.mean(balance, where=batch["routed"])
            + 0.01 * decay
        )

    return loss_fn, params, batch


def image_classifier(dtype):
    """Cross-entropy on handwritten digits: a plain mean over rows."""
    digits = load_digits()
    params = {
        "kernel": normal(4, 3, 3, 1, 4, dtype=dtype, scale=0.3),
        "dense": normal(5, 64 * 4, 10, dtype=dtype, scale=0.1),
    }
    batch = {
        "image": jnp.asarray(digits.images[:ROWS, :, :, None] / 16, dtype),
        "label": jnp.asarray(digits.target[:ROWS], jnp.int32),
    }

    def loss_fn(params, batch):
        hidden = jax.lax.conv_general_dilated(
            batch["image"],
            params["kernel"],
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        flat = jnp.tanh(hidden).reshape(len(hidden), -1)
        log_probabilities = jax.nn.log_softmax(flat @ params["dense"])
        one_hot = jax.nn.one_hot(batch["label"], 10, dtype=flat.dtype)
        return -jnp.mean(jnp.sum(log_probabilities * one_hot, axis=-1))

    return loss_fn, params, batch


def regression(dtype):
    """Least squares with a fractional weight for every sample."""
    params = {"w": normal(6, 5, dtype=dtype), "b": normal(7, dtype=dtype)}
    weights = np.random.default_rng(8).exponential(size=ROWS) ** 2
    batch = {
        "x": normal(9, ROWS, 5, dtype=dtype),
        "y": normal(10, ROWS, dtype=dtype),
        "weight": jnp.asarray(weights, dtype),
    }

    def loss_fn(params, batch):
        errors = batch["x"] @ params["w"] + params["b"] - batch["y"]
        return optax_accum.mean(errors**2, weights=batch["weight"])

    return loss_fn, params, batch


def siamese(dtype):
    """Pairs of neighbouring rows, near or far by the label of the first."""
    params = {"w": normal(11, 6, 4, dtype=dtype)}
    batch = {
        "x": normal(12, 2 * ROWS, 6, dtype=dtype),
        "same": jnp.asarray(np.random.default_rng(13).random(2 * ROWS) < 0.5),
    }

    def loss_fn(params, batch):
        first, second = (
            jnp.tanh(batch["x"] @ params["w"]).reshape(-1, 2, 4).swapaxes(0, 1)
        )
        distance = jnp.sum((first - second) ** 2, axis=-1)
        far = jnp.maximum(0, 2 - distance)
        return jnp.mean(jnp.where(batch["same"][::2], distance, far))

    return loss_fn, params, batch


LOSSES = {
    "language model": (language_model, {}),
    "image classifier": (image_classifier, {}),
    "regression": (regression, {}),
    "siamese": (siamese, {"group_size": 2}),
}


def largest_relative_error(actual, expected):
    """Over all leaves, relative to the largest entry of each."""

    def error(a, e):
        a, e = np.asarray(a, np.complex128), np.asarray(e, np.complex128)
        # Absolute where there is no gradient at all, as of what a loss does not use.
        return float(np.max(np.abs(a - e)) / (np.max(np.abs(e)) or 1.0))

    return max(jax.tree.leaves(jax.tree.map(error, actual, expected)))
