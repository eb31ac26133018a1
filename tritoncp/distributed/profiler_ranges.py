"""Named ranges of the steps and messages of a schedule in traces of torch.profiler and of NVTX.

A range is a ``torch.profiler.record_function``, which ``torch.autograd.profiler.emit_nvtx`` turns into an
NVTX range. Without an active profiler, a range costs one check of the profiler's state.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tritoncp.planning.plan import Plan

_NO_RANGE = nullcontext()
is_profiled = torch.autograd._profiler_enabled  # by torch.profiler, torch.autograd.profiler or emit_nvtx


def step_range(plan: Plan, step: int, part: str = "") -> AbstractContextManager[Any]:
    """Name the computation of one step: ``tritoncp::ring/step 3``, or ``tritoncp::ring/backward step 3 dq``
    for the part "dq" of a backward pass. The schedule is "local" if it sends no message."""
    if not is_profiled():
        return _NO_RANGE
    is_local = plan.is_local and not plan.schedule.startswith("ulysses")  # which exchanges heads
    schedule = "local" if is_local else plan.schedule
    name = f"backward step {step} {part}" if part else f"step {step}"
    return torch.profiler.record_function(f"tritoncp::{schedule}/{name}")


def message_range(schedule: str, direction: str, action: str, message: object) -> AbstractContextManager[Any]:
    """Name the start of a message or the wait for it: ``tritoncp::ring/wait AllToAll``, or
    ``tritoncp::ring/backward wait AllToAll`` with the direction "backward "."""
    if not is_profiled():
        return _NO_RANGE
    return torch.profiler.record_function(
        f"tritoncp::{schedule}/{direction}{action} {type(message).__name__}"
    )
