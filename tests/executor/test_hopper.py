"""Rules between the warps of a program: registers of warpgroups, fences of products, global memory."""

import numpy as np
import pytest

from tests.executor.support.ptx import module, run_module
from tritoncp.executor.ptx.in_flight import early_uses
from tritoncp.executor.ptx.parse import parse_ptx

START = "ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; mov.u32 %r1, %tid.x;\n"


def faults(body: str, threads: int) -> list[str]:
    """Faults of a program of some threads; p1 has 64 words."""
    text = module(START + body + "ret;", 2, 0, threads)
    return [str(f) for f in run_module(text, np.zeros(1, "u4"), np.zeros(64, "u4"), threads=threads)]


PARTITIONS = """
setp.lt.u32 %p1, %r1, 32; @%p1 bra PRODUCER;
setmaxnreg.dec.sync.aligned.u32 24; bra END;
PRODUCER: setmaxnreg.dec.sync.aligned.u32 24;
END: bar.sync 0;
"""


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("", "", None),
        (
            "PRODUCER: setmaxnreg.dec.sync.aligned.u32 24",
            "PRODUCER: setmaxnreg.dec.sync.aligned.u32 32",
            "differs",
        ),
        (
            "PRODUCER: setmaxnreg.dec.sync.aligned.u32 24",
            "PRODUCER: mov.b32 %r2, 0",
            "by a part of a warpgroup",
        ),
        ("%r1, 32", "%r1, 16", "setmaxnreg by a part of a warp"),
    ],
)
def test_warps_of_a_warpgroup_set_the_same_registers(old: str, new: str, kind: str | None) -> None:
    """Each partition that shares a warpgroup has a separate instruction."""
    got = faults(PARTITIONS.replace(old, new), 128)
    assert any(kind in f for f in got) if kind else not got, got


ZEROS = "mad.lo.u32 %r2, %r1, 4, smem; st.shared.b32 [%r2], 0; bar.warp.sync -1;"
FIELDS = {
    "rank": "b32 [%d3], 0x1",
    "global_address": "b64 [%d3], %d1",
    "box_dim": "b32 [%d3], {at}, 8",
    "global_dim": "b32 [%d3], {at}, 8",
    "global_stride": "b64 [%d3], {at}, 32",
    "element_stride": "b32 [%d3], {at}, 1",
    "elemtype": "b32 [%d3], 0x7",
}


@pytest.mark.parametrize(
    ("zeros", "modes", "left_out", "is_whole"),
    [
        (ZEROS, (), "", True),  # Triton 3.9 writes no interleave_layout: the memory is 0
        ("", ("interleave_layout", "swizzle_mode", "fill_mode"), "", True),
        ("", ("swizzle_mode", "fill_mode"), "", False),
        (ZEROS, (), "box_dim", False),
    ],
)
def test_a_tensor_map_has_every_field(
    zeros: str, modes: tuple[str, ...], left_out: str, is_whole: bool
) -> None:
    body = START + zeros + "cvt.u64.u32 %d3, smem;"
    fields = FIELDS | dict.fromkeys(modes, "b32 [%d3], 0x0")
    for name in fields.keys() - {left_out}:
        dims = range(2 if "{at}" in fields[name] and name != "global_stride" else 1)
        body += "".join(
            f"tensormap.replace.tile.{name}.shared::cta.b1024.{fields[name].format(at=at)};" for at in dims
        )
    body += "setp.eq.u32 %p1, %r1, 0; @%p1 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic"
    text = module(body + ".release.gpu.sync.aligned [%d2], [%d3], 0x80; ret;", 2, 128, 32)
    got = [str(f) for f in run_module(text, np.zeros(64, "u4"), np.zeros(64, "u4"), threads=32)]
    assert not got if is_whole else "a tensor map without a field" in got[0], got


# Warp 0 copies a box of 8 x 8 words; between that and the bytes that it expects it meets another warp.
# Warp 2, which goes first, waits for the copy.
LOAD = """
setp.lt.u32 %p2, %r1, 64; @%p2 bra COPY;
LOOK: mbarrier.try_wait.parity.shared::cta.b64 %p4, [smem+512], 0;
@!%p4 bra LOOK;
bra END;
COPY: setp.eq.u32 %p3, %r1, 0;
@%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem+512], 256;
bar.sync 1, 64;
mov.b32 %r3, smem; mov.b32 %r4, 0; add.u32 %r5, %r3, 256; add.u32 %r6, %r3, 512;
@%p3 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r5], [%d2, {%r4, %r4}], [%r6];
END: bar.sync 0;
"""


@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4])
def test_a_warp_that_waits_looks_again_after_a_copy_begins(seed: int | None) -> None:
    body = START + ZEROS + "cvt.u64.u32 %d3, smem;"
    for name, field in FIELDS.items():
        dims = range(2 if "{at}" in field and name != "global_stride" else 1)
        body += "".join(
            f"tensormap.replace.tile.{name}.shared::cta.b1024.{field.format(at=at)};" for at in dims
        )
    body += """
    setp.lt.u32 %p1, %r1, 32; setp.eq.u32 %p3, %r1, 0;
    @%p3 mbarrier.init.shared::cta.b64 [smem+512], 1;
    @%p1 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic"""
    body += ".release.gpu.sync.aligned [%d2], [%d3], 0x80; fence.proxy.async.shared::cta; bar.sync 0;"
    text = module(body + LOAD + "ret;", 2, 1024, 96)
    got = run_module(text, np.zeros(64, "u4"), np.zeros(64, "u4"), threads=96, seed=seed)
    assert not got, [str(f) for f in got]


WRITES = """
and.b32 %r2, %r1, 31; mad.wide.u32 %d3, %r2, 4, %d2; setp.lt.u32 %p1, %r1, 32; mov.b32 %r3, 7;
@%p1 st.global.b32 [%d3], %r1;
bar.sync 0;
@!%p1 st.global.b32 [%d3], %r1;
"""


def test_warps_of_a_program_race_on_global_memory() -> None:
    race = "race of two warps on global memory"
    assert not faults(WRITES, 64)
    together = WRITES.replace("bar.sync 0;", "")
    assert any(f.startswith(f"{race}: write") for f in faults(together, 64))
    assert not faults(together.replace("], %r1", "], %r3"), 64)  # equal data
    read = together.replace("@!%p1 st.global.b32 [%d3], %r1", "@!%p1 ld.global.b32 %r4, [%d3]")
    assert any(f.startswith(f"{race}: read") for f in faults(read, 64))


PRODUCT = """
mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0; mov.b32 %r4, 0; mov.b64 %d1, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %r4}, %d1, %d1, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""
COPY = "mov.b32 %r5, %r4; add.u32 %r6, %r5, 1;"
FENCE = "wgmma.fence.sync.aligned;\n"
COPIES = "mov.b32 %r5, %r6; mov.b32 %r2, %r5;"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (PRODUCT, None),
        (PRODUCT.replace("wgmma.fence.sync.aligned;", ""), "wgmma.fence"),
        (PRODUCT + "add.u32 %r1, %r1, 1;" + PRODUCT.split(";", 5)[5], None),
        (PRODUCT + "add.u32 %r1, %r1, 1;" + PRODUCT.split(";", 6)[6], "wgmma.fence"),
        (PRODUCT + PRODUCT.split(";", 6)[6], None),  # no instruction accessed it between
        (PRODUCT.replace("group.sync.aligned 0", "group.sync.aligned 1") + COPY, "wgmma.wait_group"),
        (PRODUCT.replace(FENCE, FENCE + "mov.b32 %r2, %r1;"), None),  # a copy, as LLVM places it
        (PRODUCT.replace(FENCE, FENCE + "add.u32 %r1, %r1, 1; mov.b32 %r2, %r1;"), "wgmma.fence"),
        (PRODUCT.replace(FENCE, FENCE + "mov.b32 %r2, %r5;"), None),  # a register written before the fence
        (PRODUCT.replace(FENCE, f"mov.b32 %r6, 0; {FENCE} {COPIES}"), None),
        (PRODUCT.replace(FENCE, f"{FENCE} mov.b32 %r6, 0; {COPIES}"), "wgmma.fence"),
        (PRODUCT.replace(FENCE, FENCE + "mov.b32 %r2, 0;"), "wgmma.fence"),
        (PRODUCT.replace(FENCE, "mov.b32 %r2, %r1;"), "wgmma.fence"),
    ],
)  # fmt: skip
def test_registers_of_products(body: str, kind: str | None) -> None:
    texts = [text for _, text in early_uses(parse_ptx(module(body + "ret;", 0)))]
    assert any(kind in text for text in texts) if kind else not texts, texts


PACK = "mov.b32 %r11, %r1; mov.b32 %r12, %r1; mov.b32 %r13, %r1; mov.b32 %r14, %r1;\n"
FROM_REGISTERS = PRODUCT.replace("%d1, %d1,", "{%r11, %r12, %r13, %r14}, %d1,").replace("1, 0, 0;", "1, 0;")
GROUP = FROM_REGISTERS[FROM_REGISTERS.index("wgmma.fence") :]  # without the start of the accumulator
BEHIND = GROUP.replace(FENCE, FENCE + PACK)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (PACK + FROM_REGISTERS, False),
        (FROM_REGISTERS.replace(FENCE, FENCE + PACK), False),  # as LLVM places it
        (PACK + FROM_REGISTERS + PACK + GROUP, False),
        (PACK + FROM_REGISTERS + BEHIND, False),
        (PACK + FROM_REGISTERS + PACK + GROUP.replace(FENCE, ""), True),
        (PACK + FROM_REGISTERS + BEHIND.replace(FENCE, ""), True),
        (PACK + FROM_REGISTERS + GROUP.replace(FENCE, ""), False),  # no register changed in between
        (PACK + FROM_REGISTERS.replace(FENCE, ""), True),
    ],
)
def test_operands_in_registers_need_a_fence_of_their_group(body: str, fault: bool) -> None:
    texts = [text for _, text in early_uses(parse_ptx(module(body + "ret;", 0)))]
    assert any("wgmma.fence" in text for text in texts) == fault, texts


# 64 x 16 by 16 x 8 of float16 ones: every thread writes 16 bytes of A, the last ones also B, at 2048
OPERANDS = """
ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; mov.u32 %r1, %tid.x;
mov.b32 %r2, 0x3C003C00; mad.lo.u32 %r3, %r1, 16, 0; setp.ge.u32 %p1, %r1, 112;
st.shared.v4.b32 [%r3], {%r2, %r2, %r2, %r2};
@%p1 st.shared.v4.b32 [%r3+256], {%r2, %r2, %r2, %r2};
fence.proxy.async.shared::cta;
bar.sync 0;
mov.b64 %d3, 0x0000001000080000; mov.b64 %d4, 0x0000001000080080;
mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0; mov.b32 %r14, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r11, %r12, %r13, %r14}, %d3, %d4, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bar.sync 0;
st.shared.b32 [%r3], %r2;
mad.wide.u32 %d5, %r1, 16, %d2; st.global.v4.b32 [%d5], {%r11, %r12, %r13, %r14};
ret;
"""
WAIT = "wgmma.wait_group.sync.aligned 0;\nbar.sync 0;\n"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("", "", None),
        ("fence.proxy.async.shared::cta;", "", "written without fence.proxy.async"),
        ("cta;\nbar.sync 0;", "cta;", "race on shared memory: wgmma reads after the write of another warp"),
        ("@%p1 st.shared", "@!%p1 st.shared", "wgmma's read of shared memory that was never written"),
        ("0x0000001000080080", "0x0000001000080090", "out of bounds shared wgmma"),
        (WAIT, "st.shared.b32 [%r3], %r2;\n" + WAIT, "race on shared memory: write after the read of wgmma"),
        (WAIT, "wgmma.wait_group.sync.aligned 0;\n", "race on shared memory: write after the read of wgmma"),
    ],
)
def test_shared_memory_of_products(old: str, new: str, kind: str | None) -> None:
    """A warp may write an operand once the parts of all four warps are done."""
    out = np.zeros((128, 4), "f4")
    text = module(OPERANDS.replace(old, new) if old else OPERANDS, 2, 2048 + 256, 128)
    got = [str(f) for f in run_module(text, np.zeros(1, "u4"), out, threads=128)]
    assert any(f.startswith(kind) or kind in f for f in got) if kind else not got, got
    assert kind or (out == 16).all()
