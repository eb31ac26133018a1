"""Memory: bounds, alignment, red zones between tensors, uninitialised memory, races, atomics, spaces."""

import mmap
import random
import tracemalloc

import numpy as np
import pytest
import torch

from tests.executor.support.ptx import Array, module, run_module
from tritoncp.executor.memory import regions
from tritoncp.executor.memory.regions import extent_of
from tritoncp.executor.memory.uninitialised import fill

START = "ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; mov.u32 %r1, %tid.x;\n"
OWN = START + "mad.wide.u32 %d3, %r1, 4, %d1; mad.wide.u32 %d4, %r1, 4, %d2;\n"


def run(
    body: str,
    *arrays: Array | torch.Tensor,
    shared: int = 0,
    threads: int = 32,
    grid: int = 1,
    seed: int | None = None,
) -> list[str]:
    text = module(body + "\nret;", len(arrays), shared, threads)
    return [str(f) for f in run_module(text, *arrays, grid=(grid, 1, 1), threads=threads, seed=seed)]


def two() -> tuple[Array, Array]:
    return np.arange(32, dtype="u4"), np.zeros(32, "u4")


def test_a_copy_has_no_fault() -> None:
    x, y = two()
    assert not run(OWN + "ld.global.b32 %r2, [%d3]; st.global.b32 [%d4], %r2;", x, y)
    assert np.array_equal(x, y)


@pytest.mark.parametrize("offset", [0, 16])
@pytest.mark.parametrize("vector", ["v2.b16", "b32", "v2.b32", "v4.b32", "v8.b32", "v4.b64"])
def test_copies_of_every_width(vector: str, offset: int) -> None:
    """Addresses are multiples of 16 bytes, so accesses of 32 bytes may be misaligned."""
    count, bits = int(vector[1:].split(".b")[0] if "v" in vector else 1), int(vector.split("b")[1])
    names = ", ".join(f"%{ {16: 'h', 32: 'r', 64: 'd'}[bits] }{n + 8}" for n in range(count))
    registers, nbytes = f"{{{names}}}" if count > 1 else names, count * bits // 8
    memory = np.zeros(2 * 32 * nbytes + 64, "u1")
    start = -memory.ctypes.data % 32 + offset
    x, y = memory[start : start + 32 * nbytes], memory[start + 32 * nbytes : start + 64 * nbytes]
    x[:] = np.random.default_rng(0).integers(256, size=len(x))
    body = START + f"mad.wide.u32 %d3, %r1, {nbytes}, %d1; mad.wide.u32 %d4, %r1, {nbytes}, %d2;"
    body += f"ld.global.{vector} {registers}, [%d3]; st.global.{vector} [%d4], {registers};"
    faults = run(body, x.view("u4"), y.view("u4"))
    if nbytes == 32 and offset:
        assert [f.split(":")[0] for f in faults] == [
            f"misaligned global {k} of 32 bytes" for k in ("load", "store")
        ]
    else:
        assert not faults
        assert np.array_equal(x, y)


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ("ld.global.b32 %r2, [%d3+4];", "out of bounds global load", "0 bytes past the end of p0 (1 times)"),
        ("ld.global.b32 %r2, [%d3+-4];", "out of bounds global load", "4 bytes before the start of p0"),
        ("st.global.b32 [%d4+128], %r1;", "out of bounds global store", "past the end of p1 (32 times)"),
        ("ld.global.b64 %d5, [%d3];", "misaligned global load of 8 bytes", "(16 times)"),
        ("ld.global.b32 %r2, [0];", "out of bounds global load", "in no tensor"),
    ],
)
@pytest.mark.bar(7)
def test_bounds_and_alignment(line: str, kind: str, text: str) -> None:
    memory = np.zeros(96, "u4")
    faults = run(OWN + line, memory[16:48], memory[64:96])
    assert any(f.startswith(kind) and text in f for f in faults), faults


def test_an_address_that_lands_in_another_tensor_is_seen() -> None:
    """Both tensors are live, and adjacent."""
    memory = np.zeros(64, "u4")
    faults = run(OWN + "ld.global.b32 %r2, [%d3+128];", memory[:32], memory[32:])
    assert len(faults) == 1
    assert "past the end of p0, in p1 (32 times)" in faults[0]


def test_faults_of_one_instruction_are_one_fault() -> None:
    """It is at fault in two threads of two programs, three times each."""
    body = "mov.b32 %r3, 0; LOOP: ld.global.b32 %r2, [%d3+8]; add.u32 %r3, %r3, 1;"
    faults = run(OWN + body + "setp.lt.u32 %p1, %r3, 3; @%p1 bra LOOP;", *two(), grid=2)
    assert len(faults) == 1
    assert "program (0, 0, 0), threads 30, 31; " in faults[0]
    assert faults[0].endswith("(12 times)")


def test_an_address_read_from_memory_is_good_in_any_tensor() -> None:
    x = np.arange(32, dtype="u4")
    pointer = np.array([x.ctypes.data], "u8")
    y = np.zeros(32, "u4")
    body = """
    ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; mov.u32 %r1, %tid.x; ld.global.b64 %d5, [%d1];
    mad.wide.u32 %d3, %r1, 4, %d5; mad.wide.u32 %d4, %r1, 4, %d2;
    ld.global.b32 %r2, [%d3]; st.global.b32 [%d4], %r2;"""
    assert not run(body, pointer, y, x)
    assert np.array_equal(x, y)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("ld.global.b32 %r2, [%d3];", 23),
        ("ld.global.b64 %d5, [%d1+32];", 32),  # one half of it is written
        ("cp.async.ca.shared.global [%r6], [%d3], 4; cp.async.wait_all;", 23),
        ("red.global.add.u32 [%d3], 1;", 23),
        ("ld.b32 %r2, [%d3];", 23),
        ("st.global.b32 [%d3], %r1; ld.global.b32 %r2, [%d3];", 0),
        ("@%p1 st.global.b32 [%d3], %r1; ld.global.b32 %r2, [%d3];", 16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_reads_of_global_memory_that_nobody_wrote(line: str, count: int, dtype: torch.dtype) -> None:
    """The host wrote the first 36 bytes of memory that it allocated; a copy of the rest is unwritten too."""
    x = fill(torch.empty(128 // dtype.itemsize, dtype=dtype)).clone()
    x[: 36 // dtype.itemsize] = 1
    body = OWN + "setp.lt.u32 %p1, %r1, 16; mov.b32 %r5, smem; mad.lo.u32 %r6, %r1, 4, %r5;" + line
    faults = run(body, x, np.zeros(32, "u4"), shared=128)
    assert all("never written" in f and f.endswith(f"({count} times)") for f in faults), faults
    assert len(faults) == (count > 0)


def sparse(count: int) -> torch.Tensor:
    """Return zeros, int32 [count]; the machine allocates only the pages that are used."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, 4 * count, flags=flags), dtype=torch.int32)


FAR = (1 << 31) + 64  # distance of two rows
SECOND = START + f"mov.b64 %d5, {4 * FAR}; add.s64 %d1, %d1, %d5; mad.wide.u32 %d3, %r1, 4, %d1;"


@pytest.mark.bar(9)
@pytest.mark.parametrize(
    ("line", "kind", "grid"),
    [
        ("ld.global.b32 %r2, [%d3];", "", 1),
        ("ld.global.b32 %r2, [%d3+128];", "out of bounds global load", 1),
        ("ld.global.b32 %r2, [%d3+-128];", "global access between the elements of a strided tensor", 1),
        ("st.global.b32 [%d3], %r1;", "race of two programs on global memory: write", 300),
    ],
)
def test_rows_beyond_two_to_the_31_elements_take_memory_for_accessed_pages(
    line: str, kind: str, grid: int
) -> None:
    memory = sparse(FAR + 32)
    memory[FAR:] = torch.arange(32)
    x = memory.as_strided((2, 32), (FAR, 1))
    tracemalloc.start()
    faults = run(SECOND + line, x, np.zeros(32, "u4"), grid=grid)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20, f"{peak >> 20} MiB"
    assert all(f.startswith(kind) for f in faults) and bool(faults) == bool(kind), faults


def test_the_state_of_pages_is_that_of_the_whole_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided tensors that share memory, some of it uninitialised, at any place of a page."""
    rng = random.Random(0)
    for _ in range(200):
        memory = fill(torch.empty(600, dtype=torch.int32))
        memory[torch.rand(600) < 0.5] = 1
        extents, used = [], np.zeros(2400, bool)
        for _ in range(rng.choice((1, 2))):
            shape, strides = rng.choices(range(1, 5), k=3), rng.choices(range(40), k=3)
            x = memory.as_strided(shape, strides, rng.randrange(100))
            extents.append(extent_of(x, "x"))
            places = (
                torch.arange(2400, dtype=torch.int32)
                .view(600, 4)
                .as_strided((*shape, 4), (*(4 * s for s in strides), 1), 4 * x.storage_offset())
            )
            used[places.flatten().numpy()] = True
        monkeypatch.setattr(regions, "PAGE", 1 << 18)
        wholes = regions.regions_of(extents, 4, True)
        monkeypatch.setattr(regions, "PAGE", 64)
        for whole, region in zip(wholes, regions.regions_of(extents, 4, True), strict=True):
            units = np.arange((whole.start - whole.base) // 4, (whole.end - whole.base) // 4)
            rng.shuffle(units)
            for part in (units[:3], units):
                at, want_at = region.touch(part, 4), whole.touch(part, 4)
            for name in ("holes", "unwritten"):
                got, want = (
                    r.state[name].reshape(-1, 4)[a] if name in r.state else np.zeros((len(a), 4), bool)
                    for r, a in ((region, at), (whole, want_at))
                )
                assert np.array_equal(got, want), name
            if all(not regions.is_dense(e.tensor) for e in whole.extents):
                byte = whole.base - memory.data_ptr() + 4 * units[:, None] + np.arange(4)
                holes = whole.state.get("holes", np.zeros((1, whole.nbytes), bool)).reshape(-1, 4)
                assert np.array_equal(holes[units], ~used[byte])


def test_a_dropped_predicate_is_seen() -> None:
    x, y = two()
    guarded = OWN + "setp.lt.u32 %p1, %r1, 20; mov.b32 %r2, 0; @%p1 ld.global.b32 %r2, [%d3];"
    assert not run(guarded, x[:20], y)
    assert run(guarded.replace("@%p1 ", ""), x[:20], y)


SHARED = """
mov.b32 %r5, smem; mad.lo.u32 %r6, %r1, 4, %r5;
st.shared.b32 [%r6], %r1;
bar.sync 0;
xor.b32 %r7, %r1, 32; mad.lo.u32 %r7, %r7, 4, %r5;
ld.shared.b32 %r8, [%r7];
bar.sync 0;
st.shared.b32 [%r6], %r8;
"""


@pytest.mark.parametrize("seed", [None, 3])
def test_each_barrier_of_an_exchange_between_warps_is_needed(seed: int | None) -> None:
    x, y = np.zeros(64, "u4"), np.zeros(64, "u4")
    assert not run(START + SHARED, x, y, shared=256, threads=64, seed=seed)
    first, second = SHARED.split("bar.sync 0;\n")[0], SHARED.split("bar.sync 0;\n")[1:]
    no_first = first + second[0] + "bar.sync 0;\n" + second[1]
    no_second = first + "bar.sync 0;\n" + second[0] + second[1]
    for body, kind in (
        (no_first, "read after the write of another warp"),
        (no_second, "after the read of another warp"),
    ):
        faults = run(START + body, x, y, shared=256, threads=64, seed=seed)
        assert any(kind in f or "that was never written" in f for f in faults), faults


def test_a_barrier_of_some_warps_orders_no_others() -> None:
    """Warps 0 and 1 meet at a named barrier; warp 2 reads what warp 0 wrote."""
    body = (
        START
        + """
    mov.b32 %r5, smem; mad.lo.u32 %r6, %r1, 4, %r5;
    setp.lt.u32 %p1, %r1, 64;
    @!%p1 bra OTHER;
    st.shared.b32 [%r6], %r1;
    bar.sync 1, 64;
    ld.shared.b32 %r8, [%r6+-0];
    bra END;
    OTHER: ld.shared.b32 %r8, [smem];
    END: bar.sync 0;"""
    )
    faults = run(body, *two(), shared=512, threads=96)
    assert any("race on shared memory" in f or "never written" in f for f in faults), faults


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("ld.shared.b32 %r8, [smem+4];", "read of shared memory that was never written"),
        ("st.shared.b32 [smem+256], %r1;", "out of bounds shared store"),
        ("st.shared.b64 [smem+4], %d1;", "misaligned shared store of 8 bytes"),
    ],
)
def test_shared_memory(line: str, kind: str) -> None:
    faults = run(START + "st.shared.b32 [smem], %r1;" + line, *two(), shared=256)
    assert any(f.startswith(kind) for f in faults), faults


COPY = (
    OWN
    + """
mov.b32 %r5, smem; mad.lo.u32 %r6, %r1, 4, %r5;
cp.async.ca.shared.global [%r6], [%d3], 4;
cp.async.commit_group;
cp.async.ca.shared.global [%r6+128], [%d3], 4;
cp.async.commit_group;
cp.async.wait_group 1;
ld.shared.b32 %r7, [%r6];
cp.async.wait_group 0;
ld.shared.b32 %r8, [%r6+128];
add.u32 %r7, %r7, %r8;
st.global.b32 [%d4], %r7;
"""
)


def test_asynchronous_copies_are_waited_for_by_group() -> None:
    x, y = two()
    assert not run(COPY, x, y, shared=256)
    assert np.array_equal(y, 2 * x)
    for early in (COPY.replace("wait_group 1", "wait_group 2"), COPY.replace("wait_group 0", "wait_group 1")):
        assert any("whose copy is under way" in f for f in run(early, x, y, shared=256))


def test_programs_that_write_one_address_race() -> None:
    x, y = two()
    faults = run(OWN + "mov.u32 %r2, %ctaid.x; st.global.b32 [%d4], %r2;", x, y, grid=2)
    assert any("several threads write different values to one address" in f for f in faults)
    faults = run(OWN + "bar.sync 0; st.global.b32 [%d4], %r1;", x, y, grid=300)  # more CTAs than run at once
    assert any(f.startswith("race of two programs on global memory: write") for f in faults)


ADD16 = START + "mad.wide.u32 %d3, %r1, 2, %d1; ld.global.b16 %h1, [%d3];\n"


@pytest.mark.parametrize("seed", [None, 5])
def test_atomics_of_many_threads_on_one_address(seed: int | None) -> None:
    x = np.ones(32, "f2").view("u2")
    total = np.zeros(2, "u2")
    assert not run(ADD16 + "atom.global.gpu.relaxed.add.noftz.f16 %h2, [%d2], %h1;", x, total, seed=seed)
    assert total.view("f2")[0] == 32
    count = np.zeros(33, "u4")
    body = START + "atom.global.add.u32 %r2, [%d2], 1; add.u32 %r2, %r2, 1; mad.wide.u32 %d4, %r2, 4, %d2;"
    assert not run(body + "st.global.b32 [%d4], %r1;", x, count, seed=seed)
    assert count[0] == 32
    assert sorted(count[1:]) == list(range(32))  # every thread has had a turn
    if seed is not None:
        assert count[1:].tolist() != list(range(32))


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("atom.global.max.s32 %r2, [%d2], %r1;", 31),
        ("red.global.xor.b32 [%d2], %r1;", 0),
        ("atom.global.exch.b32 %r2, [%d2], 7;", 7),
        ("atom.global.cas.b32 %r2, [%d2], %r1, 9;", 9),
        ("atom.global.inc.u32 %r2, [%d2], 4;", 32 % 5),
        ("atom.add.u32 %r2, [%d2], 2;", 64),
        (
            "mov.b32 %r2, 0; st.shared.b32 [smem], %r2; bar.sync 0; atom.shared.add.u32 %r2, [smem], 3;"
            "bar.sync 0; ld.shared.b32 %r2, [smem]; st.global.b32 [%d2], %r2;",
            96,
        ),
    ],
)
def test_other_atomics(line: str, want: int) -> None:
    total = np.zeros(1, "u4")
    assert not run(START + line, np.zeros(1, "u4"), total, shared=16)
    assert total[0] == want


def test_sums_of_float32_flush_subnormal_numbers_in_global_memory() -> None:
    total = np.array([1e-40], "f4").view("u4")
    body = START + "mov.b32 %r2, 1; setp.eq.u32 %p1, %r1, 0;"
    assert not run(body + "@%p1 red.global.add.f32 [%d2], %r2;", np.zeros(1, "u4"), total)
    assert total[0] == 0


def test_generic_addresses_find_their_space() -> None:
    x, y = two()
    body = (
        OWN
        + """
    cvta.shared.u64 %d5, smem; mad.wide.u32 %d5, %r1, 4, %d5;
    setp.lt.u32 %p1, %r1, 16; selp.b64 %d6, %d5, %d3, %p1;
    mad.lo.u32 %r3, %r1, 100, 7; st.b32 [%d5], %r3;
    ld.b32 %r4, [%d6]; st.b32 [%d4], %r4;"""
    )
    body = body.replace("cvta.shared.u64 %d5, smem;", "mov.u64 %d7, smem; cvta.shared.u64 %d5, %d7;")
    assert not run(body, x, y, shared=256)
    assert y.tolist() == [100 * n + 7 for n in range(16)] + list(range(16, 32))


@pytest.mark.parametrize("writer", [16, 32])
def test_every_reader_of_one_access_is_remembered(writer: int) -> None:
    """Both warps read one cell at once; then a thread of either writes it, without a barrier."""
    body = f"""
    mov.u32 %r7, 0; st.shared.b32 [smem], %r7; bar.sync 0;
    ld.shared.b32 %r8, [smem];
    setp.eq.u32 %p1, %r1, {writer};
    @%p1 st.shared.b32 [smem], %r8;"""
    faults = run(START + body, *two(), shared=256, threads=64)
    assert any("write after the read of another warp" in f for f in faults), faults
