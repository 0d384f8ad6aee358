"""What a compiled step sends between devices, and whether it reduces gradients once."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from optax_accum._checks import check_count, shown
from optax_accum._collectives import Collective, add_bytes, read_collectives
from optax_accum._memory import shard_shape
from optax_accum._memory_limit import render_bytes
from optax_accum._numerics import is_array, is_inexact, kind_of
from optax_accum._state import TrainState

_Sizes = dict[str, frozenset[int]]  # of a parameter on a device, in entries, by name
_REDUCTIONS = {"all-reduce": 2, "reduce-scatter": 1}  # the last stage each may be


@dataclass(frozen=True)
class CollectiveReport:
    """What `collective_report` found; ``print`` shows a table.

    Attributes:
      collectives: all of them, each as often as there are places it is run from.
    """

    collectives: tuple[Collective, ...]

    @property
    def inside(self) -> tuple[Collective, ...]:
        """Those in a loop."""
        return tuple(c for c in self.collectives if c.loops)

    @property
    def outside(self) -> tuple[Collective, ...]:
        """Those in no loop."""
        return tuple(c for c in self.collectives if not c.loops)

    @property
    def parameter_sized_inside(self) -> tuple[Collective, ...]:
        """Those in a loop that are as large as a parameter."""
        return tuple(c for c in self.inside if c.is_parameter_sized)

    @property
    def parameter_sized_outside(self) -> tuple[Collective, ...]:
        """Those in no loop that are as large as a parameter."""
        return tuple(c for c in self.outside if c.is_parameter_sized)

    @property
    def bytes_moved(self) -> int | None:
        """What one device sends in a run, if all branches ran; None where unknown."""
        return add_bytes(self.collectives)

    def __str__(self) -> str:
        lines, known = [], self.bytes_moved
        for title, is_large in (("as large as a parameter", True), ("others", False)):
            part = [c for c in self.collectives if c.is_parameter_sized is is_large]
            lines += [f"{title}:", *_render_table(part, 50), ""] if part else []
        if_all = ", if all branches run" * any(
            c.is_conditional for c in self.collectives
        )
        moved = "unknown" if known is None else f"{render_bytes(known)} a run{if_all}"
        return "\n".join([*lines, f"moved by each device: {moved}"])


def collective_report(compiled: Any, params: Any = None) -> CollectiveReport:
    """Finds what a compiled step sends between devices, in its loops and outside.

    Tried on what XLA:CPU compiles and runs; the asynchronous forms of XLA:GPU and TPU
    only on texts written by hand after XLA's documentation. Sizes tell what is a
    parameter's; one layer of those that a scan goes over is none.

    Args:
      compiled: ``step.lower(...).compile()``, or the text of it.
      params: the parameters, arrays or their types, whole, with their shardings; needed
        with a text. By default of the `TrainState`, or all, that the step takes first.

    Returns:
      A `CollectiveReport`.

    Raises:
      TypeError: one of them is not what it must be, or a text has no `params`.
      ValueError: a text is none of a compiled step, or a step takes nothing first.

    Examples:
      >>> mesh = jax.make_mesh((4,), ("data",))
      >>> x = jnp.ones((16, 100), device=jax.NamedSharding(mesh, jax.P("data")))
      >>> compiled = jax.jit(lambda x: jnp.sum(x, axis=0)).lower(x).compile()
      >>> print(optax_accum.collective_report(compiled).bytes_moved)  # 2 * 3/4 * 400
      600
    """
    text = _text_of("collective_report", compiled)
    parameters = _find_parameters("collective_report", compiled, params)
    return CollectiveReport(read_collectives(text, _all_sizes(parameters)))


def assert_one_reduction(
    compiled: Any,
    params: Any = None,
    *,
    devices: int | None = None,
    ignore: str | Iterable[str] = (),
) -> None:
    """Asserts that a step reduces each parameter's gradient once, after its loops.

    Once may be in two stages: the second reduces the part that the first one leaves.
    Gathering is never wrong. Branches count as if all ran, so that windows of
    `accumulate` fail: which call closes one cannot be seen. All that is compared is how
    large operands are and how many: another array that is as large as a parameter is
    taken for one, and gradients that were joined to one array are not known.

    Args:
      compiled: ``step.lower(...).compile()``, or the text of it.
      params: as in `collective_report`, but trained: scalars and integers do not count.
      devices: how many share the rows: gradients must be added up over exactly so many.
        By default nothing is said of which devices a reduction is over.
      ignore: one or more strings; collectives with one of them in their ``source`` are
        left out, such as those of a BatchNorm whose statistics are as large as its
        scale. Of several that the compiler has joined, all must have it.

    Returns:
      Nothing.

    Raises:
      AssertionError: a parameter is reduced in a loop, never, or more than once.
      TypeError: as in `collective_report`; or `ignore` has what is no string, or empty.
      ValueError: as in `collective_report`; or nothing is trained.

    Examples:
      >>> mesh = jax.make_mesh((4,), ("data",))
      >>> x = jnp.ones((16, 8), device=jax.NamedSharding(mesh, jax.P("data")))
      >>> step = jax.jit(lambda w, x: w - 0.1 * jnp.mean(x, axis=0))
      >>> optax_accum.assert_one_reduction(step.lower(jnp.ones(8), x).compile())
    """
    text = _text_of("assert_one_reduction", compiled)
    is_one = isinstance(ignore, str) or not isinstance(ignore, Iterable)
    ignored = (ignore,) if is_one else tuple(ignore)
    if not all(isinstance(part, str) and part for part in ignored):
        raise TypeError(
            "`assert_one_reduction(ignore=...)` must be strings that are not empty, "
            f"got {ignore!r}; write 'BatchNorm', say."
        )
    if devices is not None:
        devices = check_count("assert_one_reduction(devices=...)", devices)
    parameters = _find_parameters("assert_one_reduction", compiled, params)
    if not parameters:
        raise ValueError(
            "`assert_one_reduction(params)` must hold a floating or complex array of "
            "more than one entry, got none; give it what is trained."
        )
    found = read_collectives(text, _all_sizes(parameters))
    kept = [c for c in found if not _is_ignored(c, ignored)]
    wide = _find_parameters("assert_one_reduction", compiled, params, is_wide=True)
    _check_reductions(kept, parameters, wide, devices)


def _is_ignored(collective: Collective, ignored: tuple[str, ...]) -> bool:
    """All that the compiler has joined to it, too: ``prefix/(one:other)``."""
    prefix, _, joined = collective.source.partition("/(")
    sources = [collective.source]
    if ":" in joined:
        sources = [f"{prefix}/{part}" for part in joined.removesuffix(")").split(":")]
    return all(any(part in source for part in ignored) for source in sources)


def _text_of(caller: str, compiled: Any) -> str:
    text = compiled.as_text() if isinstance(compiled, jax.stages.Compiled) else compiled
    if isinstance(text, str) and re.search(r"^\s*ENTRY\b", text, re.MULTILINE):
        return text
    raise (ValueError if isinstance(text, str) else TypeError)(
        f"`{caller}(compiled)` must be a compiled step or its text, got "
        f"{shown(compiled)}; write `step.lower(...).compile()`."
    )


def _find_parameters(
    caller: str, compiled: Any, params: Any, is_wide: bool = False
) -> _Sizes:
    """Those with a gradient of more than one entry: scalars may be losses."""
    tree = _first_argument(caller, compiled) if params is None else params
    tree = tree.params if isinstance(tree, TrainState) else tree
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path) or "the top"
        if not is_array(leaf):
            raise TypeError(
                f"`{caller}(params)` must hold arrays or their types, got "
                f"{kind_of(leaf)} at {name}; give it the parameters alone."
            )
        if is_inexact(leaf) and math.prod(np.shape(leaf)) > 1:
            found[name] = _sizes_of(leaf, is_wide)
    return found


def _all_sizes(parameters: _Sizes) -> frozenset[int]:
    return frozenset().union(*parameters.values())


def _first_argument(caller: str, compiled: Any) -> Any:
    """The types of what the program takes first, as it lies on the devices."""
    args = () if isinstance(compiled, str) else compiled.args_info[0]
    if not args:
        raise (TypeError if isinstance(compiled, str) else ValueError)(
            f"`{caller}(compiled, params)` must be given `params` with a text, or a "
            "step that takes nothing first, got None; give it the parameters."
        )
    type_, trees = jax.ShapeDtypeStruct, (args[0], compiled.input_shardings[0][0])
    return jax.tree.map(lambda x, s: type_(x.shape, x.dtype, sharding=s), *trees)


def _sizes_of(leaf: Any, is_wide: bool) -> frozenset[int]:
    """Of the whole, and of the parts that there are while some axes are gathered.

    `is_wide`: or that the compiler may make for itself, over any axis of the mesh.
    """
    sizes = {math.prod(np.shape(leaf))}
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        own = jax.tree.leaves(tuple(sharding.spec))
        for axis in sharding.mesh.shape if is_wide else own:
            sizes |= {size // sharding.mesh.shape.get(axis, 1) for size in sizes}
    return frozenset({*sizes, math.prod(shard_shape(leaf))} - {1})


_MUST = "`compiled` must reduce each parameter's gradient once, after its loops, got "
_CURE = (
    "Say `reduce_axes`; or by hand, in `jax.shard_map`, add up on each device and "
    "`psum` after the loop, with `jax.lax.pcast(params, axis, to='varying')` outside "
    "of what is differentiated; "
    "`gather='call'` where a reduce-scatter in the loop tells that parameters are "
    "gathered for each micro-batch; `ignore` what is no gradient, and give as `params` "
    "what is trained. Of a branch it cannot be seen how often it runs."
)


def _check_reductions(
    collectives: list[Collective],
    parameters: _Sizes,
    wide: _Sizes,
    devices: int | None,
) -> None:
    reductions = [c for c in collectives if c.kind in _REDUCTIONS]
    large = [c for c in reductions if c.is_parameter_sized]
    inside = [c for c in large if c.loops]
    faults = ["these in a loop:"] if inside else _find_miscounts(large, parameters)
    after = [c for c in reductions if not c.loops]
    if faults and not inside and not _find_miscounts(after, wide):
        faults, large, parameters = [], after, wide  # parts that the compiler has made
    if not faults and devices is not None:
        faults = _find_partial(large, parameters, devices)
    if not large:
        faults = [f"nothing reduced, in {len(collectives)} collectives; of one device?"]
    if faults:
        lines = [*faults, *_render_table(inside or large), _CURE]
        raise AssertionError(_MUST + "\n".join(lines))


def _find_miscounts(reductions: list[Collective], parameters: _Sizes) -> list[str]:
    """What is left when operands are paired with stages of parameters, one to one."""
    sizes = parameters.values()
    pairs = _pair_operands(reductions, parameters)
    given = Counter(frozenset({(n, 1), (n, _REDUCTIONS[c.kind])}) for c, n in pairs)
    # What a first stage leaves: a reduce-scatter, on XLA:CPU an all-reduce and a slice.
    steps = {(n, n / c.group_size) for c, n in pairs if c.group_size > 1}
    first = {name: frozenset((n, 1) for n in parameters[name]) for name in parameters}
    second = [frozenset((b, 2) for a, b in steps if {a, b} <= s) for s in sizes]
    faults = []
    for kind, n in _without_partner(Counter(first.values()), given).items():
        names = [name for name in first if first[name] == kind]
        faults.append(f"{n} of {len(names)} as large as {names[0]} never reduced")
    for kind, n in _without_partner(given, Counter([*first.values(), *second])).items():
        faults.append(f"{n} operands of {min(kind)[0]} entries too many")
    return faults


def _find_partial(
    reductions: list[Collective], parameters: _Sizes, devices: int
) -> list[str]:
    """Operands added up over some devices, and what that leaves not over the others."""
    pairs = _pair_operands(reductions, parameters)
    stages = sorted((n, c.group_size) for c, n in pairs if c.group_size != devices)
    faults = []
    while stages:
        n, group = stages.pop()  # the first stage is the larger one
        second = (n / group, devices / group)
        if second in stages:
            stages.remove(second)
        else:
            faults.append(f"{n} entries added up over {group} devices, not {devices}")
    return faults


def _pair_operands(
    reductions: list[Collective], parameters: _Sizes
) -> list[tuple[Collective, int]]:
    """Each operand that is as large as a parameter."""
    sizes = _all_sizes(parameters)
    return [(c, n) for c in reductions for n in c.entries if n in sizes]


def _without_partner(kinds: Counter, others: Counter) -> Counter:
    """Those left when as many as can have one of the others that shares a tag."""
    pairs = Counter({(None, other): n for other, n in others.items()})

    def place(kind, seen):
        for other in others:
            if kind is None or other in seen or kind.isdisjoint(other):
                continue
            seen.add(other)  # who is there may go elsewhere; None is a free place
            for there in [k for (k, o), n in pairs.items() if n and o == other]:
                if place(there, seen):
                    pairs[there, other] -= 1
                    pairs[kind, other] += 1
                    return True
        return kind is None

    return Counter(kind for kind in kinds.elements() if not place(kind, set()))


def _render_table(collectives: list[Collective], width: int = 10**6) -> list[str]:
    """A line for all that look alike, in columns; of their sources the end."""
    cells = Counter(_render_cells(c, width) for c in collectives)
    lines = [(f"  {n} x", *line) for line, n in cells.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _render_cells(c: Collective, width: int) -> tuple[str, ...]:
    trips = "?" if c.trips is None else c.trips
    loops = f"in {c.loops} loop{'s' * (c.loops > 1)}, {trips} times"
    place = (loops if c.loops else "outside") + ", in a branch" * c.is_conditional
    source = c.source if len(c.source) <= width else f"...{c.source[-width:]}"
    return c.kind, place, render_bytes(c.bytes), f"{c.group_size} devices", source
