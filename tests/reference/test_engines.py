"""Plans and schedules on the CPU engine and on the dense engine in float64: every world size has the oracle's
results."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.conftest import dense_engine
from tests.kernels.support.harness import (
    F32,
    F64,
    Results,
    agree,
    close,
    cotangents,
    oracle,
    over_ranks,
    qkv,
    run,
)
from tritoncp.kernels.launch import Launch
from tritoncp.masks.closed_forms import causal, document, prefix_lm, sliding_window
from tritoncp.masks.mask import Mask, create_block_mask, full_mask
from tritoncp.masks.mask_mod import and_masks, not_
from tritoncp.ops import engine_factory
from tritoncp.planning.build import build
from tritoncp.planning.plan import Plan

LAUNCH = Launch.__call__
WORLDS = [1, 2, 3, 4]
EXACT = 1e-12  # of the largest value; rounding of float64 over a few hundred terms


@pytest.fixture(autouse=True, params=["cpu", pytest.param("dense", marks=pytest.mark.long)])
def plain_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an engine of plain torch, as without Triton's interpreter; a kernel launch is an error."""
    monkeypatch.setattr(engine_factory, "uses_triton", lambda device: False)
    if request.param == "dense":
        monkeypatch.setattr(engine_factory, "CpuEngine", dense_engine)
    monkeypatch.setattr(Launch, "__call__", lambda launch: pytest.fail("a kernel ran"))


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use interpreted kernels."""
    monkeypatch.setattr(engine_factory, "uses_triton", lambda device: True)
    monkeypatch.setattr(Launch, "__call__", LAUNCH)


def mask_of(mod: Callable[..., Tensor], q: int, kv: int | None = None, B: int = 1, H: int = 1,
            block: int | tuple[int, int] = 8) -> Mask:  # fmt: skip
    return create_block_mask(mod, B, H, q, q if kv is None else kv, BLOCK_SIZE=block)


IDS = torch.tensor([[0] * 13 + [1] * 40, [0] * 30 + [1] * 23])
BITS = torch.rand(2, 4, 53, 53, generator=torch.Generator().manual_seed(0)) < 0.3
MASKS: dict[str, Mask] = {
    "causal": mask_of(causal(), 53),
    "window": mask_of(sliding_window(9, 4), 53),
    "documents": mask_of(and_masks(causal(), document(lengths=[13, 40])), 53),
    "prefix": mask_of(prefix_lm(11), 53),
    "by batch row": mask_of(and_masks(causal(), document(ids=IDS)), 53, B=2),
    "bits": mask_of(lambda b, h, q, kv: BITS[b, h, q, kv], 53, B=2, H=4),
    "bits read past the lists": mask_of(lambda b, h, q, kv: (q >= kv) & ((q + h) % 3 != b), 53),
    "full": full_mask(53, 53, block=8),
    "empty rows": mask_of(not_(causal()), 53),
    "other blocks for keys": mask_of(causal(), 53, block=(8, 12)),
    "smaller blocks for keys": mask_of(causal(), 53, block=(16, 4)),
    "more keys": mask_of(causal(), 21, 50),
    "more queries": mask_of(sliding_window(20), 50, 21),
}


def plans(mask: Mask, world_size: int) -> list[Plan]:
    return [build(mask, world_size, balancer=name) for name in ("ptrr", "head_tail", "contiguous", None)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", MASKS)
def test_any_mask_on_any_world_under_any_balancer(name: str, world_size: int) -> None:
    mask = MASKS[name]
    x = qkv(mask.q_len, mask.kv_len, batch=2, heads=4, kv_heads=2, dim=4, v_dim=6, dtype=F64)
    start = cotangents(x)
    want = oracle(x, mask, start=start)
    for plan in plans(mask, world_size):
        agree(over_ranks(x, plan, start=start), want, EXACT)


SCORES: dict[str, tuple[Callable, Callable[[], list[Tensor]]]] = {
    "alibi": (
        lambda slope: lambda s, b, h, q, kv: s - slope[h] * (q - kv).abs(), lambda: [torch.rand(6, dtype=F64)]
    ),
    "table": (
        lambda table: lambda s, b, h, q, kv: s + table[h, q - kv], lambda: [torch.randn(6, 40, dtype=F64)]
    ),
    "softcap": (lambda: lambda s, b, h, q, kv: 2 * torch.tanh(s / 2), lambda: []),
    "documents": (
        lambda scale: lambda s, b, h, q, kv: s * scale[(q * 3) // 40, b],
        lambda: [torch.rand(3, 2, dtype=F64)],
    ),
    "hides": (
        lambda: lambda s, b, h, q, kv: torch.where((q + h) % 3 == 0, -math.inf, s), lambda: []
    ),
}  # fmt: skip


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("name", SCORES)
def test_scores_see_global_indices_on_every_rank(name: str, kv_heads: int) -> None:
    """q, kv, b and h, whatever the rank, the order and the head group; captures get the sum over ranks."""
    score, make = SCORES[name]
    mask = mask_of(causal(), 40)
    x = qkv(40, batch=2, heads=6, kv_heads=kv_heads, dim=4, dtype=F64)
    start, captured = cotangents(x), make()
    want = oracle(x, mask, score, captured, start=start, scale=0.7)
    for world_size in (1, 3):
        got = over_ranks(x, build(mask, world_size), score, captured, start=start, scale=0.7)
        agree(got, want, EXACT)


@pytest.mark.parametrize(
    ("lengths", "kv_lengths"),
    [([0, 30, 3], None), ([11, 11, 11], [20, 2, 11]), ([33, 0, 0], [0, 0, 33])],
    ids=str,
)
def test_natural_pieces_of_any_length(lengths: list[int], kv_lengths: list[int] | None) -> None:
    for mask in (mask_of(causal(), 33), mask_of(lambda b, h, q, kv: (q * kv) % 5 < 2, 33)):
        plan = build(mask, 3, balancer=None, lengths=lengths, kv_lengths=kv_lengths or lengths)
        x = qkv(33, heads=2, dim=4, dtype=F64)
        start = cotangents(x)
        agree(over_ranks(x, plan, start=start), oracle(x, mask, start=start), EXACT)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_fewer_blocks_than_ranks(length: int) -> None:
    mask = mask_of(causal(), length)
    x = qkv(length, heads=2, dim=4, dtype=F64)
    start = cotangents(x)
    for plan in plans(mask, 4):
        agree(over_ranks(x, plan, start=start), oracle(x, mask, start=start), EXACT)


@pytest.mark.parametrize("kernels", [False, True], ids=["eager", "kernels"])
def test_padding_is_never_read(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in the padding rows of a shard, NaN too, do not reach any result."""
    if kernels:
        interpreted(monkeypatch)
    world, plan = tritoncp.simulate(3), build(mask_of(causal(), 20, block=4), 3)
    x = qkv(20, dim=4, dtype=F64)

    def results(pad: float) -> list[Tensor]:
        shards = [world.shard(t, plan, dim=2, pad=pad) for t in x]
        leaves = [s.requires_grad_() for side in shards for s in side]
        assert any(bool((s == pad).any() | s.isnan().any()) for s in leaves)
        outs, lses = world.flex_attention(*shards, plan, return_lse=True)
        downs = world.shard(torch.ones(1, 1, 20, 4, dtype=F64), plan, dim=2, pad=pad)
        return [*outs, *lses, *torch.autograd.grad(outs, leaves, downs)]

    for got, want in zip(results(math.nan), results(0)):
        close(got, want, "a shard", 0)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_it_computes_in_float32_or_better(dtype: torch.dtype) -> None:
    mask = MASKS["documents"]
    x = qkv(53, heads=2, kv_heads=1, dtype=dtype)
    start = cotangents(x)
    got = over_ranks(x, build(mask, 2), start=start)
    assert got.out.dtype == dtype and got.lse.dtype == F32 and got.grads[0].dtype == dtype
    close(got.lse, oracle(x, mask, start=start).lse, "lse", 1e-6)
    agree(got, oracle(x, mask, start=start), 1e-6 if dtype == F32 else 0.01)


def test_kernels_and_plain_torch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan and schedule, once on each engine."""
    mask = mask_of(and_masks(causal(), document(lengths=[13, 20])), 33, block=16)
    x = qkv(33, heads=2, kv_heads=1, dtype=F64)
    score, make = SCORES["alibi"]
    start, captured = cotangents(x), make()

    def both() -> list[Results]:
        return [
            over_ranks(x, build(mask, 2), score, captured, start=start),
            run(x, mask, score, captured, start=start),
        ]

    plain = both()
    interpreted(monkeypatch)
    for a, b in zip(plain, both()):
        agree(a, b, EXACT)
