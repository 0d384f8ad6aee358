"""A batch into micro-batches: strides, remainder, keys.

Letters: ``B`` rows in the batch, ``N`` micro-batches, ``m`` rows in each.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_accum._checks import check_count
from optax_accum._numerics import is_array, kind_of


class Split(NamedTuple):
    """How the rows of a batch go through the model: ``B = N * m + remainder``."""

    num_microbatches: int  # N, of equal size
    microbatch_size: int  # m
    remainder: int  # rows of one more, smaller micro-batch; 0 for none

    @property
    def rows(self) -> int:
        return self.num_microbatches * self.microbatch_size + self.remainder

    @property
    def is_whole(self) -> bool:
        """The batch is its own and only micro-batch."""
        return self.num_microbatches == 1 and self.remainder == 0


def check_split(
    caller: str, num_microbatches: Any, microbatch_size: Any
) -> tuple[int | None, int | None]:
    """The two ways to say the same, of which at most one may be used."""
    if num_microbatches is not None and microbatch_size is not None:
        raise ValueError(
            f"`{caller}` must be given `num_microbatches` or `microbatch_size`, got "
            f"both, {num_microbatches!r} and {microbatch_size!r}; the other follows "
            "from the rows of the batch."
        )
    if microbatch_size is not None:
        return None, check_count(f"{caller}(microbatch_size=...)", microbatch_size)
    if num_microbatches is None:
        return None, None
    return check_count(f"{caller}(num_microbatches=...)", num_microbatches), None


def split_rows(
    rows: int, num_microbatches: int | None, microbatch_size: int | None
) -> Split:
    """The split of `rows` rows: N of equal size, or as many of size m as there are.

    Not split where neither is given.
    """
    if microbatch_size is not None:
        size = min(microbatch_size, rows)
        return Split(rows // size, size, rows % size)
    if num_microbatches is None:
        return Split(1, rows, 0)
    if rows % num_microbatches:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        raise ValueError(
            f"`num_microbatches` must divide the rows of the batch, got "
            f"{num_microbatches} for {rows} rows, which {divisors} divide; with "
            "`microbatch_size` the last micro-batch may be smaller."
        )
    return Split(num_microbatches, rows // num_microbatches, 0)


def count_rows(caller: str, batch: dict[str, Any], axis: int) -> int:
    """The rows of a batch, which all its arrays must have in common.

    Args:
      caller: whose error it is if they have not.
      batch: each batch argument under the name that an error shall call it by.
      axis: where the rows are.
    """
    sizes = {}
    for name, argument in batch.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            if _has_rows(leaf):
                label = name + jax.tree_util.keystr(path)
                sizes[label] = _size(label, np.shape(leaf), axis)
    if not sizes:
        raise ValueError(
            f"`{caller}` must be given a batch with an array to split, got none in "
            f"{', '.join(batch) or 'no argument at all'}; its rows lie along one axis "
            "of every array."
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{label}: {size}" for label, size in sizes.items())
        raise ValueError(
            f"`{caller}` must be given arrays of the same rows along axis {axis}, got "
            f"{listed}; pass what is not split in an argument of its own."
        )
    rows = next(iter(sizes.values()))
    if rows == 0:
        raise ValueError(
            f"`{caller}` must be given a batch with rows, got 0 in {', '.join(sizes)}."
        )
    return rows


def stack_microbatches(batch: Any, split: Split, axis: int) -> Any:
    """Row ``i + N * j`` to place ``[j, i]``: the rows of one micro-batch are strided.

    So a batch sharded over devices stays where it is: each micro-batch takes its share
    of every shard. Nothing is copied; `take_microbatch` reads the strides.
    """

    def stack(leaf):
        at = axis % np.ndim(leaf)
        stop = split.rows - split.remainder
        if split.remainder:
            leaf = jax.lax.slice_in_dim(leaf, 0, stop, axis=at)
        shape = np.shape(leaf)
        strided = (split.microbatch_size, split.num_microbatches)
        return jnp.reshape(leaf, shape[:at] + strided + shape[at + 1 :])

    return _map_rows(stack, batch)


def take_microbatch(stacked: Any, index: ArrayLike, axis: int) -> Any:
    """Micro-batch `index` of what `stack_microbatches` returned."""

    def take(leaf):
        at = axis % (np.ndim(leaf) - 1) + 1
        return jax.lax.dynamic_index_in_dim(leaf, index, at, keepdims=False)

    return _map_rows(take, stacked)


def take_remainder(batch: Any, split: Split, axis: int) -> Any:
    """The last rows, too few for a micro-batch of the common size."""

    def take(leaf):
        at = axis % np.ndim(leaf)
        start = split.rows - split.remainder
        return jax.lax.slice_in_dim(leaf, start, split.rows, axis=at)

    return _map_rows(take, batch)


def fold_keys(tree: Any, index: ArrayLike) -> Any:
    """`tree` with every key folded with `index`; what is no key stays.

    A tree of something else is an error, for its user expects randomness; None is not.
    """
    leaves = jax.tree.leaves(tree)
    if leaves and not any(map(is_key, leaves)):
        kinds = ", ".join(map(kind_of, leaves))
        raise TypeError(
            f"`rng_argnums` must name arguments that hold random keys, got {kinds}; "
            "write `jax.random.key(0)`."
        )

    def fold(leaf):
        if not is_key(leaf):
            return leaf
        fold_in = jax.random.fold_in
        for _ in range(np.ndim(leaf) - _is_raw_key(leaf)):
            fold_in = jax.vmap(fold_in, in_axes=(0, None))
        return fold_in(leaf, index)

    return jax.tree.map(fold, tree)


def _map_rows(fun, batch: Any) -> Any:
    return jax.tree.map(lambda leaf: fun(leaf) if _has_rows(leaf) else leaf, batch)


def _has_rows(leaf: Any) -> bool:
    return is_array(leaf) and np.ndim(leaf) > 0


def _size(label: str, shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"`batch_axis` must be an axis of every array in the batch, got {axis} for "
            f"{label} of shape {shape}."
        )
    return shape[axis]


def is_key(leaf: Any) -> bool:
    """A key or an array of keys, typed or raw."""
    if not is_array(leaf):
        return False
    return _is_raw_key(leaf) or jnp.issubdtype(
        jnp.result_type(leaf), jax.dtypes.prng_key
    )


def _is_raw_key(leaf: Any) -> bool:
    """Words of uint32, as many as the default implementation has."""
    width = jax.eval_shape(jax.random.PRNGKey, 0).shape
    return jnp.result_type(leaf) == jnp.uint32 and np.shape(leaf)[-1:] == width
