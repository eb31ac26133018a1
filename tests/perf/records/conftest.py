"""The folders of an import: results of `make gpu`, a history, shipped tile shapes."""

import pytest

from tests.perf.records.tuned_tiles import H200, tune
from tritoncp.perf.records.history import Journal, Series


@pytest.fixture
def places(tmp_path):
    """A results folder of make gpu, a history, and a folder of shipped tile shapes."""
    gpu = tmp_path / "gpu"
    journal = Journal(gpu / "2026-01-01-nvidia-h200.jsonl", "r", Series(H200.name), {"torch": "2.11"})
    gpu.mkdir()
    for case in ("causal-16k-fwd", "causal-16k-bwd"):
        journal.point(case, {"tritoncp": {"ms": 1.5}, "flex": {"ms": 2.0}})
    journal.write({"kind": "left out", "case": "full-16k-fwd", "why": "the time budget is used up"})
    tune(gpu)
    return gpu, tmp_path / "history", tmp_path / "configs"
