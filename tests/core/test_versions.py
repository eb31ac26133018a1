"""Tests of the tested versions of torch and Triton: the pins, the warning at the first call, the doctor."""

import importlib.metadata
import json
import re
import tomllib
import warnings

import pytest
import torch
from click.testing import CliRunner

import tritoncp
from tests.command_process import ROOT
from tritoncp.cli import main
from tritoncp.core import versions


@pytest.fixture
def newer_triton(monkeypatch):
    """Simulate that a Triton is installed that is newer than the tests."""
    installed = importlib.metadata.version

    def version(package: str) -> str:
        return "3.99.0" if package == "triton" else installed(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    versions.warn_untested.cache_clear()
    yield
    versions.warn_untested.cache_clear()


def attend() -> None:
    x = torch.randn(1, 1, 128, 16)
    tritoncp.flex_attention(x, x, x, tritoncp.causal())


def test_the_first_call_warns_once_of_a_newer_version(newer_triton):
    with pytest.warns(UserWarning, match=r"triton 3\.99\.0 is newer than 3\.7\.1.*tritoncp check") as caught:
        attend()
    assert [str(warning.filename) for warning in caught if "3.99" in str(warning.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend()


def test_tested_versions_are_silent(recwarn):
    versions.warn_untested.cache_clear()
    attend()
    assert not [warning for warning in recwarn if "newer than" in str(warning.message)]


def test_doctor_shows_the_tested_versions(newer_triton):
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert report["newest_tested"] == versions.NEWEST_TESTED
    assert any("triton 3.99.0 is newer than 3.7.1" in line for line in report["advice"])
    assert "tested up to" in CliRunner().invoke(main, ["doctor"]).output


def test_the_versions_are_those_of_the_pins_and_the_requirements():
    pins = dict(re.findall(r"(?m)^(torch|triton)==(\S+)$", (ROOT / "constraints.txt").read_text()))
    assert pins == versions.NEWEST_TESTED
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.findall(r"(torch|triton)>=([\d.]+)", " ".join(lines)))
    assert bounds == versions.OLDEST
    assert not [line for line in lines if "<" in line or "==" in line.split(";")[0]]
