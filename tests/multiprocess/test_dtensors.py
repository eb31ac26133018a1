"""Tests of flex_attention and shard with DTensors, on a mesh of context and tensor parallelism."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.multiprocess import ranks
from tritoncp import create_block_mask, flex_attention, make_plan, positions, shard
from tritoncp.reference.dense import dense_attention

B, HEADS, KV_HEADS, S, DIM, BLOCK = 2, 4, 2, 64, 8, 16
OVER_TP = {"heads": Shard(1), "batch": Shard(0), "replicated": Replicate()}

pytestmark = pytest.mark.usefixtures("cpu_engine", "in_pieces")


def tensors():
    """Return q, k, v, sinks, the table of a score_mod [B, heads], and the gradient of out."""
    generator = torch.Generator().manual_seed(5)
    shapes = (B, HEADS, S, DIM), *[(B, KV_HEADS, S, DIM)] * 2, (HEADS,), (B, HEADS), (B, HEADS, S, DIM)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def score_of(table):
    return lambda s, b, h, q, kv: s + table[b, h] * (q - kv) / S


def mask():
    """Return a mask that differs between batch rows and heads."""
    reach = torch.tensor([8, 64, 17, 40])
    return create_block_mask(
        lambda b, h, q, kv: (q - kv < reach[h]) & ((q >= kv) | (b == 1)), B, HEADS, S, S, BLOCK_SIZE=BLOCK
    )


def expected():
    q, k, v, sinks, table, grad = tensors()
    leaves = [x.requires_grad_() for x in (q, k, v, sinks, table)]
    out, lse, _ = dense_attention(q, k, v, mask(), score_of(table), sinks=sinks)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def spread(x, mesh, *placements):
    return distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_(x.is_floating_point())


def attend(q, k, v, table, sinks, plan, mesh):
    options = {"enable_gqa": True, "return_lse": True, "sinks": sinks, "mesh": mesh}
    out, lse = flex_attention(q, k, v, score_of(table), plan, **options)
    return out, lse.detach()  # torch.compile asks for gradients of all results, or of none


def sums(gradient, mesh, places):
    """Return the gradient of a plain tensor as a DTensor: a sum over the ranks that share the query."""
    return DTensor.from_local(gradient, mesh, [x if x == Replicate() else Partial() for x in places])


def without_shard(mesh, places, call, plan, context=None):
    """Return out, lse and gradients of DTensors that are passed as they are."""
    q, k, v, sinks, table, grad = tensors()
    leaves = [spread(x, mesh, *places) for x in (q, k, v)]
    sinks = spread(sinks, mesh, *[Shard(0) if x == Shard(1) else Replicate() for x in places])
    out, lse = call(*leaves, table.requires_grad_(), sinks, plan, context)
    assert out.placements == lse.placements == places and out.shape == q.shape
    *grads, of_table = torch.autograd.grad(out, [*leaves, sinks, table], spread(grad, mesh, *places))
    return [x.full_tensor().detach() for x in (out, lse, *grads, sums(of_table, mesh, places))]


def with_shard(mesh, places, call, plan, context):
    """Return the same of DTensors that hold the whole sequence, of which `shard` takes each rank's rows, in a
    plan's order: DTensors over the mesh of tensor parallelism, the last dimension of ``mesh``."""
    q, k, v, sinks, table, grad = tensors()
    whole, rows = [spread(x, mesh, *places) for x in (q, k, v)], spread(grad, mesh, *places)
    local = [shard(x, plan, context, dim=2) for x in (*whole, rows)]
    tp, of_tp = local[0].device_mesh, places[-1:]
    assert all(x.placements == of_tp for x in local) and tp.mesh_dim_names == ("tp",)
    sinks = spread(sinks, tp, Replicate())
    out, lse = call(*local[:3], table.requires_grad_(), sinks, plan, context)
    *grads, of_table = torch.autograd.grad(out, [*whole, sinks, table], local[3])
    parts = [x.full_tensor().detach() for x in (out, lse, *grads, sums(of_table, tp, of_tp))]
    results = [x.new_zeros(*x.shape[:2], S, *x.shape[3:]) for x in parts[:2]]
    for row, at in enumerate(positions(plan).expand(B, -1)):
        for x, part in zip(results, parts):
            x[row, :, at] = part[row]
    for x in (*results, *parts[2 if mesh.ndim == 1 else 5 :]):
        dist.all_reduce(x, group=context.get_group())
    return results + parts[2:]


def every_way(group, compiled):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    tp, cp = mesh["tp"], mesh["cp"]
    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    ordered, natural, alone = make_plan(mask(), cp), make_plan(mask(), cp, balancer=None), make_plan(mask())
    assert ordered.balancer != "natural" and not torch.equal(*positions(ordered))
    results = {}
    for name, place in OVER_TP.items():
        torch._dynamo.reset()  # placements are constants of graphs
        results["alone", name] = without_shard(tp, (place,), call, alone)
        results["sequence and", name] = without_shard(mesh, (Shard(2), place), call, natural, cp)
        if compiled:
            continue
        results["ordered", name] = with_shard(tp, (place,), call, ordered, cp)
        results["ordered, over both", name] = with_shard(mesh, (Replicate(), place), call, ordered, cp)
        results["natural, over both", name] = with_shard(mesh, (Shard(2), place), call, natural, cp)
    return results


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_dtensors_give_the_attention_of_the_whole_tensors(compiled):
    want = expected()
    for results in ranks.run(4, every_way, compiled):
        for way, got in results.items():
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-8, msg=str(way))
