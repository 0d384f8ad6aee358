"""With which versions the tests have passed: recorded by a run, and by nothing else."""

import importlib.metadata
import json
import sys
import tomllib

import pytest
import readme
import versions
from helpers import make_origin
from pages import ROOT

PASSING = """
import pytest

def test_quick(): pass

@pytest.mark.slow
def test_slow(): pass

def test_skipped(): pytest.skip("here")
"""
FAILING = PASSING + "\ndef test_wrong(): assert 1 + 1 == 3\n"


def choose_tests(path, source):
    """Arguments with which only these run."""
    path.write_text(source)
    return str(path), "-c", str(ROOT / "pyproject.toml"), "-n", "0"


def make_results():
    def record(**packages):
        tests = {"passed": 1234, "skipped": 5}
        newest = {"versions": {"python": "3.11.7", "jax": "0.9"} | packages}
        return make_origin() | {"tests": tests} | newest

    return {
        "oldest": record(jaxlib="0.9", optax="0.2", flax="0.12"),
        "newest": record(jaxlib="1.0", optax="0.3"),
    }


TABLE = """\
|  | oldest | newest |
| --- | ---: | ---: |
| python | 3.11.7 | 3.11.7 |
| jax | 0.9 | 0.9 |
| jaxlib | 0.9 | 1.0 |
| optax | 0.2 | 0.3 |
| flax | 0.12 | – |
| tests passed | 1234 | 1234 |
| tests skipped | 5 | 5 |

"""


@pytest.mark.slow
def test_quick_and_slow_tests_are_run_and_counted(tmp_path):
    chosen = choose_tests(tmp_path / "test_made_up.py", PASSING)
    assert versions.run_tests(*chosen) == {"passed": 2, "skipped": 1}


@pytest.mark.slow
def test_a_failed_run_is_not_recorded(tmp_path, monkeypatch):
    chosen = choose_tests(tmp_path / "test_made_up.py", FAILING)
    run = versions.run_tests
    monkeypatch.setattr(versions, "run_tests", lambda: run(*chosen))
    output = tmp_path / "versions.json"
    with pytest.raises(SystemExit) as exited:
        versions.main(["oldest", "--output", str(output)])
    assert exited.value.code == pytest.ExitCode.TESTS_FAILED
    assert not output.exists()


def test_main_keeps_what_is_recorded_of_the_other_environment(tmp_path, monkeypatch):
    tests = {"passed": 3, "skipped": 0}
    monkeypatch.setattr(versions, "run_tests", lambda: tests)
    output = tmp_path / "new" / "versions.json"
    versions.main(["newest", "--output", str(output)])
    newest = json.loads(output.read_text())["newest"]
    versions.main(["oldest", "--output", str(output)])
    results = json.loads(output.read_text())
    assert list(results) == ["oldest", "newest"]
    assert results["newest"] == newest
    assert results["oldest"]["tests"] == tests
    assert results["oldest"]["versions"]["jax"] == importlib.metadata.version("jax")


def test_versions_are_those_of_all_that_tests_need():
    found = versions.find_versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"jax", "jaxlib", "optax", "numpy", "flax", "pytest"} <= set(found)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["test"][1:]
    assert {requirement.partition(">=")[0] for requirement in needed} <= set(found)


def test_render_gives_a_row_for_each_package():
    text = readme.RENDERERS["versions"](make_results())
    assert text.startswith(TABLE)
    assert "oldest: 2030-01-02, commit None; newest: 2030-01-02" in text


def test_render_of_one_environment():
    results = make_results()
    del results["newest"]
    assert "| jaxlib | 0.9 |\n" in versions.render(results)
