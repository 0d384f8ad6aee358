"""The figure of a plan: what each candidate needs, against the limit."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from optax_accum._memory import Memory
from optax_accum._memory_limit import render_bytes, unit_of
from optax_accum._trials import Candidate

# Dark to light from the left, what cannot be changed by the split first.
_COLORS = ("#22304a", "#6f9fd8", "#c1440e", "#f0b429", "#c8ccd0")
_NAMES = ("params", "optimizer state", "accumulator", "activations", "rest")


def draw_plan(
    candidates: Sequence[Candidate], memory_limit: int, num_microbatches: int
) -> Figure:
    """Bars of what was compiled, the largest micro-batch on top.

    Args:
      candidates: all of them.
      memory_limit: bytes, drawn as a line.
      num_microbatches: the N that was chosen.
    """
    known = [(c, c.memory) for c in candidates if c.memory is not None]
    figure = Figure(figsize=(8, 1.6 + 0.45 * len(known)), layout="constrained")
    axes = figure.subplots()
    name, unit = unit_of(min(memory.peak for _, memory in known))
    left = [0.0] * len(known)
    places = range(len(known))
    for part, label, color in zip(Memory._fields, _NAMES, _COLORS, strict=True):
        widths = [getattr(memory, part) / unit for _, memory in known]
        axes.barh(places, widths, left=left, color=color, label=label, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _mark_verdicts(axes, known, num_microbatches, left, name)
    _draw_limit(axes, memory_limit / unit, max(left), render_bytes(memory_limit))
    axes.set_yticks(places, [_name_of(c) for c, _ in known])
    axes.invert_yaxis()
    axes.set_xlabel(f"memory at the peak of a step, on each device ({name})")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    return figure


def _draw_limit(axes: Axes, limit: float, longest: float, name: str) -> None:
    """A line; where it would be far outside, what it is, at the right."""
    is_far = limit > 4 * longest
    axes.set_xlim(0, 1.05 * (longest if is_far else max(longest, limit)))
    if not is_far:
        axes.axvline(limit, color="#111111", linestyle="--", linewidth=1.4)
    axes.annotate(
        f"limit {name}, far to the right" if is_far else f"limit {name}",
        (1.0 if is_far else limit, 1.0),
        xycoords=axes.transAxes if is_far else axes.get_xaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right" if is_far else "center",
    )


def _mark_verdicts(
    axes: Axes,
    known: Sequence[tuple[Candidate, Memory]],
    num_microbatches: int,
    ends: Sequence[float],
    unit: str,
) -> None:
    """At the right, the length of each bar and what was decided."""
    for place, ((candidate, _), end) in enumerate(zip(known, ends, strict=True)):
        is_chosen = candidate.num_microbatches == num_microbatches
        verdict = "chosen" if is_chosen else "fits" if candidate.fits else "too large"
        seconds = candidate.seconds
        timed = "" if seconds is None else f", {seconds:.3g} s"
        axes.annotate(
            f"{end:.4g} {unit}{timed}, {verdict}",
            (1.01, place),
            xycoords=axes.get_yaxis_transform(),
            va="center",
            fontweight="bold" if is_chosen else "normal",
            color="#111111" if candidate.fits else "#8a8f98",
        )


def _name_of(candidate: Candidate) -> str:
    return f"{candidate.num_microbatches} × {candidate.microbatch_size} rows"
