"""Tests of the probabilities of selected keys, which the loss of an indexer needs: both engines, every
schedule, graphs, checkpoints, and the loss of DeepSeek sparse attention on ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tritoncp
from tests.multiprocess import ranks
from tritoncp import (
    Selection,
    SelectionAuxRequest,
    causal,
    create_block_mask,
    document,
    flex_attention,
    make_plan,
    select_keys,
)
from tritoncp.reference.dense import dense_attention
from tritoncp.selection import lists

F64 = torch.float64
AUX = SelectionAuxRequest(probabilities=True)
S, BLOCK = 48, 16


class Case(NamedTuple):
    """A call of 4 query heads and 2 KV heads. shares: heads of the selection; ranks: 1, or as many in a
    simulated world"""

    shares: int = 1
    block_size: int = 1
    query_block: int = 1
    ranks: int = 1
    schedule: str = "allgather"
    by_head: bool = False
    scored: bool = False


CASES = {
    "tokens": Case(),
    "KV heads, scores": Case(2, scored=True),
    "query heads, a mask by heads": Case(4, by_head=True),
    "a mask by heads": Case(by_head=True, scored=True),
    "blocks": Case(1, BLOCK, 8),
    "blocks of query heads": Case(4, BLOCK, 8, ranks=2, schedule="fetch"),
    "allgather": Case(ranks=3, scored=True),
    "ring": Case(2, ranks=2, schedule="ring"),
    "fetch": Case(ranks=3, schedule="fetch"),
    "ulysses": Case(2, ranks=3, schedule="ulysses", scored=True),
    "ulysses and ring": Case(ranks=6, schedule="ulysses+ring"),
}
INTERPRETED = [
    *("tokens", "blocks", "KV heads, scores"),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("a mask by heads", "ring")),
]


def mask_of(by_head: bool) -> tritoncp.Mask:
    if by_head:
        return create_block_mask(lambda b, h, q, kv: kv <= q - h, 1, 4, S, S, BLOCK_SIZE=BLOCK)
    return create_block_mask(causal() & document(lengths=[29, S - 29]), 1, 1, S, S, BLOCK_SIZE=BLOCK)


def qkv(seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (2, 4, S, 8), (2, 2, S, 8), (2, 2, S, 12)
    return [torch.randn(shape, generator=g, dtype=F64) for shape in shapes]


def bias(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s - 0.1 * (h + 1) * (q - kv)


def draw(case: Case, seed: int = 0) -> Selection:
    """Draw a selection with repeated indices, -1 in any place, and a row without any."""
    blocks, rows = S // case.block_size, S // case.query_block
    g = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, blocks, (2, case.shares, rows, 6), generator=g).int()
    indices[:, :, 3] = -1
    return Selection(indices, case.block_size, case.query_block)


def dense_probabilities(
    q: Tensor, k: Tensor, mask: tritoncp.Mask, chosen: Selection, score: Any = None, sinks: Any = None
) -> Tensor:
    """Compute the probabilities with the matrix of all pairs. Repetitions of an index get 0."""
    shares = chosen.indices.shape[1]
    visible = mask.to_dense(2, 4) & chosen.to_dense(S).repeat_interleave(4 // shares, 1)
    identity = torch.eye(S, dtype=F64).expand(2, 2, S, S)
    pairs = dense_attention(q, k, identity, visible, score, sinks=sinks).out
    pairs = pairs.unflatten(1, (shares, -1)).sum(2)
    blocks = pairs.unflatten(3, (-1, chosen.block_size)).sum(4)
    index = chosen.indices.long().repeat_interleave(chosen.query_block, 2)
    repeated = (index[..., None] == index[..., None, :]).tril(-1).any(-1)
    return blocks.gather(3, index.clamp(min=0)).masked_fill(repeated | (index < 0), 0)


def found_probabilities(case: Case, chosen: Selection, sinks: Tensor | None) -> Tensor:
    """Compute the probabilities by calls of one rank, or of all in a world, whose shards are padded."""
    score, mask, tensors = bias if case.scored else None, mask_of(case.by_head), qkv()
    options: Any = {"enable_gqa": True, "sinks": sinks, "return_aux": AUX}
    if case.ranks == 1:
        return flex_attention(*tensors, score, mask, selected=chosen, **options)[1].probabilities
    world = tritoncp.simulate(case.ranks)
    plan = world.make_plan(mask, schedule=case.schedule)
    shards = [world.shard(x, plan, dim=2) for x in tensors]
    each = chosen.indices.repeat_interleave(case.query_block, 2)
    parts = [Selection(x, case.block_size) for x in world.shard(each, plan, dim=2, pad=-1)]
    _, aux = world.flex_attention(*shards, score, plan, selected=parts, **options)
    for rank, x in enumerate(aux.probabilities):
        assert not bool(x[:, :, ~plan.for_rank(rank).valid[0]].any())
    return world.unshard(aux.probabilities, plan, dim=2)


def check(name: str) -> None:
    case = CASES[name]
    chosen, (q, k, _) = draw(case), qkv()
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=F64) if case.scored else None
    want = dense_probabilities(q, k, mask_of(case.by_head), chosen, bias if case.scored else None, sinks)
    got = found_probabilities(case, chosen, sinks)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert float(got.sum()) > S  # of four heads and two batch rows


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_probabilities_are_those_of_dense_attention(name: str, cpu_engine: None) -> None:
    check(name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_compute_the_probabilities(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries in parts of 42, or of one block where blocks are selected."""
    monkeypatch.setattr(lists, "PAIRS", 1 << 8)
    check(name)


@pytest.mark.long
def test_a_graph_has_the_probabilities(cpu_engine: None, fresh_dynamo: None) -> None:
    plan = make_plan(mask_of(False))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        chosen = Selection(indices)
        out, aux = flex_attention(q, k, v, plan, enable_gqa=True, selected=chosen, return_aux=AUX)
        assert aux.lse is None
        return out, aux.probabilities

    q, k, v = (x.requires_grad_() for x in qkv())
    chosen = draw(Case())
    out, found = attend(q, k, v, chosen.indices)
    want = dense_probabilities(q, k, mask_of(False), chosen)
    torch.testing.assert_close(found, want.detach(), rtol=0, atol=1e-12)
    assert out.requires_grad and not found.requires_grad


class _Ops(TorchDispatchMode):
    """Counts the ops of tritoncp that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tritoncp":
            self.seen.append(func._opname)
        return func(*args, **kwargs or {})


def test_probabilities_are_computed_once_and_only_on_request(cpu_engine: None) -> None:
    """Also where activations are computed again: a repeated pass would exchange keys between ranks again."""
    chosen = draw(Case())
    leaves = [x.requires_grad_() for x in qkv()]

    def attend(*tensors: Tensor) -> Tensor:
        out, aux = flex_attention(*tensors, mask_of(False), enable_gqa=True, selected=chosen, return_aux=AUX)
        return out.square().sum() + aux.probabilities.square().sum()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(tritoncp.checkpoint_policy())

    with _Ops() as ops:
        checkpoint(attend, *leaves, use_reentrant=False, context_fn=contexts).backward()
    assert ops.seen.count("probabilities") == 1
    with _Ops() as ops:
        flex_attention(*leaves, mask_of(False), enable_gqa=True, selected=chosen)
    assert ops.seen == ["forward"]


def test_probabilities_without_a_selection_are_refused(cpu_engine: None) -> None:
    with pytest.raises(ValueError, match=r"pass selected=Selection\(indices\)"):
        flex_attention(*qkv(), mask_of(False), enable_gqa=True, return_aux=AUX)


# -- the loss of an indexer ----------------------------------------------------------------------------------


def indexer_loss(
    query: Tensor, key: Tensor, weights: Tensor, chosen: Selection, target: Tensor, positions: Tensor
) -> Tensor:
    """Return the sum over queries of the KL divergence between the attention's distribution over the selected
    keys and the indexer's (arXiv 2512.02556, equation 4). key: [B, 1, S, D] of the whole sequence"""
    scores = (torch.relu(query @ key.mT) * weights[..., None]).sum(1, keepdim=True)
    index = chosen.indices.long()
    shown = (index >= 0) & (positions >= 0)[:, None, :, None]
    chosen_scores = scores.gather(3, index.clamp(min=0)).masked_fill(~shown, -torch.inf)
    log_share = torch.log_softmax(chosen_scores, -1).masked_fill(~shown, 0)
    share = target / target.sum(-1, keepdim=True).clamp(min=1e-30)
    return (torch.special.xlogy(share, share) - share * log_share).sum()


@pytest.mark.long
def test_ranks_train_an_indexer_as_one_process_does(cpu_engine: None) -> None:
    g = torch.Generator().manual_seed(3)
    sizes = (2, 3, S, 4), (2, 1, S, 4), (2, 3, S)
    index_tensors = [torch.randn(size, generator=g, dtype=F64).requires_grad_() for size in sizes]
    tensors, mask = qkv(), mask_of(False)

    def train(group: Any, schedule: str) -> tuple[float, list[Tensor]]:
        plan = make_plan(mask, group, schedule=schedule)
        leaves = [x.detach().requires_grad_() for x in index_tensors]
        query, key, weights, *shards = (tritoncp.shard(x, plan, group, dim=2) for x in (*leaves, *tensors))
        chosen = select_keys(query, key, weights, top=9, block_mask=plan, mesh=group)
        _, aux = flex_attention(*shards, plan, mesh=group, enable_gqa=True, selected=chosen, return_aux=AUX)
        assert not aux.probabilities.requires_grad
        whole = tritoncp.unshard(key, plan, group, dim=2, grad="sum")
        loss = indexer_loss(query, whole, weights, chosen, aux.probabilities, tritoncp.positions(plan))
        return float(loss.detach()), list(torch.autograd.grad(loss, leaves))

    loss, grads = train(None, "auto")
    assert loss > 0
    for schedule in ("ring", "ulysses"):
        parts = ranks.run(4, train, schedule)
        assert abs(sum(part for part, _ in parts) - loss) < 1e-9
        for i, want in enumerate(grads):
            got = sum(part[i] for _, part in parts)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
            assert bool(want.any())
