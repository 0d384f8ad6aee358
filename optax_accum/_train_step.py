"""Door 2: one large batch a call, split inside, one optimizer step after it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import optax
from jax.typing import DTypeLike

from optax_accum._auto import PlannedStep
from optax_accum._checks import check_optimizer
from optax_accum._loop import Loop, make_loop
from optax_accum._memory_limit import check_memory_limit
from optax_accum._mesh import lie_as
from optax_accum._numerics import global_norm
from optax_accum._placement import Gather
from optax_accum._planner import make_plan
from optax_accum._spread import Mesh, find_mesh
from optax_accum._state import check_made_by, model_inputs
from optax_accum._step import check_emit, check_terms, take_step


def make_train_step(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    num_microbatches: int | Literal["auto"] | None = None,
    microbatch_size: int | None = None,
    memory_limit: int | float | str | None = None,
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
) -> jax.stages.Wrapped:
    """Makes a jitted step that trains on a large batch in micro-batches.

    ``train_step(state, batch, *args, **extra)`` splits `batch` by rows, sums the
    gradients of its micro-batches in a ``lax.scan`` and steps the optimizer once, with
    the gradient of the whole batch. It is ``(carry, x) -> (carry, y)``, so that it can
    be the body of a scan.

    Args:
      loss_fn: called as ``loss_fn(params, microbatch, *args)``, returns the loss of
        these rows as for `value_and_grad`: a scalar, `mean`, `Sum`, or several of
        these, added; with `has_aux` a pair of that and a pytree of float scalars and
        markers. Where the state has a ``key``, the loss takes a keyword of that
        name: the key folded with ``state.step``, then with the micro-batch's number.
        Where it has a ``model_state``, the loss takes that keyword and returns the new
        one beside the loss: ``(loss, new)``, with `has_aux` ``(loss, (new, aux))``.
      optimizer: the one that made the state. Its ``update`` also receives ``weight=``
        (see below) and ``value=`` (the loss), if it takes extra arguments, and the
        arrays passed as `extra`, which override these two. Under `accumulate`, a window
        of several calls is then weighed as one batch. That needs a loss of one term: of
        several, the denominators are known only when the window closes. Put what is the
        same for all rows inside: ``mean(losses + 0.01 * decay, where=mask)``. (A
        function, such as a line search wants, cannot pass ``jit``: take `accumulate` in
        a loop of yours.)
      num_microbatches: N, an integer >= 1 that divides the rows; default 1. Or
        ``"auto"``: for each batch shape that it meets, the step finds the largest
        micro-batch that fits as `plan_microbatches` does, when it is first called, logs
        the table (``logging.getLogger("optax_accum")``, level INFO) and keeps to it.
        Such a step is called outside of ``jit`` and ``scan``.
      microbatch_size: as for `value_and_grad`.
      memory_limit: for ``"auto"``, as for `plan_microbatches`.
      group_size: as for `value_and_grad`.
      has_aux: whether `loss_fn` returns something to report beside the loss.
      batch_axis: the axis of the rows, in every array of the batch. All rows are in
        that one argument, a pytree such as ``(x, y)``; `args` are not split.
      accumulator_dtype: dtype of the sums, see `value_and_grad`. The mean reaches the
        optimizer in it.
      compensated: as for `value_and_grad`; the mean reaches the optimizer in float32.
      in_place: as for `value_and_grad`. For models that scan over their layers.
      unroll: micro-batches in one iteration of the loop.
      reduce_axes: as for `value_and_grad`: one reduction over devices a call. (Under
        `accumulate` that is one for each call of a window.)
      param_specs: as for `value_and_grad`, of the parameters.
      gather: as for `value_and_grad`.
      mesh: as for `value_and_grad`.
      donate: whether the step consumes the state it is given, which saves a copy. To
        use the old state after it is an error, "Array has been deleted": write
        ``state, metrics = train_step(state, batch)``, or say ``donate=False``.

    Returns:
      A ``jax.jit`` function ``(state, batch, *args, **extra) -> (state, metrics)``; for
      ``"auto"`` one that calls such functions, has ``lower`` as they do, and whose
      ``plan(state, batch, *args, **extra)`` is the `Plan` for such a call. The
      metrics are of all rows of the call, and but for rounding do not depend on N:
      ``loss``;
      ``grad_norm``, the global norm of the mean gradient, before any clipping;
      ``weight``, what the call weighs in a window: the total weight of a `Mean`, the
      rows of a plain scalar, 1 of others, unless `extra` says something else;
      ``emitted``, whether the optimizer stepped; and ``aux``. Where nothing counted,
      total weights of 0, there is no step. (An optimizer with `accumulate` anywhere in
      it is called all the same, with weight 0, for its window counts the call.)

    Raises:
      TypeError: as `value_and_grad`; when called, a state that is no `TrainState`.
      ValueError: as `value_and_grad`; when called, a state that another optimizer made,
        or a loss of several terms where a window crosses calls; a `memory_limit`
        without ``"auto"``; as `plan_microbatches` with it.

    Examples:
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] * params["w"] - batch["y"]) ** 2)
      >>> optimizer = optax.sgd(0.1)
      >>> state = optax_accum.init_train_state({"w": 1.0}, optimizer)
      >>> train_step = optax_accum.make_train_step(
      ...     loss_fn, optimizer, num_microbatches=2)
      >>> batch = {"x": jnp.arange(4.0), "y": jnp.ones(4)}
      >>> state, metrics = train_step(state, batch)
      >>> print(state.params["w"], metrics["loss"], metrics["grad_norm"])
      0.6 1.5 4.0
    """
    optimizer = check_optimizer("make_train_step(loss_fn, optimizer)", optimizer)
    loop = functools.partial(
        make_loop,
        "make_train_step",
        loss_fn,
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

    def build(num_microbatches):
        split = loop(num_microbatches=num_microbatches)
        return _jit_step(optimizer, split, has_aux, donate)

    if num_microbatches != "auto":
        _check_no_limit(memory_limit)
        return build(num_microbatches)
    _check_auto(microbatch_size)
    # Made now, so that what is wrong with the options is said.
    return _plan_step(build, loop(num_microbatches=None), group_size, memory_limit)


def _jit_step(
    optimizer: optax.GradientTransformationExtraArgs,
    loop: Loop,
    has_aux: bool,
    donate: bool,
) -> jax.stages.Wrapped:
    """The step with the gradient that `loop` makes of a call of the loss."""

    def train_step(state, batch, *args, **extra):
        check_made_by("train_step(state, batch)", optimizer, state)
        check_emit("train_step(state, batch, emit=...)", state.opt_state, extra)
        roles, keywords = model_inputs(state)
        call = (state.params, batch, *args), keywords
        whole, (loss, _) = loop.accumulate(roles, call)
        check_terms("train_step", loss, state.opt_state)
        norm = global_norm(whole.grads)
        new, metrics = take_step(optimizer, state, whole, norm, extra, has_aux)
        if find_mesh("make_train_step", loop.spread) is not None:
            new = lie_as(state, new)
        return new, metrics

    return jax.jit(train_step, donate_argnums=(0,) if donate else ())


def _plan_step(
    build: Callable[[int], jax.stages.Wrapped],
    loop: Loop,
    group_size: int,
    memory_limit: Any,
) -> PlannedStep:
    """The step that plans for itself."""
    return PlannedStep(
        functools.partial(
            make_plan,
            "make_train_step",
            build,
            memory_limit=check_memory_limit(
                "make_train_step(memory_limit=...)", memory_limit
            ),
            group_size=group_size,
            batch_axis=loop.batch_axis,
            accumulator=loop.accumulator,
            spread=loop.spread,
        )
    )


# -- Errors


def _check_no_limit(memory_limit: Any) -> None:
    if memory_limit is not None:
        raise ValueError(
            "`make_train_step(memory_limit=...)` must come with "
            f"`num_microbatches='auto'`, got {memory_limit!r} without; a number that "
            "is given is taken whatever it needs."
        )


def _check_auto(microbatch_size: Any) -> None:
    if microbatch_size is not None:
        raise ValueError(
            "`make_train_step(num_microbatches='auto')` must come without "
            f"`microbatch_size`, got {microbatch_size!r}; it is what shall be found."
        )
