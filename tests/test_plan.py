"""Which micro-batch fits: found before anything runs, and right."""

import dataclasses
import functools
import importlib
import logging
import math
import subprocess
import sys
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bits_equal, auto_mesh
from jax.sharding import NamedSharding, PartitionSpec

import optax_accum
from optax_accum import make_train_step, plan_microbatches
from optax_accum._memory import memory_of
from optax_accum._memory_limit import check_memory_limit
from optax_accum._planner import make_plan
from optax_accum._search import bisect, most_trials, try_all
from optax_accum._split import count_shards, equal_splits
from optax_accum._spread import Spread
from optax_accum._sums import Accumulator
from optax_accum._timing import time_steps

ROWS, POSITIONS, FEATURES, WIDTH = 8, 16, 32, 128
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
PLENTY = "1 TiB"


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def make_params(dtype=jnp.float32):
    return {
        "w1": jnp.full((FEATURES, WIDTH), 0.1, dtype),
        "w2": jnp.full((WIDTH, 1), 0.1, dtype),
    }


def make_state(optimizer=OPTIMIZER, dtype=jnp.float32, **options):
    return optax_accum.init_train_state(make_params(dtype), optimizer, **options)


def make_batch(rows=ROWS):
    return {
        "x": jnp.ones((rows, POSITIONS, FEATURES)),
        "y": jnp.ones((rows, POSITIONS, 1)),
    }


STATE = jax.eval_shape(make_state)
BATCH = jax.eval_shape(make_batch)
PAIR = jax.eval_shape(lambda: make_batch(2))  # two candidates


def plan(limit=PLENTY, state=STATE, batch=BATCH, loss=loss_fn, tx=OPTIMIZER, **options):
    return plan_microbatches(loss, tx, state, batch, memory_limit=limit, **options)


@functools.cache
def full_plan():
    """Of the plain step: all candidates, N = 1, 2, 4 and 8."""
    return plan(exhaustive=True)


def size_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiled_peak(num_microbatches, state=STATE, batch=BATCH, loss=loss_fn, **options):
    """What the compiler says of the step, added up by hand."""
    step = make_train_step(
        loss, OPTIMIZER, num_microbatches=num_microbatches, **options
    )
    said = step.lower(state, batch).compile().memory_analysis()
    fresh = said.output_size_in_bytes - said.alias_size_in_bytes
    return said.argument_size_in_bytes + fresh + said.temp_size_in_bytes


# -- The search, against memory that is made up


class FakeStep:
    """A step that "needs" a given number of bytes and notes that it was compiled."""

    def __init__(self, need, compiled):
        self.need, self.compiled = need, compiled
        self.jaxpr = types.SimpleNamespace(consts=[], eqns=[])

    def trace(self, *args):
        nothing = jax.tree.map(lambda leaf: None, args)
        self.input_shardings = nothing, {}
        return self

    def lower(self):
        return self

    def compile(self):
        self.compiled.append(self.need)
        if self.need is None:
            message = "RESOURCE_EXHAUSTED: Ran out of memory\nand much more"
            raise jax.errors.JaxRuntimeError(message)
        return self

    def memory_analysis(self):
        return types.SimpleNamespace(
            argument_size_in_bytes=0,
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
            temp_size_in_bytes=self.need,
            generated_code_size_in_bytes=0,
        )


EMPTY = optax_accum.TrainState((), (), (), (), ())


def fake_plan(need, rows, limit, *, group_size=1, exhaustive=False):
    """The plan for steps that need ``need(micro-batch size)``, and what was compiled.

    The rows themselves have no entries, and take no memory.
    """
    compiled = []
    made = make_plan(
        "plan_microbatches",
        lambda n: FakeStep(need(rows // n), compiled),
        (EMPTY, np.zeros((rows, 0))),
        {},
        memory_limit=limit,
        group_size=group_size,
        batch_axis=0,
        accumulator=None,
        spread=Spread(),
        exhaustive=exhaustive,
    )
    return made, compiled


def linear(size):
    return 100 + 10 * size


def test_the_largest_microbatch_that_fits_is_chosen():
    """A case of reported planners: 12 rows, 100 + 10 m bytes, at most 150."""
    found, _ = fake_plan(linear, 12, 150)
    assert (found.num_microbatches, found.microbatch_size) == (3, 4)
    assert found.chosen.memory.peak == 140


def test_halving_is_not_all_there_is():
    """What fits up to 12 rows is 12 of 60, and 8 of 64."""
    assert fake_plan(linear, 60, linear(12))[0].microbatch_size == 12
    assert fake_plan(linear, 64, linear(12))[0].microbatch_size == 8


@pytest.mark.parametrize("exhaustive", [False, True])
def test_nothing_fits(exhaustive):
    with pytest.raises(ValueError, match="at least 110 bytes.*got 100 B") as error:
        fake_plan(linear, 12, 100, exhaustive=exhaustive)
    assert "activations 110 B" in str(error.value)
    assert ("exhaustive=True" in str(error.value)) != exhaustive


def test_a_peak_that_is_the_limit_fits():
    assert fake_plan(linear, 12, linear(12))[0].num_microbatches == 1
    assert fake_plan(linear, 12, linear(12) - 1)[0].num_microbatches == 2


def test_the_whole_batch_is_tried_by_itself():
    """It may need less than two halves, which need a sum of gradients."""

    def need(size):
        return 90 if size == 12 else linear(size)

    assert fake_plan(need, 12, 95) == fake_plan(need, 12, 95)
    found, compiled = fake_plan(need, 12, 95)
    assert found.num_microbatches == 1
    assert compiled == [90]


def test_what_the_compiler_refuses_does_not_fit():
    def need(size):
        return None if size > 3 else linear(size)

    found, _ = fake_plan(need, 12, 10**6)
    assert found.num_microbatches == 4
    assert found.candidates[0].fits is False and found.candidates[0].memory is None
    assert found.candidates[0].refusal == "RESOURCE_EXHAUSTED: Ran out of memory"
    assert "refused by the compiler" in str(found)
    with pytest.raises(ValueError, match="refuses even 1 rows: RESOURCE_EXHAUSTED"):
        fake_plan(lambda size: None, 12, 10**6)


def test_another_error_of_the_compiler_is_not_swallowed(monkeypatch):
    def compile(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(FakeStep, "compile", compile)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        fake_plan(linear, 12, 150)


@st.composite
def peaks(draw):
    """Peaks of candidates: of the whole batch anything, then falling or flat."""
    falling = sorted(draw(st.lists(st.integers(1, 9), max_size=40)), reverse=True)
    return [draw(st.integers(1, 9)), *falling]


@hypothesis.given(peaks(), st.integers(1, 9))
def test_bisection_finds_what_trying_all_finds(needs, limit):
    tried = []

    def need(i):
        tried.append(i)
        return needs[i]

    found = bisect(need, len(needs), limit)
    assert len(set(tried)) <= most_trials(bisect, len(needs))
    assert len(set(tried)) <= math.ceil(math.log2(len(needs))) + 2  # what is promised
    assert found == try_all(needs.__getitem__, len(needs), limit)
    if found is not None:
        assert found in tried and (found == 0 or found - 1 in tried)


def test_trying_all_finds_what_bisection_must_miss():
    """Where memory does not fall from one to the next: what `exhaustive` is for."""
    bumpy = [9, 3, 9, 9, 2]
    assert bisect(bumpy.__getitem__, 5, 4) == 4
    assert try_all(bumpy.__getitem__, 5, 4) == 1


@hypothesis.given(st.lists(st.integers(1, 99), min_size=1, max_size=40))
def test_bisection_does_not_give_up_where_needs_rise(rising):
    """As they do where each micro-batch adds to what is reported."""
    needs = [100, *sorted(rising)]
    assert bisect(needs.__getitem__, len(needs), needs[1]) == 1


def test_bisection_does_not_give_up_where_needs_fall_and_rise_again():
    needs = [20, 9, 6, 4, 3, 4, 6, 9, 14]
    assert bisect(needs.__getitem__, 9, 3) == 4
    assert bisect(needs.__getitem__, 9, 2) is None


@pytest.mark.slow
def test_a_report_that_grows_with_n_is_planned_for():
    """With `Stack` there is a number of micro-batches that needs least."""

    def loss(params, batch):
        return loss_fn(params, batch), optax_accum.Stack(jnp.zeros(10_000))

    found = plan(loss=loss, has_aux=True, exhaustive=True)
    peaks = [c.memory.peak for c in found.candidates]
    least = min(peaks)
    assert peaks.index(least) == 1 and peaks[3] > peaks[2] > least  # the rise is real
    assert plan(least, loss=loss, has_aux=True).num_microbatches == 2


def test_exhaustive_compiles_all():
    _, compiled = fake_plan(linear, 12, 150, exhaustive=True)
    assert compiled == [linear(m) for m in (12, 6, 4, 3, 2, 1)]
    _, compiled = fake_plan(linear, 12, 150)
    assert len(compiled) < 6


@pytest.mark.parametrize(
    ("rows", "group_size", "shards", "expected"),
    [
        (12, 1, 1, [1, 2, 3, 4, 6, 12]),
        (12, 4, 1, [1, 3]),
        (24, 1, 4, [1, 2, 3, 6]),
        (24, 2, 4, [1, 3]),
        (7, 1, 1, [1, 7]),
        (8, 1, 8, [1]),
        (6, 1, 4, [1]),  # devices that are not equally loaded to begin with
    ],
)
def test_candidates_leave_every_device_the_same_work(
    rows, group_size, shards, expected
):
    assert equal_splits(rows, group_size, shards) == expected


def test_arrays_that_are_laid_out_in_different_ways():
    """Two parts of one and three of the other: only sixths are parts of both."""
    mesh = auto_mesh((2, 3), ("a", "b"))

    def rows(*axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct((12, 4), jnp.float32, sharding=sharding)

    assert count_shards({"x": rows("a"), "y": rows("b")}, 0) == 6
    assert count_shards({"x": rows(("a", "b")), "y": rows()}, 0) == 6
    assert count_shards({"x": rows(None, "a"), "y": np.ones((12, 4)), "z": 1.0}, 0) == 1
    assert count_shards({"x": rows(None, "a")}, -1) == 2


# -- What is predicted, against what the compiler says


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_peak_is_that_of_the_step_itself(n):
    candidate = next(c for c in full_plan().candidates if c.num_microbatches == n)
    assert candidate.memory.peak == compiled_peak(n)
    assert candidate.microbatch_size == ROWS // n


@pytest.mark.slow
def test_every_option_of_the_step_reaches_it():
    """Each changes the program, and with it the peak."""
    for options in (
        {"donate": False},
        {"unroll": 2},
        {"accumulator_dtype": jnp.bfloat16},
        {"accumulator_dtype": jnp.bfloat16, "compensated": True},
    ):
        _, two = plan(batch=PAIR, exhaustive=True, **options).candidates
        assert two.memory.peak == compiled_peak(2, batch=PAIR, **options), options
        assert two.memory.peak != compiled_peak(2, batch=PAIR), options


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(jax, "new_ref") or jax.__version_info__ < (0, 10, 2),
    reason="in_place needs JAX 0.10.2",
)
def test_in_place_reaches_the_step():
    _, two = plan(batch=PAIR, exhaustive=True, in_place=True).candidates
    assert two.memory.peak == compiled_peak(2, batch=PAIR, in_place=True)


@pytest.mark.slow
def test_what_a_peak_consists_of():
    whole, two, *_ = full_plan().candidates
    assert whole.memory.params == size_of(STATE.params)
    assert whole.memory.opt_state == size_of(STATE.opt_state)
    assert whole.memory.accumulator == 0
    assert two.memory.accumulator == size_of(STATE.params)
    # Beside the batch: the step count, and metrics, which are scalars.
    assert 0 <= whole.memory.rest - size_of(BATCH) < 256
    assert two.memory.activations < whole.memory.activations


def test_no_part_is_negative_where_results_take_the_place_of_temporaries():
    """Without donation the compiler may keep sums where new parameters will be."""
    step = FakeStep(10, []).trace(STATE, BATCH)
    parts = memory_of(step, step, (STATE, BATCH), {}, Accumulator())
    assert (parts.accumulator, parts.activations) == (10, 0)
    assert size_of(STATE.params) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"),
    [
        ({}, 4),
        ({"accumulator_dtype": jnp.bfloat16}, 2),
        ({"accumulator_dtype": jnp.bfloat16, "compensated": True}, 4),
    ],
)
def test_the_accumulator_is_as_wide_as_its_dtype(options, bytes_per_parameter):
    state = jax.eval_shape(lambda: make_state(dtype=jnp.bfloat16))

    def narrow_loss(params, batch):
        return loss_fn(jax.tree.map(lambda p: p.astype(jnp.float32), params), batch)

    found = plan(state=state, batch=PAIR, loss=narrow_loss, exhaustive=True, **options)
    params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert found.candidates[1].memory.accumulator == bytes_per_parameter * params
    assert found.candidates[1].memory.params == 2 * params


@pytest.mark.slow
def test_the_sums_of_an_open_window_are_accumulator():
    optimizer = optax_accum.accumulate(OPTIMIZER, 4)
    state = jax.eval_shape(lambda: make_state(optimizer))
    found = plan(state=state, batch=PAIR, tx=optimizer, exhaustive=True)
    whole, two = found.candidates
    params = size_of(state.params)
    assert whole.memory.accumulator == params
    assert two.memory.accumulator == 2 * params
    assert whole.memory.opt_state == size_of(state.opt_state) - params


def test_what_the_program_does_not_use_takes_memory_all_the_same():
    idle = jax.ShapeDtypeStruct((ROWS, 1000), jnp.float32)
    needed, more = plan(), plan(batch=BATCH | {"idle": idle})
    assert more.chosen.memory.rest - needed.chosen.memory.rest == 4 * ROWS * 1000
    assert compiled_peak(1, batch=BATCH | {"idle": idle}) == compiled_peak(1)


@pytest.mark.slow
def test_what_the_loss_closes_over_takes_memory():
    frozen = jnp.ones((1000, FEATURES))

    def closed(params, batch):
        return loss_fn(params, batch) + jnp.mean((batch["x"] @ frozen.T) ** 2)

    # Also of a program inside the step; and twice is once.
    for loss in (closed, jax.jit(closed), lambda *args: closed(*args) + closed(*args)):
        above = plan(loss=loss).chosen.memory.peak - compiled_peak(1, loss=loss)
        assert 0 <= above - frozen.nbytes < 256


def test_a_whole_batch_may_need_less_than_two_halves():
    """Where the sum of gradients is larger than what the activations shrink by."""
    small = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2, 1, x.shape[-1]), x.dtype), BATCH
    )
    whole, two = plan(exhaustive=True, batch=small).candidates
    assert whole.memory.peak < two.memory.peak
    between = plan(two.memory.peak - 1, batch=small)
    assert between.num_microbatches == 1


@pytest.mark.slow
def test_a_limit_between_two_candidates():
    peaks = [c.memory.peak for c in full_plan().candidates]
    assert peaks == sorted(peaks, reverse=True)  # in this model, from N = 1 on
    for i in range(1, len(peaks)):
        limit = (peaks[i - 1] + peaks[i]) // 2
        found = plan(limit)
        assert found.num_microbatches == 2**i
        assert found.chosen.memory.peak <= limit < found.candidates[i - 1].memory.peak


# -- Nothing runs, nothing is allocated


def test_nothing_is_allocated_or_run():
    ran = []

    def noisy(params, batch):
        jax.debug.callback(lambda: ran.append(1))
        return loss_fn(params, batch)

    before = {id(x) for x in jax.live_arrays()}
    found = plan(loss=noisy)
    jax.effects_barrier()
    assert not ran
    assert {id(x) for x in jax.live_arrays()} <= before
    assert found.num_microbatches == 1


@pytest.mark.slow
def test_arrays_plan_as_their_types_and_stay():
    state, batch = make_state(), make_batch()
    limit = full_plan().candidates[2].memory.peak
    assert plan(limit, state, batch) == plan(limit)
    assert plan(limit, state, jax.tree.map(np.asarray, batch)) == plan(limit)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, batch)))


@pytest.mark.slow
def test_keys_model_state_and_further_arguments():
    def loss(params, batch, scale, *, key, model_state):
        noise = jax.random.normal(key, batch["y"].shape)
        mean = jnp.mean(batch["x"], axis=(0, 1))
        batch = batch | {"y": batch["y"] + scale * noise}
        return loss_fn(params, batch), {"mean": mean + model_state["mean"]}

    options = {"key": jax.random.key(0), "model_state": {"mean": jnp.zeros(FEATURES)}}
    state = jax.eval_shape(lambda: make_state(**options))
    found = plan_microbatches(
        loss, OPTIMIZER, state, BATCH, jnp.float32(2.0), memory_limit=PLENTY
    )
    step = make_train_step(loss, OPTIMIZER)
    said = step.lower(state, BATCH, jnp.float32(2.0)).compile().memory_analysis()
    fresh = said.output_size_in_bytes - said.alias_size_in_bytes
    expected = said.argument_size_in_bytes + fresh + said.temp_size_in_bytes
    assert found.chosen.memory.peak == expected


def test_keywords_of_the_optimizer():
    def init_fn(params):
        return optax.EmptyState()

    def update_fn(updates, state, params=None, *, factor, **extra_args):
        return jax.tree.map(lambda u: -factor * u, updates), state

    tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    state = jax.eval_shape(lambda: make_state(tx))
    found = plan(state=state, tx=tx, extra_args={"factor": jnp.float32(0.1)})
    assert found.num_microbatches == 1
    with pytest.raises(TypeError, match="factor"):
        plan(state=state, tx=tx)


@pytest.mark.slow
def test_processes_come_to_the_same_plan():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import conftest, test_plan;"
        "print(test_plan.plan(300_000))"
    )
    run = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(run, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    )
    assert first == second == f"{plan(300_000)}\n"


# -- Devices


def test_entries_may_share_a_byte():
    nibbles = jax.ShapeDtypeStruct((ROWS, 999), jnp.int4)

    def loss(params, batch):
        return loss_fn(params, batch) + jnp.mean(batch["n"].astype(jnp.float32))

    batch = BATCH | {"n": nibbles}
    assert plan(batch=batch, loss=loss).chosen.memory.peak == compiled_peak(
        1, batch=batch, loss=loss
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_peaks_are_those_of_one_device(kind):
    axis_type = jax.sharding.AxisType[kind]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    replicated = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))

    def placed(tree, sharding):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    state, batch = placed(STATE, replicated), placed(BATCH, by_rows)
    found = plan(state=state, batch=batch)
    assert [c.num_microbatches for c in found.candidates] == [1, 2, 4]
    assert found.chosen.memory.params == size_of(STATE.params)
    assert 0 <= found.chosen.memory.rest - size_of(BATCH) // 2 < 256
    assert found.chosen.memory.peak == compiled_peak(1, state, batch)
    if kind == "Auto":
        w1 = NamedSharding(mesh, PartitionSpec(None, "data"))
        sharded = state._replace(params=state.params | {"w1": None})
        sharded.params["w1"] = placed(STATE.params["w1"], w1)
        found = plan(state=sharded, batch=batch)
        w1_bytes, w2_bytes = map(size_of, STATE.params.values())
        assert found.chosen.memory.params == w1_bytes // 2 + w2_bytes


def test_arrays_on_a_mesh_beside_arrays_that_are_nowhere_yet():
    mesh = auto_mesh((2,), ("data",))
    batch = jax.device_put(make_batch(), NamedSharding(mesh, PartitionSpec("data")))
    found = plan(state=make_state(), batch=batch)
    assert [c.num_microbatches for c in found.candidates] == [1, 2, 4]


# -- The limit


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, 1),
        (np.int64(12), 12),
        ("12GiB", 12 * 2**30),
        ("12 gib", 12 * 2**30),
        ("1.5 KiB", 1536),
        (" 800 MB ", 800_000_000),
        ("2TB", 2 * 10**12),
        ("7 B", 7),
        (0.9, 0.9),
        (1.0, 1.0),
        (np.float32(0.5), 0.5),
        (None, None),
    ],
)
def test_ways_to_say_a_limit(limit, expected):
    found = check_memory_limit("memory_limit", limit)
    assert found == expected and type(found) is type(expected)


@pytest.fixture
def telling_devices(monkeypatch):
    """Two devices that tell their memory, the second one less."""

    class Device:
        def __init__(self, size):
            self.memory_stats = lambda: {"bytes_limit": size}

    devices = [Device(300_000), Device(200_000)]
    monkeypatch.setattr("optax_accum._memory_limit._devices_of", lambda trees: devices)


@pytest.mark.slow
def test_the_device_is_asked(telling_devices):
    assert plan(None).memory_limit == 200_000
    assert plan(0.9).memory_limit == 180_000
    assert plan(250_000).memory_limit == 250_000


def test_several_processes_must_be_told(telling_devices, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert plan(250_000).memory_limit == 250_000
    for limit in (None, 0.9):
        with pytest.raises(ValueError, match="in bytes where there are several proc"):
            plan(limit)


# -- Losses that split themselves


@pytest.mark.slow
def test_a_factory_makes_the_loss_for_each_candidate():
    def factory(n):
        def loss(params, batch):
            parts = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), batch)
            each = jax.checkpoint(lambda part: loss_fn(params, part))
            return jnp.mean(jax.lax.map(each, parts))

        return loss

    found = plan(loss=factory, factory=True, exhaustive=True)
    for candidate in found.candidates[:2]:
        n = candidate.num_microbatches
        assert candidate.memory.peak == compiled_peak(1, loss=factory(n))
        assert candidate.memory.accumulator == 0  # of ours
    assert found.candidates[3].memory.peak < found.candidates[0].memory.peak


# -- What is done with a plan


def test_a_plan_cannot_be_changed():
    found = plan()
    for field in dataclasses.fields(found):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(found, field.name, None)
    assert isinstance(found.candidates, tuple)
    assert hash(found) == hash(plan())


@pytest.mark.slow
def test_the_table_shows_what_was_compiled():
    peaks = [c.memory.peak for c in full_plan().candidates]
    text = str(plan((peaks[0] + peaks[1]) // 2))
    head, _, titles, *lines, _, legend = text.split("\n")
    assert head.startswith("2 micro-batches of 4 rows, limit ")
    assert titles.split()[:4] == ["N", "rows", "peak,", "KiB"]
    assert lines[0].split()[:3] == ["1", "8", f"{peaks[0] / 1024:.2f}"]
    assert lines[0].endswith("too large")
    assert lines[1].endswith("fits, chosen")
    assert lines[-1].split() == ["8", "1", "smaller,", "not", "compiled"]
    assert all(part in legend for part in ("accumulator: ", "activations: ", "rest: "))
    assert all(line == line.rstrip() for line in lines)


def test_the_plot_shows_every_candidate_that_was_compiled(tmp_path):
    found = plan(300_000)
    figure = found.plot()
    (axes,) = figure.axes
    compiled = [c for c in found.candidates if c.memory is not None]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [
        f"{c.num_microbatches} × {c.microbatch_size} rows" for c in compiled
    ]
    ends = [
        max(p.get_x() + p.get_width() for p in bars)
        for bars in zip(
            *(container.patches for container in axes.containers), strict=True
        )
    ]
    np.testing.assert_allclose(ends, [c.memory.peak / 1024 for c in compiled])
    figure.savefig(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5_000


@pytest.mark.slow
def test_time_runs_what_fits():
    peaks = [c.memory.peak for c in full_plan().candidates]
    found = plan((peaks[0] + peaks[1]) // 2)
    assert found.fastest is None
    state = make_state()
    timed = found.time(state, make_batch(), rounds=2)
    assert timed.candidates[0].seconds is None  # it would not fit
    seconds = [c.seconds for c in timed.candidates if c.seconds is not None]
    assert len(seconds) == 3 and min(seconds) > 0
    assert timed.fastest.seconds == min(seconds)
    assert timed.num_microbatches == found.num_microbatches
    assert state.params["w1"].is_deleted()
    assert "seconds" in str(timed) and "fastest" in str(timed)
    assert found.candidates[1].seconds is None


def test_time_compiles_nothing_larger():
    found = plan(full_plan().candidates[-1].memory.peak)
    assert [c.fits for c in found.candidates] == [False, None, False, True]
    timed = found.time(make_state(), make_batch(), rounds=1)
    assert [c.fits for c in timed.candidates] == [False, None, False, True]
    assert timed.fastest.num_microbatches == 8


def test_time_wants_what_was_planned_for():
    found = plan()
    with pytest.raises(ValueError, match=r"types that were planned for.*\[16,"):
        found.time(make_state(), make_batch(16))
    with pytest.raises(ValueError, match=r"rounds.*integer >= 1.*got 0"):
        found.time(make_state(), make_batch(), rounds=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "got"),
    [
        (lambda: (STATE, make_batch()), r"a type, int32\[\]"),
        (lambda: (consumed_state(), make_batch()), "that a step has consumed"),
        (lambda: (make_state(), spread_over_two(make_batch())), None),
    ],
)
def test_time_wants_arrays_that_are_there(given, got):
    found = plan()
    if got is None:
        assert found.time(*given(), rounds=1).fastest
        return
    with pytest.raises(ValueError, match=got):
        found.time(*given())


def consumed_state():
    state = make_state()
    make_train_step(loss_fn, OPTIMIZER)(state, make_batch())
    return state


def spread_over_two(batch):
    sharding = NamedSharding(auto_mesh((2,), ("data",)), PartitionSpec("data"))
    return jax.device_put(batch, sharding)


@pytest.mark.slow
def test_time_wants_what_lies_as_was_planned():
    found = plan(batch=spread_over_two(make_batch()))
    with pytest.raises(
        ValueError, match=r"\[8, 16, 32\] of float32.*not \[4, 16, 32\]"
    ):
        found.time(make_state(), make_batch())
    timed = found.time(make_state(), spread_over_two(make_batch()), rounds=1)
    assert timed.fastest


def test_what_the_first_calls_cost_is_not_timed():
    """A program may be compiled at its first call, and again when the state moved."""
    clock, calls = [0.0], []

    def make(name):
        def step(state, batch):
            calls.append(name)
            clock[0] += 1.0 if calls.count(name) > 2 else 100.0
            return state, None

        return step

    steps = {1: make(1), 2: make(2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optax_accum._timing.time.perf_counter", lambda: clock[0])
        assert time_steps(steps, None, (None,), {}, range(3)) == {1: 1.0, 2: 1.0}
    assert len(calls) == 10


def test_a_limit_far_away_leaves_the_bars_visible():
    (axes,) = plan(PLENTY).plot().axes
    peak = plan().chosen.memory.peak / 1024
    assert axes.get_xlim()[0] == 0 and peak < axes.get_xlim()[1] < 2 * peak
    texts = [text.get_text() for text in axes.texts]
    assert "limit 1 TiB, far to the right" in texts


def test_progress_is_shown_in_a_terminal(monkeypatch, capsys):
    fake_plan(linear, 12, 150)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, a terminal
    fake_plan(linear, 12, 150)
    captured = capsys.readouterr()
    assert "compiling" in captured.err and captured.out == ""


@pytest.mark.parametrize("has_widgets", [True, False])
def test_progress_in_a_notebook_needs_its_widgets(has_widgets, monkeypatch, capsys):
    console = importlib.import_module("rich.console")
    progress = importlib.import_module("rich.progress")
    shown = []

    class Recorder(progress.Progress):
        def __init__(self, *args, **kwargs):
            shown.append(self)
            super().__init__(*args, **kwargs, disable=True)

    monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "Progress", Recorder)
    widgets = None if not has_widgets else sys
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    fake_plan(linear, 12, 150)
    assert bool(shown) == has_widgets


def test_planning_does_without_rich(monkeypatch):
    for module in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, module, None)
    assert fake_plan(linear, 12, 150)[0].num_microbatches == 3
    with pytest.raises(ValueError, match="at least 110 bytes") as error:
        fake_plan(linear, 12, 100)
    assert error.value.__context__ is None  # nothing of what is missing


# -- A step that plans for itself


def limit_for(num_microbatches):
    """A limit that leaves just room for so many micro-batches."""
    peaks = {c.num_microbatches: c.memory.peak for c in full_plan().candidates}
    return peaks[num_microbatches]


@pytest.mark.slow
def test_auto_takes_what_the_plan_says(caplog):
    caplog.set_level(logging.INFO, "optax_accum")
    limit = limit_for(4)
    step = make_train_step(
        loss_fn, OPTIMIZER, num_microbatches="auto", memory_limit=limit
    )
    expected = make_train_step(loss_fn, OPTIMIZER, num_microbatches=4)
    state, same = make_state(), make_state()
    for _ in range(3):
        state, metrics = step(state, make_batch())
        same, expected_metrics = expected(same, make_batch())
        assert_bits_equal((state, metrics), (same, expected_metrics))
    (record,) = caplog.records
    assert str(plan(limit)) in record.getMessage()
    step(state, make_batch(4))  # another shape, another plan
    assert len(caplog.records) == 2
    assert caplog.records[1].getMessage() != record.getMessage()
    step(make_state(), make_batch())  # the first is kept
    assert len(caplog.records) == 2


@pytest.mark.slow
def test_auto_compiles_nothing_that_the_plan_has_compiled():
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    limit = limit_for(4)
    plan(limit, loss=counted)
    once = len(traces)
    step = make_train_step(
        counted, OPTIMIZER, num_microbatches="auto", memory_limit=limit
    )
    state, _ = step(make_state(), make_batch())
    state, _ = step(state, make_batch())
    assert len(traces) == 2 * once


@pytest.mark.slow
def test_auto_has_lower():
    step = make_train_step(
        loss_fn, OPTIMIZER, num_microbatches="auto", memory_limit=limit_for(4)
    )
    expected = make_train_step(loss_fn, OPTIMIZER, num_microbatches=4)
    text = expected.lower(STATE, BATCH).as_text()
    assert step.lower(STATE, BATCH).as_text() == text
    assert step.trace(STATE, batch=BATCH).lower().as_text() == text


def test_auto_keeps_its_plan_when_the_state_moves():
    """The first step may lay the state out anew: on the devices of the batch."""
    mesh = auto_mesh((2,), ("data",))
    batch = jax.device_put(make_batch(), NamedSharding(mesh, PartitionSpec("data")))
    step = make_train_step(
        loss_fn, OPTIMIZER, num_microbatches="auto", memory_limit=PLENTY
    )
    state = make_state()
    for _ in range(3):
        state, _ = step(state, batch)
    assert len(step.plans) == 1
    step(make_state(), make_batch())
    assert len(step.plans) == 2  # another layout of the batch, another plan


def test_auto_plans_once_for_what_is_the_same_to_jit():
    step = make_train_step(
        loss_fn, OPTIMIZER, num_microbatches="auto", memory_limit=PLENTY
    )
    batch = make_batch()
    as_numpy = jax.tree.map(np.asarray, batch)
    as_doubles = jax.tree.map(lambda x: x.astype(np.float64), as_numpy)
    plans = [step.plan(STATE, b) for b in (batch, as_numpy, as_doubles, BATCH)]
    assert all(found is plans[0] for found in plans)


def test_auto_plans_anew_for_another_model_state():
    def loss(params, batch, *, model_state):
        wide = jnp.mean(jnp.tanh(batch["x"] @ model_state["w"]))
        return loss_fn(params, batch) + wide, model_state

    def state(width):
        zeros = {"w": jnp.zeros((FEATURES, width))}
        return jax.eval_shape(lambda: make_state(model_state=zeros))

    step = make_train_step(
        loss, OPTIMIZER, num_microbatches="auto", memory_limit=PLENTY
    )
    small, large = step.plan(state(8), BATCH), step.plan(state(4096), BATCH)
    assert small.chosen.memory.peak < large.chosen.memory.peak


def test_auto_hands_everything_on():
    optimizer = optax_accum.accumulate(optax.sgd(0.1), 3)

    def loss(params, batch, scale):
        return loss_fn(params, batch) * scale, {"scale": scale}

    step = make_train_step(
        loss,
        optimizer,
        num_microbatches="auto",
        memory_limit=PLENTY,
        has_aux=True,
        donate=False,
    )
    state = make_state(optimizer)
    state, metrics = step(state, make_batch(), 2.0, emit=True)
    assert bool(metrics["emitted"]) and float(metrics["aux"]["scale"]) == 2.0
    state, metrics = step(state, make_batch(), 2.0)
    assert not bool(metrics["emitted"])
