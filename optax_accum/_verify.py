"""Checks on the machine at hand: ``python -m optax_accum verify``.

Each compares what the package computes here with what it must be, by other means where
there are any.

Letters: ``N`` micro-batches in a batch.
"""

import functools
import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence

import jax

from optax_accum._verify_finding import Check, Finding, render, run_check
from optax_accum._verify_gradients import (
    COUNT,
    check_bfloat16,
    check_doors,
    check_embedding,
    check_in_place,
    check_one_reduction,
    check_reduce_axes,
    check_sharded_embedding,
    check_tokens,
)
from optax_accum._verify_memory import check_memory

CPU_DEVICES = 4
FORCED = "xla_force_host_platform_device_count"
PACKAGES = ("jax", "jaxlib", "optax", "optax_accum")


def verify(show_traceback: bool = False) -> int:
    """Runs all checks and prints what they find, line by line.

    Returns:
      The exit status: 0 if none failed, else 1.
    """
    start = time.perf_counter()
    make_cpu_devices()
    machine = describe_machine()  # without a backend nothing can be checked: it raises
    checks = make_checks()
    width = max(len(check.name) for check in checks)
    findings = []
    for check in checks:
        findings.append(run_check(check))
        print(render(findings[-1], width), flush=True)
        if show_traceback and findings[-1].trace:
            print(findings[-1].trace, flush=True)
    print(f"\n{machine}")
    print(summarize(findings, time.perf_counter() - start))
    return int(any(finding.word == "FAILED" for finding in findings))


def make_cpu_devices() -> None:
    """On CPUs makes several devices of one, unless somebody has said how many.

    Must be called before any device is touched. On other backends it changes nothing.
    """
    # The setting would overrule the flag.
    is_forced = FORCED in os.environ.get("XLA_FLAGS", "")
    if is_forced or jax.config.values["jax_num_cpu_devices"] != -1:
        return
    try:
        jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    except RuntimeError:
        pass  # a backend has started before: its devices are those that there are


def describe_machine() -> str:
    """Versions, backend and devices."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    devices = jax.local_devices()
    return (
        f"Python {platform.python_version()}, {', '.join(versions)}\n"
        f"backend {jax.default_backend()}, devices: {len(devices)} x "
        f"{devices[0].device_kind}"
    )


def summarize(findings: Sequence[Finding], seconds: float) -> str:
    """How many of each outcome there are."""
    words = [finding.word for finding in findings]
    counts = (f"{words.count(word)} {word}" for word in ("ok", "FAILED", "skipped"))
    return f"{', '.join(counts)}, in {seconds:.0f} s"


def make_checks() -> list[Check]:
    """All of them. Making them touches no device."""
    # First, and the smaller peak before the larger one: a device tells the highest of
    # its whole life.
    memory = [
        Check(f"memory, N = {n}", "peak of a step", functools.partial(check_memory, n))
        for n in (COUNT, 1)
    ]
    tokens = [
        Check(
            f"masked tokens, N = {n}",
            "gradient and that of JAX alone",
            functools.partial(check_tokens, n),
        )
        for n in (1, 4, 8)
    ]
    return [
        *memory,
        Check("embedding", "gradient and numpy.add.at", check_embedding),
        Check(
            "sharded embedding", "gradient and numpy.add.at", check_sharded_embedding
        ),
        *tokens,
        Check("in place", "gradient and that of JAX alone", check_in_place),
        Check("bfloat16", "sum of 65 gradients and the exact one", check_bfloat16),
        Check("reduce_axes", "gradient and that of JAX alone", check_reduce_axes),
        Check(
            "one reduction", "reductions as large as parameters", check_one_reduction
        ),
        Check("doors 1 and 2", "parameters after a gradient step of each", check_doors),
    ]
