"""Door 3: the loader yields micro-batches, and Python knows the boundary."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_accum._checks import check_optimizer
from optax_accum._fold import fold, values_of
from optax_accum._job import Job
from optax_accum._loop import Loop, make_loop
from optax_accum._loss import (
    Measure,
    anything_counts,
    check_varies_alike,
    needs_denominators,
    objective,
    share_of_call,
    unit_of,
)
from optax_accum._mesh import lie_as
from optax_accum._numerics import (
    find_difference,
    global_norm,
    is_real,
    kind_of,
    ratio,
    scale,
    weight_dtype,
)
from optax_accum._outputs import over_rows
from optax_accum._placement import Gather
from optax_accum._reductions import Mergeable, is_marker
from optax_accum._scan import Accumulated, Form, form_of, sum_gradients
from optax_accum._spread import Mesh, find_mesh
from optax_accum._state import TrainState, check_made_by, model_inputs
from optax_accum._step import check_emit, check_terms, take_step
from optax_accum._sums import Accumulator, read_sums
from optax_accum._terms import Mean, RowMean, Sum, Terms, terms_of
from optax_accum._window_state import (
    WindowState,
    add_on_devices,
    check_window,
    close_on_devices,
)


def make_window_steps(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    group_size: int = 1,
    has_aux: bool = False,
    batch_axis: int = 0,
    accumulator_dtype: DTypeLike | None = None,
    compensated: bool = False,
    in_place: bool = False,
    unroll: int | bool = 1,
    reduce_axes: str | Sequence[str] = (),
    param_specs: Any = None,
    gather: Gather | None = None,
    mesh: Mesh | None = None,
    donate: bool = True,
) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """Makes two jitted functions: one adds a micro-batch, one steps the optimizer.

    For a loop to which the loader hands one micro-batch at a time and that knows in
    Python when a window is full. Nothing is decided on the device, nothing is zeroed:
    N micro-batches cost N gradients, N - 1 additions and one optimizer step. Beside
    parameters and optimizer state stands the window, 1 P, while it is open.

    ``add(state, batch, window, *args, denominators=None)`` returns the window with one
    more micro-batch in it; ``window=None`` opens one, with the first gradient as its
    sum. It reads `state` and leaves it. ``apply(state, window, **extra)`` closes the
    window: ``(state, metrics)`` of a step with the mean gradient of all that was added,
    however much that is. But for rounding, the sequence is a train step on all rows at
    once: weights, keys, model state and metrics are those of the window.

    A window is a pytree of arrays, `mini_step`, `acc_grads` and more. Saved and
    restored, it goes on bit for bit.

    Args:
      loss_fn: as for `make_train_step`. Micro-batches are numbered within the window.
        A `Sum` is added up over the window. The denominators of several terms must be
        known when the window opens: ``denominators=`` has one scalar for each term, in
        their order, over the whole window: the total weight of a `Mean`, the rows of a
        plain scalar, 1 for a `Sum`. They are kept in the window, and given once.
      optimizer: as for `make_train_step`. Under `accumulate`, each `apply` is one call.
      num_microbatches: how often a `batch` that is added is split in turn. Default 1.
      microbatch_size: as for `make_train_step`.
      group_size: as for `make_train_step`.
      has_aux: whether `loss_fn` returns something to report beside the loss. `Stack`
        and `Concat` are refused: a window must not grow.
      batch_axis: as for `make_train_step`.
      accumulator_dtype: as for `make_train_step`.
      compensated: as for `make_train_step`.
      in_place: as for `make_train_step`; a first, unsplit micro-batch needs no sum.
      unroll: as for `make_train_step`.
      reduce_axes: as for `make_train_step`. Nothing is reduced before `apply`: until
        then each device keeps the sums of its own rows in the window.
      param_specs: as for `make_train_step`.
      gather: as for `make_train_step`. With ``"call"``, every `add` gathers once, and
        `apply` alone reduces.
      mesh: as for `make_train_step`.
      donate: whether `add` consumes the window and `apply` the state that they are
        given, which saves a copy of each. A window that was applied is used up, and
        nothing tells if it is used again: the next one opens with None.

    Returns:
      ``(add, apply)``, both ``jax.jit`` functions. `add` compiles once for the first
      micro-batch of a window and once for all others of one shape. The metrics are
      those of `make_train_step`, of the window.

    Raises:
      TypeError: as `make_train_step`; when called, a window that is none, or aux that
        is put together in a way that grows.
      ValueError: as `make_train_step`; when called, denominators that lack or that
        nothing needs.

    Examples:
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w - x) ** 2)
      >>> optimizer = optax.sgd(0.5)
      >>> add, apply = optax_accum.make_window_steps(loss_fn, optimizer)
      >>> state = optax_accum.init_train_state(0.0, optimizer)
      >>> window = None
      >>> for micro_batch in (jnp.array([1.0, 3.0]), jnp.array([8.0])):
      ...     window = add(state, micro_batch, window)
      >>> state, metrics = apply(state, window)
      >>> print(state.params, window.mini_step, metrics["weight"])
      4.0 2 3.0
    """
    optimizer = check_optimizer("make_window_steps(loss_fn, optimizer)", optimizer)
    loop = make_loop(
        "make_window_steps",
        loss_fn,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        group_size=group_size,
        has_aux=has_aux,
        batch_axis=batch_axis,
        unroll=unroll,
        accumulator_dtype=accumulator_dtype,
        compensated=compensated,
        in_place=in_place,
        reduce_axes=reduce_axes,
        param_specs=param_specs,
        gather=gather,
        mesh=mesh,
    )
    return (
        jax.jit(_make_add(optimizer, loop), donate_argnums=(2,) if donate else ()),
        # Not the window: no result has room for it.
        jax.jit(
            _make_apply(optimizer, loop, has_aux), donate_argnums=(0,) if donate else ()
        ),
    )


def _make_add(
    optimizer: optax.GradientTransformationExtraArgs, loop: Loop
) -> Callable[..., WindowState]:
    def add(state, batch, window, *args, denominators=None):
        call_of_user = "add(state, batch, window)"
        check_made_by(call_of_user, optimizer, state)
        if window is not None:
            check_window(call_of_user, window, state, loop)
            state = state._replace(model_state=window.model_state)
        roles, keywords = model_inputs(state)
        call = (state.params, batch, *args), keywords

        def add_here(call, window, denominators):
            job = loop.job(roles, *call)
            return _add(job, state, window, denominators, loop.accumulator)

        return add_on_devices(loop, roles, call, window, denominators, add_here)

    return add


def _make_apply(
    optimizer: optax.GradientTransformationExtraArgs, loop: Loop, has_aux: bool
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    def apply(state, window, **extra):
        check_made_by("apply(state, window)", optimizer, state)
        check_emit("apply(state, window, emit=...)", state.opt_state, extra)
        check_window("apply(state, window)", window, state, loop)
        whole, norm = _close(close_on_devices(loop, state.params, window))
        new, metrics = take_step(optimizer, state, whole, norm, extra, has_aux)
        if find_mesh(loop.caller, loop.spread) is not None:
            new = lie_as(state, new)
        return new, metrics

    return apply


def _add(
    job: Job,
    state: TrainState,
    window: WindowState | None,
    denominators: Any,
    accumulator: Accumulator,
) -> WindowState:
    """`window` with the micro-batches of `job` in it; a new one, if there is none."""
    if window is not None:
        job = job._replace(first=window.mini_step)
    form, split = form_of(job, accumulator), job.split
    loss = form.output.loss
    check_terms("add(state, batch, window)", loss, state.opt_state)
    _check_aux(form)
    dtype = weight_dtype(state.params, accumulator.dtype)
    known = _check_denominators(loss, denominators, window, dtype)
    unit = _unit(loss, known, job) if window is None else window.unit
    measure = Measure(_divisors(loss, known, unit))
    earlier = None if window is None else (window.acc_grads,)
    (sums,), whole, carry = sum_gradients(job, form, measure, accumulator, earlier)
    visited = split.num_microbatches + (split.remainder > 0)
    added = WindowState(
        mini_step=jnp.asarray(job.first + visited, jnp.int32),
        acc_grads=sums,
        unit=jnp.asarray(unit, dtype),
        loss=_merge_terms(whole["loss"], measure, unit, split.rows),
        aux=over_rows(whole["aux"], split.rows),
        counts=_counts(whole["loss"], known),
        denominators=known,
        model_state=carry[0] if carry else None,
    )
    return added if window is None else _merge(window, added)


def _unit(loss: Any, denominators: tuple, job: Job) -> ArrayLike:
    """What gradients are measured in, in all calls of a window that opens."""
    if denominators:
        return share_of_call(loss, denominators, job.split)
    return unit_of(loss, job.split)


def _divisors(loss: Any, denominators: tuple, unit: ArrayLike) -> tuple:
    """What the total of each term is divided by before it is differentiated."""
    if denominators:
        return tuple(denominator * unit for denominator in denominators)
    return (unit,) * len(terms_of(loss))


def _merge_terms(
    whole: Any, measure: Measure, unit: ArrayLike, rows: int
) -> Mean | Sum:
    """The loss of all micro-batches of a call, to be merged with those of others."""
    if isinstance(whole, Mean | RowMean):
        return over_rows(whole, rows)
    values = [t.value if isinstance(t, RowMean) else t for t in terms_of(whole)]
    value = objective(Terms(tuple(values)), measure, rows)
    return Sum(scale(value, unit, value.dtype))


def _counts(whole: Any, denominators: tuple[jax.Array, ...]) -> jax.Array | None:
    """Whether anything counts, of a loss of means alone."""
    counts = anything_counts(whole)
    if isinstance(counts, bool):
        return None
    if denominators:
        return functools.reduce(jnp.logical_or, [d != 0 for d in denominators])
    return counts


def _merge(window: WindowState, added: WindowState) -> WindowState:
    """`window` with a call in it. The sums of `added` are those of both already."""
    before, after = ((w.loss, w.aux) for w in (window, added))
    difference = find_difference(after, before, "(loss, aux)")
    if difference:
        raise TypeError(
            "`add(state, batch, window)` must be given a window of the same loss, got "
            f"one that another loss opened: {difference}; open a new one, with None."
        )
    (loss, aux), _ = fold(before, after)
    counts = added.counts
    if counts is not None and window.counts is not None:
        counts = jnp.logical_or(window.counts, counts)
    return added._replace(loss=loss, aux=aux, counts=counts)


def _close(window: WindowState) -> tuple[Accumulated, jax.Array]:
    """What a step is taken with, and the norm of its gradient.

    The mean gradient is a product, which the compiler repeats wherever it is read. A
    quotient it would store: 1 P. The two differ by one rounding, and so do doors 2 and
    3, but where the micro-batches are alike and a power of two in number.
    """
    sums, counts = read_sums(window.acc_grads), window.counts
    weight = 1 if counts is None else jnp.asarray(counts, jnp.float32)
    factor = window.unit
    if isinstance(window.loss, Mean):
        weight = window.loss.weight
        check_varies_alike(sums, weight)
        factor = ratio(window.unit, weight)
    grads = jax.tree.map(lambda total: scale(total, factor, total.dtype), sums)
    whole = Accumulated(
        loss=window.loss.value,
        aux=values_of(window.aux),
        grads=(grads,),
        carry=() if window.model_state is None else (window.model_state,),
        weight=weight,
        counts=True if counts is None else counts,
    )
    return whole, factor * global_norm(sums)


# -- What they must be given


def _check_aux(form: Form) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(form.markers["aux"], is_leaf=is_marker)
    growing = [
        f"`{type(marker).__name__}` at aux{jax.tree_util.keystr(path)}"
        for path, marker in leaves
        if not isinstance(marker, Mergeable)
    ]
    if growing:
        raise TypeError(
            "`add(state, batch, window)` must be given a loss whose aux can be put "
            f"together in a window that does not grow, got {', '.join(growing)}; take "
            "`Mean`, `Sum`, `Max`, `Min` or `Last`."
        )


def _check_denominators(
    loss: Any, given: Any, window: WindowState | None, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """The denominators of the whole window, if the loss needs them."""
    argument = "add(state, batch, window, denominators=...)"
    terms, needs = terms_of(loss), needs_denominators(loss)
    if window is not None and given is not None:
        raise ValueError(
            f"`{argument}` must be given when the window opens, with None, got an open "
            "window, which keeps those of its first call."
        )
    if window is not None:
        return window.denominators
    if needs and given is None:
        raise ValueError(
            f"`{argument}` must be given with a loss of several terms, got None for "
            f"{len(terms)} terms; give the denominator of each over the whole window, "
            "or put what is the same for all rows inside the mean, "
            "`mean(losses + 0.01 * decay, where=mask)`."
        )
    if given is None:
        return ()
    if not needs:
        raise ValueError(
            f"`{argument}` must be left out with a loss of one term or of sums, got "
            f"{_shown(given)}; the window adds up what it has seen."
        )
    is_one_each = isinstance(given, tuple | list) and len(given) == len(terms)
    if not is_one_each or not all(is_real(d) and jnp.shape(d) == () for d in given):
        raise TypeError(
            f"`{argument}` must be a tuple of a real scalar for each term, got "
            f"{_shown(given)} for {len(terms)} terms."
        )
    return tuple(jnp.asarray(d).astype(dtype) for d in given)


def _shown(given: Any) -> str:
    return str(jax.tree.map(kind_of, given)).replace("'", "")
