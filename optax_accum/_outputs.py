"""What a loss function returns: the loss, model state, aux; checked, and as markers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._axes import vary
from optax_accum._numerics import (
    find_difference,
    is_inexact,
    kind_of,
    scale,
    settle,
    varying_axes,
    weight_dtype,
)
from optax_accum._reductions import Concat, Last, Marker, is_marker, map_markers
from optax_accum._terms import (
    Mean,
    RowMean,
    Sum,
    Term,
    Terms,
    row_mean,
    terms_of,
)


class Disagreement(ValueError):
    """Devices may differ in what there is once for all of them."""


class Output(NamedTuple):
    """What one micro-batch comes to."""

    loss: Any  # a real scalar or a `Term`
    aux: Any  # floating scalars and markers
    carry: tuple  # the new model state, if any


def read_output(
    caller: str, returned: Any, carry: dict[str, Any], has_aux: bool, rows: int
) -> Output:
    """The parts of what a function `returned` for a micro-batch of `rows` rows.

    Args:
      caller: whose error it is if it may not return that.
      returned: the loss, with what is beside it in a pair.
      carry: the model state that the function was given, if any, under its name.
      has_aux: whether it returns aux.
      rows: how many entries a `Concat` must have.
    """

    def pair(x, form):
        if not isinstance(x, tuple | list) or len(x) != 2:
            raise TypeError(
                f"`{caller}` expects a function that returns {form}, got {_form(x)}; "
                "`has_aux=True` and a carried argument each put something beside the "
                "loss."
            )
        return x

    loss, new, aux = returned, (), None
    if carry and has_aux:
        loss, beside = pair(returned, "(loss, (state, aux))")
        *new, aux = pair(beside, "(loss, (state, aux))")
    elif carry:
        loss, *new = pair(returned, "(loss, state)")
    elif has_aux:
        loss, aux = pair(returned, "(loss, aux)")
    _check_loss(caller, loss)
    _check_aux(caller, aux, rows)
    return Output(settle(loss), settle(aux), _check_carry(caller, tuple(new), carry))


def as_share(caller: str, output: Output, axes: tuple[str, ...]) -> Output:
    """`output` as the share of one device, of those along `axes`.

    A loss is the share of each, also where devices have made it the same. What there is
    once for all of them must be the same, as JAX's types tell inside a ``shard_map``
    that has them.

    Args:
      caller: whose error it is if it is not.
      output: what a micro-batch came to.
      axes: those of a ``shard_map``.
    """
    markers = jax.tree.leaves(output.aux, is_leaf=is_marker)
    for last in (x for x in markers if isinstance(x, Last)):
        _check_agreement(caller, "Last", last.x, axes)
    for state in output.carry:
        _check_agreement(caller, "the state", state, axes)
    return output._replace(loss=vary(output.loss, axes))


def _check_agreement(caller: str, name: str, tree: Any, axes: tuple[str, ...]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        differs = [axis for axis in axes if axis in varying_axes(leaf)]
        if differs:
            raise Disagreement(
                f"`{caller}(reduce_axes=...)` must be given a function whose carried "
                "state, and whose `Last`, JAX knows to be the same on all devices, got "
                f"{kind_of(leaf)} at {name}{jax.tree_util.keystr(path)} that may "
                f"differ along {differs}, as may all that is computed from rows or "
                "parameters; reduce it, by `jax.lax.pmean` or the `axis_name` of a "
                "BatchNorm, or report it as a `Mean`, `Stack` or `Concat`."
            )


def as_markers(output: Output, weight: int, total_weight: int) -> dict[str, Any]:
    """Loss and aux with a widened marker at every place; a plain scalar is a mean.

    Args:
      output: what a micro-batch came to.
      weight: what its plain scalars weigh.
      total_weight: what all micro-batches together weigh.
    """

    def marked(leaf):
        if isinstance(leaf, Terms):
            return leaf.map(marked)
        if isinstance(leaf, Marker):
            return leaf.widened()
        return row_mean(leaf, weight, total_weight)

    return {"loss": marked(output.loss), "aux": map_markers(marked, output.aux)}


def over_rows(markers: Any, rows: int) -> Any:
    """`markers` of one call as they can be merged with those of calls of other rows.

    Args:
      markers: those of all its micro-batches together.
      rows: how many it has.
    """

    def over(marker):
        if not isinstance(marker, RowMean):
            return marker
        dtype = weight_dtype(marker.x)
        return Mean(scale(marker.value, rows, dtype), jnp.full((), rows, dtype))

    return map_markers(over, markers)


def as_returned(values: Any, returned: Any) -> Any:
    """`values` with plain scalars in the dtypes in which they were `returned`."""

    def cast(leaf, value):
        return value if is_marker(leaf) else jnp.astype(value, jnp.result_type(leaf))

    return map_markers(cast, returned, values)


# -- What may be returned


def _check_loss(caller: str, loss: Any) -> None:
    if isinstance(loss, Term):
        loss.check(f"{caller}(loss_fn)")
    for term in terms_of(loss):
        total = _total(term)
        is_real = is_inexact(total) and jnp.isrealobj(total)
        if not is_real or jnp.shape(total) != ():
            raise TypeError(
                f"`{caller}` expects a loss that is a real floating scalar, or a "
                f"`Mean` or `Sum` of one, got {_form(loss)}; reduce it with `jnp.mean` "
                "or `optax_accum.mean`, and say `has_aux=True` if the function returns "
                "something beside it."
            )


def _total(term: Any) -> Any:
    """What is differentiated of a term."""
    if isinstance(term, Mean):
        return term.total
    return term.x if isinstance(term, Sum) else term


def _check_aux(caller: str, aux: Any, rows: int) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(aux, is_leaf=is_marker)
    plain = []
    for path, leaf in leaves:
        label = f"aux{jax.tree_util.keystr(path)}"
        if isinstance(leaf, Marker):
            leaf.check(label)
            _check_rows(label, leaf, rows)
        elif not is_inexact(leaf) or jnp.shape(leaf) != ():
            plain.append(f"{label} ({kind_of(leaf)})")
    if plain:
        raise TypeError(
            f"`{caller}(has_aux=True)` must be given floating scalars in aux, which "
            f"are averaged over the rows, or markers, got {', '.join(plain)}; say how "
            "they are put together: `optax_accum.Mean`, `Sum`, `Max`, `Min`, `Last`, "
            "`Stack` (a new axis) or `Concat` (rows)."
        )


def _check_rows(label: str, marker: Marker, rows: int) -> None:
    if not isinstance(marker, Concat):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(marker.x):
        if jnp.shape(leaf)[:1] != (rows,):
            raise TypeError(
                f"`{label}{jax.tree_util.keystr(path)}`, a `Concat`, must have the "
                f"{rows} rows of the micro-batch along its first axis, got "
                f"{kind_of(leaf)}; `Stack` puts anything together."
            )


def _check_carry(caller: str, new: tuple, old: dict[str, Any]) -> tuple:
    """`new`, if its structure, shapes and dtypes are those of `old`."""
    for (name, before), after in zip(old.items(), new, strict=True):
        difference = find_difference(after, before, name)
        if difference:
            raise TypeError(
                f"`{caller}` expects a function that returns the carried state with "
                f"the types that it was given, got another one: {difference}; it "
                "stands second, (loss, state), with `has_aux=True` (loss, (state, "
                "aux))."
            )
    return settle(new)


def _form(returned: Any) -> str:
    return str(jax.tree.map(kind_of, returned))
