"""Tests of environment variables: values that are not accepted cause a warning, and the page names all."""

from __future__ import annotations

import re
import warnings

import pytest

from tests.command_process import ROOT, python
from tritoncp.core.environment import OF_OTHERS, VARIABLES


def test_the_page_has_a_row_for_each_variable():
    rows = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/commands.md").read_text(), re.MULTILINE))
    assert {*VARIABLES, *OF_OTHERS} <= rows


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TRITONCP_DEBUG", "", False),
        ("TRITONCP_UNSAFE_FUSED", "True", True),
        ("TRITONCP_AUTOTUNE", "1.5h", 5400.0),
        ("TRITONCP_CONFIG_DIR", "-", "-"),
        ("TRITONCP_CONFIG_DIR", "", None),
    ],
)
def test_accepted_values(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert VARIABLES[name].read() == value
    monkeypatch.delenv(name)
    assert VARIABLES[name].read() == VARIABLES[name].default


@pytest.mark.parametrize(("name", "text"), [("TRITONCP_DEBUG", "2"), ("TRITONCP_AUTOTUNE", "-1m")])
def test_a_value_that_is_not_understood_causes_a_warning_with_the_accepted_ones(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.warns(UserWarning, match=f"{name}='{text}' is not understood; accepted: 0"):
        assert VARIABLES[name].read() == VARIABLES[name].default


@pytest.mark.long
def test_ranks_are_compared_as_the_variable_says_and_a_typing_error_is_reported():
    code = "from tritoncp.distributed import consistency; print(consistency.CHECKED)"
    for text, line, warning in (("yes", "True", ""), ("ja", "False", "TRITONCP_CHECK='ja'")):
        run = python("-c", code, TRITONCP_CHECK=text)
        assert run.stdout.strip() == line and warning in run.stderr, run.stderr
