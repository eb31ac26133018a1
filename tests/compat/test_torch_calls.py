"""Cases of torch's flex attention tests beside the table: results on request, paged keys, tensor subclasses,
masks and mods of unusual origin, compiled calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.utils import _pytree as pytree

import tritoncp
from tests.cases import Case, agree, answers, expected, named
from tests.cases import check as check_case
from tests.cases import tensors as tensors_of
from tests.compat import torch_mods
from tests.kernels.support.harness import F64, QKV, close, cotangents, oracle, qkv
from tests.masks.random_masks import assert_same_lists
from tests.zoo import MASKS, SCORES, Sizes
from tritoncp import sliding_window
from tritoncp.reference.dense import dense_attention

Mod = Callable[..., Tensor]
BUILTIN: dict[str, Mod] = {  # score_mods that torch repeats over many calls
    "identity": lambda s, b, h, q, kv: s,
    "squared": lambda s, b, h, q, kv: s * s,
    "causal": lambda s, b, h, q, kv: torch.where(q >= kv, s, -torch.inf),
    "relative": lambda s, b, h, q, kv: s + (q - kv),
    "alibi": lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-(h + 1.0)),
}
ON_ENGINES = [*(("cpu", name) for name in BUILTIN), ("kernels", "squared"), ("kernels", "relative")]
pytestmark = pytest.mark.usefixtures("cpu_engine")  # unless a test asks for "engine"


def tensors(*lengths: int, **sizes: Any) -> QKV:
    return QKV(*(t.requires_grad_() for t in qkv(*lengths, **sizes)))


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


attend_with_lse = functools.partial(tritoncp.flex_attention, return_lse=True)


def visible_pairs(mask_mod: Mod | None, x: QKV) -> Tensor | None:
    """Evaluate a mask_mod at every pair of q and k as torch does."""
    return mask_mod and create_mask(mask_mod, *x.q.shape[:3], x.k.shape[2], device="cpu")


def check(call: Callable[..., tuple[Tensor, Tensor]], x: QKV, mask_mod: Mod, score: Any = None) -> None:
    """Assert that ``call`` of q, k and v returns (out, lse) of dense attention, and that gradients agree."""
    start = cotangents(x)
    want = oracle(x, visible_pairs(mask_mod, x), score and (lambda: score), start=start)
    out, lse = call(*x)
    grads = torch.autograd.grad([out, lse], x, start)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), (*want[:2], *want.grads)):
        close(a.detach(), b, name)


# -- results on request ---------------------------------------------------------------------------------


def test_log_sums_of_two_masks_merge_into_the_whole(engine: str) -> None:
    """Window and remainder, weighted by their lse, make causal attention: gradients flow through both lse."""

    def merged(*x: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for mod in (sliding_window(8), lambda b, h, q, kv: q - kv > 8):
            mask = tritoncp.create_block_mask(mod, None, None, 33, 33, BLOCK_SIZE=16)
            parts.append(tritoncp.flex_attention(*x, mask, return_lse=True))
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        return sum(out * torch.exp(own - lse)[..., None] for out, own in parts), lse

    check(merged, tensors(33, heads=2), causal)


# -- paged keys -----------------------------------------------------------------------------------------

PAGE = 16
PAGED: dict[str, Mod] = {"causal": causal, "noop": lambda b, h, q, kv: b.new_ones(()).bool()}


def paged(k: Tensor, v: Tensor, mask: BlockMask, score: Any) -> tuple[Tensor, Tensor, BlockMask, Any]:
    """torch's page table: keys and values scattered over pages of one cache, and the mods that read it."""
    rows, heads, length, dim = k.shape
    pages = PagedAttention(rows * (length // PAGE) + 3, PAGE, rows, device="cpu")
    for share in (4, 2, 1):  # pages of the rows are interleaved
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


@pytest.mark.sample(3)
@pytest.mark.parametrize(("engine", "name"), ON_ENGINES, indirect=["engine"])
@pytest.mark.parametrize("mask_name", PAGED)
def test_paged_builtin_score_mods(mask_name: str, engine: str, name: str) -> None:
    q, k, v = x = qkv(32, batch=2, heads=2)
    mod, score_mod = PAGED[mask_name], BUILTIN[name]
    mask = create_block_mask(mod, 2, 1, 32, 32, device="cpu", BLOCK_SIZE=PAGE)
    k_cache, v_cache, converted, score = paged(k, v, mask, score_mod)
    out, lse = tritoncp.flex_attention(q, k_cache, v_cache, score, converted, return_lse=True)
    want = oracle(x, visible_pairs(mod, x), lambda: score_mod, start=None)
    close(out, want.out, "out")
    close(lse, want.lse, "lse")


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
    x = qkv(32, batch=2)
    results = tritoncp.flex_attention(*map(Wrapped, x), return_lse=True)
    for got, want in zip(results, tritoncp.flex_attention(*x, return_lse=True)):
        assert isinstance(got, Wrapped) and torch.equal(got.inner, want)


def test_one_query_against_a_cache_at_an_offset(engine: str) -> None:
    """A row of blocks of a causal mask, with a mask_mod that counts from the position of the query."""
    rows, heads, length, position = 3, 2, 64, 37
    q, k, v = tensors(1, length, batch=rows, heads=heads)
    mask = create_block_mask(causal, rows, None, length, length, device="cpu", BLOCK_SIZE=16)
    part, offset = mask[:, :, position // 16], torch.tensor(position)
    part.mask_mod = lambda b, h, i, j: causal(b, h, i + offset, j)
    part.seq_lengths = (1, length)
    out = tritoncp.flex_attention(q, k, v, block_mask=part)
    want = dense_attention(*(x.to(F64) for x in (q, k[:, :, : position + 1], v[:, :, : position + 1])))
    close(out.detach(), want.out, "out")


# -- masks and mods of unusual origin -------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(("length", "has_lists_by_key"), [(64, False), (70, True), (100, True)])
def test_a_cropped_mask_and_one_without_lists_by_key_are_taken(
    length: int, has_lists_by_key: bool, engine: str
) -> None:
    whole = create_block_mask(causal, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    mask = whole._adjust(length, length)
    if not has_lists_by_key:
        mask.q_num_blocks = mask.q_indices = mask.full_q_num_blocks = mask.full_q_indices = None
    check(functools.partial(attend_with_lse, block_mask=mask), tensors(length), causal)


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
    check(call, tensors(33, heads=2), lambda b, h, q, kv: q <= kv)


# -- compiled calls: graphs hold the same op for both engines --------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "case",
    [*(Case((name, 5)) for name in MASKS), *(Case(score=name) for name in SCORES if name != "none")],
    ids=lambda case: f"{case.mask[0]}-{case.score}",
)
def test_mods_of_the_zoo_compile_without_a_graph_break(case: Case) -> None:
    """Masks and score_mods of attention-gym's kinds, among others, at every batch row and head."""
    check_case(replace(case, batch=2, own_lists=(True, True), compiled=True))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_named_tuple_in_a_closure_keeps_its_names() -> None:
    """The mask_mod's cell arrives in the graph as a plain tuple: AttributeError where it is called."""
    sizes = Sizes(1, 2, 32, 32)

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv <= sizes.q // 4)

    mask = create_block_mask(mod, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    call = functools.partial(attend_with_lse, block_mask=mask)
    check(torch.compile(call, fullgraph=True, backend="eager"), tensors(32, heads=2), mod)


# -- the table of mods: blocks and answers of torch; tests/test_fuzz.py has the answers of both engines ---


@pytest.mark.sample(14)
@pytest.mark.parametrize("size", [32, 128, (64, 32)], ids=str)
@pytest.mark.parametrize("name", torch_mods.MASKS)
def test_masks_have_torchs_blocks(name: str, size: int | tuple[int, int]) -> None:
    mod = torch_mods.MASKS[name](Sizes(2, 2, 200, 230), 0).mod
    own, torchs = (
        create(mod, 2, 2, 200, 230, device="cpu", BLOCK_SIZE=size)
        for create in (tritoncp.create_block_mask, torch_flex.create_block_mask)
    )
    assert_same_lists(own.to_block_mask(), torchs)


def call_torch(case: Case, q: Tensor, k: Tensor, v: Tensor, learned: Any = None) -> list[Tensor]:
    mask = torch_flex.create_block_mask(case.rule.mod, *case.sizes, device="cpu", BLOCK_SIZE=case.block)
    aux, score = torch_flex.AuxRequest(lse=True), case.score_mod(learned)
    out, more = torch_flex.flex_attention(q, k, v, score, mask, enable_gqa=True, return_aux=aux)
    return [out, more.lse, torch.zeros_like(more.lse)]  # torch has no max_scores on CPU


CASES = [
    Case((mask, 0), score, batch=2, heads=2, group=2, loss="forward")
    for mask, score in zip(cycle(torch_mods.MASKS), torch_mods.SCORES)
]


@pytest.mark.sample(14)
@pytest.mark.parametrize("case", named(CASES))
@pytest.mark.usefixtures("eager_flex")
def test_torch_gives_the_float64_answer(case: Case) -> None:
    """torch's eager call in float64: the table means the same in torch as here."""
    got, want = answers(case, tensors_of(case), call_torch), expected(case)
    agree(case, got | {"max_scores": want["max_scores"]}, want)
