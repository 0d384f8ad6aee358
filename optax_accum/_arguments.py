"""Which arguments of a function are differentiated, split, folded or carried.

An argument is named by position or by keyword, as in ``jax.jit``, and is found however
the caller passes it.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from optax_accum._checks import check_index


class Place(NamedTuple):
    """Where a value stands in a call."""

    where: int | str  # args[int] or kwargs[str]
    label: str  # what an error shall call it


class Argument(NamedTuple):
    """One argument: the position and the keyword under which it may be passed."""

    num: int | None
    name: str | None
    has_default: bool = False


class Roles(NamedTuple):
    """Something for each role: its arguments, their places in a call, their values."""

    differentiated: tuple
    split: tuple
    folded: tuple = ()
    carried: tuple = ()  # none or one


def name_arguments(
    fun: Callable,
    option: str,
    nums: int | Sequence[int] | None,
    names: str | Sequence[str] | None,
) -> tuple[Argument, ...]:
    """The arguments that `nums` and `names` choose, in that order.

    Args:
      fun: whose arguments they are.
      option: what an error shall call `nums`, such as ``"batch_argnums"``.
      nums: positions.
      names: keywords.
    """
    chosen = [Argument(check_index(option, num), None) for num in _several(nums)]
    for name in _several(names):
        if not isinstance(name, str):
            raise TypeError(
                f"`{option.replace('num', 'name')}` must be a string or a tuple of "
                f"them, got {name!r}; positions go into `{option}`."
            )
        chosen.append(Argument(None, name))
    return tuple(_complete(argument, _parameters(fun)) for argument in chosen)


def find(caller: str, roles: Roles, args: Sequence, kwargs: dict[str, Any]) -> Roles:
    """The places of all arguments in a call.

    What is split or folded may be left out of a call where it has a default.
    """

    def places(role):
        may_lack = role in ("split", "folded")
        found = [
            _find(caller, argument, args, kwargs, may_lack and argument.has_default)
            for argument in getattr(roles, role)
        ]
        return tuple(place for place in found if place is not None)

    found = Roles(*map(places, Roles._fields))
    check_disjoint(caller, found)
    return found


def values_at(places: Roles, args: Sequence, kwargs: dict[str, Any]) -> Roles:
    """The values in these places of a call."""

    def value(place):
        in_order = isinstance(place.where, int)
        return args[place.where] if in_order else kwargs[place.where]

    return Roles(*(tuple(map(value, role)) for role in places))


def find_others(
    places: Roles, args: Sequence, kwargs: dict[str, Any]
) -> list[tuple[Place, Any]]:
    """The arguments of a call that have no role, and their values."""
    known = {place.where for role in places for place in role}
    given = [
        *((Place(num, f"args[{num}]"), value) for num, value in enumerate(args)),
        *((Place(name, name), value) for name, value in kwargs.items()),
    ]
    return [(place, value) for place, value in given if place.where not in known]


def replace(
    args: Sequence, kwargs: dict[str, Any], places: Roles, values: Roles
) -> tuple[list, dict[str, Any]]:
    """The call with other values in these places."""
    args, kwargs = list(args), dict(kwargs)
    flat = itertools.chain.from_iterable
    for place, value in zip(flat(places), flat(values), strict=True):
        (args if isinstance(place.where, int) else kwargs)[place.where] = value
    return args, kwargs


def check_disjoint(caller: str, roles: Roles) -> None:
    """Each argument has one role: what is split cannot be differentiated as well."""
    role_of: dict[Any, str] = {}
    for role, members in roles._asdict().items():
        for member in members:
            is_found = isinstance(member, Place)
            key, name = (
                (member.where, member.label) if is_found else (member, _label(member))
            )
            if key in role_of:
                raise ValueError(
                    f"`{caller}` must name each argument in one role, once, got "
                    f"argument `{name}` as {role_of[key]} and as {role}; give each its "
                    "own argument."
                )
            role_of[key] = role


def _find(
    caller: str,
    argument: Argument,
    args: Sequence,
    kwargs: dict[str, Any],
    may_lack: bool,
) -> Place | None:
    num, name, _ = argument
    if num is not None and -len(args) <= num < len(args):
        num %= len(args)
        return Place(num, name or f"args[{num}]")
    if name is not None and name in kwargs:
        return Place(name, name)
    if may_lack:
        return None
    raise ValueError(
        f"`{caller}` must find argument `{_label(argument)}` in every call, got "
        f"{len(args)} positional arguments and the keywords {sorted(kwargs)}; name it "
        "by `...argnums` or `...argnames` as it is passed."
    )


def _label(argument: Argument) -> str:
    return argument.name or f"args[{argument.num}]"


def _parameters(fun: Callable) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return ()


def _complete(argument: Argument, parameters: Iterable[inspect.Parameter]) -> Argument:
    """Fills in what the signature tells: the other way to pass it, and a default."""
    for num, parameter in enumerate(parameters):
        by_num = parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        by_name = parameter.kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        if (by_num and num == argument.num) or (
            by_name and parameter.name == argument.name
        ):
            return Argument(
                num if by_num else None,
                parameter.name if by_name else None,
                parameter.default is not inspect.Parameter.empty,
            )
    return argument


def _several(chosen: Any) -> tuple:
    if chosen is None:
        return ()
    return tuple(chosen) if isinstance(chosen, tuple | list) else (chosen,)
