"""What a compiled step sends between devices, and whether it reduces gradients once."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from optax_accum._checks import shown
from optax_accum._memory import shard_shape
from optax_accum._memory_limit import render_bytes
from optax_accum._numerics import is_array, is_inexact, kind_of
from optax_accum._state import TrainState

_Sizes = dict[str, frozenset[int]]  # of a parameter on a device, in entries, by name
_REDUCTIONS = {"all-reduce": 2, "reduce-scatter": 1}  # the last stage each may be
# How often a ring sends all but one n-th of the payload on; 0: the whole is sent once.
_ROUNDS = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1}
_ROUNDS |= {"ragged-all-to-all": 1, "collective-permute": 0, "collective-broadcast": 0}


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled step, in one place that it is run from.

    Attributes:
      kind: as XLA calls it, ``"all-reduce"`` for one; asynchronous or not.
      entries: how many each operand has, on one device.
      bytes: of operands or results, whichever is larger.
      group_size: how many devices take part together.
      source: the name that JAX gave it, of functions and primitives; may be empty.
      is_parameter_sized: it has as many entries as a parameter, or its part, and > 1.
      loops: how many loops it is in.
      trips: how often they run it; None where one does not tell.
      is_conditional: it is in a branch, and may not run at all.
    """

    kind: str
    entries: tuple[int, ...]
    bytes: int
    group_size: int
    source: str
    is_parameter_sized: bool
    loops: int = 0
    trips: int | None = 1
    is_conditional: bool = False

    @property
    def bytes_moved(self) -> int | None:
        """What one device sends in one run of the step; None where `trips` is."""
        rounds, n = _ROUNDS[self.kind], self.group_size
        shares = rounds * (n - 1) if rounds else n
        return None if self.trips is None else -(-self.trips * shares * self.bytes // n)


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
        moved = [c.bytes_moved for c in self.collectives]
        return None if None in moved else sum(filter(None, moved))

    def __str__(self) -> str:
        lines, known = [], self.bytes_moved
        for title, is_large in (("as large as a parameter", True), ("others", False)):
            part = [c for c in self.collectives if c.is_parameter_sized is is_large]
            lines += [f"{title}:", *_render_table(part, 50), ""] if part else []
        moved = "unknown" if known is None else f"{render_bytes(known)} a run"
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
    return _make_report(text, _find_parameters("collective_report", compiled, params))


def assert_one_reduction(
    compiled: Any, params: Any = None, *, ignore: str | Iterable[str] = ()
) -> None:
    """Asserts that a step reduces each parameter's gradient once, after its loops.

    Once may be in two stages: the second reduces the part that the first one leaves.
    Gathering is never wrong. Branches count as if all ran.

    Args:
      compiled: ``step.lower(...).compile()``, or the text of it.
      params: as in `collective_report`, but trained: scalars and integers do not count.
      ignore: one or more strings; collectives with one of them in their ``source`` are
        left out, as must be the statistics of BatchNorm, which are as large as scales.

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
    parameters = _find_parameters("assert_one_reduction", compiled, params)
    if not parameters:
        raise ValueError(
            "`assert_one_reduction(params)` must hold a floating or complex array of "
            "more than one entry, got none; give it what is trained."
        )
    found = _make_report(text, parameters).collectives
    kept = [c for c in found if not any(part in c.source for part in ignored)]
    _check_reductions(kept, parameters)


def _text_of(caller: str, compiled: Any) -> str:
    text = compiled.as_text() if isinstance(compiled, jax.stages.Compiled) else compiled
    if isinstance(text, str) and re.search(r"^\s*ENTRY\b", text, re.MULTILINE):
        return text
    raise (ValueError if isinstance(text, str) else TypeError)(
        f"`{caller}(compiled)` must be a compiled step or its text, got "
        f"{shown(compiled)}; write `step.lower(...).compile()`."
    )


def _find_parameters(caller: str, compiled: Any, params: Any) -> _Sizes:
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
            found[name] = _sizes_of(leaf)
    return found


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


def _sizes_of(leaf: Any) -> frozenset[int]:
    """Of the whole, and of the parts that there are while some axes are gathered."""
    sizes = {math.prod(np.shape(leaf))}
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        for axis in jax.tree.leaves(tuple(sharding.spec)):
            sizes |= {size // sharding.mesh.shape.get(axis, 1) for size in sizes}
    return frozenset({*sizes, math.prod(shard_shape(leaf))} - {1})


_COMPUTATION = re.compile(r"\s*(ENTRY )?%?([\w.-]+) (?!=).*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z\d-]*)\((.*)")
_CALLEES = re.compile(r"(\w*computations?|body|condition|calls|to_apply)=(\{.*?\}|\S+)")
_TRIPS = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_STARTED = re.compile(r"\((?:\(.*?\)|.*?), (\(.*?\)|.*?)(?:, .*|\))$")
_STRING = r'"((?:[^"\\]|\\.)*)"'


def _make_report(text: str, parameters: _Sizes) -> CollectiveReport:
    sizes = frozenset().union(*parameters.values())
    entries, program, items, devices = [], {}, [], 1
    for line in text.splitlines():
        if line.startswith("HloModule"):
            counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", line)
            devices = math.prod(map(int, counts))
        elif head := _COMPUTATION.match(line):
            items = program.setdefault(head[2], [])
            entries += [head[2]] if head[1] else []
        elif found := _INSTRUCTION.match(line):
            type_, opcode, rest = found.groups()
            if opcode.removesuffix("-start") in _ROUNDS:
                items.append(_read_collective(type_, opcode, rest, devices, sizes))
            else:
                items += _read_uses(opcode, rest)
    return CollectiveReport(tuple(c for name in entries for c in _run(program, name)))


def _run(program: dict[str, list], name: str) -> Iterator[Collective]:
    """The collectives of a computation and of those that it runs, path by path."""
    for item in program.get(name, ()):
        if isinstance(item, Collective):
            yield item
            continue
        callee, kind, trips = item
        for c in _run(program, callee):
            yield replace(
                c,
                loops=c.loops + (kind == "while"),
                trips=None if None in (trips, c.trips) else trips * c.trips,
                is_conditional=c.is_conditional or kind == "conditional",
            )


def _read_uses(opcode: str, rest: str) -> list[tuple[str, str, int | None]]:
    """The computations that an instruction runs, its kind, and how often."""
    if opcode.endswith(("-done", "-update")):  # they name again what has been started
        return []
    kind, trips = opcode.removesuffix("-start"), _TRIPS.search(rest)
    count = 1 if kind != "while" else int(trips[1]) if trips else None
    return [
        (name, kind, count)
        for attribute, names in _CALLEES.findall(re.sub(_STRING, "", rest))
        if kind == "call" or attribute != "to_apply"  # else it combines two entries
        for name in re.findall(r"[\w.-]+", names)
    ]


def _read_collective(
    type_: str, opcode: str, rest: str, devices: int, sizes: frozenset[int]
) -> Collective:
    kind, group_size = opcode.removesuffix("-start"), _read_group_size(rest, devices)
    # Operands, results, and more; of an all-reduce its results, unless it is wrapped.
    if opcode != kind and (kind != "all-reduce" or type_.startswith("((")):
        type_ = _STARTED.sub(r"\1", type_)
    arrays = re.findall(r"([a-z]+)(\d*)\w*\[([^\]]*)\]", type_)
    whole = [math.prod(map(int, re.findall(r"\d+", dims))) for *_, dims in arrays]
    if kind == "reduce-scatter":
        whole = [group_size * size for size in whole]
    bits = [size * int(b or 8) for size, (_, b, _) in zip(whole, arrays, strict=True)]
    entries = [n // group_size if kind == "all-gather" else n for n in whole]
    source = re.search(f"op_name={_STRING}", rest)
    return Collective(
        *(kind, tuple(entries), sum(math.ceil(b / 8) for b in bits), group_size),
        source=source[1] if source else "",
        is_parameter_sized=not sizes.isdisjoint(whole + entries),
    )


def _read_group_size(rest: str, devices: int) -> int:
    if found := re.search(r"replica_groups=(?:\{(\{[\d,]+)|\[\d+,(\d+))", rest):
        return int(found[2] or 1 + found[1].count(","))
    if found := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{([^}]+)", rest):
        lengths = dict(re.findall(r"([^\s,]+)=(\d+)", found[1]))
        axes = found[2].split(",")  # 'axis':(1)2 is a part of an axis, of length 2
        return math.prod(int(lengths.get(x) or x.rpartition(")")[2]) for x in axes)
    return devices


_MUST = "`compiled` must reduce each parameter's gradient once, after its loops, got "
_CURE = (
    "Say `reduce_axes`; or by hand, in `jax.shard_map`, add up on each device and "
    "`psum` after the loop, with `jax.lax.pcast(params, axis, to='varying')` outside "
    "of what is differentiated; "
    "gather parameters before the loop, not for each micro-batch, as a reduce-scatter "
    "in it tells; `ignore` what is no gradient, and give as `params` what is trained."
)


def _check_reductions(collectives: list[Collective], parameters: _Sizes) -> None:
    large = [c for c in collectives if c.is_parameter_sized and c.kind in _REDUCTIONS]
    inside = [c for c in large if c.loops]
    faults = ["these in a loop:"] if inside else _find_miscounts(large, parameters)
    if not large:
        faults = [f"nothing reduced, in {len(collectives)} collectives; of one device?"]
    if faults:
        lines = [*faults, *_render_table(inside or large), _CURE]
        raise AssertionError(_MUST + "\n".join(lines))


def _find_miscounts(reductions: list[Collective], parameters: _Sizes) -> list[str]:
    """What is left when operands are paired with stages of parameters, one to one."""
    sizes = parameters.values()
    all_sizes = frozenset().union(*sizes)
    pairs = [(c, n) for c in reductions for n in c.entries if n in all_sizes]
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
