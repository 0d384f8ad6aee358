"""Draws what `scenarios.py` measured: time and memory over N, a panel a scenario.

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

RESULTS = ROOT / "benchmarks" / "results" / "scenarios.json"
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
LABELS = {"gradients and a step": "N gradients and one step"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    path = parser.parse_args(arguments).results
    results = json.loads(path.read_text())
    for name, draw in FIGURES.items():
        figure = draw(results)
        # No date and no version, so that the same figures are the same file.
        figure.savefig(figure_path(path, name), dpi=150, metadata={"Software": None})


def figure_path(results: Path, name: str) -> Path:
    return results.with_name(f"{results.stem}_{name}.png")


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


# What is drawn, by the end of the file's name.
FIGURES = {"time": draw_time, "memory": draw_memory}


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
    axes.set(xscale="log", yscale="log", xlabel="N")
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
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.yaxis.set_major_locator(FixedLocator([2.0**power for power in range(-4, 9)]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color="#e9ebee", linewidth=0.8)
    axes.axhline(1, color="#b9bec4", linewidth=0.8)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
