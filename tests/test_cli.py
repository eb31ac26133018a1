"""The command line, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tritoncp import __version__, doctor
from tritoncp.cli import main

ROOT = Path(__file__).parents[1]


def tritoncp(*words, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tritoncp", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_module_is_the_command():
    done = tritoncp("--version")
    assert (done.returncode, done.stdout) == (0, f"tritoncp, version {__version__}\n")


def test_help_names_every_command():
    shown = CliRunner().invoke(main, ["--help"]).output
    assert all(name in shown for name in main.commands)


def test_an_unknown_command_is_an_error():
    assert CliRunner().invoke(main, ["nonsense"]).exit_code == 2


def test_doctor_reports_in_json_what_this_process_sees(tmp_path):
    done = tritoncp("doctor", "--json", TRITONCP_CACHE_DIR=str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["problems"] == []
    assert report["versions"]["torch"] == str(torch.__version__)
    assert len(report["devices"]) == torch.cuda.device_count()
    assert report["cache"]["path"] == str(tmp_path / "mods")
    assert "gloo" in report["distributed"]
    assert not (tmp_path / "mods").exists(), "doctor looks and makes nothing"


def test_doctor_shows_a_table_to_people():
    shown = CliRunner().invoke(main, ["doctor"]).output
    assert "CPU tensors run" in shown and str(torch.__version__).split("+")[0] in shown


def test_doctor_fails_on_a_cache_others_may_write(tmp_path):
    (tmp_path / "mods").mkdir()
    (tmp_path / "mods").chmod(0o777)
    done = tritoncp("doctor", TRITONCP_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "others may write" in done.stdout and "set TRITONCP_CACHE_DIR" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"torch": "2.10.1", "triton": "3.6.0", "numpy": "2"}, "torch 2.10.1 is too old: 2.11 or newer"),
        ({"torch": "2.11.0", "triton": "3.5.1", "numpy": "2"}, "triton 3.5.1 is too old: 3.6 or newer"),
        ({"torch": "2.11.0", "triton": "3.10.0", "numpy": None}, "TRITON_INTERPRET=1 needs NumPy"),
    ],
)
def test_doctor_says_what_is_wrong_and_what_to_do(versions, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.problems(versions, True, {"path": "/x", "usable": True, "state": ""})
    assert len(found) == 1 and found[0].startswith(said)


def test_doctor_warns_when_a_gpu_would_be_left_idle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    versions = {"torch": "2.13.0", "triton": "3.7.1", "numpy": "2.0"}
    assert "unset it" in doctor.problems(versions, True, {"path": "/x", "usable": True, "state": ""})[0]
    assert doctor.problems(versions, False, {"path": "/x", "usable": True, "state": ""}) == []


def test_the_benchmark_has_its_own_help_and_errors(tmp_path):
    shown = CliRunner().invoke(main, ["perf", "run", "--help"]).output
    assert "tritoncp perf run" in shown and "--budget" in shown
    done = CliRunner().invoke(
        main, ["perf", "run", "--device", "cpu", "--only", "nothing", "--out", str(tmp_path)]
    )
    assert done.exit_code == 1 and "'nothing'" in done.output
