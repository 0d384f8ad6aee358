"""Which micro-batch fits: the answer, and the table that it was chosen from."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from optax_accum._checks import check_count
from optax_accum._memory import Memory, shard_shape
from optax_accum._memory_limit import render_bytes, unit_of
from optax_accum._numerics import find_difference, kind_of
from optax_accum._progress import progress_bar
from optax_accum._timing import time_steps
from optax_accum._trials import Candidate, Trials, try_candidate

if TYPE_CHECKING:  # an extra; only `Plan.plot` needs it
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which micro-batch fits, as `plan_microbatches` found it; ``print`` shows a table.

    Attributes:
      num_microbatches: N, of the largest micro-batch that fits.
      candidates: all that there are, the largest micro-batch first.
      memory_limit: bytes on each device.
      trials: the compiled steps, for `time`.

    Examples:
      >>> optimizer = optax.sgd(0.1)
      >>> plan = optax_accum.plan_microbatches(
      ...     lambda w, x: jnp.mean(w * x), optimizer,
      ...     optax_accum.init_train_state(1.0, optimizer), jnp.ones(6),
      ...     memory_limit="1 MiB")
      >>> [c.num_microbatches for c in plan.candidates]
      [1, 2, 3, 6]
      >>> print(str(plan).splitlines()[0])
      1 micro-batch of 6 rows, limit 1 MiB on each device
    """

    num_microbatches: int
    candidates: tuple[Candidate, ...]
    memory_limit: int
    trials: Trials = dataclasses.field(repr=False, compare=False)

    @property
    def chosen(self) -> Candidate:
        """The candidate with the largest micro-batch that fits."""
        chosen = self.num_microbatches
        return next(c for c in self.candidates if c.num_microbatches == chosen)

    @property
    def microbatch_size(self) -> int:
        """Rows that go through the model at once, on all devices together."""
        return self.chosen.microbatch_size

    @property
    def step(self) -> jax.stages.Wrapped:
        """The train step of the chosen candidate, which has been compiled."""
        return self.trials.step(self.num_microbatches)

    @property
    def fastest(self) -> Candidate | None:
        """The candidate whose step took the shortest time; None before `time`."""
        timed = {c.seconds: c for c in self.candidates[::-1] if c.seconds is not None}
        return timed[min(timed)] if timed else None

    def time(
        self, state: Any, batch: Any, *args: Any, rounds: int = 5, **extra_args: Any
    ) -> "Plan":
        """Runs every candidate that fits, and tells how long its step takes.

        Those from the chosen one on that were not compiled are compiled now, which may
        take longer than to plan did. They take turns, so that the noise of the machine
        is the same for all; more memory than that of one step is not needed.

        Args:
          state: a `TrainState`. The first step consumes it, as any train step does
            (``donate=False`` keeps it): give one that you can make again.
          batch: of the shapes that were planned for.
          *args: further arguments of the train step.
          rounds: steps of each candidate that are timed, after two that are not; an
            integer >= 1.
          **extra_args: keywords of the train step.

        Returns:
          The plan with ``seconds`` in its candidates, medians over the rounds, and the
          `fastest` one. What is chosen stays: the largest that fits.
        """
        rounds = check_count("plan.time(rounds=...)", rounds)
        _check_planned(
            ((state, batch, *args), extra_args), (self.trials.args, self.trials.extra)
        )
        first = self.candidates.index(self.chosen)
        larger, others = self.candidates[:first], self.candidates[first:]
        with progress_bar(len(others)) as begin:
            limit = self.memory_limit
            tried = [try_candidate(c, self.trials, limit, begin) for c in others]
        fitting = [c.num_microbatches for c in tried if c.fits]
        steps = {n: self.trials.step(n) for n in fitting}
        with progress_bar(rounds) as begin:
            turns = (begin(f"round {i + 1}") for i in range(rounds))
            seconds = time_steps(steps, state, (batch, *args), extra_args, turns)
        timed = (c._replace(seconds=seconds.get(c.num_microbatches)) for c in tried)
        return dataclasses.replace(self, candidates=(*larger, *timed))

    def plot(self) -> "Figure":
        """The peaks as bars, of what they consist, against the limit.

        Returns:
          A Matplotlib figure. (Matplotlib is an extra of this package.)
        """
        try:
            # Not at the top: planning works without it.
            from optax_accum._plan_figure import draw_plan
        except ImportError as error:
            raise ImportError(
                f"`plan.plot()` must find Matplotlib, got {error}; it is an extra: pip "
                "install 'optax_accum[plan]'."
            ) from error
        return draw_plan(self.candidates, self.memory_limit, self.num_microbatches)

    def __str__(self) -> str:
        legend = _LEGEND + _LEGEND_OF_MOVES if _moves(self) else _LEGEND
        return "\n".join([_render_head(self), "", *_render_table(self), "", legend])


def _check_planned(given: Any, planned: Any) -> None:
    difference = find_difference(given, planned) or _find_misplaced(given, planned)
    if difference:
        raise ValueError(
            "`plan.time(state, batch, *args)` must be given arrays of the types that "
            f"were planned for, got {difference}; plan again for these, or make them "
            "anew."
        )


def _find_misplaced(given: Any, planned: Any) -> str | None:
    """What is no array, or none any more, or of which a device has another part."""
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(planned), strict=True)
    for leaf, type_ in pairs:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return f"a type, {kind_of(leaf)}"
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            return f"{kind_of(leaf)} that a step has consumed"
        part, expected = shard_shape(leaf), shard_shape(type_)
        if getattr(type_, "sharding", None) and part != expected:
            return f"{list(part)} of {kind_of(leaf)} on a device, not {list(expected)}"
    return None


# -- As a table

_LEGEND = (
    "accumulator: sums of gradients; activations: all other temporaries; "
    "rest: the batch, and what else goes in or out"
)
_LEGEND_OF_MOVES = "; moved: what each device sends in a step"


def _render_head(plan: Plan) -> str:
    count, size = plan.num_microbatches, plan.microbatch_size
    batches = "micro-batch" if count == 1 else "micro-batches"
    rows = "row" if size == 1 else "rows"
    limit = render_bytes(plan.memory_limit)
    return f"{count} {batches} of {size} {rows}, limit {limit} on each device"


def _render_table(plan: Plan) -> list[str]:
    """A line for each candidate, in columns."""
    unit, _ = _unit_of(plan)
    moved = [f"moved, {unit}"] if _moves(plan) else []
    seconds = ["seconds"] if plan.fastest else []
    head = ["N", "rows", f"peak, {unit}", *Memory._fields, *moved, *seconds, ""]
    lines = [head, *(_render_candidate(c, plan) for c in plan.candidates)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([*map(str.rjust, line, widths[:-1]), line[-1]] for line in lines)
    return ["  ".join(line).rstrip() for line in cells]


def _render_candidate(candidate: Candidate, plan: Plan) -> list[str]:
    _, unit = _unit_of(plan)
    memory, seconds = candidate.memory, candidate.seconds
    sizes = [""] * (1 + len(Memory._fields))
    if memory is not None:
        sizes = [f"{x / unit:.2f}" for x in (memory.peak, *memory)]
    line = [str(candidate.num_microbatches), str(candidate.microbatch_size), *sizes]
    if _moves(plan):
        moved = candidate.bytes_moved
        line.append("" if moved is None else f"{moved / unit:.2f}")
    if plan.fastest:
        line.append("" if seconds is None else f"{seconds:.3g}")
    return [*line, _render_verdict(candidate, plan)]


def _moves(plan: Plan) -> bool:
    """Devices send something to each other."""
    return any(c.bytes_moved for c in plan.candidates)


def _render_verdict(candidate: Candidate, plan: Plan) -> str:
    if candidate.fits is None:
        is_smaller = candidate.num_microbatches > plan.num_microbatches
        return f"{'smaller' if is_smaller else 'larger'}, not compiled"
    if not candidate.fits:
        return "refused by the compiler" if candidate.refusal else "too large"
    marks = {"chosen": plan.chosen, "fastest": plan.fastest}
    return ", ".join(["fits", *(mark for mark, c in marks.items() if c == candidate)])


def _unit_of(plan: Plan) -> tuple[str, int]:
    """One unit for the whole table: that of its smallest peak."""
    peaks = [c.memory.peak for c in plan.candidates if c.memory is not None]
    return unit_of(min(peaks))
