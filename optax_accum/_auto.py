"""A step that plans for itself: once for each batch shape that it meets."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax

from optax_accum._numerics import kind_of
from optax_accum._plan import Plan

_logger = logging.getLogger("optax_accum")


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedStep:
    """A train step that chooses its number of micro-batches. A ``jax.stages.Wrapped``.

    Attributes:
      plan: makes the plan for a call, ``(args, extra) -> Plan``.
      steps: those in use, by the shapes that they were planned for.
    """

    plan: Callable[[tuple, dict[str, Any]], Plan]
    steps: dict[Any, jax.stages.Wrapped] = dataclasses.field(default_factory=dict)

    def __call__(self, state: Any, batch: Any, *args: Any, **extra: Any) -> Any:
        step = self._step_for((state, batch, *args), extra)
        return step(state, batch, *args, **extra)

    def trace(
        self, state: Any, batch: Any, *args: Any, **extra: Any
    ) -> jax.stages.Traced:
        step = self._step_for((state, batch, *args), extra)
        return step.trace(state, batch, *args, **extra)

    def lower(
        self, state: Any, batch: Any, *args: Any, **extra: Any
    ) -> jax.stages.Lowered:
        return self.trace(state, batch, *args, **extra).lower()

    def _step_for(self, args: tuple, extra: dict[str, Any]) -> jax.stages.Wrapped:
        key = _key_of(args, extra)
        if key not in self.steps:
            plan = self.plan(args, extra)
            _logger.info("num_microbatches='auto': %s", plan)
            self.steps[key] = plan.trials.step(plan.num_microbatches)
        return self.steps[key]


def _key_of(args: tuple, extra: dict[str, Any]) -> Any:
    """What tells calls apart that need a plan of their own.

    How the batch lies on devices is part of it. Of the state it is not, for the first
    step may lay it out anew, and the plan shall stay. All else in a state follows from
    its parameters; what is left out here is not read at every call.
    """
    state, batch, *_ = args
    params = getattr(state, "params", state)
    leaves, structure = jax.tree.flatten((params, args[1:], extra))
    _check_no_trace(leaves)
    shapes = [(getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves]
    placed = [getattr(x, "sharding", None) for x in jax.tree.leaves(batch)]
    return structure, tuple(shapes), tuple(placed)


def _check_no_trace(leaves: list[Any]) -> None:
    tracer = next((x for x in leaves if isinstance(x, jax.core.Tracer)), None)
    if tracer is not None:
        raise ValueError(
            "the step of `make_train_step(num_microbatches='auto')` must be called "
            f"outside of `jit` and `scan`, got {kind_of(tracer)} of a trace; in there, "
            "the memory of one step says nothing of that of the whole program. Find N "
            "with `plan_microbatches` before."
        )
