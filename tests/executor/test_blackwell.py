"""Tensor memory between warps: what orders accesses, and what is not needed to order them."""

import numpy as np
import pytest

from tests.executor.support.ptx import Array, module, run_module

# Warps 0 to 3 store a register to tensor memory, and warps 4 to 7, which share their lanes, load it.
HANDOVER = """
ld.param.b64 %d1, [p0]; mov.u32 %r1, %tid.x;
setp.lt.u32 %p1, %r1, 32; setp.lt.u32 %p2, %r1, 128;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32;
bar.sync 0;
ld.shared.b32 %r2, [smem];
and.b32 %r3, %r1, 96; shl.b32 %r3, %r3, 16; add.u32 %r2, %r2, %r3;
mad.lo.u32 %r4, %r1, 3, 5;
@!%p2 bra MEET;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r4};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
MEET: bar.sync 1;
@%p2 bra END;
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r2];
tcgen05.wait::ld.sync.aligned;
mad.wide.u32 %d2, %r1, 4, %d1; st.global.b32 [%d2+-512], %r5;
END: bar.sync 2;
ld.shared.b32 %r2, [smem];
@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
ret;
"""


def run(body: str) -> tuple[Array, list[str]]:
    out = np.zeros(128, "u4")
    return out, [str(f) for f in run_module(module(body, 1, 16, 256), out, threads=256)]


@pytest.mark.parametrize(
    "dropped", ["", "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"]
)
def test_barriers_order_tensor_memory(dropped: str) -> None:
    """tcgen05.fence is for arrivals and waits that are relaxed, which the table of instructions refuses:
    barriers, and mbarriers that release and acquire, order without it. Triton 3.7 writes none."""
    assert dropped in HANDOVER
    out, faults = run(HANDOVER.replace(dropped, ""))
    assert not faults
    assert out.tolist() == [3 * n + 5 for n in range(128)]


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("bar.sync 1;", "", "tensor memory"),
        ("tcgen05.wait::st.sync.aligned;", "", "read of tensor memory before tcgen05.wait::st"),
        ("tcgen05.wait::ld.sync.aligned;", "", "tcgen05.dealloc before tcgen05.wait"),
        (
            "tcgen05.wait::ld.sync.aligned;",
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r4}; tcgen05.wait::st.sync.aligned; "
            "tcgen05.wait::ld.sync.aligned;",
            "write of tensor memory before tcgen05.wait",
        ),
        ("@!%p2 bra MEET;", "setp.lt.u32 %p3, %r1, 96; @!%p3 bra MEET;", "was never written"),
        ("[%r2], {%r4}", "[%r2+32], {%r4}", "out of bounds tensor memory"),
        ("and.b32 %r3, %r1, 96;", "mov.b32 %r3, 0;", "lanes of tensor memory of another warp"),
        ("END: bar.sync 2;", "END:", "race on tensor memory: tcgen05.dealloc"),
        ("@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;", "", "tensor memory is not freed"),
    ],
)  # fmt: skip
def test_planted_faults_of_tensor_memory(old: str, new: str, kind: str) -> None:
    assert old in HANDOVER
    faults = run(HANDOVER.replace(old, new))[1]
    assert any(kind in f for f in faults), faults


def test_a_register_is_used_before_the_wait_for_its_load() -> None:
    """The dependence of registers orders the use; the wait has to precede operations that overwrite or free
    the memory."""
    wait, store = "tcgen05.wait::ld.sync.aligned;\n", "st.global.b32 [%d2+-512], %r5;\n"
    assert wait in HANDOVER and store in HANDOVER
    out, faults = run(HANDOVER.replace(wait, "").replace(store, store + wait))
    assert not faults
    assert out.tolist() == [3 * n + 5 for n in range(128)]


@pytest.mark.parametrize("stored", ["", "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2+1], {%r4};"])
def test_a_program_that_wrote_no_cell_reads_poison(stored: str) -> None:
    """This is no fault: Triton loads before a loop that may not run, and then does not use the values."""
    out, faults = run(HANDOVER.replace("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r4};", stored))
    assert not faults
    assert (out == 0xFFFFFFFF).all()


COMMIT = """
mov.u32 %r1, %tid.x;
setp.eq.u32 %p1, %r1, 0; setp.ge.u32 %p2, %r1, 32; setp.eq.u32 %p3, %r1, 32;
@%p1 mbarrier.init.shared::cta.b64 [smem], 1;
bar.sync 0;
@%p2 bra ISSUE;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p4, [smem], 0;
@!%p4 bra WAIT;
ret;
ISSUE: @%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [smem];
ret;
"""


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_commit_without_a_product_ends_a_wait(seed: int | None) -> None:
    """A loop with specialised warps issues such a commit before its first product."""
    faults = run_module(module(COMMIT, 1, 16, 64), np.zeros(1, "u4"), threads=64, seed=seed)
    assert not faults
