"""A step that plans for itself: once for each batch shape that it meets."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax

from optax_accum._plan import Plan
from optax_accum._state import TrainState
from optax_accum._trials import types_of

_logger = logging.getLogger("optax_accum")


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedStep:
    """A train step that chooses its number of micro-batches. A ``jax.stages.Wrapped``.

    Attributes:
      make: makes the plan for a call, ``(args, extra) -> Plan``.
      plans: those made, by what they were made for.
    """

    make: Callable[[tuple, dict[str, Any]], Plan]
    plans: dict[Any, Plan] = dataclasses.field(default_factory=dict)

    def __call__(self, state: Any, batch: Any, *args: Any, **extra: Any) -> Any:
        step = self.plan(state, batch, *args, **extra).step
        return step(state, batch, *args, **extra)

    def plan(self, state: Any, batch: Any, *args: Any, **extra: Any) -> Plan:
        """The plan for such a call, which is made if there is none yet."""
        key = _key_of((state, batch, *args), extra)
        if key not in self.plans:
            plan = self.make((state, batch, *args), extra)
            _logger.info("num_microbatches='auto': %s", plan)
            self.plans[key] = plan
        return self.plans[key]

    def trace(
        self, state: Any, batch: Any, *args: Any, **extra: Any
    ) -> jax.stages.Traced:
        step = self.plan(state, batch, *args, **extra).step
        return step.trace(state, batch, *args, **extra)

    def lower(
        self, state: Any, batch: Any, *args: Any, **extra: Any
    ) -> jax.stages.Lowered:
        return self.trace(state, batch, *args, **extra).lower()


def _key_of(args: tuple, extra: dict[str, Any]) -> Any:
    """What tells calls apart that need a plan of their own.

    How the batch lies on devices is part of it. Of the state it is not, for the first
    step may lay it out anew, and the plan shall stay. The optimizer's state follows
    from the parameters, and is not read at every call.
    """
    state, *others = args
    if isinstance(state, TrainState):
        state = state._replace(opt_state=None)
    leaves, structure = jax.tree.flatten(state)
    shapes = [(getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves]
    types, places = jax.tree.flatten(types_of((others, extra)))
    return structure, tuple(shapes), places, tuple(map(_hashable, types))


def _hashable(leaf: Any) -> Any:
    """The type of an array; of a number, which may be another each time, its class."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else type(leaf)
