"""A home and a compiler for the tests of tuning, and a GPU whose times are a formula."""

import pytest
import torch

from tests.tuning.stand_ins import Formula
from tritoncp.analysis.compile_pool import Compilers
from tritoncp.measured_tiles import tile_tables
from tritoncp.tuning import command, search


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Use a folder of measured tiles that does not exist yet."""
    tile_tables.forget()
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", str(tmp_path / "configs"))
    yield tmp_path / "configs"
    tile_tables.forget()


@pytest.fixture
def compile_nothing(monkeypatch):
    """Replace compilers by one that returns a fixed report; return the report."""
    report = {"registers": 100, "spill_bytes": 0, "shared_bytes": 1, "tma": 0}
    monkeypatch.setattr(Compilers, "compile_jobs", lambda self, jobs: ((job, report) for job in jobs))
    return report


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which tiles of 64 rows take half the time of others."""
    bench = Formula(lambda config: 1.0 if config.BLOCK_M == 64 else 2.0, drift=0.0)
    monkeypatch.setattr(command, "find_device", lambda: tile_tables.Device("sm_90", "NVIDIA H200"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(search, "DeviceBench", lambda device: bench)
    return bench
