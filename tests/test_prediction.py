"""The predicted peak of a step is what a fresh process needs to run it."""

import json
import math

import prediction
import pytest
import shapes
from helpers import make_origin


def make_results(**changed):
    """Figures that are easy to recognise, of one model."""

    def record(count, predicted, measured):
        return {
            "model": "MLP",
            "num_microbatches": count,
            "predicted_bytes": predicted,
            "measured_bytes": measured,
        }

    plan = {
        "model": "MLP",
        "memory_limit": 600_000_000,
        "num_microbatches": 4,
        "next_larger": 2,
    }
    return make_origin() | {
        "optimizer": "AdamW",
        "plans": [plan | changed],
        "records": [
            record(2, 990_000_000, 1_000_000_000),
            record(4, 512_000_000, 500_000_000),
        ],
    }


# -- What is printed and published


def test_deviation_is_in_parts_of_what_is_allowed():
    def deviation(predicted, measured):
        return prediction.deviation(
            {"predicted_bytes": predicted, "measured_bytes": measured}
        )

    assert deviation(76_000_000, 100_000_000) == 1  # 24 MB
    assert deviation(124_000_000, 100_000_000) == 1
    assert math.isclose(deviation(1_100_000_000, 1_000_000_000), 2)  # 5 %


def test_judge_says_what_was_kept():
    assert prediction.judge(make_results()) == [
        "kept   MLP: predicted peak, parts of what it may be off: 0.480, "
        "promised at most 1",
        "kept   MLP: peak / limit, as planned: 0.833, promised at most 1",
        "kept   MLP: limit / peak, next larger micro-batch: 0.600, promised at most 1",
    ]


def test_judge_says_what_was_missed():
    _, below, _ = prediction.judge(make_results(memory_limit=400_000_000))
    assert below.startswith("MISSED") and "1.250" in below
    _, _, above = prediction.judge(make_results(memory_limit=1_100_000_000))
    assert above.startswith("MISSED") and "1.100" in above
    # What was planned was not measured.
    _, *both = prediction.judge(make_results(num_microbatches=16, next_larger=8))
    assert all(line.startswith("MISSED") for line in both)


def test_render_gives_a_row_for_each_step():
    assert prediction.render(make_results()).startswith("""\
| model | N | predicted, MB | measured, MB | difference |
| --- | ---: | ---: | ---: | ---: |
| MLP | 2 | 990 | 1000 | -10.0 MB (-1.0%) |
| MLP | 4 | 512 | 500 | +12.0 MB (+2.4%) |

The peak of a train step with AdamW""")


@pytest.mark.slow
def test_quick_run_writes_what_it_predicted_and_measured(tmp_path, capsys):
    output = tmp_path / "new" / "prediction.json"
    prediction.main(["--quick", "--output", str(output)])
    results = json.loads(output.read_text())
    (shape,) = shapes.QUICK
    sizes = [(r["num_microbatches"], r["microbatch_size"]) for r in results["records"]]
    assert sizes == [(n, shape.rows // n) for n in prediction.QUICK_COUNTS]
    for record in results["records"]:
        assert record["predicted_bytes"] > 0
        assert record["measured_bytes"] >= record["argument_bytes"]
    (plan,) = results["plans"]
    assert (plan["next_larger"], plan["num_microbatches"]) == (1, 2)
    printed = capsys.readouterr().out
    assert "small MLP: predicted peak" in printed
    assert prediction.render(results).count("\n| small MLP |") == 2


# -- Fresh processes


@pytest.mark.slow
@pytest.mark.parametrize("shape", [shapes.MLP, shapes.RECURRENT], ids=lambda s: s.name)
def test_prediction_is_near_what_is_measured_and_a_limit_is_kept(shape):
    results = prediction.measure([shape], (1, 2), (1, 2))
    whole, halves = results["records"]
    assert whole["measured_bytes"] > 300_000_000
    assert halves["measured_bytes"] > 150_000_000
    lines = prediction.judge(results)
    assert [line for line in lines if not line.startswith("kept")] == []
    # The measurement could tell: it is far from the prediction of another step.
    wrong = whole | {"predicted_bytes": halves["predicted_bytes"]}
    assert prediction.deviation(wrong) > 2
    # The arguments alone are as large as they are, and nothing else lay beside them.
    assert whole["argument_bytes"] == pytest.approx(halves["argument_bytes"], rel=0.01)
