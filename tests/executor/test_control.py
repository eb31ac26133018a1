"""Control flow: loops that threads leave one by one, calls, barriers, mbarriers, deadlocks."""

import numpy as np
import pytest

from tests.executor.support.ptx import Array, module, run_module
from tritoncp.executor.ptx.parse import PtxSyntaxError

START = "ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; mov.u32 %r1, %tid.x;\n"
STORE = "mad.wide.u32 %d4, %r1, 4, %d2; st.global.b32 [%d4], %r2;\n"


def run(
    body: str, shared: int = 0, threads: int = 32, seed: int | None = None, head: str = ""
) -> tuple[Array, list[str]]:
    out = np.zeros(threads, "u4")
    text = module(body, 2, shared, threads, head)
    faults = run_module(text, np.zeros(1, "u4"), out, threads=threads, seed=seed)
    return out, [str(f) for f in faults]


@pytest.mark.parametrize("seed", [None, 4])
def test_threads_meet_after_a_loop_of_different_lengths(seed: int | None) -> None:
    """The shuffle after the loop needs all lanes of the warp."""
    body = (
        START
        + """
    mov.b32 %r2, 0; mov.b32 %r3, 0;
    LOOP: add.u32 %r2, %r2, %r3; add.u32 %r3, %r3, 1;
    setp.le.u32 %p1, %r3, %r1;
    @%p1 bra LOOP;
    shfl.sync.bfly.b32 %r2, %r2, 1, 31, -1;
    """
    )
    out, faults = run(body + STORE + "ret;", threads=128, seed=seed)
    assert not faults
    assert out.tolist() == [(n ^ 1) * ((n ^ 1) + 1) // 2 for n in range(128)]


def test_shuffle_by_a_part_of_a_warp_cannot_go_on() -> None:
    body = (
        START + "setp.lt.u32 %p1, %r1, 7; @%p1 bra SKIP; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; SKIP: ret;"
    )
    assert run(body)[1][0].startswith("shfl by a part of a warp")


CALLED = """
.func (.param .b32 out) triangle (.param .b32 n)
{
.reg .b32 %r<4>; .reg .pred %p<2>;
ld.param.b32 %r1, [n];
mov.b32 %r2, 0;
AGAIN: setp.eq.u32 %p1, %r1, 0;
@%p1 bra DONE;
add.u32 %r2, %r2, %r1; sub.u32 %r1, %r1, 1;
bra AGAIN;
DONE: st.param.b32 [out], %r2;
ret;
}
"""


def test_calls_return_values_to_their_caller() -> None:
    body = START
    for source in ("%r1", "%r2"):
        body += f"""{{ .param .b32 a; .param .b32 b; st.param.b32 [a], {source};
        call.uni (b), triangle, (a); ld.param.b32 %r2, [b]; }}"""
    out, faults = run(body + STORE + "ret;", head=CALLED)
    assert not faults
    triangle = [n * (n + 1) // 2 for n in range(600)]
    assert out.tolist() == [triangle[triangle[n]] for n in range(32)]


DIVIDES = """
.func (.param .align 16 .b8 both[16]) divide (.param .b32 n)
{
.reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<2>;
ld.param.b32 %r1, [n];
rem.u32 %r2, %r1, 5; div.u32 %r3, %r1, 5; cvt.u64.u32 %rd1, %r3;
setp.eq.u32 %p1, %r2, 0;
@%p1 bra EXACT;
st.param.b32 [both+8], %r2; st.param.b64 [both], %rd1;
ret;
EXACT: st.param.b32 [both+8], 7; st.param.b64 [both], %rd1;
ret;
}
"""


def test_calls_return_structures() -> None:
    """Triton 3.9 returns the quotient and the remainder of a large angle in this way."""
    body = START
    for source in ("%r1", "%r2"):
        body += f"""{{ .param .b32 a; .param .align 16 .b8 b[16]; st.param.b32 [a], {source};
        call.uni (b), divide, (a); ld.param.b32 %r2, [b+8]; ld.param.b64 %d5, [b]; }}
        cvt.u32.u64 %r3, %d5; mad.lo.u32 %r2, %r3, 100, %r2;"""
    out, faults = run(body + STORE + "ret;", head=DIVIDES)

    def divided(n: int) -> int:
        return n // 5 * 100 + (n % 5 or 7)

    assert not faults
    assert out.tolist() == [divided(divided(n)) for n in range(32)]


def test_a_part_of_a_structure_has_one_width() -> None:
    with pytest.raises(PtxSyntaxError, match=r"ld.param.b64 of a part of a parameter"):
        run(
            START + "{ .param .b32 a; .param .align 16 .b8 b[16]; st.param.b32 [a], %r1; "
            "call.uni (b), divide, (a); ld.param.b64 %d5, [b+8]; } ret;",
            head=DIVIDES,
        )


def test_barriers_do_not_wait_for_returned_threads() -> None:
    body = START + "setp.ge.u32 %p1, %r1, 32; @%p1 ret; bar.sync 0; mov.b32 %r2, 1;"
    out, faults = run(body + STORE + "ret;", threads=64)
    assert not faults
    assert out.tolist() == [1] * 32 + [0] * 32


def test_barriers_that_never_meet_are_a_deadlock() -> None:
    body = START + "setp.ge.u32 %p1, %r1, 32; @%p1 bra B; bar.sync 0; ret; B: bar.sync 1; ret;"
    assert any(f.startswith("deadlock") for f in run(body, threads=64)[1])


@pytest.mark.parametrize("seed", [None, 4])
def test_a_complete_barrier_is_used_again_with_another_number_of_threads(seed: int | None) -> None:
    """Triton 3.9 joins the warps of a partition at barrier 0, and later all warps."""
    body = START + "setp.ge.u32 %p1, %r1, 64; @%p1 bra B; bar.sync 0, 64; bar.sync 0, 64; B: bar.sync 1;"
    out, faults = run(body + "bar.sync 0; mov.b32 %r2, 1;" + STORE + "ret;", threads=96, seed=seed)
    assert not faults
    assert out.tolist() == [1] * 96


def test_threads_that_meet_at_a_barrier_agree_on_their_number() -> None:
    body = START + "setp.ge.u32 %p1, %r1, 32; @%p1 bra B; bar.sync 1, 64; ret; B: bar.sync 1, 96; ret;"
    assert any("two numbers of threads" in f for f in run(body, threads=96)[1])


def test_a_part_of_a_warp_at_a_barrier_is_a_fault() -> None:
    body = START + "setp.ge.u32 %p1, %r1, 16; @%p1 bra B; bar.sync 0; B: bar.sync 0; ret;"
    assert any(f.startswith("divergence") for f in run(body)[1])


HANDOVER = (
    START
    + """
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared::cta.b64 [smem], 32;
bar.sync 0;
mov.b32 %r2, 0;
setp.ge.u32 %p2, %r1, 32;
@%p2 bra CONSUMER;
mad.lo.u32 %r5, %r1, 4, 64;
st.shared.b32 [%r5], %r1;
mbarrier.arrive.shared::cta.b64 _, [smem];
bra END;
CONSUMER:
{ .reg .pred complete;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 complete, [smem], 0;
@!complete bra.uni WAIT; }
mad.lo.u32 %r5, %r1, 4, -64;
ld.shared.b32 %r2, [%r5];
END:
"""
)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_an_mbarrier_hands_over_what_was_written_before_its_arrivals(seed: int | None) -> None:
    out, faults = run(HANDOVER + STORE + "ret;", shared=512, threads=64, seed=seed)
    assert not faults
    assert out[32:].tolist() == list(range(32))


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("@!complete bra.uni WAIT;", "", "shared memory"),
        ("mbarrier.arrive.shared::cta.b64 _, [smem];", "", "deadlock"),
        ("bar.sync 0;", "", "mbarrier used"),
        ("[smem], 32;", "[smem], 33;", "deadlock"),
        ("[smem], 32;", "[smem], 31;", "more arrivals"),
        ("bar.sync 0;", "@%p1 mbarrier.init.shared::cta.b64 [smem], 32; bar.sync 0;", "initialised again"),
        ("bar.sync 0;", "@%p1 mbarrier.inval.shared::cta.b64 [smem+8]; bar.sync 0;", "not initialised"),
        ("END:", "END: @%p1 mbarrier.inval.shared::cta.b64 [smem];", "follows another warp's wait"),
        ("b64 [smem], 32;", "b64 [smem+4], 32;", "misaligned shared mbarrier"),
        ("b64 [smem], 32;", "b64 [smem+512], 32;", "out of bounds shared mbarrier"),
    ],
)
def test_mbarrier_faults(old: str, new: str, kind: str) -> None:
    assert old in HANDOVER
    faults = run(HANDOVER.replace(old, new) + STORE + "ret;", shared=512, threads=64)[1]
    assert any(kind in f for f in faults), faults


def test_a_write_after_the_arrival_is_a_race() -> None:
    """The consumer is only ordered after accesses before the arrival."""
    arrive = "mbarrier.arrive.shared::cta.b64 _, [smem];"
    late = HANDOVER.replace(arrive, arrive + "st.shared.b32 [%r5], %r2;")
    faults = run(late + STORE + "ret;", shared=512, threads=64)[1]
    assert any(f.startswith("race on shared memory") for f in faults), faults


CHAIN = (
    START
    + """
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared::cta.b64 [smem], 1;
@%p1 mbarrier.init.shared::cta.b64 [smem+8], 1;
@%p1 mbarrier.arrive.shared::cta.b64 _, [smem];
bar.sync 0;
setp.ge.u32 %p2, %r1, 32;
@%p2 bra LATER;
LAST: mbarrier.try_wait.parity.shared::cta.b64 %p3, [smem+8], 0;
@!%p3 bra LAST;
bra END;
LATER:
FIRST: mbarrier.try_wait.parity.shared::cta.b64 %p3, [smem], 0;
@!%p3 bra FIRST;
setp.eq.u32 %p1, %r1, 32;
@%p1 mbarrier.arrive.shared::cta.b64 _, [smem+8];
END: mov.b32 %r2, 1;
"""
)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_every_waiting_warp_looks_again_before_a_deadlock(seed: int | None) -> None:
    """Warp 0 goes first and waits for warp 1, whose wait is over at its second test."""
    out, faults = run(CHAIN + STORE + "ret;", shared=64, threads=64, seed=seed)
    assert not faults
    assert out.tolist() == [1] * 64
    stuck = CHAIN.replace("[smem], 0;", "[smem], 1;").replace("_, [smem];", "_, [smem+8];")
    faults = run(stuck + STORE + "ret;", shared=64, threads=64, seed=seed)[1]
    assert not any(f.startswith("deadlock") for f in faults), faults
    faults = run(CHAIN.replace("_, [smem+8];", "_, [smem];") + "ret;", shared=64, threads=64, seed=seed)[1]
    assert any(f.startswith("deadlock") and f.count("try_wait") == 1 for f in faults), faults


@pytest.mark.parametrize(
    ("update", "ends"),
    [("atom.global.add.u32 %r3, [%d1], 1;", True), ("atom.global.exch.b32 %r3, [%d1], 7;", False)],
)
def test_a_loop_that_changes_nothing_never_ends(update: str, ends: bool) -> None:
    """Each thread increments a counter, or all threads find the values that they wrote."""
    body = START + f"LOOP: {update} setp.lt.u32 %p1, %r3, 999; @%p1 bra LOOP; mov.b32 %r2, 1;"
    out, faults = run(body + STORE + "ret;")
    assert bool(faults) != ends, faults
    assert out.tolist() == [int(ends)] * 32


POLL = """
setp.ge.u32 %p1, %r1, 32; @%p1 bra WRITER;
LOOK: ld.relaxed.gpu.global.u32 %r3, [%d1];
setp.eq.u32 %p2, %r3, 0; @%p2 bra AGAIN;
bra END;
AGAIN: nanosleep.u32 20; bra LOOK;
WRITER: atom.global.exch.b32 %r4, [%d1], 7;
END: mov.b32 %r2, 1;
"""


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("threads", [32, 64])
def test_a_loop_of_two_blocks_waits_for_another_warp_or_never_ends(seed: int | None, threads: int) -> None:
    out, faults = run(START + POLL + STORE + "ret;", threads=threads, seed=seed)
    if threads == 32:  # there is no writer
        assert any(f.startswith("deadlock") and "ld.relaxed" in f for f in faults), faults
        return
    assert not any(f.startswith("deadlock") for f in faults), faults
    assert out.tolist() == [1] * 64
