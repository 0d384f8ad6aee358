"""Door 2: one large batch a call, split inside, one optimizer step after it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_accum._accumulate import accumulate_states, has_emitted
from optax_accum._arguments import Argument, Roles
from optax_accum._checks import check_accumulator, check_optimizer
from optax_accum._numerics import (
    cast_as,
    find_difference,
    global_norm,
    is_numeric,
    kind_of,
    settle,
    widen,
)
from optax_accum._optimizer import cond, update_inner
from optax_accum._scan import Accumulated, accumulate_gradients, check_floats, prepare
from optax_accum._split import is_key
from optax_accum._terms import Sum, terms_of


class TrainState(NamedTuple):
    """What a train step takes and gives back. Arrays only.

    Attributes:
      step: calls of the train step so far.
      params: what is trained.
      opt_state: state of the optimizer.
      key: where a key was given, folded with `step` and the number of the micro-batch
        before the loss sees it; never changes. None without.
      model_state: what the model carries from micro-batch to micro-batch, such as the
        statistics of BatchNorm. None without.
    """

    step: jax.Array  # shape=(), dtype=int32
    params: Any
    opt_state: Any
    key: jax.Array | None
    model_state: Any


def init_train_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    key: jax.Array | None = None,
    model_state: Any = None,
) -> TrainState:
    """Makes the state that `make_train_step`'s function takes.

    The state owns `params` and `model_state`: the first step consumes their buffers
    (``make_train_step(..., donate=False)`` keeps them). Keys and scalars are copied,
    and so is an array that occurs twice, as in tied weights or an optimizer that keeps
    the initial parameters, for a buffer can be given away once only.

    Args:
      params: pytree of floating or complex arrays.
      optimizer: any optax optimizer, one wrapped by `accumulate` too.
      key: a random key, typed or raw, for a loss that takes ``key``.
      model_state: pytree of arrays, for a loss that takes and returns ``model_state``.

    Returns:
      A `TrainState` with ``step`` 0.

    Raises:
      TypeError: `params` holds a leaf that is no floating or complex array, or `key`
        is no key.

    Examples:
      >>> state = optax_accum.init_train_state({"w": jnp.ones(3)}, optax.adam(1e-3))
      >>> print(state.step, state.params["w"].shape, state.key)
      0 (3,) None
    """
    optimizer = check_optimizer("init_train_state(params, optimizer)", optimizer)
    check_floats("init_train_state", {"params": params})
    _check_key(key)
    params = settle(params)
    return _own(
        TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=settle(optimizer.init(params)),
            key=key,
            model_state=settle(model_state),
        )
    )


def make_train_step(
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
    unroll: int | bool = 1,
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
      num_microbatches: N, an integer >= 1 that divides the rows. Default 1.
      microbatch_size: as for `value_and_grad`.
      group_size: as for `value_and_grad`.
      has_aux: whether `loss_fn` returns something to report beside the loss.
      batch_axis: the axis of the rows, in every array of the batch. All rows are in
        that one argument, a pytree such as ``(x, y)``; `args` are not split.
      accumulator_dtype: dtype of the sums, see `value_and_grad`. The mean reaches the
        optimizer in it.
      compensated: as for `value_and_grad`; the mean reaches the optimizer in float32.
      unroll: micro-batches in one iteration of the loop.
      donate: whether the step consumes the state it is given, which saves a copy. To
        use the old state after it is an error, "Array has been deleted": write
        ``state, metrics = train_step(state, batch)``, or say ``donate=False``.

    Returns:
      A ``jax.jit`` function ``(state, batch, *args, **extra) -> (state, metrics)``. The
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
        or a loss of several terms where a window crosses calls.

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
    check_accumulator("make_train_step", accumulator_dtype, compensated)
    job = prepare(
        "make_train_step",
        loss_fn,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        group_size=group_size,
        has_aux=has_aux,
        batch_axis=batch_axis,
        unroll=unroll,
    )

    def train_step(state, batch, *args, **extra):
        _check_made_by(optimizer, state)
        _check_emit(state.opt_state, extra)
        roles, keywords = _model_inputs(state)
        called = job(roles, (state.params, batch, *args), keywords)
        whole = accumulate_gradients(called, accumulator_dtype, compensated)
        (grads,) = whole.grads

        _check_terms(whole, state.opt_state)
        given = {"weight": whole.weight, "value": whole.loss} | extra
        params, opt_state, emitted = _apply(
            optimizer, grads, state, given, whole.counts
        )
        metrics = {
            "loss": whole.loss,
            "grad_norm": global_norm(grads),
            "weight": jnp.asarray(given["weight"], whole.loss.dtype),
            "emitted": emitted,
        }
        return (
            TrainState(
                step=jnp.asarray(optax.safe_increment(state.step)),
                params=params,
                opt_state=opt_state,
                key=state.key,
                model_state=whole.carry[0] if whole.carry else None,
            ),
            metrics | {"aux": whole.aux} if has_aux else metrics,
        )

    return jax.jit(train_step, donate_argnums=(0,) if donate else ())


def _model_inputs(state: TrainState) -> tuple[Roles, dict[str, Any]]:
    """What the loss takes by keyword, and which arguments are what."""
    rng, carry, keywords = (), (), {}
    if state.key is not None:
        rng = (Argument(None, "key"),)
        keywords["key"] = jax.random.fold_in(state.key, state.step)
    if state.model_state is not None:
        carry = (Argument(None, "model_state"),)
        keywords["model_state"] = state.model_state
    trained, batch = Argument(0, "params"), Argument(1, "batch")
    return Roles((trained,), (batch,), rng, carry), keywords


def _apply(optimizer, grads, state, extra_args, counts):
    """Parameters and optimizer state, types kept, and whether there was a step."""

    def step():
        updates, opt_state = update_inner(
            optimizer, grads, state.params, state.opt_state, state.params, extra_args
        )
        # A narrow parameter and a wide update are added wide, and rounded once.
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(widen(state.params), updates)
        return cast_as(params, state.params), opt_state

    if accumulate_states(state.opt_state):
        params, opt_state = step()
        return params, opt_state, has_emitted(opt_state)
    stood = state.params, state.opt_state
    return *cond(counts, step, lambda: stood), jnp.asarray(counts)


def _own(tree: Any) -> Any:
    """`tree` with every buffer once, so that each can be given away.

    Keys and scalars are copied in any case: an optimizer may have got them from its
    maker, who uses them again.
    """
    seen = set()

    def own(leaf):
        if jnp.ndim(leaf) == 0 or is_key(leaf) or _buffer(leaf) in seen:
            leaf = jnp.copy(leaf)
        seen.add(_buffer(leaf))
        return leaf

    return jax.tree.map(own, tree)


def _buffer(leaf: jax.Array) -> Any:
    """What two arrays have in common if they are one in memory."""
    if isinstance(leaf, jax.core.Tracer) or not is_numeric(leaf):
        return id(leaf)
    shards = (shard.data for shard in leaf.addressable_shards)
    return tuple(data.unsafe_buffer_pointer() for data in shards if data.size)


def _check_key(key: Any) -> None:
    if key is not None and not (is_key(key) and jax.random.key_data(key).ndim == 1):
        raise TypeError(
            f"`init_train_state(key=...)` must be a random key, got {kind_of(key)}; "
            "write `jax.random.key(0)`."
        )


def _check_made_by(optimizer: optax.GradientTransformation, state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            "`train_step(state, batch)` must be given a `TrainState`, got "
            f"{type(state).__name__}; make one with "
            "`init_train_state(params, optimizer)`."
        )
    expected = jax.eval_shape(optimizer.init, state.params)
    difference = find_difference(state.opt_state, expected)
    if difference:
        raise ValueError(
            "`train_step(state, batch)` must be given a state that its optimizer made, "
            f"got an `opt_state` of another one, {difference}; make it with "
            "`init_train_state(params, optimizer)` of the same optimizer."
        )


def _check_terms(whole: Accumulated, opt_state: optax.OptState) -> None:
    terms = terms_of(whole.returned[0])
    states = accumulate_states(opt_state)
    is_one = len(terms) == 1 or all(isinstance(term, Sum) for term in terms)
    if not is_one and any(jax.tree.leaves(state.acc_grads) for state in states):
        raise ValueError(
            "`train_step` must be given a loss of one term where a window crosses "
            f"calls, got {len(terms)}, whose denominators would have to be known when "
            "it opens; put what is the same for all rows inside the mean, "
            "`mean(losses + 0.01 * decay, where=mask)`, or take the whole window in "
            "one call."
        )


def _check_emit(opt_state: Any, extra: dict[str, Any]) -> None:
    if extra.get("emit") is not None and not accumulate_states(opt_state):
        raise ValueError(
            "`train_step(state, batch, emit=...)` must be given to an optimizer that "
            "keeps a window between calls, got one that steps at every call; wrap it "
            "with `optax_accum.accumulate`."
        )
