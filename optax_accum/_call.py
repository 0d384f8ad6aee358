"""One call of door 1: where it brings the window, and what comes of that.

Letters: ``k`` calls make a window; ``P`` is one parameter-sized buffer.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_accum._axes import vary
from optax_accum._checks import check_flag, check_scalar, check_weight
from optax_accum._mesh import on_mesh_of
from optax_accum._numerics import add, cast_as, filled_like, settle, weight_dtype
from optax_accum._optimizer import Flag, apply_updates, negate, step_if, update_inner
from optax_accum._share import Shared, check_inside, check_local, share
from optax_accum._skip import SkipFn
from optax_accum._sums import Accumulator, read_sums, zero_sums
from optax_accum._window import (
    Reduction,
    Window,
    add_call,
    reduce_call,
    reduce_window,
    window_length,
)

OnSkip = Literal["microbatch", "window", "ignore"]


class AccumulateState(NamedTuple):
    """State of `accumulate`. Arrays only; the types never change after `init`.

    Attributes:
      mini_step: calls counted in the open window; 0 after a boundary.
      gradient_step: steps the wrapped optimizer has taken. It labels checkpoints, where
        there is one at most in a window.
      inner_opt_state: state of the wrapped optimizer, bit-identical between boundaries.
      acc_grads: weighted sum of the open window's gradients. Shapes of the parameters,
        float32 or wider (see `accumulate`); ``()`` where every call is a window. While
        `acc_weight` is 0 it means nothing: the last window's sum stands there until the
        next call writes over it, for zeros would cost a buffer and a pass over it.
      acc_weight: sum of the open window's weights.
      acc_value: weighted sum of the open window's values; like `acc_grads`.
      emitted: whether the last call stepped the wrapped optimizer.
      skipped: calls that `skip_fn` has refused since `init`.
      dropped: whether the open window will be thrown away (``on_skip="window"``).

    Examples:
      >>> tx = optax_accum.accumulate(optax.sgd(1.0), every_k=3)
      >>> _, state = tx.update(jnp.array(2.0), tx.init(jnp.array(0.0)), weight=64)
      >>> print(state.mini_step, state.gradient_step, state.acc_weight)
      1 0 64.0
    """

    mini_step: jax.Array  # shape=(), dtype=int32
    gradient_step: jax.Array  # shape=(), dtype=int32
    inner_opt_state: optax.OptState
    acc_grads: Any
    acc_weight: jax.Array  # shape=(), dtype=float32, or float64 beside such sums
    acc_value: jax.Array  # as acc_weight
    emitted: jax.Array  # shape=(), dtype=bool
    skipped: jax.Array  # shape=(), dtype=int32
    dropped: jax.Array  # shape=(), dtype=bool


class Rules(NamedTuple):
    """What `accumulate` was told."""

    inner: optax.GradientTransformationExtraArgs
    every_k: int | Callable[[jax.Array], ArrayLike]
    reduction: Reduction
    accumulator: Accumulator
    skip_fn: SkipFn | None
    on_skip: OnSkip
    reduce_axes: tuple[str, ...] = ()

    @property
    def every_call(self) -> bool:
        """Every call is a window, so that there is nothing to add up."""
        return self.every_k == 1


class AccumulateUpdateFn:
    """The ``update`` of `accumulate`, and an `apply` for a step that knows it."""

    def __init__(self, rules: Rules):
        self._rules = rules

    def __call__(
        self,
        updates: optax.Updates,
        state: Any,  # an `AccumulateState`; optax knows only of states
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Updates and state after a call: of a step at a boundary, else -0.0.

        Minus zero is the neutral element of addition, so that parameters keep their
        bits.
        """
        rules = self._rules
        call = _make_call(rules, state, updates, updates, params, **extra_args)
        # The dtypes that the inner optimizer alone gives for these gradients.
        outgoing = jax.eval_shape(
            lambda: _update_inner(rules, state, call, _of_all(rules, call.window))[0]
        )

        def finish(inner_updates):
            return cast_as(inner_updates, outgoing)

        def stand():
            if rules.reduce_axes:  # of gradients that differ, updates do not
                return jax.tree.map(lambda x: -filled_like(x, 0), outgoing)
            # zeros_like: the sharding of a gradient, and the axes over which it varies.
            return jax.tree.map(
                lambda x, g: -jnp.zeros_like(g, x.dtype), outgoing, updates
            )

        return _advance(rules, state, call, finish, stand)

    def apply(
        self,
        grads: optax.Updates,
        state: Any,
        params: optax.Params,
        **extra_args: Any,
    ) -> tuple[optax.Params, optax.OptState]:
        """Parameters and state after a call, the parameters changed in the branch.

        So no updates are made between boundaries. `grads` may be wider than `params`.
        """
        call = _make_call(self._rules, state, grads, params, params, **extra_args)
        return _advance(
            self._rules,
            state,
            call,
            finish=lambda updates: apply_updates(params, updates),
            stand=lambda: params,
        )


class _Call(NamedTuple):
    """What a call was given."""

    window: Window  # of this call alone; under `reduce_axes`, of this device alone
    shared: Shared
    incoming: Any  # a tree of the dtypes in which `inner` alone would receive gradients
    params: optax.Params | None
    extra_args: dict[str, Any]  # those of `inner`


class _Progress(NamedTuple):
    """Where a call brings the window."""

    window: Window
    mini_step: jax.Array
    dropped: Flag
    closes: Flag  # with this call
    steps: Flag  # the wrapped optimizer, with this call


def init_state(rules: Rules, params: optax.Params) -> AccumulateState:
    check_inside("init(params)", rules.reduce_axes)
    scalar = weight_dtype(params, rules.accumulator.dtype)
    sums = zero_sums(params, rules.accumulator)
    state = AccumulateState(
        mini_step=jnp.zeros((), jnp.int32),
        gradient_step=jnp.zeros((), jnp.int32),
        inner_opt_state=settle(rules.inner.init(params)),
        acc_grads=() if rules.every_call else vary(sums, rules.reduce_axes),
        acc_weight=jnp.zeros((), scalar),
        acc_value=vary(jnp.zeros((), scalar), rules.reduce_axes),
        emitted=jnp.zeros((), bool),
        skipped=jnp.zeros((), jnp.int32),
        dropped=jnp.zeros((), bool),
    )
    return on_mesh_of(params, state)


def _make_call(
    rules, state, grads, incoming, params, *, weight=1, value=None, emit=None, **others
) -> _Call:
    """A call, if it was given what it must be."""
    axes = rules.reduce_axes
    _check_made_for(state, grads, rules.every_call)
    check_inside("update(updates, state)", axes)
    check_local(grads, axes)
    skip = _decide(rules.skip_fn, grads, params)
    emit = emit is not None and check_flag("accumulate(...).update(emit=...)", emit)
    window = Window(grads, _weigh(weight, skip), _check_value(value))
    return _Call(
        window=window,
        shared=share(axes, window.weight, skip, emit, state.acc_weight.dtype),
        incoming=incoming,
        params=params,
        extra_args=others,
    )


def _advance(
    rules: Rules,
    state: AccumulateState,
    call: _Call,
    finish: Callable[[optax.Updates], Any],
    stand: Callable[[], Any],
) -> tuple[Any, AccumulateState]:
    """One call: what `finish` makes of the updates of a step, else ``stand()``."""
    progress = _add(rules, state, call)

    def step():
        mean = _mean_of(rules, progress.window, call.window)
        updates, inner_state = _update_inner(rules, state, call, mean)
        return finish(updates), inner_state

    inner_state = state.inner_opt_state
    result, inner_state = step_if(progress.steps, step, stand, inner_state)
    state = state._replace(
        gradient_step=_count(state.gradient_step, progress.steps),
        inner_opt_state=inner_state,
        emitted=jnp.asarray(progress.steps),
        skipped=_count(state.skipped, call.shared.skips),
    )
    return result, state if rules.every_call else _keep_window(state, progress)


def _mean_of(rules: Rules, window: Window, call: Window) -> Window:
    """What the wrapped optimizer receives where `call` closes `window`."""
    if rules.every_call and not rules.reduce_axes:
        return reduce_call(call, rules.reduction)
    sums = window._replace(value=None if call.value is None else window.value)
    # Inside the branch, which all devices take.
    return reduce_window(_of_all(rules, sums), call, rules.reduction)


def _of_all(rules: Rules, window: Window) -> Window:
    """The sums of all devices that share the rows."""
    if not rules.reduce_axes:
        return window
    sums = read_sums(window.grads), window.value
    grads, value = jax.lax.psum(sums, rules.reduce_axes)
    return window._replace(grads=grads, value=value)


def _update_inner(
    rules: Rules, state: AccumulateState, call: _Call, mean: Window
) -> tuple[optax.Updates, optax.OptState]:
    inner_state = state.inner_opt_state
    extra_args = _with_means(call.extra_args, mean, inner_state)
    return update_inner(
        rules.inner, mean.grads, call.incoming, inner_state, call.params, extra_args
    )


def _add(rules: Rules, state: AccumulateState, call: _Call) -> _Progress:
    """The window with `call` in it, and whether that closes it."""
    shared = call.shared
    drops = rules.skip_fn is not None and rules.on_skip == "window"
    dropped = state.dropped | shared.skipped if drops else False
    if rules.every_call:
        window, mini_step, closes = _alone(rules, call), state.mini_step, True
    else:
        sums = Window(state.acc_grads, state.acc_weight, state.acc_value)
        window = add_call(sums, call.window, shared.weight)
        counted = shared.counted if rules.on_skip == "ignore" else True
        mini_step = add(state.mini_step, counted)
        full = mini_step >= window_length(rules.every_k, state.gradient_step)
        closes = full & counted | shared.emit
    steps = closes & (window.weight != 0) & negate(dropped)
    return _Progress(window, mini_step, dropped, closes, steps)


def _alone(rules: Rules, call: _Call) -> Window:
    """A call that is its own window."""
    if not rules.reduce_axes:
        return call.window
    grads, accumulator = call.window.grads, rules.accumulator
    value = jnp.zeros((), weight_dtype(grads, accumulator.dtype))
    none = Window(zero_sums(grads, accumulator), 0.0, value)
    return add_call(none, call.window, call.shared.weight)


def _keep_window(state: AccumulateState, progress: _Progress) -> AccumulateState:
    """`state` with the open window in it, of which nothing counts once it is closed."""
    window, closes = progress.window, progress.closes
    return state._replace(
        mini_step=_zero_if(closes, progress.mini_step),
        acc_grads=window.grads,
        acc_weight=_zero_if(closes, window.weight),
        acc_value=window.value,
        dropped=jnp.asarray(negate(closes) & progress.dropped),
    )


def _decide(skip_fn: SkipFn | None, grads: Any, params: Any) -> Flag:
    if skip_fn is None:
        return False
    return check_flag("accumulate(skip_fn=...)", skip_fn(grads, params))


def _weigh(weight: Any, skip: Flag) -> float | jax.Array:
    weight = check_weight("accumulate(...).update(weight=...)", weight)
    return weight if skip is False else jnp.where(skip, 0, weight)


def _with_means(
    extra_args: dict[str, Any], mean: Window, inner_state: optax.OptState
) -> dict[str, Any]:
    """`extra_args`, with what the window knows better than its last call."""
    known = {} if mean.value is None else {"value": mean.value}
    if "grad" in extra_args:
        known["grad"] = mean.grads
    if accumulate_states(inner_state):  # a window of windows
        known["weight"] = mean.weight
    return extra_args | known


def _zero_if(flag: Flag, x: ArrayLike) -> jax.Array:
    return jnp.where(flag, jnp.zeros_like(x), x)


def _count(counter: jax.Array, times: Flag | ArrayLike) -> jax.Array:
    """`counter` and so many more, or as many as there can be."""
    if times is False:
        return counter
    most = jnp.iinfo(counter.dtype).max
    times = jnp.asarray(times).astype(counter.dtype)
    return jnp.where(counter > most - times, most, counter + times)


def accumulate_states(opt_state: optax.OptState) -> list[AccumulateState]:
    """Every outermost `AccumulateState` in `opt_state`."""

    def is_state(node):
        return isinstance(node, AccumulateState)

    leaves = jax.tree.leaves(opt_state, is_leaf=is_state)
    return [leaf for leaf in leaves if is_state(leaf)]


# -- Errors


def _check_value(value: Any) -> jax.Array | None:
    if value is None:
        return None
    check_scalar("accumulate(...).update(value=...)", value, "a real number")
    return jnp.asarray(value)


def _check_made_for(state: Any, updates: Any, every_call: bool) -> None:
    if not isinstance(state, AccumulateState):
        raise TypeError(
            "`accumulate(...).update(updates, state)` must be given an "
            f"`AccumulateState`, got {type(state).__name__}; make one with "
            "`init(params)`."
        )
    has_sums = bool(jax.tree.leaves(state.acc_grads))
    if has_sums == every_call and jax.tree.leaves(updates):
        got = "filled" if has_sums else "empty"
        raise ValueError(
            "`accumulate(...).update(updates, state)` must be given a state made under "
            f"the same kind of `every_k`, got one with {got} `acc_grads`; `every_k=1` "
            "keeps no sums, so to change `every_k` on resume, use a schedule: "
            "`every_k=lambda step: 1`."
        )
