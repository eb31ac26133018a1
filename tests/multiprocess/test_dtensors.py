"""Tests of flex_attention and shard with DTensors, on a mesh of context and tensor parallelism."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask as torch_mask

from tests.multiprocess import ranks
from tritoncp import (
    Selection,
    SelectionAuxRequest,
    create_block_mask,
    document,
    flex_attention,
    make_plan,
    positions,
    prefix_lm,
    reshard,
    shard,
    unshard,
    varlen_attention,
)
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
    """Return the same for DTensors of the whole sequence, from which `shard` takes each rank's rows, in a
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


def every_way(group, compiled, all_pairs):
    """Return the results of DTensors by way and place: of all pairs, or each place with one way to shard."""
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
        ways = {
            "ordered": (tp, (place,), call, ordered, cp),
            "ordered, over both": (mesh, (Replicate(), place), call, ordered, cp),
            "natural, over both": (mesh, (Shard(2), place), call, natural, cp),
        }
        turn = [*OVER_TP].index(name)
        for way in ways if all_pairs else [[*ways][turn]]:
            results[way, name] = with_shard(*ways[way])
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    ("compiled", "all_pairs"),
    [(False, False), *(pytest.param(x, True, marks=pytest.mark.long) for x in (False, True))],
)
def test_dtensors_give_the_attention_of_the_whole_tensors(compiled, all_pairs):
    want = expected()
    for results in ranks.run(4, every_way, compiled, all_pairs):
        for way, got in results.items():
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-8, msg=str(way))


def selections(group):
    """Return out, probabilities and gradients of calls with selected keys, by the placement over the second
    dimension of the mesh and the heads of the selection."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    plan, (q, k, v, *_, grad) = make_plan(mask(), mesh["cp"], balancer=None), tensors()
    results = {}
    for name, place in OVER_TP.items():
        places = Shard(2), place
        for count in (1, KV_HEADS):
            is_single = place == Shard(1) and count == 1
            chosen = Selection(spread(drawn(count), mesh, Shard(2), Replicate() if is_single else place))
            leaves = [spread(x, mesh, *places) for x in (q, k, v)]
            out, aux = flex_attention(
                *leaves, plan, mesh=mesh["cp"], enable_gqa=True, selected=chosen,
                return_aux=SelectionAuxRequest(probabilities=True),
            )  # fmt: skip
            assert out.placements == places and (Partial() in aux.probabilities.placements) == is_single
            grads = torch.autograd.grad(out, leaves, spread(grad, mesh, *places))
            results[name, count] = [x.full_tensor() for x in (out, aux.probabilities, *grads)]
    return results


def drawn(heads):
    generator = torch.Generator().manual_seed(heads)
    return torch.stack([torch.randperm(S, generator=generator)[:20] for _ in range(B * heads * S)]).view(
        B, heads, S, 20
    )


@pytest.mark.long
def test_dtensors_select_keys_of_the_whole_sequence():
    want = {}
    for count in (1, KV_HEADS):
        q, k, v, *_, grad = tensors()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        chosen = Selection(drawn(count))
        visible = mask().to_dense(B, HEADS) & chosen.to_dense(S).repeat_interleave(HEADS // count, 1)
        out = dense_attention(*leaves, visible).out
        identity = torch.eye(S, dtype=q.dtype).expand(B, KV_HEADS, S, S)
        pairs = dense_attention(q, k, identity, visible).out.detach().unflatten(1, (count, -1)).sum(2)
        want[count] = [out.detach(), pairs.gather(3, chosen.indices), *torch.autograd.grad(out, leaves, grad)]
    for results in ranks.run(4, selections):
        for (name, count), got in results.items():
            for a, b in zip(got, want[count], strict=True):
                torch.testing.assert_close(a.detach(), b, rtol=0, atol=1e-8, msg=f"{name}, {count}")


def refusals(group):
    """Return each rank's errors of calls whose DTensors would need values of the whole tensors."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    q, plain = torch.randn(B, HEADS, S, DIM), torch.randn(B, HEADS, S, DIM)
    whole, heads, odd = (spread(x, mesh, Shard(1)) for x in (plain, q, torch.randn(B, 3, S, DIM)))
    plan, natural = (make_plan(mask(), mesh, balancer=balancer) for balancer in ("ptrr", None))
    part, weight = DTensor.from_local(plain, mesh, [Partial()]), torch.ones(DIM, DIM)
    table, ids, lengths = (
        spread(x, mesh, Replicate()) for x in (torch.ones(S), torch.zeros(S).long(), torch.tensor([40, 24]))
    )
    listed = torch_mask(lambda b, h, q, kv: q >= kv, 1, 1, S, S, "cpu")
    listed.kv_indices = spread(listed.kv_indices, mesh, Replicate())
    rows = shard(plain, plan, mesh, dim=2)
    local = spread(rows, mesh, Replicate()).detach()
    ends, packed = (
        torch.tensor([0, 40, S], dtype=torch.int32),
        spread(torch.randn(S, HEADS, DIM), mesh, Shard(2)),
    )

    def learned(score, b, h, q_idx, kv_idx):
        return score + table[q_idx]

    def attend_by(**options):
        return lambda: flex_attention(plain, plain, plain, **options)

    def same(x, *rest):
        return lambda: flex_attention(x, x, x, *rest)

    calls = {
        "a plain key": lambda: flex_attention(heads, plain, plain),
        "indices beside plain tensors": attend_by(selected=Selection(spread(drawn(1), mesh, Shard(2)))),
        "plain indices": lambda: flex_attention(heads, heads, heads, selected=Selection(drawn(1))),
        "indices by heads": lambda: flex_attention(
            heads, heads, heads, selected=Selection(spread(drawn(HEADS), mesh, Replicate()))
        ),
        "a plain query": lambda: flex_attention(plain, heads, heads),
        "a key placed otherwise": lambda: flex_attention(heads, part, heads),
        "the head dimension": same(spread(plain, mesh, Shard(3))),
        "the sequence without a mesh": same(spread(plain, mesh, Shard(2))),
        "partial sums": same(part),
        "uneven heads": same(odd),
        "the plan's ranks": lambda: flex_attention(local, local, local, None, plan, mesh=mesh),
        "an ordered plan": lambda: flex_attention(
            *[spread(plain, mesh, Shard(2))] * 3, None, plan, mesh=mesh
        ),
        "a mask of heads": same(whole, None, mask()),
        "a score_mod's capture": attend_by(score_mod=learned),
        "a score_mod's capture beside DTensors": same(spread(plain, mesh, Replicate()), learned),
        "a mask_mod's capture": lambda: create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], 1, 1, S, S),
        "ids of documents": attend_by(block_mask=document(ids=ids)),
        "lengths of documents": lambda: document(lengths=lengths),
        "a prefix": attend_by(block_mask=prefix_lm(lengths)),
        "lists of blocks": attend_by(block_mask=listed),
        "sinks": attend_by(sinks=spread(torch.ones(HEADS), mesh, Replicate())),
        "plain sinks": lambda: flex_attention(heads, heads, heads, sinks=torch.ones(HEADS)),
        "a parameter of expand=": lambda: flex_attention(
            plain, plain[:, :1], None, expand=(lambda x, w: (x @ w, x @ w), spread(weight, mesh, Replicate()))
        ),
        "positions": lambda: flex_attention(
            rows, rows, rows, None, plan, mesh=mesh, positions=spread(positions(plan), mesh, Replicate())
        ),
        "packed documents": lambda: varlen_attention(packed, packed, packed, ends, causal=True),
        "ends of documents": lambda: varlen_attention(
            *[torch.randn(S, HEADS, DIM)] * 3, lengths, causal=True
        ),
        "reshard": lambda: reshard(local, plan, natural, mesh, dim=2),
        "unshard": lambda: unshard(local, plan, mesh, dim=2),
        "shard of a piece by an ordered plan": lambda: shard(spread(q, mesh, Shard(2)), plan, mesh, dim=2),
        "shard of partial sums": lambda: shard(part, plan, mesh, dim=2),
    }
    return {name: ranks.attempt(call) for name, call in calls.items()}


@pytest.mark.long
def test_a_dtensor_whose_call_needs_the_whole_is_refused_by_name_on_every_rank():
    first, second = ranks.run(2, refusals)
    for name, error in first.items():
        assert isinstance(error, str) and isinstance(second[name], str), name
        assert re.match(
            r"(TypeError|ValueError): .*(DTensor|differs between heads, and heads are sharded)", error
        )
        assert re.search(r"pass|give|use a mesh|redistribute|capture the whole", error), error
        assert error == second[name]
