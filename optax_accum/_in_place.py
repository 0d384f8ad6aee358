"""Sums to which the backward pass itself adds: no gradient stands beside them.

JAX's array refs, described in its documentation under `Autodiff with refs
<https://docs.jax.dev/en/latest/301/refs.html>`_. Where a model scans over its layers,
each layer's gradient is added to its slice of the sum while the scan runs back.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._numerics import kind_of, sum_dtype, varying_axes
from optax_accum._ref_traps import check_refs, misread_leaves
from optax_accum._sums import Accumulator


def new_refs(sums: Any) -> Any:
    """A ref for each sum."""
    return jax.tree.map(jax.new_ref, sums)


def freeze_refs(refs: Any) -> Any:
    """The sums, when nothing is added any more."""
    return jax.tree.map(jax.freeze, refs)


def write_over(fun: Callable[[Any], Any], sums: Any) -> Any:
    """``fun(sums)``, of the same types, in the memory of the sums.

    In a branch that is always taken, which the compiler does not know. Of what comes
    out of a loop and is a result of the whole program in the end, XLA makes a second
    buffer otherwise.
    """
    always = jax.lax.optimization_barrier(jnp.array(True))
    return jax.lax.cond(always, fun, lambda sums: sums, sums)


def add_in_place(
    refs: Any,
    fun: Callable,
    trained: Any,
    by_value: frozenset[int],
    counts_of: Callable[[Any], Any],
    labels: Sequence[str],
) -> Any:
    """Adds the gradient of a function to `refs`.

    Args:
      refs: a ref for each leaf of `trained`.
      fun: ``trained -> (scalar, aux)``.
      trained: where it is differentiated.
      by_value: what `find_by_value` found.
      counts_of: whether anything in an aux counts: nothing is added where not.
      labels: what an error shall call the leaves.

    Returns:
      The aux.
    """
    dtypes = [ref.dtype for ref in jax.tree.leaves(refs)]
    value, backward, aux, _ = _differentiate(fun, trained, dtypes, by_value)

    def add():
        try:
            backward.with_refs(jax.tree.leaves(refs))(jnp.ones_like(value))
        except Exception as error:
            _raise_for_leaf(error, backward, refs, value, labels)

    _run_if(counts_of(aux), add)
    return aux


def find_by_value(
    caller: str,
    fun: Callable,
    trained: Any,
    accumulator: Accumulator,
    labels: Sequence[str],
) -> tuple[frozenset[int], Any]:
    """The leaves whose gradient has to be made before it is added.

    JAX would make a wrong one otherwise, or none. An operation between such a leaf and
    the model avoids that.

    Args:
      caller: whose error it is if a sum is too narrow.
      fun: as for `add_in_place`.
      trained: as for `add_in_place`.
      accumulator: how gradients are added up.
      labels: as for `add_in_place`.

    Returns:
      Their numbers, and the aux of `fun`.
    """
    check_refs(caller)
    dtypes = _sum_dtypes(caller, trained, accumulator, labels)
    _, _, aux, by_value = _differentiate(fun, trained, dtypes, frozenset())
    return by_value, aux


def _differentiate(
    fun: Callable, trained: Any, dtypes: list, by_value: frozenset[int]
) -> tuple[jax.Array, Any, Any, frozenset[int]]:
    """``jax.vjp`` with respect to views of `trained` in the dtypes of its sums.

    A ref must have the dtype of what is added to it. Also returns the leaves that must
    be made by value, `by_value` among them.
    """
    value, backward, aux = jax.vjp(*_view(fun, trained, dtypes, by_value), has_aux=True)
    found = misread_leaves(backward) - by_value
    if found:
        return _differentiate(fun, trained, dtypes, by_value | found)
    return value, backward, aux, by_value


def _view(
    fun: Callable, trained: Any, dtypes: list, by_value: frozenset[int]
) -> tuple[Callable, list]:
    """`fun` as a function of the leaves of `trained` in these dtypes, and those."""
    leaves, structure = jax.tree.flatten(trained)
    own = [jnp.result_type(leaf) for leaf in leaves]

    def see(i, view):
        if i in by_value:
            view = view * jnp.ones((), view.dtype)
        return view if view.dtype == own[i] else view.astype(own[i])

    def viewed(views):
        seen = [see(i, jnp.asarray(view)) for i, view in enumerate(views)]
        return fun(jax.tree.unflatten(structure, seen))

    views = [
        leaf if dtype == leaf_dtype else jnp.asarray(leaf, dtype)
        for leaf, leaf_dtype, dtype in zip(leaves, own, dtypes, strict=True)
    ]
    return viewed, views


def _run_if(counts: Any, add: Callable[[], None]) -> None:
    """``add()`` where `counts`.

    In a ``shard_map`` devices that differ in it must not take different branches, for
    there may be a collective in the backward pass.
    """
    if counts is True or varying_axes(counts):
        add()
    else:
        jax.lax.cond(counts, add, lambda: None)


# -- What may not be a ref


def _sum_dtypes(
    caller: str, trained: Any, accumulator: Accumulator, labels: Sequence[str]
) -> list[jnp.dtype]:
    """The dtype of each leaf's sum, in which it is seen while it is differentiated."""
    dtypes, narrower = [], []
    for leaf, label in zip(jax.tree.leaves(trained), labels, strict=True):
        own = jnp.result_type(leaf)
        dtypes.append(sum_dtype(own, accumulator.dtype))
        if np.promote_types(own, dtypes[-1]) != dtypes[-1]:
            narrower.append(f"{label} ({kind_of(leaf)})")
    if narrower:
        raise ValueError(
            f"`{caller}(in_place=True)` must have sums that can hold what is trained, "
            f"got an `accumulator_dtype` of {jnp.dtype(accumulator.dtype).name} for "
            f"{', '.join(narrower)}; leave it at its default, or sum by value."
        )
    return dtypes


def _raise_for_leaf(
    error: Exception, backward: Any, refs: Any, value: jax.Array, labels: Sequence[str]
) -> NoReturn:
    """Names the leaf for which the backward pass cannot be traced."""
    refs = jax.tree.leaves(refs)

    def fails(numbers):
        chosen = [
            ref if i in numbers else jax.ad.GradValue() for i, ref in enumerate(refs)
        ]
        try:
            backward.with_refs(chosen)(jnp.ones_like(value))
        except type(error):
            return True
        return False

    if fails(()):
        raise error  # of the model itself
    suspects = range(len(refs))
    while len(suspects) > 1:
        half = len(suspects) // 2
        suspects = suspects[:half] if fails(suspects[:half]) else suspects[half:]
    (leaf,) = suspects
    raise TypeError(
        "`in_place=True` must be given a loss whose gradient JAX can add to a ref, got "
        f"one that cannot be for {labels[leaf]}, {kind_of(refs[leaf][...])}: {error} "
        "Leave `in_place` out."
    ) from error
