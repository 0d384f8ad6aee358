"""The collectives of a compiled program, read from its text."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

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


def add_bytes(collectives: Iterable[Collective]) -> int | None:
    """What one device sends in all of them; None where a loop's trips are not known."""
    moved = [c.bytes_moved for c in collectives]
    return None if None in moved else sum(filter(None, moved))


_COMPUTATION = re.compile(r"\s*(ENTRY )?%?([\w.-]+) (?!=).*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z\d-]*)\((.*)")
_CALLEES = re.compile(r"(\w*computations?|body|condition|calls|to_apply)=(\{.*?\}|\S+)")
_TRIPS = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_STARTED = re.compile(r"\((?:\(.*?\)|.*?), (\(.*?\)|.*?)(?:, .*|\))$")
_STRING = r'"((?:[^"\\]|\\.)*)"'


def read_collectives(text: str, sizes: frozenset[int]) -> tuple[Collective, ...]:
    """The collectives of a compiled program, each as often as it is run from a place.

    Args:
      text: of the program.
      sizes: entries of what is as large as a parameter.
    """
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
    return tuple(c for name in entries for c in _run(program, name))


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
