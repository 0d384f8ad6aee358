"""The benchmarks measure the same maths and publish what they measured. No timings."""

import json

import jax
import methods
import numpy as np
import optax
import peers
import precision
import pytest
import readme

METHODS = [
    "limit",
    "hand-written scan",
    "make_train_step",
    "accumulate",
    "accumulate in scan",
    "MultiSteps",
    "MultiSteps in scan",
    "optax.microbatch",
]


@pytest.fixture(autouse=True)
def lenient_promotion():
    # MultiSteps multiplies by a bool, and the model adds a bias to its rows.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def make_origin():
    return {
        "date": "2030-01-02",
        "commit": None,
        "hardware": {
            "platform": "cpu",
            "device": "cpu",
            "cpu_count": 2,
            "cpu_model": "Abacus",
        },
        "versions": {"python": "3.11", "jax": "0.9"},
    }


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
| AdamW | time / limit | time / hand-written scan | time / MultiSteps | memory, P |
| --- | ---: | ---: | ---: | ---: |
| limit | 1 | 1.25 (0.50–9.00) | 1.25 (0.50–9.00) | 3.00 + 1.50 |
| accumulate | 1.25 (0.50–9.00) | 1.25 (0.50–9.00) | 1.25 (0.50–9.00) | 3.00 + 1.50 |

Time of one window: the median of its ratios to the other method's in the same round, \
and their quartiles, over 20 rounds. Memory: arguments + temporaries of the largest \
program, in P, the 2.0 MB of float32 parameters. A window is 8 micro-batches of 4 \
rows. python 3.11, jax 0.9; 2 cores of Abacus; 2030-01-02. Made by \
`python benchmarks/peers.py` and `python benchmarks/readme.py`."""


def test_measure_describes_each_method_in_json():
    # Asserts as well that all methods end at the same parameters.
    results = peers.measure(methods.QUICK, {"SGD": optax.sgd(1e-3)})
    assert [record["method"] for record in results["records"]] == METHODS
    for record in results["records"]:
        assert list(record["ratios"]) == list(peers.REFERENCES)
        assert record["memory_in_p"]["arguments"] >= 1  # the parameters themselves
    # 8 -> 16 -> 4 with biases, in float32.
    assert results["scenario"]["params_bytes"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert json.loads(json.dumps(results)) == results
    assert readme.render(results).count("\n| ") == 1 + len(METHODS)


def test_check_methods_names_a_method_that_leaves_out_rows(monkeypatch):
    def build_methods(problem):
        part = {name: rows[:6] for name, rows in problem.batch.items()}
        rest = problem._replace(batch=part, microbatches=problem.microbatches[:3])
        return {
            "limit": methods.limit(problem),
            "whole": methods.hand_written_scan(problem),
            "part": methods.hand_written_scan(rest),
        }

    monkeypatch.setattr(methods, "build_methods", build_methods)
    with pytest.raises(AssertionError, match=r"got \S+ by part$"):
        methods.check_methods(methods.make_problem(methods.QUICK, optax.sgd(1.0)))


def test_relative_error_of_nan_is_nan():
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert np.isnan(methods.relative_error(zeros, ones * np.nan, ones))
    assert methods.relative_error(zeros, ones, ones) <= 0


def test_main_writes_what_was_measured_and_says_what_was_missed(
    tmp_path, monkeypatch, capsys
):
    results = make_results(["AdamW", "Muon"], METHODS)
    monkeypatch.setattr(peers, "measure", lambda scenario, optimizers: results)
    output = tmp_path / "new" / "peers.json"
    peers.main(["--output", str(output)])
    assert json.loads(output.read_text()) == results
    printed = " ".join(capsys.readouterr().out.split())
    assert "MISSED accumulate / MultiSteps, time with Muon: 1.250" in printed
    assert (
        "kept make_train_step / hand-written scan, temporaries with Muon: 1.000"
        in printed
    )


def test_main_refuses_too_few_rounds_for_quartiles(capsys):
    with pytest.raises(SystemExit):
        peers.main(["--rounds", "1"])
    assert "--rounds must be >= 2" in capsys.readouterr().err


def test_render_gives_a_row_for_each_method():
    assert readme.render(make_results(["AdamW"], ["limit", "accumulate"])) == FIGURES


def test_render_gives_a_table_for_each_optimizer():
    text = readme.render(make_results(["AdamW", "Muon"], ["limit"]))
    assert text.count("| time / limit |") == 2
    assert text.index("| AdamW |") < text.index("| Muon |")


BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
ERRORS = "<!-- precision: begin -->{}<!-- precision: end -->\n"


def test_check_tells_whether_the_readme_is_up_to_date(tmp_path):
    page = tmp_path / "README.md"
    results = make_results(["AdamW"], ["limit", "accumulate"])
    (tmp_path / "peers.json").write_text(json.dumps(results))
    errors = make_origin() | PRECISION
    (tmp_path / "precision.json").write_text(json.dumps(errors))
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n" + ERRORS.format("\n"))
    paths = ["--readme", str(page), "--results", str(tmp_path)]

    with pytest.raises(SystemExit, match=r"^README.md is not up to date .*[^\n]$"):
        readme.main(["--check", *paths])
    readme.main(paths)
    expected = f"above\n{BEGIN}\n{FIGURES}\n{END}\nbelow\n"
    table = precision.render(errors)
    assert page.read_text() == expected + ERRORS.format(f"\n{table}\n")
    readme.main(["--check", *paths])


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}\n{BEGIN}", 2 * BEGIN])
def test_fill_without_markers_should_fail(page):
    with pytest.raises(ValueError, match="peers: begin.*got .*; put both"):
        readme.fill(page, "peers", FIGURES)


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


def test_precision_measures_what_narrow_sums_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "COUNTS", (64,))
    precision.main(["--output", str(tmp_path / "new" / "precision.json")])
    results = json.loads((tmp_path / "new" / "precision.json").read_text())
    errors = {record["sum"]: record["errors"]["64"] for record in results["records"]}
    plain, compensated, default = errors.values()
    assert plain > 1e-3 > 1e-4 > compensated > default
