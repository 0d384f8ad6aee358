"""Whether gradients are right on this machine: those in micro-batches, of devices too.

Tolerances are counted roundings, or none.

Letters: ``N`` micro-batches in a batch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_accum._accumulate import accumulate
from optax_accum._collective_report import assert_one_reduction, collective_report
from optax_accum._mean import mean
from optax_accum._ref_traps import check_refs
from optax_accum._state import init_train_state
from optax_accum._terms import Mean, Sum
from optax_accum._train_step import make_train_step
from optax_accum._value_and_grad import value_and_grad
from optax_accum._verify_finding import Difference, Skip

LAYERS, WIDTH, VOCABULARY, LENGTH, ROWS = 2, 32, 48, 8, 32  # of the model of tokens
COUNT = 4  # N, where one is enough
# Exact to scale by, and large: the update shall not drown in the parameters' rounding.
LEARNING_RATE = 1024.0
OPTIMIZER = optax.sgd(LEARNING_RATE)


# -- Embeddings, exactly: https://github.com/openxla/xla/issues/49143


def check_embedding() -> Difference:
    """On one device."""
    return compare_embeddings(VOCABULARY, ROWS)


def check_sharded_embedding() -> Difference | Skip:
    """The vocabulary and the rows over all devices, which the compiler lets meet."""
    mesh = make_mesh()
    if mesh.size == 1:
        return Skip("one device")
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    return compare_embeddings(VOCABULARY * mesh.size, ROWS * mesh.size, sharded)


def compare_embeddings(
    vocabulary: int, rows: int, sharding: NamedSharding | None = None
) -> Difference:
    """Ids that repeat within and across micro-batches; sums that float32 has exactly.

    Args:
      vocabulary: ids that there are.
      rows: of the batch.
      sharding: of the table and of the batch, both along their first axis.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary, (rows, LENGTH), np.int32)
    upstream = rng.integers(-8, 9, (rows, LENGTH, WIDTH)).astype(np.float32) / 16
    expected = np.zeros((vocabulary, WIDTH), np.float32)
    np.add.at(expected, ids, upstream)

    def fun(table, batch):
        return Sum(jnp.sum(table[batch["ids"]] * batch["upstream"]))

    given = np.ones_like(expected), {"ids": ids, "upstream": upstream}
    step = value_and_grad(fun, num_microbatches=COUNT)
    out_shardings = sharding and (None, sharding)
    _, grad = jax.jit(step, out_shardings=out_shardings)(
        *jax.device_put(given, sharding)
    )
    return Difference(float(np.max(np.abs(np.asarray(grad) - expected))))


# -- A model of masked tokens


class Reference(NamedTuple):
    """Loss and gradient of all rows by JAX alone, and what bounds their rounding."""

    params: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]
    expected: Any  # (loss, gradient)
    scale: Any  # the same of every row, added without signs: no cancellation
    allowed: float  # relative to that


def check_tokens(count: int, in_place: bool = False) -> Difference:
    """The gradient in so many micro-batches."""
    ref = make_reference(ROWS)
    step = value_and_grad(loss_fn, num_microbatches=count, in_place=in_place)
    return compare(jax.jit(step)(ref.params, ref.batch), ref)


def check_in_place() -> Difference | Skip:
    """The same, added up in the backward pass."""
    try:
        check_refs("value_and_grad")
    except ValueError as error:
        return Skip(f"not available: {error}")
    return check_tokens(COUNT, in_place=True)


def token_losses(params: Any, batch: Any) -> jax.Array:
    """Of each token, with an embedding that is the head as well."""

    def layer(x, kernel):
        return x + jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(layer, params["embedding"][batch["ids"]], params["layers"])
    logits = x @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def loss_fn(params: Any, batch: Any) -> Mean:
    return mean(token_losses(params, batch), where=batch["mask"])


def make_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    embedding = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
    layers = rng.standard_normal((LAYERS, WIDTH, WIDTH), np.float32)
    return {"embedding": embedding / WIDTH**0.5, "layers": layers / WIDTH**0.5}


def make_batch(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, VOCABULARY, (2, rows, LENGTH), np.int32)
    lengths = rng.integers(1, LENGTH + 1, rows)
    lengths[::8] = 0  # with N = 8, all of a micro-batch
    mask = np.arange(LENGTH) < lengths[:, None]
    return {"ids": tokens[0], "labels": tokens[1], "mask": mask}


@functools.cache
def make_reference(rows: int) -> Reference:
    """What to compare with, for so many rows."""
    params, batch = make_params(), make_batch(rows)
    total = np.float32(np.sum(batch["mask"]))

    def loss(params, part):
        return jnp.sum(token_losses(params, part), where=part["mask"]) / total

    def without_signs(params, batch):
        of_rows = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, batch)
        return jax.tree.map(lambda x: jnp.sum(jnp.abs(x), axis=0), of_rows)

    @jax.jit
    def both(params, batch):
        return jax.value_and_grad(loss)(params, batch), without_signs(params, batch)

    expected, scale = jax.device_get(both(params, batch))
    # The chain of products through the layers, there and back, and through the head,
    # whose sums round as often as they have terms; beside each, a few of `tanh` and
    # such. Last the sum over all tokens. Either side may err by as much.
    there_and_back = 2 * (LAYERS * (WIDTH + 8) + WIDTH + VOCABULARY + 8)
    roundings = there_and_back + rows * LENGTH
    half_ulp = float(np.finfo(np.float32).eps) / 2
    return Reference(params, batch, expected, scale, 2 * roundings * half_ulp)


def compare(found: Any, reference: Reference) -> Difference:
    """Loss and gradient with those of the reference."""
    relative = largest_relative(found, reference.expected, reference.scale)
    return Difference(relative, reference.allowed)


def largest_relative(found: Any, expected: Any, scale: Any) -> float:
    """The largest difference in a leaf, in parts of its scale; NaN if there is one."""

    def relative(x, y, size):
        return np.max(np.abs(np.asarray(x) - np.asarray(y))) / np.max(size)

    parts = jax.tree.leaves(jax.tree.map(relative, found, expected, scale))
    return float(np.max(parts))


# -- Narrow parameters


def check_bfloat16() -> Difference:
    """256, then ones: in bfloat16, 256 + 1 is 256, and would stay it."""
    x = np.ones((65, WIDTH), np.float32)
    x[0] = 256
    expected = np.sum(x, axis=0)  # 320, which bfloat16 has

    def fun(w, x):
        return Sum(jnp.sum(x @ w))

    step = jax.jit(value_and_grad(fun, num_microbatches=len(x)))
    _, grad = step(jnp.ones(WIDTH, jnp.bfloat16), jnp.asarray(x, jnp.bfloat16))
    return Difference(float(np.max(np.abs(np.asarray(grad, np.float32) - expected))))


# -- Several devices


def make_mesh() -> Mesh:
    """All devices of this process, on one axis."""
    devices = jax.local_devices()
    auto = (AxisType.Auto,)
    return jax.make_mesh((len(devices),), ("data",), axis_types=auto, devices=devices)


def place(mesh: Mesh, params: Any, batch: Any) -> tuple[Any, Any]:
    """`params` on all devices, and of `batch` to each its rows."""
    whole, sharded = PartitionSpec(), PartitionSpec("data")
    return (
        jax.device_put(params, NamedSharding(mesh, whole)),
        jax.device_put(batch, NamedSharding(mesh, sharded)),
    )


def check_reduce_axes() -> Difference | Skip:
    """The gradient of rows that devices share, and that of one device."""
    mesh = make_mesh()
    if mesh.size == 1:
        return Skip("one device")
    ref = make_reference(2 * COUNT * mesh.size)
    step = value_and_grad(
        loss_fn, num_microbatches=COUNT, reduce_axes="data", mesh=mesh
    )
    return compare(jax.jit(step)(*place(mesh, ref.params, ref.batch)), ref)


def check_one_reduction() -> Difference | Skip:
    """How many reductions are in the loop; then, that each gradient has its one."""
    mesh = make_mesh()
    if mesh.size == 1:
        return Skip("one device")
    step = make_train_step(
        loss_fn, OPTIMIZER, num_microbatches=COUNT, reduce_axes="data", mesh=mesh
    )
    rows = 2 * COUNT * mesh.size
    params, batch = place(mesh, make_params(), make_batch(rows))
    compiled = step.lower(init_train_state(params, OPTIMIZER), batch).compile()
    report = collective_report(compiled)
    inside, outside = report.parameter_sized_inside, report.parameter_sized_outside
    if not inside:
        assert_one_reduction(compiled, devices=mesh.size)
    return Difference(len(inside), detail=f"{len(outside)} after the loop, inside it ")


# -- Two doors


def check_doors() -> Difference:
    """A window of `accumulate` and a step of `make_train_step`, of the same rows."""
    ref = make_reference(ROWS)
    params = jax.device_put(ref.params)
    step = make_train_step(loss_fn, OPTIMIZER, num_microbatches=COUNT, donate=False)
    after, _ = step(init_train_state(params, OPTIMIZER), ref.batch)

    window = accumulate(OPTIMIZER, every_k=COUNT)

    @jax.jit
    def call(params, opt_state, rows):
        grads = jax.grad(lambda p: loss_fn(p, rows).value)(params)
        weight = jnp.sum(rows["mask"]).astype(jnp.float32)
        updates, opt_state = window.update(grads, opt_state, params, weight=weight)
        return optax.apply_updates(params, updates), opt_state

    opt_state = window.init(params)
    for i in range(COUNT):
        rows = {name: array[i::COUNT] for name, array in ref.batch.items()}
        params, opt_state = call(params, opt_state, rows)
    scale = jax.tree.map(
        lambda p, g: np.max(np.abs(p)) + LEARNING_RATE * np.max(g),
        ref.params,
        ref.scale[1],
    )
    return Difference(largest_relative(params, after.params, scale), ref.allowed)
