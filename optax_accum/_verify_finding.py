"""What a check of this machine finds, and how that is said."""

import traceback
from collections.abc import Callable
from typing import NamedTuple

import jax


class Difference(NamedTuple):
    """How far apart two things are that must agree."""

    found: float
    allowed: float = 0  # none: bit for bit
    unit: str = ""
    detail: str = ""  # what is shown before


class Skip(NamedTuple):
    """Why nothing can be compared here."""

    why: str


class Check(NamedTuple):
    """Something to be found out on this machine."""

    name: str
    compared: str  # what with what
    run: Callable[[], Difference | Skip]


class Finding(NamedTuple):
    """What a check found.

    Attributes:
      check: which one.
      outcome: "ok", "FAILED" or "skipped", with the reason after a colon.
      figure: the difference and what is allowed; empty where there is none.
      trace: where it raised, if it did.
    """

    check: Check
    outcome: str
    figure: str = ""
    trace: str = ""

    @property
    def word(self) -> str:
        """The outcome without a reason."""
        return self.outcome.partition(":")[0]


def run_check(check: Check) -> Finding:
    """What `check` finds. One that raises has failed."""
    try:
        # By default accelerators round what they multiply to fewer bits.
        with jax.default_matmul_precision("highest"):
            result = check.run()
    except Exception as error:  # of whatever kind: it is shown and counted
        kind, lines = type(error).__name__, str(error).splitlines()
        reason = f"{kind}: {lines[0]}" if lines else kind
        return Finding(check, f"FAILED: {reason}", trace=traceback.format_exc())
    if isinstance(result, Skip):
        return Finding(check, f"skipped: {result.why}")
    found, allowed, unit, detail = result
    figure = f"{detail}{found:.2g}{unit} (at most {allowed:.2g}{unit})"
    # Written so that a NaN fails.
    return Finding(check, "ok" if found <= allowed else "FAILED", figure)


def render(finding: Finding, width: int) -> str:
    """A line, with the check's name in a column."""
    name, compared, _ = finding.check
    parts = (compared, finding.figure, finding.outcome)
    return f"{name:<{width}}  {': '.join(filter(None, parts))}"
