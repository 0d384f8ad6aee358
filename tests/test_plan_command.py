"""``python -m optax_accum plan``: what it plans, prints and refuses."""

import importlib
import sys
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import auto_mesh
from jax.sharding import NamedSharding, PartitionSpec

import optax_accum
from optax_accum import __main__
from optax_accum._plan_command import plan_training, read_training

TRAINING = """
    import jax, jax.numpy as jnp, optax, optax_accum

    def loss_fn(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)

    def loss_and_aux(params, batch):
        return loss_fn(params, batch), jnp.float32(1)

    optimizer = optax.sgd(0.1)
    params = {"w": jax.ShapeDtypeStruct((8, 512), jnp.float32)}
    batch = jax.ShapeDtypeStruct((16, 8), jnp.float32)

    def make():
        return loss_fn, optimizer, params, batch

    def make_with_state():
        state = jax.eval_shape(
            lambda p: optax_accum.init_train_state(p, optimizer), params)
        return loss_fn, optimizer, state, batch

    def make_with_options():
        return loss_and_aux, optimizer, params, batch, {"has_aux": True}

    def make_too_little():
        return loss_fn, optimizer, params

    def make_with_a_list():
        return loss_fn, optimizer, params, batch, ["has_aux"]

    def make_nothing():
        return None

    def fail():
        raise RuntimeError("the user's own")
"""


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A user's module, in the folder in which the command is called."""
    (tmp_path / "their_training.py").write_text(textwrap.dedent(TRAINING))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "their_training"
    sys.modules.pop("their_training", None)


def run(capsys, *arguments):
    """Status, output and errors of the command."""
    try:
        status = __main__.main(["plan", *arguments])
    except SystemExit as exit:
        status = exit.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("name", ["make", "make_with_state", "make_with_options"])
def test_a_training_of_ones_own(training, capsys, name):
    status, out, err = run(capsys, f"{training}:{name}", "--limit", "1GiB")
    assert (status, err) == (0, "")
    assert out.startswith("1 micro-batch of 16 rows, limit 1 GiB on each device\n")


@pytest.mark.slow
def test_a_limit_that_is_a_number(training, capsys):
    planned = importlib.import_module(training).make()
    found = optax_accum.plan_microbatches(
        *read_training(planned)[:4], memory_limit=2**40, exhaustive=True
    )
    peak = found.candidates[1].memory.peak
    _, out, _ = run(capsys, f"{training}:make", "--limit", str(peak))
    assert out.startswith("2 micro-batches of 8 rows, limit ")
    _, _, err = run(capsys, f"{training}:make", "--limit", "0.5")
    assert "fraction 0.5" in err


@pytest.mark.slow
def test_exhaustive_and_a_figure(training, capsys, tmp_path):
    figure = tmp_path / "plan.png"
    arguments = ("--limit", "1GiB", "--exhaustive", "--figure", str(figure))
    status, out, _ = run(capsys, f"{training}:make", *arguments)
    assert status == 0 and "not compiled" not in out
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["name either"]),
        (["THEIRS:make", "--example", "resnet50", "--batch", "1"], ["name either"]),
        (["--example", "resnet50"], ["--batch must be given with --example"]),
        (["THEIRS:make", "--batch", "1"], ["--batch must be given with --example"]),
        (["--example", "vgg", "--batch", "1"], ["resnet50, bert-base", "got 'vgg'"]),
        (["--example", "resnet50", "--batch", "0"], ["--batch", "got 0"]),
        (["no_such_module:make"], ["module:function", "no_such_module"]),
        (["THEIRS:no_such_function"], ["module:function", "no_such_function"]),
        (["THEIRS"], ["module:function", "got 'their_training'"]),
        ([":make"], ["module:function", "got ':make'"]),
        (["THEIRS:optimizer"], ["module:function", "function is not there"]),
        (["THEIRS.sub:make"], ["module:function", "module is not there"]),
        (["no.such.package:make"], ["module:function", "module is not there"]),
        (["./THEIRS.py:make"], ["module:function", "module is not there"]),
        ([".THEIRS:make"], ["module:function", "module is not there"]),
        (["THEIRS:make", "--figure", "no/such/x.png"], ["--figure", "no/such"]),
    ],
)
def test_what_cannot_be_found_is_a_usage_error(training, capsys, arguments, parts):
    arguments = [a.replace("THEIRS", training) for a in arguments]
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == ""
    assert all(part in err for part in parts), err


@pytest.mark.parametrize(
    ("name", "limit", "part"),
    [
        ("make", "10", "at least"),
        ("make", "ten", "got 'ten'"),
        ("make_too_little", "1GiB", "got tuple of 3"),
        ("make_nothing", "1GiB", "got NoneType"),
        ("make_with_a_list", "1GiB", "a dict of the step's keywords, got list"),
    ],
)
def test_what_cannot_be_planned_is_one_message(training, capsys, name, limit, part):
    status, out, err = run(capsys, f"{training}:{name}", "--limit", limit)
    assert status == 1 and out == ""
    assert part in err and err.count("\n") == 1


def test_an_error_of_the_users_own_keeps_its_traceback(training, capsys):
    with pytest.raises(RuntimeError, match="the user's own"):
        run(capsys, f"{training}:fail", "--limit", "1GiB")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("raise ValueError('their own')", ValueError),
        ("import no_such_dependency", ModuleNotFoundError),
        ("from optax import no_such_name", ImportError),
        ("import optax; optax.no_such_name", AttributeError),
    ],
)
def test_what_goes_wrong_in_the_users_module_is_theirs(
    tmp_path, monkeypatch, capsys, line, error
):
    (tmp_path / "their_failure.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(error):
        run(capsys, "their_failure:make")


def test_arrays_keep_their_place():
    """Parameters that lie on a mesh are planned for there."""
    mesh = auto_mesh((2,), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    params = {"w": jax.device_put(jnp.ones((8, 512)), sharding)}

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    training = read_training((loss_fn, optax.adam(0.1), params, jnp.ones((4, 8))))
    memory = plan_training(training, "1GiB", exhaustive=False).chosen.memory
    assert memory.params == 4 * 8 * 512 // 2


def test_missing_flax_is_one_line_with_the_cure(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "optax_accum._examples", raising=False)
    monkeypatch.setitem(sys.modules, "flax", None)  # importing it now fails
    status, _, err = run(capsys, "--example", "resnet50", "--batch", "8")
    assert status == 1 and err.count("\n") == 1
    assert "flax" in err and "pip install 'optax_accum[demo]'" in err


@pytest.mark.slow
def test_an_example(capsys):
    arguments = ("--example", "resnet50", "--batch", "2", "--limit", "8GiB")
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and out.startswith("1 micro-batch of 2 rows, limit 8 GiB")
