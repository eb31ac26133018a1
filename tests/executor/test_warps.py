"""Exchange between lanes, and where registers of a warp hold matrices, as the PTX manual draws them."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.executor.support.ptx import module, run_module

LANES = np.arange(32)
START = "ld.param.b64 %d1, [p0]; ld.param.b64 %d2, [p1]; mov.u32 %r1, %tid.x;\n"


@pytest.mark.parametrize(
    ("line", "source"),
    [
        ("shfl.sync.bfly.b32 %r2|%p1, %r1, 5, 31, -1;", lambda j: j ^ 5),
        ("shfl.sync.down.b32 %r2|%p1, %r1, 3, 31, -1;", lambda j: j + 3),
        ("shfl.sync.up.b32 %r2|%p1, %r1, 3, 0, -1;", lambda j: j - 3),
        ("shfl.sync.idx.b32 %r2|%p1, %r1, 9, 31, -1;", lambda j: 9),
        (
            "shfl.sync.down.b32 %r2|%p1, %r1, 3, 6175, -1;",
            lambda j: j + 3 if j % 8 + 3 < 8 else -1,
        ),  # of eight lanes
    ],
)
def test_shuffles(line: str, source: Callable[[int], int]) -> None:
    body = START + line + "selp.b32 %r3, 1, 0, %p1; mad.wide.u32 %d3, %r1, 8, %d2;\n"
    out = np.zeros((32, 2), "u4")
    assert not run_module(
        module(body + "st.global.v2.b32 [%d3], {%r2, %r3}; ret;", 2), np.zeros(1, "u4"), out
    )
    for j in range(32):
        lane = source(j)
        assert out[j].tolist() == ([lane, 1] if 0 <= lane < 32 else [j, 0])


def test_votes_and_reductions() -> None:
    body = (
        START
        + """
    setp.lt.u32 %p1, %r1, 5;
    vote.sync.ballot.b32 %r2, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, %p1, -1;
    selp.b32 %r3, 1, 0, %p2;
    selp.b32 %r4, 1, 0, %p3;
    redux.sync.add.s32 %r5, %r1, -1;
    mad.wide.u32 %d3, %r1, 16, %d2;
    st.global.v4.b32 [%d3], {%r2, %r3, %r4, %r5};
    ret;"""
    )
    out = np.zeros((32, 4), "u4")
    assert not run_module(module(body, 2), np.zeros(1, "u4"), out)
    assert (out == [31, 1, 0, 496]).all()


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_elect_names_one_lane_which_a_seed_draws(seed: int | None) -> None:
    body = (
        START
        + """
    elect.sync %r2|%p1, -1;
    selp.b32 %r3, 1, 0, %p1;
    mad.wide.u32 %d3, %r1, 8, %d2;
    st.global.v2.b32 [%d3], {%r2, %r3};
    ret;"""
    )
    out = np.zeros((32, 2), "u4")
    assert not run_module(module(body, 2), np.zeros(1, "u4"), out, seed=seed)
    leader = int(out[0, 0])
    assert (out[:, 0] == leader).all()
    assert np.array_equal(out[:, 1], leader == LANES)
    assert seed is not None or leader == 0


def registers(name: str, count: int) -> str:
    return "{" + ", ".join(f"%{name}{n}" for n in range(10, 10 + count)) + "}"


def test_product_of_matrices_with_fragments_of_the_manual() -> None:
    """m16n8k16 of bfloat16: each lane loads its fragments by the manual's rows and columns."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 8, (16, 16)), rng.integers(-8, 8, (16, 8))
    group, member = LANES // 4, LANES % 4
    words = np.zeros((32, 8), "u4")
    for half in range(2):
        for n in range(4):  # registers of A: rows g and g + 8, columns 2 t and 2 t + 8
            rows, columns = group + 8 * (n % 2), 2 * member + 8 * (n // 2) + half
            words[:, n] |= bf16(a[rows, columns]) << (16 * half)
        for n in range(2):
            words[:, 4 + n] |= bf16(b[2 * member + 8 * n + half, group]) << (16 * half)
    body = (
        START
        + """
    mad.wide.u32 %d3, %r1, 32, %d1;
    mad.wide.u32 %d4, %r1, 16, %d2;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d3];
    ld.global.v2.b32 {%r14, %r15}, [%d3+16];
    mov.b32 %r20, 0f3F800000;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r21, %r22, %r23, %r24},
      {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r20, %r20, %r20, %r20};
    st.global.v4.b32 [%d4], {%r21, %r22, %r23, %r24};
    ret;"""
    )
    out = np.zeros((32, 4), "f4")
    assert not run_module(module(body, 2), words, out)
    want = a @ b + 1
    for n in range(4):
        assert np.array_equal(out[:, n], want[group + 8 * (n // 2), 2 * member + n % 2])


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype("f4").view("u4") >> 16


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_return_from_shared_memory(transposed: bool) -> None:
    """stmatrix, then ldmatrix; element (r, c) of matrix j lies in lane 4 r + c / 2."""
    trans = ".trans" if transposed else ""
    body = (
        START
        + f"""
    mad.wide.u32 %d3, %r1, 16, %d1;
    ld.global.v4.b32 {registers("r", 4)}, [%d3];
    mov.b32 %r2, smem;
    mad.lo.u32 %r2, %r1, 16, %r2;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2], {registers("r", 4)};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {registers("r", 4)}, [%r2];
    mad.wide.u32 %d4, %r1, 16, %d2;
    st.global.v4.b32 [%d4], {registers("r", 4)};
    ret;"""
    )
    source = np.arange(256, dtype="u2").reshape(32, 4, 2)  # lane, matrix, half
    out = np.zeros_like(source)
    assert not run_module(module(body, 2, shared=512), source, out)
    matrices = source.transpose(1, 0, 2).reshape(4, 8, 8)
    want = matrices.transpose(0, 2, 1) if transposed else matrices
    assert np.array_equal(out.transpose(1, 0, 2).reshape(4, 8, 8), want)
