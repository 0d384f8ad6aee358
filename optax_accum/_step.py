"""The end of every step: one update of the parameters with the gradient of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._accumulate import has_emitted
from optax_accum._call import AccumulateUpdateFn, accumulate_states
from optax_accum._loss import needs_denominators
from optax_accum._optimizer import Flag, apply_updates, step_if, update_inner
from optax_accum._scan import Accumulated
from optax_accum._state import TrainState
from optax_accum._terms import terms_of


def take_step(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    whole: Accumulated,
    grad_norm: jax.Array,
    extra: dict[str, Any],
    has_aux: bool,
) -> tuple[TrainState, dict[str, Any]]:
    """The state after a step with the gradient of all rows, and the metrics of them.

    Args:
      optimizer: the one that made `state`.
      state: what the gradient was taken at.
      whole: what all micro-batches came to.
      grad_norm: of its gradient.
      extra: more arguments for the optimizer, which override those of `whole`.
      has_aux: whether there is something to report beside the loss.
    """
    (grads,) = whole.grads
    given = {"weight": whole.weight, "value": whole.loss} | extra
    params, opt_state, emitted = _apply(optimizer, grads, state, given, whole.counts)
    metrics = {
        "loss": whole.loss,
        "grad_norm": grad_norm,
        "weight": jnp.asarray(given["weight"], whole.loss.dtype),
        "emitted": emitted,
    }
    new = TrainState(
        step=jnp.asarray(optax.safe_increment(state.step)),
        params=params,
        opt_state=opt_state,
        key=state.key,
        model_state=whole.carry[0] if whole.carry else None,
    )
    return new, metrics | {"aux": whole.aux} if has_aux else metrics


def _apply(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    state: TrainState,
    extra_args: dict[str, Any],
    counts: Flag,
) -> tuple[optax.Params, optax.OptState, Flag]:
    """Parameters and optimizer state, types kept, and whether there was a step."""
    params, opt_state = state.params, state.opt_state

    def step():
        updates, new = update_inner(
            optimizer, grads, params, opt_state, params, extra_args
        )
        return apply_updates(params, updates), new

    if isinstance(optimizer.update, AccumulateUpdateFn):
        params, opt_state = optimizer.update.apply(
            grads, opt_state, params, **extra_args
        )
    elif accumulate_states(opt_state):  # somewhere inside: its window counts the call
        params, opt_state = step()
    else:
        params, opt_state = step_if(counts, step, lambda: params, opt_state)
        return params, opt_state, jnp.asarray(counts)
    return params, opt_state, has_emitted(opt_state)


# -- What may cross calls


def check_terms(call: str, loss: Any, opt_state: optax.OptState) -> None:
    """The window in `opt_state` divides by one denominator."""
    states = accumulate_states(opt_state)
    is_open = any(jax.tree.leaves(state.acc_grads) for state in states)
    if needs_denominators(loss) and is_open:
        raise ValueError(
            f"`{call}` must be given a loss of one term where a window crosses calls, "
            f"got {len(terms_of(loss))}, whose denominators would have to be known "
            "when it opens; put what is the same for all rows inside the mean, "
            "`mean(losses + 0.01 * decay, where=mask)`, or take the whole window in "
            "one call."
        )


def check_emit(call: str, opt_state: Any, extra: dict[str, Any]) -> None:
    """Only a window can be closed."""
    if extra.get("emit") is not None and not accumulate_states(opt_state):
        raise ValueError(
            f"`{call}` must be given `emit` only with an optimizer that "
            "keeps a window between calls, got one that steps at every call; wrap it "
            "with `optax_accum.accumulate`."
        )
