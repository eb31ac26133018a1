"""ROUTE "gluon": its compiled form, and its obstacles.  Gluon has no interpreter."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

import tritoncp
from tests.kernels.support.harness import QKV, engine_of, qkv, single
from tritoncp import Mask, causal, create_block_mask
from tritoncp.analysis import resource_table
from tritoncp.analysis.jobs import step_job
from tritoncp.kernels.launch import Launch
from tritoncp.kernels.operands import Mods
from tritoncp.kernels.routes import forward_gluon
from tritoncp.kernels.scores import Closure
from tritoncp.planning.step_tables import ForwardStep

BF16 = torch.bfloat16


def blocks(mod: Callable[..., Tensor], n: int, **options: Any) -> Mask:
    return create_block_mask(mod, None, None, n, n, **options)


def tensors(n: int, batch: int = 1, dim: int = 64, v_dim: int = 64) -> QKV:
    heads = 2 * batch
    return qkv(n, batch=batch, heads=heads, kv_heads=heads // 2, dim=dim, v_dim=v_dim, dtype=BF16)


# -- compiled -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_gluon_kernels_compile_as_the_table_says() -> None:
    """Tiles by descriptor, products by wgmma, and no spill but those that the table lists of this Triton."""
    before = resource_table.read_table(triton=triton.__version__)
    jobs = [step_job("gluon", "sm_90", 64), step_job("gluon", "sm_90", 128)]
    for row in resource_table.inspect_jobs(jobs, 1, 300):
        assert resource_table.find_regressions(row, before[row["name"]]) == []
        assert row["tma"] > 0 and row["matrix"] == "HGMMA"


# -- where it cannot be had -----------------------------------------------------------------------------


def why(
    x: QKV, mask: Mask, arch: str = "sm_90", scale: float = 1.0, score: bool = False, **options: Any
) -> list[str]:
    engine = replace(engine_of(x), options=options, arch=arch, scale=scale)
    engine = replace(engine, mods=Mods(score=Closure(object()))) if score else engine
    tables = single(mask).tables("cpu", *x.q.shape[:2])
    return list(forward_gluon.obstacles(engine, ForwardStep(*x, tables, x.q, x.q)))


CAUSAL = blocks(causal(), 512)
OBSTACLES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "architecture": ("those of sm_90, and this is sm_100", lambda: why(tensors(512), CAUSAL, "sm_100")),
    "dtype": ("q is torch.float32", lambda: why(QKV(*(t.float() for t in tensors(512))), CAUSAL)),
    "head dims": ("head dims of 64 and 128, and has 64, 80", lambda: why(tensors(512, v_dim=80), CAUSAL)),
    "warps": ("it takes BLOCK_M=128, num_warps=4", lambda: why(tensors(512), CAUSAL, num_warps=8)),
    "stages": ("num_stages of 2 or more", lambda: why(tensors(512), CAUSAL, num_stages=1)),
    "query blocks": (
        "it takes BLOCK_M=128",
        lambda: why(tensors(512), blocks(causal(), 512, BLOCK_SIZE=(64, 128))),
    ),
    "key blocks": (
        "tiles of 64 or 128 keys that divide blocks of 96",
        lambda: why(tensors(512), blocks(causal(), 512, BLOCK_SIZE=(128, 96))),
    ),
    "mods": (
        "it runs no score_mod or mask_mod",
        lambda: why(tensors(512), blocks(lambda b, h, q, kv: (q * kv) % 3 == 1, 512)),
    ),
    "score_mod": ("it runs no score_mod or mask_mod", lambda: why(tensors(512), CAUSAL, score=True)),
    "scale": ("and 0.0 is not positive", lambda: why(tensors(512), CAUSAL, scale=0.0)),
    "small tiles": ("takes tiles of 64 or 128 keys", lambda: why(tensors(512), CAUSAL, BLOCK_N=32)),
    "large tiles": (
        "takes tiles of 64 or 128 keys",
        lambda: why(tensors(512), blocks(causal(), 512, BLOCK_SIZE=256), BLOCK_N=256),
    ),
    "strides": (
        "rule out tensor descriptors",
        lambda: why(tensors(512)._replace(q=torch.randn(1, 2, 512, 65, dtype=BF16)[..., 1:]), CAUSAL),
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacles_to_gluon_are_named(name: str) -> None:
    said, obstacles = OBSTACLES[name]
    (line,) = obstacles()
    assert said in line


@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("keys", [64, 128])
def test_dims_and_tiles_of_gluon_have_no_obstacle(dim: int, v_dim: int, keys: int) -> None:
    options = {"BLOCK_N": keys, "num_stages": 2}
    assert why(tensors(512, dim=dim, v_dim=v_dim), CAUSAL, **options) == []


@pytest.mark.interpreted  # it names another architecture than the device has
def test_a_step_that_gluon_cannot_compute_uses_loops_and_warns() -> None:
    x = tensors(256, v_dim=80)
    engine = replace(engine_of(x), options={"ROUTE": "gluon"}, arch="sm_90")
    out, lse = torch.empty(1, 2, 256, 80), torch.empty(1, 2, 256)
    tables = single(blocks(causal(), 256)).tables("cpu", 1, 2)
    with pytest.warns(
        UserWarning, match="ROUTE='gluon' is requested; this step goes by 'loops': it takes head"
    ):
        launch = engine.forward(ForwardStep(*x, tables, out, lse))
    assert isinstance(launch, Launch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = tensors(256)
        launch = replace(engine).forward(ForwardStep(*x, tables, torch.empty(1, 2, 256, 64), lse))
    assert isinstance(launch, Launch) and launch.kernel is forward_gluon.gluon_forward_kernel


@pytest.mark.interpreted
def test_gluon_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="cannot be interpreted"):
        tritoncp.flex_attention(*qkv(), kernel_options={"ROUTE": "gluon"})
