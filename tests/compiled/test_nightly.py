"""Every kernel of the table of resources, and drawn calls, on compiled code. They take hours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.cases import Case, check
from tests.conftest import COMPILED
from tests.test_fuzz import SAMPLE, cases
from tritoncp.analysis.jobs import Job
from tritoncp.analysis.launches import launch_of
from tritoncp.analysis.resource_table import shipped
from tritoncp.core.environment import cpu_target

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:in natural order"),
]
assert COMPILED
SHIPPED = shipped([COMPILED])


@pytest.mark.parametrize("job", SHIPPED, ids=[job.name for job in SHIPPED])
def test_one_program_of_every_shipped_kernel(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs to its end without a fault; other tests compare results."""
    assert cpu_target() == job.arch
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", torch.zeros)  # inputs are written
        patch.setattr(torch, "empty_like", torch.zeros_like)
        launch = launch_of(job)
    programs = launch.args.get("splits") or 1  # of one tile
    launch._replace(grid=(1, programs, 1))()


@settings(SAMPLE, max_examples=300)
@given(case=cases(longest=120))
def test_drawn_cases(case: Case) -> None:
    check(case)
