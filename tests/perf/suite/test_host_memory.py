"""Peak memory of a piece of host code."""

import os
import sys

import pytest
import torch

from tritoncp.perf.suite.host_memory import peak_since, start_peak

MIB = 1 << 20


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not os.access("/proc/self/clear_refs", os.W_OK),
    reason="the system does not tell the most memory of a process",
)
def test_the_peak_counts_released_tensors_and_nothing_held_before() -> None:
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    start = start_peak()
    assert peak_since(start) is not None and peak_since(start) < 16 * MIB
    for _ in range(2):  # one after the other: the peak is that of one
        torch.ones(48 * MIB, dtype=torch.uint8)
    assert 40 * MIB <= peak_since(start) < 72 * MIB and held.all()  # the kernel counts in batches of pages


def test_no_peak_is_told_where_the_process_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    assert start_peak() is None and peak_since(None) is None
