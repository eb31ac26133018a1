"""Cases of torch's flex attention tests beside the table: layouts, results on request, several calls, paged
keys, tensor subclasses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils import _pytree as pytree

import tritoncp
from tests.compat.dense import F16, F32, F64, Answer, agree, answer, attend, check, exact
from tests.compat.torch_mods import BUILTIN, MASKS, Dims, alibi, causal_score, normal, relative_score

ON_ENGINES = [*(("cpu", name) for name in BUILTIN), ("kernels", "squared"), ("kernels", "relative causal")]
pytestmark = pytest.mark.usefixtures("cpu_engine")  # unless a test asks for "engine"


def tensors(dims: Dims, dtype: torch.dtype = F32) -> list[Tensor]:
    return [torch.randn(shape, dtype=F64).to(dtype).requires_grad_() for shape in dims.shapes()]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


attend_with_lse = functools.partial(tritoncp.flex_attention, return_lse=True)


# -- layouts --------------------------------------------------------------------------------------------


def laid_out(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype = F32
) -> Tensor:
    size = offset + 1 + sum(stride * (n - 1) for stride, n in zip(strides, shape))
    return torch.randn(size, dtype=F64).to(dtype).as_strided(shape, strides, offset)


B, H, S, D = 2, 2, 32, 16
STRIDES = {
    "offset": ((H * S * D, S * D, D, 1), 97),
    "transposed": ((H * D, D, B * H * D, 1), 49),
    "heads after rows": ((H * S * D, D, H * D, 1), 0),
    "padded rows": ((S * (D + 1), B * S * (D + 1), D + 1, 1), 29),
}
KEYS = [("offset", "transposed"), ("heads after rows", "padded rows"), ("padded rows", "offset")]
LAYOUTS = [*product(list(STRIDES)[:2], KEYS, list(STRIDES)[:3])]
BOTH = [*(("cpu", *layouts) for layouts in LAYOUTS), *(("kernels", *layouts) for layouts in LAYOUTS[::9])]


@pytest.mark.parametrize(
    ("engine", "q_layout", "kv_layout", "grad_layout"), BOTH, indirect=["engine"], ids=str
)
def test_strided_inputs(engine: str, q_layout: str, kv_layout: tuple[str, str], grad_layout: str) -> None:
    q_shape, kv_shape = (B, H, S // 2, D), (B, H, S, D)
    q = laid_out(q_shape, *STRIDES[q_layout])
    k, v = (laid_out(kv_shape, *STRIDES[layout]) for layout in kv_layout)
    x = [t.requires_grad_() for t in (q, k, v)]
    start = [laid_out(q_shape, *STRIDES[grad_layout]), torch.randn(q_shape[:3])]
    out, lse = tritoncp.flex_attention(*x, alibi(8), return_lse=True)
    agree(answer(out, lse, x, start), exact(x, lambda: alibi(8), [], None, start), F32)


@pytest.mark.parametrize("length", [16, 33])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_columns_before_rows(dtype: torch.dtype, length: int, engine: str) -> None:
    x = [t.detach().mT.contiguous().mT.requires_grad_() for t in tensors(Dims(2, 2, length), dtype)]
    assert all(t.stride(-1) != 1 for t in x)
    check(attend_with_lse, x)


def test_gradients_reach_tensors_through_slices(engine: str) -> None:
    q, k, v = tensors(Dims(1, 2, 64))
    out, lse = attend_with_lse(q, k[:, :, :-16], v[:, :, :-16])
    start = [torch.randn_like(out), torch.randn_like(lse)]
    exact_q, exact_k, exact_v = (t.detach().to(F64).requires_grad_() for t in (q, k, v))
    want = attend(exact_q, exact_k[:, :, :-16], exact_v[:, :, :-16])
    agree(answer(out, lse, [q, k, v], start), answer(*want, [exact_q, exact_k, exact_v], start), F32)


# -- results on request ---------------------------------------------------------------------------------


def test_log_sums_of_two_masks_merge_into_the_whole(engine: str) -> None:
    """Window and remainder, weighted by their lse, make causal attention: gradients flow through both lse."""
    x, dims = tensors(Dims(1, 2, 33)), Dims(1, 2, 33)

    def merged(*x: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for name in ("causal and window", "causal beyond a window"):
            mask = tritoncp.create_block_mask(MASKS[name](dims), None, None, 33, 33, BLOCK_SIZE=16)
            parts.append(tritoncp.flex_attention(*x, mask, return_lse=True))
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        return sum(out * torch.exp(own - lse)[..., None] for out, own in parts), lse

    check(merged, x, mask_mod=causal)


def test_only_the_bias_needs_gradients(engine: str) -> None:
    q, k, v = (t.detach() for t in tensors(Dims(2, 2, 37)))
    table = normal(74).to(F32).requires_grad_()

    def bind(t: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, i, j: s + t[torch.abs(i - j)]

    out, lse = attend_with_lse(q, k, v, bind(table))
    start = [torch.randn_like(out), torch.randn_like(lse)]
    want = exact([q, k, v], bind, [table], None, start)
    agree(answer(out, lse, [table], start), want._replace(grads=want.grads[3:]), F32)


# -- several calls --------------------------------------------------------------------------------------


def chain(x: list[Tensor], calls: int, attention: Callable[..., Tensor]) -> Tensor:
    q, k, v = x
    for i in range(calls):
        q = attention(q, k, v, (relative_score, causal_score)[i % 2])
    return q


@pytest.mark.parametrize("calls", [2, 3])
def test_multiple_score_mod_calls(calls: int, engine: str) -> None:
    x = tensors(Dims(1, 2, 48), F64)
    out = chain(x, calls, tritoncp.flex_attention)
    want = chain(x, calls, lambda q, k, v, score: attend(q, k, v, score)[0])
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    start = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, x, start), torch.autograd.grad(want, x, start), rtol=1e-8, atol=1e-8
    )


# -- paged keys -----------------------------------------------------------------------------------------

PAGE = 16


def paged(k: Tensor, v: Tensor, mask: BlockMask, score: Any) -> tuple[Tensor, Tensor, BlockMask, Any]:
    """torch's page table: keys and values scattered over pages of one cache, and the mods that read it."""
    rows, heads, length, dim = k.shape
    pages = PagedAttention(rows * (length // PAGE) + 3, PAGE, rows, device="cpu")
    for share in (4, 2, 1):  # pages of the rows lie between each other's
        for row in range(rows):
            pages.reserve(torch.tensor(row), torch.tensor(length // share))
    caches = [
        torch.zeros(1, heads, (rows * (length // PAGE) + 3) * PAGE, dim, dtype=k.dtype) for _ in range(2)
    ]
    at = torch.arange(length, dtype=torch.int32).expand(rows, length)
    pages.assign(torch.arange(rows, dtype=torch.int32), at, k, v, *caches)
    lengths = torch.full((rows,), length)
    converted = pages.convert_logical_block_mask(mask, kv_len=lengths)
    return *caches, converted, pages.get_score_mod(score, kv_len=lengths)


@pytest.mark.parametrize(("engine", "name"), ON_ENGINES, indirect=["engine"])
@pytest.mark.parametrize("mask_name", ["causal", "noop"])
def test_paged_builtin_score_mods(mask_name: str, engine: str, name: str) -> None:
    dims = Dims(2, 2, 32, 16)
    q, k, v = (t.detach() for t in tensors(dims))
    mod = MASKS[mask_name](dims)
    mask = create_block_mask(mod, 2, 1, 32, 32, device="cpu", BLOCK_SIZE=PAGE)
    k_cache, v_cache, converted, score = paged(k, v, mask, BUILTIN[name].bind())
    out, lse = tritoncp.flex_attention(q, k_cache, v_cache, score, converted, return_lse=True)
    agree(Answer(out, lse), exact([q, k, v], BUILTIN[name].bind, [], mod, None), F32)


# -- tensor subclasses and caches -----------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A tensor subclass that answers every op on its inner tensor and has no `as_strided`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.as_strided.default
        args, kwargs = pytree.tree_map_only(Wrapped, lambda x: x.inner, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, Wrapped, func(*args, **kwargs))


def test_tensor_subclass_dispatch_order(engine: str) -> None:
    x = [t.detach() for t in tensors(Dims(2, 1, 32))]
    results = tritoncp.flex_attention(*map(Wrapped, x), return_lse=True)
    for got, want in zip(results, tritoncp.flex_attention(*x, return_lse=True)):
        assert isinstance(got, Wrapped) and torch.equal(got.inner, want)


def test_one_query_against_a_cache_at_an_offset(engine: str) -> None:
    """A row of blocks of a causal mask, with a mask_mod that counts from the position of the query."""
    rows, heads, length, position = 3, 2, 64, 37
    q, k, v = tensors(Dims(rows, heads, 1, kv=length))
    mask = create_block_mask(causal, rows, None, length, length, device="cpu", BLOCK_SIZE=16)
    part, offset = mask[:, :, position // 16], torch.tensor(position)
    part.mask_mod = lambda b, h, i, j: causal(b, h, i + offset, j)
    part.seq_lengths = (1, length)
    out = tritoncp.flex_attention(q, k, v, block_mask=part)
    want, _ = attend(*(x.to(F64) for x in (q, k[:, :, : position + 1], v[:, :, : position + 1])))
    torch.testing.assert_close(out.to(F64), want, rtol=1e-5, atol=1e-5)


def test_one_key_and_no_key(engine: str) -> None:
    q, k, v = tensors(Dims(1, 1, 5, kv=1))
    torch.testing.assert_close(tritoncp.flex_attention(q, k, v), v.expand(1, 1, 5, 16))
    out, lse = tritoncp.flex_attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())
