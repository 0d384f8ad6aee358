"""docs/loops.md: loaders, ragged ends, and one record for each optimizer step."""

import collections
import contextlib
import io
import struct
import tempfile
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F32_ULP
from pages import DOCS, run_page
from tensorboardX.proto import event_pb2

import optax_accum

WINDOW, STEPS, LAST_ROWS = 32, 14, 11

# Each step's gradient adds up at most 32 rows in another order, in units of its largest
# terms. Momentum 0.9 lets an error count ten times; the loss is near a minimum, so that
# steps do not make it larger.
TOLERANCE = 10 * WINDOW * F32_ULP

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("runs")))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            namespace = run_page(DOCS / "loops.md")
        names = ("add", "apply", "update", "train_step", "padded_step")
        compiled = {name: namespace[name]._cache_size() for name in names}
        return namespace | {"printed": printed.getvalue(), "compiled": compiled}


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def whole_batches(page):
    return [batch for epoch in range(2) for batch in page["epoch_of"](epoch, WINDOW)]


def train_plainly(page, batches):
    """Parameters at the end, and a record for each batch, of Optax's own loop."""
    value_and_grad = jax.jit(jax.value_and_grad(page["loss_fn"]))
    optimizer = optax.sgd(0.05, momentum=0.9)
    params = page["init_params"]()
    opt_state, records = optimizer.init(params), []
    for batch in batches:
        loss, grads = value_and_grad(params, batch)
        flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)])
        norm, rows = np.linalg.norm(flat.astype(np.float64)), len(batch["y"])
        records.append({"loss": float(loss), "grad_norm": norm, "weight": rows})
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, records


@pytest.fixture(scope="module")
def large_batch(page):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return train_plainly(page, whole_batches(page))


def read_events(folder):
    """Scalars by step, from the only file there: length, check, event, check, ..."""
    (path,) = Path(folder).iterdir()
    data, records, at = path.read_bytes(), collections.defaultdict(dict), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        for value in event.summary.value:
            assert value.tag not in records[event.step]
            records[event.step][value.tag] = value.simple_value
        at += 12 + length + 4
    return dict(sorted((step, of) for step, of in records.items() if of))


class Written:
    """Stands for a `SummaryWriter`."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, float(value), step))


def assert_near(actual, expected):
    def check(a, e):
        size = np.max(np.abs(e))
        np.testing.assert_allclose(a, e, rtol=0, atol=TOLERANCE * size)

    jax.tree.map(check, actual, expected)


# -- Rows and parameters


def test_loaders_have_the_same_rows_in_the_same_order(page):
    """And two epochs have not: what ends in a window would not show otherwise."""
    micro = [m["y"] for epoch in page["micro_batches"] for m in epoch]
    whole = [batch["y"] for batch in page["batches"]]
    assert [len(y) for y in micro[24:26]] == [8, 3]
    assert [len(y) for y in whole[5:7]] == [WINDOW, LAST_ROWS]
    np.testing.assert_array_equal(np.concatenate(micro), np.concatenate(whole))
    assert not np.array_equal(whole[0], whole[7])


@pytest.mark.parametrize("name", ["state", "params", "whole_state", "padded_state"])
def test_two_epochs_are_those_of_the_large_batch(page, large_batch, name):
    """At doors 3, 1 and 2, and at door 2 with padding."""
    params, _ = large_batch
    assert_near(page[name] if name == "params" else page[name].params, params)


def run_door_1(page, calls):
    """What the page's `update` leaves behind: parameters, and what was written.

    `calls` are pairs of a micro-batch and whether it closes its window.
    """
    update, params = page["update"], page["init_params"]()
    opt_state, writer = page["tx"].init(params), Written()
    log = page["StepLog"](writer)
    for micro_batch, emit in calls:
        params, opt_state, metrics = update(params, opt_state, micro_batch, emit)
        log(metrics)
    log.close()
    return params, by_step(writer.scalars), opt_state


def by_step(scalars):
    records = collections.defaultdict(dict)
    for name, value, step in scalars:
        assert name not in records[step]
        records[step][name] = value
    return dict(records)


def test_windows_that_go_on_in_the_next_epoch(page):
    """52 micro-batches are 13 windows, and in the seventh meet two epochs."""
    micro_batches = [m for epoch in page["micro_batches"] for m in epoch]
    groups = [micro_batches[i : i + 4] for i in range(0, 52, 4)]
    batches = [
        jax.tree.map(lambda *parts: np.concatenate(parts), *group) for group in groups
    ]
    params, records = train_plainly(page, batches)
    assert [record["weight"] for record in records] == (
        [32] * 6 + [27] + [32] * 5 + [27]
    )
    actual, written, _ = run_door_1(page, [(m, False) for m in micro_batches])
    assert_near(actual, params)
    assert [written[step]["weight"] for step in written] == [
        r["weight"] for r in records
    ]


def test_means_of_micro_batches_that_are_not_weighed_should_fail(page, large_batch):
    """The 3 rows of the short micro-batch would count as 8."""
    tx = optax_accum.accumulate(optax.sgd(0.05, momentum=0.9), 4)
    params = page["init_params"]()
    opt_state, grad = tx.init(params), jax.jit(jax.grad(page["loss_fn"]))
    update = jax.jit(tx.update)
    for epoch in page["micro_batches"]:
        for i, micro_batch in enumerate(epoch, start=1):
            grads = grad(params, micro_batch)
            updates, opt_state = update(grads, opt_state, params, emit=i == len(epoch))
            params = optax.apply_updates(params, updates)
    with pytest.raises(AssertionError):
        assert_near(params, large_batch[0])


# -- Records


@pytest.mark.parametrize("door", [1, 2, 3])
def test_one_record_for_each_optimizer_step(page, large_batch, door):
    _, expected = large_batch
    records = read_events(f"{page['logdir']}/door{door}")
    assert list(records) == list(range(1, STEPS + 1))
    for record, of_batch in zip(records.values(), expected, strict=True):
        assert record["weight"] == of_batch["weight"]
        for name in ("loss", "grad_norm"):
            # Of what parameters are off, too, twice as much at most.
            assert abs(record[name] - of_batch[name]) <= 2 * TOLERANCE * of_batch[name]
        if door != 2:
            assert record["microbatches"] == -(-of_batch["weight"] // 8)
        assert record.get("skipped", 0) == 0


def test_logging_the_last_micro_batch_should_fail(page, large_batch):
    _, expected = large_batch
    last = next(iter(page["micro_batches"]))[3]
    loss = float(page["loss_fn"](page["init_params"](), last))
    assert abs(loss - expected[0]["loss"]) > 0.01 * expected[0]["loss"]


def test_effective_batch_is_that_of_the_window(page):
    """Micro-batches of 2 rows, 4 to a window: 8 rows, and a record for 4 calls."""
    pairs = [jax.tree.map(lambda a: a[:2], m) for m in page["micro_batches"][0]]
    _, written, _ = run_door_1(page, [(pair, False) for pair in pairs[:8]])
    assert {step: record["weight"] for step, record in written.items()} == {1: 8, 2: 8}


@pytest.mark.parametrize("bad", [1, 3])
def test_skipped_micro_batch_is_in_no_record_but_counted(page, bad):
    """Neither within a window nor where it closes one."""
    micro_batches = [page["micro_batches"][0][i] for i in range(4)]
    good = [m for i, m in enumerate(micro_batches) if i != bad]
    micro_batches[bad] = micro_batches[bad] | {"y": micro_batches[bad]["y"] * np.nan}
    calls = [(m, False) for m in micro_batches]
    params, written, opt_state = run_door_1(page, calls)
    rows = jax.tree.map(lambda *parts: np.concatenate(parts), *good)
    expected_params, (expected,) = train_plainly(page, [rows])
    assert_near(params, expected_params)
    (record,) = written.values()
    assert (record["weight"], record["skipped"], record["microbatches"]) == (24, 1, 4)
    for name in ("loss", "grad_norm"):
        assert abs(record[name] - expected[name]) <= TOLERANCE * expected[name]


def test_log_reads_a_call_when_the_next_has_come(page):
    writer = Written()
    log = page["StepLog"](writer, step=7)
    for loss, emitted in ((1.0, True), (2.0, False), (3.0, True)):
        before = list(writer.scalars)
        log({"loss": jnp.asarray(loss), "emitted": jnp.asarray(emitted)})
        if loss == 1.0:
            assert writer.scalars == before == []
    assert writer.scalars == [("loss", 1.0, 8)]
    log.close()
    assert writer.scalars == [("loss", 1.0, 8), ("loss", 3.0, 9)]


def test_memory_in_use_where_the_device_tells(page, monkeypatch):
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 640})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    writer = Written()
    log = page["StepLog"](writer)
    log({"emitted": True})
    log.close()
    assert writer.scalars == [("bytes_in_use", 640.0, 1)]


# -- Programs


def test_number_of_compilations(page):
    """`add` opens, goes on and meets the short micro-batch; the others meet that."""
    compiled = {"add": 3, "apply": 1, "update": 2, "train_step": 2, "padded_step": 1}
    assert page["compiled"] == compiled


def test_bar_prints_nothing_where_nobody_watches(page):
    assert page["printed"] == ""
