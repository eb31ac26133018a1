"""A GPU for the tests of tuning, whose times are a formula."""

import pytest

from tests.tuning.stand_ins import tile_times
from tritoncp.ops import tile_tables
from tritoncp.tuning import command, search_run


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose times are a formula."""
    bench = tile_times()
    monkeypatch.setattr(command, "find_device", lambda: tile_tables.Device("sm_90", "NVIDIA H200"))
    monkeypatch.setattr(search_run, "_device_bench", lambda: bench)
    return bench
