"""Trains, saves often, and goes on from the last checkpoint if there is one.

Started again after it was killed, it ends where it would have ended:

    python tests/trainings.py window_steps /tmp/run

It prints from which micro-batch it went on, and a hash of every array at the end.
"""

import argparse
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp

import optax_accum

# Saves, and the end, in the middle of windows, and one at a boundary.
WINDOW, SAVE_EVERY, MICRO_BATCHES = 4, 3, 18
ROWS, WIDTH = 8, 4
OPTIMIZER = optax.adam(0.1)


class Training(NamedTuple):
    init: Callable[[], Any]
    # (what is saved, position of a micro-batch) -> what is saved
    advance: Callable[[Any, int], Any]
    # How many micro-batches were seen -> the types of what is saved
    types: Callable[[int], Any]


def make_params():
    w = np.random.default_rng(0).standard_normal((ROWS, WIDTH)) / 3
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(WIDTH)}


def load_micro_batch(position):
    """Rows of unequal masks: the weights of micro-batches differ."""
    rng = np.random.default_rng(1 + position)
    return {
        "x": rng.standard_normal((ROWS, ROWS)).astype(np.float32),
        "y": rng.standard_normal((ROWS, WIDTH)).astype(np.float32),
        "mask": rng.random((ROWS, WIDTH)) < 0.2 + 0.6 * (position % 2),
    }


def square_losses(params, batch):
    return (jnp.tanh(batch["x"] @ params["w"]) + params["b"][None] - batch["y"]) ** 2


def loss_fn(params, batch):
    return optax_accum.mean(square_losses(params, batch), where=batch["mask"])


def noisy_loss_fn(params, batch, key, model_state):
    """Of everything that a `TrainState` may hold."""
    noise = 0.1 * jax.random.normal(key, batch["x"].shape)
    new = {"mean": 0.9 * model_state["mean"] + 0.1 * jnp.mean(batch["x"], axis=0)}
    return loss_fn(params, batch | {"x": batch["x"] + noise}), new


def init_state(optimizer):
    return optax_accum.init_train_state(
        make_params(),
        optimizer,
        key=jax.random.key(2),
        model_state={"mean": jnp.zeros(ROWS)},
    )


# -- The three doors


@functools.cache
def make_accumulate(every_k=WINDOW):
    optimizer = optax_accum.accumulate(OPTIMIZER, every_k)

    def init():
        params = make_params()
        return {"params": params, "opt_state": optimizer.init(params)}

    def value_and_weight(params, batch):
        loss = loss_fn(params, batch)
        return loss.value, loss.weight

    @functools.partial(jax.jit, donate_argnums=0)
    def update(saved, batch):
        params, opt_state = saved["params"], saved["opt_state"]
        compute = jax.value_and_grad(value_and_weight, has_aux=True)
        (value, weight), grads = compute(params, batch)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, weight=weight, value=value
        )
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state}

    def advance(saved, position):
        return update(saved, load_micro_batch(position))

    return Training(init, advance, lambda _: jax.eval_shape(init))


@functools.cache
def make_train_step():
    optimizer = optax_accum.accumulate(OPTIMIZER, WINDOW)
    train_step = optax_accum.make_train_step(
        noisy_loss_fn, optimizer, num_microbatches=2
    )

    def init():
        return init_state(optimizer)

    def advance(state, position):
        return train_step(state, load_micro_batch(position))[0]

    return Training(init, advance, lambda _: jax.eval_shape(init))


@functools.cache
def make_window_steps():
    add, apply = optax_accum.make_window_steps(noisy_loss_fn, OPTIMIZER)

    def init():
        return {"state": init_state(OPTIMIZER), "window": None}

    def advance(saved, position):
        state = saved["state"]
        window = add(state, load_micro_batch(position), saved["window"])
        if (position + 1) % WINDOW == 0:
            (state, _), window = apply(state, window), None
        return {"state": state, "window": window}

    def types(position):
        state = jax.eval_shape(init)["state"]
        window = jax.eval_shape(add, state, load_micro_batch(0), None)
        is_open = position % WINDOW != 0
        return {"state": state, "window": window if is_open else None}

    return Training(init, advance, types)


TRAININGS = {
    "accumulate": make_accumulate,
    "train_step": make_train_step,
    "window_steps": make_window_steps,
}


# -- Checkpoints, labelled with the micro-batches that were seen


def place(types, shardings):
    """A target for Orbax: types, and the sharding of all of them or of each."""

    def placed(type_, sharding):
        return jax.ShapeDtypeStruct(type_.shape, type_.dtype, sharding=sharding)

    return jax.tree.map(placed, types, jax.tree.broadcast(shardings, types))


def on_one_device():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def hashes(tree):
    def digest(leaf):
        if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()

    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): digest(leaf) for path, leaf in leaves}


def main(door, folder):
    training = TRAININGS[door]()
    every = ocp.training.save_decision_policies.FixedIntervalPolicy(SAVE_EVERY)
    with ocp.training.Checkpointer(folder, save_decision_policy=every) as checkpointer:
        latest = checkpointer.latest
        position = 0 if latest is None else latest.step
        if latest is None:
            saved = training.init()
        else:
            target = place(training.types(position), on_one_device())
            saved = checkpointer.load(latest, target)
        for i in range(position, MICRO_BATCHES):
            saved = training.advance(saved, i)
            # The next call consumes what is still being written.
            checkpointer.save_async(i + 1, saved)
    print(json.dumps({"resumed_from": position, "hashes": hashes(saved)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("door", choices=TRAININGS)
    parser.add_argument("folder", help="of the checkpoints")
    main(**vars(parser.parse_args()))
