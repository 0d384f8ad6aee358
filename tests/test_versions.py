"""With which versions the tests have passed: recorded by a run, and by nothing else."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib

import pytest
import readme
import versions
from helpers import make_origin
from pages import ROOT


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


def write_reports(folder, **failures):
    """As pytest writes them: 3 quick tests, one of them skipped, and 2 slow ones."""
    for name, tests, skipped in (("quick", 3, 1), ("slow", 2, 0)):
        failed = failures.get(name, 0)
        suite = f'errors="0" failures="{failed}" skipped="{skipped}" tests="{tests}"'
        report = f'<testsuites><testsuite name="pytest" {suite}/></testsuites>'
        (folder / f"{name}.xml").write_text(report)
    return str(folder)


def test_reports_are_those_of_pytest(tmp_path):
    test = tmp_path / "test_made_up.py"
    test.write_text(
        "import pytest\ndef test_one(): pass\ndef test_two(): pytest.skip('here')\n"
    )
    for name in versions.REPORTS:
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, str(test)]
        command += [f"--rootdir={tmp_path}", f"--junitxml={tmp_path / name}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert versions.count_tests(tmp_path) == {"passed": 2, "skipped": 2}


@pytest.mark.parametrize("name", ["quick", "slow"])
def test_a_failed_or_missing_run_is_not_recorded(name, tmp_path):
    output = tmp_path / "versions.json"
    arguments = ["oldest", write_reports(tmp_path, **{name: 1})]
    with pytest.raises(SystemExit, match="have failed"):
        versions.main([*arguments, "--output", str(output)])
    (tmp_path / f"{name}.xml").unlink()
    with pytest.raises(SystemExit, match=f"{name}.xml is missing"):
        versions.main([*arguments, "--output", str(output)])
    assert not output.exists()


def test_main_keeps_what_is_recorded_of_the_other_environment(tmp_path):
    reports = write_reports(tmp_path)
    output = tmp_path / "new" / "versions.json"
    versions.main(["newest", reports, "--output", str(output)])
    newest = json.loads(output.read_text())["newest"]
    versions.main(["oldest", reports, "--output", str(output)])
    results = json.loads(output.read_text())
    assert list(results) == ["oldest", "newest"]
    assert results["newest"] == newest
    assert results["oldest"]["tests"] == {"passed": 4, "skipped": 1}
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
