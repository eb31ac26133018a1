"""Chunks of a joint graph between two real ranks: answers, messages, and the order of nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import tritoncp
from tests.chunking import models
from tests.distributed.test_profiler_ranges import LOCAL, ranges
from tests.multiprocess import ranks
from tests.report.sent_bytes import sent_bytes
from tritoncp import and_masks, causal, create_block_mask, document, make_plan
from tritoncp.chunking import Pass, chunk, mark, order, predict_timeline
from tritoncp.chunking.regions import is_backward
from tritoncp.chunking.streams import costs
from tritoncp.chunking.streams.storages import hint
from tritoncp.distributed import collectives
from tritoncp.planning.costs.hardware import NVLINK

pytestmark = pytest.mark.usefixtures("cpu_engine")
B, S, CHUNKS = 4, 64, 2
IDS = torch.tensor([[0] * 20 + [1] * 44, [0] * 50 + [1] * 14] * 2)  # for each batch row
MASKS = {"causal": causal, "documents": lambda: and_masks(causal(), document(ids=IDS))}


class Messages:
    """The collectives that a rank starts, and the bytes that it sends to the other of two ranks."""

    def __init__(self, group: Any) -> None:
        self.rank, self.count, self.bytes = group.rank(), 0, 0
        self.start = collectives._start

    def __enter__(self) -> Messages:
        collectives._start = self.record
        return self

    def __exit__(self, *error: Any) -> None:
        collectives._start = self.start

    def record(self, request: Any, group: Any) -> Any:
        self.count += 1
        self.bytes += sent_bytes(request, 2, self.rank)
        return self.start(request, group)


def step(group: Any, model: Any, call: Any, plan: Any, dim: str = "") -> tuple[dict[str, Tensor], Messages]:
    """Run one training step on this rank's shard, whose dimension ``dim`` is marked."""
    g = torch.Generator().manual_seed(1)
    x, turn, grad = (torch.randn(*size, generator=g) for size in ((B, S, 16), (S, 4), (B, S, 16)))
    x, grad = (tritoncp.shard(one, plan, dim=1) for one in (x, grad))
    turn = tritoncp.shard(turn, plan, dim=0, batch_dim=None)
    x = x.clone().requires_grad_()
    if dim == "seq":
        mark(turn, 0, CHUNKS)
    if dim:
        mark(x, ("batch", "seq").index(dim), CHUNKS)
    with Messages(group) as messages:
        out = call(x, turn, plan)
        out.backward(grad)
    results = {"out": out.detach(), "dx": x.grad}
    return results | {f"d {name}": p.grad for name, p in model.named_parameters()}, messages


class Result(NamedTuple):
    """Collectives and bytes of a step, whole and in chunks, the report, the orders of nodes, and the
    error without ``repeat``."""

    whole: tuple[int, int]
    parts: tuple[int, int]
    report: Any
    orders: list[list[str]]
    refusal: str


def one_rank(group: Any, schedule: str, kind: str, balancer: str | None, dim: str, repeat: bool) -> Any:
    """Compare a step in chunks with the whole's."""
    models.Attention.mesh = group
    mask = create_block_mask(MASKS[kind](), B if kind == "documents" else None, None, S, S, BLOCK_SIZE=8)
    plan = make_plan(mask, group, schedule=schedule, balancer=balancer)
    torch.manual_seed(0)
    model = models.Model(models.Shape())
    other = copy.deepcopy(model)
    want, whole = step(group, model, model, plan)
    reports, orders, refusals = [], [], [""]

    def rewrite(gm: torch.fx.GraphModule) -> None:
        if repeat:
            with pytest.raises(ValueError, match="repeat=True") as error:
                chunk(gm, dim=dim, chunks=CHUNKS)
            refusals.append(str(error.value))
        reports.append(chunk(gm, dim=dim, chunks=CHUNKS, repeat=repeat))

    def finish(gm: torch.fx.GraphModule) -> None:
        if not repeat:
            order(gm, NVLINK)
            orders.append([node.name for node in gm.graph.nodes])

    call = models.compiled(other, rewrite, finish=finish)
    results, parts = step(group, other, call, plan, dim)
    assert want.keys() == results.keys()
    for name in want:
        torch.testing.assert_close(results[name], want[name], atol=2e-5, rtol=1e-5, msg=name)
    return Result((whole.count, whole.bytes), (parts.count, parts.bytes), reports[0], orders, refusals[-1])


def every_case(group: Any, *cases: Any) -> list[Any]:
    """Run cases one after another in the same processes, as their first graph takes longest."""
    return [one_rank(group, *case) for case in cases]


@pytest.mark.long
def test_chunks_share_one_exchange_of_keys_or_repeat_it() -> None:
    """Answers equal the whole, there are no more messages, and both ranks order their nodes in the same way;
    a ring's chunks repeat its messages if requested."""
    cases = (
        ("allgather", "causal", "head_tail", "seq", False),
        ("fetch", "documents", None, "seq", False),
        ("ring", "causal", None, "seq", True),
        ("allgather", "causal", "head_tail", "batch", False),
    )
    results = ranks.run(2, every_case, *cases)
    for one, other in zip(*(result[:2] for result in results), strict=True):
        assert one.orders == other.orders
        assert len(one.orders) == 2  # forward and backward
        for case in (one, other):
            assert case.parts == case.whole
            assert case.whole[0] == 3  # keys forward, keys and their gradients backward
            assert case.report.exchanges == 2
            assert "one exchange for all chunks" in str(case.report)
    assert not results[0][0].report.waits_for_all_keys
    for _, _, ring, by_batch in results:
        assert ring.parts[1] == 2 * ring.whole[1]
        assert ring.report.waits_for_all_keys  # rank 1's first chunk sees all keys of rank 0
        assert "the schedule 'ring'" in ring.refusal
        assert by_batch.parts == (2 * by_batch.whole[0], by_batch.whole[1])  # each row's keys travel once


# -- one attention --------------------------------------------------------------------------------------


def attention_seconds(gm: torch.fx.GraphModule, by_plans: bool = True) -> list[float]:
    """Predict the times of attention nodes, by their plans or by all pairs."""
    with pytest.MonkeyPatch.context() as patch:
        if not by_plans:
            patch.setattr(costs, "_plan_of_handle", lambda handle: None)
        return [span.seconds for span in predict_timeline(gm, NVLINK).spans if span.kind == "attention"]


def traced_passes(step: Callable[..., Any], tensors: list[Tensor]) -> GraphModule:
    """Trace a step with one attention, and mark the nodes of its two passes."""
    gm = make_fx(step, tracing_mode="symbolic")(*tensors)
    names = [node.name for node in gm.graph.nodes]
    for node in gm.graph.nodes:
        follows = names.index(node.name) >= names.index("backward")
        node.meta["partitioner_tag"] = "is_backward" if follows else "is_forward"
    return gm


def share_one_exchange(group: Any, schedule: str, kind: str, with_lse: bool, dtype: torch.dtype) -> None:
    """Compare one attention, forward and backward, in chunks that share its keys with the whole one: results,
    sizes, passes and predicted times."""
    mask = create_block_mask(MASKS[kind](), B if kind == "documents" else None, None, S, S, BLOCK_SIZE=8)
    plan, g = make_plan(mask, group, schedule=schedule), torch.Generator().manual_seed(1)
    shapes = (6, S, 8), (3, S, 8), (3, S, 5), (6, S, 5), (6, S)  # q, k, v, and the gradients of out and lse
    dtypes = [dtype] * 4 + [torch.promote_types(dtype, torch.float32)]
    whole = [torch.randn(B, *shape, generator=g).to(dtype) for shape, dtype in zip(shapes, dtypes)]
    tensors = [tritoncp.shard(x, plan, dim=2) for x in whole]

    def step(q: Tensor, k: Tensor, v: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        results = tritoncp.flex_attention(*leaves, None, plan, enable_gqa=True, return_lse=True, mesh=group)
        count = 2 if with_lse else 1
        dq, *dkv = torch.autograd.grad(results[:count], leaves, grads[:count])
        return *results, dq.flatten(2).sin().view(dq.shape), *dkv  # by a size that only the backward pass has

    gm = traced_passes(step, tensors)
    want, seconds, pairs = gm(*tensors), attention_seconds(gm), attention_seconds(gm, by_plans=False)
    assert chunk(gm, "", dim="seq", chunks=CHUNKS).exchanges == 2
    graph, results = models.CheckedGraph(gm), []
    names = ranges(lambda: results.extend(graph.run(*tensors)))
    assert {name for name in names if "step" in name} == {f"{schedule}/{step}" for step in LOCAL}
    for got, expected in zip(results, want, strict=True):
        tolerance = 1e-12 if dtype == torch.float64 else 2e-2
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    sent = [node for node in calls if "tritoncp.send" in str(node.target)]
    passes = ["must_be_in_forward", "must_be_in_backward", "must_be_in_backward"]
    assert [node.meta["partitioner_tag"] for node in sent] == passes
    assert [node.args[2] for node in sent[:2]] == [False, True]  # ranks compare their calls once, forward
    assert [hint(node.meta["val"].shape[0]) for node in sent] == [S * B] * 3
    joined = gm.graph.output_node().args[0][:2]
    early = [node in joined or isinstance(node.meta["val"], torch.SymInt) for node in calls]
    assert not any(early[calls.index(sent[1]) :])  # partitioners give the forward pass all nodes before these
    shares = [max(plan.part(c, CHUNKS).work) / max(plan.work) for c in (0, 1, 1, 0)]
    parts = [seconds[at // 2] * share for at, share in enumerate(shares)]
    assert attention_seconds(gm) == pytest.approx(parts, rel=1e-6)
    # One of two chunks with the keys of both ranks has as many pairs as the rank's shard.
    both = [pairs[at // 2] for at in range(4)]
    assert attention_seconds(gm, by_plans=False) == pytest.approx(both, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("allgather", "causal", True, torch.float64), marks=pytest.mark.long),
        pytest.param(("fetch", "causal", False, torch.bfloat16), marks=pytest.mark.long),
        ("fetch", "documents", True, torch.float64),
    ],
    ids=["all keys", "fetched", "fetched by batch row"],
)
def test_chunks_that_share_keys_compute_and_take_what_the_whole_does(case: Any) -> None:
    """Cases: each batch row fetches keys, all batch rows fetch keys together, or each rank has all keys."""
    ranks.run(2, share_one_exchange, *case)


# -- checkpoints ----------------------------------------------------------------------------------------

SAVED = (None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
COMPUTED_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
PARTITIONS = (min_cut_rematerialization_partition, default_partition)
CHECKPOINTS = [*product((*SAVED, *COMPUTED_AGAIN), PARTITIONS)]


def run_passes(gm: GraphModule, partition: Any, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Partition a joint graph of one result, whose gradient is its last input, and run both passes. Return
    the results, and the tensors other than inputs that the first pass keeps for the second."""
    forward, backward = partition(gm, None, num_fwd_outputs=1)
    out, *kept = forward(*tensors[:-1])
    names = [node.name for node in forward.graph.output_node().args[0][1:]]
    values = {**dict(zip(names, kept, strict=True)), "tangents_1": tensors[-1]}
    results = [out, *backward(*(values[x.name] for x in backward.graph.find_nodes(op="placeholder")))]
    inputs = {id(x) for x in tensors}
    return results, [x for x in kept if isinstance(x, Tensor) and x.ndim and id(x) not in inputs]


def sines_attend(plan: Any, group: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the attention of the sines of q, k and v, and its gradients."""
    *inputs, grad = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = tritoncp.flex_attention(*(x.sin() for x in leaves), None, plan, mesh=group)
    return out, *torch.autograd.grad(out, leaves, grad)


def compute_again(group: Any, cases: Any) -> None:
    """Compare one attention in chunks inside a checkpoint, by policy and partitioner, with the whole one:
    results and messages."""
    generator = torch.Generator().manual_seed(1)
    for at, (policy, partition) in enumerate(cases):
        schedule = ("fetch", "allgather", "allgather")[at % 3]
        plan = make_plan(create_block_mask(causal(), 1, 1, S, S), group, schedule=schedule)
        whole = (torch.randn(B, 2, S, 8, generator=generator) for _ in range(4))
        tensors = [tritoncp.shard(x, plan, dim=2) for x in whole]
        gm = traced_passes(partial(sines_attend, plan, group), tensors)
        want = gm(*tensors)
        *_, tangent = gm.graph.find_nodes(op="placeholder")
        tangent.name = tangent.target = "tangents_1"
        tangent.meta["partitioner_tag"] = "is_backward"
        for node in gm.graph.nodes:
            if policy and node.op == "call_function" and not is_backward(node):
                node.meta |= {"recompute": policy, "ac_graph_id": 1}
        chunk(gm, "", dim="seq", chunks=CHUNKS)
        with Messages(group) as messages:
            got, kept = run_passes(gm, partition, tensors)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
        assert messages.count == 3 + (policy in COMPUTED_AGAIN), (policy, partition)
        rows = tensors[0].shape[2] // CHUNKS
        assert policy not in COMPUTED_AGAIN or all(x.shape[2] == rows for x in kept), (policy, partition)


@pytest.mark.long
@pytest.mark.parametrize(
    "cases",
    [CHECKPOINTS[6:7], pytest.param(CHECKPOINTS, marks=pytest.mark.long)],
    ids=["one policy", "all policies"],
)
def test_attention_that_a_checkpoint_computes_again_sends_its_keys_once_more(cases):
    """The checkpoint keeps only rows of chunks: no keys of all chunks, or of other ranks."""
    ranks.run(2, compute_again, cases)


class Checkpointed(torch.nn.Module):
    """A layer that a checkpoint without a policy computes again in the backward pass."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Tensor:
        return checkpoint(self.layer, *args, use_reentrant=False)


def run_inductor(group: Any) -> Result:
    """Compare a step of a model with a checkpointed layer, in chunks as inductor compiles them, with the
    whole's. Each operation is torch's: a C++ compiler would take minutes for those of the model."""
    models.Attention.mesh = group
    plan = make_plan(create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=8), group, schedule="allgather")
    torch.manual_seed(0)
    model: Any = models.Model(models.Shape())
    model.layers[0] = Checkpointed(model.layers[0])
    want, whole = step(group, model, model, plan)
    model.zero_grad()
    cut = Pass("layers.*", dim="seq", chunks=CHUNKS)
    options = {"joint_custom_pre_pass": cut, "fallback_by_default": True}
    with fresh_cache():
        call = torch.compile(model, fullgraph=True, options=options)
        results, parts = step(group, model, call, plan, "seq")
    assert want.keys() == results.keys()
    for name in want:
        torch.testing.assert_close(results[name], want[name], atol=2e-5, rtol=1e-4, msg=name)
    return Result((whole.count, whole.bytes), (parts.count, parts.bytes), cut.reports[0], [], "")


@pytest.mark.long
def test_inductor_compiles_chunks_of_a_checkpointed_layer_that_share_an_exchange() -> None:
    for result in ranks.run(2, run_inductor, timeout=600):
        assert result.report.exchanges == 2
        assert result.parts == result.whole
        assert result.whole[0] == 4  # keys forward, again for the backward pass; keys and gradients in it
