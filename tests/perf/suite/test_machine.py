"""Facts about the machine, from stand-ins for NVIDIA's tools, and without these tools."""

import subprocess

import pytest
import torch

from tritoncp.perf.suite import machine

GPU = torch.device("cuda")


@pytest.fixture
def tools(monkeypatch, gpus):
    """Return the answers of a stand-in for nvidia-smi, by field; queries have to name the GPU by its UUID."""
    answers = {
        "power.limit": "700.00 W",
        "driver_version": "560.2",
        "clocks.applications.graphics": "1980 MHz",
    }
    answers["clocks.default_applications.graphics"] = "1980 MHz"

    def run_command(*command):
        assert command[:2] == ("nvidia-smi", "--id=GPU-1234")
        fields = command[2].removeprefix("--query-gpu=").split(",")
        return ", ".join(answers[field] for field in fields)

    monkeypatch.setattr(machine, "_run_command", run_command)
    gpus("sm_90")
    return answers


def test_a_series_is_the_device_its_power_limit_and_its_clocks(tools):
    assert str(machine.series(GPU)) == "NVIDIA H200, 700.00 W, clocks default"
    tools["clocks.applications.graphics"] = "1500 MHz"
    assert machine.series(GPU).clocks == "1500 MHz"
    assert machine.series(GPU, "locked 1200 MHz").clocks == "locked 1200 MHz"


def test_a_commit_with_changed_python_files_is_marked(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    assert machine.commit(tmp_path / "nowhere") is None
    git("init")
    (tmp_path / "a.py").write_text("1\n")
    (tmp_path / "history.jsonl").write_text("")
    git("add", ".")
    git("commit", "-m", "first")
    clean = machine.commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "history.jsonl").write_text("{}\n")
    assert machine.commit(tmp_path) == clean, "its own lines change nothing"
    (tmp_path / "a.py").write_text("2\n")
    assert machine.commit(tmp_path) == clean + "+"
