"""``python -m optax_accum verify``: its checks pass here, and each of them can fail."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_accum
from optax_accum import __main__, _verify, _verify_gradients, _verify_memory
from optax_accum._verify_finding import Check, Difference, Skip, render, run_check

CHECKS = {check.name: check for check in _verify.make_checks()}
OK = Check("right", "one and one", lambda: Difference(0.5, 1))
WRONG = Check("wrong", "one and two", lambda: Difference(2, 1))
NONE = Check("none", "nothing and nothing", lambda: Skip("one device"))


def fail():
    raise RuntimeError("the first line\nthe second line")


RAISES = Check("raises", "one and three", fail)


def run_with(monkeypatch, capsys, checks, *arguments):
    """Status and output of the command, of these checks alone."""
    monkeypatch.setattr(_verify, "make_checks", lambda: checks)
    status = __main__.main(["verify", *arguments])
    return status, capsys.readouterr().out


# -- What is printed, and the exit status


def test_a_line_for_each_check_then_the_machine_and_a_summary(monkeypatch, capsys):
    status, out = run_with(monkeypatch, capsys, [OK, NONE])
    lines = out.splitlines()
    assert status == 0
    assert lines[:3] == [
        "right  one and one: 0.5 (at most 1): ok",
        "none   nothing and nothing: skipped: one device",
        "",
    ]
    assert f"jax {jax.__version__}, " in lines[3]
    assert lines[4] == "backend cpu, devices: 8 x cpu"
    assert lines[5].startswith("1 ok, 0 FAILED, 1 skipped, in ")


@pytest.mark.parametrize("bad", [WRONG, RAISES])
def test_one_failure_makes_the_exit_status_1(monkeypatch, capsys, bad):
    status, out = run_with(monkeypatch, capsys, [OK, bad, NONE])
    assert status == 1
    assert "\n1 ok, 1 FAILED, 1 skipped, in " in out


def test_what_raises_is_shown_and_counted_and_the_others_still_run(monkeypatch, capsys):
    _, out = run_with(monkeypatch, capsys, [RAISES, OK])
    assert out.startswith(
        "raises  one and three: FAILED: RuntimeError: the first line\n"
        "right   one and one: 0.5 (at most 1): ok\n"
    )
    assert "Traceback" not in out and "the second line" not in out


def test_traceback(monkeypatch, capsys):
    _, out = run_with(monkeypatch, capsys, [RAISES], "--traceback")
    assert "Traceback (most recent call last)" in out
    assert "in fail\n" in out and "the second line" in out


def test_nan_fails_and_an_error_without_a_message_is_named():
    nan = Check("nan", "", lambda: Difference(math.nan, 1))
    assert run_check(nan).outcome == "FAILED"

    def stop():
        raise NotImplementedError

    assert run_check(Check("stop", "", stop)).outcome == "FAILED: NotImplementedError"


def test_other_commands_do_not_import_it(monkeypatch, capsys):
    names = [name for name in sys.modules if name.startswith("optax_accum._verify")]
    assert names
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    assert __main__.main([]) == 0
    assert "verify" in capsys.readouterr().out
    assert not any(name in sys.modules for name in names)


# -- How many CPU devices there are


def test_a_number_of_devices_that_was_said_is_kept(monkeypatch):
    def update(*args):
        raise AssertionError(args)

    monkeypatch.setattr(jax.config, "update", update)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    _verify.make_cpu_devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(AssertionError):  # so it would be seen
        _verify.make_cpu_devices()


def test_devices_that_there_are_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    _verify.make_cpu_devices()
    assert jax.device_count() == 8
    assert jax.config.values["jax_num_cpu_devices"] == -1


# -- Gradients: right, and then broken


QUICK = ("embedding", "sharded embedding", "masked tokens, N = 4", "bfloat16")
QUICK += ("one reduction",)
SLOW = [n for n in CHECKS if n not in QUICK and not n.startswith("memory")]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *map(slow, SLOW)])
def test_passes(name):
    finding = run_check(CHECKS[name])
    is_missing = name == "in place" and jax.__version_info__ < (0, 10, 2)
    assert finding.word == ("skipped" if is_missing else "ok"), finding.trace


def losing_rows(fun, *, num_microbatches, **options):
    """A gradient from which one row of each micro-batch is missing."""
    step = optax_accum.value_and_grad(fun, num_microbatches=num_microbatches, **options)

    def value_and_grad(params, batch):
        return step(params, jax.tree.map(lambda x: x[num_microbatches:], batch))

    return value_and_grad


def slightly_off(fun, **options):
    """A gradient that is a 5000th too large."""
    step = optax_accum.value_and_grad(fun, **options)

    def value_and_grad(params, batch):
        value, grads = step(params, batch)
        return value, jax.tree.map(lambda g: g * 1.0002, grads)

    return value_and_grad


def narrow(fun, **options):
    """Sums in bfloat16."""
    return optax_accum.value_and_grad(fun, accumulator_dtype=jnp.bfloat16, **options)


def mean_of_means(x, where):
    return jnp.mean(x, where=where)


def without_weights(optimizer, every_k):
    """A window in which each call counts the same, whatever its tokens."""
    window = optax_accum.accumulate(optimizer, every_k)

    def update(grads, state, params, weight):
        return window.update(grads, state, params)

    return optax.GradientTransformationExtraArgs(window.init, update)


def left_to_the_compiler(loss_fn, optimizer, **options):
    """A step whose devices exchange gradients in the loop."""
    count = options["num_microbatches"]
    return optax_accum.make_train_step(loss_fn, optimizer, num_microbatches=count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attribute", "broken"),
    [
        ("embedding", "value_and_grad", losing_rows),
        ("sharded embedding", "value_and_grad", slightly_off),
        ("masked tokens, N = 4", "mean", mean_of_means),
        slow("masked tokens, N = 4", "value_and_grad", losing_rows),
        slow("masked tokens, N = 8", "value_and_grad", slightly_off),
        ("bfloat16", "value_and_grad", narrow),
        slow("reduce_axes", "value_and_grad", slightly_off),
        ("one reduction", "make_train_step", left_to_the_compiler),
        slow("doors 1 and 2", "accumulate", without_weights),
    ],
)
def test_fails_where_something_is_broken(monkeypatch, capsys, name, attribute, broken):
    monkeypatch.setattr(_verify_gradients, attribute, broken)
    status, out = run_with(monkeypatch, capsys, [CHECKS[name]])
    assert status == 1
    # By its figure, and not because what is broken here raises.
    assert out.splitlines()[0].endswith("): FAILED")


@pytest.mark.slow
def test_fails_where_nothing_is_reduced(monkeypatch, capsys):
    def place(mesh, params, batch):
        return jax.device_put((params, batch), jax.NamedSharding(mesh, jax.P()))

    monkeypatch.setattr(_verify_gradients, "make_train_step", left_to_the_compiler)
    monkeypatch.setattr(_verify_gradients, "place", place)
    status, out = run_with(monkeypatch, capsys, [CHECKS["one reduction"]])
    assert status == 1
    assert "FAILED: AssertionError: `compiled` must reduce each" in out
    assert "nothing reduced" in out


def test_in_place_says_where_it_is_not_available(monkeypatch):
    def check_refs(caller):
        raise ValueError("must run on another JAX")

    monkeypatch.setattr(_verify_gradients, "check_refs", check_refs)
    finding = run_check(CHECKS["in place"])
    assert finding.outcome == "skipped: not available: must run on another JAX"


@pytest.mark.parametrize("name", ["sharded embedding", "reduce_axes", "one reduction"])
def test_one_device_has_nothing_to_reduce(monkeypatch, name):
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    monkeypatch.setattr(_verify_gradients, "make_mesh", lambda: one)
    assert run_check(CHECKS[name]).outcome == "skipped: one device"


# -- Memory


@pytest.mark.parametrize(
    ("predicted", "measured", "outcome"),
    [
        (124e6, 100e6, "ok"),
        (125e6, 100e6, "FAILED"),
        (75e6, 100e6, "FAILED"),
        (1050e6, 1000e6, "ok"),
        (1051e6, 1000e6, "FAILED"),
        (100e6, "no stats", "skipped: no stats"),
    ],
)
def test_memory_is_compared(monkeypatch, predicted, measured, outcome):
    monkeypatch.setattr(_verify_memory, "predict_peak", lambda count: predicted)
    monkeypatch.setattr(_verify_memory, "measure_peak", lambda count: measured)
    finding = run_check(CHECKS["memory, N = 4"])
    assert finding.outcome == outcome
    if outcome == "ok":
        assert "MB predicted, " in render(finding, 0)


def give_device(monkeypatch, **attributes):
    device = SimpleNamespace(device_kind="Abacus", **attributes)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def test_where_memory_cannot_be_seen(monkeypatch, tmp_path):
    give_device(monkeypatch, platform="abacus", memory_stats=lambda: None)
    assert _verify_memory.measure_peak(4) == "Abacus does not tell its memory"
    give_device(monkeypatch, platform="cpu", memory_stats=lambda: None)
    monkeypatch.setattr(_verify_memory, "STATUS", tmp_path / "status")
    assert "status a process does not know" in _verify_memory.measure_peak(4)


@pytest.mark.parametrize(
    ("last", "expected"), [(900, 800), (500, "the process had needed more before")]
)
def test_what_a_device_tells(monkeypatch, last, expected):
    """In use before the arguments 100, after them 150; the highest before them 500."""
    told = [(100, 500), (150, 500), (100, last)]
    stats = [{"bytes_in_use": now, "peak_bytes_in_use": top} for now, top in told]
    answers = iter([stats[0], *stats])  # the first only says that there are any
    give_device(monkeypatch, platform="gpu", memory_stats=lambda: next(answers))
    monkeypatch.setattr(_verify_memory, "make_arguments", lambda rows: (rows,))
    monkeypatch.setattr(_verify_memory, "_compile", lambda count, rows: jnp.asarray)
    assert _verify_memory.measure_peak(4) == expected


@pytest.mark.slow
def test_a_process_that_ends_badly_is_an_error():
    with pytest.raises(RuntimeError, match="ended badly: ValueError: .*got 0"):
        _verify_memory.measure_peak(0)


# -- The whole command


def run_command(**environment):
    """Output and status in a process of its own."""
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "optax_accum", "verify", "--traceback"],
        env=inherited | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout, done.returncode


@pytest.mark.slow
def test_the_command_makes_four_devices():
    out, status = run_command()
    assert status == 0, out
    assert "devices: 4 x cpu\n" in out and ", 0 FAILED, " in out
    assert out.count("MB predicted") == 2
    assert "one device" not in out


@pytest.mark.slow
def test_the_command_takes_the_devices_that_were_forced():
    flag = "--xla_force_host_platform_device_count=1"
    out, status = run_command(XLA_FLAGS=flag)
    assert status == 0, out
    assert "devices: 1 x cpu\n" in out
    assert out.count(": skipped: one device\n") == 3
