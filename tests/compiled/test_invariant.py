"""The kernel option ``invariant`` on compiled code; all cases: ``pytest --compiled sm_90 tests/kernels``."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import test_invariant as laws


@pytest.mark.long
def test_a_row_has_the_same_bits_on_ranks() -> None:
    laws.test_bits_do_not_depend_on_ranks_schedule_and_placement("causal", (4, "ulysses", None))


@pytest.mark.long
def test_a_row_has_the_same_bits_alone_and_packed() -> None:
    laws.test_bits_do_not_depend_on_neighbours(torch.bfloat16, {})
