"""Door 1: a gradient transformation that steps its optimizer once a window.

Letters: ``k`` calls make a window; ``P`` is one parameter-sized buffer.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_accum._checks import (
    check_accumulator,
    check_callable,
    check_choice,
    check_flag,
    check_inner,
    check_scalar,
    check_weight,
)
from optax_accum._numerics import add, settle, weight_dtype
from optax_accum._optimizer import Flag, step_if, update_inner
from optax_accum._skip import SkipFn
from optax_accum._sums import zero_sums
from optax_accum._window import (
    Reduction,
    Window,
    add_call,
    check_every_k,
    reduce_call,
    reduce_window,
    window_length,
)

OnSkip = Literal["microbatch", "window", "ignore"]


class AccumulateState(NamedTuple):
    """State of `accumulate`. Arrays only; the types never change after `init`.

    Attributes:
      mini_step: calls counted in the open window; 0 after a boundary.
      gradient_step: steps the wrapped optimizer has taken. Label checkpoints with it.
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


def accumulate(
    inner: optax.GradientTransformation,
    every_k: SupportsIndex | Callable[[jax.Array], ArrayLike] | None = None,
    *,
    reduction: Reduction = "mean",
    accumulator_dtype: DTypeLike | None = None,
    compensated: bool = False,
    skip_fn: SkipFn | None = None,
    on_skip: OnSkip = "microbatch",
) -> optax.GradientTransformationExtraArgs:
    r"""Steps `inner` once for every `every_k` calls, with the mean of their gradients.

    With gradients :math:`g_i` and weights :math:`w_i` of the calls in a window, the
    wrapped optimizer sees :math:`\sum_i w_i g_i / \sum_i w_i`. Between boundaries the
    updates are zeros (-0.0, so that parameters stay bit-identical), the inner state
    does not change and `inner` is not evaluated. The state costs 1 P beyond the inner
    state, and nothing where `every_k` is the integer 1.

    `inner` is the whole optimizer, clipping and weight decay included.
    ``accumulate(optax.identity(), k)`` is the bare link that emits the mean: right in
    front of stateless transformations only, for a stateful one would see the zeros.

    The ``update`` function takes, beyond what `inner` takes:

    * ``weight``: what this call counts for in the mean, a scalar >= 0, by default 1.
      Weight 0 adds exactly nothing, whatever the gradient. (Under ``jit`` a negative
      one cannot be refused.) A further `accumulate` inside `inner` receives the total.
    * ``value``: the loss of this call, a scalar. At a boundary `inner` receives the
      window's weighted mean of it. Give it at every call of a window or at none.
      Where ``grad`` is given too, `inner` receives the window's mean gradient as that.
    * ``emit``: True closes the window with this call, however full it is (the last
      window of an epoch). The mean is over what was really seen.

    Any other extra argument reaches `inner` from the call that closes the window.

    A window of total weight 0 emits zeros, leaves the inner state alone and is no
    gradient step. Without a `skip_fn`, a NaN reaches the mean of its own window and of
    no other. Under ``vmap`` over the state both branches are evaluated, as for every
    ``lax.cond``.

    Args:
      inner: the optimizer to wrap. It may take extra arguments.
      every_k: calls in a window: an integer >= 1, or a schedule that maps the gradient
        step to one (scalar ``int32`` to a scalar of an integer dtype; below 1 is 1).
        State restored under a smaller value closes its window at the next call.
      reduction: ``"mean"``, or ``"sum"`` to hand `inner` the weighted sum.
      accumulator_dtype: dtype of the sums of real leaves. By default a leaf's own
        where that is float32 or float64, else float32. Complex leaves keep their own.
        The mean reaches `inner` in this precision, unless `inner` accepts no other
        dtype than that of the incoming gradients; updates leave in the dtype that
        `inner` alone would give for those.
      compensated: whether a sum of fewer than 32 bits keeps beside it what rounding
        took, in as many bits again. Where `acc_grads` must be narrow: it is as large as
        one in float32, and less exact.
      skip_fn: decides whether a call is left out; see `skip_nonfinite` and
        `skip_norm_above`.
      on_skip: what becomes of a skipped call. ``"microbatch"``: it counts as a call
        and weighs nothing, so that boundaries never shift. ``"window"``: its whole
        window is thrown away. ``"ignore"``: as if it had never been made.

    Returns:
      A ``GradientTransformationExtraArgs`` whose state is an `AccumulateState`.

    Raises:
      TypeError: `inner` is no gradient transformation, or `every_k` neither an integer
        nor a callable.
      ValueError: `every_k` is smaller than 1, or `reduction` or `on_skip` is unknown.
      TypeError: from ``update``, where the state of `inner` would change its kind, as
        from None to an array or from integers to floats.

    Examples:
      >>> tx = optax_accum.accumulate(optax.sgd(1.0), every_k=2)
      >>> state = tx.init(jnp.array(0.0))
      >>> for grad in (1.0, 3.0):
      ...     update, state = tx.update(jnp.array(grad), state)
      ...     print(update, optax_accum.has_emitted(state))
      -0.0 False
      -2.0 True

    References:
      Ott et al., `Scaling Neural Machine Translation
      <https://arxiv.org/abs/1806.00187>`_, 2018, section 3.2 (delayed updates).
    """
    check_choice("accumulate(reduction=...)", reduction, get_args(Reduction))
    check_choice("accumulate(on_skip=...)", on_skip, get_args(OnSkip))
    check_accumulator("accumulate", accumulator_dtype, compensated)
    if skip_fn is not None:
        check_callable("accumulate(skip_fn=...)", skip_fn)
    rules = _Rules(
        inner=check_inner(inner),
        every_k=check_every_k(every_k),
        reduction=reduction,
        accumulator_dtype=accumulator_dtype,
        compensated=compensated,
        skip_fn=skip_fn,
        on_skip=on_skip,
    )

    def init_fn(params):
        return _init(rules, params)

    def update_fn(
        updates, state, params=None, *, weight=1, value=None, emit=None, **extra_args
    ):
        return _update(rules, updates, state, params, weight, value, emit, extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def has_emitted(opt_state: optax.OptState) -> jax.Array:
    """Whether the last call really stepped an optimizer wrapped by `accumulate`.

    False after a skipped call, and after a boundary whose window weighed nothing or was
    dropped. The `AccumulateState` is found wherever it lies in the state of a chain,
    a mask, a partition; where there are several, one that stepped is enough.

    Args:
      opt_state: any optimizer state that holds an `AccumulateState`.

    Returns:
      Shape ``()``, bool.

    Raises:
      ValueError: there is no `AccumulateState` in `opt_state`.

    Examples:
      >>> tx = optax.chain(optax_accum.accumulate(optax.adam(1e-3), every_k=1))
      >>> _, state = tx.update(jnp.array(2.0), tx.init(jnp.array(0.0)))
      >>> bool(optax_accum.has_emitted(state))
      True
    """
    states = accumulate_states(opt_state)
    if not states:
        raise ValueError(
            "`has_emitted(opt_state)` must be given a state that holds an "
            f"`AccumulateState`, got {jax.tree.structure(opt_state)}; wrap the "
            "optimizer with `optax_accum.accumulate`."
        )
    return functools.reduce(jnp.logical_or, [state.emitted for state in states])


def accumulate_states(opt_state: optax.OptState) -> list[AccumulateState]:
    """Every outermost `AccumulateState` in `opt_state`."""

    def is_state(node):
        return isinstance(node, AccumulateState)

    leaves = jax.tree.leaves(opt_state, is_leaf=is_state)
    return [leaf for leaf in leaves if is_state(leaf)]


class _Rules(NamedTuple):
    """What `accumulate` was told."""

    inner: optax.GradientTransformationExtraArgs
    every_k: int | Callable[[jax.Array], ArrayLike]
    reduction: Reduction
    accumulator_dtype: DTypeLike | None
    compensated: bool
    skip_fn: SkipFn | None
    on_skip: OnSkip

    @property
    def every_call(self) -> bool:
        """Every call is a window, so that there is nothing to add up."""
        return self.every_k == 1


class _Progress(NamedTuple):
    """Where a call brings the window."""

    window: Window
    mini_step: jax.Array
    dropped: Flag
    closes: Flag  # with this call
    steps: Flag  # the wrapped optimizer, with this call


def _init(rules: _Rules, params: optax.Params) -> AccumulateState:
    dtype = rules.accumulator_dtype
    scalar = weight_dtype(params, dtype)
    sums = zero_sums(params, dtype, rules.compensated)
    return AccumulateState(
        mini_step=jnp.zeros((), jnp.int32),
        gradient_step=jnp.zeros((), jnp.int32),
        inner_opt_state=settle(rules.inner.init(params)),
        acc_grads=() if rules.every_call else sums,
        acc_weight=jnp.zeros((), scalar),
        acc_value=jnp.zeros((), scalar),
        emitted=jnp.zeros((), bool),
        skipped=jnp.zeros((), jnp.int32),
        dropped=jnp.zeros((), bool),
    )


def _update(rules, updates, state, params, weight, value, emit, extra_args):
    """Updates and state after a call: of a step at a boundary, else zeros."""
    _check_made_for(state, updates, rules.every_call)
    emit = emit is not None and check_flag("accumulate(...).update(emit=...)", emit)
    skip = _decide(rules.skip_fn, updates, params)
    call = Window(updates, _weigh(weight, skip), _check_value(value))
    progress = _add(rules, state, call, skip, emit)

    def update(mean):
        inner_state = state.inner_opt_state
        extra = _with_means(extra_args, mean, inner_state)
        return update_inner(
            rules.inner, mean.grads, updates, inner_state, params, extra
        )

    def step():
        if rules.every_call:
            return update(reduce_call(call, rules.reduction))
        return update(reduce_window(progress.window, call, rules.reduction))

    # The updates leave in the dtypes that the inner optimizer alone gives for these.
    outgoing = jax.eval_shape(lambda: update(call)[0])
    emitted, inner_opt_state = step_if(
        progress.steps, step, updates, outgoing, state.inner_opt_state
    )
    state = state._replace(
        gradient_step=_count(state.gradient_step, progress.steps),
        inner_opt_state=inner_opt_state,
        emitted=jnp.asarray(progress.steps),
        skipped=_count(state.skipped, skip),
    )
    return emitted, state if rules.every_call else _keep_window(state, progress)


def _add(
    rules: _Rules, state: AccumulateState, call: Window, skip: Flag, emit: Flag
) -> _Progress:
    """The window with `call` in it, and whether that closes it."""
    drops = rules.skip_fn is not None and rules.on_skip == "window"
    dropped = state.dropped | skip if drops else False
    if rules.every_call:
        window, mini_step, closes = call, state.mini_step, True
    else:
        sums = Window(state.acc_grads, state.acc_weight, state.acc_value)
        window = add_call(sums, call)
        counted = _not(skip) if rules.on_skip == "ignore" else True
        mini_step = add(state.mini_step, counted)
        full = mini_step >= window_length(rules.every_k, state.gradient_step)
        closes = full & counted | emit
    steps = closes & (window.weight != 0) & _not(dropped)
    return _Progress(window, mini_step, dropped, closes, steps)


def _keep_window(state: AccumulateState, progress: _Progress) -> AccumulateState:
    """`state` with the open window in it, of which nothing counts once it is closed."""
    window, closes = progress.window, progress.closes
    return state._replace(
        mini_step=_zero_if(closes, progress.mini_step),
        acc_grads=window.grads,
        acc_weight=_zero_if(closes, window.weight),
        acc_value=window.value,
        dropped=jnp.asarray(_not(closes) & progress.dropped),
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


def _count(counter: jax.Array, happened: Flag) -> jax.Array:
    return jnp.where(happened, optax.safe_increment(counter), counter)


def _not(flag: Flag) -> Flag:
    return not flag if isinstance(flag, bool) else jnp.logical_not(flag)


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
