"""What ``python -m optax_accum plan`` plans: a user's own training, or an example."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from optax_accum._checks import check_choice, check_count, check_optimizer
from optax_accum._plan import Plan
from optax_accum._plan_microbatches import plan_microbatches
from optax_accum._state import TrainState, init_train_state
from optax_accum._trials import types_of


class Training(NamedTuple):
    """What shall be planned."""

    loss_fn: Callable
    optimizer: optax.GradientTransformation
    state: Any  # a `TrainState` of types
    batch: Any
    options: Mapping[str, Any] = {}  # of the step


def has_module(target: str) -> bool:
    """Whether the module is there that ``module:function`` names."""
    name = target.partition(":")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return False  # a package that it would be in
        raise


def load_function(target: str) -> Any:
    """What ``module:function`` names; None where the module has no such name.

    What goes wrong within the module is its own, and is not caught.
    """
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function, None)


def find_example(name: str, batch_size: int) -> Callable[[], Any]:
    """What makes a bundled model, with a batch of so many rows."""
    # Not at the top: only the examples need Flax.
    from optax_accum._examples import EXAMPLES

    check_choice("--example", name, tuple(EXAMPLES))
    check_count("--batch", batch_size)
    return functools.partial(EXAMPLES[name], batch_size)


def read_training(made: Any) -> Training:
    """What is planned where `made` was returned.

    That is ``(loss_fn, optimizer, params, batch)``, of arrays or their types; in place
    of `params` there may be a `TrainState`, and fifth a dict of the step's keywords.
    """
    if not isinstance(made, tuple) or len(made) not in (4, 5):
        count = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise TypeError(
            "the function that makes a training must return (loss_fn, optimizer, "
            "params, batch), and fifth a dict of the step's keywords if there are any, "
            f"got {type(made).__name__}{count}."
        )
    loss_fn, optimizer, params, batch, *options = made
    if options and not isinstance(options[0], Mapping):
        raise TypeError(
            "the fifth of what the function that makes a training returns must be a "
            "dict of the step's keywords, got "
            f"{type(options[0]).__name__}; such as {{'has_aux': True}}."
        )
    if isinstance(params, TrainState):
        return Training(*made)
    optimizer = check_optimizer("(loss_fn, optimizer, params, batch)", optimizer)
    state = jax.eval_shape(lambda tree: init_train_state(tree, optimizer), params)
    # The types of arrays that are there know how these lie on devices.
    state = state._replace(params=types_of(params))
    return Training(loss_fn, optimizer, state, batch, *options)


def plan_training(
    training: Training, memory_limit: int | float | str | None, exhaustive: bool
) -> Plan:
    """The plan for it."""
    loss_fn, optimizer, state, batch, options = training
    return plan_microbatches(
        loss_fn,
        optimizer,
        state,
        batch,
        memory_limit=memory_limit,
        exhaustive=exhaustive,
        **options,
    )
