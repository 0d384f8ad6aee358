"""Draws what `scenarios.py` and `memory_table.py` found: time and memory over N.

``python benchmarks/figures.py`` draws from the JSON alone, beside it.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from origin import ROOT

RESULTS = ROOT / "benchmarks" / "results"
GRADIENT = "one gradient"

# What nothing can do without is a broad band below, and all rows at once are a dashed
# line; beside them colours that the colour-blind tell apart, and a marker of each.
LINES: dict[str, dict[str, Any]] = {
    "gradients and a step": {"color": "#dfe2e6", "linewidth": 12},
    "whole batch": {"color": "#8a9097", "linewidth": 1.8, "linestyle": (0, (4, 2))},
    "MultiSteps": {"color": "#d55e00", "marker": "X", "markersize": 8},
    "accumulate": {"color": "#f0b429", "marker": "s"},
    "hand-written scan": {"color": "#222222", "marker": "^"},
    "make_window_steps": {"color": "#009e73", "marker": "D", "markersize": 6},
    "make_train_step": {"color": "#0072b2", "marker": "o"},
    "make_train_step, in place": {"color": "#cc79a7", "marker": "v"},
}
MARKED = [name for name, style in LINES.items() if "marker" in style]
LINE: dict[str, Any] = {"linewidth": 1.1, "markersize": 7, "markeredgecolor": "white"}
BLUES = ("#0a4f86", "#2f8fcb", "#7fc4ea")  # of batches, the largest first
GB = 1e9
LABELS = {"gradients and a step": "N gradients and one step"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        default=[RESULTS / f"{name}.json" for name in FIGURES],
        help="files, named as they are by default",
    )
    for path in parser.parse_args(arguments).results:
        results = json.loads(path.read_text())
        for name, draw in FIGURES[path.stem].items():
            # No date and no version, so that the same figures are the same file.
            draw(results).savefig(
                path.with_name(f"{name}.png"), dpi=150, metadata={"Software": None}
            )


# -- Scenarios


def draw_time(results: dict[str, Any]) -> Figure:
    lines = list(LINES)
    lines.remove("make_train_step, in place")
    return draw_panels(
        results,
        lines,
        title="Time of a micro-batch, in a window of N",
        quantity=lambda record, gradient: record["gradients"],
        unit=lambda gradient: f"{gradient['milliseconds']:.2g} ms",
    )


def draw_memory(results: dict[str, Any]) -> Figure:
    lines = list(LINES)
    lines.remove("gradients and a step")
    return draw_panels(
        results,
        lines,
        title="Memory of a window of N, beyond parameters, optimizer state and rows",
        quantity=lambda record, gradient: (
            record["extra_bytes"] / gradient["extra_bytes"]
        ),
        unit=lambda gradient: f"{gradient['extra_bytes'] / 1e6:.2g} MB",
    )


def draw_panels(
    results: dict[str, Any],
    lines: list[str],
    *,
    title: str,
    quantity: Callable[[dict[str, Any], dict[str, Any]], float],
    unit: Callable[[dict[str, Any]], str],
) -> Figure:
    """A panel for each scenario.

    Args:
      results: all that was measured.
      lines: the methods to draw.
      title: of the whole figure.
      quantity: of a record, as a multiple of that of one gradient.
      unit: what one gradient comes to, in words.
    """
    scenarios = results["scenarios"]
    figure = Figure(figsize=(10, 4.2))
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    panels = figure.subplots(1, len(scenarios), sharey=True, squeeze=False)[0]
    for axes, scenario in zip(panels, scenarios, strict=True):
        records = [r for r in results["records"] if r["scenario"] == scenario["name"]]
        draw_lines(axes, lines, records, quantity)
        first, *_ = (record for record in records if record["method"] == GRADIENT)
        decorate(axes, results["counts"], scenario["name"], unit(first))
    figure.suptitle(title, weight="bold")
    figure.supylabel("multiples of one plain gradient", size="medium")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_lines(
    axes: Axes,
    lines: list[str],
    records: list[dict[str, Any]],
    quantity: Callable[[dict[str, Any], dict[str, Any]], float],
) -> None:
    """Marked ones a little aside of each other, so that none hides another."""
    gradients = {count_of(r): r for r in records if r["method"] == GRADIENT}
    marked = [name for name in lines if name in MARKED]
    for name in lines:
        mine = [record for record in records if record["method"] == name]
        counts = list(map(count_of, mine))
        if name in marked:
            place = marked.index(name) - (len(marked) - 1) / 2
            counts = [count * 1.17**place for count in counts]
        values = [quantity(record, gradients[count_of(record)]) for record in mine]
        (line,) = axes.plot(counts, values, label=LABELS.get(name, name), **LINE)
        line.set(**LINES[name])


def count_of(record: dict[str, Any]) -> int:
    return record["num_microbatches"]


def decorate(axes: Axes, counts: list[int], name: str, unit: str) -> None:
    axes.set_xlabel("N")
    axes.set_title(name, weight="bold", size="medium", pad=19)
    axes.text(
        0.5,
        1.03,
        f"one gradient: {unit}",
        transform=axes.transAxes,
        ha="center",
        size="small",
        color="#5a6067",
    )
    axes.axhline(1, color="#b9bec4", linewidth=0.8)
    set_log_scales(axes, counts)


def set_log_scales(axes: Axes, counts: list[int]) -> None:
    """Both; each N has a tick, and so has each doubling of the height."""
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.yaxis.set_major_locator(FixedLocator([2.0**power for power in range(-4, 9)]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color="#e9ebee", linewidth=0.8)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)


# -- The table of memory


def draw_memory_table(results: dict[str, Any]) -> Figure:
    """A panel for each model, in it a line for each batch size, above the floor."""
    models = dict.fromkeys(record["model"] for record in results["records"])
    figure = Figure(figsize=(10, 4.6))
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        records = [r for r in results["records"] if r["model"] == model]
        set_log_scales(axes, sorted(set(map(count_of, records))))
        draw_peaks(axes, records)
        draw_floor(axes, max(record["floor_bytes"] for record in records) / GB)
        axes.set_title(model, weight="bold", size="medium")
        axes.set_xlabel("N")
    # Room above, and below to see the lowest floor.
    least = min(record["floor_bytes"] for record in results["records"]) / GB
    highest = max(record["peak_bytes"] for record in results["records"]) / GB
    panels[0].set_ylim(least / 1.6, highest * 1.6)
    figure.suptitle("Memory of a train step of N micro-batches", weight="bold")
    figure.supylabel("peak, GB", size="medium")
    return figure


def draw_peaks(axes: Axes, records: list[dict[str, Any]]) -> None:
    """A line for each batch size; that of the largest, on top, has its figures."""
    sizes = sorted({record["batch_size"] for record in records}, reverse=True)
    for size, color, marker in zip(sizes, BLUES, "oDs", strict=False):
        mine = [record for record in records if record["batch_size"] == size]
        peaks = [record["peak_bytes"] / GB for record in mine]
        counts = list(map(count_of, mine))
        (line,) = axes.plot(counts, peaks, label=f"batch of {size}", **LINE)
        line.set(color=color, marker=marker, linewidth=1.8)
        for count, peak in zip(counts, peaks, strict=True):
            if size == sizes[0]:
                axes.annotate(
                    f"{peak:.2f}",
                    (count, peak),
                    xytext=(3, 5),
                    textcoords="offset points",
                    color=color,
                )
    axes.legend(loc="upper right", frameon=False)


def draw_floor(axes: Axes, floor: float) -> None:
    """What no N takes away."""
    # Above the grid and below the lines.
    axes.axhspan(0, floor, color="#dfe2e6", linewidth=0, zorder=1.6)
    axes.annotate(
        f"parameters, optimizer state, sum of gradients: {floor:.2f}",
        (0.5, floor),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        ha="center",
        size="small",
        color="#5a6067",
    )


# What is drawn of which file of results, by the names of the files.
FIGURES: dict[str, dict[str, Callable[[dict[str, Any]], Figure]]] = {
    "scenarios": {"scenarios_time": draw_time, "scenarios_memory": draw_memory},
    "memory_table": {"memory_table": draw_memory_table},
}


if __name__ == "__main__":
    main()
