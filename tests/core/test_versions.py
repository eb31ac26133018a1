"""Tests of the tested versions of torch and Triton: the pins, the warning at the first call, the doctor."""

import importlib.metadata
import json
import re
import tomllib
import warnings

import pytest
import torch

import tritoncp
from tests.command_process import ROOT, invoke
from tests.multiprocess import ranks
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


def warnings_of(call) -> list[warnings.WarningMessage]:
    """The warnings of a call that name a newer version."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [warning for warning in caught if "is newer than" in str(warning.message)]


def test_the_first_call_whose_kernels_run_warns_once_of_a_newer_triton(newer_triton):
    (warning,) = warnings_of(attend)
    tested = re.escape(versions.NEWEST_TESTED["triton"])
    assert re.match(rf"triton 3\.99\.0 is newer than {tested}.*tritoncp check", str(warning.message))
    assert str(warning.filename) == __file__
    assert not warnings_of(attend)


@pytest.mark.usefixtures("newer_triton", "cpu_engine")
def test_calls_without_kernels_do_not_warn_of_triton():
    assert not warnings_of(attend)


@pytest.mark.usefixtures("newer_triton")
def test_only_rank_0_warns():
    assert ranks.run(2, lambda group: len(warnings_of(attend))) == [1, 0]


def test_tested_versions_are_silent(recwarn):
    versions.warn_untested.cache_clear()
    attend()
    assert not [warning for warning in recwarn if "newer than" in str(warning.message)]


def test_doctor_shows_the_tested_versions(newer_triton):
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["newest_tested"] == versions.NEWEST_TESTED
    assert any("triton 3.99.0 is newer than" in line for line in report["advice"])
    assert "tested up to" in invoke("doctor").output


def test_the_versions_are_those_of_the_pins_and_the_requirements():
    pins = [
        dict(re.findall(r"(?m)^(torch|triton)==(\S+)$", (ROOT / f"constraints-{which}.txt").read_text()))
        for which in ("newest", "oldest")
    ]
    assert pins[0] == versions.NEWEST_TESTED
    assert {name: ".".join(map(str, versions.minor_of(pins[1][name]))) for name in pins[1]} == versions.OLDEST
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.findall(r"(torch|triton)>=([\d.]+)", " ".join(lines)))
    assert bounds == versions.OLDEST
    assert not [line for line in lines if "<" in line or "==" in line.split(";")[0]]
