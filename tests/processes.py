"""Trains on four CPU devices of several processes, which share the rows of a batch.

Two processes, in two terminals:

    python tests/processes.py 0 2 12345
    python tests/processes.py 1 2 12345

One process, which prints the same but for rounding:

    python tests/processes.py 0 1 12345
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_accum

DEVICES, STEPS, ROWS, LENGTH, VOCABULARY, WIDTH = 4, 3, 16, 6, 7, 4
OPTIMIZER = optax.adam(0.01)


def make_params():
    embedding = np.random.default_rng(0).standard_normal((VOCABULARY, WIDTH))
    return {"embedding": embedding.astype(np.float32)}  # of the head as well


def load_rows(step, process_id, num_processes):
    """The rows of a batch that this process feeds: the first has most of the tokens."""
    rng = np.random.default_rng(1 + step)
    tokens = rng.integers(VOCABULARY, size=(ROWS, LENGTH + 1), dtype=np.int32)
    lengths = np.repeat([6, 2, 1, 0], ROWS // DEVICES)  # none on the last device
    mask = np.arange(LENGTH) < lengths[:, None]
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}
    return jax.tree.map(lambda x: np.split(x, num_processes)[process_id], batch)


def token_losses(params, batch):
    hidden = jnp.tanh(params["embedding"][batch["inputs"]])
    logits = hidden @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def loss_fn(params, batch):
    return optax_accum.mean(token_losses(params, batch), where=batch["mask"])


def connect(process_id, num_processes, port):
    """Waits for the other processes; returns a mesh of the devices of all of them."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // num_processes)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process_id)
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def join_rows(mesh, rows):
    """The whole batch, of which each process gives its own rows and sees no others."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), rows
    )


def init_state(mesh):
    # On all devices from the beginning, or the second step would be compiled anew.
    params = jax.device_put(make_params(), NamedSharding(mesh, PartitionSpec()))
    return optax_accum.init_train_state(params, OPTIMIZER)


def main(process_id, num_processes, port):
    mesh = connect(process_id, num_processes, port)
    state = init_state(mesh)
    train_step = optax_accum.make_train_step(
        loss_fn, OPTIMIZER, num_microbatches=2, reduce_axes="data", mesh=mesh
    )
    steps = []
    for step in range(STEPS):
        rows = load_rows(step, process_id, num_processes)
        state, metrics = train_step(state, join_rows(mesh, rows))
        steps.append({k: metrics[k].item() for k in ("loss", "weight", "grad_norm")})
    params = jax.tree.map(lambda p: np.asarray(p).tolist(), state.params)
    if process_id == 0:
        compiled = train_step._cache_size()
        print(json.dumps({"steps": steps, "params": params, "compiled": compiled}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("process_id", type=int, help="0 to num_processes - 1")
    parser.add_argument("num_processes", type=int, help="1, 2 or 4")
    parser.add_argument("port", type=int, help="a free one, the same for all processes")
    main(**vars(parser.parse_args()))
