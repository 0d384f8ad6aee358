"""Oracles, in NumPy or with the bare optimizer, and what several tests feed."""

import collections

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
from losses import normal

import optax_accum

# One rounding to nearest in float32, relative.
F32_ULP = 2.0**-23


def model_updates(calls, every_k, on_skip="microbatch"):
    """What `accumulate(sgd(1.0), every_k)` must emit, call by call.

    Args:
      calls: a list of (gradient, weight, whether to skip, whether to emit).
      every_k: maps the gradient step to the calls in a window.
      on_skip: as in `accumulate`.
    """
    total = weight = 0.0
    mini_step = gradient_step = 0
    dropped, updates = False, []
    for gradient, call_weight, skip, emit in calls:
        if not skip and call_weight > 0:
            total, weight = total + call_weight * gradient, weight + call_weight
        dropped = dropped or (skip and on_skip == "window")
        counted = not (skip and on_skip == "ignore")
        mini_step += counted
        updates.append(0.0)
        if (counted and mini_step >= every_k(gradient_step)) or emit:
            if weight > 0 and not dropped:
                updates[-1], gradient_step = -total / weight, gradient_step + 1
            total, weight, mini_step, dropped = 0.0, 0.0, 0, False
    return updates


def feed(tx, grads, params=0.0, **each):
    """The updates that `tx` emits for `grads` in order, and its last state.

    `each` holds lists of extra arguments, one for each call.
    """
    params = jax.tree.map(jnp.asarray, params)
    state = tx.init(params)
    updates = []
    for i, grad in enumerate(grads):
        extra = {name: values[i] for name, values in each.items()}
        update, state = tx.update(
            jax.tree.map(jnp.asarray, grad), state, params, **extra
        )
        updates.append(update)
    return updates, state


def run_bare(inner, grads, params, **each):
    """Updates of an optax optimizer alone, which mixes dtypes as it likes."""
    with jax.numpy_dtype_promotion("standard"):
        return feed(inner, grads, params, **each)


def auto_mesh(shape, names):
    axis_types = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, axis_types=axis_types)


def explicit_mesh(shape, names):
    axis_types = (jax.sharding.AxisType.Explicit,) * len(names)
    return jax.make_mesh(shape, names, axis_types=axis_types)


def lay(tree, mesh, specs):
    """`tree` on the devices of `mesh`, by a spec for all of it or for every leaf."""
    specs = jax.tree.broadcast(specs, tree)
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    return jax.device_put(tree, shardings)


def types(tree):
    """Everything that makes a scan carry or a jit cache key differ."""
    leaves = jax.tree.map(jnp.asarray, jax.tree.leaves(tree))
    return jax.tree.structure(tree), [jax.typeof(leaf) for leaf in leaves]


def assert_bits_equal(actual, desired):
    """Equal to the last bit, minus zero and NaN payloads included."""
    assert types(actual) == types(desired)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def sum_by_hand(loss_fn, params, batch, num_microbatches):
    """Losses and summed gradients in a plain scan, as everybody writes it."""
    microbatches = jax.tree.map(
        lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch
    )

    def body(sums, microbatch):
        loss, grads = jax.value_and_grad(loss_fn)(params, microbatch)
        return jax.tree.map(jnp.add, sums, grads), loss

    sums, losses = jax.lax.scan(
        body, jax.tree.map(jnp.zeros_like, params), microbatches
    )
    return losses, sums


def temporary_bytes(step, *args):
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


def recorder(names=()):
    """An inner optimizer whose state is what it was last given."""

    def init_fn(params):
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        return {"grads": zeros, "steps": jnp.zeros((), jnp.int32)} | {
            name: jnp.zeros(()) for name in names
        }

    def update_fn(updates, state, params=None, **extra_args):
        del params
        seen = {name: jnp.asarray(extra_args[name], jnp.float32) for name in names}
        new = {"grads": updates, "steps": state["steps"] + 1}
        return jax.tree.map(jnp.negative, updates), new | seen

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def counter(evaluations):
    """A transformation that counts in a list how often it runs, at run time."""

    def update_fn(updates, state, params=None):
        del params
        jax.debug.callback(lambda: evaluations.append(1))
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def count_primitives(fun, *args):
    """How often each primitive stands in the jaxpr of `fun`, inner ones included."""
    counts = collections.Counter()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            inner = jax.tree.leaves(eqn.params, is_leaf=_is_program)
            programs = [p for p in inner if _is_program(p)]
            if eqn.primitive.name != "jit":
                counts[eqn.primitive.name] += 1
            for program in programs:
                visit(getattr(program, "jaxpr", program))

    visit(jax.make_jaxpr(fun)(*args).jaxpr)
    return counts


def _is_program(x):
    return isinstance(x, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr)


def make_origin():
    """What made-up results of a benchmark say that they were made by."""
    return {
        "date": "2030-01-02",
        "commit": None,
        "hardware": {
            "platform": "cpu",
            "device": "cpu",
            "cpu_count": 2,
            "cpu_model": "Abacus",
        },
        "versions": {"python": "3.11", "jax": "0.9"},
    }


def assert_every_microbatch_has_dropout_of_its_own(loss_fn):
    """On rows that are all alike; `loss_fn` reports its losses as a `Stack`."""
    optimizer = optax.sgd(0.0)
    params = {"w": normal(0, 64)}
    state = optax_accum.init_train_state(params, optimizer, key=jax.random.key(1))
    train_step = optax_accum.make_train_step(
        loss_fn, optimizer, num_microbatches=4, has_aux=True, donate=False
    )
    second, metrics = train_step(state, jnp.ones((8, 64)))
    _, again = train_step(state, jnp.ones((8, 64)))
    _, later = train_step(second, jnp.ones((8, 64)))
    assert_bits_equal(metrics, again)
    losses = np.concatenate([metrics["aux"], later["aux"]])
    assert len(np.unique(losses)) == 8
