"""Steps: state in and out, accumulated gradients, and results that must be equal bit for bit."""

import math
from itertools import pairwise, permutations

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.device import LONG, ON_GPU, REPEATS
from tests.kernels.support import harness
from tests.kernels.support.harness import (
    F32,
    F64,
    QKV,
    Grads,
    backward,
    close,
    cotangents,
    engine_of,
    forward,
    keys_between,
    new_state,
    oracle,
    qkv,
    run,
    same,
    single,
)
from tritoncp import Mask, causal, create_block_mask, full_mask
from tritoncp.kernels.tile_runs import BOUNDED_KIND
from tritoncp.masks import Kind
from tritoncp.planning.build import build


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s - 0.1 * (q - kv).abs()


MASKS: dict[str, Mask] = {name: make_mask(48, block=16) for name, make_mask in harness.MASKS.items()}
MASKS["full, ragged"] = full_mask(41, 41, block=16)
CUTS = {"inside a block": [0, 21], "at a block and inside": [0, 16, 37]}


def tensors(mask: Mask, **kw: object) -> QKV:
    return qkv(mask.q_len, mask.kv_len, heads=2, kv_heads=1, **kw)


def steps(engine, x: QKV, mask: Mask, cuts: list[int], order=None, state=None) -> tuple[Tensor, Tensor]:
    """Keys in pieces, one step a piece: all but the last leave the state, all but the first start from it."""
    plan, state = single(mask), state or new_state(x)
    pieces = list(pairwise([*cuts, mask.kv_len]))
    pieces = [pieces[i] for i in order] if order else pieces
    for i, (begin, end) in enumerate(pieces):
        part = QKV(x.q, x.k[:, :, begin:end], x.v[:, :, begin:end])
        result = forward(
            engine, part, keys_between(plan, begin, end), state=state, load_state=i > 0,
            store_state=i + 1 < len(pieces),
        )  # fmt: skip
    return result


# -- state --------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", MASKS)
def test_keys_in_steps_equal_keys_at_once(name: str, cuts: str) -> None:
    mask = MASKS[name]
    x = tensors(mask, dtype=F64, dim=24, v_dim=40)
    score = alibi if len(CUTS[cuts]) == 3 else None
    engine = engine_of(x, mask.mask_mod, score)
    want = oracle(x, mask, score and (lambda: score), start=None)
    for got, exact in zip(steps(engine, x, mask, CUTS[cuts]), want):
        close(got, exact, name)


@pytest.mark.long
@pytest.mark.bar(14)
def test_steps_come_in_any_order() -> None:
    mask = MASKS["intervals"]
    x = tensors(mask, dtype=F64)
    want = forward(engine_of(x), x, single(mask))
    for order in permutations(range(3)):
        for got, exact in zip(steps(engine_of(x), x, mask, [0, 16, 37], order), want):
            close(got, exact, str(order))


def test_the_state_has_the_max_sum_and_values_of_the_keys_seen() -> None:
    """m: largest score in log2 units; l: sum of exp2(score - m); acc: the weighted sum of values. Rows
    without a visible key: -inf, 0, 0. No other memory is written."""
    mask = MASKS["causal"]
    x = tensors(mask)
    state = new_state(x)
    part = QKV(x.q, x.k[:, :, 24:40], x.v[:, :, 24:40])
    out, lse = forward(engine_of(x), part, keys_between(single(mask), 24, 40), state=state, store_state=True)
    assert bool(out.isnan().all() and lse.isnan().all())
    visible = torch.zeros(48, 48, dtype=torch.bool)
    visible[:, 24:40] = mask.to_dense()[0, 0, :, 24:40]
    want = oracle(x, visible, start=cotangents(x))
    assert [t.dtype for t in state] == [F32] * 3
    close(state.m * math.log(2), want.max_scores, "m")
    close(state.m * math.log(2) + state.l.log(), want.lse, "lse")
    close(state.acc / torch.where(state.l > 0, state.l, 1)[..., None], want.out, "acc")
    assert bool((state.m[:, :, :24] == -math.inf).all() and (state.l[:, :, :24] == 0).all())
    assert bool((state.acc[:, :, :24] == 0).all())


@pytest.mark.bits
@pytest.mark.bar(14)
def test_a_state_that_has_seen_nothing_changes_nothing() -> None:
    """A first step in which no row sees a key does not change the bits of the second step."""
    mask = create_block_mask(lambda b, h, q, kv: (kv < 16) & (q >= kv), None, None, 48, 48, BLOCK_SIZE=16)
    x = tensors(mask)
    engine = engine_of(x, mask.mask_mod)
    same(steps(engine, x, mask, [0, 32], order=[1, 0]), forward(engine, x, single(mask)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_of_half_precision_round_once(dtype: torch.dtype) -> None:
    """The state is float32: five steps are as near the float64 oracle as one, but for the last bit."""
    mask = create_block_mask(causal(), None, None, 80, 80, BLOCK_SIZE=16)
    x = tensors(mask, dtype=dtype)
    want = oracle(x, mask, start=cotangents(x))
    once = forward(engine_of(x), x, single(mask))
    often = steps(engine_of(x), x, mask, [0, 16, 32, 48, 64])
    assert often[0].dtype == dtype
    errors = [(out.to(F64) - want.out).abs().max().item() for out in (often[0], once[0])]
    assert errors[0] <= 1.1 * errors[1]
    close(often[1], want.lse, "lse")


# -- accumulated gradients ----------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MASKS)
def test_gradients_added_over_steps_equal_the_gradients_of_one_step(name: str) -> None:
    """Every piece of the keys adds to dQ; each piece has a separate dK and dV."""
    mask = MASKS[name]
    x = tensors(mask, dtype=F64)
    plan, engine = single(mask), engine_of(x, mask.mask_mod, alibi)
    out, lse = forward(engine, x, plan)
    dout, _ = cotangents(x)
    want = backward(engine, x, plan, out, lse, dout)
    got = Grads(*(torch.zeros_like(t) for t in x))
    for begin, end in pairwise([0, 21, 32, mask.kv_len]):
        part = [t[:, :, begin:end] for t in (x.k, x.v)]
        into = Grads(got.dq, got.dk[:, :, begin:end], got.dv[:, :, begin:end])
        step = keys_between(plan, begin, end)
        backward(engine, QKV(x.q, *part), step, out, lse, dout, into=into, add=True)
    for a, b, grad in zip(got, want, ("dq", "dk", "dv")):
        close(a, b, grad)


# -- bit for bit --------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.bits
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.bar(11)
def test_the_same_call_twice_gives_the_same_bits(dtype: torch.dtype) -> None:
    plan = tritoncp.make_plan(harness.MASKS["intervals"](LONG, block=128 if ON_GPU else 16))
    x = tensors(plan.mask, dtype=dtype, dim=128 if ON_GPU else 16)
    start, score = cotangents(x), (lambda: alibi,)
    first = run(x, plan, *score, start=start)
    for _ in range(REPEATS):
        same(run(x, plan, *score, start=start), first)


@pytest.mark.bits
@pytest.mark.bar(11)
def test_the_same_world_twice_gives_the_same_bits() -> None:
    world = tritoncp.simulate(3)
    plan = world.make_plan(MASKS["intervals"])
    x = tensors(MASKS["intervals"])

    def once() -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in x]
        shards = [world.shard(t, plan, dim=2) for t in leaves]
        outs, lses = world.flex_attention(*shards, plan, enable_gqa=True, return_lse=True)
        torch.manual_seed(1)
        loss = sum((out * torch.randn_like(out)).sum() + lse.exp().sum() for out, lse in zip(outs, lses))
        return [*outs, *lses, *torch.autograd.grad(loss, leaves)]

    same(once(), once())


def chunked(x: QKV, mask: Mask, cuts: list[int], dout: Tensor, **options: int) -> tuple[Tensor, ...]:
    """Queries in chunks, each a rank of a natural-order plan that sees all keys; dK, dV accumulated."""
    lengths = [b - a for a, b in pairwise([*cuts, mask.q_len])]
    keys = [mask.kv_len] + [0] * (len(lengths) - 1)
    plan = build(mask, len(lengths), balancer=None, lengths=lengths, kv_lengths=keys)
    engine = engine_of(x, mask.mask_mod, **options)
    sums = [torch.zeros_like(t, dtype=F32) for t in (x.k, x.v)]
    results = []
    for rank, (begin, end) in enumerate(pairwise([*cuts, mask.q_len])):
        part = QKV(x.q[:, :, begin:end], x.k, x.v)
        rank_plan = plan.for_rank(rank)
        out, lse = forward(engine, part, rank_plan)
        into = Grads(torch.zeros_like(part.q, dtype=F32), *sums)
        grads = backward(engine, part, rank_plan, out, lse, dout[:, :, begin:end], into=into, add=True)
        results.append((out, lse, grads.dq))
    return (*(torch.cat(parts, 2) for parts in zip(*results)), *sums)


BLOCKS = {name: mask for name, mask in MASKS.items() if mask.q_len == 48}


@pytest.mark.sample(1)
@pytest.mark.bits
@pytest.mark.parametrize(("name", "dtype"), [*((name, F32) for name in BLOCKS), ("causal", torch.bfloat16)])
def test_queries_in_chunks_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Cut at Q blocks, results of a row do not depend on its neighbours. Sums over queries (dK, dV) are added
    in another order: equal within rounding."""
    mask = MASKS[name]
    x = tensors(mask, dtype=dtype, dim=24)
    dout, _ = cotangents(x)
    whole, parts = (chunked(x, mask, cuts, dout) for cuts in ([0], [0, 32]))
    same(parts[:3], whole[:3])
    for a, b in zip(parts[3:], whole[3:]):
        close(a, b, "dkv", 1e-6)


@pytest.mark.interpreted
def test_tiles_added_one_by_one_give_the_same_bits() -> None:
    """Chunks of one tile: the float32 accumulators add up dK and dV in the order the loop would.
    (A scale that is a power of two: it is applied before the adding.)"""
    mask = MASKS["causal"]
    x = qkv(48)
    dout, _ = cotangents(x)
    same(chunked(x, mask, [0, 16, 32], dout), chunked(x, mask, [0], dout))


def test_kernels_and_masks_number_bounded_blocks_alike() -> None:
    assert BOUNDED_KIND.value == Kind.BOUNDED
