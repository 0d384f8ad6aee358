"""What a function hands through, told from its program and not from values.

Flax passes every variable of a module out of ``nnx.jit`` and ``nnx.remat``, also those
that stay as they are. JAX then has another tracer for the same value.
"""

from collections.abc import Callable
from typing import Any

import jax

# Whose program has the operands as its inputs and the results as its outputs.
_CALLS = frozenset({"jit", "pjit", "remat2", "checkpoint", "closed_call"})


def find_changed(fun: Callable[[Any], Any], before: Any, after: Any) -> list[str]:
    """The paths of what ``fun(before)``, which was `after`, does not hand through."""
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    if all(a is b for a, b in zip(old, new, strict=True)):
        return []
    program = jax.make_jaxpr(lambda leaves: jax.tree.leaves(fun(_like(before, leaves))))
    sources = _sources(program(old).jaxpr)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(before)]
    return [
        jax.tree_util.keystr(path)
        for i, (path, source) in enumerate(zip(paths, sources, strict=True))
        if source != i
    ]


def _like(tree: Any, leaves: list) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _sources(jaxpr: Any) -> list[int | None]:
    """For every output the number of the input that it is, or None."""
    known = {var: i for i, var in enumerate(jaxpr.invars)}

    def source(atom):
        # None for a literal, which cannot be looked up.
        return None if hasattr(atom, "val") else known.get(atom)

    for eqn in jaxpr.eqns:
        for out, operand in zip(eqn.outvars, _handed_through(eqn), strict=True):
            number = None if operand is None else source(eqn.invars[operand])
            if number is not None:
                known[out] = number
    return [source(atom) for atom in jaxpr.outvars]


def _handed_through(eqn: Any) -> list[int | None]:
    """For every result of an equation the number of the operand that it is, or None."""
    name, inner = eqn.primitive.name, eqn.params.get("jaxpr")
    if inner is None or name not in _CALLS | {"scan"}:
        return [None] * len(eqn.outvars)
    operands = _sources(getattr(inner, "jaxpr", inner))
    if name != "scan":
        return operands
    consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]

    def stays(result, operand):
        """A carry that is its own, and what is scanned over, row by row."""
        if operand is None:
            return False
        if result < carry:
            return operand == consts + result
        return operand >= consts + carry

    return [x if stays(i, x) else None for i, x in enumerate(operands)]
