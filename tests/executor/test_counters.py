"""Counts of accesses whose cost is known: wavefronts of shared memory, sectors of global memory."""

from collections import Counter

import numpy as np
import pytest

from tests.executor.support.ptx import module
from tritoncp.executor.counters import LaunchCounts
from tritoncp.executor.launch import GridExecution, Settings
from tritoncp.executor.memory.global_memory import Extent
from tritoncp.executor.program import write_program

START = "ld.param.b64 %d1, [p0]; mov.u32 %r1, %tid.x;\n"


def counted(body: str, shared: int = 0, threads: int = 32) -> LaunchCounts:
    memory = np.zeros(1 << 14, "u1")
    start = -(-memory.ctypes.data // 128) * 128
    extent = Extent(start, start + (1 << 13), "x")
    program = write_program(module(START + body + "ret;", 1, shared, threads))
    launch = GridExecution(program, (1, 1, 1), threads, 0, [extent], Settings(count=True))
    launch.run([launch.memory.tag(start)])
    assert launch.counts is not None
    return launch.counts


def traffic(counts: LaunchCounts, space: str) -> Counter[str]:
    """The sums of the only instruction that accesses a space."""
    (sums,) = [x for (where, _), x in counts.memory.items() if where == space]
    return sums


@pytest.mark.parametrize(
    ("address", "load", "wavefronts", "least"),
    [
        ("4 * %r1", "b32", 1, 1),
        ("8 * %r1", "b32", 2, 1),  # every second bank
        ("128 * %r1", "b32", 32, 1),  # one bank
        ("132 * %r1", "b32", 1, 1),
        ("0 * %r1", "b32", 1, 1),  # one word for all
        ("16 * %r1", "v4.b32", 4, 4),
        ("128 * %r1", "v4.b32", 32, 4),
        ("8 * %r1", "v2.b32", 2, 2),
        ("2 * %r1", "b16", 1, 1),
    ],
)
def test_bank_conflicts(address: str, load: str, wavefronts: int, least: int) -> None:
    register = {"b32": "%r5", "b16": "%h1", "v4.b32": "{%r5, %r6, %r7, %r8}", "v2.b32": "{%r5, %r6}"}[load]
    step = address.split(" ")[0]
    body = f"mul.lo.u32 %r2, %r1, {step}; st.shared.{load} [%r2], {register};\n"
    access = traffic(counted(body, shared=8192), "shared")
    assert (access["requests"], access["units"], access["least"]) == (1, wavefronts, least)


@pytest.mark.parametrize(
    ("step", "offset", "load", "sectors", "least"),
    [
        (4, 0, "b32", 4, 4),
        (4, 4, "b32", 5, 4),  # off by one word
        (128, 0, "b32", 32, 4),
        (16, 0, "v4.b32", 16, 16),
        (0, 0, "b32", 1, 1),
    ],
)
def test_coalescing(step: int, offset: int, load: str, sectors: int, least: int) -> None:
    register = "%r5" if load == "b32" else "{%r5, %r6, %r7, %r8}"
    body = f"mad.wide.u32 %d2, %r1, {step}, %d1; ld.global.{load} {register}, [%d2+{offset}];\n"
    counts = counted(body)
    access = traffic(counts, "global")
    assert (access["requests"], access["units"], access["least"]) == (1, sectors, least)
    assert counts.totals()["distinct sectors read"] == sectors


def test_instructions_of_the_warps_that_execute_them() -> None:
    """Two warps of four do not branch, one of them with half of its lanes."""
    body = """
    setp.ge.u32 %p1, %r1, 48; @%p1 bra END;
    ex2.approx.ftz.f32 %f1, %f2; mul.f32 %f3, %f1, %f1;
    END: add.u32 %r3, %r1, 1;
    """
    counts = counted(body, threads=128)
    kinds = counts.kinds()
    assert (kinds["mufu"], kinds["ex2"], kinds["fp32"], kinds["int"], kinds["predicate"]) == (2, 2, 2, 4, 4)
    totals = counts.totals()
    assert totals["slots"] - totals["active"] == 2 * 16  # lanes of a warp that sit out two instructions
