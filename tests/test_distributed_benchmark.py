"""What is published of many devices is what a process on so many has measured."""

import json

import distributed
import programs
import pytest
import readme
import sharded
from helpers import make_origin

METHODS = [
    "scan, contiguous",
    "scan, strided",
    "optax.microbatch",
    "make_train_step",
    sharded.BOUND,
    sharded.OURS,
    'reduce_axes, gather="microbatch"',
    sharded.GATHER_ONCE,
]


@pytest.fixture
def fast_compilation(monkeypatch):
    """Of slow programs: several times as fast to compile."""
    monkeypatch.setattr(
        programs,
        "COMPILER_OPTIONS",
        {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    )


def make_results(counts=(4, 8), methods=(sharded.BOUND, "scan", sharded.OURS)):
    """Figures that are easy to recognise; in ours, those of the bound times 1.25."""

    def record(count, method):
        factor = 1.25 if method == sharded.OURS else 1
        is_known = method != "scan"
        return {
            "devices": count,
            "method": method,
            "parameter_sized_collectives": int(4 * factor) if is_known else None,
            "collectives": 9,
            "bytes_moved": count * 10**6 * factor if is_known else None,
            "flops": 300.0 * factor,
            "memory_in_p": {"arguments": 3.0, "temporaries": 2.0 * factor},
            "milliseconds": {"median": 20.0},
            "ratios": {
                sharded.BOUND: {
                    "median": 0.9 + count / 100,
                    "lower_quartile": 0.5,
                    "upper_quartile": 9.0,
                }
            },
            "rounds": 16 + count,
        }

    return make_origin() | {
        "scenario": {
            "microbatch_size": 16,
            "num_microbatches": 2,
            "optimizer": "AdamW",
            "dtype": "float32",
            "params_bytes": 2_000_000,
        },
        "devices": list(counts),
        "records": [record(count, method) for count in counts for method in methods],
    }


# -- What is printed and published


def test_render_gives_a_row_for_each_method():
    text = distributed.render(make_results())
    assert text.startswith("""\
| on 4 / 8 devices | collectives | moved, MB | FLOPs / hand-written shard_map \
| temporaries, P | time / hand-written shard_map, 4 devices \
| time / hand-written shard_map, 8 devices |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| hand-written shard_map | 4 / 4 | 4.0 / 8.0 | 1.00 / 1.00 | 2.00 / 2.00 | 1 | 1 |
| scan | ? / ? | ? / ? | 1.00 / 1.00 | 2.00 / 2.00 \
| 0.94 (0.50–9.00) | 0.98 (0.50–9.00) |
| reduce_axes | 5 / 5 | 5.0 / 10.0 | 1.25 / 1.25 | 2.50 / 2.50 \
| 0.94 (0.50–9.00) | 0.98 (0.50–9.00) |

One step with AdamW, of 2 micro-batches with 16 rows""")
    assert "in P, the 2.0 MB of float32 parameters" in text
    assert "over 20 rounds or more" in text
    assert "the cores and the memory of one machine. python 3.11, jax 0.9; 2" in text


def test_the_readme_is_filled_with_it(tmp_path, monkeypatch):
    renderers = {"distributed": readme.RENDERERS["distributed"]}
    monkeypatch.setattr(readme, "RENDERERS", renderers)
    (tmp_path / "distributed.json").write_text(json.dumps(make_results()))
    page = tmp_path / "README.md"
    begin, end = (f"<!-- distributed: {edge} -->\n" for edge in ("begin", "end"))
    page.write_text(f"above\n{begin}{end}below\n")
    readme.main(["--root", str(tmp_path), "--results", str(tmp_path)])
    table = distributed.render(make_results())
    assert page.read_text() == f"above\n{begin}{table}\n{end}below\n"


def test_judge_says_what_was_kept_and_missed():
    results = make_results([4], [sharded.BOUND, sharded.OURS, sharded.GATHER_ONCE])
    over = f"/ {sharded.BOUND}"
    assert distributed.judge(results) == [
        f"MISSED reduce_axes {over}, collectives on 4 devices: 1.250, promised at most "
        "1.0",
        f"MISSED reduce_axes {over}, bytes moved on 4 devices: 1.250, promised at most "
        "1.0",
        f"MISSED reduce_axes {over}, temporaries on 4 devices: 1.250, promised at most "
        "1.02",
        f"kept   reduce_axes {over}, time on 4 devices: 0.940, promised at most 1.1",
        f'kept   reduce_axes, gather="call" {over}, bytes moved on 4 devices: 1.000, '
        "promised at most 1.0",
    ]


def test_main_writes_what_was_measured(tmp_path, monkeypatch, capsys):
    asked = []

    def measure(*args):
        asked.append(args)
        return make_results(methods=METHODS)

    monkeypatch.setattr(distributed, "measure", measure)
    monkeypatch.setattr(distributed, "RESULTS", tmp_path / "distributed.json")
    distributed.main(["--quick"])
    assert not list(tmp_path.iterdir())
    distributed.main(["--rounds", "5", "--jobs", "2"])
    assert asked == [((2,), "quick", 3, 1), ((4, 8), "full", 5, 2)]
    written = json.loads((tmp_path / "distributed.json").read_text())
    assert written == make_results(methods=METHODS)
    printed = " ".join(capsys.readouterr().out.split())
    assert "MISSED reduce_axes / hand-written shard_map, temporaries on 8" in printed


# -- What is measured


def test_count_is_unknown_where_a_loop_does_not_tell():
    class Ran:
        def __init__(self, trips):
            self.trips = trips

    assert sharded.count([Ran(8), Ran(1)]) == 9
    assert sharded.count([Ran(8), Ran(None)]) is None
    assert sharded.count([]) == 0


@pytest.mark.slow
def test_check_methods_names_a_method_that_counts_a_row_twice(
    monkeypatch, fast_compilation
):
    def twice(case, params, batch):
        last = {name: x.at[-2].set(x[-1]) for name, x in batch.items()}
        return sharded.over_devices(case, params, last)

    def describe_methods(case):
        sums = {
            "right": lambda *args: sharded.over_devices(case, *args),
            "wrong": lambda *args: twice(case, *args),
        }
        return {name: sharded.by_hand(case, sum_up) for name, sum_up in sums.items()}

    monkeypatch.setattr(sharded, "describe_methods", describe_methods)
    with pytest.raises(AssertionError, match=r"got \S+ by wrong$"):
        sharded.check_methods(sharded.QUICK)


@pytest.mark.slow
def test_quick_run_writes_what_it_measured(tmp_path, capsys):
    # Asserts as well that all methods end at the same parameters.
    output = tmp_path / "new" / "distributed.json"
    distributed.main(["--quick", "--jobs", "2", "--output", str(output)])
    results = json.loads(output.read_text())
    keys = [(record["devices"], record["method"]) for record in results["records"]]
    (count,) = distributed.QUICK_COUNTS
    assert keys == [(count, method) for method in METHODS]
    for name, at_most in ((sharded.BOUND, 1), (sharded.OURS, 1), ("scan, strided", 2)):
        record = distributed.find(results, count, name)
        assert 0 < record["parameter_sized_collectives"] <= at_most
        assert record["collectives"] >= record["parameter_sized_collectives"]
    assert "reduce_axes / hand-written shard_map, time on 2" in capsys.readouterr().out
    assert distributed.render(results).count("\n| ") == 1 + len(METHODS)
