"""What arguments must be; an error says that, what it got, and the cure."""

import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from optax_accum._numerics import kind_of


def check_index(argument: str, index: Any) -> int:
    """`index` as an ``int``, if it is one and no bool."""
    if isinstance(index, (bool, np.bool_)) or not hasattr(index, "__index__"):
        raise TypeError(f"`{argument}` must be an integer, got {index!r}.")
    return operator.index(index)


def check_count(argument: str, count: Any) -> int:
    """`count` as an ``int``, if it is an integer >= 1."""
    if isinstance(count, (bool, np.bool_)) or not hasattr(count, "__index__"):
        raise TypeError(f"`{argument}` must be an integer >= 1, got {count!r}.")
    count = operator.index(count)
    if count < 1:
        raise ValueError(f"`{argument}` must be an integer >= 1, got {count!r}.")
    return count


def check_scalar(
    argument: str, x: Any, kind: Literal["a bool", "a real number", "an integer"]
) -> jax.Array:
    """`x` as an array, if it is one scalar of that kind."""
    x = jnp.asarray(x)
    is_kind = {
        "a bool": x.dtype == bool,
        "a real number": x.dtype == bool or jnp.isrealobj(x),
        "an integer": jnp.issubdtype(x.dtype, jnp.integer),
    }
    if x.shape != () or not is_kind[kind]:
        raise TypeError(f"`{argument}` must be {kind}, a scalar, got {kind_of(x)}.")
    return x


def check_accumulator_dtype(caller: str, dtype: DTypeLike | None) -> None:
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"`{caller}(accumulator_dtype=...)` must be a floating dtype or None, got "
            f"{jnp.dtype(dtype).name}; complex leaves are summed in their own dtype."
        )


def check_flag(argument: str, flag: Any) -> bool | jax.Array:
    """`flag` as a ``bool`` where it is known while tracing, else a scalar of bool."""
    if isinstance(flag, (bool, np.bool_)):
        return bool(flag)
    return check_scalar(argument, flag, "a bool")


def check_weight(argument: str, weight: Any) -> float | jax.Array:
    """`weight` as a ``float`` where it is known while tracing, else a real scalar."""
    if not isinstance(weight, (int, float, np.integer, np.floating)):
        return check_scalar(argument, weight, "a real number")
    if not weight >= 0:
        raise ValueError(
            f"`{argument}` must be >= 0, got {weight!r}; it counts rows or tokens."
        )
    return float(weight)


def check_optimizer(
    caller: str, optimizer: Any
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, made to accept extra arguments."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"`{caller}(optimizer)` must be a gradient transformation, got "
            f"{optimizer!r}; write `optax.adam(1e-3)`, say."
        )
    return optax.with_extra_args_support(optimizer)


def check_choice(argument: str, choice: Any, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(choices)}, got {choice!r}."
        )
