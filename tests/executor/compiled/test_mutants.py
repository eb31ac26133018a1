"""Faults planted in compiled kernels: each edit of the PTX that can change a result on a GPU is noticed."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.cases import check
from tests.compiled.test_calls import CALL, ONE_STEP, SPLIT
from tests.conftest import COMPILED
from tritoncp.core.versions import minor_of
from tritoncp.executor import ExecutionFault, compiled_kernels
from tritoncp.executor.driver import ExecutorDriver, LoadedKernel
from tritoncp.executor.memory.shared_memory import BY_THREADS
from tritoncp.executor.program import write_program
from tritoncp.executor.threads import Access
from tritoncp.executor.units.mbarriers import Mbarriers
from tritoncp.kernels.toolchain import fences_async_copies

ARCHS = ("sm_80", "sm_90", "sm_100")


@triton.jit
def matmul(A, B, C, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        a = tl.load(A + m[:, None] * K + o_k[None, :])
        b = tl.load(B + o_k[:, None] * N + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(C + m[:, None] * N + n[None, :], acc.to(C.dtype.element_ty))


@triton.jit
def matmul_of_boxes(A, B, C, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * M
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(A.load([m, k]), B.load([k, 0]), acc)
    C.store([m, 0], acc.to(C.dtype))


@triton.jit
def softmax(X, Y, N, M: tl.constexpr, BLOCK: tl.constexpr):
    """Softmax of columns plus their maxima: reductions across warps."""
    m, n = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, BLOCK)
    x = tl.load(X + n[:, None] * 2 * M + m[None, :], mask=n[:, None] < N, other=-float("inf"))
    top = tl.max(x, 0)[None, :]
    e = tl.exp2(x - top)
    tl.store(Y + m[None, :] * N + n[:, None], e / tl.sum(e, 0)[None, :] + top, mask=n[:, None] < N)


@triton.jit
def gradients(Q, K, V, DO, DQ, DK, LENGTH, B: tl.constexpr):
    """Products of `chunk_bwd_kernel_dqkwg` in flash-linear-attention#640: dS is summed in a loop, and
    multiplied as it is and transposed."""
    i = tl.arange(0, B)
    b_ds, b_dk = tl.zeros([B, B], tl.float32), tl.zeros([B, B], tl.float32)
    for start in range(0, LENGTH, B):
        at = i[:, None] * LENGTH + start + i[None, :]
        b_v, b_do = tl.load(V + at), tl.load(DO + at)
        b_ds += tl.dot(b_do, tl.trans(b_v))
        b_dk += tl.dot(b_v, b_do)
    b_ds = tl.where(i[:, None] >= i[None, :], b_ds, 0.0).to(Q.dtype.element_ty)
    at = i[:, None] * B + i[None, :]
    tl.store(DQ + at, tl.dot(b_ds, tl.load(K + at)))
    tl.store(DK + at, b_dk + tl.dot(tl.trans(b_ds), tl.load(Q + at)))


# Programs with three masked tiles or more and as many full ones, for loops to repeat what they do, and others
# without any tile: queries far behind the last key, and keys far behind the last query
WINDOW = replace(CALL, group=1, mask=("window", 520))
ATTENTION = {
    "forward_kernel": replace(WINDOW, length=1300, kv_length=600),
    "dq_kernel": replace(WINDOW, length=1300, kv_length=600),
    "dkdv_kernel": replace(WINDOW, length=600, kv_length=1000),
}
# The same of tiles of 64 keys, for warps with roles of their own
SPECIALIZED = replace(
    SPLIT, options=SPLIT.options | {"fwd_BLOCK_N": 64}, mask=("window", 400), length=930, kv_length=400
)
SEEDS = None, 1, 2
Run = Callable[[], None]  # launches a kernel; raises AssertionError where its result is wrong


def run_matmul(boxes: bool = False) -> Run:
    m, n, k, step = 128 if COMPILED == "sm_100" else 64, 64, 128, 32
    a, b = torch.randint(-8, 8, (2 * m, k)).half(), torch.randint(-8, 8, (k, n)).half()
    want = a.double() @ b.double()

    def run() -> None:
        c = torch.full((2 * m, n), float("nan"), dtype=torch.float16)
        if boxes:
            pairs = ((a, [m, step]), (b, [step, n]), (c, [m, n]))
            described = (TensorDescriptor.from_tensor(x, box) for x, box in pairs)
            matmul_of_boxes[(2,)](*described, k, m, n, step, num_stages=3)
        else:
            matmul[(2,)](a, b, c, k, m, n, step, num_stages=3)
        assert torch.equal(c.double(), want)

    return run


def run_gradients() -> Run:
    n, length = 64, 192
    q, k = (torch.randint(-2, 3, (n, n)).bfloat16() for _ in range(2))
    v, do = (torch.randint(-1, 2, (n, length)).bfloat16() for _ in range(2))
    ds = (do.double() @ v.double().T).tril()
    parts = zip(v.double().split(n, 1), do.double().split(n, 1))
    want = ds @ k.double(), sum(x @ y for x, y in parts) + ds.T @ q.double()

    def run() -> None:
        dq, dk = torch.full((2, n, n), float("nan"))
        kernel: Any = gradients
        kernel[(1,)](q, k, v, do, dq, dk, length, n, num_stages=3)
        assert torch.equal(dq.double(), want[0]) and torch.equal(dk.double(), want[1])

    return run


def run_softmax() -> Run:
    x = torch.randn(100, 16)
    columns = x.double().T
    want = (columns * math.log(2)).softmax(1) + columns.amax(1, keepdim=True)

    def run() -> None:
        y = torch.full((16, 100), float("nan"))
        softmax[(2,)](x, y, 100, 8, 128)
        assert torch.allclose(y.double(), want, rtol=1e-5)

    return run


KERNELS: dict[str, Callable[[], Run]] = {"matmul": run_matmul, "softmax": run_softmax}
if COMPILED != "sm_80":  # an architecture without TMA
    KERNELS["matmul_of_boxes"] = partial(run_matmul, True)


def add_one(m: re.Match[str]) -> str:
    return f"{m[1]}{int(m[2]) + 1};"


# Pattern of an instruction, and its replacement
EDITS: dict[str, tuple[str, Callable[[re.Match[str]], str]]] = {
    "barrier": (r"\bbar(?:rier)?\.sync\s[^;]*;", lambda m: ""),
    "group of copies": (r"(cp\.async\.wait_group\s+)(\d+);", add_one),
    "group of products": (r"(wgmma\.wait_group\.sync\.aligned\s+)(\d+);", add_one),
    "group of stores": (r"(cp\.async\.bulk\.wait_group(?:\.read)?\s+)(\d+);", add_one),
    "proxy fence": (r"fence\.proxy\.async[^;]*;", lambda m: ""),
    "wgmma.fence": (r"wgmma\.fence[^;]*;", lambda m: ""),
    "mbarrier wait": (r"mbarrier\.try_wait[^;]*;", lambda m: "setp.eq.u32 complete, 0, 0;"),
    "tcgen05 fence": (r"tcgen05\.fence[^;]*;", lambda m: ""),
    "tcgen05 wait": (r"tcgen05\.wait[^;]*;", lambda m: ""),
    "tcgen05 commit": (r"@%p\d+ tcgen05\.commit[^;]*;", lambda m: ""),
    "tcgen05 dealloc": (r"@%p\d+ tcgen05\.dealloc[^;]*;", lambda m: ""),
    "address": (
        r"((?:ld|st|cp\.async\.c.|ldmatrix|stmatrix)\.[\w.:]*(?:shared|global)[^;]*?\[\s*%\w+)\s*(?:\+\s*(\d+))?\s*\]",
        lambda m: f"{m[1]}+{int(m[2] or 0) + 16}]",
    ),
    "predicate": (r"@!?%p\d+ ((?:ld|st|cp|mbarrier|tcgen05)\b[^;]*;)", lambda m: m[1]),
}


# Edits of what orders warps with roles of their own
MBARRIER_EDITS: dict[str, tuple[str, Callable[[re.Match[str]], str]]] = {
    "mbarrier arrival": (r"@%p\d+ mbarrier\.arrive\.shared[^;]*;", lambda m: ""),
    "count of arrivals": (r"(mbarrier\.init[^;]*,\s*)(\d+);", add_one),
    "expected bytes": (
        r"(mbarrier\.arrive\.expect_tx[^;]*,\s*)(\d+);",
        lambda m: f"{m[1]}{int(m[2]) - 16};",
    ),
    "phase": (
        r"(mbarrier\.try_wait\.parity[^;]*,\s*)(%r\d+);",
        lambda m: f"{{ .reg .b32 other; xor.b32 other, {m[2]}, 1; {m[1]}other; }}",
    ),
}


def mutants(ptx: str, edit: str) -> Iterator[str]:
    """Yield the text with each instruction edited that a kind of edit applies to."""
    pattern, new = (EDITS | MBARRIER_EDITS)[edit]
    for m in re.finditer(pattern, ptx):
        yield ptx[: m.start()] + new(m) + ptx[m.end() :]


BARRIERS = "the barriers that remain order the accesses of all warps"
WAITED = "every warp has waited for the same mbarrier"
PRODUCTS = "the only warpgroup has waited for the products that read this memory"
ELSEWHERE = "no access of another warp touches what each warp writes next"
NEWEST = "the newest group lies behind the memory that is written next"
LAST = "nothing follows"
AGAIN = "another wait for the same groups stands before it"
USED_LATER = "the results are used after the next wait only"
FENCED = "another fence covers what was written before the next product"
UNTOUCHED = "no register of these products was accessed since the fence before"
SAME = "lanes that hold the same value store it to the same place"
UNREAD = "the other lanes store where nobody reads"
BOX = "all threads store the same box"
LATER_STORES = "a later tcgen05.wait::st comes before what uses these cells"
LATER_COMMIT = "the wait before or behind is for a later commit, which covers these products too"
OLD_MBARRIER = "it orders an invalidated mbarrier alone, see test_fences_between_an_old_mbarrier_and_a_copy"
PERMIT = "any warp may give up the permit to allocate"
ALWAYS = "the predicate holds for all threads"
UNAWAITED = "nobody waits for this phase: the loop is over, and the mbarrier is invalidated next"
NEW = "the mbarrier is new, and the phase before its first counts as complete"
IMPLIED = "the wait before implies it: of scores, that products of P are over; of P, that scores were read"
BYTES_FIRST = "bytes may come before they are announced: the phase also waits for the announcement"
NEVER = "no warp comes here"
MET = "the warps of all roles have met at a barrier behind the loop"
# Numbers of the edits that cannot change a result, in the order of the text as a release of Triton writes it
SOFTMAX = {"predicate": {ALWAYS: {0}, SAME: {2, 3, 4, 5, 8, 9, 10, 11}, UNREAD: {7, 13}}}
SM_80 = {"barrier": {BARRIERS: {2}, ELSEWHERE: {5}}, "group of copies": {NEWEST: {3}}}
Redundant = dict[tuple[str, str], dict[str, dict[str, set[int]]]]
TRITON_37: Redundant = {
    ("sm_80", "matmul"): {"barrier": {BARRIERS: {0}}, "group of copies": {NEWEST: {1}}},
    ("sm_90", "matmul"): {
        "barrier": {BARRIERS: {0}},
        "group of copies": {NEWEST: {1}},
    },
    ("sm_90", "matmul_of_boxes"): {
        "barrier": {BARRIERS: {0, 1, 2, 3, 4, 7}, WAITED: {5}, LAST: {10}},
        "predicate": {BOX: {15}},
    },
    ("sm_100", "matmul"): {
        "barrier": {BARRIERS: {1, 2, 3, 5, 16}, WAITED: {6}},
        "group of copies": {NEWEST: {2}},
        "predicate": {PERMIT: {1}, ALWAYS: {2}},
    },
    ("sm_100", "matmul_of_boxes"): {
        "barrier": {BARRIERS: {1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 16, 17}, WAITED: {8, 11, 13}},
        "predicate": {PERMIT: {1}, ALWAYS: {2}, BOX: {31}},
    },
    ("sm_100", "forward_kernel"): {
        "barrier": {
            BARRIERS: {2, 4, 7, 9, 14, 16, 19, 22, 24, 29, 31, 40},
            WAITED: {5, 6, 10, 11, 12, 13, 20, 21, 25, 26, 27, 28},
        },
        "proxy fence": {FENCED: {1, 2, 3, 4, 5}},
        "mbarrier wait": {LATER_COMMIT: {6, 15}},
        "tcgen05 wait": {LATER_STORES: {0, 2, 6, 10, 14}},
    },
    ("sm_100", "specialized"): {
        "barrier": {
            BARRIERS: {
                *(4, 7, 9, 11, *range(13, 17), 19, 21, 24, 27, 29, 31, *range(33, 36), 41, *range(43, 46)),
                *(50, *range(52, 55), 73, 76, 78, 86),
            },
            IMPLIED: {10, 30},
            UNAWAITED: {17, 20, 36, 46, 74, 77},
            BYTES_FIRST: {56, 57, 68, 69},
            NEVER: {71, 72},
        },
        "mbarrier arrival": {UNAWAITED: {4, 5, 18, 19}},
        "mbarrier wait": {NEW: {0, 1, 8, 9}, IMPLIED: {5, 13, 28, 35}, MET: {7, 39}},
        "proxy fence": {FENCED: {1}},
    },
    ("sm_100", "dkdv_kernel"): {
        "barrier": {BARRIERS: {2, 3, 32, 48}},
        "proxy fence": {FENCED: {2}, OLD_MBARRIER: {1, 3}},
        "tcgen05 wait": {LATER_STORES: {0}},
    },
    ("sm_100", "dq_kernel"): {
        "barrier": {BARRIERS: {*range(1, 8), *range(9, 14), 15, *range(17, 22), *range(23, 28), 29, 38}},
        "proxy fence": {FENCED: set(range(1, 10))},
        "mbarrier wait": {LATER_COMMIT: {2, 6, 8, 14, 18, 20}},
        "tcgen05 wait": {LATER_STORES: {0}},
    },
    **dict.fromkeys([("sm_80", kernel) for kernel in ATTENTION], SM_80),
    ("sm_90", "forward_kernel"): {
        "barrier": {BARRIERS: {0, 1, 5, 6, 7}, WAITED: {2, 8}, PRODUCTS: {3, 4, 9, 10, 11}},
        "proxy fence": {FENCED: {1}},
    },
    ("sm_90", "dkdv_kernel"): {
        "barrier": {BARRIERS: {0, 1, 4, 5, 6, 7, 10, 11}},
        "group of copies": {NEWEST: {3}},
        "group of products": {USED_LATER: {2}},
        "proxy fence": {FENCED: {1}},
        "wgmma.fence": {UNTOUCHED: {2, 6}},
    },
    ("sm_90", "dq_kernel"): {
        "barrier": {BARRIERS: set(range(12))},
        "proxy fence": {FENCED: {1}},
        "wgmma.fence": {UNTOUCHED: {1, 4}},
    },
    **dict.fromkeys([(a, "softmax") for a in ARCHS], SOFTMAX),
}
# From 3.8 on one lane of those that hold the same value stores it.
ONE_LANE = {"predicate": {ALWAYS: {0}}}
SM_80_COPIES = {AGAIN: {1, 2, 3}, NEWEST: {4}}
TRITON_38: Redundant = {
    ("sm_80", "matmul"): {"barrier": {BARRIERS: {0, 2}}, "group of copies": SM_80_COPIES},
    ("sm_90", "matmul"): {"barrier": {BARRIERS: {0}}, "group of copies": {NEWEST: {1}}},
    ("sm_90", "matmul_of_boxes"): {
        "barrier": {BARRIERS: {*range(10)}, LAST: {12}},
        "predicate": {BOX: {15}},
    },
    ("sm_100", "matmul"): {
        "barrier": {BARRIERS: {*range(2, 11), 19}},
        "group of copies": {NEWEST: {2}},
        "predicate": {PERMIT: {1}, ALWAYS: {2}},
    },
    ("sm_100", "matmul_of_boxes"): {
        "barrier": {BARRIERS: {*range(1, 19), 21, 22}},
        "predicate": {PERMIT: {1}, ALWAYS: {2}, BOX: {31}},
    },
    **dict.fromkeys([(a, "softmax") for a in ARCHS], ONE_LANE),
}
TRITON_39: Redundant = {
    ("sm_80", "matmul"): {"barrier": {BARRIERS: {1}}, "group of copies": SM_80_COPIES},
    ("sm_90", "matmul"): {"group of copies": {NEWEST: {1}}},
    ("sm_90", "matmul_of_boxes"): {
        "barrier": {BARRIERS: {*range(12)}, LAST: {13}},
        "predicate": {BOX: {15}},
    },
    ("sm_100", "matmul"): {
        "barrier": {BARRIERS: {*range(2, 8), 16}},
        "group of copies": {NEWEST: {2}},
        "predicate": {PERMIT: {1}, ALWAYS: {2}},
    },
    ("sm_100", "matmul_of_boxes"): {
        "barrier": {BARRIERS: {*range(1, 19), 20, 21}},
        "predicate": {PERMIT: {1}, ALWAYS: {2}, BOX: {31}},
    },
    **dict.fromkeys([(a, "softmax") for a in ARCHS], ONE_LANE),
}
ANSWERED_BY_RESULTS = "address", "predicate"  # the other mutants have to be reported as faults


@triton.jit
def store_box(C, M: tl.constexpr):
    C.store([tl.program_id(0) // 2 * M, 0], tl.full([M, M], tl.program_id(0), tl.float16))


def test_programs_that_store_one_box_race() -> None:
    c = TensorDescriptor.from_tensor(torch.zeros(64, 32, dtype=torch.float16), [32, 32])
    with compiled_kernels(COMPILED, raise_faults=False) as device:
        store_box[(4,)](c, 32)
    assert any(f.kind.startswith("race") and "on global memory" in f.kind for f in device.faults)


@pytest.mark.parametrize("prepare", [run_matmul, run_gradients])
def test_copies_of_a_loop_are_fenced_before_the_tensor_cores(prepare: Callable[[], Run]) -> None:
    """Triton before 3.7.1 puts the fence before the loop (triton#9610); products behind the loop, transposed
    ones among them, are right."""
    with compiled_kernels(COMPILED, raise_faults=False) as device:
        prepare()()
    assert bool(device.faults) is (COMPILED != "sm_80" and not fences_async_copies())
    assert all("without fence.proxy.async" in fault.kind for fault in device.faults)
    lines = Path(__file__).read_text().splitlines()
    places = {lines[int(fault.source.rsplit(":", 1)[1]) - 1].strip() for fault in device.faults}
    assert all(place.startswith(("acc =", "b_ds +=", "b_dk +=")) for place in places), places


Launches = dict[str, tuple[LoadedKernel, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The last launch of each kernel by its name: the loaded kernel, and the other arguments."""
    last: Launches = {}
    execute = ExecutorDriver.execute

    def record(self: ExecutorDriver, function: LoadedKernel, *rest: Any) -> None:
        last[function.name] = function, rest
        execute(self, function, *rest)

    monkeypatch.setattr(ExecutorDriver, "execute", record)
    return last


def verdict(run: Run, function: LoadedKernel, text: str) -> str:
    """Return how a mutant is noticed, in the usual order of warps and in other orders: by a "fault", a
    "wrong" result, or "nothing"."""
    function.program = write_program(text)
    for seed in SEEDS:
        with compiled_kernels(COMPILED, seed, raise_faults=False) as device:
            try:
                run()
            except ExecutionFault:
                return "fault"
            except AssertionError:
                return "fault" if device.faults else "wrong"
        if device.faults:
            return "fault"
    return "nothing"


def unnoticed(run: Run, function: LoadedKernel, edits: Iterable[str]) -> dict[str, set[int]]:
    """Numbers of the mutants, by edit, that are not noticed."""
    ptx, original, missed = function.ptx, function.program, {}
    for edit in edits:
        noticed = {"fault", "wrong"} if edit in ANSWERED_BY_RESULTS else {"fault"}
        numbers = {
            n for n, text in enumerate(mutants(ptx, edit)) if verdict(run, function, text) not in noticed
        }
        if numbers:
            missed[edit] = numbers
    function.program = original
    return missed


TABLES = {(3, 7): TRITON_37, (3, 8): TRITON_38, (3, 9): TRITON_39}
REDUNDANT = TABLES.get(minor_of(triton.__version__), {})


def with_table(kernels: Iterable[str]) -> list[Any]:
    """List the kernels for parametrize, and skip those without a table for the installed Triton."""
    version = ".".join(map(str, minor_of(triton.__version__)))
    why = f"no table says which edits of what Triton {version} writes change nothing"
    return [
        pytest.param(kernel, marks=pytest.mark.skipif((COMPILED, kernel) not in REDUNDANT, reason=why))
        for kernel in kernels
    ]


def check_mutants(run: Run, kernel: str, function: LoadedKernel, edits: Iterable[str]) -> None:
    expected = {edit: set().union(*parts.values()) for edit, parts in REDUNDANT[COMPILED, kernel].items()}
    assert unnoticed(run, function, edits) == expected


@pytest.mark.long
@pytest.mark.parametrize("kernel", with_table(KERNELS))
@pytest.mark.bar(25)
def test_every_mutant_that_can_change_a_result_is_noticed(kernel: str, launches: Launches) -> None:
    run = KERNELS[kernel]()
    run()
    check_mutants(run, kernel, launches[kernel][0], EDITS)


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", with_table(ATTENTION))
def test_mutants_of_attention(kernel: str, launches: Launches) -> None:
    """Mutants of barriers, waits and fences; wrong addresses and predicates are found by tests of results.
    Only the kernel's launch runs again."""
    check(ATTENTION[kernel])
    function, arguments = launches[kernel]
    edits = [e for e in EDITS if e not in ANSWERED_BY_RESULTS]
    check_mutants(lambda: driver.active.execute(function, *arguments), kernel, function, edits)


ROLE_EDITS = (
    "barrier",
    *MBARRIER_EDITS,
    "mbarrier wait",
    "tcgen05 commit",
    "tcgen05 wait",
    "tcgen05 dealloc",
    "proxy fence",
)


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", with_table(["specialized"]))
@pytest.mark.parametrize("edit", ROLE_EDITS)
def test_mutants_of_warps_with_roles(kernel: str, edit: str, launches: Launches) -> None:
    """Arrivals, waits and phases that order copies, products, softmax and the rescaling of sums."""
    check(SPECIALIZED)
    function, arguments = launches["forward_kernel"]
    expected = set().union(*REDUNDANT[COMPILED, kernel].get(edit, {}).values())
    found = unnoticed(lambda: driver.active.execute(function, *arguments), function, [edit])
    assert found.get(edit, set()) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", with_table(["dkdv_kernel"]))
def test_fences_between_an_old_mbarrier_and_a_copy(
    kernel: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an invalidated mbarrier counts as data that a warp wrote, each fence with the reason OLD_MBARRIER is
    missed, and so are fences in a kernel as Triton writes it: its ProxyFenceInsertion.cpp places none behind
    an InvalBarrierOp. It writes them for dK/dV, since the compiler assumes that buffers overlap."""
    if COMPILED == "sm_80":  # a kernel without an mbarrier
        return
    invalidate = Mbarriers.invalidate

    def write(self: Mbarriers, access: Access, address: Any) -> None:
        invalidate(self, access, address)
        shared = self.ctas.shared
        shared.mark(shared.locate(access, address, 8, "mbarrier"), 8, BY_THREADS)

    check(ATTENTION[kernel])
    function, arguments = launches[kernel]
    monkeypatch.setattr(Mbarriers, "invalidate", write)
    reasons = REDUNDANT[COMPILED, kernel]["proxy fence"]

    def run() -> None:
        driver.active.execute(function, *arguments)

    assert verdict(run, function, function.ptx) == "nothing"
    assert unnoticed(run, function, ["proxy fence"]) == {"proxy fence": reasons[FENCED]}
    with compiled_kernels(COMPILED, raise_faults=False) as device:
        check(ONE_STEP["widest"])
    missed = "TMA load of shared memory written without fence.proxy.async"
    assert {f.kind for f in device.faults} == {missed}


@pytest.mark.long
@pytest.mark.skipif(
    COMPILED != "sm_80" and not fences_async_copies(),
    reason="without a mutant this code has a fault: triton#9610",
)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.bar(22)
def test_removing_all_barriers_together_is_noticed(kernel: str, launches: Launches) -> None:
    run = KERNELS[kernel]()
    run()
    function, _ = launches[kernel]
    assert verdict(run, function, re.sub(EDITS["barrier"][0], "", function.ptx)) == "fault"
