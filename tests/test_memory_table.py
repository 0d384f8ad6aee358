"""The table of memory says what the planner finds, and is published whole."""

import json

import figures
import jax
import memory_table
import pytest
from helpers import make_origin
from matplotlib.image import imread

import optax_accum


@pytest.fixture(scope="module")
def results_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "new" / "memory_table.json"
    memory_table.main(["--quick", "--output", str(path)])
    return path


@pytest.fixture
def results(results_path):
    return json.loads(results_path.read_text())


def make_results():
    """Figures that are easy to recognise, of two models."""

    def record(model, batch_size, count):
        return {
            "model": model,
            "batch_size": batch_size,
            "num_microbatches": count,
            "floor_bytes": 250_000_000 if count > 1 else 125_000_000,
            "peak_bytes": batch_size * 10**9 // count + 250_000_000,
        }

    records = [
        record(model, batch_size, count)
        for model in ("small", "large")
        for batch_size in (16, 64)
        for count in (1, 2, 4)
    ]
    return make_origin() | {"records": records}


def test_there_is_a_record_of_each_step(results):
    extent = memory_table.QUICK
    keys = [
        (record["model"], record["batch_size"], record["num_microbatches"])
        for record in results["records"]
    ]
    assert keys == [
        (model, batch_size, count)
        for model in extent.models
        for batch_size in extent.batch_sizes
        for count in extent.counts
    ]
    assert all(record["compile_seconds"] > 0 for record in results["records"])
    assert results["versions"]["jax"] == jax.__version__


def test_peaks_are_those_of_the_planner(results):
    record = results["records"][-1]
    example = memory_table.QUICK.models[record["model"]](record["batch_size"])
    plan = optax_accum.plan_microbatches(
        *example, memory_limit=2**60, exhaustive=True, group_size=128
    )
    (planned,) = (
        candidate
        for candidate in plan.candidates
        if candidate.num_microbatches == record["num_microbatches"]
    )
    memory = planned.memory
    assert record["microbatch_size"] == planned.microbatch_size
    assert record["peak_bytes"] == memory.peak
    assert record["floor_bytes"] == memory.peak - memory.activations - memory.rest
    for part, size in memory._asdict().items():
        assert record[f"{part}_bytes"] == size


def test_a_device_that_is_too_small_is_named(monkeypatch):
    class Refusing:
        def memory(self, num_microbatches):
            return "RESOURCE_EXHAUSTED: full"

    monkeypatch.setattr(memory_table, "make_trials", lambda *args: Refusing())
    with pytest.raises(
        RuntimeError, match="must have room for tiny .* of 64 in 1, got .* full;"
    ):
        memory_table.measure(memory_table.QUICK)


def test_main_shows_and_writes_what_was_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory_table, "measure", lambda extent: make_results())
    monkeypatch.setattr(memory_table, "RESULTS", tmp_path / "memory_table.json")
    memory_table.main(["--quick"])
    assert not list(tmp_path.iterdir())
    memory_table.main([])
    written = json.loads((tmp_path / "memory_table.json").read_text())
    assert written == make_results()
    printed = capsys.readouterr().out
    for cell in (
        "small",
        "large",
        "N = 4",
        "│         16 │",
        "│         64 │",
        "64.25",
    ):
        assert printed.count(cell) >= 2


def test_render_gives_a_figure_and_a_table_for_each_model():
    text = memory_table.render(make_results())
    start = """\
![Memory of a train step over N, of two models](benchmarks/results/memory_table.png)

| small, batch size | N = 1 | N = 2 | N = 4 |
| --- | ---: | ---: | ---: |
| 16 | 16.25 | 8.25 | 4.25 |
| 64 | 64.25 | 32.25 | 16.25 |

| large, batch size | N = 1 | N = 2 | N = 4 |
"""
    assert text.startswith(start)
    assert "sum of gradients: 0.25 GB of small, 0.25 GB of large." in text
    assert "for a CPU" in text and "2 cores of Abacus" in text


def test_the_figure_is_drawn_from_the_file(tmp_path):
    path = tmp_path / "memory_table.json"
    path.write_text(json.dumps(make_results()))
    figures.main(["--results", str(path)])
    picture = tmp_path / "memory_table.png"
    height, width, _ = imread(picture).shape
    assert width > height > 300
    assert 10_000 < picture.stat().st_size < 150_000
