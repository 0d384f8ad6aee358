"""Denominators: never counted for one term, counted for nothing for several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import temporary_bytes
from losses import ROWS, normal

import optax_accum
from optax_accum import Sum, mean

LENGTH, VOCABULARY, WIDTH, LAYERS = 16, 64, 32, 3


def language_model(form):
    """Losses and balance of a language model: ``(params, batch) -> (tokens, tokens)``.

    Args:
      form: ``"unrolled"``, or ``"scanned"`` for layers in a scan under remat.
    """

    def layer(hidden, weights):
        return hidden + jnp.tanh(hidden @ weights[0]) @ weights[1]

    def apply(params, batch):
        hidden = params["embedding"][batch["tokens"]]
        weights = params["up"], params["down"]
        if form == "scanned":
            step = jax.checkpoint(lambda hidden, w: (layer(hidden, w), None))
            hidden, _ = jax.lax.scan(step, hidden, weights)
        else:
            for up, down in zip(*weights, strict=True):
                hidden = layer(hidden, (up, down))
        log_probabilities = jax.nn.log_softmax(hidden @ params["embedding"].T)
        labels = batch["labels"][..., None]
        losses = -jnp.take_along_axis(log_probabilities, labels, axis=-1)[..., 0]
        balance = jnp.sum(jax.nn.softmax(hidden @ params["gate"]) ** 2, axis=-1)
        return losses, balance

    return apply


@pytest.fixture
def params():
    return {
        "embedding": normal(0, VOCABULARY, WIDTH),
        "up": normal(1, LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(2, LAYERS, 4 * WIDTH, WIDTH),
        "gate": normal(3, WIDTH, 4),
    }


@pytest.fixture
def batch():
    rng = np.random.default_rng(4)
    shape = ROWS, LENGTH
    return {
        "tokens": jnp.asarray(rng.integers(0, VOCABULARY, shape), jnp.int32),
        "labels": jnp.asarray(rng.integers(0, VOCABULARY, shape), jnp.int32),
        "mask": jnp.asarray(rng.random(shape) < 0.3),
        "routed": jnp.asarray(rng.random(shape) < 0.8),
    }


def compiled(fun, *args):
    return jax.jit(fun).lower(*args).compile()


def flops(program):
    return program.cost_analysis()["flops"]


def matmuls(program):
    return program.as_text().count(" dot(")


@pytest.mark.slow
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_counting_is_free_where_weights_come_from_the_batch(
    form, with_state, params, batch
):
    """The twin is told the denominators: as many matmuls, 1 % of the operations."""
    apply = language_model(form)

    def beside(loss, state, losses):
        return (loss, 0.9 * state + jnp.mean(losses)) if with_state else loss

    def counted(params, batch, state):
        losses, balance = apply(params, batch)
        first = mean(losses, where=batch["mask"])
        loss = first + 0.1 * mean(balance, where=batch["routed"])
        return beside(loss, state, losses)

    def told(params, batch, state, tokens, routed):
        losses, balance = apply(params, batch)
        first = mean(losses, where=batch["mask"]).total / tokens
        second = mean(balance, where=batch["routed"]).total / routed
        # A plain loss is a mean over the four of them.
        return beside(4 * (first + 0.1 * second), state, losses)

    options = {"num_microbatches": 4, "carry_argnum": 2 if with_state else None}
    grad = optax_accum.value_and_grad(counted, **options)
    twin = optax_accum.value_and_grad(told, **options)
    ours = compiled(grad, params, batch, 0.0)
    theirs = compiled(twin, params, batch, 0.0, 50.0, 150.0)
    assert flops(ours) <= 1.01 * flops(theirs)
    assert matmuls(ours) == matmuls(theirs) > 0


@pytest.mark.slow
def test_weights_from_the_parameters_cost_what_they_depend_on(params, batch):
    """As the docstring says: the model runs once more, forwards."""
    apply = language_model("unrolled")

    def loss_fn(params, batch, from_parameters):
        losses, balance = apply(params, batch)
        weights = balance if from_parameters else batch["mask"].astype(jnp.float32)
        return mean(losses, weights=weights) + mean(balance)

    grad_fn = optax_accum.grad(loss_fn, num_microbatches=4)
    free, dear = (
        compiled(lambda p, b, f=f: grad_fn(p, b, f), params, batch) for f in (0, 1)
    )
    assert matmuls(dear) > matmuls(free)


def evaluations(loss_fn, num_microbatches):
    """How often the loss runs on real numbers in one gradient."""
    seen = []

    def watched(w, x):
        jax.debug.callback(lambda: seen.append(1))
        return loss_fn(w, x)

    grad_fn = optax_accum.grad(watched, num_microbatches=num_microbatches)
    jax.block_until_ready(jax.jit(grad_fn)(1.0, jnp.arange(8.0)))
    jax.effects_barrier()
    return len(seen)


def test_weights_from_keys_and_state_are_not_counted():
    seen = []

    def loss_fn(w, x, key, state):
        jax.debug.callback(lambda: seen.append(1))
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        weights = jnp.where(kept, state, 2 * state) * jnp.ones_like(x)
        return mean(w * x, weights=weights), state + 1

    grad_fn = optax_accum.grad(
        loss_fn, num_microbatches=4, rng_argnums=2, carry_argnum=3
    )
    jax.block_until_ready(
        jax.jit(grad_fn)(1.0, jnp.arange(8.0), jax.random.key(0), 1.0)
    )
    jax.effects_barrier()
    assert len(seen) == 4


ONE_TERM = {
    "plain": lambda w, x: jnp.mean(w * x),
    "masked": lambda w, x: mean(w * x, where=x > 1),
    "weighted by a parameter": lambda w, x: mean(w * x, weights=jnp.exp(w * x)),
    "sum": lambda w, x: Sum(jnp.sum(w * x)),
    "plain and sum": lambda w, x: Sum(jnp.sum(w * x)) + jnp.mean(x),
}


@pytest.mark.parametrize("name", ONE_TERM)
@pytest.mark.parametrize("count", [1, 4])
def test_what_need_not_be_counted_runs_once(name, count):
    """Seen by a callback, which no compiler may remove."""
    assert evaluations(ONE_TERM[name], count) == count


def test_a_callback_in_a_loss_of_several_terms_runs_twice():
    """As the docstring says; but for a whole batch there is nothing to count."""

    def two_terms(w, x):
        return mean(w * x, where=x > 1) + mean(w * x)

    assert evaluations(two_terms, 1) == 1
    assert evaluations(two_terms, 4) == 8


@pytest.mark.slow
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_one_accumulator_for_any_number_of_terms(terms):
    """Temporaries in units of the parameters."""
    w, x = jnp.zeros((16, 10_000)), normal(0, 8, 16)

    def loss_fn(w, x):
        losses = jnp.mean((x @ w) ** 2, axis=-1)
        return sum(mean(losses, where=x[:, i] > 0) for i in range(terms))

    grad_fn = jax.jit(optax_accum.grad(loss_fn, num_microbatches=4))
    plain = jax.jit(
        optax_accum.grad(lambda w, x: jnp.mean((x @ w) ** 2), num_microbatches=4)
    )
    assert temporary_bytes(grad_fn, w, x) <= 1.02 * temporary_bytes(plain, w, x)


def test_memory_of_the_weighted_path_does_not_grow_with_n():
    """https://github.com/meta-pytorch/torchtune/pull/1917"""

    def loss_fn(w, batch):
        hidden = batch["x"]
        for _ in range(8):
            hidden = jnp.tanh(hidden @ w)
        return mean(hidden**2, where=batch["mask"]) + mean(hidden, where=~batch["mask"])

    def temporaries(n):
        batch = {
            "x": jax.ShapeDtypeStruct((8 * n, 32), jnp.float32),
            "mask": jax.ShapeDtypeStruct((8 * n, 32), bool),
        }
        w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
        grad_fn = jax.jit(optax_accum.grad(loss_fn, num_microbatches=n))
        return temporary_bytes(grad_fn, w, batch)

    rows = (
        8 * 32 * (4 + 1)
    )  # bytes of a micro-batch, of which XLA may keep a copy or two
    assert temporaries(16) - temporaries(2) < 14 * 2 * rows


def test_n_is_1_without_a_loop(params, batch):
    apply = language_model("unrolled")

    def loss_fn(params, batch):
        losses, balance = apply(params, batch)
        return mean(losses, where=batch["mask"]) + mean(balance)

    text = str(jax.make_jaxpr(optax_accum.value_and_grad(loss_fn))(params, batch))
    assert "scan[" not in text and "cond[" not in text and "while[" not in text
