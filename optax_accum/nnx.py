"""Flax NNX: gradients and steps for losses of modules.

Modules change when they are called: BatchNorm keeps statistics, Dropout counts. Flax
refuses that inside a scan, where the micro-batches are. So a module is taken apart
around the loop, what is not trained is carried from micro-batch to micro-batch, and in
the end the module has it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from optax_accum._arguments import (
    Roles,
    find_others,
    name_arguments,
    replace,
    values_at,
)
from optax_accum._axes import check_axes
from optax_accum._checks import check_callable
from optax_accum._modules import (
    Apart,
    beside,
    call_whole,
    check_chosen,
    check_given,
    check_module,
    check_streams,
    diff_state,
    find_nodes,
    take_apart,
)
from optax_accum._value import name_roles
from optax_accum._value_and_grad import value_and_grad as value_and_grad_of_arrays

__all__ = ["functional", "grad", "value_and_grad"]


def functional(
    loss_fn: Callable,
    model: Any,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    reduce_axes: str | Sequence[str] = (),
) -> tuple[Callable, nnx.State, nnx.State]:
    """A loss of a module, for the train steps and the planner.

    `make_train_step`, `make_window_steps` and `plan_microbatches` take functions of
    arrays. Give them the ``pure_loss`` that is returned, and `init_train_state` the
    ``params`` and the ``model_state``. After training, or whenever the module is to be
    used, ``nnx.update(model, state.params, state.model_state)`` brings it up to date.

    The first step consumes the arrays of `state`, which are those of `model`: until it
    is updated, the module cannot be used (``donate=False`` keeps it usable).

    Args:
      loss_fn: ``(model, batch, ...) -> loss``, a loss as `value_and_grad` takes it. It
        may call the module in training mode. It must leave the structure of the module
        as it is, and what is trained.
      model: an ``nnx.Module``. One of types alone, by ``nnx.eval_shape``, will do for
        planning.
      wrt: which of its variables are trained, an NNX filter.
      has_aux: whether `loss_fn` returns a pair, the loss first.
      reduce_axes: those of the step, if any, so that the random streams of the module
        are of each device's own.

    Returns:
      ``(pure_loss, params, model_state)``: the loss as a function of
      ``(params, batch, ..., model_state)`` that returns ``(loss, model_state)``, with
      `has_aux` ``(loss, (model_state, aux))``; what is trained, an ``nnx.State``; and
      all the rest of the module, another.

    Raises:
      TypeError: `model` is no module.
      ValueError: `wrt` chooses nothing; when called, a loss that changes the structure
        of the module, or what is trained.

    Examples:
      >>> def loss_fn(model, batch):
      ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> pure_loss, params, model_state = optax_accum.nnx.functional(loss_fn, model)
      >>> tx = optax.sgd(0.1)
      >>> state = optax_accum.init_train_state(params, tx, model_state=model_state)
      >>> step = optax_accum.make_train_step(pure_loss, tx, num_microbatches=2)
      >>> batch = {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 1))}
      >>> state, metrics = step(state, batch)
      >>> nnx.update(model, state.params, state.model_state)
    """
    call_of_user = "nnx.functional(loss_fn, model)"
    check_callable(f"the first argument of {call_of_user}", loss_fn)
    check_module(call_of_user, model)
    axes = check_axes("nnx.functional(reduce_axes=...)", reduce_axes)
    graphdef, params, model_state = nnx.split(model, wrt, ...)
    check_chosen(call_of_user, wrt, params)
    apart = Apart("nnx.functional", graphdef, (wrt,), axes)

    @functools.wraps(loss_fn)
    def pure_loss(params, batch, *args, model_state=None, **kwargs):
        state = check_given(model_state)
        check_streams(state, axes)

        def call(model):
            return loss_fn(model, batch, *args, **kwargs)

        returned, new = call_whole(call, apart, (params,), state)
        return beside(apart.caller, returned, new, has_aux)

    return pure_loss, params, model_state


def value_and_grad(
    fun: Callable,
    *,
    wrt: Any = nnx.Param,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] | None = None,
    batch_argnames: str | Sequence[str] | None = None,
    rng_argnums: int | Sequence[int] | None = None,
    rng_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> Callable:
    """``nnx.value_and_grad`` in micro-batches: same result, memory of one of them.

    What the modules keep beside parameters goes from micro-batch to micro-batch in
    order, and they have it afterwards: statistics of BatchNorm (which are then ghost
    batch normalization, not that of the large batch), and the counts of random streams,
    so that each micro-batch has dropout of its own. So do all modules, ``nnx.Rngs`` and
    variables among the arguments, but for those with rows. Call it under ``nnx.jit``.

    Args:
      fun: ``(model, batch, ...) -> loss``, a loss as `optax_accum.value_and_grad` takes
        it. It must leave the structure of the modules as it is (call ``model.train()``
        outside, and pop intermediates inside), and what is differentiated.
      wrt: what is differentiated, an NNX filter such as ``nnx.Param``.
      argnums: in which positional arguments. Default 0. An ``nnx.DiffState`` brings a
        filter of its own.
      has_aux: whether `fun` returns a pair, the loss first.
      batch_argnums: which arguments hold rows. Default 1, if `batch_argnames` is not
        given.
      batch_argnames: the same by keyword.
      rng_argnums: arguments that are JAX's random keys, folded for each micro-batch.
        The streams of modules and ``nnx.Rngs`` need no mention.
      rng_argnames: the same by keyword.
      **options: all others of `optax_accum.value_and_grad` but the carried argument:
        `num_microbatches`, `microbatch_size`, `reduce_axes` and more.

    Returns:
      A function with the arguments of `fun` that returns ``(value, gradient)`` as
      ``nnx.value_and_grad`` does, the gradient an ``nnx.State`` for
      ``nnx.Optimizer.update(model, gradient)``.

    Raises:
      TypeError: as `optax_accum.value_and_grad`; when called, a differentiated argument
        that is no module.
      ValueError: as `optax_accum.value_and_grad`; when called, a filter that chooses
        nothing, or a loss that changes the structure of the modules, or what is
        differentiated.

    Examples:
      >>> def loss_fn(model, batch):
      ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> @nnx.jit
      ... def train_step(model, optimizer, batch):
      ...     value_and_grad = optax_accum.nnx.value_and_grad(
      ...         loss_fn, wrt=nnx.Param, num_microbatches=2)
      ...     loss, grads = value_and_grad(model, batch)
      ...     optimizer.update(model, grads)
      ...     return loss
      >>> batch = {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 1))}
      >>> print(train_step(model, optimizer, batch).shape)
      ()
    """
    caller = "nnx.value_and_grad"
    is_single = not isinstance(argnums, tuple | list)
    chosen = [diff_state(x, wrt) for x in ((argnums,) if is_single else argnums)]
    roles = name_roles(
        caller,
        fun,
        name_arguments(fun, "argnums", [x.argnum for x in chosen], None),
        (batch_argnums, batch_argnames),
        (rng_argnums, rng_argnames),
        (None, None),
    )
    transform = functools.partial(
        value_and_grad_of_arrays,
        has_aux=has_aux,
        batch_argnums=1,
        carry_argnum=2,
        rng_argnums=3,
        **options,
    )
    transform(fun)  # now, so that what is wrong with the options is said
    axes = check_axes(f"{caller}(reduce_axes=...)", options.get("reduce_axes", ()))

    @functools.wraps(fun)
    def value_and_grad_fn(*args, **kwargs):
        places = find_nodes(caller, roles, args, kwargs)
        models, rows, keys, others = values_at(places, args, kwargs)
        rest = find_others(places, args, kwargs)
        nodes = (*models, *others)
        apart, params, state = take_apart(caller, nodes, chosen, axes)

        def call(nodes, rows, keys, values):
            count = len(chosen)
            everywhere = (*places.carried, *(place for place, _ in rest))
            given = Roles(nodes[:count], rows, keys, (*nodes[count:], *values))
            all_places = places._replace(carried=everywhere)
            inner_args, inner_kwargs = replace(args, kwargs, all_places, given)
            return fun(*inner_args, **inner_kwargs)

        trained = params[0] if is_single else params
        # By name, for arrays that are closed over cannot lie on an Explicit mesh.
        named = {place.label: value for place, value in rest}
        value, grads = transform(_of_arrays(call, apart, is_single, has_aux))(
            trained, rows, state, keys, **named
        )
        loss, kept = value
        new, *aux = kept if has_aux else (kept,)
        nnx.update(nodes, new)
        return (loss, *aux) if has_aux else loss, grads

    return value_and_grad_fn


def grad(fun: Callable, **options: Any) -> Callable:
    """``nnx.grad`` in micro-batches: `value_and_grad` without the value.

    Args:
      fun: as for `value_and_grad`.
      **options: all keywords of `value_and_grad`.

    Returns:
      A function with the arguments of `fun` that returns the gradient, with `has_aux`
      ``(gradient, aux)``.

    Raises:
      TypeError: as `value_and_grad`.
      ValueError: as `value_and_grad`.

    Examples:
      >>> def loss_fn(model, batch):
      ...     return jnp.mean(model(batch) ** 2)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> grads = optax_accum.nnx.grad(loss_fn, num_microbatches=2)(
      ...     model, jnp.ones((4, 2)))
      >>> print(grads["kernel"].shape)
      (2, 1)
    """
    value_and_grad_fn = value_and_grad(fun, **options)

    @functools.wraps(fun)
    def grad_fn(*args, **kwargs):
        value, grads = value_and_grad_fn(*args, **kwargs)
        return (grads, value[1]) if options.get("has_aux") else grads

    return grad_fn


def _of_arrays(
    call: Callable, apart: Apart, is_single: bool, has_aux: bool
) -> Callable:
    """`call`, of whole modules and what else there is, as a function of arrays."""

    def fun_of_arrays(params, rows, state, keys, /, **rest):
        several = (params,) if is_single else params
        trained = [nnx.State({i: own}) for i, own in enumerate(several)]
        returned, new = call_whole(
            lambda nodes: call(nodes, rows, keys, rest.values()), apart, trained, state
        )
        return beside(apart.caller, returned, new, has_aux)

    return fun_of_arrays
