"""The command line: ``python -m optax_accum demo``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Parses `argv` (by default the process's own) and calls what it names.

    Returns:
      The exit status: 0, or 1 where an extra that the command needs is missing.
    """
    parser = _make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    return args.run(args)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optax_accum",
        description="Gradient accumulation for JAX and Optax.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train one model four ways and compare them: a table and a figure",
        description="Trains a classifier of handwritten digits with the full batch, "
        "with optax_accum in two ways and with optax.MultiSteps, from the same start "
        "on the same rows. Prints a table and draws a figure, in about a minute.",
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("demo.png"),
        help="where to write the figure (default: %(default)s)",
    )
    demo.set_defaults(run=_run_demo)
    return parser


def _run_demo(args: argparse.Namespace) -> int:
    try:
        # Not at the top: the other commands, and help, work without the demo's extras.
        from optax_accum._demo import run_demo
    except ImportError as error:
        print(
            f"the demo needs packages that optax_accum itself does not ({error}): "
            "pip install 'optax_accum[demo]', or in a clone pip install '.[demo]'",
            file=sys.stderr,
        )
        return 1
    run_demo(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
