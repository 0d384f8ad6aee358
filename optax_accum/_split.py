"""A batch into micro-batches: strides, remainder, keys.

Letters: ``B`` rows in the batch, ``N`` micro-batches, ``m`` rows in each.
"""

import math
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
    group_size: int = 1  # neighbours that stay together
    devices: int = 1  # each of which has as many rows, and splits them so

    @property
    def rows(self) -> int:
        """Those of one device."""
        return self.num_microbatches * self.microbatch_size + self.remainder

    @property
    def total_rows(self) -> int:
        return self.devices * self.rows

    @property
    def total_microbatches(self) -> int:
        """Of the common size, on all devices."""
        return self.devices * self.num_microbatches

    @property
    def is_whole(self) -> bool:
        """The batch is its own and only micro-batch."""
        return self.num_microbatches == 1 and self.remainder == 0

    @property
    def shares(self) -> float:
        """``B / m``: how many micro-batches of the common size the rows come to."""
        if not self.remainder:
            return self.total_microbatches
        return self.total_rows / self.microbatch_size

    def weights(self, rows: int) -> tuple[int, int]:
        """What a micro-batch of `rows` rows weighs by these, and all of a device.

        Integers, so that the mean of a constant is that constant.
        """
        return (rows, self.rows) if self.remainder else (1, self.num_microbatches)


def check_split(
    caller: str, num_microbatches: Any, microbatch_size: Any, group_size: Any
) -> tuple[int | None, int | None, int]:
    """The options of `split_rows`; of the first two at most one may be used."""
    group_size = check_count(f"{caller}(group_size=...)", group_size)
    if num_microbatches is not None and microbatch_size is not None:
        raise ValueError(
            f"`{caller}` must be given `num_microbatches` or `microbatch_size`, got "
            f"both, {num_microbatches!r} and {microbatch_size!r}; the other follows "
            "from the rows of the batch."
        )
    if microbatch_size is not None:
        size = check_count(f"{caller}(microbatch_size=...)", microbatch_size)
        if size % group_size:
            raise ValueError(
                f"`{caller}(microbatch_size=...)` must be a multiple of `group_size`, "
                f"got {size} for groups of {group_size} rows; a group is not split."
            )
        return None, size, group_size
    if num_microbatches is not None:
        count = check_count(f"{caller}(num_microbatches=...)", num_microbatches)
        return count, None, group_size
    return None, None, group_size


def split_rows(
    rows: int,
    num_microbatches: int | None,
    microbatch_size: int | None,
    group: int,
    devices: int = 1,
) -> Split:
    """The split of `rows` rows: N of equal size, or as many of size m as there are.

    Not split where neither is given. Groups of neighbours stay together. All `devices`
    do the same.
    """
    if rows % group:
        raise ValueError(
            f"`group_size` must divide the rows of the batch, got {group} for {rows} "
            f"rows{_on_each(devices)}; a group that lacks rows has no meaning."
        )
    if microbatch_size is not None:
        size = min(microbatch_size, rows)
        return Split(rows // size, size, rows % size, group, devices)
    if num_microbatches is None:
        return Split(1, rows, 0, group, devices)
    groups = rows // group
    if groups % num_microbatches:
        divisors = [n for n in range(1, groups + 1) if groups % n == 0]
        counted = f"{rows} rows" if group == 1 else f"{groups} groups of {group} rows"
        raise ValueError(
            f"`num_microbatches` must divide the rows of the batch, got "
            f"{num_microbatches} for {counted}{_on_each(devices)}, which {divisors} "
            "divide; with `microbatch_size` the last micro-batch may be smaller."
        )
    return Split(num_microbatches, rows // num_microbatches, 0, group, devices)


def _on_each(devices: int) -> str:
    return "" if devices == 1 else f" on each of {devices} devices"


def equal_splits(rows: int, group: int, shards: int) -> list[int]:
    """Every N for which all micro-batches are alike, the largest micro-batch first.

    Each of them takes as many groups of neighbours from every shard of the batch, so
    that all devices have the same work and no row changes its place.
    """
    groups = rows // split_rows(rows, None, None, group).group_size
    return [
        n
        for n in range(1, groups + 1)
        if groups % n == 0 and (n == 1 or groups // n % shards == 0)
    ]


def count_shards(batch: Any, axis: int) -> int:
    """Into how many parts the rows of a batch are laid out on devices."""

    def shards(leaf):
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or not has_rows(leaf):
            return 1
        rows, local = np.shape(leaf)[axis], sharding.shard_shape(np.shape(leaf))[axis]
        return rows // local

    return math.lcm(*map(shards, jax.tree.leaves(batch)))


def check_shards(caller: str, batch: Any, split: Split, axis: int) -> None:
    """On Explicit axes JAX lays out no rows of which devices have unlike shares."""
    shards = math.lcm(*(_explicit_shards(x, axis) for x in jax.tree.leaves(batch)))
    sizes = (split.microbatch_size, split.remainder)
    uneven = [n for n in sizes if n // split.group_size % shards]
    if uneven and not split.is_whole:
        unit = "rows" if split.group_size == 1 else f"groups of {split.group_size} rows"
        raise ValueError(
            f"`{caller}` must split a batch that is sharded on an Explicit mesh so "
            f"that {shards} devices have as many {unit} in each micro-batch, got "
            f"micro-batches of {' and '.join(str(n) for n in sizes if n)}; take fewer, "
            "or `reduce_axes`, where each device splits its own."
        )


def _explicit_shards(leaf: Any, axis: int) -> int:
    """Into how many parts the type of `leaf` says that its rows are divided."""
    sharding = getattr(jax.typeof(leaf), "sharding", None) if has_rows(leaf) else None
    if sharding is None:
        return 1
    spec, mesh = tuple(sharding.spec), sharding.mesh
    entry = spec[axis % np.ndim(leaf)] if spec else None
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return math.prod(mesh.shape[name] for name in names)


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
            if has_rows(leaf):
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
    """Group ``i + N * j`` to place ``[j, i]``: a micro-batch takes every Nth of them.

    So a batch sharded over devices stays where it is: each micro-batch takes its share
    of every shard. Nothing is copied; `take_microbatch` reads the strides.
    """

    def stack(leaf):
        at = axis % np.ndim(leaf)
        stop = split.rows - split.remainder
        if split.remainder:
            leaf = jax.lax.slice_in_dim(leaf, 0, stop, axis=at)
        shape = np.shape(leaf)
        return jnp.reshape(leaf, shape[:at] + _strides(split) + shape[at + 1 :])

    return _map_rows(stack, batch)


def take_microbatch(stacked: Any, index: ArrayLike, split: Split, axis: int) -> Any:
    """Micro-batch `index` of what `stack_microbatches` returned."""
    added = len(_strides(split)) - 1

    def take(leaf):
        at = axis % (np.ndim(leaf) - added)
        taken = jax.lax.dynamic_index_in_dim(leaf, index, at + 1, keepdims=False)
        if split.group_size == 1:
            return taken
        shape = np.shape(taken)
        rows = (split.microbatch_size,)
        return jnp.reshape(taken, shape[:at] + rows + shape[at + 2 :])

    return _map_rows(take, stacked)


def take_remainder(batch: Any, split: Split, axis: int) -> Any:
    """The last rows, too few for a micro-batch of the common size."""

    def take(leaf):
        at = axis % np.ndim(leaf)
        start = split.rows - split.remainder
        return jax.lax.slice_in_dim(leaf, start, split.rows, axis=at)

    return _map_rows(take, batch)


def join_rows(split: Split, stacked: jax.Array, *rest: jax.Array) -> jax.Array:
    """Rows of all micro-batches in their original order: what undoes the split.

    Args:
      split: how they were split.
      stacked: shape ``(N, m, ...)``.
      *rest: the last rows, where there are any: shape ``(remainder, ...)``.
    """
    count, size, *shape = np.shape(stacked)
    group = split.group_size
    in_groups = jnp.reshape(stacked, (count, size // group, group, *shape))
    joined = jnp.reshape(jnp.swapaxes(in_groups, 0, 1), (count * size, *shape))
    return jnp.concatenate([joined, *rest]) if rest else joined


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


def _strides(split: Split) -> tuple[int, ...]:
    """Groups in a micro-batch, micro-batches, rows in a group where that is not 1.

    An axis of size 1 would be free in theory; XLA:CPU copies the rows for it.
    """
    groups = split.microbatch_size // split.group_size
    if split.group_size == 1:
        return groups, split.num_microbatches
    return groups, split.num_microbatches, split.group_size


def _map_rows(fun, batch: Any) -> Any:
    return jax.tree.map(lambda leaf: fun(leaf) if has_rows(leaf) else leaf, batch)


def has_rows(leaf: Any) -> bool:
    """Whether this leaf of a batch is split; what is no array with axes is not."""
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
