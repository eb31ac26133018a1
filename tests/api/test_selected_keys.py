"""Tests of calls with selected keys: on ranks, in graphs, with other arguments, and of the choice of keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxRequest

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
from tritoncp.cpu import pointwise
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine", "fresh_dynamo")
F64 = torch.float64
S = 96


def mask() -> tritoncp.Mask:
    """Two packed documents of unequal lengths."""
    return create_block_mask(causal() & document(lengths=[61, S - 61]), 1, 1, S, S, BLOCK_SIZE=16)


def qkv(seed: int = 0, batch: int = 2) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, 4, S, 8), (batch, 2, S, 8), (batch, 2, S, 12)
    return tuple(torch.randn(shape, generator=g, dtype=F64).requires_grad_() for shape in shapes)


def draw(count: int = 10, seed: int = 0, heads: int = 1) -> Tensor:
    return torch.randint(-1, S, (2, heads, S, count), generator=torch.Generator().manual_seed(seed)).int()


def indexer(seed: int = 3) -> tuple[Tensor, ...]:
    """Draw the queries, keys and weights of an indexer, whose scores are integers."""
    g = torch.Generator().manual_seed(seed)
    query, key = (torch.randint(-2, 3, (2, n, S, 4), generator=g).float() for n in (3, 1))
    return query, key, torch.randint(0, 3, (2, 3, S), generator=g).float()


def dense(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, score: Any = None, sinks: Any = None) -> Any:
    chosen = Selection(indices).to_dense(S).repeat_interleave(4 // indices.shape[1], 1)
    return dense_attention(q, k, v, mask().to_dense(2, 4) & chosen, score, sinks=sinks)


def grads(out: Tensor, leaves: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), leaves)


def agree(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_results_and_gradients_with_sinks_and_captures_are_those_of_dense_attention() -> None:
    q, k, v = qkv()
    bias, sinks = torch.randn(4, S, dtype=F64).requires_grad_(), torch.randn(4, dtype=F64).requires_grad_()
    leaves = q, k, v, bias, sinks

    def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s + bias[h, kv_idx]

    indices = draw(heads=2)
    out, aux = flex_attention(
        q, k, v, score, mask(), enable_gqa=True, sinks=sinks, selected=Selection(indices),
        return_aux=AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    want = dense(q, k, v, indices, score, sinks)
    agree((out, aux.lse, aux.max_scores), want)
    agree(grads(out, leaves), grads(want.out, leaves))


@pytest.mark.parametrize("schedule", ["allgather", "ring", "fetch", "ulysses"])
def test_ranks_compute_what_one_process_does(schedule: str) -> None:
    world, (q, k, v), indices = tritoncp.simulate(3), qkv(), draw()
    plan = world.make_plan(mask(), schedule=schedule)
    shards = [world.shard(x, plan, dim=2) for x in (q, k, v)]
    chosen = [Selection(part) for part in world.shard(indices, plan, dim=2, pad=-1)]
    outs = world.flex_attention(*shards, plan, enable_gqa=True, selected=chosen)
    want = dense(q, k, v, indices).out
    agree([world.unshard(outs, plan, dim=2)], [want])
    agree(grads(torch.cat(outs, 2), (q, k, v)), grads(want, (q, k, v)))


@pytest.mark.long
def test_processes_choose_the_same_keys_and_compute_what_one_does() -> None:
    index_query, index_key, weights = indexer()
    q, k, v = qkv()
    whole = select_keys(index_query, index_key, weights, top=9, block_mask=mask())
    want = flex_attention(q, k, v, mask(), enable_gqa=True, selected=whole)

    def on_rank(group: Any, placed: bool) -> tuple[Tensor, Tensor]:
        block_mask = make_plan(mask(), group) if placed else mask()
        parts = [
            tritoncp.shard(x.detach(), block_mask, group, dim=2)
            for x in (index_query, index_key, weights, q, k, v)
        ]
        chosen = select_keys(*parts[:3], top=9, block_mask=block_mask, mesh=group)
        out = flex_attention(*parts[3:], block_mask, enable_gqa=True, selected=chosen, mesh=group)
        whole_out = tritoncp.unshard(out, block_mask, group, dim=2)
        return tritoncp.unshard(chosen.indices, block_mask, group, dim=2), whole_out

    for placed in (True, False):
        for indices, out in ranks.run(3, on_rank, placed):
            assert torch.equal(indices, whole.indices)
            agree([out], [want.detach()])


def test_a_simulated_world_chooses_what_one_process_does() -> None:
    index_query, index_key, weights = indexer()
    want = select_keys(index_query, index_key, weights, top=9, block_mask=mask()).indices
    world = tritoncp.simulate(3)
    for block_mask in (mask(), world.make_plan(mask())):
        shards = [world.shard(x, block_mask, dim=2) for x in (index_query, index_key, weights)]
        chosen = world.select_keys(*shards, top=9, block_mask=block_mask)
        assert torch.equal(world.unshard([one.indices for one in chosen], block_mask, dim=2), want)


@pytest.mark.long
def test_the_choice_of_keys_is_part_of_a_graph() -> None:
    """One compilation, in full, for all values; the gradient of the attention passes."""
    compiled, plan = CompileCounterWithBackend("aot_eager"), make_plan(mask())

    @torch.compile(fullgraph=True, backend=compiled)
    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        chosen = select_keys(*tensors[3:], top=9, block_mask=plan)
        return flex_attention(*tensors[:3], plan, enable_gqa=True, selected=chosen), chosen.indices

    for seed in range(2):
        tensors, index_tensors = qkv(seed), indexer(seed)
        out, indices = attend(*tensors, *index_tensors)
        assert torch.equal(indices, select_keys(*index_tensors, top=9, block_mask=plan).indices)
        want = dense(*tensors, indices).out
        agree([out], [want])
        agree(grads(out, tensors), grads(want, tensors))
    assert compiled.frame_count == 1


def test_the_choice_and_the_attention_share_the_plan_of_a_mask() -> None:
    tritoncp.plan_cache_clear()
    index_query, index_key, weights = indexer()
    own = mask()
    for _ in range(2):
        chosen = select_keys(index_query, index_key, weights, top=9, block_mask=own)
        flex_attention(*qkv(), own, enable_gqa=True, selected=chosen)
    assert tritoncp.plan_cache_info()[:2] == (3, 1)


def test_autocast_does_not_change_the_choice() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, S, 16, generator=g)
    want = select_keys(x, x, top=5, block_mask=mask()).indices
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(select_keys(x, x, top=5, block_mask=mask()).indices, want)


def test_a_graph_serves_all_indices() -> None:
    """One compilation, in full, with gradients."""
    compiled = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=compiled)
    def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return flex_attention(q, k, v, plan, enable_gqa=True, selected=Selection(indices))

    plan = make_plan(mask())
    for seed in range(3):
        q, k, v = qkv(seed)
        out, want = attend(q, k, v, draw(seed=seed)), dense(q, k, v, draw(seed=seed)).out
        agree([out], [want])
        agree(grads(out, (q, k, v)), grads(want, (q, k, v)))
    assert compiled.frame_count == 1


def test_indices_that_are_edited_after_a_call_do_not_change_its_gradients() -> None:
    q, k, v = qkv()
    indices = draw()
    want = grads(dense(q, k, v, indices).out, (q, k, v))
    out = flex_attention(q, k, v, mask(), enable_gqa=True, selected=Selection(indices))
    indices.fill_(-1)
    agree(grads(out, (q, k, v)), want)


def test_latents_are_expanded_for_the_selected_keys() -> None:
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, S, 8, generator=g, dtype=F64).requires_grad_()
    latent = torch.randn(2, 1, S, 6, generator=g, dtype=F64).requires_grad_()
    weight = torch.randn(6, 2 * 20, generator=g, dtype=F64).requires_grad_()

    def expand(rows: Tensor, weight: Tensor) -> Any:
        return (rows @ weight).unflatten(-1, (2, 20)).squeeze(1).transpose(1, 2).split([8, 12], -1)

    out = flex_attention(
        q, latent, None, mask(), enable_gqa=True, expand=(expand, weight), selected=Selection(draw())
    )
    want = dense(q, *expand(latent, weight), draw()).out
    leaves = q, latent, weight
    agree([out], [want])
    agree(grads(out, leaves), grads(want, leaves))


def test_work_is_proportional_to_the_selected_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplications per query: the same for a sequence of twice the length with as many selected keys."""
    products, seen, counts = pointwise._products, [], []

    def counted(a: Tensor, b: Tensor, transpose: bool = False) -> Tensor:
        out = products(a, b, transpose)
        seen.append(a.shape[-1] * out.numel())
        return out

    monkeypatch.setattr(pointwise, "_products", counted)
    for length in (256, 512):
        x = torch.randn(1, 1, length, 16)
        every = create_block_mask(causal(), 1, 1, length, length)
        indices = (torch.arange(length)[:, None] - torch.arange(8)).clamp(min=-1)
        flex_attention(x, x, x, every, selected=Selection(indices[None, None]))
        counts.append(sum(seen) / length)
        seen.clear()
    assert counts[0] >= 2 * 16 * 7 and counts[1] <= 1.1 * counts[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selected": draw()}, "pass tritoncp.Selection"),
        ({"selected": Selection(draw()[:, :, :5])}, "a row for each query of 96 local ones"),
        ({"selected": Selection(draw() + S)}, "the sequence has 96 keys, 0 to 95"),
        ({"kernel_options": {"invariant": True}}, "invariant=True on the CPU engine"),
    ],
)
def test_a_wrong_argument_is_refused(change: dict[str, Any], message: str) -> None:
    q, k, v = qkv()
    options = {"enable_gqa": True, "selected": Selection(draw())} | change
    with pytest.raises((TypeError, ValueError), match=message):
        flex_attention(q, k, v, mask(), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top": 0}, "top is at least 1"),
        ({"top": 2, "first": 2, "own": True}, "at least as many as are always chosen"),
        ({"top": 2.5}, "an int is needed"),
        ({"block_size": 24}, "1 or a multiple of 16"),
        ({"activation": "gelu"}, "pass one of 'relu'"),
        ({"pool": "sum"}, "pass one of 'mean', 'max'"),
        ({"query": torch.ones(1, 2, S, 4).long()}, "a tensor of floats is needed"),
        ({"key": torch.ones(1, 3, S, 4)}, "key has 3 heads; 1 or 2 are needed"),
        ({"key": torch.ones(1, 2, S, 5)}, r"key \[B, 1 or Hi, S_local, Di\] are needed"),
        ({"weights": torch.ones(1, 2, S - 1)}, "one for each head and query"),
        ({"query": torch.ones(1, 2, S - 1, 4)}, "query has 95 rows"),
    ],
)
def test_a_wrong_argument_of_select_keys_is_refused(change: dict[str, Any], message: str) -> None:
    x = torch.ones(1, 2, S, 4)
    options: dict[str, Any] = {"query": x, "key": x, "top": 3, "block_mask": mask()} | change
    with pytest.raises((TypeError, ValueError), match=message):
        select_keys(**options)


def test_a_wrong_selection_is_refused_before_anything_moves() -> None:
    """On every rank of a simulated world, and in a graph, where only the run knows the indices."""
    world, plan = tritoncp.simulate(2), make_plan(mask())
    placed = world.make_plan(mask())
    shards = [world.shard(x, placed, dim=2) for x in qkv()]
    wrong = [Selection(x) for x in world.shard(draw(), placed, dim=2, pad=-1)]
    wrong[1] = Selection(wrong[1].indices + S)
    with pytest.raises(ValueError, match="the sequence has 96 keys, 0 to 95"):
        world.flex_attention(*shards, placed, enable_gqa=True, selected=wrong)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return flex_attention(q, k, v, plan, enable_gqa=True, selected=Selection(indices))

    attend(*qkv(), draw())
    with pytest.raises(ValueError, match="the sequence has 96 keys, 0 to 95"):
        attend(*qkv(), draw() + S)


def test_indices_of_floats_that_require_grad_are_refused() -> None:
    wrong = torch.zeros(1, 1, S, 2, requires_grad=True)  # integers cannot require grad
    with pytest.raises(TypeError, match=r"indices are torch\.float32; an int32 or int64 tensor is needed"):
        flex_attention(*qkv(), mask(), enable_gqa=True, selected=Selection(wrong))


def test_unchecked_indices_past_the_end_select_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without TRITONCP_CHECK=1, also past the range of int32, and below -1."""
    monkeypatch.setattr("tritoncp.call.prepare.check_indices", lambda selection, kv_len: None)
    q, k, v = qkv()
    inside = draw().long()
    past = torch.tensor([S, 2**31 + 3, 2**40 + 1, -7]).expand(2, 1, S, 4)
    chosen = Selection(torch.cat([past, inside], 3))
    out = flex_attention(q, k, v, mask(), enable_gqa=True, selected=chosen)
    agree([out], [dense(q, k, v, inside).out])


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k, v = qkv()
    nothing = Selection(torch.full((1, 1, S, 3), -1))
    out, lse = flex_attention(q, k, v, mask(), enable_gqa=True, selected=nothing, return_lse=True)
    assert not bool(out.any()) and bool((lse == -math.inf).all())
    assert not any(bool(x.any()) for x in grads(out, (q, k, v)))


def test_a_traced_program_reads_the_indices_of_each_run() -> None:
    """torch.jit.trace keeps plans and options, and indices are inputs, also with another number of keys."""
    q, k, v = (x.detach() for x in qkv())
    plan = make_plan(mask())

    def attend(q: Tensor, indices: Tensor) -> Tensor:
        return flex_attention(q, k, v, plan, enable_gqa=True, selected=Selection(indices))

    traced = torch.jit.trace(attend, (q, draw()), check_trace=False)
    for count in (10, 7):
        indices, leaf = draw(count, seed=count), q.clone().requires_grad_()
        out, want = traced(leaf, indices), dense(leaf, k, v, indices).out
        agree([out], [want])
        agree(grads(out, [leaf]), grads(want, [leaf]))
    with pytest.raises(RuntimeError, match="the sequence has 96 keys, 0 to 95"):
        traced(q, draw() + S)


def test_an_autograd_node_saves_the_indices_as_it_saves_tensors() -> None:
    """So that a checkpoint frees them, and saved-tensor hooks may move them."""
    q, k, v = qkv()
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: packed[place].clone()):
        out = flex_attention(q, k, v, mask(), enable_gqa=True, selected=Selection(draw()))
    assert [tuple(x.shape) for x in packed if x.dtype == torch.int32] == [(2, 1, S, 10)]
    agree(grads(out, (q, k, v)), grads(dense(q, k, v, draw()).out, (q, k, v)))


def test_a_mask_by_heads_is_refused_where_weights_sum_the_heads() -> None:
    x = torch.ones(1, 2, S, 4)
    for heads in (None, 2):
        by_head = create_block_mask(lambda b, h, q, kv: kv <= q - h, 1, heads, S, S, BLOCK_SIZE=16)
        with pytest.raises(ValueError, match=r"2 heads, and weights sum .*a mask without heads"):
            select_keys(x, x, torch.ones(1, 2, S), top=3, block_mask=by_head)
        assert select_keys(x, x, top=3, block_mask=by_head).indices.shape == (1, 2, S, 3)


def test_a_world_has_the_shapes_of_tensors_without_values() -> None:
    world, aux = tritoncp.simulate(2), tritoncp.SelectionAuxRequest(probabilities=True)
    plan = world.make_plan(mask())
    shards = [world.shard(x, plan, dim=2) for x in (*qkv(), draw())]
    fakes = FakeTensorMode()
    for convert in (lambda x: x.to("meta"), fakes.from_tensor):
        *xs, indices = ([convert(x) for x in one] for one in shards)
        outs, found = world.flex_attention(
            *xs, plan, enable_gqa=True, selected=list(map(Selection, indices)), return_aux=aux
        )
        assert [x.shape for x in outs] == [(2, 4, len(x[0, 0]), 12) for x in shards[0]]
        assert [x.shape for x in found.probabilities] == [(2, 1, len(x[0, 0]), 10) for x in shards[0]]


@pytest.mark.parametrize("block_size", [1, 16])
def test_an_empty_batch_chooses_nothing(block_size: int) -> None:
    query, key, weights = torch.randn(0, 3, S, 4), torch.randn(0, 1, S, 4), torch.ones(0, 3, S)
    for given, heads in ((weights, 1), (None, 3)):
        chosen = select_keys(query, key, given, top=2, block_size=block_size, block_mask=mask())
        assert chosen.indices.shape == (0, heads, S, 2) and chosen.indices.dtype == torch.int32


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_empty_batch_has_empty_results_and_gradients(world_size: int) -> None:
    world = tritoncp.simulate(world_size)
    plan, leaves = world.make_plan(mask()), qkv(batch=0)
    shards = [world.shard(x, plan, dim=2) for x in leaves]
    chosen = [Selection(torch.zeros(0, 2, x.shape[2], 3).int()) for x in shards[0]]
    request = SelectionAuxRequest(probabilities=True)
    outs, aux = world.flex_attention(*shards, plan, enable_gqa=True, selected=chosen, return_aux=request)
    out = world.unshard(outs, plan, dim=2)
    assert out.shape == (0, 4, S, 12)
    assert [x.shape for x in aux.probabilities] == [one.indices.shape for one in chosen]
    assert [x.shape for x in grads(out, leaves)] == [x.shape for x in leaves]
