"""Well-known models at their real sizes, of which only shapes are made.

What `plan` is tried on. Nothing is allocated: a state and a batch are shapes and
dtypes, which is all that compiling a train step needs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from optax_accum._mean import mean
from optax_accum._state import TrainState, init_train_state

Shapes = dict[str, jax.ShapeDtypeStruct]


class Example(NamedTuple):
    """What `make_train_step` takes, and what its step is then called with.

    Attributes:
      loss_fn: the loss, with the keywords that `state` asks for.
      optimizer: the one of `state`.
      state: a `TrainState` of ``jax.ShapeDtypeStruct``.
      batch: shapes of the arrays of a batch, by name; rows are on the first axis.
    """

    loss_fn: Callable
    optimizer: optax.GradientTransformation
    state: TrainState
    batch: Shapes


def resnet50(batch_size: int) -> Example:
    """ResNet-50 on ImageNet: 224 x 224 images, 1000 classes.

    25,557,032 parameters. The statistics of BatchNorm are the ``model_state``.

    Args:
      batch_size: images in a batch.

    References:
      He et al., `Deep Residual Learning for Image Recognition
      <https://arxiv.org/abs/1512.03385>`_, 2015. With the stride in the 3 x 3
      convolution, as is usual since (v1.5).
    """
    batch = {
        "image": jax.ShapeDtypeStruct((batch_size, 224, 224, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
    }
    model, optimizer = ResNet(), optax.sgd(0.1, momentum=0.9)

    def init(image):
        variables = model.init(jax.random.key(0), image)
        return init_train_state(
            variables["params"], optimizer, model_state=variables["batch_stats"]
        )

    state = jax.eval_shape(init, batch["image"])
    return Example(make_resnet_loss(model), optimizer, state, batch)


def bert_base(batch_size: int, sequence_length: int = 128) -> Example:
    """BERT-base uncased with its masked-language-model head.

    109,514,298 parameters: 108,891,648 of the encoder (it has no pooler) and 622,650 of
    the head, which shares the token embedding and predicts at every position, not at
    the masked ones alone. Dropout takes the ``key``.

    Args:
      batch_size: sequences in a batch.
      sequence_length: tokens in a sequence, at most 512. None of them is padding.

    References:
      Devlin et al., `BERT: Pre-training of Deep Bidirectional Transformers for Language
      Understanding <https://arxiv.org/abs/1810.04805>`_, 2018.
    """
    shape = (batch_size, sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = {
        "tokens": tokens,
        "token_types": tokens,
        "targets": tokens,
        "mask": jax.ShapeDtypeStruct(shape, jnp.bool_),
    }
    model, optimizer = Bert(), optax.adamw(1e-4, weight_decay=0.01)

    def init(tokens, token_types):
        params_key, key = jax.random.split(jax.random.key(0))
        variables = model.init(params_key, tokens, token_types, train=False)
        return init_train_state(variables["params"], optimizer, key=key)

    state = jax.eval_shape(init, tokens, tokens)
    return Example(make_bert_loss(model), optimizer, state, batch)


EXAMPLES: dict[str, Callable[[int], Example]] = {
    "resnet50": resnet50,
    "bert-base": bert_base,
}


# -- ResNet-50

Conv = partial(nn.Conv, use_bias=False, kernel_init=nn.initializers.he_normal())
# Training normalizes with the statistics of the micro-batch; the running ones, which
# only a prediction reads, are kept up to date beside it.
BatchNorm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)


def make_resnet_loss(model: "ResNet") -> Callable:
    """The mean cross-entropy of the labels, beside the new statistics."""

    def loss_fn(params, batch, model_state):
        variables = {"params": params, "batch_stats": model_state}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses), new["batch_stats"]

    return loss_fn


class ResNet(nn.Module):
    """A ResNet of bottleneck blocks, in training; the defaults are ResNet-50."""

    stages: tuple[int, ...] = (3, 4, 6, 3)  # blocks in each
    width: int = 64
    classes: int = 1000

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = Conv(self.width, (7, 7), strides=2, padding=3)(image)  # [B, H/2, W/2, C]
        x = nn.relu(BatchNorm()(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))  # [B, H/4, W/4, C]
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(self.width * 2**stage, strides)(x)
        x = jnp.mean(x, axis=(1, 2))  # [B, 4 C 2^(stages - 1)]
        # Small, so that training starts from a nearly uniform prediction.
        kernel_init = nn.initializers.normal(0.01)
        return nn.Dense(self.classes, kernel_init=kernel_init)(x)


class Bottleneck(nn.Module):
    """Three convolutions, the middle one narrow, and a shortcut around them."""

    width: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(BatchNorm()(Conv(self.width, (1, 1))(x)))
        y = Conv(self.width, (3, 3), strides=self.strides, padding=1)(y)
        y = nn.relu(BatchNorm()(y))
        y = Conv(4 * self.width, (1, 1))(y)
        # At first a block passes on its shortcut alone, which keeps deep ones stable.
        y = BatchNorm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = BatchNorm()(Conv(4 * self.width, (1, 1), strides=self.strides)(x))
        return nn.relu(x + y)  # [B, H/strides, W/strides, 4 width]


# -- BERT-base

WEIGHT_INIT = nn.initializers.truncated_normal(0.02)
Dense = partial(nn.Dense, kernel_init=WEIGHT_INIT)
Embed = partial(nn.Embed, embedding_init=WEIGHT_INIT)
LayerNorm = partial(nn.LayerNorm, epsilon=1e-12)


def make_bert_loss(model: "Bert") -> Callable:
    """The mean cross-entropy of the targets where the mask is set."""

    def loss_fn(params, batch, *, key):
        logits: Any = model.apply(
            {"params": params},
            batch["tokens"],
            batch["token_types"],
            train=True,
            rngs={"dropout": key},
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        )
        return mean(losses, where=batch["mask"])

    return loss_fn


class Bert(nn.Module):
    """BERT and its masked-language-model head; the defaults are BERT-base."""

    vocabulary: int = 30522
    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    positions: int = 512
    token_types: int = 2
    dropout: float = 0.1

    @nn.compact
    def __call__(
        self, tokens: jax.Array, token_types: jax.Array, *, train: bool
    ) -> jax.Array:
        embed_tokens = Embed(self.vocabulary, self.width)
        positions = jnp.arange(tokens.shape[1])[None]  # [1, T]
        x = embed_tokens(tokens)  # [B, T, D]
        x = x + Embed(self.token_types, self.width)(token_types)
        x = x + Embed(self.positions, self.width)(positions)
        x = nn.Dropout(self.dropout, deterministic=not train)(LayerNorm()(x))
        for _ in range(self.layers):
            x = EncoderLayer(self.heads, self.hidden, self.dropout)(x, train=train)
        x = LayerNorm()(nn.gelu(Dense(self.width)(x), approximate=False))
        bias = self.param("bias", nn.initializers.zeros, (self.vocabulary,))
        return embed_tokens.attend(x) + bias[None, None]  # [B, T, V]


class EncoderLayer(nn.Module):
    """Self-attention, then two dense layers, each normalized after its shortcut."""

    heads: int
    hidden: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        dropout = nn.Dropout(self.dropout, deterministic=not train)
        attention = nn.MultiHeadDotProductAttention(
            self.heads,
            dropout_rate=self.dropout,
            broadcast_dropout=False,  # as in BERT: a mask for each row and head
            deterministic=not train,
            kernel_init=WEIGHT_INIT,
        )
        x = LayerNorm()(x + dropout(attention(x)))  # [B, T, D]
        y = nn.gelu(Dense(self.hidden)(x), approximate=False)  # [B, T, hidden]
        return LayerNorm()(x + dropout(Dense(x.shape[-1])(y)))
