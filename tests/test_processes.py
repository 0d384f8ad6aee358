"""Several processes on one mesh: what they train is what a single device would."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import processes
import pytest
from losses import largest_relative_error

SCRIPT = Path(processes.__file__)
TIME_LIMIT = 120  # of seconds: processes that wait for each other do so for long

# Seen are 1e-7 and less. The mean of 36 tokens is added up in another order: at most 36
# ulp, 4e-6, of a loss. Of a gradient, all below 0.2, this is 9e-7; Adam divides by the
# root of v, all above 0.02, and multiplies by 0.01: 1.5e-6 in three steps, where the
# largest parameter is 2.
RTOL = 1e-5

# Door 3 in place of door 2: each step is a window of two micro-batches.
WINDOWS = """
import json, sys
import jax, numpy as np
import optax_accum, processes

process_id, num_processes, port = map(int, sys.argv[1:])
mesh = processes.connect(process_id, num_processes, port)
state = processes.init_state(mesh)
add, apply = optax_accum.make_window_steps(
    processes.loss_fn, processes.OPTIMIZER, reduce_axes="data", mesh=mesh
)
steps = []
for step in range(processes.STEPS):
    rows = processes.load_rows(step, process_id, num_processes)
    window = None
    for i in range(2):
        half = jax.tree.map(lambda x: np.split(x, 2)[i], rows)
        window = add(state, processes.join_rows(mesh, half), window)
    state, metrics = apply(state, window)
    steps.append({name: metrics[name].item() for name in ("loss", "weight")})
if process_id == 0:
    params = jax.tree.map(lambda p: np.asarray(p).tolist(), state.params)
    compiled = [add._cache_size(), apply._cache_size()]
    print(json.dumps({"steps": steps, "params": params, "compiled": compiled}))
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(code, num_processes, folder):
    """What process 0 of so many prints. If one fails or hangs, all are stopped."""
    # The devices of the children are not those of the tests; the strictness is.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    environment["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    command = [sys.executable, "-W", "error", *code]
    common = [str(num_processes), str(free_port())]
    outs = [folder / f"out{i}" for i in range(num_processes)]
    errs = [folder / f"err{i}" for i in range(num_processes)]
    children = []
    deadline = time.monotonic() + TIME_LIMIT
    try:
        for i, (out, err) in enumerate(zip(outs, errs, strict=True)):
            # Into files: a pipe that is full would stop its writer.
            with out.open("w") as stdout, err.open("w") as stderr:
                child = subprocess.Popen(
                    [*command, str(i), *common],
                    stdout=stdout,
                    stderr=stderr,
                    cwd=SCRIPT.parent,
                    env=environment,
                )
            children.append(child)
        codes = [None]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [child.poll() for child in children]
    finally:
        for child in children:
            child.kill()  # nothing, if it has ended
            child.wait()
    said = "\n".join(f"-- {err.name}\n{err.read_text()}" for err in errs)
    assert codes == [0] * num_processes, f"exit codes {codes}\n{said}"
    # Gloo prints too.
    lines = outs[0].read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("{")]
    return json.loads(line)


# -- Oracles: plain JAX, one device, all rows


def mean_of_all(params, batch):
    losses = processes.token_losses(params, batch)
    mask = jnp.asarray(batch["mask"], losses.dtype)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def mean_of_two_means(params, batch):
    """What two processes come to that each divide by the tokens of their own."""
    losses = processes.token_losses(params, batch).reshape(2, -1)
    mask = batch["mask"].reshape(2, -1)
    return jnp.mean(jnp.mean(losses, axis=1, where=mask))


def train(loss_fn):
    """Losses, norms of the gradients, and the parameters after all steps."""
    params, optimizer = processes.make_params(), processes.OPTIMIZER
    opt_state = optimizer.init(params)
    losses, norms = [], []
    for step in range(processes.STEPS):
        batch = processes.load_rows(step, 0, 1)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        losses.append(loss)
        norms.append(jnp.linalg.norm(grads["embedding"]))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes as it likes
            updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return np.array(losses), np.array(norms), params


def assert_trained(printed):
    losses, norms, params = train(mean_of_all)
    steps = printed["steps"]
    np.testing.assert_allclose([s["loss"] for s in steps], losses, rtol=RTOL)
    if "grad_norm" in steps[0]:
        np.testing.assert_allclose([s["grad_norm"] for s in steps], norms, rtol=RTOL)
    for step, metrics in enumerate(steps):
        assert metrics["weight"] == processes.load_rows(step, 0, 1)["mask"].sum()
    trained = np.array(printed["params"]["embedding"])
    assert largest_relative_error(trained, params["embedding"]) < RTOL


# -- Tests


@pytest.mark.slow
def test_the_tokens_tell_means_of_processes_from_the_mean():
    losses, _, params = train(mean_of_all)
    wrong_losses, _, wrong = train(mean_of_two_means)
    assert np.all(np.abs(wrong_losses / losses - 1) > 1e3 * RTOL)
    error = largest_relative_error(wrong["embedding"], params["embedding"])
    assert error > 1e3 * RTOL
    by_device = np.split(processes.load_rows(0, 0, 1)["mask"], processes.DEVICES)
    assert [mask.sum() for mask in by_device] == [24, 8, 4, 0]


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_processes_train_as_one_device(num_processes, tmp_path):
    printed = run([str(SCRIPT)], num_processes, tmp_path)
    assert_trained(printed)
    assert printed["compiled"] == 1


@pytest.mark.slow
def test_windows_of_processes(tmp_path):
    printed = run(["-c", WINDOWS], 2, tmp_path)
    assert_trained(printed)
    # `add` once for the first micro-batch of a window, once for the others.
    assert printed["compiled"] == [2, 1]
