"""The reading of machine code: instructions, loops and products of text listings, and the bound of a loop."""

import re

from tritoncp.analysis import disassembly
from tritoncp.analysis.disassembly import Instruction, gcn, innermost, products, ptx, sass
from tritoncp.analysis.throughput_bound import MACHINES, bound, cycles


def listing(*lines: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines))


def test_a_wait_at_the_far_end_is_no_loop() -> None:
    """Spins that ptxas puts behind the code jump back into the middle of the loop that they belong to."""
    code = sass(
        listing(
            "MOV R0, R1",
            "HMMA.16816.F32.BF16 R4, R8, R12, R4",  # 0x10: the loop
            "@!P0 BRA 0x70",
            "FADD R1, R2, R3",
            "@P1 BRA 0x10",
            "EXIT",
            "NOP",
            "@P0 BRA 0x30",  # 0x70
            "BRA 0x70",
        )
    )
    (body,) = innermost(code)
    assert [x.op for x in body if x.op != "BRA"] == ["HMMA.16816.F32.BF16", "FADD"] and len(body) == 6


def test_loops_behind_a_table_of_jumps() -> None:
    """Specialised warps wait in a loop for their task; each part of the work ends with a jump back."""
    code = sass(
        listing(
            "LDC R2, c[0x2][R3]",  # 0x00: wait
            "BRX R2 -0x20",
            "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR6]",  # 0x20: one part
            "@P0 BRA 0x20",
            "BRA 0x00",
            "@P1 BRA 0x70",  # 0x50: another, which may skip
            "FSEL R4, R4, R5",
            "MUFU.EX2 R4, R4",
            "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80",
            "@P0 BRA 0x50",
            "BRA 0x00",
            "EXIT",
        )
    )
    (one,), (other,) = innermost(code), innermost(code, "mufu")
    assert [x.op for x in one] == ["UTCHMMA", "BRA"] and innermost(code, "tensor", "mufu") == [one, other]
    assert [x.op for x in other] == ["BRA", "FSEL", "MUFU.EX2", "BAR.SYNC.DEFER_BLOCKING", "BRA"]
    assert disassembly.shortest(code, other) == [other[0], *other[2:]]
    assert (disassembly.barrier_warps(one), disassembly.barrier_warps(other)) == (1, 4)


def test_the_outer_loop_and_code_behind_an_exit_are_left_out() -> None:
    code = sass(
        listing(
            "MOV R0, R1",
            "IADD3 R0, R0, 1, RZ",  # 0x10: outer
            "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24",  # 0x20: inner
            "@P0 BRA 0x20",
            "@!P1 CALL.REL.NOINC 0x60",  # ptxas's long jump
            "BRA 0x10",
            "EXIT",
            "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24",
            "BRA 0x70",
        )
    )
    assert [len(body) for body in disassembly.loops(code)] == [2, 5]
    assert [len(body) for body in innermost(code)] == [2]


def test_loops_of_labelled_text_may_lie_in_any_order() -> None:
    """The header behind its latch, as LLVM likes to place them."""
    text = """
    bra.uni $L__BB0_3;
$L__BB0_2:
    add.s32 %r1, %r1, 1;
    @%p1 bra $L__BB0_3;
    ret;
$L__BB0_3:                              // header
    mov.b32 %r9, 136381584;
    @%p2 tcgen05.mma.cta_group::1.kind::f16 [ %r5 + 0 ], [ %r4 + 0 ], %rd2, %r9, %p3;
    bra.uni $L__BB0_2;
"""
    (body,) = innermost(ptx(text))
    assert len(body) == 5
    assert products(body) == [disassembly.Product(128, 128, 16, 0, 4096)]


def test_amd_loops() -> None:
    text = "\n".join(
        ["\ts_mov_b32 s0, 0", ".LBB0_1:  ; %loop", "\tv_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], 0",
         "\tv_exp_f32_e32 v1, v1 ; comment", "\ts_cbranch_scc1 .LBB0_1", "\ts_endpgm"]
    )  # fmt: skip
    (body,) = innermost(gcn(text))
    assert disassembly.mix(body) == {"tensor": 1, "mufu": 1, "other": 1}
    spent = cycles(body, products(body), 8, MACHINES["gfx942"])
    assert spent == (
        64.0,
        32.0,
        0.0,
        0.0,
        0.0,
    )  # 2 waves a scheduler: 2 x 32 cycles of products, 2 x 16 of exp


def test_the_model_gives_the_published_cycles_of_a_hopper_tile() -> None:
    """128 x 128 tiles of 128 channels on 8 warps: 16 wgmma of 64 x 128 x 16 in each of two warpgroups are
    2048 cycles, as 4 * 128 * 128 * 128 FLOPs at 4096 a cycle are; 64 exponentials a thread at 16 a cycle of
    a multiprocessor are 1024."""
    body = sass(
        listing(
            *["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"] * 8,
            *["HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR8], R24"] * 8,
            *["MUFU.EX2 R1, R1"] * 64,
        )
    )
    spent = cycles(body, products(body), 8, MACHINES["sm_90"])
    assert spent.tensor == 4 * 128**3 / 4096 == 2048
    assert spent.mufu == 128 * 128 / 16 == 1024
    assert spent.issue == 80 * 8 / 4
    assert spent.shared == 2 * (8 * (64 + 128) + 8 * 128) * 16 * 2 / 128
    alone = bound(spent, 8, 255, 160 << 10, MACHINES["sm_90"])
    assert alone.utilisation == round(2048 / 3072, 3) and alone.programs == 1
    two = bound(spent, 8, 128, 100 << 10, MACHINES["sm_90"])
    assert two.utilisation == 1.0 == two.overlap and two.limit == "tensor cores"


def test_every_kind_of_instruction_has_a_pattern_of_its_own() -> None:
    """No pattern shadows another: each kind is found for some name that its own pattern begins with."""
    op_of_kind = {
        "tensor": "HMMA",
        "mufu": "MUFU.EX2",
        "fma": "FFMA2",
        "compare": "FMNMX3",
        "convert": "F2FP",
    }
    op_of_kind |= {"spill": "LDL.64", "memory": "UTMALDG.4D", "barrier": "WARPGROUP.ARRIVE", "integer": "SEL"}
    assert {kind: disassembly.kind_of(op) for kind, op in op_of_kind.items()} == {
        kind: kind for kind in op_of_kind
    }
    assert (
        re.match(disassembly.KINDS["memory"], "LDGDEPBAR") and disassembly.kind_of("LDGDEPBAR") == "barrier"
    )
    assert disassembly.mix([Instruction("R2UR", ""), Instruction("UIADD3", "")]) == {"other": 2}
