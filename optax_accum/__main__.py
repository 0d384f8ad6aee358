"""The command line: ``python -m optax_accum demo``, ``plan`` and ``verify``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from optax_accum._plan_command import (
    find_example,
    has_module,
    load_function,
    plan_training,
    read_training,
)


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
    _add_demo(commands)
    _add_plan(commands)
    _add_verify(commands)
    return parser


def _add_demo(commands: Any) -> None:
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


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="find the largest micro-batch that fits in memory, without running it",
        description="Compiles the train step for a few numbers of micro-batches, "
        "reads how much memory each needs, and prints a table. Nothing is run.",
    )
    plan.add_argument(
        "training",
        nargs="?",
        metavar="module:function",
        help="a function that returns (loss_fn, optimizer, params, batch), arrays or "
        "their types; in place of params a TrainState, which has key and model_state; "
        "fifth, if needed, a dict of keywords of make_train_step",
    )
    plan.add_argument("--example", help="instead: resnet50 or bert-base")
    plan.add_argument("--batch", type=int, help="rows of the example's batch")
    plan.add_argument(
        "--limit",
        type=_read_limit,
        help="memory of each device: bytes, '12GiB', or a fraction such as 0.9 "
        "(default: what the device says)",
    )
    plan.add_argument(
        "--exhaustive", action="store_true", help="compile all candidates"
    )
    plan.add_argument("--figure", type=Path, help="also draw the table, as a PNG")
    plan.set_defaults(run=_run_plan, parser=plan)


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="check on this machine that gradients, reductions and memory are right",
        description="Compares, on this machine and with these versions, gradients in "
        "micro-batches with those of the whole batch, and the memory of a step with "
        "its prediction. With several devices, also that they reduce gradients once; "
        "of a CPU it makes four. Takes less than a minute; exits with 1 if a check "
        "fails.",
    )
    verify.add_argument(
        "--traceback", action="store_true", help="show where a check raised"
    )
    verify.set_defaults(run=_run_verify)


def _read_limit(text: str) -> int | float | str:
    """A number if it is one; what cannot be read is the planner's to say."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass  # it may be the next kind, or have a unit
    return text


def _run_demo(args: argparse.Namespace) -> int:
    try:
        # Not at the top: the other commands, and help, work without the demo's extras.
        from optax_accum._demo import run_demo
    except ImportError as error:
        return _explain_extras("the demo", error)
    run_demo(args.output)
    return 0


def _run_plan(args: argparse.Namespace) -> int:
    if (args.training is None) == (args.example is None):
        args.parser.error("name either module:function or --example")
    if (args.batch is None) != (args.example is None):
        args.parser.error("--batch must be given with --example, and only with it")
    if args.figure is not None and not args.figure.parent.is_dir():
        args.parser.error(f"--figure must be in a folder, got {args.figure}")
    make = _find_function(args) if args.example is None else _find_example(args)
    made = make()  # whose own errors are not ours to shorten
    try:
        plan = plan_training(read_training(made), args.limit, args.exhaustive)
        print(plan)
        if args.figure is not None:
            plan.plot().savefig(args.figure, format="png", dpi=200)
    except (ImportError, TypeError, ValueError) as error:  # which say what to do
        print(error, file=sys.stderr)
        return 1
    return 0


def _run_verify(args: argparse.Namespace) -> int:
    # Not at the top: the other commands, and help, do not pay for it.
    from optax_accum._verify import verify

    return verify(show_traceback=args.traceback)


def _find_example(args: argparse.Namespace) -> Callable[[], Any]:
    try:
        return find_example(args.example, args.batch)
    except ValueError as error:
        return args.parser.error(str(error))
    except ImportError as error:
        sys.exit(_explain_extras("an example", error))


def _find_function(args: argparse.Namespace) -> Callable[[], Any]:
    is_there = has_module(args.training)
    found = load_function(args.training) if is_there else None
    if callable(found):
        return found
    return args.parser.error(
        f"the training must be named as module:function, got {args.training!r}, of "
        f"which the {'function' if is_there else 'module'} is not there; for `def "
        "make(): ...` in train.py write train:make"
    )


def _explain_extras(what: str, error: ImportError) -> int:
    print(
        f"{what} needs packages that optax_accum itself does not ({error}): "
        "pip install 'optax_accum[demo]', or in a clone pip install '.[demo]'",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
