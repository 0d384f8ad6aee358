"""Markers of many micro-batches into one each, in as little room as they allow."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._numerics import find_difference, widen
from optax_accum._reductions import Concat, Last, Marker, Mergeable, Stack, map_markers
from optax_accum._split import Split, join_rows


def start(form: Any) -> Any:
    """What `fold` begins with.

    Args:
      form: widened markers of one micro-batch, or ``jax.ShapeDtypeStruct``s of them.
    """
    return map_markers(
        lambda m: m.neutral() if isinstance(m, Mergeable) else None, form
    )


def fold(merged: Any, markers: Any) -> tuple[Any, Any]:
    """`merged` with one more micro-batch in it, and what must be kept of that one."""

    def merge(marker, so_far):
        return so_far.merge(marker) if isinstance(marker, Mergeable) else None

    kept = map_markers(lambda m: None if isinstance(m, Mergeable) else m, markers)
    return map_markers(merge, markers, merged), kept


def check_last(caller: str, last: Any, form: Any) -> None:
    """The last, smaller micro-batch must come to the types that all others come to.

    Or a row of it might be broadcast into what the others made.

    Args:
      caller: whose error it is if it does not.
      last: its markers.
      form: as for `start`.
    """

    def without_rows(marker):
        if isinstance(marker, Last):
            return None
        if not isinstance(marker, Concat):
            return marker
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), marker
        )

    difference = find_difference(*(map_markers(without_rows, t) for t in (last, form)))
    if difference:
        raise TypeError(
            f"`{caller}` expects a function that returns the same types for the last, "
            f"smaller micro-batch, got {difference}; mark by `Concat` what has an "
            "entry for each row, or split by `num_microbatches`: all are alike then."
        )


def gather(merged: Any, kept: Any, rest: Any, form: Any, split: Split) -> Any:
    """Markers of all micro-batches together.

    Args:
      merged: what `fold` has merged.
      kept: what it has kept, of all micro-batches along a leading axis.
      rest: markers of the last, smaller micro-batch; None where there is none.
      form: as for `start`.
      split: how the rows were split.
    """
    rests = () if rest is None else (rest,)

    def together(marker, merged, kept, *rests):
        if isinstance(marker, Mergeable):
            return merged.merge(*rests) if rests else merged
        if isinstance(marker, Concat):
            return jax.tree.map(lambda *x: join_rows(split, *x), kept, *rests)
        return jax.tree.map(_append, kept, *rests)

    return map_markers(together, form, merged, kept, *rests)


def stack_whole(markers: Any) -> Any:
    """Markers of a batch that is its own and only micro-batch.

    A stack has one entry.
    """

    def stacked(marker):
        if not isinstance(marker, Stack):
            return marker
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), marker)

    return map_markers(stacked, markers)


def over_devices(markers: Any, axes: tuple[str, ...]) -> Any:
    """Markers of all micro-batches of all devices together.

    What has an entry for each row or micro-batch stays where it is.
    """
    if not axes:
        return markers

    def together(marker):
        is_one = isinstance(marker, Mergeable)
        return marker.over_devices(axes) if is_one else marker

    return map_markers(together, markers)


def values_of(markers: Any) -> Any:
    """What is reported of each."""
    return map_markers(lambda marker: marker.value, markers)


def values_of_whole(outputs: Any) -> Any:
    """What is reported of a batch that is its own and only micro-batch.

    A plain scalar is its own mean.
    """

    def value(leaf):
        return leaf.value if isinstance(leaf, Marker) else widen(leaf)

    return map_markers(value, stack_whole(outputs))


def _append(stacked: jax.Array, *last: jax.Array) -> jax.Array:
    rows = [jnp.expand_dims(x, 0) for x in last]
    return jnp.concatenate([stacked, *rows]) if rows else stacked
