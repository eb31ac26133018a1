"""Calls with wrong arguments: the error of each, the argument as its message names it, and the remedy."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import tritoncp
from tritoncp import causal
from tritoncp.api import validate
from tritoncp.api.attention import flex_attention
from tritoncp.api.plan_cache import plan_in_order
from tritoncp.api.plans import make_plan
from tritoncp.api.reshard import unshard
from tritoncp.api.shards import positions, shard
from tritoncp.distributed import groups

S = 32
sizes = validate.ShardSizes.of


def x(*shape, **options):
    return torch.zeros(shape or (1, 2, S, 16), **options)


def elsewhere():
    """Make a tensor on a device without kernels; it has no values."""
    with FakeTensorMode():
        return torch.empty(1, 2, S, 16, device="mps")


def whole(mod=None, batch=1, heads=1, length=S):
    return tritoncp.create_block_mask(mod or causal(), batch, heads, length, length, BLOCK_SIZE=16)


def call(q=None, k=None, v=None, *rest, **options):
    q = x() if q is None else q
    k = q if k is None else k
    return flex_attention(q, k, k if v is None else v, *rest, **options)


def plan(world_size=2, rank=0, **options):
    return make_plan(whole(**options), world_size=world_size, rank=rank)


def learned_mask():
    weight = torch.zeros(S, requires_grad=True)
    return torch_block_mask(lambda b, h, q, kv: weight[q] >= weight[kv].detach(), 1, 1, S, S, device="cpu")


def lower():
    return torch_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)


def sliced():
    return lower()[:, :, 0]


def shards(mask, q):
    return tritoncp.simulate(2).flex_attention([q] * 2, [q] * 2, [q] * 2, block_mask=mask)


def exchanged(name, heads, rows):
    """The message and the remedy of a tensor [B, S, H, D]."""
    message = f"{name} has {heads} heads and {rows} rows, and the mask is for {heads} rows: "
    return message + r"\[batch, heads, sequence, head dim\]", rf"pass {name}\.transpose\(1, 2\)$"


NO_LENGTHS = "has no lengths, and a plan needs Q_LEN and KV_LEN"
TYPE_ERRORS = {
    "no tensor": (lambda: call(q=[1.0]), "query is a list", r"\[batch, heads, sequence"),
    "a scale in words": (lambda: call(scale="0.5"), "scale='0.5'", "a number is needed"),
    "aux as a flag": (lambda: call(return_aux=True),
        "return_aux is a bool", r"return_aux=AuxRequest\(lse=True\)"),
    "options as a list": (lambda: call(kernel_options=[1]), r"kernel_options is \[1\]", "a dict"),
    "options by number": (lambda: call(kernel_options={1: 2}), "{1: 2}", "a dict of names"),
    "dropout": (lambda: call(dropout_p=0.1), "dropout_p", "unexpected keyword"),
    "mask_mod in fourth place": (lambda: call(None, None, None, lambda b, h, q, kv: q >= kv),
        "this is a mask_mod", r"create_block_mask\(mask_mod"),
    "with a default": (lambda: call(None, None, None, lambda b, h, q, kv, w=3: q - kv < w),
        "this is a mask_mod", r"create_block_mask\(mask_mod"),
    "mask_mod in fifth place": (lambda: call(None, None, None, None, lambda b, h, q, kv: q >= kv),
        "block_mask is a function", "make it with create_block_mask"),
    "dense mask": (lambda: call(None, None, None, torch.ones(S, S).bool()),
        "is a Tensor", r"create_block_mask\(lambda b, h, q, kv: mask\[q, kv\]"),
    "dense mask, fifth": (lambda: call(None, None, None, None, torch.ones(S, S).bool()),
        "block_mask is a Tensor", "create_block_mask"),
    "two masks": (lambda: call(None, None, None, whole(), whole()), "two masks", "fourth place"),
    "two meshes": (lambda: call(None, None, None, whole(), 3, mesh=4), "two meshes", "one of them"),
    "no mask": (lambda: call(None, None, None, "causal"), "is a str", "score_mod, a mask or a Plan"),
    "after a score_mod": (lambda: call(None, None, None, lambda s, b, h, q, kv: s, 3),
        "is a int", "a mesh by name, mesh="),
    "plan of a plan": (lambda: make_plan(plan()), "already", "where the mask goes"),
    "mesh": (lambda: groups.group_of("cp"), "got a str", "a DeviceMesh, a ProcessGroup or None"),
    "unshard by a closed form": (lambda: unshard(x(), causal(), dim=2),
        r"causal\(\) does not say", "create_block_mask"),
    "shard by a list": (lambda: shard(x(), [1], dim=2), "got a list", r"make_plan\(block_mask, mesh\)"),
    "shard of a list": (lambda: shard([1.0], plan(), dim=0), "got a list", "a tensor"),
    "a fraction of a rank": (lambda: make_plan(whole(), world_size=2.0),
        r"world_size=2\.0", "an int is needed"),
    "a simulated fraction": (lambda: tritoncp.simulate("2"), "world_size='2'", "an int is needed"),
    "positions as a list": (lambda: call(None, None, None, whole(), positions=list(range(S))),
        "positions is a list", r"positions\(plan\)"),
    "plan of a closed form": (lambda: make_plan(causal(), world_size=2),
        rf"causal\(\) {NO_LENGTHS}", r"create_block_mask\(causal\(\), None, None, Q_LEN, KV_LEN\), mesh\)$"),
    "plan of a function": (lambda: make_plan(lambda b, h, q, kv: q >= kv, world_size=2),
        f"mask_mod {NO_LENGTHS}", r"create_block_mask\(mask_mod, None, None, Q_LEN, KV_LEN\), mesh\)$"),
    "plan of None": (lambda: make_plan(None, world_size=2),
        "None has no lengths", r"full_mask\(Q_LEN, KV_LEN"),
    "documents": (lambda: positions(plan(), [3]), r"got \[3\]", r"a tensor .* document\("),
}  # fmt: skip
VALUE_ERRORS = {
    "three dimensions": (lambda: call(x(2, S, 16)), r"query is \(2, 32, 16\)", "unsqueeze"),
    "integers": (lambda: call(x(dtype=torch.int64)), "query is torch.int64", r"query\.to"),
    "float8": (lambda: call(x(dtype=torch.float8_e5m2)), "torch.float8_e5m2", "bfloat16, float16"),
    "mixed dtypes": (lambda: call(x(), x(dtype=torch.float64)),
        "query is torch.float32 on cpu, key is torch.float64 on cpu", r"key\.to\(query\)"),
    "mixed devices": (lambda: call(x(), x(), x(device="meta")),
        "value is torch.float32 on meta", r"value\.to\(query\)"),
    "nowhere to run": (lambda: call(elsewhere()), "query is on mps", "move it to one of these"),
    "nested": (lambda: call(torch.nested.nested_tensor([x(2, 4, 8), x(2, 4, 8)], layout=torch.jagged)),
        "query is a nested tensor", r"pack the documents.*document\(lengths"),
    "head dim": (lambda: call(x(1, 2, S, 264)), "head dim 264", "1 to 256.*smaller heads"),
    "heads": (lambda: call(x(1, 3, S, 16), x(1, 2, S, 16)), "3 query heads and 2 key", "multiple"),
    "gqa": (lambda: call(x(1, 4, S, 16)[:, :4], x()), "4 query heads and 2", "enable_gqa=True"),
    "batch": (lambda: call(x(3, 2, S, 16), x(2, 2, S, 16)), r"query \(3, 2.*key \(2, 2", "B or 1"),
    "key and value": (lambda: call(x(), x(), x(1, 2, 8, 16)), r"value \(1, 2, 8, 16\)", "Skv"),
    "lse twice": (lambda: call(return_lse=True, return_aux=AuxRequest(lse=True)),
        "both given", r"return_aux=AuxRequest\(lse=True\) alone"),
    "a learned scale": (lambda: call(scale=torch.tensor(0.5, requires_grad=True)),
        "scale is a tensor that requires grad", r"query \* scale, and pass scale=1\.0"),
    "no heads": (lambda: call(x(1, 0, S, 16)), r"query has no heads: \(1, 0,", r"\[batch, heads"),
    "sparse": (lambda: call(x().to_sparse(), x(), x()), "torch.sparse_coo", r"query\.to_dense\(\)"),
    "a flag in words": (lambda: call(kernel_options={"deterministic": "no"}),
        "deterministic='no'", "True or False is needed"),
    "exchanged": (lambda: call(x(1, S, 2, 16), None, None, whole()), *exchanged("query", 32, 2)),
    "exchanged, torch's mask": (lambda: call(x(1, S, 2, 16), block_mask=lower()),
        *exchanged("query", 32, 2)),
    "exchanged keys": (lambda: call(x(), x(1, S, 2, 16), None, whole()), *exchanged("key", 32, 2)),
    "exchanged shards of a plan": (lambda: shards(plan(), x(1, S // 2, 4, 16)), *exchanged("query", 16, 4)),
    "exchanged shards": (lambda: shards(whole(), x(1, S // 2, 4, 16)), *exchanged("query", 16, 4)),
    "as many heads as rows": (lambda: shards(plan(), x(1, S // 2, S, 16)), "32 rows", "it was not sharded"),
    "a whole sequence each": (lambda: shards(whole(), x(1, S // 2, S, 16)),
        "32, 32", "every rank holds the whole sequence"),
    "another length": (lambda: call(x(1, 4, 16, 16), None, None, whole()),
        "16 rows, the mask is for 32", "make the mask for this length"),
    "as many rows as shared heads": (lambda: call(x(1, S, 16, 16), x(1, 8, 16, 16), None, whole()),
        "32 query heads and 8 key heads without enable_gqa", "enable_gqa=True"),
    "one row more": (lambda: call(x(1, 2, S + 1, 16), None, None, lower()),
        "33 rows, the mask is for 32", "make the mask for this length"),
    "longer mask": (lambda: call(None, None, None, whole(length=48)),
        "32 rows, the mask is for 48", "make the mask for this length, or pass mesh="),
    "batch of the mask": (lambda: call(x(2, 2, S, 16), None, None, whole(batch=3)),
        "batch 3 and 1 heads, the query has 2 and 2", "1 or equal"),
    "heads of the mask": (lambda: call(None, None, None, whole(heads=3)),
        "batch 1 and 3 heads", "1 or equal"),
    "learned": (lambda: call(None, None, None, learned_mask()), "requires grad", r"\.detach\(\)"),
    "without its mask_mod": (lambda: call(None, None, None, lower()[0]),
        "torch drops a slice's mask_mod", "pass the whole"),
    "sliced": (lambda: call(None, None, None, sliced()), "slice of another", "global mask"),
    "local mask": (lambda: plan_in_order(whole(length=16), 1, [16, 16], [16, 16], 0),
        r"\[16, 16\] rows long, 32 together, the mask is for 16",
        r"one rank's local mask, or every rank holds the whole.*shard\(query, mask, mesh"),
    "key lengths": (lambda: plan_in_order(whole(), 1, [16, 16], [16, 8], 0),
        r"key shards.*\[16, 8\].*24", "r-th piece"),
    "unsharded": (lambda: validate.check_sizes(plan(), sizes(x(), x())),
        r"query has 32 rows \(that is all of them: it was not sharded\); rank 0's shard has 16",
        r"shard\(query, plan, dim=2, side='q'\).*global mask, not a local one"),
    "wrong shard": (lambda: validate.check_sizes(plan(), sizes(x(1, 2, 16, 16), x(1, 2, 8, 16))),
        "key has 8 rows", r"shard\(key, plan, dim=2, side='kv'\)"),
    "no mesh": (lambda: call(x(1, 2, 16, 16), None, None, plan()),
        "for 2 ranks, the mesh has 1", "pass the mesh it was made with"),
    "placed rows": (lambda: validate.check_sizes(plan(mod=lambda b, h, q, kv: q >= kv * b, batch=3),
        sizes(x(2, 2, 16, 16), x(2, 2, 16, 16))),
        "the mask is for batch 3", "1 or equal"),
    "order": (lambda: validate.check_positions(plan(4), torch.arange(8)[None]),
        r"positions is \(1, 8\).*\[1, 16\]", r"positions\(plan\)"),
    "another order": (lambda: validate.check_positions(plan(2, 1, length=64), torch.arange(32, 64)),
        "row 0 holds position 32 by positions=, but rank 1 of a ptrr placement holds 16",
        "shard every tensor with this plan.*pass the plan, not the mask"),
    "masks of different sizes": (lambda: make_plan({"a": whole(), "b": whole(length=64)}, world_size=2),
        "32 x 32 in blocks of 16 x 16, 64 x 64", "same lengths and BLOCK_SIZE"),
    "rank": (lambda: make_plan(whole(), world_size=2, rank=2), "rank 2", "world of 2"),
    "side": (lambda: shard(x(), plan(), dim=2, side="k"), "side='k'", '"q" for queries or "kv"'),
    "shard of a shard": (lambda: shard(x(1, 2, 16, 16), plan(), dim=2),
        r"got \(1, 2, 16, 16\)", "a global tensor is needed"),
    "unshard of the whole": (lambda: unshard(x(), plan(1, length=16), dim=2),
        r"got \(1, 2, 32, 16\)", "this rank's shard"),
    "unshard without the mesh": (lambda: unshard(x(1, 2, 16, 16), plan(), dim=2),
        "for 2 ranks, the mesh has 1", "x, plan, mesh"),
    "padding that the dtype changes": (lambda: shard(x(dtype=torch.uint8), plan(), dim=2, pad=-100),
        "pad=-100 is no value of torch.uint8", r"shard\(x\.long\(\), plan, dim=\.\.\., pad=-100\)"),
    "padding of bools": (lambda: shard(x().bool(), plan(), dim=2, pad=2), "pad=2", "torch.bool"),
    "no such dimension": (lambda: shard(x(), plan(), dim=4), "no dimension 4", "dim= is that"),
    "gradient of unshard": (lambda: unshard(x(requires_grad=True), plan(1), dim=2),
        "got grad=None", "grad='sum'.*grad='slice'"),
    "documents in pieces": (lambda: positions(plan(), torch.arange(S) % 2),
        "in several pieces", "each in one"),
}  # fmt: skip
MISTAKES = TYPE_ERRORS | VALUE_ERRORS
