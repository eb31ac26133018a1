"""What torch's flex attention tests expect to be refused, and what tritoncp refuses or takes instead.

``docs/compatibility.md`` has a row for each difference; a test names its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import tritoncp
from tests.compat.dense import F16, F32, F64, Answer, agree, answer, attend, exact


def qkv(length: int = 32, dim: int = 16, heads: int = 2, dtype: torch.dtype = F32) -> list[Tensor]:
    return [torch.randn(1, heads, length, dim, dtype=F64).to(dtype).requires_grad_() for _ in range(3)]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def blocks(length: int, **options: Any) -> BlockMask:
    return create_block_mask(causal, None, None, length, length, device="cpu", **options)


def mixed_dtypes() -> Any:
    q, k, v = qkv()
    return tritoncp.flex_attention(q, k.half(), v.half())


def mixed_devices() -> Any:
    q, k, v = qkv()
    return tritoncp.flex_attention(q, k.to("meta"), v)


def heads_without_gqa() -> Any:
    q, k, v = qkv(heads=4)
    return tritoncp.flex_attention(q, k[:, :2], v[:, :2])


def heads_that_do_not_divide() -> Any:
    q, k, v = qkv(heads=4)
    return tritoncp.flex_attention(q, k[:, :3], v[:, :3], enable_gqa=True)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "mixed_dtypes_fails": (mixed_dtypes, ValueError, "key is torch.float16"),
    "mixed_device_error_message": (mixed_devices, ValueError, "on meta; one dtype and one device"),
    "return_aux_deprecation_warnings": (
        lambda: tritoncp.flex_attention(*qkv(), return_lse=True, return_aux=AuxRequest(lse=True)),
        ValueError,
        "return_lse and return_aux are both given",
    ),
    "block_mask_vs_sequence_lengths, longer": (
        lambda: tritoncp.flex_attention(*qkv(64), blocks(32)),
        ValueError,
        "the mask is for 32",
    ),
    "block_mask_vs_sequence_lengths, by one": (
        lambda: tritoncp.flex_attention(*qkv(32), blocks(31)),
        ValueError,
        "the mask is for 31",
    ),
    "block_mask_vs_sequence_lengths, shorter": (
        lambda: tritoncp.flex_attention(*qkv(16), blocks(32)),
        ValueError,
        "the mask is for 32",
    ),
    "getitem, used in a call": (
        lambda: tritoncp.flex_attention(*qkv(32), blocks(32)[0]),
        ValueError,
        "torch drops a slice's mask_mod",
    ),
    "GQA, without enable_gqa": (heads_without_gqa, ValueError, "pass enable_gqa=True"),
    "GQA, heads that do not divide": (
        heads_that_do_not_divide,
        ValueError,
        "must be a multiple of key heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_lengths_are_compared_in_a_graph_too(compiled: bool) -> None:
    def layer(*x: Tensor) -> Tensor:
        return tritoncp.flex_attention(*x, mask)

    mask, call = blocks(32), torch.compile(layer, backend="eager") if compiled else layer
    assert call(*qkv(32)).shape == (1, 2, 32, 16)
    with pytest.raises(Exception, match="the mask is for 32"):
        call(*qkv(48))
    torch._dynamo.reset()


# -- differences: docs/compatibility.md names each ------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [{"num_consumer_groups": 2}, {"num_buffers_warp_spec": 3}, {"FLOAT32_PRECISION": "'ieee'"}],
    ids=str,
)
def test_kernel_options_of_torch_that_name_its_template_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unknown kernel option"):
        tritoncp.flex_attention(*qkv(), kernel_options=option)


@pytest.mark.parametrize(
    "option",
    [
        {"BLOCK_M": 16},
        {"BLOCK_M": 32, "BLOCK_N": 32},
        {"FORCE_USE_FLEX_ATTENTION": True},
        {"FORCE_USE_FLEX_ATTENTION": False},
        {"USE_TMA": True},
        {"USE_TMA": False},
        {"PRESCALE_QK": True},
        {"ROWS_GUARANTEED_SAFE": True},
        {"WRITE_DQ": True},
        {"BLOCKS_ARE_CONTIGUOUS": True},
        {"num_warps": 4, "num_stages": 2},
        {"fwd_BLOCK_M": 16, "bwd_BLOCK_N1": 16},
        {"OUTPUT_LOGSUMEXP": True},
    ],
    ids=str,
)
def test_other_kernel_options_of_torch_are_taken(option: dict[str, Any], engine: str) -> None:
    x = qkv(24)
    out, lse = tritoncp.flex_attention(*x, kernel_options=option, return_lse=True)
    agree(Answer(out, lse), exact(x, None, [], None, None), F32)


@pytest.mark.parametrize("dim", [257, 512])
def test_head_dims_beyond_256_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="1 to 256 is supported"):
        tritoncp.flex_attention(*qkv(4, dim))


@pytest.mark.parametrize("dim", [1, 8, 15])
def test_head_dims_below_16_are_taken(dim: int, engine: str) -> None:
    x = qkv(24, dim)
    out, lse = tritoncp.flex_attention(*x, return_lse=True)
    agree(Answer(out, lse), exact(x, None, [], None, None), F32)


def test_an_empty_sequence_gives_an_empty_result(engine: str) -> None:
    assert tritoncp.flex_attention(*qkv(0)).shape == (1, 2, 0, 16)


@pytest.mark.parametrize("size", [96, 48, (16, 96), 7], ids=str)
def test_any_block_size_is_taken(size: int | tuple[int, int], engine: str) -> None:
    x = qkv(67, heads=1)
    out, lse = tritoncp.flex_attention(*x, blocks(67, BLOCK_SIZE=size), return_lse=True)
    start = [torch.randn_like(out), torch.randn_like(lse)]
    agree(answer(out, lse, x, start), exact(x, None, [], causal, start), F32)


def without_q_lists(mask: BlockMask) -> BlockMask:
    mask.q_num_blocks = mask.q_indices = mask.full_q_num_blocks = mask.full_q_indices = None
    return mask


NO_Q_LISTS = {
    "no_q_info": lambda: (without_q_lists(blocks(64, BLOCK_SIZE=16)), causal, 64),
    "backward_error_with_none_q_indices": lambda: (
        BlockMask.from_kv_blocks(
            torch.tensor([[[2]]], dtype=torch.int32),
            torch.tensor([[[[0, 2, 0]]]], dtype=torch.int32),
            BLOCK_SIZE=16,
            compute_q_blocks=False,
        ),
        lambda b, h, q, kv: (kv // 16) != 1,
        16,
    ),
}


@pytest.mark.parametrize("name", NO_Q_LISTS)
def test_the_backward_pass_needs_no_lists_by_key(name: str, engine: str) -> None:
    mask, mod, rows = NO_Q_LISTS[name]()
    q, k, v = qkv(mask.seq_lengths[1])
    x = [q[:, :, :rows].detach().requires_grad_(), k, v]
    out, lse = tritoncp.flex_attention(*x, mask, return_lse=True)
    start = [torch.randn_like(out), torch.randn_like(lse)]
    agree(answer(out, lse, x, start), exact(x, None, [], mod, start), F32)


def test_an_autograd_function_is_part_of_a_score_mod(engine: str) -> None:
    class Hide(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(score: Tensor, visible: Tensor) -> Tensor:
            return torch.where(visible, score, -torch.inf)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_non_differentiable(inputs[1])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    x = qkv(33)
    out = tritoncp.flex_attention(*x, lambda s, b, h, q, kv: Hide.apply(s, q <= kv))
    want, _ = attend(*(t.to(F64) for t in x), mask_mod=lambda b, h, q, kv: q <= kv)
    torch.testing.assert_close(out.to(F64), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_lse_of_a_compiled_call_on_the_cpu(dtype: torch.dtype) -> None:
    x = qkv(24, dtype=dtype)
    call = torch.compile(
        lambda *x: tritoncp.flex_attention(*x, return_lse=True), fullgraph=True, backend="eager"
    )
    out, lse = call(*x)
    start = [torch.randn_like(out), torch.randn_like(lse)]
    agree(answer(out, lse, x, start), exact(x, None, [], None, start), dtype)
    torch._dynamo.reset()
