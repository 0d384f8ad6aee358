"""What is refused of plans, as in test_errors.py."""

import jax
import jax.numpy as jnp
import optax

import optax_accum
from optax_accum import make_train_step, plan_microbatches

SGD = optax.sgd(0.1)
W = jax.ShapeDtypeStruct((3,), jnp.float32)
STATE = jax.eval_shape(lambda: optax_accum.init_train_state(jnp.zeros(3), SGD))
BATCH = jax.ShapeDtypeStruct((6, 3), jnp.float32)


def loss_fn(w, x):
    return jnp.mean(x @ w)


def whole_only(w, x):
    """A batch size that is written into the model."""
    return jnp.mean(jnp.reshape(x, (6, 3)) @ w)


def plan(limit="1GiB", state=STATE, batch=BATCH, loss=loss_fn, tx=SGD, **options):
    return plan_microbatches(loss, tx, state, batch, memory_limit=limit, **options)


def auto(**options):
    return make_train_step(loss_fn, SGD, num_microbatches="auto", **options)


def step_in_jit(**options):
    step = make_train_step(loss_fn, SGD, **options)
    return jax.jit(step).lower(STATE, BATCH)


def bad_limit(limit, error=ValueError, got=None, good="7 MB"):
    parts = [r"memory_limit=", "bytes > 0", f"got {got or repr(limit)}"]
    return error, parts, lambda: plan(limit), lambda: plan(good)


CASES = {
    "a limit of 0": bad_limit(0),
    "a negative limit": bad_limit(-1),
    "a negative limit in words": bad_limit("-1 GB"),
    "a limit of nothing in words": bad_limit("0 GiB"),
    "a limit without unit": bad_limit("12", good="12 MB"),
    "a limit of another unit": bad_limit("12 parsecs"),
    "a limit that is no text": bad_limit(""),
    "a fraction above 1": bad_limit(1.5),
    "a fraction of 0": bad_limit(0.0),
    "bytes as a float": (
        ValueError,
        ["memory_limit", r"got 12000000.0; for bytes write 12000000\."],
        lambda: plan(12e6),
        lambda: plan(int(12e6)),
    ),
    "a limit that is no number": bad_limit(float("nan"), got="nan"),
    "a limit without end": bad_limit(float("inf"), got="inf"),
    "a limit that is a bool": bad_limit(True, TypeError),
    "a limit that is a list": bad_limit([], TypeError, r"\[\]"),
    "no limit where the device tells none": (
        ValueError,
        ["memory_limit", "does not tell", "got None", "(?i)cpu"],
        lambda: plan(None),
        lambda: plan("1 GB"),
    ),
    "a share of what the device does not tell": (
        ValueError,
        ["memory_limit", "does not tell", "fraction 0.9"],
        lambda: plan(0.9),
        lambda: plan("1 GB"),
    ),
    "nothing fits": (
        ValueError,
        ["plan_microbatches", "at least", "smallest peak", "got 10 B", "help"],
        lambda: plan(10),
        lambda: plan(10**6),
    ),
    "a batch without rows": (
        ValueError,
        ["plan_microbatches", "batch with rows", "got 0"],
        lambda: plan(batch=jax.ShapeDtypeStruct((0, 3), jnp.float32)),
        lambda: plan(),
    ),
    "a batch without arrays": (
        ValueError,
        ["plan_microbatches", "array to split"],
        lambda: plan(batch={"scale": 2.0}),
        lambda: plan(),
    ),
    "a loss that does not trace": (
        ValueError,
        ["plan_microbatches", "can trace", "got TypeError", r"float32\[6,4\]"],
        lambda: plan(batch=jax.ShapeDtypeStruct((6, 4), jnp.float32)),
        lambda: plan(),
    ),
    "a loss that does not trace with fewer rows": (
        ValueError,
        ["plan_microbatches", "can trace", "got TypeError", r"float32\[3,3\]"],
        lambda: plan(loss=whole_only, exhaustive=True),
        lambda: plan(loss=whole_only),
    ),
    "a loss that is none": (
        TypeError,
        ["plan_microbatches", "function", "got 3"],
        lambda: plan(loss=3),
        lambda: plan(loss=loss_fn),
    ),
    "a factory that makes no loss": (
        TypeError,
        [r"loss_fn\(N\)", "function", "got 1"],
        lambda: plan(loss=lambda n: n, factory=True),
        lambda: plan(loss=lambda n: loss_fn, factory=True),
    ),
    "groups that do not fit into the batch": (
        ValueError,
        ["group_size", "got 4 for 6"],
        lambda: plan(group_size=4),
        lambda: plan(group_size=3),
    ),
    "a plan for groups of no rows": (
        ValueError,
        ["plan_microbatches", "group_size", "integer >= 1", "got 0"],
        lambda: plan(group_size=0),
        lambda: plan(group_size=2),
    ),
    "a plan for no axis": (
        TypeError,
        ["plan_microbatches", "batch_axis", "integer", "got 0.5"],
        lambda: plan(batch_axis=0.5),
        lambda: plan(batch_axis=-2),
    ),
    "a plan for a loop that is unrolled backwards": (
        ValueError,
        ["plan_microbatches", "unroll", "integer >= 1", "got -1"],
        lambda: plan(unroll=-1),
        lambda: plan(unroll=2),
    ),
    "keywords that are no dict": (
        TypeError,
        ["plan_microbatches", "extra_args", "dict", "got 3"],
        lambda: plan(extra_args=3),
        lambda: plan(extra_args={}),
    ),
    "keywords that are arguments": (
        TypeError,
        ["plan_microbatches", "extra_args", r"got \['state'\]", "of their own"],
        lambda: plan(extra_args={"state": STATE}),
        lambda: plan(extra_args=None),
    ),
    "a limit above all bounds": bad_limit("9" * 400 + "GB", got="str"),
    "more bytes than can be counted": bad_limit(10**400, got="int32"),
    "a plan in a trace": (
        ValueError,
        ["plan_microbatches", "outside of `jit`", r"got float32\[6,3\]"],
        lambda: jax.jit(lambda batch: plan(batch=batch).memory_limit)(jnp.ones((6, 3))),
        lambda: jax.jit(lambda: plan().memory_limit)(),
    ),
    "a state of types": (
        TypeError,
        ["init_train_state", "arrays", r"float32\[3\]", "jax.eval_shape"],
        lambda: optax_accum.init_train_state(W, SGD),
        lambda: jax.eval_shape(lambda w: optax_accum.init_train_state(w, SGD), W),
    ),
    "a plan with a state that is none": (
        TypeError,
        ["plan_microbatches", "TrainState", "got ShapeDtypeStruct"],
        lambda: plan(state=W),
        lambda: plan(),
    ),
    "a plan with a state of another optimizer": (
        ValueError,
        ["plan_microbatches", "its optimizer made", "opt_state"],
        lambda: plan(tx=optax.adam(0.1)),
        lambda: plan(tx=optax.sgd(0.3)),
    ),
    "a plan without an optimizer": (
        TypeError,
        ["plan_microbatches", "gradient transformation", "got 0.1"],
        lambda: plan(tx=0.1),
        lambda: plan(),
    ),
    "a limit without auto": (
        ValueError,
        ["memory_limit", "'auto'", "got '1 GB'"],
        lambda: make_train_step(loss_fn, SGD, memory_limit="1 GB"),
        lambda: auto(memory_limit="1 GB"),
    ),
    "a bad limit for auto": (
        ValueError,
        ["make_train_step", "memory_limit", "got '1'"],
        lambda: auto(memory_limit="1"),
        lambda: auto(memory_limit=1),
    ),
    "auto and a size": (
        ValueError,
        ["'auto'", "microbatch_size", "got 4"],
        lambda: auto(microbatch_size=4),
        lambda: auto(),
    ),
    "another word than auto": (
        TypeError,
        ["num_microbatches", "integer >= 1", "got 'Auto'"],
        lambda: make_train_step(loss_fn, SGD, num_microbatches="Auto"),
        lambda: auto(),
    ),
    "a bad option beside auto": (
        ValueError,
        ["group_size", "integer >= 1", "got 0"],
        lambda: auto(group_size=0),
        lambda: auto(group_size=2),
    ),
    "auto in a trace": (
        ValueError,
        ["make_train_step", "outside of `jit`", "plan_microbatches"],
        lambda: step_in_jit(num_microbatches="auto", memory_limit="1 GB"),
        lambda: step_in_jit(num_microbatches=2),
    ),
}
