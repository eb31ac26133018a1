"""Tests of `tritoncp doctor`: the facts, problems and advice that it reports."""

import json
from pathlib import Path

import pytest
import torch

from tests.command_process import invoke, tritoncp
from tritoncp import doctor
from tritoncp.kernels.toolchain import PTXAS_PATHS, ptxas_for


@pytest.mark.long
def test_doctor_reports_this_process_and_its_variables_with_those_that_are_wrong(tmp_path):
    wrong = {"TRITONCP_DEBUG": "maybe", "TRITONCP_CHEK": "1"}
    done = tritoncp("doctor", "--json", TRITONCP_CONFIG_DIR=str(tmp_path), WORLD_SIZE="2", **wrong)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["problems"] == []
    assert report["versions"]["torch"] == str(torch.__version__)
    assert len(report["devices"]) == torch.cuda.device_count()
    assert "gloo" in report["distributed"]
    environment = {"TRITONCP_CONFIG_DIR": str(tmp_path), "WORLD_SIZE": "2"} | wrong
    assert environment.items() <= report["environment"].items()
    advice = "\n".join(report["advice"])
    assert "TRITONCP_DEBUG='maybe' is not understood; accepted: 0 or 1" in advice
    assert "TRITONCP_CHEK is set, but is unknown" in advice


def hopper(monkeypatch, gpus, ptxas: str = "", version: str = "12.8.93") -> str:
    """Simulate Hopper GPUs, without NCCL, and a ptxas of this version in the place of the one that Triton
    uses for Hopper. Returns the variable that names it, which depends on Triton."""
    monkeypatch.setattr(doctor, "nccl_version", lambda: None)
    gpus("sm_90")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in PTXAS_PATHS:
        monkeypatch.delenv(name, raising=False)
    variable = ptxas_for("sm_90").variable
    if ptxas:
        monkeypatch.setenv(variable, ptxas)
        Path(ptxas).write_text(f"#!/bin/sh\necho 'release {version[:4]}, V{version}'\n")
        Path(ptxas).chmod(0o755)
    return variable


def test_doctor_names_ptxas_and_a_remedy_for_a_faulty_one(monkeypatch, gpus, tmp_path):
    variable = hopper(monkeypatch, gpus, path := str(tmp_path / "ptxas"))
    done = invoke("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report["problems"] == [], "advice is no failure"
    assert report["ptxas"] == {"sm_90": {"version": "12.8.93", "path": path, "origin": variable}}
    (line,) = report["advice"]
    for part in ("ptxas 12.8.93", "sm_90", "nvidia-cuda-nvcc>=13.3", f"set {variable}", "#1262"):
        assert part in line
    output = "".join(invoke("doctor").output.split())
    assert path in output and "advice" in output and "".join(line.split()) in output


@pytest.mark.parametrize(
    ("gpus", "version", "settings", "advice"),
    [
        (1, (2, 27, 3), {}, []),
        (8, None, {}, []),
        (8, (2, 27, 3), {}, ["high-priority", "deadlock: set NCCL_LAUNCH_ORDER_IMPLICIT=1"]),
        (8, (2, 21, 5), {"TORCH_NCCL_HIGH_PRIORITY": "1"}, ["NCCL 2.26 is needed, this is 2.21.5: then set"]),
        (2, (2, 27, 3), {"TORCH_NCCL_HIGH_PRIORITY": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, []),
    ],
)
def test_doctor_advises_a_high_priority_stream(monkeypatch, gpus, version, settings, advice):
    monkeypatch.setattr(doctor, "nccl_version", lambda: version)
    for name in ("TORCH_NCCL_HIGH_PRIORITY", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    lines = list(doctor.nccl_advice(gpus))
    assert len(lines) == len(advice) and all(words in line for words, line in zip(advice, lines))


def test_doctor_has_no_advice_about_a_good_ptxas_or_without_a_gpu(monkeypatch, gpus, tmp_path):
    hopper(monkeypatch, gpus, str(tmp_path / "ptxas"), "13.3.33")
    assert doctor.examine()["advice"] == []


@pytest.mark.usefixtures("no_gpu")
def test_doctor_names_the_ptxas_of_usual_gpus_where_there_is_none():
    report = doctor.examine()
    assert report["advice"] == [] and list(report["ptxas"]) == ["sm_90", "sm_100"]


def test_doctor_reports_a_path_without_a_ptxas(monkeypatch, gpus, tmp_path):
    variable = hopper(monkeypatch, gpus)
    monkeypatch.setenv(variable, missing := str(tmp_path / "gone"))
    report = doctor.examine()
    assert report["ptxas"]["sm_90"]["origin"] == "bundled with Triton"
    assert f"{variable}={missing}: this ptxas does not run" in report["advice"][0]
    gpus("gfx942")
    assert "not for gfx942" in doctor.examine()["ptxas"]["gfx942"]["why"]


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"torch": "2.10.1", "triton": "3.6.0", "numpy": "2"}, "torch 2.10.1 is too old: 2.11 or newer"),
        ({"torch": "2.11.0", "triton": "3.5.1", "numpy": "2"}, "triton 3.5.1 is too old: 3.6 or newer"),
        ({"torch": "2.11.0", "triton": "3.10.0", "numpy": None}, "interpreted kernels need NumPy"),
        ({"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.4.0"}, "triton 3.6.0 cannot be interpreted with"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_doctor_names_problems_and_remedies(versions, said):
    lines = doctor.problems(versions, True)
    assert len(lines) == 1 and lines[0].startswith(said)


def test_doctor_shows_any_value_of_a_variable_whole(monkeypatch):
    """Also one with markup, without an encoding, and longer than a line of a pipe."""
    monkeypatch.setenv("TRITON_ODD", f"[/bold]\udcff/{'a' * 300}/ptxas")
    done = invoke("doctor", charset="ascii")
    assert done.exit_code == 0 and f"TRITON_ODD=[/bold]\\udcff/{'a' * 300}/ptxas" in done.stdout
