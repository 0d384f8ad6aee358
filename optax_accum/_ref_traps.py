"""Where JAX, adding gradients to refs, goes wrong; and how it is kept from it.

Seen on JAX 0.10.2, in silence but for the last one:

* a scan confuses refs with values that precede them among what it closes over, or among
  what it scans (https://github.com/jax-ml/jax/issues/32411, repaired in JAX 0.11 by
  https://github.com/jax-ml/jax/pull/38929);
* of a ref that an inner program is given twice, one gradient overwrites the other;
* a slice of a ref has no gradient (https://github.com/jax-ml/jax/pull/38913).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_OLDEST = (0, 10, 2)  # before, remat does not know refs either
_CHANGED = (0, 11)  # from then on programs look otherwise


def check_refs(caller: str) -> None:
    """Whether this JAX adds to refs rightly, if helped.

    JAX 0.10.2 is helped by `misread_leaves`. A newer one must need no help: it is tried
    once, on small programs.

    Raises:
      ValueError: it does not.
    """
    version = jax.__version_info__
    if version < _OLDEST:
        cure = "upgrade it"
    elif version < _CHANGED or not find_traps():
        return
    else:
        cure = f"it goes wrong with {', '.join(find_traps())}"
    raise ValueError(
        f"`{caller}(in_place=True)` must run on a JAX that adds gradients to refs "
        f"rightly, which 0.10.2 does with our help, got {jax.__version__}; {cure}, or "
        "leave `in_place` out."
    )


# -- JAX 0.10: leaves that must be added by value


def misread_leaves(backward: Any) -> frozenset[int]:
    """The leaves of what ``jax.vjp`` returned that may not be refs."""
    if jax.__version_info__ >= _CHANGED:
        return frozenset()
    leaf_of = {leaf: i for i, leaf in enumerate(backward.jaxpr.invars)}
    return frozenset(_walk(backward.jaxpr, leaf_of))


_COMPUTED = -1  # a linear variable that is none of the leaves


def _walk(jaxpr: Any, leaf_of: dict[Any, int]) -> set[int]:
    """Leaves that the transposition of a linear program would misread.

    Args:
      jaxpr: the program.
      leaf_of: which leaf each of its linear variables is, or that it is `_COMPUTED`.
    """
    leaf_of, found = dict(leaf_of), set()
    for eqn in jaxpr.eqns:
        # None for what is not linear, as literals are, which cannot be looked up.
        operands = [
            None if hasattr(atom, "val") else leaf_of.get(atom) for atom in eqn.invars
        ]
        if all(operand is None for operand in operands):
            continue
        found |= _misread_by(eqn, operands)
        for inner, inputs in _inner_programs(eqn, operands):
            known = zip(inner.invars, inputs, strict=True)
            found |= _walk(inner, {v: leaf for v, leaf in known if leaf is not None})
        leaf_of |= dict.fromkeys(eqn.outvars, _COMPUTED)
    return found


def _misread_by(eqn: Any, operands: list[int | None]) -> set[int]:
    if eqn.primitive.name in ("slice", "dynamic_slice"):
        return _leaves(operands[:1])
    if not _inner_programs(eqn, operands):
        return set()
    twice = {leaf for leaf in _leaves(operands) if operands.count(leaf) > 1}
    if eqn.primitive.name != "scan":
        return twice
    consts, _, xs = _parts_of_scan(eqn, operands)
    return twice | _after_computed(consts) | _after_computed(xs)


def _after_computed(operands: list[int | None]) -> set[int]:
    if _COMPUTED not in operands:
        return set()
    return _leaves(operands[operands.index(_COMPUTED) :])


def _leaves(operands: list[int | None]) -> set[int]:
    return {leaf for leaf in operands if leaf is not None and leaf != _COMPUTED}


def _inner_programs(
    eqn: Any, operands: list[int | None]
) -> list[tuple[Any, list[int | None]]]:
    """The programs to which refs are handed on, and what they are given."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carry, xs = _parts_of_scan(eqn, operands)
        # All of it is linear, even where it begins with zeros that depend on nothing.
        carry = [_COMPUTED] * len(carry)
        return [(params["jaxpr"].jaxpr, consts + carry + xs)]
    if name == "cond":
        return [(branch.jaxpr, operands[1:]) for branch in params["branches"]]
    if name in ("jit", "closed_call", "core_call", "custom_jvp_call"):
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        return [(getattr(inner, "jaxpr", inner), operands)]
    return []  # by value, as through remat


def _parts_of_scan(
    eqn: Any, operands: list[int | None]
) -> tuple[list[int | None], list[int | None], list[int | None]]:
    begin = eqn.params["num_consts"]
    end = begin + eqn.params["num_carry"]
    return operands[:begin], operands[begin:end], operands[end:]


# -- Newer JAX: is anything wrong?


@functools.cache
def find_traps() -> tuple[str, ...]:
    """The programs of `_TRAPS` of which this JAX makes a wrong gradient, or none.

    In a thread of its own, where nothing is being traced: refs cannot be tried while
    the program that asks for them is.
    """
    # Not at import: some versions of JAX do without it.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        right = list(thread.map(_adds_rightly, _TRAPS.values()))
    return tuple(
        name for name, is_right in zip(_TRAPS, right, strict=True) if not is_right
    )


def _adds_rightly(fun: Callable) -> bool:
    params = {"a": jnp.array([0.5, -1.0]), "b": jnp.array([2.0, 0.25])}

    @jax.jit
    def in_place(params):
        refs = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), params)
        value, backward = _vjp(fun, params)
        backward.with_refs(refs)(jnp.ones_like(value))
        return jax.tree.map(jax.freeze, refs)

    try:
        grads = in_place(params)
    except Exception:  # of whatever kind: JAX cannot do it
        return False
    # The sums are those of two or three terms near 1.
    right = jax.tree.map(
        lambda g, e: bool(jnp.allclose(g, e, atol=1e-5)), grads, jax.grad(fun)(params)
    )
    return all(jax.tree.leaves(right))


def _vjp(fun: Callable, params: Any) -> tuple[jax.Array, Any]:
    """``jax.vjp``, whose result has more to it than its annotation says."""
    return jax.vjp(fun, params)


def _scan(step: Callable, xs: Any) -> jax.Array:
    body = jax.checkpoint(lambda carry, x: (step(carry, x), None))
    return jax.lax.scan(body, jnp.ones(()), xs)[0]


def _scanned_after_a_value(params: Any) -> jax.Array:
    xs = jnp.tanh(params["a"]), params["b"]
    return _scan(lambda h, x: jnp.sin(h * x[0]) + x[1] ** 2, xs)


def _closed_over_after_a_value(params: Any) -> jax.Array:
    value, leaf = jnp.tanh(params["a"]), params["b"]
    return _scan(lambda h, _: jnp.sin(h * value[0]) + leaf[0] ** 2, jnp.arange(2))


def _closed_over_within_a_scan(params: Any) -> jax.Array:
    def layer(h, x):
        inner = jax.lax.scan(lambda g, _: (jnp.sin(g + h * x), None), h, length=2)
        return inner[0], None

    return jax.lax.scan(layer, jnp.ones(()), params["a"])[0] * params["b"][0]


def _twice_in_a_program(params: Any) -> jax.Array:
    product = jax.jit(lambda x, y: jnp.sum(jnp.sin(x) * y))
    return product(params["a"], params["a"]) * jnp.sum(params["b"])


def _twice_in_a_scan(params: Any) -> jax.Array:
    xs = params["a"], params["a"], params["b"]
    return _scan(lambda h, x: jnp.sin(h * x[0]) * x[1] + x[2], xs)


def _twice_in_a_branch(params: Any) -> jax.Array:
    def product(x, y):
        return jnp.sum(jnp.sin(x) * y)

    twice = params["a"], params["a"]
    return jax.lax.cond(params["b"][0] > 0, product, lambda x, y: jnp.sum(x), *twice)


def _scanned_and_closed_over(params: Any) -> jax.Array:
    return _scan(lambda h, x: jnp.sin(h * x) + params["a"][0] ** 2, params["a"])


def _sliced(params: Any) -> jax.Array:
    return jnp.sin(params["a"][0]) * params["b"][1] + jnp.sum(params["a"][1:] ** 2)


_TRAPS = {
    "what a scan takes after a value": _scanned_after_a_value,
    "what a scan closes over after a value": _closed_over_after_a_value,
    "what a scan within a scan closes over": _closed_over_within_a_scan,
    "what a jitted function is given twice": _twice_in_a_program,
    "what a scan is given twice": _twice_in_a_scan,
    "what a branch is given twice": _twice_in_a_branch,
    "what a scan takes and closes over": _scanned_and_closed_over,
    "slices": _sliced,
}
