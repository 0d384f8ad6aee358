"""How much memory there may be: in bytes, in words, or a share of the device's own."""

import math
import re
from decimal import Decimal
from typing import Any

import jax
import numpy as np

from optax_accum._checks import shown

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**i for i, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**i for i, letter in enumerate("KMGT", start=1)},
}
_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}


def check_memory_limit(argument: str, limit: Any) -> int | float | None:
    """`limit` as bytes, if integer; as a share of the device's, if float; or None.

    Args:
      argument: what an error shall call it.
      limit: an integer, a string such as ``"12GiB"``, a fraction in (0, 1], or None.
    """
    if limit is None:
        return None
    number = _read_text(limit) if isinstance(limit, str) else limit
    if isinstance(number, int | np.integer) and not isinstance(number, bool):
        if 0 < number < 2**63:
            return int(number)
    elif isinstance(number, float | np.floating) and 0 < number <= 1:
        return float(number)
    is_kind = isinstance(limit, str | int | float | np.number)
    error = ValueError if is_kind and not isinstance(limit, bool) else TypeError
    is_large = isinstance(limit, float | np.floating) and limit >= 1000
    cure = f"; {_cure(limit)}" if is_large else ""
    raise error(
        f"`{argument}` must be bytes > 0 as an integer or a string such as '12GiB' or "
        "'800 MB', a fraction of the device's memory in (0, 1], or None for all of it, "
        f"got {shown(limit)}{cure}."
    )


def bytes_of_limit(argument: str, limit: int | float | None, trees: Any) -> int:
    """The limit in bytes, asking the devices where it is their memory or a share of it.

    Args:
      argument: what an error shall call it.
      limit: what `check_memory_limit` returned.
      trees: what lies on the devices, or will.

    Raises:
      ValueError: the devices do not say, or there are several processes, whose devices
        need not say the same.
    """
    if isinstance(limit, int):
        return limit
    given = "None" if limit is None else f"the fraction {limit}"
    if jax.process_count() > 1:
        raise ValueError(
            f"`{argument}` must be given in bytes where there are several processes, "
            f"got {given} in one of {jax.process_count()}; their devices need not tell "
            "the same, and with different plans they would wait for each other for "
            "ever."
        )
    devices = _devices_of(trees)
    limits = {d: (d.memory_stats() or {}).get("bytes_limit", 0) for d in devices}
    silent = [device for device, tells in limits.items() if not tells]
    if silent:
        raise ValueError(
            f"`{argument}` must be given in bytes where the device does not tell its "
            f"memory, got {given} for {silent[0]}; write '12GiB', say."
        )
    return int(min(limits.values()) * (1.0 if limit is None else limit))


def unit_of(size: int) -> tuple[str, int]:
    """The largest binary unit of which `size` has at least one, and its bytes."""
    name = next((u for u in ("TiB", "GiB", "MiB", "KiB") if size >= _UNITS[u]), "B")
    return name, _UNITS[name]


def render_bytes(size: int) -> str:
    """``"1.25 GiB"``, in the unit of that size."""
    name, unit = unit_of(size)
    return f"{size / unit:.4g} {name}"


def _read_text(text: str) -> int | None:
    """The bytes that a string says; None if it says none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE)
    if match is None or match[2].lower() not in _BY_LOWER:
        return None
    return int(Decimal(match[1]) * _BY_LOWER[match[2].lower()])


def _cure(limit: float | np.floating) -> str:
    if not math.isfinite(limit):
        return "no limit is no plan"
    return f"for bytes write {int(limit)}"


def _devices_of(trees: Any) -> list[jax.Device]:
    """Those of this process that the leaves lie on; else where JAX would put them."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(trees))
    devices = {
        device
        for sharding in shardings
        if sharding is not None and _is_placed(sharding)
        for device in sharding.addressable_devices
    }
    return sorted(devices, key=lambda d: d.id) or [_default_device()]


def _is_placed(sharding: jax.sharding.Sharding) -> bool:
    """Not one on an abstract mesh, as the types of what was not made yet have."""
    mesh = getattr(sharding, "mesh", None)
    return not isinstance(mesh, jax.sharding.AbstractMesh)


def _default_device() -> jax.Device:
    chosen = getattr(jax.config, "jax_default_device")  # noqa: B009  no type knows it
    if isinstance(chosen, str):  # the name of a platform
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]
