"""What figures were made by: versions, machine, commit."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "optax", "optax_accum")


def describe_origin() -> dict[str, Any]:
    """For a result in JSON: date, commit, hardware, versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": find_commit(),
        "hardware": {
            "platform": jax.devices()[0].platform,
            "device": jax.devices()[0].device_kind,
            "cpu_count": os.cpu_count(),
            "cpu_model": find_cpu_model(),
        },
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in PACKAGES},
    }


def render_origin(results: dict[str, Any]) -> str:
    """The same in a line for readers."""
    hardware = results["hardware"]
    machine = hardware["device"]
    if hardware["platform"] == "cpu":
        machine = f"{hardware['cpu_count']} cores of {hardware['cpu_model']}"
    versions = ", ".join(f"{name} {v}" for name, v in results["versions"].items())
    commit = f", commit {results['commit']}" if results["commit"] else ""
    return f"{versions}; {machine}; {results['date']}{commit}."


def find_commit() -> str | None:
    """The commit, marked where files differ from it; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def find_cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return platform.processor()
    models = [line for line in lines if line.startswith("model name")]
    return models[0].partition(":")[2].strip() if models else platform.processor()
