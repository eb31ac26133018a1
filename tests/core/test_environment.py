"""Tests of the registry of environment variables: every read goes through it, the page is made from it, and
values that are not accepted cause a warning."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.command_process import tritoncp as command
from tritoncp.core import environment
from tritoncp.core.environment import OF_OTHERS, VARIABLES

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "tritoncp/core/environment.py"
NAME = re.compile(r"TRITONCP_[A-Z_]+[A-Z]")


def sources() -> list[Path]:
    return [path for folder in ("tritoncp", "kernels", "perf") for path in (ROOT / folder).rglob("*.py")]


def read_names(tree: ast.Module) -> set[str]:
    """List the literal names of variables that code looks up in the environment, or sets."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            names.add(node.slice)
        elif isinstance(node, ast.Call) and re.search(r"environ\.\w+$|getenv$", ast.unparse(node.func)):
            names |= set(node.args[:1])
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            names.add(node.left)
    return {name.value for name in names if isinstance(name, ast.Constant)}


def test_only_the_registry_reads_variables_of_the_package():
    for path in sources():
        text = path.read_text()
        tree = ast.parse(text if "environ" in text or "getenv" in text or "TRITONCP_" in text else "")
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        own = {text for text in texts if isinstance(text, str) and NAME.fullmatch(text)}
        assert path == REGISTRY or not own, f"{path}: read {own} by tritoncp.core.environment"
        assert read_names(tree) <= set(OF_OTHERS), f"{path}: add it to OF_OTHERS in {REGISTRY}"


def test_a_read_past_the_registry_is_seen():
    code = 'os.environ["A"]; os.environ.get("B", "0"); os.getenv("C"); "D" in os.environ; environ.pop("E")'
    assert read_names(ast.parse(code)) == {"A", "B", "C", "D", "E"}


def test_every_variable_that_is_named_anywhere_is_in_the_registry():
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "Makefile", *sources()]
    named = {name for path in pages for name in NAME.findall(path.read_text())}
    assert named == set(VARIABLES)


def test_the_page_is_that_of_the_registry():
    page = (ROOT / "docs/environment.md").read_text()
    assert page == environment.page(), "run python -m tritoncp.core.environment --write"


def test_the_registry_prints_the_page_without_torch():
    start = "import runpy, sys; sys.modules['torch'] = None"
    code = f"{start}; runpy.run_path({str(REGISTRY)!r}, run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == environment.page(), run.stderr


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TRITONCP_DEBUG", "", False),
        ("TRITONCP_DEBUG", "1", True),
        ("TRITONCP_DEBUG", "off", False),
        ("TRITONCP_UNSAFE_FUSED", "True", True),
        ("TRITONCP_AUTOTUNE", "1", 60.0),
        ("TRITONCP_AUTOTUNE", "1.5h", 5400.0),
        ("TRITONCP_CONFIG_DIR", "-", "-"),
        ("TRITONCP_CACHE_DIR", "", None),
    ],
)
def test_accepted_values(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert VARIABLES[name].read() == value
    monkeypatch.delenv(name)
    assert VARIABLES[name].read() == VARIABLES[name].default


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("TRITONCP_DEBUG", "2", "0 or 1"),
        ("TRITONCP_CPU_COMPILE", "please", "0 or 1"),
        ("TRITONCP_AUTOTUNE", "soon", "0, 1 (a minute) or a time as 90s, 5m, 1h"),
        ("TRITONCP_AUTOTUNE", "-1m", "0, 1 (a minute) or a time"),
    ],
)
def test_a_value_that_is_not_understood_causes_a_warning_with_the_accepted_ones(
    monkeypatch, name, text, accepted
):
    monkeypatch.setenv(name, text)
    with pytest.warns(
        UserWarning, match=re.escape(f"{name}={text!r} is not understood; accepted: {accepted}")
    ):
        assert VARIABLES[name].read() == VARIABLES[name].default


@pytest.mark.long
def test_ranks_are_compared_as_the_variable_says_and_a_typing_error_is_reported():
    code = "from tritoncp.distributed import consistency; print(consistency.CHECKED)"
    for text, line, warning in (
        ("1", "True", ""),
        ("yes", "True", ""),
        ("ja", "False", "TRITONCP_CHECK='ja'"),
    ):
        env = os.environ | {"TRITONCP_CHECK": text}
        run = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
        assert run.stdout.strip() == line and warning in run.stderr, run.stderr


def test_doctor_shows_the_variables_that_are_set_and_those_that_are_wrong(tmp_path):
    wrong = {"TRITONCP_CPU_COMPILE": "maybe", "TRITONCP_CHEK": "1"}
    run = command("doctor", "--json", TRITONCP_CACHE_DIR=str(tmp_path), WORLD_SIZE="2", **wrong)
    report = json.loads(run.stdout)
    assert report["problems"] == [] and run.returncode == 0
    shown = {"TRITONCP_CACHE_DIR": str(tmp_path), "WORLD_SIZE": "2"} | wrong
    assert shown.items() <= report["environment"].items()
    advice = "\n".join(report["advice"])
    assert "TRITONCP_CPU_COMPILE='maybe' is not understood; accepted: 0 or 1" in advice
    assert "TRITONCP_CHEK is set, and nothing reads it" in advice
