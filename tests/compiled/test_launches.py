"""Calls as GPUs take them: pointers, strides and sizes for which Triton specialises; orders of execution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import tritoncp
from tests.conftest import COMPILED
from tests.kernels.support.harness import QKV, Results, agree, cotangents, oracle, qkv, run
from tritoncp.executor import compiled_kernels
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.operands import Mods
from tritoncp.masks import Kind

BF16 = torch.bfloat16
TOLERANCE = 0.02  # rounding of bfloat16 results


def off_by_one(x: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def rows_inside(x: Tensor) -> Tensor:
    """Channels apart, rows one element from each other."""
    return x.mT.contiguous().mT


def odd_rows(x: Tensor) -> Tensor:
    """Rows whose distance is no multiple of 16 bytes."""
    return torch.cat([x, x[..., :1]], 3)[..., : x.shape[3]]


def far_heads(x: Tensor) -> Tensor:
    """Strides past int32, of dimensions of one entry."""
    return x.as_strided(x.shape, (1 << 40, (1 << 31) + 16, *x.stride()[2:]))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__.replace("_", " "): f for f in (off_by_one, rows_inside, odd_rows, far_heads)
}
CAUSAL = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 80, 80)


def check(x: QKV, mask: tritoncp.Mask | None) -> None:
    start = cotangents(x)
    agree(run(x, mask, start=start), oracle(x, mask, start=start), TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Triton compiles other code for an address or stride that is no multiple of 16, a stride of 1, and one
    past int32."""
    x = QKV(*map(LAYOUTS[layout], qkv(80, dim=64, dtype=BF16)))
    assert x.q.data_ptr() % 16 == 2 or layout != "off by one"
    if layout == "off by one":
        check(qkv(80, dim=64, dtype=BF16), CAUSAL)  # equal strides, other code
    check(x, CAUSAL)


@pytest.mark.long
def test_a_last_block_that_is_listed_as_full() -> None:
    """Its rows have no interval: only the end of the keys hides the columns after it."""
    number, index = torch.tensor([[[1, 1]]]), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    full, full_index = torch.tensor([[[0, 1]]]), torch.ones(1, 1, 2, 2, dtype=torch.int32)
    lists = (number.int(), index, full.int(), full_index)
    blocks = BlockMask.from_kv_blocks(*lists, mask_mod=lambda b, h, q, kv: kv <= q, seq_lengths=(150, 150))
    mask = tritoncp.from_block_mask(blocks)
    assert Kind.BOUNDED in mask.runs.to_kinds()
    check(qkv(150, heads=1, dim=64, dtype=BF16), mask)


@pytest.mark.long
@pytest.mark.parametrize("queries", [1, 16, 33])
@pytest.mark.parametrize("keys", [1, 32, 47])
def test_sizes(queries: int, keys: int) -> None:
    """Triton compiles sizes of 1 as constants, and multiples of 16 as divisible numbers."""
    mask = tritoncp.create_block_mask(lambda b, h, q, kv: kv <= q + 5, 1, 1, queries, keys, BLOCK_SIZE=16)
    check(qkv(queries, keys, heads=2, kv_heads=1, dim=32, dtype=BF16), mask)


@pytest.mark.long
def test_results_do_not_depend_on_the_order_of_execution() -> None:
    """The seed orders programs, warps and atomics; out, dQ, dK and dV have equal bits."""
    x = qkv(100, heads=2, kv_heads=1, dim=64, dtype=BF16)
    start, results = cotangents(x), []
    documents = tritoncp.and_masks(tritoncp.causal(), tritoncp.document(lengths=[40, 60]))
    mask = tritoncp.create_block_mask(documents, 1, 1, 100, 100, BLOCK_SIZE=64)
    for seed in (None, 1, 2):
        with compiled_kernels(COMPILED, seed=seed):
            results.append(run(x, mask, start=start))
    for result in results[1:]:
        assert all(map(torch.equal, _tensors(result), _tensors(results[0])))


def _tensors(result: Results) -> list[Tensor]:
    return [*result[:3], *result.grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [lambda x: x, rows_inside], ids=["rows apart", "rows inside"])
@pytest.mark.parametrize("channels", [4, 16, 24])
def test_delta_has_one_value_a_row(
    dtype: torch.dtype, layout: Callable[[Tensor], Tensor], channels: int
) -> None:
    """Threads that hold copies of a row's sum store the same bits, else the executor reports a race."""
    out, dout = (layout(torch.randn(1, 2, 70, channels, dtype=dtype)) for _ in range(2))
    dlse, delta = torch.randn(1, 2, 70, dtype=dtype), torch.full((1, 2, 70), float("nan"), dtype=dtype)
    TritonEngine(Mods(), 1.0).delta(out, dout, dlse, delta)()
    want = (out.double() * dout.double()).sum(-1) - dlse.double()
    torch.testing.assert_close(delta.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_more_programs_than_a_dimension_of_a_grid_holds() -> None:
    """65,537 tiles of queries: the second dimension of a CUDA grid ends at 65,535."""
    q, (k, v) = torch.randn(1, 1, 16 * 65_537, 16, dtype=BF16), torch.randn(2, 1, 1, 16, 16, dtype=BF16)
    out = tritoncp.flex_attention(q, k, v, None, tritoncp.full_mask(q.shape[2], 16, block=16))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16])
def test_float64_behind_a_table_of_few_bits(dtype: torch.dtype) -> None:
    """Triton chooses the layout of a product by the narrowest load behind it, and fails for float64."""
    table = (torch.rand(40, 40) < 0.5).to(dtype)
    mask = tritoncp.create_block_mask(lambda b, h, q, kv: table[q, kv] != 0, 1, 1, 40, 40, BLOCK_SIZE=16)
    x = qkv(40, dim=16, dtype=torch.float64)
    start = cotangents(x)
    agree(run(x, mask, start=start), oracle(x, mask, start=start))


@pytest.mark.long
def test_a_score_that_differs_between_heads_alone() -> None:
    x, table = qkv(40, heads=2, kv_heads=1, dim=16), [torch.randn(2)]
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 40, 40, BLOCK_SIZE=16)
    start = cotangents(x)

    def score_of(values: Tensor) -> Callable[..., Tensor]:
        return lambda score, b, h, q, kv: values[h]

    agree(run(x, mask, score_of, table, start=start), oracle(x, mask, score_of, table, start=start))
