"""What arguments must be; an error says that, what it got, and the cure."""

import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum._numerics import is_numeric, kind_of


def shown(x: Any) -> str:
    """What was given: itself where that is short, else what it is."""
    text = repr(x)
    return text if len(text) <= 40 else kind_of(x)


def check_index(argument: str, index: Any) -> int:
    """`index` as an ``int``, if it is one and no bool."""
    if not isinstance(index, (bool, np.bool_)):
        try:
            return operator.index(index)
        except TypeError:
            pass  # said below, in words of the argument
    raise TypeError(f"`{argument}` must be an integer, got {index!r}.")


def check_count(argument: str, count: Any) -> int:
    """`count` as an ``int``, if it is an integer >= 1."""
    expected = f"`{argument}` must be an integer >= 1, got {count!r}."
    try:
        index = check_index(argument, count)
    except TypeError:
        raise TypeError(expected) from None
    if index < 1:
        raise ValueError(expected)
    return index


def check_unroll(caller: str, unroll: Any) -> int | bool:
    if isinstance(unroll, bool):
        return unroll
    return check_count(f"{caller}(unroll=...)", unroll)


def check_scalar(
    argument: str, x: Any, kind: Literal["a bool", "a real number"]
) -> Any:
    """`x`, if it is one scalar of that kind."""
    if is_numeric(x) and jnp.shape(x) == ():
        dtype = jnp.result_type(x)
        is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
        if dtype == jnp.bool_ or (kind == "a real number" and is_real):
            return x
    raise TypeError(f"`{argument}` must be {kind}, a scalar, got {kind_of(x)}.")


def check_flag(argument: str, flag: Any) -> bool | jax.Array:
    """`flag` as a ``bool`` where it is known while tracing, else a scalar of bool."""
    check_scalar(argument, flag, "a bool")
    return flag if isinstance(flag, jax.core.Tracer) else bool(flag)


def check_weight(argument: str, weight: Any) -> float | jax.Array:
    """`weight` as a ``float`` where it is known while tracing, else a real scalar."""
    check_scalar(argument, weight, "a real number")
    if isinstance(weight, jax.core.Tracer):
        return weight
    if not 0 <= float(weight) < np.inf:
        raise ValueError(
            f"`{argument}` must be >= 0 and finite, got {float(weight)!r}; it counts "
            "rows or tokens."
        )
    return float(weight)


def check_optimizer(call: str, optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, made to accept extra arguments."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"`optimizer` in `{call}` must be a gradient transformation, got "
            f"{shown(optimizer)}; write `optax.adam(1e-3)`, say, in this order."
        )
    return optax.with_extra_args_support(optimizer)


def check_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer that `accumulate` shall wrap, made to accept extra arguments."""
    if isinstance(inner, optax.MultiSteps):
        raise TypeError(
            "`accumulate(inner, every_k)` must be given the optimizer itself, got one "
            "wrapped by `optax.MultiSteps`, which does the same; unwrap it."
        )
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "`accumulate(inner, every_k)` must be given the optimizer to wrap first, "
            f"got {shown(inner)}; write `accumulate(optax.adam(1e-3), every_k=4)`. It "
            "is no link in front of a stateful optimizer, whose moments would see the "
            "zeros of the calls in between; in front of stateless transformations "
            "alone, `accumulate(optax.identity(), every_k=4)` is one."
        )
    return optax.with_extra_args_support(inner)


def check_callable(argument: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(f"`{argument}` must be a function, got {shown(function)}.")


def check_choice(argument: str, choice: Any, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(choices)}, got {choice!r}."
        )
