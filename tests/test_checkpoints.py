"""Orbax: training goes on bit for bit, in a new process, and on other devices too."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trainings
from helpers import assert_bits_equal, auto_mesh, lay
from jax import P
from losses import largest_relative_error
from orbax.checkpoint import v1 as ocp
from pages import DOCS, run_page
from trainings import WINDOW, load_micro_batch, make_params, on_one_device, place

import optax_accum

SCRIPT = Path(trainings.__file__)
TIME_LIMIT = 120  # of seconds, for one process on a busy machine

# The weighted mean of four micro-batches of 32 entries is summed in another order: at
# most 128 ulp, 1.5e-5, of the largest term, and far less in the mean. Adam divides by
# the root of what it squares, so that an entry as small as the rounding would show its
# sign alone. Seen is 1e-7 on one device.
RTOL = 2e-5


@pytest.fixture
def checkpointer(tmp_path):
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        yield checkpointer


def advance(training, saved, first, last):
    for position in range(first, last):
        saved = training.advance(saved, position)
    return saved


def save_and_restore(checkpointer, training, saved, position):
    checkpointer.save(position, saved)
    target = place(training.types(position), on_one_device())
    return checkpointer.load(position, target)


# -- Oracle: plain JAX, the bare optimizer, all rows of a window at once


def mean_of_all(params, batches):
    losses = [trainings.square_losses(params, batch) for batch in batches]
    masks = [jnp.asarray(batch["mask"], jnp.float32) for batch in batches]
    total = sum(jnp.sum(loss * mask) for loss, mask in zip(losses, masks, strict=True))
    return total / sum(jnp.sum(mask) for mask in masks)


@jax.jit
def step_on_large_batch(params, opt_state, batches):
    grads = jax.grad(mean_of_all)(params, batches)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes as it likes
        updates, opt_state = trainings.OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train_on_large_batches(windows):
    params = make_params()
    opt_state = trainings.OPTIMIZER.init(params)
    for positions in windows:
        batches = [load_micro_batch(position) for position in positions]
        params, opt_state = step_on_large_batch(params, opt_state, batches)
    return params


def assert_trained(params, windows):
    assert largest_relative_error(params, train_on_large_batches(windows)) < RTOL


# -- In the middle of a window


@pytest.mark.slow
def test_tuples_of_ours_and_typed_keys_come_back_as_such(checkpointer):
    training = trainings.make_window_steps()
    saved = advance(training, training.init(), 0, 6)
    restored = save_and_restore(checkpointer, training, saved, 6)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert trainings.hashes(restored) == trainings.hashes(saved)
    assert_all_lie(restored, on_one_device())
    state, window = restored["state"], restored["window"]
    assert isinstance(state, optax_accum.TrainState)
    assert isinstance(window, optax_accum.WindowState)
    assert isinstance(window.loss, optax_accum.Mean)
    assert isinstance(state.opt_state[0], optax.ScaleByAdamState)
    assert state.key.dtype == jax.random.key(0).dtype
    weight = sum(int(load_micro_batch(i)["mask"].sum()) for i in (4, 5))
    assert window.mini_step == 2 and float(window.loss.weight) == weight


def assert_all_lie(tree, sharding):
    assert {leaf.sharding for leaf in jax.tree.leaves(tree)} == {sharding}


def test_training_goes_on_bit_for_bit(checkpointer):
    training = trainings.make_accumulate()
    saved = advance(training, training.init(), 0, 6)
    restored = save_and_restore(checkpointer, training, saved, 6)
    assert isinstance(restored["opt_state"], optax_accum.AccumulateState)
    straight = advance(training, training.init(), 0, 13)
    assert_bits_equal(advance(training, restored, 6, 13), straight)
    assert_trained(straight["params"], [range(0, 4), range(4, 8), range(8, 12)])


def test_without_the_window_training_goes_another_way(checkpointer):
    """Parameters and `inner_opt_state` alone are not enough."""
    training = trainings.make_accumulate()
    saved = advance(training, training.init(), 0, 6)
    inner = saved["opt_state"].inner_opt_state
    checkpointer.save(6, {"params": saved["params"], "inner": inner})
    types = jax.eval_shape(training.init)
    inner_types = types["opt_state"].inner_opt_state
    target = {"params": types["params"], "inner": inner_types}
    loaded = checkpointer.load(6, place(target, on_one_device()))
    fresh = training.init()["opt_state"]._replace(inner_opt_state=loaded["inner"])
    resumed = {"params": loaded["params"], "opt_state": fresh}
    assert_bits_equal(resumed["params"], saved["params"])
    resumed = advance(training, resumed, 6, 12)["params"]
    straight = train_on_large_batches([range(0, 4), range(4, 8), range(8, 12)])
    assert largest_relative_error(resumed, straight) > 1e3 * RTOL


# -- Another every_k


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_k", "last", "windows"),
    [
        (2, 8, [range(0, 4), range(4, 8)]),  # passed: closes at the next call
        (4, 8, [range(0, 4), range(4, 8)]),
        (6, 10, [range(0, 4), range(4, 10)]),
        (lambda step: 1, 8, [range(0, 4), range(4, 8)]),
    ],
)
def test_resumed_with_another_every_k(every_k, last, windows, checkpointer):
    saved = trainings.make_accumulate()
    checkpointer.save(7, advance(saved, saved.init(), 0, 7))
    training = trainings.make_accumulate(every_k)
    target = place(training.types(7), on_one_device())
    before = advance(training, checkpointer.load(7, target), 7, last - 1)
    assert before["opt_state"].gradient_step == 1
    after = advance(training, before, last - 1, last)
    assert after["opt_state"].gradient_step == 2
    assert_trained(after["params"], windows)


@pytest.mark.slow
def test_the_integer_1_is_refused(checkpointer):
    saved = trainings.make_accumulate()
    restored = save_and_restore(
        checkpointer, saved, advance(saved, saved.init(), 0, 7), 7
    )
    with pytest.raises(ValueError, match="use a schedule"):
        trainings.make_accumulate(1).advance(restored, 7)


# -- Labels, and what is no checkpoint


def test_a_label_is_used_once(checkpointer):
    assert checkpointer.save(2, {"x": jnp.ones(2)})
    with pytest.raises(ocp.training.errors.StepAlreadyExistsError):
        checkpointer.save(2, {"x": jnp.ones(2)})
    assert not checkpointer.save(1, {"x": jnp.ones(2)})


def test_a_half_written_checkpoint_is_never_picked_up(tmp_path):
    folder = tmp_path / "run"
    with ocp.training.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"x": jnp.ones(2)})
    leave_half_written(folder, 1, 2)
    with ocp.training.Checkpointer(folder) as checkpointer:
        assert [c.step for c in checkpointer.checkpoints] == [1]
        assert checkpointer.save(2, {"x": jnp.ones(2)})
        assert checkpointer.latest.step == 2


def leave_half_written(folder, complete, label):
    """What stands on the disk when a save is killed, after some of its files."""
    half = folder / f"{label}.orbax-checkpoint-tmp"
    shutil.copytree(folder / str(complete), half)
    shutil.rmtree(half / "state" / "d")


def test_a_number_is_taken_for_complete(tmp_path):
    """Why the page says to copy checkpoints under another name."""
    folder = tmp_path / "run"
    with ocp.training.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"x": jnp.ones(2)})
    leave_half_written(folder, 1, 2)
    (folder / "2.orbax-checkpoint-tmp").rename(folder / "2")
    with ocp.training.Checkpointer(folder) as checkpointer:
        assert checkpointer.latest.step == 2


def test_another_shape_is_refused(checkpointer):
    """As is that of an open window of another number of devices."""
    checkpointer.save(1, {"x": jnp.ones((8, 2))})
    target = place({"x": jax.ShapeDtypeStruct((4, 2), jnp.float32)}, on_one_device())
    with pytest.raises(KeyError, match="incompatible handler") as refusal:
        checkpointer.load(1, target)
    assert "not compatible with the stored shape" in str(refusal.value.__cause__)


# -- Saves while training goes on


def test_what_is_saved_may_be_consumed_at_once(checkpointer):
    """Large enough that files are still written while the steps run."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(jax.random.normal(jax.random.key(0), (2_000_000,)))
    expected = np.array(x, copy=True)
    saving = checkpointer.save_async(1, {"x": x})
    for _ in range(4):
        x = step(x)
    jax.block_until_ready(x)
    assert checkpointer.is_saving_in_progress()
    saving.result()
    target = place({"x": jax.typeof(x)}, on_one_device())
    np.testing.assert_array_equal(checkpointer.load(1, target)["x"], expected)
    assert not np.array_equal(x, expected)


# -- New processes


def start(door, folder):
    # One device, as most who train on a CPU have; the strictness is that of the tests.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    }
    command = [sys.executable, "-W", "error", str(SCRIPT), door, str(folder)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def result(child):
    try:
        out, err = child.communicate(timeout=TIME_LIMIT)
    finally:
        child.kill()  # nothing, if it has ended
    assert child.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(line)


def labels(folder):
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def kill_in_a_save(child, folder):
    """SIGKILL while a checkpoint is half written, two complete ones beside it.

    The process is stopped before it is looked at, so that no save can end in between.
    """
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline:
        time.sleep(0.001)
        assert child.poll() is None, child.communicate()
        if len(labels(folder)) >= 2 and is_saving(folder):
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            if is_saving(folder):
                break
            child.send_signal(signal.SIGCONT)
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert is_saving(folder)


def is_saving(folder):
    return any(folder.glob("*.orbax-checkpoint-tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("door", trainings.TRAININGS)
def test_killed_in_a_save_and_started_again(door, tmp_path):
    straight = start(door, tmp_path / "straight")
    folder = tmp_path / "killed"
    kill_in_a_save(start(door, folder), folder)
    *_, last = labels(folder)
    assert 0 < last < trainings.MICRO_BATCHES
    leave_half_written(folder, last, 1000)
    resumed, straight = result(start(door, folder)), result(straight)
    assert (straight["resumed_from"], resumed["resumed_from"]) == (0, last)
    assert resumed["hashes"] == straight["hashes"]
    assert trainings.MICRO_BATCHES % WINDOW != 0  # the open window was compared too


# -- Other devices


def meshes(count):
    devices = jax.devices()[:count]
    axis_types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), ("data",), axis_types=axis_types, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 4])
def test_saved_on_one_device_restored_on_a_mesh(devices, checkpointer):
    optimizer = optax_accum.accumulate(trainings.OPTIMIZER, WINDOW)
    train_step = optax_accum.make_train_step(trainings.loss_fn, optimizer)

    def init():
        return optax_accum.init_train_state(make_params(), optimizer)

    state = init()
    for position in range(6):
        state, _ = train_step(state, load_micro_batch(position))
    checkpointer.save(6, state)

    mesh = meshes(devices)
    everywhere = jax.NamedSharding(mesh, P())
    restored = checkpointer.load(6, place(jax.eval_shape(init), everywhere))
    assert_all_lie(restored, everywhere)
    for position in range(6, 8):
        batch = lay(load_micro_batch(position), mesh, P("data"))
        restored, _ = train_step(restored, batch)
    assert restored.opt_state.gradient_step == 2
    assert_trained(restored.params, [range(0, 4), range(4, 8)])


@pytest.mark.slow
def test_sharded_parameters_restored_as_replicated(checkpointer):
    mesh = auto_mesh((8,), ("data",))
    training = trainings.make_accumulate()
    specs = {"w": P("data"), "b": P()}
    params = lay(make_params(), mesh, specs)
    optimizer = optax_accum.accumulate(trainings.OPTIMIZER, WINDOW)
    saved = {"params": params, "opt_state": optimizer.init(params)}
    saved = advance(training, saved, 0, 6)
    for tree in (saved["params"], saved["opt_state"].inner_opt_state[0].mu):
        assert tree["w"].sharding.spec == P("data")
    checkpointer.save(6, saved)

    everywhere = jax.NamedSharding(mesh, P())
    restored = checkpointer.load(6, place(training.types(6), everywhere))
    assert_all_lie(restored, everywhere)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    restored = advance(training, restored, 6, 8)
    assert_trained(restored["params"], [range(0, 4), range(4, 8)])


class Windows:
    """Door 3 on so many devices, each of which keeps its own sums."""

    def __init__(self, devices):
        self.mesh = meshes(devices)
        self.add, self.apply = optax_accum.make_window_steps(
            trainings.loss_fn,
            trainings.OPTIMIZER,
            reduce_axes="data",
            mesh=self.mesh,
            donate=False,
        )
        self.state = optax_accum.init_train_state(
            lay(make_params(), self.mesh, P()), trainings.OPTIMIZER
        )

    def fill(self, state, window, positions):
        for position in positions:
            batch = lay(load_micro_batch(position), self.mesh, P("data"))
            window = self.add(state, batch, window)
        return window

    def target(self):
        batch = lay(load_micro_batch(0), self.mesh, P("data"))
        lowered = self.add.lower(self.state, batch, None)
        shardings = lowered.compile().output_shardings
        types = jax.eval_shape(self.add, self.state, batch, None)
        everywhere = jax.NamedSharding(self.mesh, P())
        return {
            "state": place(jax.eval_shape(lambda: self.state), everywhere),
            "window": place(types, shardings),
        }


@pytest.mark.slow
def test_windows_of_devices_restored_on_as_many(checkpointer):
    windows = Windows(4)
    window = windows.fill(windows.state, None, range(2))
    saved = {"state": windows.state, "window": window}
    checkpointer.save_checkpointables(2, saved)
    restored = checkpointer.load_checkpointables(2, windows.target())
    assert_bits_equal(restored, saved)
    closed = [
        windows.apply(s["state"], windows.fill(s["state"], s["window"], range(2, 4)))
        for s in (saved, restored)
    ]
    assert_bits_equal(*closed)
    assert_trained(closed[0][0].params, [range(0, 4)])


@pytest.mark.slow
def test_windows_of_devices_are_refused_by_another_number(checkpointer):
    eight, four = Windows(8), Windows(4)
    window = eight.fill(eight.state, None, range(2))
    saved = {"state": eight.state, "window": window}
    checkpointer.save_checkpointables(2, saved)
    target = four.target()
    of_eight = jax.tree.map(
        lambda type_, placed: place(type_, placed.sharding),
        jax.eval_shape(lambda: window),
        target["window"],
    )
    loaded = checkpointer.load_checkpointables(2, target | {"window": of_eight})
    for_four = "float32\\[8,4\\] at acc_grads.*float32\\[4,4\\] is expected"
    with pytest.raises(ValueError, match=for_four):
        four.fill(loaded["state"], loaded["window"], range(2, 4))

    # The window again, from its beginning.
    state = checkpointer.load_checkpointables(2, {"state": target["state"]})["state"]
    state, _ = four.apply(state, four.fill(state, None, range(4)))
    assert_trained(state.params, [range(0, 4)])


# -- The page


@pytest.mark.slow
def test_the_page():
    page = run_page(DOCS / "checkpoints.md")
    straight = page["init"]()
    for position in range(12):
        straight = page["update"](straight, page["load"](position))
    assert page["first"] == 6 and straight["opt_state"].gradient_step == 3
    assert_bits_equal(page["restored"], straight)
    assert page["on_mesh"]["position"] == 6
    for tree in (page["on_mesh"]["params"], page["on_mesh"]["opt_state"].acc_grads):
        assert tree["w"].sharding == page["sharded"]["w"]

    assert page["now"]["loader"] == {"position": 9, "opened": 8}
    state, window = page["now"]["state"], page["window"]
    for position in range(9, 12):
        window = page["add"](state, page["load"](position), window)
    state, _ = page["apply"](state, window)
    assert_bits_equal(state, page["state"])
