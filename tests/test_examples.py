"""The examples are the models they are named after, and allocate nothing."""

import functools
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_accum import make_train_step
from optax_accum._examples import (
    EXAMPLES,
    Bert,
    ResNet,
    bert_base,
    make_bert_loss,
    make_resnet_loss,
    resnet50,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request):
    return EXAMPLES[request.param](4)


def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


# -- Shapes


def test_all_are_shapes(example):
    leaves = jax.tree.leaves((example.state, example.batch))
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in leaves)


def test_no_device_is_touched():
    code = "from optax_accum import _examples as examples\n"
    code += "for make in examples.EXAMPLES.values(): make(4)"
    # There is no such device, so whoever looks for one fails.
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    for more, fails in (("", False), ("; __import__('jax').devices()", True)):
        done = subprocess.run(
            [sys.executable, "-c", code + more], env=environment, stderr=subprocess.PIPE
        )
        assert (done.returncode != 0) == fails, done.stderr


def test_rows_are_on_the_first_axis(example):
    assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(example.batch))


def test_a_step_gives_the_state_it_takes(example):
    train_step = make_train_step(example.loss_fn, example.optimizer, num_microbatches=2)
    state, metrics = jax.eval_shape(train_step, example.state, example.batch)
    assert state == example.state
    assert metrics["loss"] == jax.ShapeDtypeStruct((), jnp.float32)


def test_parameters_of_resnet50():
    params = resnet50(2).state.params
    # A bottleneck of width C on D channels: convolutions CD + 9CC + 4CC, and scales and
    # offsets 2 (C + C + 4C). The first of a stage adds a shortcut, 4CD + 2 * 4C.
    assert count(params) == sum(
        (
            3 * 64 * 7 * 7 + 2 * 64,
            215_808,  # 3 blocks of width 64
            1_219_584,  # 4 of 128
            7_098_368,  # 6 of 256
            14_964_736,  # 3 of 512
            2048 * 1000 + 1000,
        )
    )
    assert count(params) == 25_557_032


def test_statistics_of_resnet50():
    state = resnet50(2).state
    # Those of a BatchNorm are as large as its scale.
    scales = [
        leaf.shape
        for path, leaf in jax.tree.leaves_with_path(state.params)
        if path[-1].key == "scale"
    ]
    for name in ("mean", "var"):
        shapes = [
            leaf.shape
            for path, leaf in jax.tree.leaves_with_path(state.model_state)
            if path[-1].key == name
        ]
        assert shapes == scales
    # One after each convolution: the first, 3 in each block, 4 shortcuts.
    assert len(scales) == 1 + 3 * (3 + 4 + 6 + 3) + 4
    assert count(state.model_state) == 2 * 26_560


def test_work_of_resnet50():
    example = resnet50(1)
    params, model_state = example.state.params, example.state.model_state
    loss_fn = jax.jit(example.loss_fn)
    lowered = loss_fn.lower(params, example.batch, model_state=model_state)
    # 4.09e9 multiply-adds an image, of which XLA leaves out those with padding. A
    # stride in the 1 x 1 convolution would make it 3.8e9.
    assert lowered.cost_analysis()["flops"] == pytest.approx(2 * 4.09e9, rel=0.03)


def test_parameters_of_bert_base():
    params = bert_base(2).state.params
    embeddings = (30522 + 512 + 2) * 768 + 2 * 768
    attention = 4 * (768 * 768 + 768)  # query, key, value, output
    feed_forward = (768 * 3072 + 3072) + (3072 * 768 + 768)
    encoder = embeddings + 12 * (attention + feed_forward + 2 * 2 * 768)
    assert encoder == 108_891_648
    head = (768 * 768 + 768) + 2 * 768 + 30522  # the embedding is there already
    assert head == 622_650
    assert count(params) == encoder + head == 109_514_298


# -- Small ones, on real data


def make_key(seed):
    return jax.random.key(seed, impl="rbg")  # compiles in a third of the time


@pytest.fixture(scope="module")
def small_resnet():
    model = ResNet(stages=(1,), width=8, classes=10)
    rng = np.random.default_rng(0)
    batch = {
        "image": jnp.asarray(rng.normal(1, 2, (8, 32, 32, 3)), jnp.float32),
        "label": jnp.asarray(rng.integers(10, size=8), jnp.int32),
    }
    variables = jax.jit(model.init)(make_key(0), batch["image"])
    loss, new = jax.jit(make_resnet_loss(model))(
        variables["params"], batch, model_state=variables["batch_stats"]
    )
    return variables, batch, loss, new


@pytest.fixture(scope="module")
def small_bert():
    """The loss, given a key and what to replace in the batch; and the batch."""
    model = Bert(vocabulary=50, layers=1, width=32, heads=4, hidden=64, positions=16)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": jnp.asarray(rng.integers(50, size=(8, 12)), jnp.int32),
        "token_types": jnp.asarray(rng.integers(2, size=(8, 12)), jnp.int32),
        "targets": jnp.asarray(rng.integers(50, size=(8, 12)), jnp.int32),
        "mask": jnp.asarray(rng.random((8, 12)) < 0.5),
    }
    init = jax.jit(functools.partial(model.init, train=False))
    params = init(make_key(0), batch["tokens"], batch["token_types"])["params"]
    loss_fn = jax.jit(make_bert_loss(model))

    def loss(key=0, **replaced):
        mean = loss_fn(params, batch | replaced, key=make_key(key))
        return float(mean.value)

    return loss, batch


def test_resnet_starts_uniform(small_resnet):
    _, _, loss, _ = small_resnet
    # Pooled features, 32 and each about 1, by weights of 0.01: logits within 0.1.
    assert float(loss) == pytest.approx(math.log(10), abs=0.1)


def test_resnet_updates_its_statistics(small_resnet):
    variables, batch, _, new = small_resnet
    old = variables["batch_stats"]
    assert jax.tree.structure(new) == jax.tree.structure(old)
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert not np.any(np.asarray(before) == np.asarray(after))

    outputs = np.asarray(
        jax.lax.conv_general_dilated(
            batch["image"],
            variables["params"]["Conv_0"]["kernel"],
            window_strides=(2, 2),
            padding=((3, 3), (3, 3)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    )
    first = new["BatchNorm_0"]
    mean, var = outputs.mean((0, 1, 2)), outputs.var((0, 1, 2))
    np.testing.assert_allclose(first["mean"], 0.1 * mean, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(first["var"], 0.9 + 0.1 * var, rtol=1e-3)


def test_bert_starts_uniform(small_bert):
    loss, _ = small_bert
    # Features of norm sqrt(32), normalized, by embeddings of 0.02: logits about 0.1.
    assert loss() == pytest.approx(math.log(50), abs=0.1)


def test_dropout_depends_on_the_key(small_bert):
    loss, _ = small_bert
    assert loss(key=0) == loss(key=0)
    assert loss(key=0) != loss(key=1)


def test_targets_out_of_the_mask_do_not_matter(small_bert):
    loss, batch = small_bert
    others = (batch["targets"] + 1) % 50
    assert loss(targets=jnp.where(batch["mask"], batch["targets"], others)) == loss()
    assert loss(targets=jnp.where(batch["mask"], others, batch["targets"])) != loss()


@pytest.mark.parametrize("name", ["tokens", "token_types"])
def test_bert_reads_what_it_is_given(small_bert, name):
    loss, batch = small_bert
    assert loss(**{name: batch[name][:, ::-1]}) != loss()
