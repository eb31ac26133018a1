"""Safeguards of conftest.py: exact products of interpreted kernels, another BLAS."""

import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

import tritoncp
from tests.multiprocess import ranks

TESTS = Path(__file__).parents[1]


@triton.jit
def product(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    o_m, o_k, o_n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    b_a, b_b = tl.load(a + o_m * K + o_k[None, :]), tl.load(b + o_k[:, None] * N + o_n)
    tl.store(out + o_m * N + o_n, tl.dot(b_a, b_b, out_dtype=out.dtype.element_ty))


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a @ b by an interpreted kernel, in float32 or float64."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.promote_types(a.dtype, torch.float32))
    product[(1,)](a, b, out, a.shape[0], a.shape[1], b.shape[1])
    return out


@pytest.mark.parametrize(("terms", "dtype"), [(16, torch.float16), (256, torch.float64)])
def test_interpreted_products_are_exact_sums_in_any_tile(terms, dtype):
    """Element (m, n) has the bits that row m and column n alone give it, on every CPU."""
    a, b = (torch.randn(64, terms).to(dtype), torch.randn(terms, 64).to(dtype))
    expected = dot(a, b)
    for m in range(0, 64, 16):
        for n in range(0, 64, 32):
            part = dot(a[m : m + 16].contiguous(), b[:, n : n + 32].contiguous())
            assert torch.equal(expected[m : m + 16, n : n + 32], part)
    order = torch.randperm(terms)
    assert torch.equal(dot(a[:, order].contiguous(), b[order]), expected)
    row, column = a[3].double().tolist(), b[:, 5].double().tolist()
    exact = torch.tensor(
        float(sum(Fraction(x) * Fraction(y) for x, y in zip(row, column))), dtype=expected.dtype
    )
    torch.testing.assert_close(expected[3, 5], exact, rtol=torch.finfo(expected.dtype).eps, atol=0)


def flash_gradients(x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(F.scaled_dot_product_attention(leaf, leaf, leaf), leaf, x)[0]


# Functions of a batch [B, H, S, D] that compute each of its rows by itself
BY_ROW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mm": lambda x: x.reshape(-1, 16) @ x[0, 0, :16],
    "mm.out": lambda x: torch.mm(x.reshape(-1, 16), x[0, 0, :16], out=x.new_zeros(x[..., 0].numel(), 16)),
    "bmm": lambda x: x @ x.mT,
    "baddbmm": lambda x: torch.baddbmm(
        x.flatten(0, 1), x.flatten(0, 1), x[0, 0, :16].expand(len(x) * 2, 16, 16)
    ),
    "addmm_": lambda x: x.reshape(-1, 16).clone().addmm_(x.reshape(-1, 16), x[0, 0, :16]),
    "linear": lambda x: F.linear(x, x[0, 0, :16], x[0, 0, 0]),
    "mv": lambda x: torch.mv(x.reshape(-1, 16), x[0, 0, 0]),
    "einsum": lambda x: torch.einsum("bhsd,bhtd->bhst", x, x),
    "sum": lambda x: x.sum(-1),
    "exp": lambda x: x.exp(),
    "exp_": lambda x: x.clone().exp_(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "flash forward": lambda x: F.scaled_dot_product_attention(x, x, x),
    "flash, causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "flash backward": flash_gradients,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", BY_ROW)
def test_a_row_of_a_batch_has_other_bits_than_by_itself(name, dtype):
    """The same call has the same bits, and all are within rounding of float64."""
    x, function = torch.randn(3, 2, 32, 16, dtype=torch.float64).to(dtype), BY_ROW[name]
    whole, exact = function(x), function(x.double())
    assert torch.equal(whole, function(x.clone()))
    bound = 60 * torch.finfo(dtype).eps  # of sums of 32 terms, and of sums of these
    torch.testing.assert_close(whole.double(), exact, rtol=bound, atol=bound)
    part = function(x[:2])
    assert not torch.equal(whole.flatten()[: part.numel()], part.flatten())


BITS = "import torch; x = torch.arange(1, 325).reshape(18, 18).sqrt(); print((x @ x).double().sum().item())"


def test_ranks_that_are_forked_and_processes_that_are_started_have_it_too():
    x = torch.arange(1, 325).reshape(18, 18).sqrt()
    want = (x @ x).double().sum().item()
    assert ranks.run(2, lambda group: (x @ x).double().sum().item()) == [want, want]
    done = subprocess.run([sys.executable, "-c", BITS], capture_output=True, text=True, check=True)
    assert float(done.stdout) == want
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", BITS], capture_output=True, text=True, check=True, env=bare)
    assert float(done.stdout) != want, "without it the machine's own bits"


CAUSAL = tritoncp.create_block_mask(tritoncp.causal(), None, None, 64, 64, BLOCK_SIZE=16)


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("planted", ["tests/cpu", "tests/ops", "tests/distributed"])
def test_bits_that_are_equal_by_luck_differ(planted):
    """A row of a batch by itself: output of the engine, its gradient by the op, output of ranks."""
    x, mask = [torch.randn(2, 2, 64, 16, requires_grad=True) for _ in range(3)], CAUSAL
    whole, row = (tritoncp.flex_attention(*(t[:rows] for t in x), mask) for rows in (2, 1))
    if planted == "tests/ops":
        whole, row = (torch.autograd.grad(out[:1], x[1], x[0][:1])[0] for out in (whole, row))
    elif planted == "tests/distributed":
        world = tritoncp.simulate(2)
        plan = world.make_plan(mask, schedule="allgather")
        shards = (world.shard(t[:1], plan, dim=2) for t in x)
        row = world.unshard(world.flex_attention(*shards, plan), plan, dim=2)
    torch.testing.assert_close(row[:1], whole[:1], rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(row[:1], whole[:1], rtol=0, atol=0)


PLANTED = """
import torch

def test_a_row_by_itself_has_the_bits_of_the_batch():
    x = torch.randn(2, 64, 64)
    assert torch.equal(x[:1] @ x[:1], (x @ x)[:1])
"""


@pytest.mark.long
def test_an_assertion_planted_in_a_folder_of_tests_fails(tmp_path):
    """The folders beside a copy of conftest.py and of the modules that it imports."""
    for source in [*TESTS.glob("*.py"), *TESTS.glob("another_blas/*.py")]:
        target = tmp_path / "tests" / source.relative_to(TESTS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text())
    for folder in ("cpu", "ops", "distributed"):
        assert not (TESTS / folder / "conftest.py").exists()
        (tmp_path / "tests" / folder).mkdir()
        (tmp_path / "tests" / folder / f"test_planted_{folder}.py").write_text(PLANTED)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    folders = [f"tests/{folder}" for folder in ("cpu", "ops", "distributed")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *folders],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "3 failed" in done.stdout, done.stdout + done.stderr
