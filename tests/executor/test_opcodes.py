"""The table of instructions is strict: no opcode, modifier or operand is skipped."""

import numpy as np
import pytest

from tests.executor.support.ptx import module, run_instruction
from tritoncp.executor.program import write_program
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form_of


@pytest.mark.parametrize(
    "opcode",
    [
        "fma.rn.f32.f16.bf16",
        "fma.rz.f32",
        "add.rp.f32",
        "add.f32.ftz",
        "mul.relu.f32",
        "min.relu.f32",
        "cvt.bf16.f32",
        "cvt.rn.satfinite.bf16x2.f32",
        "ld.global.v3.b32",
        "ld.shared::cluster.b32",
        "shfl.down.b32",
        "mma.sync.aligned.m16n8k16.col.row.f32.bf16.bf16.f32",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
        "cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes",
        "tcgen05.mma.cta_group::2.kind::f16",
        "tcgen05.mma.cta_group::1.kind::mxf4",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
        "barrier.cluster.arrive",
        "mbarrier.arrive.relaxed.cta.shared::cta.b64",
        "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64",
        "vadd.s32.s32.s32",
    ],
)
def test_opcodes_that_are_not_in_the_table_raise(opcode: str) -> None:
    with pytest.raises(UnsupportedInstruction, match="has no"):
        form_of(opcode)


@pytest.mark.parametrize(
    "line",
    [
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, 15;",
        "mov.u32 %r1, %clusterid.x;",
        "cp.async.cg.shared.global [%d1], [%d2], 4;",
        "mov.b32 %r1, unknown_name;",
        "setmaxnreg.dec.sync.aligned.u32 25;",
    ],
)
def test_operands_are_strict(line: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        write_program(module(line + " ret;", 1))


def test_mixed_types_keep_the_width_of_the_result() -> None:
    """`fma.rn.f32.bf16` rounds to float32: the sum below has more bits than bfloat16."""
    one = np.array([0x3F80], "u2")
    got = run_instruction(
        "fma.rn.f32.bf16 {d}, {a}, {b}, {c};", "u4", one, one, np.array([2**-20], "f4").view("u4")
    )
    assert got.view("f4")[0] == np.float32(1 + 2**-20)
