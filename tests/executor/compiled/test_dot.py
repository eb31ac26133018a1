"""`tl.dot` as compiled for an architecture, over types, shapes and layouts, against sums of integers."""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

from tests.conftest import COMPILED
from tritoncp import executor


@triton.jit
def product(A, B, C, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr, P: tl.constexpr,
            T: tl.constexpr):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + n[:, None] * K + k[None, :]).T if T else tl.load(B + k[:, None] * N + n[None, :])
    tl.store(C + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision=P, out_dtype=OUT))


TYPES = {
    "float16": (torch.float16, torch.float32),
    "float16, summed in float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.float32),
    "float32": (torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64),
    "int8": (torch.int8, torch.int32),
    "e5m2": (torch.float8_e5m2, torch.float32),
    "e4m3": (torch.float8_e4m3fn, torch.float32),
}
SUMS = {
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
}
# Instructions that an architecture must use for these types, so that each kind of product is executed
ON_TENSOR_CORES = "bfloat16", "e5m2", "e4m3"
USED = {"sm_80": {"mma.sync"}, "sm_90": {"wgmma.mma_async"}, "sm_100": {"tcgen05.mma"}}


FIRST = "bfloat16", "float32", "int8", "e4m3"  # in every run


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind not in FIRST)) for kind in TYPES]
)
def test_products_are_exact_sums(kind: str, compiled_kernels: Any) -> None:
    architecture = compiled_kernels.architecture
    operand_type, summed = TYPES[kind]
    refused = kind == "e4m3" and architecture == "sm_80"
    used = set()
    for m, n, k, transposed, precision, warps in (
        (64, 64, 64, False, "tf32", 4),
        (64, 32, 32, True, "tf32", 4),
        (128, 16, 64, True, "ieee", 4),
        (16, 16, 32, False, "tf32x3", 4),
        (128, 128, 32, False, "tf32", 8),
    ):
        a = torch.randint(-8, 8, (m, k)).to(operand_type)
        b = torch.randint(-8, 8, (n, k) if transposed else (k, n)).to(operand_type)
        c = torch.empty(m, n, dtype=summed)
        # Triton 3.7 does not compile products of float64 in TF32 for sm_100
        shape = m, n, k, SUMS[summed], "ieee" if kind == "float64" else precision, transposed
        with pytest.raises(CompilationError, match="fp8e4nv not supp") if refused else nullcontext():
            kernel = product[(1,)](a, b, c, *shape, num_warps=warps)
        if refused:
            continue
        want = a.double() @ (b.double().T if transposed else b.double())
        assert torch.equal(c.double(), want), (kind, shape)
        used |= set(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", kernel.asm["ptx"]))
    assert kind not in ON_TENSOR_CORES or refused or used >= USED[architecture]


@pytest.mark.parametrize("shape", [(64, 32, 64), (128, 128, 128)])
def test_flops_of_products_are_counted(shape: tuple[int, int, int]) -> None:
    """This holds also if the instruction does not name its shape, as on sm_100."""
    m, n, k = shape
    a, b, c = (torch.ones(size, dtype=torch.bfloat16) for size in ((m, k), (k, n), (m, n)))
    kernel: Any = product
    with executor.compiled_kernels(COMPILED, count=True) as device:
        kernel[(1,)](a, b, c, m, n, k, tl.float32, "ieee", False)
    counts = device.launches[0].counts
    assert counts is not None and counts.totals()["flops"] == 2 * m * n * k


@triton.jit
def chain(A, B, C, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    c = tl.load(C + at)
    first = tl.dot(tl.load(A + at), tl.load(B + at))
    tl.store(OUT + at, tl.dot(first.to(c.dtype), c))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_product_of_a_product_is_exact(dtype: torch.dtype) -> None:
    """Its left operand may stay in registers."""
    a, b, c = (torch.randint(-1, 2, (64, 64)).to(dtype) for _ in range(3))
    out = torch.empty(64, 64)
    kernel: Any = chain
    kernel[(1,)](a, b, c, out, 64)
    assert torch.equal(out.double(), a.double() @ b.double() @ c.double())
