"""A call of a function, made ready to be taken through its micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

from optax_accum._arguments import (
    Place,
    Roles,
    find,
    find_others,
    replace,
    values_at,
)
from optax_accum._axes import count_devices, number_of_device
from optax_accum._checks import check_callable, check_index, check_unroll
from optax_accum._numerics import is_inexact, kind_of, settle
from optax_accum._outputs import Output, as_share, read_output
from optax_accum._placement import Placement
from optax_accum._split import (
    Split,
    check_shards,
    check_split,
    count_rows,
    fold_keys,
    has_rows,
    split_rows,
)
from optax_accum._spread import Spread


class Job(NamedTuple):
    """One call of a function, ready to be taken through its micro-batches."""

    caller: str  # whose errors there are
    # (trained, microbatch, index, carry, rows) -> Output
    call: Callable[[tuple, tuple, ArrayLike, tuple, int], Output]
    trained: tuple[Any, ...]  # the differentiated arguments, as the loop gets them
    placement: Placement  # what must be done to have them whole, and their sums
    batch: tuple[Any, ...]
    carry: tuple[Any, ...]  # the carried argument, if any
    split: Split
    axis: int
    unroll: int | bool
    labels: tuple[str, ...]  # what an error shall call the leaves of `trained`
    first: ArrayLike = 0  # the number of its first micro-batch

    @property
    def axes(self) -> tuple[str, ...]:
        """Those over which devices share the rows."""
        return self.placement.axes

    @property
    def is_whole(self) -> bool:
        """All rows there are go through the model at once."""
        return self.split.is_whole and not self.axes


def prepare(
    caller: str,
    fun: Callable,
    *,
    num_microbatches: int | None,
    microbatch_size: int | None,
    group_size: int,
    has_aux: bool,
    batch_axis: int,
    unroll: int | bool,
    spread: Spread,
) -> Callable[[Roles, Sequence, dict[str, Any]], Job]:
    """What makes a `Job` of every call of `fun`, with these options checked.

    Where devices share the rows, each of them makes one of its own.
    """
    options = check_split(caller, num_microbatches, microbatch_size, group_size)
    axis = check_index(f"{caller}(batch_axis=...)", batch_axis)
    unroll = check_unroll(caller, unroll)
    check_callable(f"the first argument of {caller}", fun)

    def job(roles, args, kwargs):
        places = find(caller, roles, args, kwargs)
        trained, batch, rng, carry = values_at(places, args, kwargs)
        named = labelled(places.differentiated, trained)
        check_floats(caller, named)
        labels = tuple(label for label, _ in label_leaves(named))
        placement = spread.place(caller, trained, labels)
        axes = placement.axes
        rows = count_rows(caller, labelled(places.split, batch), axis)

        def fold(index):
            keys = fold_keys(rng, index)
            return fold_keys(keys, number_of_device(axes)) if axes else keys

        def call(trained, microbatch, index, carry, rows):
            values = Roles(trained, microbatch, fold(index) if rng else rng, carry)
            micro_args, micro_kwargs = replace(args, kwargs, places, values)
            unsplit = [] if split.is_whole else whole
            returned = _run(caller, fun, micro_args, micro_kwargs, unsplit)
            old = labelled(places.carried, carry)
            output = read_output(caller, returned, old, has_aux, rows)
            return as_share(caller, output, axes)

        whole = _as_long(places, args, kwargs, rows, axis)
        split = split_rows(rows, *options, count_devices(axes) if axes else 1)
        check_shards(caller, batch, split, axis)
        return Job(
            caller=caller,
            call=call,
            trained=placement.open_call(trained),
            placement=placement,
            batch=batch,
            carry=settle(carry),
            split=split,
            axis=axis,
            unroll=unroll,
            labels=labels,
        )

    return job


# -- What was not split


def _as_long(
    places: Roles, args: Sequence, kwargs: dict[str, Any], rows: int, axis: int
) -> list[str]:
    """What other arguments hold that is as long as the batch, under its name."""
    others = {p.label: value for p, value in find_others(places, args, kwargs)}
    return [
        label
        for label, leaf in label_leaves(others)
        if has_rows(leaf)
        and axis in range(-leaf.ndim, leaf.ndim)
        and leaf.shape[axis] == rows
    ]


def _run(
    caller: str, fun: Callable, args: Sequence, kwargs: dict[str, Any], whole: list[str]
) -> Any:
    """A call of `fun`, whose errors name what is `whole`, as long as the batch."""
    try:
        return fun(*args, **kwargs)
    except (TypeError, ValueError) as error:
        if whole:
            error.add_note(
                f"`{caller}` has passed {', '.join(whole)} whole, as long as the "
                "batch; if there are rows in it, put it into the batch or name it in "
                "`batch_argnums`."
            )
        raise


# -- What may be differentiated


def check_floats(caller: str, arguments: dict[str, Any]) -> None:
    """Only floats have a gradient; every leaf that is none is named."""
    wrong = [
        f"{label} ({kind_of(leaf)})"
        for label, leaf in label_leaves(arguments)
        if not is_inexact(leaf)
    ]
    if wrong:
        raise TypeError(
            f"`{caller}` must be given floating or complex arrays to train, got "
            f"{', '.join(wrong)}; pass what is not trained in an argument of its own, "
            "as `optax_accum.nnx` does for Flax NNX and `eqx.partition` for Equinox."
        )


def label_leaves(arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every leaf, under the name that an error shall call it by."""
    return [
        (name + jax.tree_util.keystr(path), leaf)
        for name, argument in arguments.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument)
    ]


def labelled(places: tuple[Place, ...], values: tuple) -> dict[str, Any]:
    labels = [place.label for place in places]
    return dict(zip(labels, values, strict=True))
