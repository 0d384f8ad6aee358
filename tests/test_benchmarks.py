"""The benchmarks measure the same maths and publish what they measured. No timings."""

import dataclasses
import json

import checks
import figures
import jax
import methods
import models
import numpy as np
import optax
import peers
import precision
import programs
import pytest
import readme
import scenarios
from helpers import make_origin
from matplotlib.image import imread

METHODS = [
    "limit",
    "gradients and a step",
    "whole batch",
    "hand-written scan",
    "make_train_step",
    methods.IN_PLACE,
    "make_window_steps",
    "make_train_step + accumulate",
    "accumulate",
    "accumulate in scan",
    "MultiSteps",
    "MultiSteps in scan",
    "optax.microbatch",
]
# Where a model or N is what is tested.
FEW = {
    "limit": methods.limit,
    "gradients and a step": methods.gradients_and_step,
    "hand-written scan": methods.hand_written_scan,
    "make_train_step": methods.make_train_step,
    methods.IN_PLACE: lambda p: methods.make_train_step(p, in_place=True),
    "make_window_steps": methods.make_window_steps,
    "MultiSteps": lambda p: methods.call_by_call(
        p, optax.MultiSteps(p.optimizer, p.num_microbatches)
    ),
}


MEASURED = [name for name in METHODS if name != methods.IN_PLACE or not methods.OLD_JAX]
if methods.OLD_JAX:
    del FEW[methods.IN_PLACE]


@pytest.fixture(autouse=True)
def lenient_promotion():
    # MultiSteps multiplies by a bool, and the model adds a bias to its rows.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def fast_compilation(monkeypatch):
    """Of slow programs: several times as fast to compile."""
    monkeypatch.setattr(
        programs,
        "COMPILER_OPTIONS",
        {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    )


@pytest.fixture
def few_methods(monkeypatch):
    def describe_methods(problem):
        return {name: describe(problem) for name, describe in FEW.items()}

    monkeypatch.setattr(methods, "describe_methods", describe_methods)
    monkeypatch.setattr(scenarios, "describe_methods", describe_methods)


def make_results(optimizers, methods):
    """Figures that are easy to recognise, the same for all."""

    def summary(median):
        return {"median": median, "lower_quartile": 0.5, "upper_quartile": 9.0}

    def record(optimizer, method):
        return {
            "optimizer": optimizer,
            "method": method,
            "milliseconds": summary(20.0),
            "ratios": {name: summary(1.25) for name in peers.REFERENCES},
            "memory_in_p": {"arguments": 3.0, "temporaries": 1.5},
            "programs": {"window": {"compile_seconds": 2.0}},
        }

    return make_origin() | {
        "scenario": {
            "num_microbatches": 8,
            "microbatch_size": 4,
            "rounds": 20,
            "dtype": "float32",
            "params_bytes": 2_000_000,
        },
        "records": [record(o, m) for o in optimizers for m in methods],
    }


FIGURES = """\
| AdamW | time / gradients and a step | time / hand-written scan | time / MultiSteps \
| memory, P |
| --- | ---: | ---: | ---: | ---: |
| hand-written scan | 1.25 (0.50–9.00) | 1 | 1.25 (0.50–9.00) | 3.00 + 1.50 |
| accumulate | 1.25 (0.50–9.00) | 1.25 (0.50–9.00) | 1.25 (0.50–9.00) | 3.00 + 1.50 |

Time of one window: the median of its ratios to the other method's in the same round, \
and their quartiles, over 20 rounds. Memory: arguments + temporaries of the largest \
program, in P, the 2.0 MB of float32 parameters. A window is 8 micro-batches of 4 \
rows. python 3.11, jax 0.9; 2 cores of Abacus; 2030-01-02. Made by \
`python benchmarks/peers.py` and `python benchmarks/readme.py`."""


@pytest.mark.slow
def test_measure_describes_each_method_in_json():
    # Asserts as well that all methods end at the same parameters.
    results = peers.measure(peers.QUICK, {"SGD": optax.sgd(1e-3)})
    assert [record["method"] for record in results["records"]] == MEASURED
    for record in results["records"]:
        assert list(record["ratios"]) == list(peers.REFERENCES)
        assert record["memory_in_p"]["arguments"] >= 1  # the parameters themselves
    # 8 -> 16 -> 4 with biases, in float32.
    assert results["scenario"]["params_bytes"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert json.loads(json.dumps(results)) == results
    assert readme.render(results).count("\n| ") == 1 + len(MEASURED)


@pytest.mark.slow
# The first one is the scenario of the test above.
@pytest.mark.parametrize("scenario", models.QUICK[1:], ids=lambda s: s.name)
def test_methods_agree_in_each_scenario(scenario, few_methods):
    checks.check_methods(scenario, 2, jobs=2)


@pytest.mark.slow
def test_scenarios_measures_each_method_over_n_in_json(few_methods):
    scenario, sgd = models.QUICK[0], ("SGD", optax.sgd(1e-3))
    results = scenarios.measure([scenario], (1, 2), scenarios.QUICK, sgd, jobs=2)
    assert json.loads(json.dumps(results)) == results
    names = [(r["num_microbatches"], r["method"]) for r in results["records"]]
    expected = [*FEW, scenarios.GRADIENT]
    assert names == [(count, method) for count in (1, 2) for method in expected]
    for record in results["records"]:
        assert list(record["ratios"]) == list(scenarios.REFERENCES)
        assert record["gradients"] == 1 or record["method"] != scenarios.GRADIENT

    def programs_of(count):
        return scenarios.find(results, scenario.name, count, "make_window_steps")[
            "programs"
        ]

    # What does not depend on N was compiled once: the seconds are the same.
    assert list(programs_of(1)) == ["first", "apply"]
    assert programs_of(1).items() <= programs_of(2).items()


@pytest.mark.slow
def test_check_methods_names_a_method_that_leaves_out_rows(monkeypatch):
    def describe_methods(problem):
        part = {name: rows[:6] for name, rows in problem.batch.items()}
        rest = dataclasses.replace(
            problem, batch=part, microbatches=problem.microbatches[:3]
        )
        return {
            "limit": methods.limit(problem),
            "whole": methods.hand_written_scan(problem),
            "part": methods.hand_written_scan(rest),
        }

    monkeypatch.setattr(methods, "describe_methods", describe_methods)
    with pytest.raises(AssertionError, match=r"got \S+ by part$"):
        checks.check_methods(models.QUICK[0], 4)


def test_relative_error_of_nan_is_nan():
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert np.isnan(checks.relative_error(zeros, ones * np.nan, ones))
    assert checks.relative_error(zeros, ones, ones) <= 0


def test_main_writes_what_was_measured_and_says_what_was_missed(
    tmp_path, monkeypatch, capsys
):
    results = make_results(["AdamW", "Muon"], METHODS)
    monkeypatch.setattr(peers, "measure", lambda *args: results)
    output = tmp_path / "new" / "peers.json"
    peers.main(["--output", str(output)])
    assert json.loads(output.read_text()) == results
    printed = " ".join(capsys.readouterr().out.split())
    assert "MISSED accumulate / MultiSteps, time with Muon: 1.250" in printed
    assert (
        "kept make_train_step / hand-written scan, temporaries with Muon: 1.000"
        in printed
    )


def test_main_refuses_too_few_rounds_and_jobs(capsys):
    with pytest.raises(SystemExit):
        peers.main(["--rounds", "1"])
    assert "--rounds must be >= 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        scenarios.main(["--jobs", "0"])
    assert "--jobs must be >= 1" in capsys.readouterr().err


def test_render_gives_a_row_for_each_method():
    assert (
        readme.render(make_results(["AdamW"], ["hand-written scan", "accumulate"]))
        == FIGURES
    )


def test_render_gives_a_table_for_each_optimizer():
    text = readme.render(make_results(["AdamW", "Muon"], ["limit"]))
    assert text.count("| time / MultiSteps |") == 2
    assert text.index("| AdamW |") < text.index("| Muon |")


BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


def test_check_tells_whether_the_readme_is_up_to_date(tmp_path, monkeypatch):
    renderers = {"peers": readme.render, "other": lambda results: results["text"]}
    monkeypatch.setattr(readme, "RENDERERS", renderers)
    results = make_results(["AdamW"], ["hand-written scan", "accumulate"])
    (tmp_path / "peers.json").write_text(json.dumps(results))
    figure = "![A figure]({}benchmarks/results/a.png)"
    (tmp_path / "other.json").write_text(json.dumps({"text": figure.format("")}))
    page = tmp_path / "README.md"
    other = tmp_path / "docs" / "other.md"
    other.parent.mkdir()
    markers = "<!-- other: begin -->{}<!-- other: end -->\n"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    other.write_text(markers.format("\n"))
    paths = ["--root", str(tmp_path), "--results", str(tmp_path)]

    with pytest.raises(SystemExit, match=r"^README.md is not up to date .*[^\n]$"):
        readme.main(["--check", *paths])
    readme.main(paths)
    assert page.read_text() == f"above\n{BEGIN}\n{FIGURES}\n{END}\nbelow\n"
    assert other.read_text() == markers.format(f"\n{figure.format('../')}\n")
    readme.main(["--check", *paths])

    other.write_text("")
    with pytest.raises(ValueError, match=r"One page must .* other: .*, got \[\]; put"):
        readme.main(["--check", *paths])


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}\n{BEGIN}", 2 * BEGIN])
def test_fill_without_markers_should_fail(page):
    with pytest.raises(ValueError, match="peers: begin.*got .*; put both"):
        readme.fill(page, "peers", FIGURES)


# -- Scenarios


def make_scenarios(jobs=1):
    """Figures that are easy to recognise, of two scenarios."""

    def record(scenario, count, method):
        return {
            "scenario": scenario,
            "num_microbatches": count,
            "method": method,
            "milliseconds": 20.0,
            "gradients": 1.5,
            "ratios": {name: 1.25 for name in scenarios.REFERENCES},
            "memory_in_p": {"arguments": 3.0, "temporaries": 0.75},
            "extra_bytes": 1_000_000 if method == scenarios.GRADIENT else 1_200_000,
            "compile_seconds": 1.0 + count / 160,
        }

    names, counts = ("convolutional", "transformer"), (1, 4, 16, 64)
    return make_origin() | {
        "optimizer": "AdamW",
        "counts": list(counts),
        "rounds": 5,
        "jobs": jobs,
        "scenarios": [
            {"name": name, "microbatch_size": 4, "params_bytes": 2_000_000}
            for name in names
        ],
        "records": [
            record(name, count, method)
            for name in names
            for count in counts
            for method in [*METHODS, scenarios.GRADIENT]
        ],
    }


def test_scenarios_main_writes_what_was_measured_and_says_what_was_missed(
    tmp_path, monkeypatch, capsys
):
    def measure(measured, counts, timing, jobs):
        return make_scenarios(jobs)

    monkeypatch.setattr(scenarios, "measure", measure)
    output = tmp_path / "new" / "scenarios.json"
    scenarios.main(["--output", str(output)])
    assert json.loads(output.read_text()) == make_scenarios()
    printed = " ".join(capsys.readouterr().out.split())
    # 1.4 s for N = 64, 1.025 s for N = 4.
    assert "MISSED make_train_step compiles as fast for N = 64 as" in printed
    assert ": 1.366, promised at most 1.15" in printed
    assert "kept make_train_step, in place, of the transformer" in printed
    assert ": 0.100, promised at most 0.15" in printed

    scenarios.main(["--jobs", "2", "--quick"])
    assert "unknown make_train_step compiles as fast" in capsys.readouterr().out


def test_render_scenarios_gives_figures_and_a_row_for_each_quantity():
    text = readme.render_scenarios(make_scenarios())
    assert text.startswith("""\
![Time over N, in four scenarios](benchmarks/results/scenarios_time.png)

![Memory over N, in four scenarios](benchmarks/results/scenarios_memory.png)

| N = 16 | convolutional | transformer |
| --- | ---: | ---: |
| time / limit: make_train_step | 1.25 | 1.25 |
""")
    assert "\n| temporaries, P: whole batch | 0.75 | 0.75 |\n" in text
    assert "one micro-batch, of 4 rows." in text
    assert text.count("\n|") == 2 + len(readme.SHOWN)


def test_figures_are_drawn_from_the_file_of_results(tmp_path):
    path = tmp_path / "scenarios.json"
    path.write_text(json.dumps(make_scenarios()))
    figures.main(["--results", str(path)])
    for name in ("time", "memory"):
        picture = tmp_path / f"scenarios_{name}.png"
        height, width, _ = imread(picture).shape
        assert width > height > 300
        assert picture.stat().st_size < 150_000


def test_figures_show_methods_that_are_measured():
    assert set(figures.LINES) <= set(METHODS)
    assert figures.GRADIENT == scenarios.GRADIENT
    assert {method for _, method in readme.SHOWN} <= set(METHODS)


# -- Precision

PRECISION = {
    "entries": 100,
    "records": [{"sum": "float8", "errors": {"4": 0.0123, "16": 0.5}}],
}


def test_precision_renders_a_row_for_each_sum():
    assert precision.render(make_origin() | PRECISION).startswith("""\
| relative error of the sum of | 4 gradients | 16 gradients |
| --- | ---: | ---: |
| float8 | 1.2e-02 | 5.0e-01 |

100 entries of mean 0""")


@pytest.mark.slow
def test_precision_measures_what_narrow_sums_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "COUNTS", (64,))
    precision.main(["--output", str(tmp_path / "new" / "precision.json")])
    results = json.loads((tmp_path / "new" / "precision.json").read_text())
    errors = {record["sum"]: record["errors"]["64"] for record in results["records"]}
    plain, compensated, default = errors.values()
    assert plain > 1e-3 > 1e-4 > compensated > default
