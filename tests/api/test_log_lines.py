"""Tests of the log lines under `tritoncp.*`: decisions at INFO once, look-ups at DEBUG, ranks in front."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
import torch

import tritoncp
from tests.command_process import python
from tests.measured_tiles.measured_tiles import CPU, USER, places, put
from tests.multiprocess import ranks
from tritoncp.core import log_lines
from tritoncp.kernels import options
from tritoncp.measured_tiles import tile_tables

__all__ = ["places"]  # a fixture


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget logged decisions and cached plans, so that those of the test are new."""
    log_lines._LOGGED._entries.clear()
    tritoncp.plan_cache_clear()
    yield
    log_lines._LOGGED._entries.clear()


def lines(caplog, area: str, level: int = logging.INFO) -> list[str]:
    """List the messages of an area at this very level."""
    name = f"tritoncp.{area}"
    return [
        record.getMessage() for record in caplog.records if (record.name, record.levelno) == (name, level)
    ]


def attend(rows: int = 64, **settings: object) -> torch.Tensor:
    q = torch.randn(1, 2, rows, 16)
    return tritoncp.flex_attention(q, q, q, None, tritoncp.causal(), kernel_options=settings or None)


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
@pytest.mark.usefixtures("cpu_engine")
def test_a_plan_is_logged_once_and_every_look_up_at_debug(caplog, level):
    with caplog.at_level(level, "tritoncp"):
        for _ in range(3):
            attend()
    (plan,) = lines(caplog, "plan")
    for part in ("mask causal()", "64 queries × 64 keys", "1 rank", "order natural", "max/mean 1.000"):
        assert part in plan
    assert lines(caplog, "cache") == ["plan cache: miss, mask causal()"]
    assert lines(caplog, "cache", logging.DEBUG) == ["plan cache: hit, mask causal()"] * (
        2 if level == logging.DEBUG else 0
    )


def test_engine_route_and_tiles_are_logged_with_their_reasons(caplog, places):
    options._choose.cache_clear()  # a choice is logged when it is made
    with caplog.at_level(logging.DEBUG, "tritoncp"):
        attend(40)
        put(places / USER, 16, CPU)
        tile_tables.forget()
        attend(40)
        attend(40)
        attend(40, BLOCK_M=32, fwd_num_warps=2)
    (engine,) = lines(caplog, "engine")
    assert "Triton kernels, interpreted, run float32" in engine and engine.endswith("route loops (default)")
    files = [line for line in lines(caplog, "tiles") if line.startswith("measured tiles of cpu")]
    assert files[0].endswith("no file, the rule chooses them") and str(places / USER) in files[1]
    kernels = [line for line in lines(caplog, "tiles") if line.startswith("forward kernel on interpreter")]
    assert [line.rpartition(" (")[2] for line in kernels] == [
        "rule)",
        "measured)",
        "kernel_options over measured)",
    ]
    assert "BLOCK_M=16" in kernels[1] and "BLOCK_M=32" in kernels[2]
    assert "engines of the plan: hit" in lines(caplog, "cache", logging.DEBUG)
    assert "engines of the plan: miss; the first of this pass" in lines(caplog, "cache", logging.DEBUG)


def test_a_new_engine_names_the_fact_by_which_its_call_differs(caplog, places):
    plan = tritoncp.make_plan(tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 40, 40))
    q = torch.randn(1, 2, 40, 16)
    with caplog.at_level(logging.DEBUG, "tritoncp.cache"):
        for scale, heads in ((0.25, 2), (0.5, 2), (0.5, 2), (0.5, 1)):
            tritoncp.flex_attention(*[q[:, :heads]] * 3, plan, scale=scale)
    first, second, third, fourth = lines(caplog, "cache", logging.DEBUG)
    results = "miss; the first of this pass", "hit"
    assert [first, third] == [f"engines of the plan: {result}" for result in results]
    assert second == "engines of the plan: miss; scale was 0.25 and is 0.5"
    assert fourth.startswith("engines of the plan: miss; heads was (2, 2) and is (1, 1); layouts was ")


@pytest.mark.usefixtures("cpu_engine")
def test_each_line_says_its_rank_if_there_are_several(caplog):
    def call(group):
        with caplog.at_level(logging.DEBUG, "tritoncp"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                q = torch.randn(1, 2, 64, 16)
                tritoncp.flex_attention(q, q, q, None, tritoncp.causal(), mesh=group)
        records = (one for one in caplog.records if one.name.startswith("tritoncp"))
        return [(one.name, one.getMessage()) for one in records]

    for rank, records in enumerate(ranks.run(2, call)):
        assert {"tritoncp.plan", "tritoncp.cache", "tritoncp.engine"} <= {name for name, _ in records}
        assert all(message.startswith(f"rank {rank} of 2: ") for _, message in records), records
        assert any(f"2 ranks, this is {rank}" in message for _, message in records)


PROGRAM = """
import torch, tritoncp
mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 64, 64)
q = torch.randn(1, 2, 64, 16)
call = torch.compile(tritoncp.flex_attention, fullgraph=True, backend="eager")
for _ in range(2):
    call(q, q, q, None, mask)
"""


@pytest.mark.long
def test_torch_logs_shows_the_lines_which_break_no_graph():
    run = python("-c", PROGRAM, TORCH_LOGS="+tritoncp", TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("mask causal(), 64 queries × 64 keys") == 1
    assert "run on the CPU engine, in plain torch" in run.stderr
    assert "plan cache: hit, mask causal()" in run.stderr
