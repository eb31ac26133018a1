"""Fixtures of the benchmarks."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_core() -> Iterator[None]:
    """Torch on a single thread, so that figures of different machines mean the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
