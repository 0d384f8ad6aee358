"""The names that users see: all documented, all run, none that leaks."""

import ast
import dataclasses
import doctest
import importlib.metadata
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pages import DOCS, README, run_page

import optax_accum

PUBLIC = sorted(optax_accum.__all__)
FUNCTIONS = [n for n in PUBLIC if inspect.isfunction(getattr(optax_accum, n))]
STATES = [
    optax_accum.AccumulateState,
    optax_accum.TrainState,
    optax_accum.WindowState,
]
MARKERS = ["Concat", "Last", "Max", "Mean", "Min", "Stack", "Sum"]
PACKAGE = Path(optax_accum.__file__).parent

# Ground floor first: a module imports only from those above it.
LAYERS = [
    "_numerics",
    "_checks",
    "_arguments",
    "_axes",
    "_mesh",
    "_sums",
    "_placement",
    "_spread",
    "_ref_traps",
    "_in_place",
    "_reductions",
    "_terms",
    "_mean",
    "_skip",
    "_split",
    "_outputs",
    "_fold",
    "_loss",
    "_job",
    "_scan",
    "_layout",
    "_over_devices",
    "_loop",
    "_optimizer",
    "_window",
    "_share",
    "_call",
    "_accumulate",
    "_value",
    "_value_and_grad",
    "_state",
    "_step",
    "_memory_limit",
    "_memory",
    "_collectives",
    "_collective_report",
    "_progress",
    "_timing",
    "_search",
    "_trials",
    "_plan_figure",
    "_plan",
    "_planner",
    "_auto",
    "_train_step",
    "_window_state",
    "_window_steps",
    "_plan_microbatches",
    "_examples",
    "_plan_command",
    "_verify_finding",
    "_verify_memory",
    "_verify_gradients",
    "_verify",
    "_demo",
    "_forwarded",
    "_modules",
    "nnx",
]


def test_all_is_what_the_package_has():
    modules = {module.name for module in pkgutil.iter_modules(optax_accum.__path__)}
    names = {name for name in vars(optax_accum) if not name.startswith("_")}
    assert names - modules - {"version"} == set(PUBLIC)
    # Of what needs more than jax and optax, users import the module.
    assert {module for module in modules if not module.startswith("_")} == {"nnx"}


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").exists()


def test_version_is_that_of_the_metadata():
    assert optax_accum.__version__ == importlib.metadata.version("optax_accum")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_in_the_readme_or_a_page_it_leads_to(name):
    readme = README.read_text()
    pages = [page for page in DOCS.glob("*.md") if f"docs/{page.name}" in readme]
    assert any(name in page.read_text() for page in (README, *pages))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_have_their_sections_and_every_argument(name):
    function = getattr(optax_accum, name)
    doc = inspect.getdoc(function)
    assert "\nReturns:\n" in doc and "\nExamples:\n" in doc
    arguments = doc.split("\nArgs:\n")[1].split("\nReturns:\n")[0]
    for parameter in inspect.signature(function).parameters:
        assert f"  {parameter}: " in arguments.replace("*", "")


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples_run(name):
    public = getattr(optax_accum, name)
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        tests = doctest.DocTestFinder(recurse=False).find(
            public,
            name,
            globs={"jax": jax, "jnp": jnp, "optax": optax, "optax_accum": optax_accum},
        )
        assert tests and tests[0].examples
        runner = doctest.DocTestRunner()
        runner.run(tests[0])
    assert runner.summarize().failed == 0


@pytest.mark.slow
def test_readme_examples_run(capsys):
    namespace = run_page(README)
    assert capsys.readouterr().out.startswith("loss 0.")
    assert_recipe_for_tokens_holds(namespace)


def assert_recipe_for_tokens_holds(readme):
    """What the README says of masked means, and what it says not to write."""
    tokens, weights = readme["tokens"], readme["weights"]

    def mean_over_tokens(params, batch):
        losses = (batch["x"] @ params["w"] - batch["y"]) ** 2
        decay = jnp.sum(params["w"] ** 2)
        return jnp.mean(losses, where=batch["mask"]) + 0.01 * decay

    loss, grads = jax.value_and_grad(mean_over_tokens)(weights, tokens)
    naive = optax_accum.grad(mean_over_tokens, num_microbatches=8)(weights, tokens)["w"]
    atol = 1e-5 * float(jnp.max(jnp.abs(grads["w"])))  # 10240 summands in float32
    np.testing.assert_allclose(readme["token_grads"]["w"], grads["w"], atol=atol)
    decay = 0.01 * jnp.sum(weights["w"] ** 2)
    np.testing.assert_allclose(readme["loss"] + decay, loss, rtol=1e-5)
    assert readme["report"]["row"].shape == (512,)
    assert int(readme["report"]["tokens"]) == int(jnp.sum(tokens["mask"]))
    assert np.max(np.abs(naive - grads["w"])) > 10 * atol


def test_state_docstrings_name_every_field():
    for state in STATES:
        for field in state._fields:
            assert f"  {field}: " in inspect.getdoc(state)


@pytest.mark.parametrize("name", [*MARKERS, "Plan"])
def test_dataclass_docstrings_name_every_field(name):
    dataclass = getattr(optax_accum, name)
    for field in dataclasses.fields(dataclass):
        assert f"  {field.name}: " in inspect.getdoc(dataclass)


def imports_of_ours(path):
    tree = ast.parse(path.read_text())
    return {
        node.module.split(".")[-1]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("optax_accum.")
    }


@pytest.mark.parametrize("name", LAYERS)
def test_imports_go_downward(name):
    below = LAYERS[: LAYERS.index(name)]
    assert imports_of_ours(PACKAGE / f"{name}.py") <= set(below)


def test_every_module_has_its_layer():
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules == {*LAYERS, "__init__", "__main__"}


def test_no_private_module_of_others():
    for path in PACKAGE.glob("*.py"):
        assert "._src" not in path.read_text()


def test_importing_touches_no_device_and_no_setting():
    """The number of devices can be chosen only as long as no backend has started."""
    code = (
        "import jax, optax; before = dict(jax.config.values); import optax_accum;"
        "assert dict(jax.config.values) == before;"
        "jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices()) == 3"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
