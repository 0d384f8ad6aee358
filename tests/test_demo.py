"""The demo keeps what it promises, and the command line finds it."""

import sys

import jax
import numpy as np
import pytest

from optax_accum import __main__, _demo

STEPS = 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "demo.png"


@pytest.fixture(scope="module")
def results(figure):
    with jax.numpy_dtype_promotion("standard"):  # Flax and optax do not pass strict
        return _demo.run_demo(figure, steps=STEPS)


def find(rows, name):
    (row,) = (row for row in rows if row.name == name)
    return row


@pytest.mark.parametrize("name", ["accumulate", "make_train_step"])
def test_parameters_are_those_of_the_full_batch(results, name):
    row = find(results["SGD"], name)
    # A step rounds each parameter, all of them below 2: one ulp, eps, at most. Before,
    # it adds the learning rate, 0.05, times a mean gradient, below 1 in every entry, of
    # up to B * H * W = 2^15 terms. Those in another order differ by sqrt(2^15) * eps.
    eps = np.finfo(np.float32).eps
    assert row.difference <= STEPS * (eps + 0.05 * np.sqrt(2**15) * eps)


def test_every_method_trains(results):
    for rows in results.values():
        for row in rows:
            assert len(row.losses) == STEPS
            assert row.losses[-1] < row.losses[0]


@pytest.mark.parametrize("name", ["accumulate", "make_train_step"])
def test_micro_batches_take_a_fraction_of_the_memory(results, name):
    for optimizer in ("SGD", "AdamW"):
        full_batch = results[optimizer][0]
        # A 16th of the activations, and less than as much again of everything else.
        assert find(results[optimizer], name).temp_bytes < full_batch.temp_bytes / 8


def test_figure_is_a_png(results, figure):
    content = figure.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 20_000  # an empty canvas of this size has 8 kB


def test_every_method_is_in_the_table(results):
    assert {row.name for row in results["SGD"]} == set(_demo.LINES)


def test_command_line_without_a_command_prints_help(capsys):
    assert __main__.main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_command_line_runs_the_demo(monkeypatch, tmp_path):
    outputs = []
    monkeypatch.setattr(_demo, "run_demo", outputs.append)
    assert __main__.main(["demo", "--output", str(tmp_path / "x.png")]) == 0
    assert outputs == [tmp_path / "x.png"]


@pytest.mark.parametrize(
    "module", ["flax", "matplotlib.figure", "rich.console", "sklearn.datasets"]
)
def test_missing_extra_is_one_line_with_the_cure(monkeypatch, capsys, module):
    monkeypatch.delitem(sys.modules, "optax_accum._demo")
    monkeypatch.setitem(sys.modules, module, None)  # importing it now fails
    assert __main__.main(["demo"]) == 1
    message = capsys.readouterr().err
    assert module in message
    assert "pip install 'optax_accum[demo]'" in message
    assert message.count("\n") == 1
