"""Door 1: a gradient transformation that steps its optimizer once a window.

Letters: ``k`` calls make a window; ``P`` is one parameter-sized buffer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import SupportsIndex, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_accum._axes import check_axes
from optax_accum._call import (
    AccumulateUpdateFn,
    OnSkip,
    Rules,
    accumulate_states,
    init_state,
)
from optax_accum._checks import check_callable, check_choice, check_inner
from optax_accum._skip import SkipFn
from optax_accum._sums import check_accumulator
from optax_accum._window import Reduction, check_every_k


def accumulate(
    inner: optax.GradientTransformation,
    every_k: SupportsIndex | Callable[[jax.Array], ArrayLike] | None = None,
    *,
    reduction: Reduction = "mean",
    accumulator_dtype: DTypeLike | None = None,
    compensated: bool = False,
    skip_fn: SkipFn | None = None,
    on_skip: OnSkip = "microbatch",
    reduce_axes: str | Sequence[str] = (),
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
      reduce_axes: mesh axes of a ``shard_map`` in which all of this happens, ``init``
        too, on the gradients of each device's own rows. Each adds up its own, and the
        sums are added up over devices once, at the boundary, where `inner` gets the
        mean over all of them. A call is one of all devices: weights are added up over
        them; a device whose gradient is skipped weighs nothing, or costs all of them
        the window (``"window"``); a call is ignored (``"ignore"``) where all skip it.
        Gradients must be local: those with respect to parameters that JAX knows to be
        equal on all devices it has summed already, so differentiate at
        ``jax.lax.pcast(params, reduce_axes, to="varying")``. While a window is open,
        `acc_grads` differs from device to device, so open and close windows inside;
        what passes to the next ``shard_map`` is `inner_opt_state`:
        ``init(params)._replace(inner_opt_state=...)``. A further `accumulate` inside
        `inner` has no `reduce_axes`: what it gets is of all devices already.

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
    if skip_fn is not None:
        check_callable("accumulate(skip_fn=...)", skip_fn)
    rules = Rules(
        inner=check_inner(inner),
        every_k=check_every_k(every_k),
        reduction=reduction,
        accumulator=check_accumulator("accumulate", accumulator_dtype, compensated),
        skip_fn=skip_fn,
        on_skip=on_skip,
        reduce_axes=check_axes("accumulate(reduce_axes=...)", reduce_axes),
    )

    def init_fn(params):
        return init_state(rules, params)

    return optax.GradientTransformationExtraArgs(init_fn, AccumulateUpdateFn(rules))


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
    # Leaves, for Flax NNX wraps the arrays of an optimizer's state.
    flags = jax.tree.leaves([state.emitted for state in states])
    return functools.reduce(jnp.logical_or, flags)
