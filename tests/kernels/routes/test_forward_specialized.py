"""ROUTE "specialized": its compiled form, and its obstacles. `tests/compiled/test_calls.py` executes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from tests.kernels.routes.test_forward_gluon import CAUSAL, blocks, tensors
from tests.kernels.support.harness import QKV, engine_of, single
from tritoncp import causal
from tritoncp.analysis import resource_table
from tritoncp.analysis.jobs import step_job
from tritoncp.kernels.engine import RequestedRouteWarning
from tritoncp.kernels.forward import forward_kernel
from tritoncp.kernels.launch import Launch
from tritoncp.kernels.routes import forward_specialized
from tritoncp.planning.step_tables import ForwardStep


@pytest.mark.long
def test_specialized_kernels_compile_as_the_table_says() -> None:
    """Tiles by descriptor, products by tcgen05, and no spill but those that are listed of this Triton."""
    before = resource_table.read_table(triton=triton.__version__)
    jobs = [step_job("specialized", "sm_100", dim) for dim in (64, 128)]
    for row in resource_table.inspect_jobs(jobs, 1, 300):
        assert resource_table.find_regressions(row, before[row["name"]]) == []
        assert row["tma"] > 0 and row["matrix"] == "UTCHMMA"


def why(x: QKV, mask: Any = CAUSAL, arch: str = "sm_100", **options: Any) -> list[str]:
    engine = replace(engine_of(x), options=options, arch=arch)
    tables = single(mask).tables("cpu", *x.q.shape[:2])
    return list(forward_specialized.obstacles(engine, ForwardStep(*x, tables, x.q, x.q)))


OBSTACLES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "architecture": ("for sm_100, and this is sm_90", lambda: why(tensors(512), arch="sm_90")),
    "interpreter": ("for sm_100, and this is interpreter", lambda: why(tensors(512), arch="interpreter")),
    "dtype": ("q is torch.float32", lambda: why(QKV(*(t.float() for t in tensors(512))))),
    "head dims": ("head dims of 64 and 128, and has 64, 80", lambda: why(tensors(512, v_dim=80))),
    "warps": ("it takes BLOCK_M=128, num_warps=4", lambda: why(tensors(512), num_warps=8)),
    "no descriptors": ("which USE_TMA=False forbids", lambda: why(tensors(512), USE_TMA=False)),
    "mask_mod": (
        "no registers left for a mask_mod",
        lambda: why(tensors(512), blocks(lambda b, h, q, kv: (q * kv) % 3 == 1, 512)),
    ),
    "key blocks": (
        "tiles of 64 or 128 keys that divide blocks of 96",
        lambda: why(tensors(512), blocks(causal(), 512, BLOCK_SIZE=(128, 96))),
    ),
    "strides": (
        "rule out tensor descriptors",
        lambda: why(tensors(512)._replace(q=torch.randn(1, 2, 512, 65, dtype=torch.bfloat16)[..., 1:])),
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacles_to_specialized_warps_are_named(name: str) -> None:
    said, obstacles = OBSTACLES[name]
    (line,) = obstacles()
    assert said in line


@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_dims_of_specialized_warps_have_no_obstacle(dim: int, v_dim: int) -> None:
    assert why(tensors(512, dim=dim, v_dim=v_dim)) == []


@pytest.mark.interpreted  # it names another architecture than the device has
def test_the_route_is_the_usual_kernel_with_another_loop() -> None:
    """Elsewhere the loops run, with a warning."""
    x = tensors(256)
    step = ForwardStep(
        *x,
        single(blocks(causal(), 256)).tables("cpu", 1, 2),
        torch.empty(1, 2, 256, 64),
        torch.empty(1, 2, 256),
    )
    engine = replace(engine_of(x), options={"ROUTE": "specialized"}, arch="sm_100")
    launch = engine.forward(step)
    assert isinstance(launch, Launch) and launch.kernel is forward_kernel
    assert dict(zip(forward_kernel.arg_names, launch.values))["SPECIALIZE"] is True
    with pytest.warns(RequestedRouteWarning, match="this step goes by 'loops': Triton specializes"):
        launch = replace(engine, arch="sm_90", launches={}).forward(step)
    assert isinstance(launch, Launch)
    assert dict(zip(forward_kernel.arg_names, launch.values))["SPECIALIZE"] is False
