"""What torch's flex attention tests expect to be refused, and what tritoncp refuses or takes instead.

``docs/compatibility.md`` has a row for each difference; a test names its row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import tritoncp
from tests.compat.dense import F32, F64, check
from tests.compat.test_torch_calls import attend_with_lse, causal


def qkv(length: int = 32, dim: int = 16, heads: int = 2, dtype: torch.dtype = F32) -> list[Tensor]:
    return [torch.randn(1, heads, length, dim, dtype=F64).to(dtype).requires_grad_() for _ in range(3)]


def blocks(length: int, **options: Any) -> BlockMask:
    return create_block_mask(causal, None, None, length, length, device="cpu", **options)


def grouped(kv_heads: int, **options: Any) -> Any:
    q, k, v = qkv(heads=4)
    return tritoncp.flex_attention(q, k[:, :kv_heads], v[:, :kv_heads], **options)


def other_key(change: Callable[[Tensor], Tensor]) -> Any:
    q, k, v = qkv()
    return tritoncp.flex_attention(q, change(k), v)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mixed dtypes": (lambda: other_key(Tensor.half), "key is torch.float16"),
    "mixed devices": (lambda: other_key(lambda k: k.to("meta")), "on meta; one dtype and one device"),
    "return_lse and return_aux": (
        lambda: tritoncp.flex_attention(*qkv(), return_lse=True, return_aux=AuxRequest(lse=True)),
        "return_lse and return_aux are both given",
    ),
    "longer than the mask": (lambda: tritoncp.flex_attention(*qkv(64), blocks(32)), "the mask is for 32"),
    "longer by one": (lambda: tritoncp.flex_attention(*qkv(32), blocks(31)), "the mask is for 31"),
    "shorter": (lambda: tritoncp.flex_attention(*qkv(16), blocks(32)), "the mask is for 32"),
    "slice of a mask": (
        lambda: tritoncp.flex_attention(*qkv(32), blocks(32)[0]),
        "torch drops a slice's mask_mod",
    ),
    "groups without enable_gqa": (lambda: grouped(2), "pass enable_gqa=True"),
    "heads that do not divide": (lambda: grouped(3, enable_gqa=True), "must be a multiple of key heads"),
    **{
        f"option {name}": (
            lambda name=name: tritoncp.flex_attention(*qkv(), kernel_options={name: 2}),
            "unknown kernel option",
        )
        for name in ("num_consumer_groups", "num_buffers_warp_spec", "FLOAT32_PRECISION")
    },
    "head dim 257": (lambda: tritoncp.flex_attention(*qkv(4, 257)), "1 to 256 is supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
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
    check(functools.partial(attend_with_lse, kernel_options=option), qkv(24))


@pytest.mark.parametrize("dim", [1, 8, 15])
def test_head_dims_below_16_are_taken(dim: int, engine: str) -> None:
    check(attend_with_lse, qkv(24, dim))


def test_an_empty_sequence_gives_an_empty_result(engine: str) -> None:
    assert tritoncp.flex_attention(*qkv(0)).shape == (1, 2, 0, 16)


@pytest.mark.parametrize("size", [96, 48, (16, 96), 7], ids=str)
def test_any_block_size_is_taken(size: int | tuple[int, int], engine: str) -> None:
    mask = blocks(67, BLOCK_SIZE=size)
    check(functools.partial(attend_with_lse, block_mask=mask), qkv(67, heads=1), mask_mod=causal)


def without_q_lists(mask: BlockMask) -> BlockMask:
    mask.q_num_blocks = mask.q_indices = mask.full_q_num_blocks = mask.full_q_indices = None
    return mask


def test_the_backward_pass_needs_no_lists_by_key(engine: str) -> None:
    mask = without_q_lists(blocks(64, BLOCK_SIZE=16))
    check(functools.partial(attend_with_lse, block_mask=mask), qkv(64), mask_mod=causal)


@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
def test_a_long_reduction_names_its_remedy(engine: str) -> None:
    means = torch.randn(64, 256)
    with pytest.raises(Exception, match=r"unroll|fold"):
        tritoncp.flex_attention(*qkv(64), lambda s, b, h, q, kv: s * (means[q] - means[kv]).pow(2).sum(-1))


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

    call = functools.partial(attend_with_lse, score_mod=lambda s, b, h, q, kv: Hide.apply(s, q <= kv))
    check(call, qkv(33), mask_mod=lambda b, h, q, kv: q <= kv)
